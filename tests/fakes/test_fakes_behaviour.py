"""The fakes fail as quietly, cost as much and remember as little as the real library."""

from __future__ import annotations

import hashlib
import io
import sys
import warnings
from typing import TYPE_CHECKING, Any

import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.fakes import LINES, Gpu, Line, NativeCrash, installed, make_tensorrt, read_plan, record_of

if TYPE_CHECKING:
    from collections.abc import Callable

TYPED: Any = ("10.3", "10.16", "11.4")


def small_model(scale: float = 1.0, domain: str = "") -> bytes:
    """Input `x` (N, 4), a product with a constant, a Relu, output `y`."""
    import numpy as np

    weight = numpy_helper.from_array(np.full((4, 4), scale, np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="mul"),
        helper.make_node("Relu", ["h"], ["y"], name="act", domain=domain),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])
    data: bytes = helper.make_model(helper.make_graph(nodes, "g", [x], [y], [weight])).SerializeToString()
    return data


class Build:
    """One builder with a parsed network, a config and, by default, a profile."""

    def __init__(self, trt: Any, model: bytes | None = None, *, profile: bool = True) -> None:
        lines: list[str] = []
        self.trt, self.lines = trt, lines

        class Log(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, msg: str) -> None:
                lines.append(f"{severity.name}: {msg}")

        self.logger = Log()
        self.builder = trt.Builder(self.logger)
        flags = trt.NetworkDefinitionCreationFlag
        self.network = self.builder.create_network(
            1 << int(flags.EXPLICIT_BATCH) if hasattr(flags, "EXPLICIT_BATCH") else 0
        )
        self.network.name = "net"
        self.parser = trt.OnnxParser(self.network, self.logger)
        self.parsed = self.parser.parse(small_model() if model is None else model)
        self.config = self.builder.create_builder_config()
        if profile:
            self.profile = self.builder.create_optimization_profile()
            self.profile.set_shape("x", (1, 4), (2, 4), (8, 4))
            assert self.config.add_optimization_profile(self.profile) == 0

    def run(self) -> Any:
        return self.builder.build_serialized_network(self.network, self.config)


@pytest.mark.parametrize("line", LINES)
def test_plan_header_and_contents(line: Line) -> None:
    """Magic, size and version sit where the real ones do, the rest tells what the builder got, and builds repeat."""
    trt: Any = make_tensorrt(line)
    build = Build(trt)
    plan = build.run()
    data = bytes(plan)
    assert data[:4] == b"ftrt"
    assert ".".join(map(str, data[24:27])) == ".".join(trt.__version__.split(".")[:3])
    assert int.from_bytes(data[16:24], "little") == len(data) == plan.nbytes
    content = read_plan(plan)
    assert content["profiles"] == [{"x": [[1, 4], [2, 4], [8, 4]]}]
    assert content["flags"] == ["TF32"]
    assert content["layers"] == ["mul", "act"]
    assert bytes(Build(make_tensorrt(line)).run()) == data
    assert read_plan(Build(trt, small_model(2.0)).run())["weights"] != content["weights"]


@pytest.mark.parametrize("line", LINES)
def test_host_memory_is_a_buffer_without_length(line: Line) -> None:
    """bytes, hashlib and files accept it; len, indexing and iteration do not work, as on the real class."""
    trt: Any = make_tensorrt(line)
    plan = Build(trt).run()
    assert isinstance(plan, trt.IHostMemory)
    assert hashlib.sha256(plan).digest() == hashlib.sha256(bytes(plan)).digest()
    assert io.BytesIO().write(plan) == plan.nbytes
    for misuse in (len, iter, lambda p: p[0]):
        with pytest.raises(TypeError):
            misuse(plan)


@pytest.mark.parametrize("line", LINES)
def test_no_gpu_is_a_type_error(line: Line) -> None:
    """Without a device Builder and Runtime raise pybind11's TypeError after logging the CUDA error."""
    trt: Any = make_tensorrt(line, gpu=None)
    for cls in (trt.Builder, trt.Runtime):
        with pytest.raises(TypeError, match="nullptr"):
            cls(trt.Logger())
    assert any("error: 35" in text for _, text in record_of(trt).messages)


