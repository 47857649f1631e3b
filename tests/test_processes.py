"""Many processes on one store, real builds of a real model, and real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support import PROFILE, real_model, run_python, tiny_model

import trt_warmcache as twc
from trt_warmcache.keys import Kind
from trt_warmcache.stores._base import blob_name

#: What each process runs: wait for the gate, get the engine, report in one JSON line. A build leaves its pid behind.
WORKER = """
import hashlib, json, os, pathlib, sys, time
import trt_warmcache as twc
store, model, profile, gate, options = sys.argv[1:]
options = json.loads(options)
if "fake" in options:
    from trt_warmcache.testing import FakeBuilder
    builder = FakeBuilder(**options["fake"])
else:
    builder = "tensorrt_rtx"
def hook(event):
    if event.kind is twc.EventKind.BUILD_START:
        (pathlib.Path(gate).parent / f"building-{os.getpid()}-{event.key[:8]}").touch()
manager = twc.EngineManager(store, builder=builder, hooks=[hook], memo=twc.DigestMemo(None), policy=twc.Policy(**options.get("policy", {})))
(pathlib.Path(gate).parent / f"ready-{os.getpid()}").touch()
while not os.path.exists(gate):
    time.sleep(0.01)
started = time.monotonic()
for profile in json.loads(profile):
    engine = manager.get(model, profiles=profile)
print(json.dumps({"outcome": engine.outcome.value, "plan": hashlib.sha256(engine.plan).hexdigest(), "seconds": time.monotonic() - started}))
"""


@contextmanager
def workers(
    count: int, store: Path, model: Path, profiles: list[Any], scratch: Path, options: dict[str, Any] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that stand ready at a gate; opening it is up to :func:`go`."""
    scratch.mkdir()
    arguments = [str(store), str(model), json.dumps(profiles), str(scratch / "gate"), json.dumps(options or {})]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(count)
    ]
    try:
        deadline = time.monotonic() + 120
        while len(list(scratch.glob("ready-*"))) < count:
            assert time.monotonic() < deadline, "the workers did not start"
            assert all(worker.poll() is None for worker in started), [w.communicate()[1] for w in started if w.poll()]
            time.sleep(0.02)
        yield started
    finally:
        for worker in started:
            if worker.poll() is None:
                worker.kill()
            worker.communicate()


def go(scratch: Path) -> None:
    """Open the gate."""
    (scratch / "gate").touch()


def results(started: list[subprocess.Popen[str]], timeout: float = 120) -> list[dict[str, Any]]:
    """Each worker's line; any error fails the test with the worker's traceback."""
    rows = []
    for worker in started:
        out, err = worker.communicate(timeout=timeout)
        assert worker.returncode == 0, err
        rows.append(json.loads(out.splitlines()[-1]))
    return rows


def classifier() -> tuple[Path, dict[str, Any]]:
    """PP-OCRv4's angle classifier: small, real, built in under a second."""
    return (
        real_model("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx"),
        {"x": ("1x3x48x48", "4x3x48x48", "8x3x48x48")},
    )


@pytest.mark.slow
def test_64_processes_one_build(tmp_path: Path) -> None:
    """64 processes started together on an empty store and one real model: one build, 64 equal plans, no error."""
    model, profile = classifier()
    with workers(64, tmp_path / "store", model, [profile], tmp_path / "scratch") as started:
        go(tmp_path / "scratch")
        rows = results(started)
    assert len(list((tmp_path / "scratch").glob("building-*"))) == 1
    outcomes = [row["outcome"] for row in rows]
    assert outcomes.count("built") == 1
    assert set(outcomes) <= {"built", "joined", "hit"}
    assert len({row["plan"] for row in rows}) == 1


@pytest.mark.slow
def test_64_processes_with_the_builder_killed(tmp_path: Path) -> None:
    """The same with the builder killed by SIGKILL in mid-build: one of the others builds, nobody waits much longer."""
    model, profile = real_model("ddddocr", "common.onnx"), {"input1": ("1x1x64x64", "1x1x64x128", "1x1x64x256")}
    scratch, store = tmp_path / "scratch", tmp_path / "store"
    with workers(64, store, model, [profile], scratch) as started:
        go(scratch)
        victim = first_builder(scratch)
        time.sleep(0.1)  # into the build, which takes most of a second
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        survivors = [worker for worker in started if worker.pid != victim]
        rows = results(survivors)
        assert time.monotonic() - killed < 60
    dead = next(worker for worker in started if worker.pid == victim)
    assert dead.returncode == -signal.SIGKILL
    assert [row["outcome"] for row in rows].count("built") == 1
    assert len({row["plan"] for row in rows}) == 1
    assert len(list(scratch.glob("building-*"))) == 2


