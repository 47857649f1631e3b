"""The TensorRT-RTX adapter, for real: every build here is one of the installed library's."""

from __future__ import annotations

import hashlib
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.builders.support import build_inputs
from tests.support import tiny_model

import trt_warmcache as twc
from trt_warmcache.builders import Progress, TensorRTRTXBuilder
from trt_warmcache.builders._plan import read_header
from trt_warmcache.options import option_specs

#: One shape only: with a range of shapes TensorRT-RTX fills some bytes of a plan differently each time.
FIXED = {"x": ("2x64", "2x64", "2x64")}
PORTABLE = twc.Target()


def build(options: dict[str, Any] | None = None, **more: Any) -> Any:
    more = {"profiles": FIXED, "target": PORTABLE, **more}
    return TensorRTRTXBuilder().build(
        build_inputs(tiny_model(width=64), options=twc.BuildOptions(**(options or {})), **more)
    )


def digest(output: Any) -> str:
    return hashlib.sha256(output.plan).hexdigest()


@pytest.fixture(scope="module")
def plain() -> str:
    return digest(build())


def test_builds_are_reproducible(plain: str) -> None:
    """The same inputs give the same bytes; the network's name, which is part of them, comes from the key."""
    assert digest(build()) == plain
    inputs = build_inputs(tiny_model(width=64), profiles=FIXED, target=PORTABLE)
    renamed = type(inputs)(**{**vars(inputs), "network_name": "another"})
    assert digest(TensorRTRTXBuilder().build(renamed)) != plain


@pytest.mark.parametrize(
    "options",
    [
        {"tf32": False},
        {"profiling_verbosity": "none"},
        {"profiling_verbosity": "detailed"},
        {"weight_streaming": True},
        {"refit": "individual"},
        {"require_user_allocation": True},
        {"memory_pools": {"tactic_shared_memory": 1 << 14}},
    ],
    ids=str,
)
def test_options_that_reach_the_plan(plain: str, options: dict[str, Any]) -> None:
    """Options that TensorRT-RTX honours change the plan's bytes, so they must be in the key."""
    assert digest(build(options)) != plain


def test_defaults_spelled_out_change_nothing(plain: str) -> None:
    """Options set to the table's defaults, which are left out of the key, leave the real library's plan as it is."""
    defaults = {name: spec.default for name, spec in option_specs().items() if spec.rtx and spec.default is not None}
    assert {"sparse_weights", "weight_streaming"} <= set(defaults)
    for name, value in defaults.items():
        assert digest(build({name: value})) == plain, name


@pytest.mark.parametrize(
    "options",
    [
        {"optimization_level": 0},
        {"optimization_level": 5},
        {"max_aux_streams": 1},
        {"workspace": 1 << 28},
        {"sparse_weights": True},
        {"memory_pools": {"tactic_dram": 1 << 28}},
        {"direct_io": True},
        {"debug": True},
        {"strict_nans": True},
        {"distributive_independence": True},
        {"builder_threads": 2},
        {"monitor_memory": True},
        {"native_instancenorm": True},
        {"preview_features": {"runtime_activation_resize": True}},
    ],
    ids=str,
)
def test_options_that_are_accepted(options: dict[str, Any]) -> None:
    """Every other option offered for TensorRT-RTX is one that the installed library takes."""
    output = build(options)
    header = read_header(memoryview(output.plan))
    assert header is not None
    assert header.size == output.plan.nbytes


def test_compute_capabilities() -> None:
    """One set of compute capabilities, one plan; the plan's own header says which it serves."""
    found = {}
    for wanted in (["8.6"], ["8.9"], ["8.6", "8.9"]):
        output = build(target=twc.Target(compute_capabilities=wanted))
        header = read_header(memoryview(output.plan))
        assert header is not None
        assert list(header.compute_capabilities) == wanted
        assert output.config["compute_capabilities"] == ["SM" + cc.replace(".", "") for cc in wanted]
        found[digest(output)] = wanted
    assert len(found) == 3
    with pytest.raises(twc.ConfigError, match=r"cannot build for compute capability 9\.0; it offers"):
        build(target=twc.Target(compute_capabilities=["9.0"]))
    with pytest.raises(twc.ConfigError, match="not one GPU"):
        build(target=twc.Target(gpu="NVIDIA A10", compute_capability="8.6"))


def test_a_plan_for_other_gpus_than_asked_is_refused() -> None:
    """The plan's own header has the last word on which GPUs it serves."""
    output = build(target=twc.Target(compute_capabilities=["8.6"]))
    asked = build_inputs(tiny_model(width=64), profiles=FIXED, target=twc.Target(compute_capabilities=["8.9"]))
    with pytest.raises(twc.BuildError, match=r"asked for compute capabilities 8\.9 and says that it serves 8\.6"):
        TensorRTRTXBuilder()._add_extras(output, None, asked)