@pytest.mark.parametrize("line", LINES)
def test_failures_are_quiet(line: Line) -> None:
    """None, -1 and False stand for errors, and only the logger knows why."""
    trt: Any = make_tensorrt(line)
    build = Build(trt, profile=False)
    assert build.run() is None
    assert "no optimization profile" in build.lines[-1]
    bad = build.builder.create_optimization_profile()
    assert bad.set_shape("x", (8, 4), (2, 4), (1, 4)) is None
    assert not bad
    assert build.config.add_optimization_profile(bad) == -1
    assert Build(trt, b"", profile=False).parsed is True
    broken = Build(trt, b"\xff\xff not onnx", profile=False)
    assert broken.parsed is False
    assert broken.parser.get_error(0).code() == trt.ErrorCode.MODEL_DESERIALIZE_FAILED


@pytest.mark.parametrize("line", LINES)
def test_unknown_operator_is_named(line: Line) -> None:
    """The parser refuses a foreign domain; node name and operator are accessor methods from 10.0 on."""
    build = Build(make_tensorrt(line), small_model(domain="com.example"), profile=False)
    error = build.parser.get_error(0)
    assert not build.parsed
    assert error.node() == 1
    assert hasattr(error, "node_name") == (line != "8.6")
    if line != "8.6":
        assert (error.node_name(), error.node_operator()) == ("act", "Relu")


@pytest.mark.parametrize("line", LINES)
def test_unknown_attribute_is_refused(line: Line) -> None:
    """A misspelt option raises, so that no test passes on a setting the library does not have."""
    config = Build(make_tensorrt(line)).config
    with pytest.raises(AttributeError):
        config.builder_optimisation_level = 3
    with pytest.raises(TypeError):
        config.set_flag(6)


@pytest.mark.parametrize("line", LINES)
def test_timing_cache_saves_timing(line: Line) -> None:
    """With the first build's cache the second build times nothing, also when both use another model's weights."""
    trt: Any = make_tensorrt(line)
    first = Build(trt)
    cache = first.config.create_timing_cache(b"")
    assert first.config.get_timing_cache() is None
    assert first.config.set_timing_cache(cache, False)
    assert first.run() is not None
    assert record_of(trt).tactics_timed == 2
    blob = bytes(first.config.get_timing_cache().serialize())
    second = Build(trt, small_model(3.0))
    assert second.config.set_timing_cache(second.config.create_timing_cache(memoryview(blob)), False)
    assert second.run() is not None
    assert (record_of(trt).tactics_timed, record_of(trt).tactics_from_cache) == (2, 2)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("damage", ["garbage", "flip", "version", "device"])
