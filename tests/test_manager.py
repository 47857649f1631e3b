"""EngineManager over fake builders: what a call promises, whatever builds."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support import PROFILE, tiny_model

import trt_warmcache as twc
from trt_warmcache.builders import BuildInputs, BuildOutput
from trt_warmcache.events import EventKind
from trt_warmcache.keys import Kind
from trt_warmcache.stores._base import blob_name, manifest_name
from trt_warmcache.testing import FakeBuilder, FlakyStore
from trt_warmcache.testing._stores import sample_entry


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model in a folder of its own."""
    path = tmp_path / "models" / "tiny.onnx"
    path.parent.mkdir()
    path.write_bytes(tiny_model())
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store's folder."""
    return tmp_path / "store"


def make(store: Any, builder: Any = None, **options: Any) -> twc.EngineManager:
    """A manager that remembers digests only in memory, so that tests do not share the user's memo."""
    return twc.EngineManager(store, builder=builder or FakeBuilder(), memo=twc.DigestMemo(None), **options)


# ---- hit, miss, build -------------------------------------------------------------------------------------------


def test_build_then_hit(root: Path, model: Path) -> None:
    """The first call builds, every later one hits: same manager, other managers, any number of times."""
    builder = FakeBuilder()
    with make(root, builder) as manager:
        first = manager.get(model, profiles=PROFILE, name="tiny", version="7")
        assert first.outcome is twc.Outcome.BUILT
        plan = bytes(first.plan)
        for _ in range(10):
            engine = manager.get(model, profiles=PROFILE)
            assert engine.outcome is twc.Outcome.HIT
            assert bytes(engine.plan) == plan
    for _ in range(10):
        with make(root, builder) as other:
            assert other.get(model, profiles=PROFILE).outcome is twc.Outcome.HIT
    assert builder.builds == 1


def test_engine_facts(root: Path, model: Path) -> None:
    """An engine carries its key, its manifest and the time of each stage; its plan is read-only and mapped."""
    with make(root) as manager:
        built = manager.get(
            model, profiles=PROFILE, name="face", version="7", options=twc.BuildOptions(optimization_level=3)
        )
        hit = manager.get(model, profiles=PROFILE, options=twc.BuildOptions(optimization_level=3))
        assert {"hash", "lookup", "wait", "build", "publish"} <= built.timings.keys()
        assert {"hash", "lookup", "verify"} == hit.timings.keys()
        assert hit.plan.readonly
        assert built.plan.readonly
        assert hit.key == built.key
        assert hit.key.digest == hit.manifest.key
        assert len(hit.key.digest) == 64
        assert hit.key.parts["options.optimization_level"] == 3
        assert built.key.name == "face_7_portable_1x4-2x4-8x4"
        assert hit.manifest.labels.name == "face"
        assert hit.manifest.provenance.build_seconds > 0
        assert hit.deserialize()["options"] == {"optimization_level": 3}


def test_hit_reads_once_and_writes_nothing(model: Path) -> None:
    """A hit is one manifest and one blob read, and not a single write, lock or listing; a miss publishes once."""
    store = FlakyStore(twc.MemoryStore())
    with make(store) as manager:
        manager.get(model, profiles=PROFILE)
        assert [call for call, _ in store.calls].count("create") == 1
        assert [call for call, _ in store.calls].count("put_blob") == 1
        store.calls.clear()
        manager.get(model, profiles=PROFILE)
    assert [call for call, _ in store.calls] == ["read", "fetch"]


def test_get_takes_a_request(root: Path, model: Path) -> None:
    """get(model, **fields) and get(EngineRequest(model, **fields)) are one call."""
    with make(root) as manager:
        request = twc.EngineRequest(model, profiles=PROFILE, name="a")
        assert manager.get(request).outcome is twc.Outcome.BUILT
        assert manager.get(model, profiles=PROFILE, name="a").outcome is twc.Outcome.HIT
        with pytest.raises(twc.ConfigError, match="not both"):
            manager.get(request, name="b")


def test_misspelt_fields(root: Path, model: Path) -> None:
    """A misspelt field is refused naming the nearest one, as TypeError, ValueError and ConfigError alike."""
    with make(root) as manager:
        for kind in (TypeError, ValueError, twc.ConfigError):
            with pytest.raises(kind, match="did you mean 'profiles'"):
                manager.get(model, profile=PROFILE)
        with pytest.raises(TypeError, match="did you mean 'optimization_level'"):
            twc.BuildOptions(optimisation_level=3)  # type: ignore[call-arg]


def test_lookup_never_builds(root: Path, model: Path) -> None:
    """lookup gives None for a miss and the engine for a hit, and builds nothing."""
    builder = FakeBuilder()
    with make(root, builder) as manager:
        assert manager.lookup(model, profiles=PROFILE) is None
        assert builder.builds == 0
        manager.get(model, profiles=PROFILE)
        found = manager.lookup(model, profiles=PROFILE)
        assert found is not None
        assert found.outcome is twc.Outcome.HIT


def test_key_touches_no_store(model: Path) -> None:
    """Deriving a key makes no store call at all."""
    store = FlakyStore(twc.MemoryStore())
    with make(store) as manager:
        manager.key(model, profiles=PROFILE)
    assert store.calls == []


def test_same_content_elsewhere_hits(root: Path, model: Path, tmp_path: Path) -> None:
    """Other folder, other name, bytes, ModelProto, relative path: the same engine."""
    import onnx

    copy = tmp_path / "elsewhere" / "other name.onnx"
    copy.parent.mkdir()
    copy.write_bytes(model.read_bytes())
    with make(root) as manager:
        manager.get(model, profiles=PROFILE)
        for same in (copy, model.read_bytes(), onnx.load(model), os.path.relpath(model), f"file://{model}"):
            assert manager.get(same, profiles=PROFILE).outcome is twc.Outcome.HIT