def first_builder(scratch: Path) -> int:
    """The pid of the process that builds."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in scratch.glob("building-*"):
            return int(path.name.split("-")[1])
        time.sleep(0.005)
    raise AssertionError("nobody began to build")


def test_killed_builder_is_replaced_at_once(tmp_path: Path) -> None:
    """SIGKILL of a builder whose build would take a minute: the one who waits builds within a second."""
    model = tmp_path / "m.onnx"
    model.write_bytes(tiny_model())
    scratch = tmp_path / "scratch"
    slow = {"fake": {"seconds": 60, "steps": 600}}
    with workers(1, tmp_path / "store", model, [PROFILE], scratch, slow) as started:
        go(scratch)
        victim = first_builder(scratch)
        from trt_warmcache.testing import FakeBuilder

        with twc.EngineManager(tmp_path / "store", builder=FakeBuilder(), memo=twc.DigestMemo(None)) as manager:
            with pytest.raises(twc.BuildTimeout, match=f"process {victim}"):
                manager.get(model, profiles=PROFILE, policy=twc.Policy(wait_seconds=0.2))
            os.kill(victim, signal.SIGKILL)
            started[0].wait()
            began = time.monotonic()
            assert manager.get(model, profiles=PROFILE).outcome is twc.Outcome.BUILT
            assert time.monotonic() - began < 1
            leftovers = [path for path in (tmp_path / "store").rglob("*") if path.name.startswith(".tmp")]
            assert leftovers == []


@pytest.mark.slow
def test_many_keys_many_processes(tmp_path: Path) -> None:
    """Eight processes, twelve keys in different orders, real tiny builds: each key built once, every read verified."""
    model = tmp_path / "m.onnx"
    model.write_bytes(tiny_model())
    profiles = [{"x": f"{batch}x4"} for batch in range(1, 13)]
    scratch, store = tmp_path / "scratch", tmp_path / "store"
    with workers(8, store, model, profiles, scratch) as started:
        go(scratch)
        results(started)
    built = [path.name.split("-")[2] for path in scratch.glob("building-*")]
    assert len(built) == len(set(built)) == 12


KILL_IN_PUBLISH = """
import os, signal, sys
import trt_warmcache as twc
from trt_warmcache.testing import FakeBuilder
store, model, step, number = sys.argv[1:]
count = 0
original = getattr(os, step)
def deadly(*args, **kwargs):
    global count
    count += 1
    if count == int(number):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)
manager = twc.EngineManager(store, builder=FakeBuilder(size=200_000), memo=twc.DigestMemo(None))
setattr(os, step, deadly)
manager.get(model, profiles={"x": ("1x4", "2x4", "8x4")})
print("survived")
"""


@pytest.mark.parametrize(
    ("step", "number"),
    [
        ("pwrite", 1),  # the lock's owner
        ("posix_fallocate", 1),
        ("pwrite", 2),
        ("fsync", 1),
        ("fsync", 2),
        ("pwrite", 3),
        ("fsync", 3),
        ("link", 1),
        ("fsync", 4),
    ],
)
def test_kill_at_every_step_of_publishing(tmp_path: Path, step: str, number: int) -> None:
    """SIGKILL at any step of publishing: afterwards the entry is absent or whole, and the next call gets an engine."""
    model, store = tmp_path / "m.onnx", tmp_path / "store"
    model.write_bytes(tiny_model())
    done = subprocess.run(
        [sys.executable, "-c", KILL_IN_PUBLISH, str(store), str(model), step, str(number)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done
    from trt_warmcache.testing import FakeBuilder

    builder = FakeBuilder(size=200_000)
    with twc.EngineManager(store, builder=builder, memo=twc.DigestMemo(None)) as manager:
        found = manager.lookup(model, profiles=PROFILE)  # raises if anything is damaged
        committed = (step, number) == ("fsync", 4)  # after the link: the manifest is in place
        assert (found is not None) == committed
        engine = manager.get(model, profiles=PROFILE)
        assert engine.outcome is (twc.Outcome.HIT if committed else twc.Outcome.BUILT)
        assert engine.plan.nbytes == 200_000
        assert [entry.digest for entry in manager.store.entries(Kind.ENGINE)] == [engine.key.digest]


def test_fork_after_use(tmp_path: Path) -> None:
    """A manager used before a fork works in the child, and the child's exit harms nothing in the parent."""
    model = tmp_path / "m.onnx"
    model.write_bytes(tiny_model())
    code = """
import os, sys
import trt_warmcache as twc
from trt_warmcache.testing import FakeBuilder
store, model = sys.argv[1:]
profile = {"x": ("1x4", "2x4", "8x4")}
manager = twc.EngineManager(store, builder=FakeBuilder(), memo=twc.DigestMemo(None))
plan = bytes(manager.get(model, profiles=profile).plan)
child = os.fork()
if child == 0:
    engine = manager.get(model, profiles=profile)
    other = manager.get(model, profiles={"x": "3x4"})
    os._exit(0 if engine.outcome.value == "hit" and bytes(engine.plan) == plan and other.outcome.value == "built" else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert manager.get(model, profiles=profile).outcome.value == "hit"
assert manager.get(model, profiles={"x": "3x4"}).outcome.value == "hit"
"""
    run_python(code, tmp_path / "store", model)