def test_bad_timing_cache_is_silently_empty(line: Line, damage: str) -> None:
    """Whatever is wrong with a blob: a warning, an empty cache, and True from set_timing_cache."""
    maker = {
        "version": make_tensorrt("10.3" if line != "10.3" else "8.6"),
        "device": make_tensorrt(line, gpu=Gpu("NVIDIA L4", (8, 9), 58)),
    }.get(damage, make_tensorrt(line))
    build = Build(maker)
    build.config.set_timing_cache(build.config.create_timing_cache(b""), False)
    build.run()
    blob = bytearray(build.config.get_timing_cache().serialize())
    if damage == "garbage":
        blob = bytearray(b"not a timing cache at all, but long enough")
    elif damage == "flip":
        blob[len(blob) // 2] ^= 1
    trt: Any = make_tensorrt(line)
    victim = Build(trt)
    cache = victim.config.create_timing_cache(blob)
    assert "will not be used" in victim.lines[-1]
    assert victim.config.set_timing_cache(cache, False) is True
    assert bytes(cache.serialize()) == bytes(victim.config.create_timing_cache(b"").serialize())
    victim.run()
    assert record_of(trt).tactics_timed == 2
    for wrong in (None, "text"):
        with pytest.raises(TypeError):
            victim.config.create_timing_cache(wrong)


def test_combine_keeps_the_receivers_entries() -> None:
    """On conflict the existing entry stays; another TensorRT version is refused even with ignore_mismatch."""
    trt: Any = make_tensorrt("10.16", nondeterministic=True)
    caches = []
    for _ in range(2):
        build = Build(trt)
        build.config.set_timing_cache(build.config.create_timing_cache(b""), False)
        build.run()
        caches.append(build.config.get_timing_cache())
    ours, theirs = caches
    before = {str(key): ours.query(key).tacticHash for key in ours.queryKeys()}
    assert before != {str(key): theirs.query(key).tacticHash for key in theirs.queryKeys()}
    assert ours.combine(theirs, False)
    assert before == {str(key): ours.query(key).tacticHash for key in ours.queryKeys()}
    other = Build(make_tensorrt("10.3"))
    foreign = other.config.create_timing_cache(b"")
    foreign.__class__ = type(ours)
    assert not ours.combine(foreign, True)


@pytest.mark.parametrize("line", ["10.16", "11.4"])
def test_editing_the_timing_cache_pins_tactics(line: Line) -> None:
    """query, update and parse behave as documented, and an edited tactic shows up in the next plan."""
    trt: Any = make_tensorrt(line)
    build = Build(trt)
    build.config.set_flag(trt.BuilderFlag.EDITABLE_TIMING_CACHE)
    cache = build.config.create_timing_cache(b"")
    build.config.set_timing_cache(cache, False)
    build.run()
    logged = [text.rsplit(" ", 1)[1] for text in build.lines if "cache key" in text]
    assert logged == [str(key) for key in cache.queryKeys()]
    key = trt.TimingCacheKey.parse(logged[0])
    assert cache.update(key, trt.TimingCacheValue(77, 0.5))
    assert 77 in read_plan(build.run())["tactics"].values()
    missing = trt.TimingCacheKey.parse("0x" + "0" * 32)
    assert cache.query(missing).tacticHash == 2**64 - 1
    assert not cache.update(missing, trt.TimingCacheValue(1, 1.0))
    assert cache.update(key, trt.TimingCacheValue(1, float("nan")))
    assert logged[0] not in [str(k) for k in cache.queryKeys()]
    for text in ("0x12", "0x" + "z" * 32):
        with pytest.raises(ValueError, match="text"):
            trt.TimingCacheKey.parse(text)


@pytest.mark.parametrize("line", TYPED)
def test_error_on_timing_cache_miss(line: Line) -> None:
    """The flag turns a cold cache into a failed build and leaves a warm one alone."""
    trt: Any = make_tensorrt(line)
    build = Build(trt)
    build.config.set_timing_cache(build.config.create_timing_cache(b""), False)
    build.config.set_flag(trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS)
    assert build.run() is None
    assert "timing cache miss" in build.lines[-1]
    build.config.clear_flag(trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS)
    build.run()
    build.config.set_flag(trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS)
    assert build.run() is not None


@pytest.mark.parametrize("line", TYPED)
def test_progress_can_cancel(line: Line) -> None:
    """Phases nest; False or an exception from step_complete gives None and a BuildCanceled message."""
    trt: Any = make_tensorrt(line)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self, answer: Any) -> None:
            trt.IProgressMonitor.__init__(self)
            self.answer = answer
            self.events: list[tuple[Any, ...]] = []

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.events.append((phase_name, parent_phase, num_steps))

        def phase_finish(self, phase_name: str) -> None:
            self.events.append((phase_name,))

        def step_complete(self, phase_name: str, step: int) -> bool:
            if self.answer is None:
                raise RuntimeError("stop")
            return bool(self.answer)

    for answer, succeeds in ((True, True), (False, False), (None, False)):
        build = Build(trt)
        monitor = Monitor(answer)
        build.config.progress_monitor = monitor
        assert (build.run() is not None) == succeeds
        assert monitor.events[0] == ("Building engine", None, 2)
        assert monitor.events[-1] == ("Building engine",)
        assert succeeds or any("BuildCanceled" in text for text in build.lines)