def test_equal_profiles_hit(root: Path, model: Path) -> None:
    """Tuples, lists, numpy ints, text: equal profiles, one build."""
    import numpy as np

    builder = FakeBuilder()
    with make(root, builder) as manager:
        for spelling in (
            {"x": ("1x4", "2x4", "8x4")},
            {"x": [(1, 4), (2, 4), (8, 4)]},
            {"x": tuple(np.array([n, 4]) for n in (1, 2, 8))},
            {"x": "1x4:2x4:8x4"},
            "x=1x4:2x4:8x4",
            [twc.ShapeProfile({"x": ((1, 4), (2, 4), (8, 4))})],
        ):
            manager.get(model, profiles=spelling)
    assert builder.builds == 1


def test_weights_count(root: Path, tmp_path: Path) -> None:
    """Two models that differ only in a weight never share an engine; nor does one overwritten in place."""
    path = tmp_path / "m.onnx"
    with make(root) as manager:
        path.write_bytes(tiny_model(weight=1.0))
        first = manager.get(path, profiles=PROFILE)
        path.write_bytes(tiny_model(weight=2.0))
        second = manager.get(path, profiles=PROFILE)
        assert (first.outcome, second.outcome) == (twc.Outcome.BUILT, twc.Outcome.BUILT)
        assert bytes(first.plan) != bytes(second.plan)


def test_dynamic_model_needs_profiles(root: Path, model: Path) -> None:
    """A model with dynamic inputs and no profile: the error lists the inputs that need one."""
    with make(root) as manager, pytest.raises(twc.ConfigError, match=r"x \(float32 nx4\)"):
        manager.get(model)


def test_one_manager_two_targets(root: Path, model: Path) -> None:
    """The target may be given per request; each gets its own plan."""
    with make(root) as manager:
        plans = [
            bytes(manager.get(model, profiles=PROFILE, target=twc.Target(compute_capability=cc, gpu="g")).plan)
            for cc in ("8.6", "8.9", "8.6", "8.9")
        ]
    assert plans[0] == plans[2]
    assert plans[1] == plans[3]
    assert plans[0] != plans[1]


def test_shown_in_a_notebook(root: Path, model: Path) -> None:
    """A cell that ends in an engine, an explanation or a report shows a few readable lines, not every field."""
    with make(root) as manager:
        engine = manager.get(model, profiles=PROFILE)
        assert re.fullmatch(r"<Engine built: \S+ \([0-9a-f]{12}\), \d+ B in \d\.\d{3} s>", repr(engine))
        shown: list[str] = []
        printer = SimpleNamespace(text=shown.append)
        manager.explain(model, profiles=PROFILE)._repr_pretty_(printer, False)
        manager.warm([twc.EngineRequest(model, profiles=PROFILE)])._repr_pretty_(printer, False)
        assert shown[0].startswith("Hit: ")
        assert shown[1].startswith("hit ")


# ---- policy -----------------------------------------------------------------------------------------------------


def test_on_miss_raise(root: Path, model: Path) -> None:
    """A miss under on_miss='raise' builds nothing, at once, and says what comes nearest: input, dimension, range."""
    builder = FakeBuilder()
    with make(root, builder) as manager:
        manager.get(model, profiles=PROFILE)
        started = time.monotonic()
        with pytest.raises(twc.MissError, match=r"input 'x' dimension 0: 10 not in 1\.\.8"):
            manager.get(model, profiles={"x": ("1x4", "2x4", "10x4")}, policy=twc.Policy(on_miss="raise"))
        assert time.monotonic() - started < 5
    assert builder.builds == 1


def test_on_miss_fallback(root: Path, model: Path) -> None:
    """A miss under on_miss='fallback' does not block: it builds behind the caller's back, once, and the next call hits."""
    builder = FakeBuilder(seconds=0.3)
    with make(root, builder, policy=twc.Policy(on_miss="fallback")) as manager:
        with pytest.raises(twc.MissError) as first:
            manager.get(model, profiles=PROFILE)
        with pytest.raises(twc.MissError) as second:
            manager.get(model, profiles=PROFILE)
        assert isinstance(first.value.pending, Future)
        assert first.value.pending is second.value.pending
        assert first.value.pending.result(10).outcome is twc.Outcome.BUILT
        assert manager.get(model, profiles=PROFILE).outcome is twc.Outcome.HIT
    assert builder.builds == 1


def test_fallback_serves_a_wider_profile(root: Path, model: Path) -> None:
    """Under on_miss='fallback' a stored wider profile serves at once."""
    with make(root) as manager:
        manager.get(model, profiles=PROFILE)
        engine = manager.get(model, profiles={"x": "2x4"}, policy=twc.Policy(on_miss="fallback"))
        assert engine.outcome is twc.Outcome.COVERED


def test_cover_wider(root: Path, model: Path) -> None:
    """With cover='wider' the smallest stored cover serves, nothing is built or overwritten; else each range is its own."""
    builder = FakeBuilder()
    with make(root, builder) as manager:
        wide = manager.get(model, profiles={"x": ("1x4", "8x4", "64x4")})
        narrow = manager.get(model, profiles={"x": ("1x4", "4x4", "8x4")})
        wider = twc.Policy(cover="wider")
        engine = manager.get(model, profiles={"x": ("2x4", "2x4", "4x4")}, policy=wider)
        assert engine.outcome is twc.Outcome.COVERED
        assert engine.key.digest == narrow.key.digest
        engine = manager.get(model, profiles={"x": ("2x4", "2x4", "16x4")}, policy=wider)
        assert engine.key.digest == wide.key.digest
        assert bytes(engine.plan) == bytes(wide.plan)
        assert builder.builds == 2
        assert manager.get(model, profiles={"x": ("2x4", "2x4", "128x4")}, policy=wider).outcome is twc.Outcome.BUILT
        assert manager.get(model, profiles={"x": ("2x4", "2x4", "4x4")}).outcome is twc.Outcome.BUILT