def test_timing_cache_is_never_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls do nothing on TensorRT-RTX, warn, and may look for a GPU; none is made."""
    import tensorrt_rtx

    def forbidden(*_: Any) -> Any:
        raise AssertionError("a timing-cache call on TensorRT-RTX")

    for name in ("create_timing_cache", "set_timing_cache", "get_timing_cache"):
        monkeypatch.setattr(tensorrt_rtx.IBuilderConfig, name, forbidden)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = build(timing=b"left over from somewhere")
    assert output.timing is None
    assert not [line for line in output.warnings if "iming cache" in line]


def test_progress_and_cancellation() -> None:
    """The outermost phase is TensorRT's own; a checkpoint's exception comes out unchanged and the next build works."""
    steps: list[Progress] = []
    build(on_progress=steps.append)
    assert next(step.phase for step in steps if step.parent is None) == "Building engine"
    assert all(0 <= step.step <= step.total for step in steps)
    for error in (twc.BuildTimeout("late"), KeyboardInterrupt(), MemoryError(), SystemExit(1)):
        calls = iter(range(10_000))

        def checkpoint(error: BaseException = error, calls: Any = calls) -> None:
            if next(calls) == 8:
                raise error

        with pytest.raises(type(error)) as raised:
            build(checkpoint=checkpoint)
        assert raised.value is error
    assert build().plan.nbytes > 0


def test_refused_models() -> None:
    """The parser's first error is reported with node and operator; an empty graph is no engine."""
    import onnx

    broken = onnx.load_model_from_string(tiny_model(width=64))
    broken.graph.node[1].op_type = "NoSuchOperator"
    with pytest.raises(twc.ModelError, match="NoSuchOperator") as refused:
        TensorRTRTXBuilder().build(build_inputs(broken.SerializeToString(), profiles=FIXED, target=PORTABLE))
    assert refused.value.node == "act"
    assert refused.value.operator == "NoSuchOperator"
    empty = onnx.load_model_from_string(tiny_model(width=64))
    del empty.graph.node[:], empty.graph.output[:], empty.graph.initializer[:], empty.graph.input[:]
    with pytest.raises(twc.ModelError, match="has no graph"):
        TensorRTRTXBuilder().build(build_inputs(empty.SerializeToString(), profiles=(), target=PORTABLE))


@pytest.mark.parametrize("options", [{"refit": "all"}, {"strip_plan": True}, {"version_compatible": True}])
def test_what_fails_without_a_gpu_says_so(options: dict[str, Any]) -> None:
    """Builds that TensorRT-RTX cannot do here are errors with its first message, never an empty plan."""
    with pytest.raises((twc.BuildError, twc.ConfigError)) as failed:
        build(options)
    assert len(failed.value.message) > 40


def test_failures_beside_good_builds() -> None:
    """Builds in several threads: the failing ones have their own reasons, the good ones none of those."""
    wrong = build_inputs(tiny_model(width=64), profiles=FIXED, target=PORTABLE, options=twc.BuildOptions(workspace=1))

    def fail() -> str:
        with pytest.raises(twc.BuildError) as failed:
            TensorRTRTXBuilder().build(wrong)
        return failed.value.message

    with ThreadPoolExecutor(4) as pool:
        failures = [pool.submit(fail) for _ in range(4)]
        good = [pool.submit(build) for _ in range(4)]
        assert all("workspace limit" in failure.result() for failure in failures)
        assert all(one.result().warnings == () for one in good)


def test_check_plan() -> None:
    """The header tells whole plans of this version from everything else before TensorRT sees a byte."""
    builder = TensorRTRTXBuilder()
    plan = bytearray(build().plan)
    builder.check_plan(memoryview(plan))
    for damaged, error in (
        (plan[:-1], twc.IntegrityError),
        (plan[:40], twc.IntegrityError),
        (b"\0" * 100, twc.IntegrityError),
        (plan[:25] + b"\x63" + plan[26:], twc.IncompatibleError),
        (b"ftrt" + plan[4:], twc.IncompatibleError),
    ):
        with pytest.raises(error):
            builder.check_plan(memoryview(damaged))


def test_external_weights(tmp_path: Path) -> None:
    """Weights beside the graph are found, from a folder with a name that parsers were reported to stumble over too."""
    import onnx

    folder = tmp_path / "mödel"
    folder.mkdir()
    path = folder / "m.onnx"
    model = onnx.load_model_from_string(tiny_model(width=64))
    onnx.save_model(model, str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    output = TensorRTRTXBuilder().build(build_inputs(path, profiles=FIXED, target=PORTABLE))
    assert output.plan.nbytes > 1000


def test_loading_without_a_gpu_says_why() -> None:
    """A good plan on a machine that cannot run it is the machine's fault; damage is the plan's."""
    builder = TensorRTRTXBuilder()
    plan = bytearray(build().plan)
    with pytest.raises(twc.IncompatibleError) as refused:
        builder.deserialize(memoryview(plan))
    assert not refused.value.about_plan
    with pytest.raises(twc.IntegrityError):
        builder.deserialize(memoryview(b"\0" * 4096))


@pytest.mark.parametrize(
    ("bits", "error", "text"),
    [
        (0, None, ""),
        (1, twc.IncompatibleError, "built by another version"),
        (2 | 4, twc.IncompatibleError, "not among those it was built for; the CUDA driver is too old"),
        (16, twc.IncompatibleError, "not enough GPU memory"),
        (32, twc.IntegrityError, "malformed"),
        (32 | 2, twc.IntegrityError, "malformed"),
    ],
)
def test_validity_bits(bits: int, error: type[Exception] | None, text: str) -> None:
    """What TensorRT-RTX says about a plan before it reads all of it; invalid without a reason means no GPU to judge by."""

    class Runtime:
        engine_header_size = 64

        def get_engine_validity(self, header: bytes) -> tuple[str, int]:
            assert len(header) == 64
            return "INVALID", bits

    check = TensorRTRTXBuilder()._check_runtime
    header = memoryview(b"vtrt" + bytes(28) + bytes([0x0C]) + bytes(67))
    if bits & 2 and not bits & 32:
        with pytest.raises(error or AssertionError, match=r"it serves 8\.6, 8\.9"):
            check(None, Runtime(), header)
    if error is None:
        check(None, Runtime(), memoryview(bytes(100)))
    else:
        with pytest.raises(error, match=text):
            check(None, Runtime(), memoryview(bytes(100)))
