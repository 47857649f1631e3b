"""Kernels that TensorRT-RTX compiles at run time, kept between processes; over stand-ins, since they need a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fakes import make_tensorrt
from tests.fakes._pybind import LINES

import trt_warmcache as twc
from trt_warmcache.events import Events
from trt_warmcache.keys import Kind
from trt_warmcache.runtime_cache import RuntimeCache, key_for
from trt_warmcache.testing import FakeBuilder

GPU = twc.Target(gpu="NVIDIA RTX 4090", compute_capability="8.9", sm_count=128, driver="580.1", uuid="GPU-1")


class Kernels:
    """Stands for ``IRuntimeCache``: lines of text; takes only those of its own driver."""

    def __init__(self, driver: str) -> None:
        self.driver, self.lines = driver, set[str]()

    def serialize(self) -> bytes:
        return "\n".join([self.driver, *sorted(self.lines)]).encode()

    def deserialize(self, blob: bytes) -> bool:
        driver, *lines = blob.decode().split("\n")
        if driver != self.driver:
            return False
        self.lines |= set(lines)
        return True


class Config:
    """Stands for ``IRuntimeConfig``."""

    def __init__(self, driver: str) -> None:
        self.driver, self.attached = driver, None

    def create_runtime_cache(self) -> Kernels:
        return Kernels(self.driver)

    def set_runtime_cache(self, cache: Any) -> None:
        self.attached = cache


class CudaEngine:
    """Stands for ``ICudaEngine`` of TensorRT-RTX; a run compiles kernels that are not there."""

    def __init__(self, driver: str = "580.1") -> None:
        self.driver = driver

    def create_runtime_config(self) -> Config:
        return Config(self.driver)

    @staticmethod
    def run(config: Any, *kernels: str) -> int:
        missing = set(kernels) - config.attached.lines
        config.attached.lines |= missing
        return len(missing)


@pytest.fixture
def store(tmp_path: Path) -> twc.LocalStore:
    return twc.LocalStore(tmp_path / "s")


def cache(store: twc.Store, events: Events | None = None, driver: str = "580.1") -> RuntimeCache:
    key = key_for("tensorrt_rtx", "1.7.1.116", GPU)
    return RuntimeCache(store, key, CudaEngine(driver), events=events or Events())


def test_second_process_compiles_nothing(store: twc.LocalStore) -> None:
    """Kernels saved after the first run are taken over by the next process, and nothing is written again."""
    with cache(store) as first:
        assert not first.warm
        assert CudaEngine.run(first.config, "a", "b") == 2
    with cache(store) as second:
        assert second.warm
        assert CudaEngine.run(second.config, "a", "b") == 0
    (entry,) = store.entries(Kind.RUNTIME)
    assert entry.digest == key_for("tensorrt_rtx", "1.7.1.116", GPU).digest
    modified = entry.modified
    with cache(store) as third:
        assert CudaEngine.run(third.config, "a") == 0
    assert next(iter(store.entries(Kind.RUNTIME))).modified == modified
    with cache(store) as fourth:
        assert CudaEngine.run(fourth.config, "a", "c") == 1
    with cache(store) as fifth:
        assert CudaEngine.run(fifth.config, "a", "b", "c") == 0


def test_two_finish_together(store: twc.LocalStore) -> None:
    """Of two processes the one with more kernels stays, whoever is first."""
    small, large = cache(store), cache(store)
    CudaEngine.run(small.config, "a")
    CudaEngine.run(large.config, "b", "c")
    large.save()
    small.save()
    assert CudaEngine.run(cache(store).config, "b", "c") == 0


def test_what_is_not_taken(store: twc.LocalStore) -> None:
    """Kernels that the library refuses are told and replaced; damaged ones never reach it; errors save nothing."""
    with cache(store) as first:
        CudaEngine.run(first.config, "a")
    events = Events()
    with cache(store, events, driver="590.0") as other:
        assert not other.warm
        assert events.counts()["runtime_dropped.mismatch"] == 1
        CudaEngine.run(other.config, "a")
    with cache(store, driver="590.0") as again:
        assert again.warm
    manifest = store.manifest(Kind.RUNTIME, key_for("tensorrt_rtx", "1.7.1.116", GPU).digest)
    assert manifest is not None
    blob = manifest.blob("runtime")
    path = next(Path(store.url.removeprefix("file://")).rglob(blob.hex))
    path.chmod(0o600)
    path.write_bytes(b"x" * blob.size)
    events = Events()
    damaged = cache(store, events, driver="590.0")
    assert not damaged.warm
    assert events.counts()["runtime_dropped.damaged"] == 1
    failing = cache(store)
    CudaEngine.run(failing.config, "z")
    failing.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert store.manifest(Kind.RUNTIME, manifest.key) is None


def test_endless_collisions_are_told(store: twc.LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody else is always first the kernels are not stored, and that is counted."""
    events = Events()
    kernels = cache(store, events)
    with cache(store) as other:
        CudaEngine.run(other.config, "a")
    stored = store.manifest(Kind.RUNTIME, key_for("tensorrt_rtx", "1.7.1.116", GPU).digest)
    monkeypatch.setattr(store, "publish", lambda *args, **more: stored)
    CudaEngine.run(kernels.config, "a", "b", "c")
    assert kernels.save() is None
    assert events.counts()["runtime_dropped.contention"] == 1


def test_identity() -> None:
    """GPU, driver and library version split it; the plan's compute capabilities, CUDA and memory do not."""
    base = key_for("tensorrt_rtx", "1.7.1.116", GPU)
    for change, same in (
        ({"driver": "590.0"}, False),
        ({"gpu": "NVIDIA RTX 5090"}, False),
        ({"sm_count": 100}, False),
        ({"cuda": "13.1"}, True),
        ({"memory_bytes": 1 << 30}, True),
        ({"uuid": "GPU-2"}, True),
        ({"compute_capabilities": ("8.6",)}, True),
    ):
        other = key_for("tensorrt_rtx", "1.7.1.116", twc.Target(**{**GPU.to_json(), **change}))
        assert (other.digest == base.digest) is same, change
    assert key_for("tensorrt_rtx", "1.8.0.1", GPU).digest != base.digest
    with pytest.raises(twc.ConfigError, match="must say gpu, compute_capability, driver"):
        key_for("tensorrt_rtx", "1.7.1.116", twc.Target())


def test_classic_has_none(store: twc.LocalStore) -> None:
    """A classic engine is refused with the reason, on every line."""
    for line in LINES:
        module = make_tensorrt(line)
        engine: Any = module._fake.new(module._fake.classes["ICudaEngine"])
        with pytest.raises(twc.ConfigError, match="only TensorRT-RTX has a kernel cache"):
            RuntimeCache(store, key_for("tensorrt_rtx", "1.7", GPU), engine, events=Events())


def test_through_a_manager(tmp_path: Path) -> None:
    """manager.runtime_cache finds store, version and GPU by itself."""
    with twc.EngineManager(tmp_path / "s", builder=FakeBuilder(), memo=twc.DigestMemo(None)) as manager:
        with manager.runtime_cache(CudaEngine(), target=GPU) as kernels:
            assert CudaEngine.run(kernels.config, "a") == 1
        with manager.runtime_cache(CudaEngine(), target=GPU) as kernels:
            assert kernels.warm