def test_rehash_finds_damage_that_stat_hides(root: Path, model: Path) -> None:
    """With rehash the plan is verified at each use, whatever the memo says."""
    with make(root, policy=twc.Policy(rehash=True)) as manager:
        manager.get(model, profiles=PROFILE)
        store = manager.store
        assert isinstance(store, twc.LocalStore)
        time.sleep(0.05)
        engine = manager.get(model, profiles=PROFILE)
        assert store.fetch(engine.manifest.blob("plan"), rehash=True).verified_now


def test_refresh_replaces(root: Path, model: Path) -> None:
    """refresh builds although an entry is stored and puts the new one in its place; without one it just builds."""
    builder = FakeBuilder()
    refresh = twc.Policy(refresh=True)
    with make(root, builder) as manager:
        assert manager.get(model, profiles=PROFILE, policy=refresh).outcome is twc.Outcome.BUILT
        builder.size = 5000
        engine = manager.get(model, profiles=PROFILE, policy=refresh)
        assert engine.outcome is twc.Outcome.BUILT
        assert engine.stored
        hit = manager.get(model, profiles=PROFILE)
        assert hit.outcome is twc.Outcome.HIT
        assert hit.plan.nbytes == 5000
        assert builder.builds == 2
        (root / "trtwc-1" / manifest_name(Kind.ENGINE, hit.key.digest)).write_bytes(b"damaged")
        assert manager.get(model, profiles=PROFILE, policy=refresh).stored
        assert manager.get(model, profiles=PROFILE).outcome is twc.Outcome.HIT


# ---- failure ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "output",
    [None, BuildOutput(plan=b""), BuildOutput(plan=None), BuildOutput(plan="/a/path"), b"plan"],
    ids=["None", "empty", "no plan", "a path", "bare bytes"],
)
def test_builder_that_returns_nothing(root: Path, model: Path, output: Any) -> None:
    """A builder that returns no plan is a BuildError, and nothing is stored."""

    class Broken(FakeBuilder):
        def build(self, inputs: BuildInputs) -> BuildOutput:
            return output  # type: ignore[no-any-return]

    with make(root, Broken()) as manager:
        with pytest.raises(twc.BuildError):
            manager.get(model, profiles=PROFILE)
        assert list(manager.store.entries(Kind.ENGINE)) == []


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), MemoryError(), SystemExit(3), twc.BuildError("no"), OSError("odd")]
)
def test_failing_build_leaves_no_entry_and_no_lock(root: Path, model: Path, error: BaseException) -> None:
    """However a build ends, there is no entry, the lock is free, and the next call builds within a second."""
    builder = FakeBuilder(error=error)
    with make(root, builder) as manager:
        with pytest.raises((type(error), twc.BuildError)) as caught:
            manager.get(model, profiles=PROFILE)
        if isinstance(error, OSError):
            assert caught.value.__cause__ is error
        assert list(manager.store.entries(Kind.ENGINE)) == []
        builder.error = None
        started = time.monotonic()
        assert manager.get(model, profiles=PROFILE).outcome is twc.Outcome.BUILT
        assert time.monotonic() - started < 1


def test_build_seconds(root: Path, model: Path) -> None:
    """A build over the policy's limit is cancelled at a step, as BuildTimeout, and leaves no entry."""
    with make(root, FakeBuilder(seconds=5, steps=100), policy=twc.Policy(build_seconds=0.2)) as manager:
        started = time.monotonic()
        with pytest.raises(twc.BuildTimeout, match=r"0\.2 s"):
            manager.get(model, profiles=PROFILE)
        assert time.monotonic() - started < 2
        assert list(manager.store.entries(Kind.ENGINE)) == []


def test_request_timeout(root: Path, model: Path) -> None:
    """A request's timeout bounds the whole call."""
    with (
        make(root, FakeBuilder(seconds=5, steps=100)) as manager,
        pytest.raises(twc.BuildTimeout, match=r"timeout of 0\.2"),
    ):
        manager.get(model, profiles=PROFILE, timeout=0.2)


def test_model_changed_while_building(root: Path, model: Path) -> None:
    """A model replaced while its engine is built gives an error, not an entry under the old model's key."""

    def replace(_: BuildInputs) -> None:
        model.write_bytes(tiny_model(weight=9.0))

    builder = FakeBuilder(on_build=replace)
    with make(root, builder) as manager:
        with pytest.raises(twc.ModelError, match="changed while"):
            manager.get(model, profiles=PROFILE)
        assert list(manager.store.entries(Kind.ENGINE)) == []


def test_link_made_while_building(root: Path, model: Path, tmp_path: Path) -> None:
    """A hard link made to the model during the build changes its status but not its bytes: no reason to fail."""
    builder = FakeBuilder(on_build=lambda _: os.link(model, tmp_path / "link.onnx"))
    with make(root, builder) as manager:
        assert manager.get(model, profiles=PROFILE).stored


def test_wrong_device_is_not_published(root: Path, model: Path) -> None:
    """A builder that reports another compute capability than asked: refused, both named, nothing stored."""

    class Elsewhere(FakeBuilder):
        def build(self, inputs: BuildInputs) -> BuildOutput:
            return BuildOutput(plan=b"plan", target={"compute_capability": "8.9"})

    with make(root, Elsewhere(), target=twc.Target(gpu="H200", compute_capability="9.0")) as manager:
        with pytest.raises(twc.BuildError, match=r"9\.0.*8\.9"):
            manager.get(model, profiles=PROFILE)
        assert list(manager.store.entries(Kind.ENGINE)) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["put_blob", "create"])
def test_engine_is_returned_when_it_cannot_be_stored(model: Path, code: int, call: str) -> None:
    """A store that fails to take the engine costs the entry, not the engine; the reason is there and counted."""
    from trt_warmcache.stores._errors import from_os_error

    def fail(name: str, _object: str) -> None:
        if name == call:
            raise from_os_error(OSError(code, os.strerror(code)), doing="write", store="there")

    store = FlakyStore(twc.MemoryStore(), fail)
    with make(store) as manager:
        engine = manager.get(model, profiles=PROFILE)
        assert engine.outcome is twc.Outcome.BUILT
        assert not engine.stored
        assert engine.publish_error is not None
        assert errno.errorcode[code] in engine.publish_error.message
        assert engine.deserialize()
        counts = manager.counters()
        assert counts["publish_failed"] == 1
        assert counts[f"publish_failed.{engine.publish_error.reason}"] == 1


