"""Builds in processes of their own: same results, and no way of dying that reaches the caller's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.builders.support import A10, LineBuilder, build_inputs, seven_iterations, start_and_hang
from tests.fakes._build import read_plan
from tests.support import PROFILE, real_model, run_python, tiny_model

import trt_warmcache as twc
from trt_warmcache.builders import IsolatedBuilder, ProcessLimits, Progress, TensorRTRTXBuilder, isolated
from trt_warmcache.builders._folder import _sweep
from trt_warmcache.events import EventKind
from trt_warmcache.testing import FakeBuilder

FIXED = {"x": ("2x64", "2x64", "2x64")}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.onnx"
    path.write_bytes(tiny_model())
    return path


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith("trt_warmcache-build-")]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of this test's own, to see that nothing is left in it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def manager(root: Path, builder: Any, **options: Any) -> twc.EngineManager:
    return twc.EngineManager(root, builder=builder, memo=twc.DigestMemo(None), **options)


def children() -> set[int]:
    """Processes whose parent is this one."""
    return child_pids(os.getpid())


def child_pids(pid: int) -> set[int]:
    return {int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()}


def ended(state: Path) -> bool:
    try:
        return " Z " in state.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_same_plan_as_in_process(temporary: Path) -> None:
    """A real build gives the same bytes here and there, and the plan outlives its temporary folder."""
    inputs = build_inputs(tiny_model(width=64), profiles=FIXED, target=twc.Target())
    steps: list[Progress] = []
    here = TensorRTRTXBuilder().build(inputs)
    there = IsolatedBuilder(TensorRTRTXBuilder()).build(type(inputs)(**{**vars(inputs), "on_progress": steps.append}))
    assert bytes(there.plan) == bytes(here.plan)
    assert there.config == here.config
    assert there.library == here.library
    assert steps[0].phase == "Building engine"
    assert len(steps) > 3
    assert leftovers(temporary) == []


def test_everything_travels(tmp_path: Path) -> None:
    """Timing cache, tactics, options, target, hook and plugins go there; timing, tactics and plugins come back."""
    library = tmp_path / "libmine.so"
    library.write_text("example Shout 1\n")
    builder = IsolatedBuilder(LineBuilder("10.16", str(tmp_path / "locks")))
    options = twc.BuildOptions(optimization_level=4, timing="editable", record_tactics=True)
    first = builder.build(build_inputs(options=options, configure=seven_iterations, plugins=(library,)))
    plan = read_plan(first.plan)
    assert plan["settings"]["avg_timing_iterations"] == 7
    assert plan["settings"]["builder_optimization_level"] == 4
    assert first.timing_entries == 2
    assert first.tactics is not None
    assert first.plugins == ("example::Shout:1",)
    second = builder.build(build_inputs(options=options, timing=first.timing))
    assert second.timing == first.timing
    with pytest.raises(twc.ConfigError, match="cannot travel to another process"):
        builder.build(build_inputs(configure=lambda network, config: None))
    with pytest.raises(twc.ConfigError, match="cannot be made anew in another process"):
        IsolatedBuilder(FakeBuilder())


def test_errors_come_back_whole(tmp_path: Path) -> None:
    """The child's error arrives with type, message and details."""
    import onnx

    broken = onnx.load_model_from_string(tiny_model())
    broken.graph.node[1].op_type, broken.graph.node[1].domain = "Nonsense", "com.example"
    builder = IsolatedBuilder(LineBuilder("10.16", str(tmp_path / "locks")))
    with pytest.raises(twc.ModelError, match="No importer registered for op: Nonsense") as refused:
        builder.build(build_inputs(broken.SerializeToString()))
    assert refused.value.node == "act"