@pytest.mark.parametrize("line", ["8.6", "10.3", "10.16"])
def test_calibration_runs_once(line: Line) -> None:
    """The calibrator is fed until it runs dry; its table, with the right header, makes the next build skip that."""
    trt: Any = make_tensorrt(line)

    class Calibrator(trt.IInt8EntropyCalibrator2):  # type: ignore[misc]
        def __init__(self, table: bytes | None) -> None:
            trt.IInt8EntropyCalibrator2.__init__(self)
            self.table, self.left = table, 3

        def get_batch_size(self) -> int:
            return 1

        def get_batch(self, names: list[str]) -> list[int] | None:
            assert names == ["x"]
            self.left -= 1
            return [1] if self.left >= 0 else None

        def read_calibration_cache(self) -> bytes | None:
            return self.table

        def write_calibration_cache(self, cache: Any) -> None:
            self.table = bytes(cache)

    def run(calibrator: Any) -> Any:
        build = Build(trt)
        build.config.set_flag(trt.BuilderFlag.INT8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            build.config.int8_calibrator = calibrator
        return build.run()

    first = Calibrator(None)
    assert run(first) is not None
    number = {"8.6": 8601, "10.3": 100300, "10.16": 101601}[line]
    assert first.table is not None
    assert first.table.startswith(f"TRT-{number}-EntropyCalibration2\nx: ".encode())
    assert record_of(trt).calibration_batches == 3
    assert read_plan(run(Calibrator(first.table)))["calibration"] == first.table.decode()
    assert record_of(trt).calibration_batches == 3
    run(Calibrator(b"TRT-7000-EntropyCalibration2\nx: 0\n"))
    assert record_of(trt).calibration_batches == 6


@pytest.mark.parametrize(("line", "warns"), [("8.6", False), ("10.3", True), ("10.16", True)])
@pytest.mark.filterwarnings("error")
def test_calibrator_setter_warns_from_10_1(line: Line, warns: bool) -> None:
    """The deprecation appears in the release that introduced it; as an error it surfaces as SystemError."""
    config = Build(make_tensorrt(line)).config
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config.int8_calibrator = None
    assert bool(caught) == warns
    if warns:
        with pytest.raises(SystemError):
            config.int8_calibrator = None


def test_algorithm_selector_is_asked_for_every_layer() -> None:
    """8.6 calls select_algorithms per layer and report_algorithms once; the choice lands in the plan."""
    trt: Any = make_tensorrt("8.6")

    class Selector(trt.IAlgorithmSelector):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IAlgorithmSelector.__init__(self)
            self.reported: list[tuple[str, int]] = []

        def select_algorithms(self, context: Any, choices: list[Any]) -> list[int]:
            return [len(choices) - 1]

        def report_algorithms(self, contexts: list[Any], choices: list[Any]) -> None:
            self.reported += [(c.name, a.algorithm_variant.tactic) for c, a in zip(contexts, choices, strict=True)]

    build = Build(trt)
    selector = Selector()
    build.config.algorithm_selector = selector
    plan = read_plan(build.run())
    assert dict(selector.reported) == plan["tactics"]
    assert plan["tactics"] != read_plan(Build(trt).run())["tactics"]


@pytest.mark.parametrize("line", LINES)
def test_deserialize_refuses_quietly(line: Line) -> None:
    """Foreign, truncated or garbage plans give None and a message; a good plan gives an engine."""
    trt: Any = make_tensorrt(line)
    plan = bytes(Build(trt).run())
    runtime = trt.Runtime(trt.Logger())
    engine = runtime.deserialize_cuda_engine(plan)
    assert [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)] == ["x", "y"]
    assert bytes(engine.serialize()) == plan
    elsewhere = make_tensorrt(line, gpu=Gpu("Tesla T4", (7, 5), 40))
    other = make_tensorrt("10.3" if line != "10.3" else "11.4")
    for bad in (plan[:-1], b"", b"x" * 64, bytes(Build(other).run()), bytes(Build(elsewhere).run())):
        assert runtime.deserialize_cuda_engine(bad) is None
    texts = " ".join(text for _, text in record_of(trt).messages)
    assert "expecting library version" in texts
    assert "expecting compute 7.5 got compute 8.6" in texts
    for wrong in (None, "text"):
        with pytest.raises(TypeError):
            runtime.deserialize_cuda_engine(wrong)


@pytest.mark.parametrize("line", LINES)
def test_version_compatible_plans_need_permission(line: Line) -> None:
    """Host code is not allowed by default."""
    trt: Any = make_tensorrt(line)
    build = Build(trt)
    build.config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    plan = build.run()
    runtime = trt.Runtime(trt.Logger())
    assert runtime.engine_host_code_allowed is False
    assert runtime.deserialize_cuda_engine(plan) is None
    runtime.engine_host_code_allowed = True
    assert runtime.deserialize_cuda_engine(plan) is not None