def test_error_of_a_miss_does_not_read_a_whole_store(tmp_path: Path, model: Path) -> None:
    """A forbidden miss over a large or slow store is an error at once; how much was compared is told."""

    class Slow(twc.LocalStore):
        def manifest(self, kind: Kind, digest: str) -> twc.Manifest | None:
            time.sleep(0.01)
            return super().manifest(kind, digest)

    store = Slow(tmp_path)
    for number in range(60):
        store.publish(*sample_entry(number))
    with twc.EngineManager(store, builder=FakeBuilder(), memo=twc.DigestMemo(None)) as manager:
        manager.key(model, profiles=PROFILE)  # what is loaded once does not count
        started = time.monotonic()
        with pytest.raises(twc.MissError, match=r"Compared with \d+ entries nearby"):
            manager.get(model, profiles=PROFILE, policy=twc.Policy(on_miss="raise"))
        assert time.monotonic() - started < 0.4  # all of them would take 0.6 s
        assert manager.explain(model, profiles=PROFILE).complete


def test_store_that_drops_writes(model: Path) -> None:
    """A store that takes an entry and does not show it is found out after the first build."""

    class Forgetful(twc.MemoryStore):
        def create(self, name: str, data: Any) -> bool:
            return True

    with make(Forgetful()) as manager:
        engine = manager.get(model, profiles=PROFILE)
        assert not engine.stored
        assert engine.publish_error is not None
        assert "does not show it" in engine.publish_error.message


def test_store_errors_are_not_misses(model: Path) -> None:
    """A store that cannot be read raises by default and is never built around; by policy it degrades, counted apart."""

    def fail(name: str, _object: str) -> None:
        if name == "read":
            raise twc.StoreError("forbidden", reason=twc.StoreReason.DENIED, store="there")

    builder = FakeBuilder()
    with make(FlakyStore(twc.MemoryStore(), fail), builder) as manager:
        with pytest.raises(twc.StoreError) as caught:
            manager.get(model, profiles=PROFILE)
        assert caught.value.reason == "denied"
        assert builder.builds == 0
        with pytest.raises(twc.StoreError):
            manager.lookup(model, profiles=PROFILE)
        engine = manager.get(model, profiles=PROFILE, policy=twc.Policy(store_errors="degrade"))
        assert engine.outcome is twc.Outcome.BUILT
        assert manager.counters()["store_error.denied"] >= 3


# ---- damage -----------------------------------------------------------------------------------------------------