@pytest.mark.parametrize(
    ("crash", "limits", "text"),
    [
        ("segfault", None, r"crashed \(SIGSEGV\); this process is unharmed"),
        ("kill", None, "was killed .SIGKILL."),
        ("segfault", 8 << 30, r"crashed \(SIGSEGV\).* limited to 8589934592 bytes \(Policy\.build_memory_bytes\)"),
        ("memory", 2 << 30, r"ran out of memory\. Its memory was limited to 2147483648 bytes"),
        ("exit", None, r"ended with exit code 7 and no result\. Its last words: about to leave"),
    ],
)
def test_deaths_are_errors(
    tmp_path: Path, model: Path, temporary: Path, crash: str, limits: int | None, text: str
) -> None:
    """Whatever kills a build: a typed error, no entry, no process, no file, the lock free, and the next build works."""
    policy = twc.Policy(isolation="process", build_memory_bytes=limits)
    root = tmp_path / "store"
    before = children()
    with manager(root, FakeBuilder(travels=True, crash=crash), policy=policy) as broken:
        with pytest.raises(twc.BuildError, match=text):
            broken.get(model, profiles=PROFILE)
        assert broken.counters()[EventKind.BUILD_FAILED.value] == 1
        assert list(broken.store.entries(twc.keys.Kind.ENGINE)) == []
    assert children() == before
    assert leftovers(temporary) == []
    with manager(root, FakeBuilder(travels=True), policy=policy) as sound:
        started = time.monotonic()
        assert sound.get(model, profiles=PROFILE).outcome is twc.Outcome.BUILT
        assert time.monotonic() - started < 20


@pytest.mark.parametrize("limit", [1 << 20, 200 << 20, 300 << 20])
def test_real_builds_out_of_memory(limit: int) -> None:
    """However little memory a real build gets, at import, at loading or while building: an error that names the limit."""
    inputs = build_inputs(tiny_model(width=64), profiles=FIXED, target=twc.Target())
    with pytest.raises((twc.BuildError, twc.ConfigError), match=rf"limited to {limit} bytes"):
        IsolatedBuilder(TensorRTRTXBuilder(), ProcessLimits(memory_bytes=limit)).build(inputs)