@pytest.mark.parametrize("line", TYPED)
def test_stripped_plan_needs_its_own_weights(line: Line) -> None:
    """A stripped plan runs only after a refit, and REFIT_IDENTICAL refuses another model's weights."""
    trt: Any = make_tensorrt(line)
    build = Build(trt)
    for flag in ("STRIP_PLAN", "REFIT_IDENTICAL"):
        build.config.set_flag(getattr(trt.BuilderFlag, flag))
    engine = trt.Runtime(build.logger).deserialize_cuda_engine(build.run())
    assert engine.create_execution_context() is None
    for scale, fits in ((2.0, False), (1.0, True)):
        refitter = trt.Refitter(engine, build.logger)
        assert trt.OnnxParserRefitter(refitter, build.logger).refit_from_bytes(small_model(scale))
        assert refitter.refit_cuda_engine() is fits
    assert engine.create_execution_context() is not None


@pytest.mark.parametrize("line", ["10.16", "11.4"])
def test_stream_build_says_true_whatever_the_writer_does(line: Line) -> None:
    """A writer that raises still yields True: callers must keep their own account."""
    trt: Any = make_tensorrt(line)

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: bytes) -> int:
            raise OSError("disk full")

    build = Build(trt)
    assert build.builder.build_serialized_network_to_stream(build.network, build.config, Writer()) is True


def test_dropping_the_network_is_a_crash() -> None:
    """The parser does not keep its network alive; the real library then segfaults."""
    trt: Any = make_tensorrt("11.4")
    logger = trt.Logger()
    parser = trt.OnnxParser(trt.Builder(logger).create_network(0), logger)
    with pytest.raises(NativeCrash):
        parser.parse(small_model())


def test_callback_must_call_base_init() -> None:
    """pybind11 insists; a fake that did not would hide a bug."""
    trt: Any = make_tensorrt("10.16")

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

    with pytest.raises(TypeError, match="must be called when overriding"):
        Log()
    with pytest.raises(TypeError, match="No constructor defined"):
        trt.IBuilderConfig()


def test_nondeterministic_builds_differ_unless_cached() -> None:
    """Timing noise changes plans from build to build; a shared timing cache takes it away."""
    trt: Any = make_tensorrt("10.16", nondeterministic=True)
    assert bytes(Build(trt).run()) != bytes(Build(trt).run())
    blob, plans = b"", []
    for _ in range(2):
        build = Build(trt)
        build.config.set_timing_cache(build.config.create_timing_cache(blob), False)
        plans.append(bytes(build.run()))
        blob = bytes(build.config.get_timing_cache().serialize())
    assert plans[0] == plans[1]


def test_error_recorder_hears_builds_and_parsers() -> None:
    """Errors of both reach the recorder of the builder."""
    trt: Any = make_tensorrt("10.16", fail_build="Error Code 2: OutOfMemory")

    class Recorder(trt.IErrorRecorder):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IErrorRecorder.__init__(self)
            self.errors: list[str] = []

        def report_error(self, arg0: Any, arg1: str) -> bool:
            self.errors.append(arg1)
            return False

    build = Build(trt)
    recorder = Recorder()
    build.builder.error_recorder = recorder
    assert build.run() is None
    assert not build.parser.parse(b"\xff\xff")
    assert "OutOfMemory" in recorder.errors[0]
    assert "ONNX" in recorder.errors[1]


def test_external_weights_need_their_place(tmp_path: Any, monkeypatch: Any) -> None:
    """parse_from_file finds side files; parse needs the path, else it fails."""
    model = onnx.load_model_from_string(small_model())
    path = tmp_path / "m.onnx"
    onnx.save_model(model, str(path), save_as_external_data=True, location="m.bin", size_threshold=0)
    monkeypatch.chdir(tmp_path.parent)
    trt: Any = make_tensorrt("11.4")
    ways: list[tuple[Callable[[Any], bool], bool]] = [
        (lambda p: p.parse_from_file(str(path)), True),
        (lambda p: p.parse(path.read_bytes(), path=str(path)), True),
        (lambda p: p.parse(path.read_bytes()), False),
    ]
    for parse, expected in ways:
        build = Build(trt, b"", profile=False)
        assert parse(build.parser) is expected
    with pytest.raises(TypeError):
        build.parser.parse_from_file(path)


def test_installed_puts_the_fake_in_place() -> None:
    """`import tensorrt` sees the fake inside the block only."""
    before = sys.modules.get("tensorrt")
    with installed(make_tensorrt("8.6")) as module:
        import tensorrt

        assert tensorrt is module
        assert tensorrt.__version__ == "8.6.1"
    assert sys.modules.get("tensorrt") is before