def damage_ways(data: bytes) -> dict[str, bytes | None]:
    """What can become of a file."""
    return {
        "empty": b"",
        "half": data[: len(data) // 2],
        "flipped": data[:20] + bytes([data[20] ^ 0x40]) + data[21:],
        "longer": data + b"\0",
        "garbage": b"\x80\x04K\x01.",
        "gone": None,
    }


@pytest.mark.parametrize("way", list(damage_ways(b"x" * 30)))
@pytest.mark.parametrize("victim", ["manifest", "blob"])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh manager", "same manager"])
def test_damage_is_healed(root: Path, model: Path, way: str, victim: str, fresh: bool) -> None:
    """Whatever happens to any one file of an entry: quarantined, told, rebuilt; never served and never a crash."""
    builder = FakeBuilder()
    events: list[twc.Event] = []
    manager = make(root, builder, hooks=[events.append])
    plan = bytes(manager.get(model, profiles=PROFILE).plan)
    time.sleep(0.03)
    manifest = manager.get(model, profiles=PROFILE).manifest
    name = manifest_name(Kind.ENGINE, manifest.key) if victim == "manifest" else blob_name(manifest.blob("plan"))
    path = root / "trtwc-1" / name
    damaged = damage_ways(path.read_bytes())[way]
    if damaged is None:
        path.unlink()
    else:
        path.write_bytes(damaged)
    if fresh:
        manager.close()
        manager = make(root, builder, hooks=[events.append])
    with manager:
        gone = victim == "manifest" and way == "gone"
        engine = manager.get(model, profiles=PROFILE)
        assert engine.outcome is twc.Outcome.BUILT
        assert bytes(engine.plan) == plan
        assert manager.get(model, profiles=PROFILE).outcome is twc.Outcome.HIT
        assert builder.builds == 2
        kinds = [event.kind for event in events]
        assert (EventKind.QUARANTINED in kinds) != gone
        assert bool(list((root / "trtwc-1" / "quarantine").glob("*"))) != gone


def test_swapped_files_are_found(root: Path, model: Path, tmp_path: Path) -> None:
    """Blobs or manifests of two entries exchanged: neither serves the other's plan."""
    other = tmp_path / "other.onnx"
    other.write_bytes(tiny_model(weight=5.0))
    builder = FakeBuilder()
    with make(root, builder) as manager:
        a, b = manager.get(model, profiles=PROFILE), manager.get(other, profiles=PROFILE)
        plans = bytes(a.plan), bytes(b.plan)
        base = root / "trtwc-1"
        for names in (
            [blob_name(engine.manifest.blob("plan")) for engine in (a, b)],
            [manifest_name(Kind.ENGINE, engine.key.digest) for engine in (a, b)],
        ):
            first, second = (base / name for name in names)
            one, two = first.read_bytes(), second.read_bytes()
            first.write_bytes(two)
            second.write_bytes(one)
            for path, plan in ((model, plans[0]), (other, plans[1])):
                engine = manager.get(path, profiles=PROFILE)
                assert engine.outcome is twc.Outcome.BUILT
                assert bytes(engine.plan) == plan


@pytest.mark.parametrize("call", ["lookup", "get"])
def test_damage_where_building_is_off(root: Path, model: Path, call: str) -> None:
    """A damaged entry that will not be rebuilt is an IntegrityError, once; set aside, it then is a miss."""
    with make(root, policy=twc.Policy(on_miss="raise")) as manager:
        manifest = manager.get(model, profiles=PROFILE, policy=twc.Policy()).manifest
        (root / "trtwc-1" / blob_name(manifest.blob("plan"))).write_bytes(b"x")
        with pytest.raises(twc.IntegrityError, match="bytes, its manifest says"):
            getattr(manager, call)(model, profiles=PROFILE)
        assert manager.counters()["quarantined.truncated"] == 1
        assert manager.lookup(model, profiles=PROFILE) is None
        with pytest.raises(twc.MissError):
            manager.get(model, profiles=PROFILE)


def test_damage_while_somebody_builds(root: Path, model: Path) -> None:
    """A reader that finds damage does not touch the entry while somebody holds its lock."""
    with make(root) as manager:
        manifest = manager.get(model, profiles=PROFILE).manifest
        (root / "trtwc-1" / blob_name(manifest.blob("plan"))).write_bytes(b"x")
        lock = manager.store.lock(manifest.key)
        assert lock is not None
        assert lock.try_acquire()
        with pytest.raises(twc.IntegrityError):
            manager.lookup(model, profiles=PROFILE)
        assert manager.store.manifest(Kind.ENGINE, manifest.key) == manifest
        lock.release()


def test_entry_of_a_later_format_is_left_alone(root: Path, model: Path) -> None:
    """A manifest of another major format is no damage: told, not quarantined; the engine is built and returned."""
    with make(root) as manager:
        key = manager.get(model, profiles=PROFILE).key
        path = root / "trtwc-1" / manifest_name(Kind.ENGINE, key.digest)
        path.write_text('{"format": "trt_warmcache/2", "anything": []}')
        engine = manager.get(model, profiles=PROFILE)
        assert engine.outcome is twc.Outcome.BUILT
        assert not engine.stored
        assert path.read_text().startswith('{"format": "trt_warmcache/2"')


def test_older_key_schema_is_a_clean_miss(root: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries keyed by another recipe are misses with an explanation, never exceptions."""
    with make(root) as manager:
        manager.get(model, profiles=PROFILE)
    monkeypatch.setattr("trt_warmcache.keys.KEY_SCHEMA", 2)
    monkeypatch.setattr("trt_warmcache.manifest.KEY_SCHEMA", 2)
    from trt_warmcache.resolve import derive

    derive.cache_clear()
    with make(root) as manager:
        assert manager.lookup(model, profiles=PROFILE) is None
        assert not manager.explain(model, profiles=PROFILE).hit
        assert manager.get(model, profiles=PROFILE).outcome is twc.Outcome.BUILT
    derive.cache_clear()


def test_no_unpickling_anywhere() -> None:
    """The package contains no code that would execute what it reads."""
    for path in Path(twc.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for word in ("import pickle", "import marshal", "import shelve", "eval(", "exec("):
            assert word not in text, (path, word)


# ---- rejected by the loader -------------------------------------------------------------------------------------


def test_rejected_plan_is_rebuilt_once(root: Path, model: Path) -> None:
    """A stored plan that TensorRT rejects is set aside and built anew once; if that is rejected too, both reasons show."""
    builder = FakeBuilder()
    with make(root, builder) as manager:
        manager.get(model, profiles=PROFILE)
        calls = []

        def reject_first(plan: memoryview) -> str:
            calls.append(1)
            if len(calls) == 1:
                raise twc.IncompatibleError("version tag does not match", about_plan=True)
            return "engine"

        builder.loader = reject_first
        assert manager.get(model, profiles=PROFILE).deserialize() == "engine"
        assert builder.builds == 2

        def reject_all(plan: memoryview) -> None:
            raise twc.IncompatibleError(f"no good, attempt {len(calls)}", about_plan=True)

        builder.loader = reject_all
        with pytest.raises(twc.IncompatibleError, match=r"rejected.*and so was one built anew"):
            manager.get(model, profiles=PROFILE).deserialize()
        assert builder.builds == 3


@pytest.mark.parametrize("reason", ["no device", "out of memory"])
def test_machine_trouble_leaves_the_entry(root: Path, model: Path, reason: str) -> None:
    """No driver, no memory: the error is passed on and the entry stays."""
    builder = FakeBuilder()
    with make(root, builder) as manager:
        manager.get(model, profiles=PROFILE)

        def fail(plan: memoryview) -> None:
            raise twc.IncompatibleError(reason)

        builder.loader = fail
        with pytest.raises(twc.IncompatibleError, match=reason):
            manager.get(model, profiles=PROFILE).deserialize()
        assert builder.builds == 1
        assert manager.lookup(model, profiles=PROFILE) is not None


# ---- threads ----------------------------------------------------------------------------------------------------


def test_threads_share_one_build(root: Path, model: Path) -> None:
    """Sixteen threads, one manager: one build, one BUILT, fifteen JOINED, plans equal and independently closable."""
    builder = FakeBuilder(seconds=0.2)
    with make(root, builder) as manager, ThreadPoolExecutor(16) as pool:
        engines = list(pool.map(lambda _: manager.get(model, profiles=PROFILE), range(16)))
        assert builder.builds == 1
        outcomes = [engine.outcome for engine in engines]
        assert outcomes.count(twc.Outcome.BUILT) == 1
        assert set(outcomes) <= {twc.Outcome.BUILT, twc.Outcome.JOINED, twc.Outcome.HIT}
        engines[0].close()
        assert len({bytes(engine.plan) for engine in engines[1:]}) == 1


def test_managers_of_one_process_share_one_build(root: Path, model: Path) -> None:
    """Eight managers in eight threads on one folder: one build."""
    builder = FakeBuilder(seconds=0.2)

    def get(_: int) -> twc.Outcome:
        with make(root, builder) as manager:
            return manager.get(model, profiles=PROFILE).outcome

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(get, range(8)))
    assert builder.builds == 1


def test_joiners_get_the_error_too(root: Path, model: Path) -> None:
    """A build that fails for everyone fails once, and everyone is told."""
    builder = FakeBuilder(seconds=0.3, error=twc.BuildError("unsupported"))
    with make(root, builder) as manager, ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(manager.get, model, profiles=PROFILE) for _ in range(6)]
        assert all("unsupported" in str(future.exception()) for future in futures)
    assert builder.builds == 1


def test_impatient_leader_does_not_fail_the_others(root: Path, model: Path) -> None:
    """The building thread's own timeout is its own affair: one of those who wait takes over."""
    builder = FakeBuilder(seconds=0.6, steps=30)
    with make(root, builder) as manager, ThreadPoolExecutor(2) as pool:
        hasty = pool.submit(manager.get, model, profiles=PROFILE, timeout=0.2)
        time.sleep(0.05)
        patient = pool.submit(manager.get, model, profiles=PROFILE)
        assert isinstance(hasty.exception(), twc.BuildTimeout)
        assert patient.result().outcome is twc.Outcome.BUILT


def test_waiting_is_bounded_and_told(root: Path, model: Path) -> None:
    """Waiting for another manager's build ends at the policy's limit, naming the holder, after events on the way."""
    slow = FakeBuilder(seconds=1.5, steps=50)
    events: list[twc.Event] = []
    with make(root, slow) as first, ThreadPoolExecutor(1) as pool:
        building = pool.submit(first.get, model, profiles=PROFILE)
        time.sleep(0.2)
        policy = twc.Policy(wait_seconds=0.4, slow_build_seconds=0.1)
        with make(root, FakeBuilder(), policy=policy, hooks=[events.append]) as second:
            with pytest.raises(twc.BuildTimeout, match=f"process {os.getpid()}"):
                second.get(model, profiles=PROFILE)
            assert [event.detail["owner"] for event in events if event.kind is EventKind.WAIT]
            impatient = twc.Policy(wait_seconds=0.1, on_wait="build")
            assert second.get(model, profiles=PROFILE, policy=impatient).outcome is twc.Outcome.BUILT
        # The first builder finishes later and adopts what the other published: one plan for everybody.
        assert building.result().outcome is twc.Outcome.BUILT
        assert first.counters()["publish_lost"] == 1


def test_two_identities_two_builds(root: Path, model: Path, tmp_path: Path) -> None:
    """Four threads and identities A, A, B, A: two builds."""
    other = tmp_path / "b.onnx"
    other.write_bytes(tiny_model(weight=3.0))
    builder = FakeBuilder(seconds=0.1)
    with make(root, builder) as manager, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda path: manager.get(path, profiles=PROFILE), [model, model, other, model]))
    assert builder.builds == 2