def test_a_limit_above_the_machines_own(tmp_path: Path) -> None:
    """Where the machine allows less than was asked for, its limit holds and the build runs."""
    code = (
        "import resource, sys\n"
        "from tests.builders.support import LineBuilder, build_inputs\n"
        "from trt_warmcache.builders import IsolatedBuilder, ProcessLimits\n"
        "resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30))\n"
        "builder = IsolatedBuilder(LineBuilder('10.16', sys.argv[1]), ProcessLimits(memory_bytes=64 << 30))\n"
        "print(builder.build(build_inputs()).plan.nbytes)\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    assert int(run_python(code, tmp_path, env={"PYTHONPATH": path})) > 0


@pytest.mark.parametrize("end", [signal.SIGSEGV, signal.SIGKILL, None])
def test_last_words_of_a_real_build(end: signal.Signals | None) -> None:
    """A real build that crashes, is killed, or runs into a limit: the error has the last lines that TensorRT logged."""
    before = children()

    def on_progress(step: Progress) -> None:
        if step.step == step.total:
            if end is None:
                raise twc.BuildTimeout("enough")
            for child in children() - before:
                os.kill(child, end)

    model = real_model("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx")  # takes a second
    shape = "1x3x320x320"
    inputs = build_inputs(model, profiles={"x": (shape,) * 3}, target=twc.Target(), on_progress=on_progress)
    with pytest.raises(twc.BuildError) as failed:
        IsolatedBuilder(TensorRTRTXBuilder()).build(inputs)
    assert any(line.startswith("[INFO] ") for line in failed.value.log)
    assert not any(line.startswith("[VERBOSE]") for line in failed.value.log)


def test_time_limit_ends_a_hanging_build(tmp_path: Path, model: Path) -> None:
    """A build that never reaches another step is ended all the same, also where the builder reports no progress."""
    with manager(
        tmp_path / "store",
        FakeBuilder(travels=True, crash="hang"),
        policy=twc.Policy(isolation="process", build_seconds=2.0),
    ) as hanging:
        before = children()
        started = time.monotonic()
        with pytest.raises(twc.BuildTimeout, match="longer than the 2 s"):
            hanging.get(model, profiles=PROFILE)
        assert time.monotonic() - started < 15
        assert children() == before
    old = FakeBuilder(travels=True, crash="hang", capabilities=twc.BuilderCapabilities(compute_capabilities=True))
    with (
        manager(tmp_path / "store", old, policy=twc.Policy(build_seconds=2.0)) as quiet,
        pytest.raises(twc.BuildTimeout),
    ):
        quiet.get(model, profiles=PROFILE)
    with (
        manager(tmp_path / "store", old) as quiet,
        pytest.raises(twc.BuildTimeout, match="request's timeout of 2 s"),
    ):
        quiet.get(model, profiles=PROFILE, timeout=2.0)


def test_nothing_that_a_build_started_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a build started itself are ended with it."""
    told = tmp_path / "pid"
    monkeypatch.setenv("TEST_PID_FILE", str(told))
    started = time.monotonic()

    def checkpoint() -> None:
        if told.exists() or time.monotonic() - started > 30:
            raise twc.BuildTimeout("enough")

    builder = IsolatedBuilder(LineBuilder("10.16", str(tmp_path / "locks")))
    with pytest.raises(twc.BuildTimeout):
        builder.build(build_inputs(configure=start_and_hang, checkpoint=checkpoint))
    state = Path(f"/proc/{told.read_text()}/stat")
    while not ended(state) and time.monotonic() - started < 40:
        time.sleep(0.02)
    assert ended(state)


def test_a_model_that_changes_meanwhile(tmp_path: Path, model: Path) -> None:
    """What the building process reads is what the key was made of, or an error."""
    inputs = build_inputs(model)
    model.write_bytes(tiny_model(weight=5.0))
    with pytest.raises(twc.ModelError, match="changed while it was in use"):
        IsolatedBuilder(LineBuilder("10.16", str(tmp_path / "locks"))).build(inputs)


def test_closing_the_manager_ends_the_build(tmp_path: Path, model: Path) -> None:
    """A build in the background does not outlive its manager."""
    hanging = manager(
        tmp_path / "store", FakeBuilder(travels=True, crash="hang"), policy=twc.Policy(on_miss="fallback")
    )
    before = children()
    with pytest.raises(twc.MissError) as miss:
        hanging.get(model, profiles=PROFILE)
    deadline = time.monotonic() + 20
    while children() == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert children() != before
    closer = threading.Thread(target=hanging.close)
    closer.start()
    with pytest.raises(twc.BuildError, match="closed"):
        miss.value.pending.result(20)
    closer.join(20)
    assert children() == before


def test_child_ends_with_its_parent(tmp_path: Path, model: Path, temporary: Path) -> None:
    """When the process that wants the engine is killed, its building process goes too and keeps no GPU; the folder that it
    left is swept by a later build, once it is old, and those of living builds never are."""
    code = (
        "import sys, trt_warmcache as twc\n"
        "from trt_warmcache.testing import FakeBuilder\n"
        "m = twc.EngineManager(sys.argv[1], builder=FakeBuilder(travels=True, crash='hang'),"
        " policy=twc.Policy(isolation='process'), memo=twc.DigestMemo(None))\n"
        "m.get(sys.argv[2], profiles={'x': ('1x4', '2x4', '8x4')})\n"
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "store"), str(model)], env=environment)
    try:
        deadline = time.monotonic() + 30
        child: set[int] = set()
        while not child and time.monotonic() < deadline:
            child = child_pids(parent.pid)
            time.sleep(0.02)
        assert child
        (folder,) = leftovers(temporary)
        build = IsolatedBuilder(LineBuilder("10.16", str(tmp_path / "locks"))).build
        os.utime(temporary / folder, (0, 0))
        build(build_inputs())
        assert leftovers(temporary) == [folder]  # its owner lives
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        state = Path(f"/proc/{child.pop()}/stat")
        while time.monotonic() < deadline and not ended(state):
            time.sleep(0.02)
        assert ended(state)
        os.utime(temporary / folder)
        build(build_inputs())
        assert leftovers(temporary) == [folder]  # too young to be judged
        os.utime(temporary / folder, (0, 0))
        build(build_inputs())
        assert leftovers(temporary) == []
    finally:
        parent.kill()
        parent.wait(10)


def test_sweeping_leaves_what_is_not_its_own(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links, files and other people's folders under such a name stay, and so does what a link leads to."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    (temporary / "trt_warmcache-build-link").symlink_to(precious)
    (temporary / "trt_warmcache-build-file").write_text("kept")
    os.utime(precious, (0, 0))
    os.utime(temporary / "trt_warmcache-build-file", (0, 0))
    os.utime(temporary / "trt_warmcache-build-link", (0, 0), follow_symlinks=False)
    IsolatedBuilder(LineBuilder("10.16", str(tmp_path / "locks"))).build(build_inputs())
    assert sorted(leftovers(temporary)) == ["trt_warmcache-build-file", "trt_warmcache-build-link"]
    assert (precious / "file").read_text() == "kept"
    theirs = temporary / "trt_warmcache-build-theirs"
    theirs.mkdir()
    os.utime(theirs, (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr("os.getuid", lambda: theirs.stat().st_uid + 1)
        _sweep(temporary)
    assert theirs.exists()
    _sweep(temporary)
    assert not theirs.exists()


def test_where_builds_run(tmp_path: Path, model: Path) -> None:
    """By default get builds here, and warm in a process of its own where the builder can travel."""
    for travels, expected in ((True, 0), (False, 1)):
        builder = FakeBuilder(travels=travels, library=f"1.{travels:d}")
        with manager(tmp_path / "store", builder) as auto:
            report = auto.warm([twc.EngineRequest(model, profiles=PROFILE)])
            assert report.ok, str(report)
            assert builder.builds == expected
            auto.get(model, profiles=PROFILE, recipe="another")
            assert builder.builds == expected + 1
    with (
        manager(tmp_path / "store", FakeBuilder(), policy=twc.Policy(isolation="process")) as strict,
        pytest.raises(twc.ConfigError, match="cannot be made anew"),
    ):
        strict.get(model, profiles=PROFILE, recipe="third")
    with pytest.raises(twc.ConfigError, match="isolation='none' has none"):
        twc.Policy(isolation="none", build_memory_bytes=1)


def test_one_build_per_gpu_across_processes(tmp_path: Path) -> None:
    """Two building processes take turns on one GPU: neither builds while the other does."""
    spans: list[tuple[float, float]] = []

    def build(width: int) -> None:
        seen: list[float] = []

        def on_progress(step: Progress) -> None:
            if step.phase != "Waiting for the GPU":
                seen.append(time.monotonic())

        shape = f"1x{width}"
        builder = IsolatedBuilder(LineBuilder("10.16", str(tmp_path / "locks"), seconds_per_layer=0.3))
        builder.build(
            build_inputs(
                tiny_model(width=width),
                profiles={"x": (shape, shape, shape)},
                on_progress=on_progress,
            )
        )
        spans.append((seen[0], seen[-1]))

    threads = [threading.Thread(target=build, args=(width,)) for width in (4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (_, first_end), (second_start, _) = sorted(spans)
    assert second_start >= first_end


@pytest.mark.parametrize("gpu", ["GPU-a10", "GPU-other"])
def test_builds_for_another_gpu_go_to_a_process_that_sees_it(tmp_path: Path, gpu: str) -> None:
    """A build in this process would run on its first GPU; an engine for another one is built where that is the first."""

    class SecondGpu(LineBuilder):
        def current_device(self) -> str:
            return "GPU-a10"

    builder = SecondGpu("10.16", str(tmp_path))
    target = twc.Target(**{**A10.to_json(), "uuid": gpu})
    chosen = isolated(builder, twc.Policy(), target=target, configure=None)
    if gpu == "GPU-a10":
        assert chosen is builder
        return
    assert isinstance(chosen, IsolatedBuilder)
    assert chosen._environment()["CUDA_VISIBLE_DEVICES"] == gpu
    with pytest.raises(twc.ConfigError, match="is for GPU GPU-other, and builds in this process run on GPU-a10"):
        isolated(builder, twc.Policy(isolation="none"), target=target, configure=None)
    with pytest.raises(twc.ConfigError, match="cannot travel"):
        isolated(builder, twc.Policy(), target=target, configure=lambda network, config: None)


def test_device_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process sees the one GPU that the engine is for, whatever this process sees."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    isolated = IsolatedBuilder(LineBuilder("11.4", str(tmp_path)), ProcessLimits(device="GPU-a10"))
    assert isolated._environment()["CUDA_VISIBLE_DEVICES"] == "GPU-a10"
    assert IsolatedBuilder(LineBuilder())._environment()["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_models_without_a_path_are_staged(tmp_path: Path) -> None:
    """Bytes travel too."""
    output = IsolatedBuilder(LineBuilder("8.6", str(tmp_path))).build(build_inputs(tiny_model(weight=3.0)))
    assert read_plan(output.plan)["layers"] == ["mul", "act"]