def test_warm_hit_imports_nothing_heavy(tmp_path: Path) -> None:
    """A hit in a fresh process loads none of TensorRT, onnx, numpy, fsspec or filelock: real engine, real model."""
    model, profile = classifier()
    code = """
import json, sys
import trt_warmcache as twc
store, model, profile = sys.argv[1:]
manager = twc.EngineManager(store, builder="tensorrt_rtx", memo=twc.DigestMemo(None))
engine = manager.get(model, profiles=json.loads(profile))
heavy = {"tensorrt", "tensorrt_bindings", "tensorrt_rtx", "tensorrt_rtx_bindings", "onnx", "numpy", "fsspec", "filelock", "asyncio"}
print(json.dumps([engine.outcome.value, engine.plan.nbytes, sorted(heavy & sys.modules.keys())]))
"""
    cold = json.loads(run_python(code, tmp_path / "store", model, json.dumps(profile)))
    warm = json.loads(run_python(code, tmp_path / "store", model, json.dumps(profile)))
    assert cold[0] == "built"
    assert warm == ["hit", cold[1], []]


def test_truncated_while_others_read(tmp_path: Path) -> None:
    """A blob cut short before it is opened is rebuilt in a process that never built it; the writer's plan stays good."""
    model = tmp_path / "m.onnx"
    model.write_bytes(tiny_model())
    from trt_warmcache.testing import FakeBuilder

    with twc.EngineManager(tmp_path / "store", builder=FakeBuilder(), memo=twc.DigestMemo(None)) as manager:
        engine = manager.get(model, profiles=PROFILE)
        path = tmp_path / "store" / "trtwc-1" / blob_name(engine.manifest.blob("plan"))
        os.truncate(path, 10)
        code = """
import sys
import trt_warmcache as twc
from trt_warmcache.testing import FakeBuilder
manager = twc.EngineManager(sys.argv[1], builder=FakeBuilder(), memo=twc.DigestMemo(None))
print(manager.get(sys.argv[2], profiles={"x": ("1x4", "2x4", "8x4")}).outcome.value)
"""
        assert run_python(code, tmp_path / "store", model).strip() == "built"
        assert manager.get(model, profiles=PROFILE).outcome is twc.Outcome.HIT


READ_ONLY = """
import os, sys, time
import trt_warmcache as twc
from trt_warmcache.testing import FakeBuilder
import filelock
store, model = sys.argv[1:]
events = []
builder = FakeBuilder()
data = open(model, "rb").read()
with twc.EngineManager(twc.MemoryStore(), builder=builder, memo=twc.DigestMemo(None)) as manager:
    for profile in ("2x4", "3x4"):  # imports whatever is imported late
        manager.get(data, profiles={"x": profile})
    builder.builds = 0
if os.geteuid() == 0:  # root may write anywhere; nobody may not, nor may it read where Python may be installed
    os.setgid(65534)
    os.setuid(65534)
with twc.EngineManager(store, builder=builder, memo=twc.DigestMemo(None), hooks=[events.append]) as manager:
    profile = {"x": ("1x4", "2x4", "8x4")}
    assert manager.get(data, profiles=profile).outcome.value == "hit"
    assert builder.builds == 0
    started = time.monotonic()
    try:
        manager.get(data, profiles={"x": "3x4"}, policy=twc.Policy(on_miss="raise"))
    except twc.MissError:
        assert time.monotonic() - started < 2
    else:
        raise AssertionError
    assert builder.builds == 0
    engine = manager.get(data, profiles={"x": "3x4"})
    assert engine.outcome.value == "built" and not engine.stored
    assert engine.publish_error.reason == "denied", engine.publish_error.reason
    assert engine.deserialize()
    told = [event.detail["text"] for event in events if event.kind is twc.EventKind.WARNING]
    assert "cannot be stored" in told[0], told
print("ok")
"""


def test_read_only_folder(tmp_path: Path) -> None:
    """A folder made read-only serves its entries; what is missing there is built, returned, and said to be unstored."""
    from trt_warmcache.testing import FakeBuilder

    model, store = tmp_path / "m.onnx", tmp_path / "store"
    model.write_bytes(tiny_model())
    with twc.EngineManager(store, builder=FakeBuilder(), memo=twc.DigestMemo(None)) as manager:
        manager.get(model, profiles=PROFILE)
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    for path in [store, *store.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o005)
    try:
        assert run_python(READ_ONLY, store, model).strip() == "ok"
        assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before
    finally:
        for path in [store, *store.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