def test_without_locks(root: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel locks: still an engine, one warning per manager, counted."""
    import fcntl

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with make(root) as manager:
        assert manager.get(model, profiles=PROFILE).outcome is twc.Outcome.BUILT
        manager.get(model, profiles={"x": "3x4"})
        assert manager.counters()["lock_unavailable"] == 1
        assert manager.get(model, profiles=PROFILE).outcome is twc.Outcome.HIT


def test_lock_that_everybody_gets(root: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lock that excludes nobody the store stays right: eight builders, one plan in force for all."""
    monkeypatch.setattr("trt_warmcache.stores._local._FileLock.try_acquire", lambda self: True)
    builder = FakeBuilder(seconds=0.1)

    def get(_: int) -> bytes:
        with make(root, builder) as manager:
            return bytes(manager.get(model, profiles=PROFILE).plan)

    with ThreadPoolExecutor(8) as pool:
        plans = set(pool.map(get, range(8)))
    assert len(plans) == 1
    assert builder.builds > 1
    with make(root) as manager:
        assert manager.get(model, profiles=PROFILE).outcome is twc.Outcome.HIT


# ---- telling ----------------------------------------------------------------------------------------------------


def test_events_in_order(root: Path, model: Path) -> None:
    """A build tells: miss, start, progress, end, published; a hit tells one thing."""
    events: list[twc.Event] = []
    with make(root, hooks=[events.append]) as manager:
        manager.get(model, profiles=PROFILE, name="tiny")
        kinds = [event.kind.value for event in events if event.kind is not EventKind.BUILD_PROGRESS]
        assert kinds == ["miss", "build_start", "build_end", "published"]
        progress = [event for event in events if event.kind is EventKind.BUILD_PROGRESS]
        assert [event.detail["step"] for event in progress] == [0, 1, 2, 3]
        assert progress[0].detail["total"] == 4
        assert all(event.label.startswith("tiny_") and len(event.key) == 64 for event in events)
        events.clear()
        manager.get(model, profiles=PROFILE)
        assert [event.kind.value for event in events] == ["hit"]


def test_slow_builds_are_told(root: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A build longer than slow_build_seconds warns at each interval, also when the builder reports nothing."""
    caplog.set_level(logging.INFO, "trt_warmcache")
    with make(root, FakeBuilder(seconds=0.5, steps=1), policy=twc.Policy(slow_build_seconds=0.1)) as manager:
        manager.get(model, profiles=PROFILE)
        assert 2 <= manager.counters()["build_slow"] <= 5
    assert any("build_start" in record.message for record in caplog.records)
    assert any(record.levelno == logging.WARNING and "still building" in record.message for record in caplog.records)


def test_failing_hook_is_contained(root: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A hook that raises is logged and costs nothing else."""

    def broken(event: twc.Event) -> None:
        raise RuntimeError("hook broke")

    with make(root, hooks=[broken]) as manager:
        assert manager.get(model, profiles=PROFILE).outcome is twc.Outcome.BUILT
    assert "hook broke" in caplog.text


def test_nothing_is_printed(root: Path, model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The library writes to neither standard output nor standard error."""
    with make(root) as manager:
        manager.get(model, profiles=PROFILE)
        manager.get(model, profiles=PROFILE)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_warnings_are_not_printed_either(root: Path, model: Path) -> None:
    """An application that configures no logging sees nothing on standard error, not even of a failed build."""
    code = """
import sys
import trt_warmcache as twc
from trt_warmcache.testing import FakeBuilder
manager = twc.EngineManager(sys.argv[1], builder=FakeBuilder(error=twc.BuildError("no")), memo=twc.DigestMemo(None))
try:
    manager.get(sys.argv[2], profiles={"x": "2x4"})
except twc.BuildError:
    pass
"""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code, root, model], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


@pytest.mark.parametrize("stage", ["lookup", "build", "publish", "verify"])
def test_time_is_booked_where_it_was_spent(model: Path, stage: str) -> None:
    """A delay in one stage shows in that stage's seconds and in no other's."""
    slow = {"lookup": "read", "publish": "create", "verify": "fetch"}.get(stage)
    delayed: list[int] = []

    def delay(call: str, _name: str) -> None:
        if call == slow and not delayed:
            delayed.append(1)
            time.sleep(0.3)

    store = FlakyStore(twc.MemoryStore())
    builder = FakeBuilder(seconds=0.3 if stage == "build" else 0.0)
    with make(store, builder) as manager:
        if stage == "verify":
            manager.get(model, profiles=PROFILE)
        store.before = delay
        timings = manager.get(model, profiles=PROFILE).timings
    assert timings[stage] >= 0.29
    assert all(seconds < 0.2 for name, seconds in timings.items() if name != stage), timings


# ---- explain ----------------------------------------------------------------------------------------------------


def test_explain(root: Path, model: Path, tmp_path: Path) -> None:
    """Each planted difference is named with both values, nearest entry first; a hit is called a hit."""
    with make(root) as manager:
        empty = manager.explain(model, profiles=PROFILE)
        assert not empty.hit
        assert empty.differences == ()
        assert "No engine is stored" in str(empty)
        manager.get(model, profiles=PROFILE, options=twc.BuildOptions(tf32=False), recipe="r1")
        hit = manager.explain(model, profiles=PROFILE, options=twc.BuildOptions(tf32=False), recipe="r1")
        assert hit.hit
        assert "Hit" in str(hit)
        other = tmp_path / "other.onnx"
        other.write_bytes(tiny_model(weight=2.0))
        for change, part, wanted, stored in (
            ({"options": twc.BuildOptions(tf32=True)}, "options.tf32", True, False),
            ({"recipe": "r2"}, "recipe", "r2", "r1"),
            ({"target": twc.Target(compute_capabilities=["8.6"], os="windows")}, "target.os", "windows", "linux"),
        ):
            fields: dict[str, Any] = {
                "profiles": PROFILE,
                "options": twc.BuildOptions(tf32=False),
                "recipe": "r1",
                **change,
            }
            found = manager.explain(model, **fields)
            assert not found.hit
            assert any((d.part, d.wanted, d.stored) == (part, wanted, stored) for d in found.differences), found
            assert part in str(found)
        found = manager.explain(other, profiles=PROFILE, options=twc.BuildOptions(tf32=False), recipe="r1")
        assert [d.part for d in found.differences] == ["model"]


def test_explain_after_a_library_upgrade(root: Path, model: Path) -> None:
    """The usual question after an upgrade, why is everything cold, is answered by the version."""
    with make(root, FakeBuilder(library="10.13.3")) as manager:
        manager.get(model, profiles=PROFILE)
    with make(root, FakeBuilder(library="10.14.1")) as manager:
        found = manager.explain(model, profiles=PROFILE)
        assert [(d.part, d.wanted, d.stored) for d in found.differences] == [("builder.version", "10.14.1", "10.13.3")]


# ---- warm -------------------------------------------------------------------------------------------------------


def requests(model: Path, tmp_path: Path) -> list[twc.EngineRequest]:
    """Three good requests and two bad ones."""
    return [
        twc.EngineRequest(model, profiles=PROFILE, name="good"),
        twc.EngineRequest(tmp_path / "missing.onnx", name="missing"),
        twc.EngineRequest(model, profiles={"x": "1x4"}),
        twc.EngineRequest(model, name="no profile"),
        twc.EngineRequest(model, profiles={"x": "2x4"}),
    ]


def test_warm_reports_every_request(root: Path, model: Path, tmp_path: Path) -> None:
    """warm never stops at a failure: one row each, in order, failures with their reason; later gets build nothing."""
    builder = FakeBuilder()
    seen: list[twc.WarmRow] = []
    asked = requests(model, tmp_path)
    with make(root, builder) as manager:
        report = manager.warm(asked, progress=seen.append)
        assert [row.outcome for row in report] == ["built", "failed", "built", "failed", "built"]
        assert not report.ok
        assert [type(row.error).__name__ for row in report.failures] == ["ModelError", "ConfigError"]
        assert "missing.onnx" in str(report.rows[1].error)
        assert len(seen) == len(report) == 5
        assert builder.builds == 3
        for number in (0, 2, 4):
            assert manager.get(asked[number]).outcome is twc.Outcome.HIT
        again = manager.warm([asked[0], asked[2]])
        assert again.ok
        assert [row.outcome for row in again] == ["hit", "hit"]
    assert "missing" in str(report)
    assert [row["outcome"] for row in report.to_json()] == [row.outcome for row in report]


def test_warm_in_other_processes(root: Path, model: Path) -> None:
    """warm with a process pool: workers open the same folder themselves, and errors come back whole."""
    asked = [twc.EngineRequest(str(model), profiles=PROFILE), twc.EngineRequest(str(model))]
    with twc.EngineManager(str(root), builder=FakeProcessBuilder(), memo=twc.DigestMemo(None)) as manager:
        import multiprocessing

        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
            report = manager.warm(asked, executor=pool)
        assert [row.outcome for row in report] == ["built", "failed"]
        assert isinstance(report.rows[1].error, twc.ConfigError)
        assert manager.get(asked[0]).outcome is twc.Outcome.HIT


class FakeProcessBuilder(FakeBuilder):
    """A fake builder that can travel to another process."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_guard": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._guard = threading.Lock()


def test_warm_elsewhere_needs_a_store_that_travels(model: Path) -> None:
    """A store object cannot be opened by other processes, and the error says what to pass instead."""
    with (
        make(twc.MemoryStore()) as manager,
        ProcessPoolExecutor(1) as pool,
        pytest.raises(twc.ConfigError, match="path or URL"),
    ):
        manager.warm([twc.EngineRequest(model, profiles=PROFILE)], executor=pool)


def test_asyncio(root: Path, model: Path) -> None:
    """aget and awarm leave the event loop running while the engine is built."""

    async def main() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticker = asyncio.create_task(tick())
        engine = await manager.aget(model, profiles=PROFILE)
        assert engine.outcome is twc.Outcome.BUILT
        report = await manager.awarm([twc.EngineRequest(model, profiles=PROFILE)])
        assert report.ok
        ticker.cancel()
        return ticks

    with make(root, FakeBuilder(seconds=0.3)) as manager:
        assert asyncio.run(main()) > 10


# ---- life -------------------------------------------------------------------------------------------------------


def test_close(root: Path, model: Path) -> None:
    """close unmaps, is idempotent, and a closed manager refuses work with a sentence."""
    manager = make(root)
    manager.get(model, profiles=PROFILE)
    engine = manager.get(model, profiles=PROFILE)
    manager.close()
    manager.close()
    with pytest.raises(ValueError, match="released"):
        bytes(engine.plan)
    assert "trtwc-1/blobs" not in Path("/proc/self/maps").read_text()
    with pytest.raises(twc.ConfigError, match="closed"):
        manager.get(model, profiles=PROFILE)


def test_views_outlive_close(root: Path, model: Path) -> None:
    """An array over the plan stays readable after the engine was closed."""
    import numpy as np

    with make(root) as manager:
        manager.get(model, profiles=PROFILE)
        engine = manager.get(model, profiles=PROFILE)
        array = np.frombuffer(engine.plan, dtype=np.uint8)
        engine.close()
        assert bytes(array[:8]) == b"fakeplan"


def test_construction_touches_nothing(tmp_path: Path) -> None:
    """Making a manager creates no folder, opens no file and looks for no GPU; bad arguments are refused there."""
    twc.EngineManager(tmp_path / "never")
    assert not (tmp_path / "never").exists()
    wrong: tuple[dict[str, Any], ...] = (
        {"builder": "tensor_rt"},
        {"builder": 3},
        {"target": "8.6"},
        {"policy": {"on_miss": "raise"}},
    )
    for arguments in wrong:
        with pytest.raises(twc.ConfigError):
            twc.EngineManager(tmp_path, **arguments)
    with pytest.raises(twc.ConfigError):
        twc.EngineManager(17)


def test_awkward_folders(tmp_path: Path) -> None:
    """Model and store under folders with CJK, accents, spaces, emoji, percent and hash: round trip."""
    folder = tmp_path / "模型 é 🚀 100% #1"
    folder.mkdir()
    path = folder / "モデル.onnx"
    path.write_bytes(tiny_model())
    with make(folder / "store") as manager:
        manager.get(path, profiles=PROFILE)
        engine = manager.get(path, profiles=PROFILE)
        assert engine.outcome is twc.Outcome.HIT
        assert engine.key.name.startswith("モデル_")


def test_long_names(root: Path, tmp_path: Path) -> None:
    """A name of 250 characters is no obstacle to storing."""
    path = tmp_path / ("m" * 245 + ".onnx")
    path.write_bytes(tiny_model())
    with make(root) as manager:
        engine = manager.get(path, profiles=PROFILE, name="n" * 250)
        assert engine.stored
        assert len(f"{engine.key.name}-{engine.key.digest[:12]}.engine".encode()) <= 200


def test_store_is_relocatable(root: Path, model: Path, tmp_path: Path) -> None:
    """A copy of the tree made with any tool is a working store."""
    import shutil

    with make(root) as manager:
        manager.get(model, profiles=PROFILE)
    shutil.copytree(root, tmp_path / "copy")
    shutil.rmtree(root)
    builder = FakeBuilder()
    with make(tmp_path / "copy", builder) as manager:
        assert manager.get(model, profiles=PROFILE).outcome is twc.Outcome.HIT
    assert builder.builds == 0


def test_timing_cache_is_kept_and_merged(root: Path, model: Path) -> None:
    """A builder with a timing cache gets the stored one and leaves the union behind, under a key of its own."""
    from trt_warmcache.builders import BuilderCapabilities

    seen: list[bytes | None] = []
    builder = FakeBuilder(
        capabilities=BuilderCapabilities(timing_cache=True, progress=True),
        on_build=lambda inputs: seen.append(inputs.timing),
    )
    with make(root, builder) as manager:
        manager.get(model, profiles=PROFILE)
        manager.get(model, profiles={"x": "1x4"})
        entries = list(manager.store.entries(Kind.TIMING))
        assert len(entries) == 1
        manifest = manager.store.manifest(Kind.TIMING, entries[0].digest)
        assert manifest is not None
        lines = bytes(manager.store.fetch(manifest.blob("timing")).view).split()
    assert seen[0] is None
    assert seen[1] is not None
    assert len(lines) == 2


def test_damaged_timing_cache_is_dropped(root: Path, model: Path) -> None:
    """A damaged timing cache costs its measurements, never a build; it is told, set aside and begun anew."""
    from trt_warmcache.builders import BuilderCapabilities

    builder = FakeBuilder(capabilities=BuilderCapabilities(timing_cache=True))
    with make(root, builder) as manager:
        manager.get(model, profiles=PROFILE)
        entry = next(manager.store.entries(Kind.TIMING))
        manifest = manager.store.manifest(Kind.TIMING, entry.digest)
        assert manifest is not None
        path = root / "trtwc-1" / blob_name(manifest.blob("timing"))
        path.write_bytes(b"x" + path.read_bytes())
        assert manager.get(model, profiles={"x": "1x4"}).outcome is twc.Outcome.BUILT
        assert manager.counters()["timing_dropped.damaged"] == 1
        assert len(list(manager.store.entries(Kind.TIMING))) == 1
