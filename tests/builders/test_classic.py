"""The classic adapter over every release line: what it sets, what it refuses, and how it fails."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import pytest
from tests.builders.support import A10, build_inputs
from tests.fakes import LINES, Gpu, Line, make_tensorrt, record_of
from tests.fakes._build import read_plan
from tests.fakes._memory import host_memory
from tests.support import tiny_model

import trt_warmcache as twc
from trt_warmcache.builders import Progress, TensorRTBuilder
from trt_warmcache.builders._config import canonical_name
from trt_warmcache.builders._nvinfer import _blames_plan

EDITABLE: tuple[Line, ...] = ("10.16", "11.4")
SELECTOR: tuple[Line, ...] = ("8.6", "10.3", "10.16")


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    return tmp_path / "locks"


def make(line: Line, locks: Path, **options: Any) -> tuple[TensorRTBuilder, Any]:
    module = make_tensorrt(line, **options)
    return TensorRTBuilder(module, lock_folder=locks), module


@pytest.mark.parametrize("line", LINES)
def test_build_and_load(line: Line, locks: Path) -> None:
    """On every line a model with profiles becomes a plan that the same line loads; nothing is warned about."""
    builder, _ = make(line, locks)
    output = builder.build(build_inputs())
    plan = read_plan(output.plan)
    assert plan["network"] == "trtwc-test"
    assert plan["profiles"] == [{"x": [[1, 4], [2, 4], [8, 4]]}]
    assert output.warnings == ()
    assert output.library == builder.version()
    assert builder.deserialize(memoryview(output.plan)).num_layers == 2


@pytest.mark.parametrize("line", LINES)
def test_capabilities_follow_the_version(line: Line, locks: Path) -> None:
    """Progress came with 10.0 and calibrators went with 11.0; the table says so before anything is imported."""
    capabilities = make(line, locks)[0].capabilities
    assert capabilities.progress is (line != "8.6")
    assert capabilities.calibration_table is (line != "11.4")
    assert capabilities.timing_cache


@pytest.mark.parametrize("line", LINES)
def test_no_gpu(line: Line, locks: Path) -> None:
    """pybind's TypeError about a null pointer becomes an error that carries CUDA's own message."""
    builder, _ = make(line, locks, gpu=None)
    with pytest.raises(twc.BuildError, match="CUDA initialization failure with error: 35"):
        builder.build(build_inputs())
    with pytest.raises(twc.IncompatibleError, match="error: 35"):
        builder.deserialize(memoryview(make(line, locks)[0].build(build_inputs()).plan))


@pytest.mark.parametrize("line", LINES)
def test_quiet_failures_speak(line: Line, locks: Path) -> None:
    """A build that returns None is reported with the first logged error, a refused model with the parser's own."""
    builder, _ = make(line, locks, fail_build="Error Code 10: no implementation for node mul")
    with pytest.raises(twc.BuildError, match="no implementation for node mul") as failed:
        builder.build(build_inputs())
    assert any("Error Code 10" in entry for entry in failed.value.log)
    builder, _ = make(line, locks)
    broken = onnx.load_model_from_string(tiny_model())
    broken.graph.node[1].op_type, broken.graph.node[1].domain = "Nonsense", "com.example"
    with pytest.raises(twc.ModelError, match="No importer registered for op: Nonsense") as refused:
        builder.build(build_inputs(broken.SerializeToString()))
    assert refused.value.operator == (None if line == "8.6" else "Nonsense")
    assert refused.value.node == (None if line == "8.6" else "act")


@pytest.mark.parametrize("line", LINES)
def test_errors_reach_their_own_operation(line: Line, locks: Path) -> None:
    """TensorRT may log to the first logger that it was ever given; the reason of each failure still reaches its caller."""
    builder, module = make(line, locks)
    world, loggers = module._fake, list[Any]()
    log = type(world).log

    def first_wins(logger: Any, severity: str, message: str, recorder: Any = None) -> None:
        loggers.append(logger)
        log(world, loggers[0], severity, message, recorder)

    world.log = first_wins
    engine = builder.deserialize(memoryview(builder.build(build_inputs()).plan))
    world.fail_build = "Error Code 10: no implementation"
    with pytest.raises(twc.BuildError, match="no implementation") as failed:
        TensorRTBuilder(module, lock_folder=locks).build(build_inputs())
    assert len(failed.value.log) < 5
    assert engine.num_layers == 2
    assert len({id(logger) for logger in loggers}) == 1


def test_lines_of_one_operation(locks: Path) -> None:
    """Lines go to the operation of the thread that logs them; those of TensorRT's own threads go to all that listen."""
    from trt_warmcache.builders._log import TrtLog, listening

    module = make_tensorrt("11.4")
    severity = module.ILogger.Severity.ERROR
    with listening(module) as (logger, outer):
        with listening(module) as (same, inner):
            assert same is logger
            logger.log(severity, "inner")
        elsewhere = list[TrtLog]()

        def listen() -> None:
            with listening(module) as (_, messages):
                logger.log(severity, "elsewhere")
                elsewhere.append(messages)
                stranger = threading.Thread(target=logger.log, args=(severity, "a thread of TensorRT's own"))
                stranger.start()
                stranger.join()

        thread = threading.Thread(target=listen)
        thread.start()
        thread.join()
        logger.log(severity, "outer")
    logger.log(severity, "nobody listens")
    with logger.router._lock:  # as when an engine is collected in the middle of it
        logger.log(severity, "on the way out")
    assert inner.errors == ["inner"]
    assert elsewhere[0].errors == ["elsewhere", "a thread of TensorRT's own"]
    assert outer.errors == ["a thread of TensorRT's own", "outer"]


@pytest.mark.parametrize(
    ("reason", "plan"),
    [
        ("Error Code 1: Serialization (Version tag does not match: expecting library version 10.3.0 got 8.6.1)", True),
        ("Error Code 1: Serialization (Serialization assertion magicTagRead == kMAGIC_TAG failed.)", True),
        ("Error Code 1: Serialization: out of memory while reading weights", False),
        ("Error Code 6: API Usage Error (expecting compute 8.6 got compute 7.5)", False),
        ("CUDA initialization failure with error: 35", False),
    ],
)
def test_who_is_to_blame_for_a_failed_load(reason: str, plan: bool) -> None:
    """Only what no machine could load is the plan's fault; everything else leaves the entry alone."""
    assert _blames_plan(reason) is plan


@pytest.mark.parametrize("line", LINES)
def test_missing_profile_is_tensorrts_own_error(line: Line, locks: Path) -> None:
    """A dynamic input without a profile cannot be built, and the reason is passed on."""
    inputs = build_inputs()
    bare = type(inputs)(**{**vars(inputs), "profiles": ()})
    with pytest.raises(twc.BuildError, match="no optimization profile"):
        make(line, locks)[0].build(bare)


@pytest.mark.parametrize("line", LINES)
def test_refused_profile_and_foreign_plan(line: Line, locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile index of -1, and a result that is another flavour's plan, are errors with TensorRT's own reason."""
    builder, module = make(line, locks)
    build, config = module._fake.classes["Builder"], module._fake.classes["IBuilderConfig"]
    foreign = host_memory(module._fake, b"vtrt" + bytes(100))
    with monkeypatch.context() as patch:
        patch.setattr(build, "build_serialized_network", lambda self, network, config: foreign)
        with pytest.raises(twc.BuildError, match=r"no plan of its own: .*tensorrt_rtx"):
            builder.build(build_inputs())

    def refuse(self: Any, profile: Any) -> int:
        self._log("ERROR", "kMAX does not fit")
        return -1

    monkeypatch.setattr(config, "add_optimization_profile", refuse)
    with pytest.raises(twc.ConfigError, match=r"refused the profile .*: kMAX does not fit"):
        builder.build(build_inputs())


@pytest.mark.parametrize("line", LINES)
def test_progress_and_cancellation(line: Line, locks: Path) -> None:
    """Steps are reported where the line has a monitor, and whatever a checkpoint raises comes out, unchanged."""
    steps: list[Progress] = []
    builder, module = make(line, locks)
    builder.build(build_inputs(on_progress=steps.append))
    if line == "8.6":
        assert steps == []
        return
    assert steps[0].phase == "Building engine"
    assert steps[0].parent is None
    inner = [step for step in steps if step.phase == "Timing tactics"]
    assert {step.parent for step in inner} == {"Building engine"}
    assert max(step.step for step in inner) == inner[0].total == 2
    for error in (twc.BuildTimeout("too slow"), KeyboardInterrupt(), MemoryError(), SystemExit(3)):
        calls = iter(range(100))

        def checkpoint(error: BaseException = error, calls: Any = calls) -> None:
            if next(calls) == 5:
                raise error

        with pytest.raises(type(error)) as raised:
            builder.build(build_inputs(checkpoint=checkpoint))
        assert raised.value is error
    assert builder.build(build_inputs()).plan.nbytes > 0
    assert record_of(module).builders == 6


@pytest.mark.parametrize("line", LINES)
def test_effective_config_is_named_and_canonical(line: Line, locks: Path) -> None:
    """What is recorded has names, one per member, although .name answers another one on some lines."""
    options: dict[str, Any] = {"optimization_level": 4, "workspace": 1 << 20, "tf32": False}
    if line != "8.6":
        options.update(strip_plan=True, refit="identical")
    config = make(line, locks)[0].build(build_inputs(options=twc.BuildOptions(**options))).config
    assert config["builder_optimization_level"] == 4
    assert config["memory_pools"] == {"workspace": 1 << 20}
    assert config["engine_capability"] == "STANDARD"
    assert config["flags"] == ([] if line == "8.6" else ["REFIT_IDENTICAL", "STRIP_PLAN"])
    assert config["hardware_compatibility_level"] == "NONE"
    assert json.loads(json.dumps(config)) == config
    assert canonical_name("BuilderFlag", "WEIGHTLESS") == "STRIP_PLAN"


@pytest.mark.parametrize("line", LINES)
def test_layer_precisions(line: Line, locks: Path) -> None:
    """Rules by layer name reach the layers where the line has them; a rule that matches nothing is refused."""
    builder, _ = make(line, locks)
    options = twc.BuildOptions(
        fp16=True, precision_constraints="obey", layer_precisions=[("m*", "float16"), ("act", "float32")]
    )
    if line == "11.4":
        with pytest.raises(twc.ConfigError, match=r"'fp16' does not exist in TensorRT 11\.4"):
            builder.build(build_inputs(options=options))
        return
    plan = read_plan(builder.build(build_inputs(options=options)).plan)
    assert plan["precisions"] == {"mul": "HALF", "act": "FLOAT"}
    assert {"FP16", "OBEY_PRECISION_CONSTRAINTS"} <= set(plan["flags"])
    named = onnx.load_model_from_string(tiny_model())
    named.graph.node[0].name = "(Unnamed Layer* 0) [MatMul]"
    exact = twc.BuildOptions(layer_precisions={"(Unnamed Layer* 0) [MatMul]": "float16"})
    plan = read_plan(builder.build(build_inputs(named.SerializeToString(), options=exact)).plan)
    assert plan["precisions"] == {"(Unnamed Layer* 0) [MatMul]": "HALF"}
    with pytest.raises(twc.ConfigError, match="no layer matches 'nothing'"):
        builder.build(build_inputs(options=twc.BuildOptions(layer_precisions={"nothing": "float16"})))


@pytest.mark.parametrize("line", LINES)
def test_configure_hook(line: Line, locks: Path) -> None:
    """The hook sees the finished network and configuration, has the last word, and its error names it."""

    def fewer(network: Any, config: Any) -> None:
        assert network.num_layers == 2
        config.avg_timing_iterations = 7

    builder, _ = make(line, locks)
    output = builder.build(build_inputs(configure=fewer))
    assert output.config["avg_timing_iterations"] == 7
    assert read_plan(output.plan)["settings"]["avg_timing_iterations"] == 7

    def broken(network: Any, config: Any) -> None:
        config.no_such_thing = 1

    with pytest.raises(twc.ConfigError, match=r"configure\(network, config\) failed with AttributeError"):
        builder.build(build_inputs(configure=broken))


@pytest.mark.parametrize("line", LINES)
def test_settings_that_do_not_take_are_told(line: Line, locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setter that only logs its refusal, or does nothing at all, is an error naming the setting and the reason."""
    builder, module = make(line, locks)
    pools = twc.BuildOptions(memory_pools={"dla_managed_sram": 1 << 20})
    with pytest.raises(twc.ConfigError, match=r"refused memory_pools=\{'dla_managed_sram': 1048576\}: .*no DLA"):
        builder.build(build_inputs(options=pools))
    config = module._fake.classes["IBuilderConfig"]
    monkeypatch.setattr(config, "set_flag", lambda self, flag: None)
    with pytest.raises(twc.ConfigError, match="builder flag SPARSE_WEIGHTS was to be on and stayed off"):
        builder.build(build_inputs(options=twc.BuildOptions(sparse_weights=True)))
    monkeypatch.setattr(config, "max_aux_streams", property(lambda self: 7, lambda self, value: None))
    with pytest.raises(twc.ConfigError, match="refused a setting in silence: max_aux_streams was to be 2 and stayed 7"):
        builder.build(build_inputs(options=twc.BuildOptions(max_aux_streams=2)))


# ---- timing cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", LINES)
def test_timing_cache_is_used_and_grows(line: Line, locks: Path) -> None:
    """Layers timed once are not timed again, by count and not by the clock; the cache only grows."""
    builder, module = make(line, locks)
    first = builder.build(build_inputs())
    assert record_of(module).tactics_timed == 2
    again = builder.build(build_inputs(timing=first.timing))
    assert record_of(module).tactics_timed == 2
    assert record_of(module).tactics_from_cache == 2
    assert again.timing == first.timing
    wider = builder.build(build_inputs(tiny_model(width=5), profiles={"x": ("1x5", "2x5", "8x5")}, timing=first.timing))
    assert wider.timing is not None
    assert first.timing is not None
    assert len(wider.timing) > len(first.timing)
    assert first.timing_rejected == wider.timing_rejected == ""
    assert first.timing_entries == (None if line in {"8.6", "10.3"} else 2)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("damage", ["flip", "cut", "garbage", "other device", "other release"])
def test_unusable_timing_blob_is_noticed(line: Line, locks: Path, damage: str) -> None:
    """TensorRT answers an unusable blob with an empty cache and True; the adapter notices and goes on without."""
    builder, _ = make(line, locks)
    good = builder.build(build_inputs()).timing
    assert good is not None
    blobs: dict[str, Any] = {
        "flip": lambda: good[:60] + bytes([good[60] ^ 1]) + good[61:],
        "cut": lambda: good[:-20],
        "garbage": lambda: b"no timing cache at all",
        "other device": lambda: make(line, locks, gpu=Gpu("NVIDIA L4", (8, 9), 58))[0].build(build_inputs()).timing,
        "other release": lambda: make("10.3" if line != "10.3" else "8.6", locks)[0].build(build_inputs()).timing,
    }
    blob = blobs[damage]()
    output = builder.build(build_inputs(timing=blob))
    assert output.timing_rejected
    assert output.timing == good
    with pytest.raises(twc.BuildError):
        builder.merge_timing(good, blob or b"")


@pytest.mark.parametrize("line", LINES)
def test_refused_timing_cache_is_noticed(line: Line, locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that can be read and is refused when attached, for another device's properties, is put aside too."""
    builder, module = make(line, locks)
    good = builder.build(build_inputs()).timing
    config = module._fake.classes["IBuilderConfig"]
    attach = config.set_timing_cache
    monkeypatch.setattr(
        config,
        "set_timing_cache",
        lambda self, cache, ignore_mismatch: not cache._entries and attach(self, cache, False),
    )
    output = builder.build(build_inputs(timing=good))
    assert output.timing_rejected == "TensorRT refused the stored timing cache: it was measured on another device"
    assert output.timing == good
    assert record_of(module).tactics_timed == 4


@pytest.mark.parametrize("line", LINES)
def test_timing_modes(line: Line, locks: Path) -> None:
    """Off gives no blob; require fails on the first layer that would have to be timed, and says which."""
    builder, _ = make(line, locks)
    assert builder.build(build_inputs(options=twc.BuildOptions(timing="off"))).timing is None
    strict = twc.BuildOptions(timing="require")
    if line == "8.6":
        with pytest.raises(twc.ConfigError, match=r"needs TensorRT 10\.0 and later"):
            builder.build(build_inputs(options=strict))
        return
    with pytest.raises(twc.BuildError, match="timing cache miss for mul"):
        builder.build(build_inputs(options=strict))
    blob = builder.build(build_inputs()).timing
    assert builder.build(build_inputs(options=strict, timing=blob)).plan.nbytes > 0


@pytest.mark.parametrize("line", LINES)
def test_merge_keeps_the_union_and_the_newer(line: Line, locks: Path) -> None:
    """Both caches' entries survive; where both have one, the newer measurement stays."""
    builder, _ = make(line, locks, nondeterministic=True)
    shared = build_inputs()
    wide = build_inputs(tiny_model(width=5), profiles={"x": ("1x5", "2x5", "8x5")})
    older = builder.build(wide).timing
    newer = builder.build(shared).timing
    assert older is not None
    assert newer is not None
    other = builder.build(shared).timing
    assert other is not None
    union = json.loads(builder.merge_timing(newer, older)[40:])["entries"]
    assert len(union) >= 3
    both = json.loads(builder.merge_timing(newer, other)[40:])["entries"]
    assert both == json.loads(newer[40:])["entries"]
    assert both != json.loads(other[40:])["entries"]


@pytest.mark.parametrize("line", LINES)
def test_entries_can_be_listed_and_pinned(line: Line, locks: Path) -> None:
    """From 10.8 an editable cache lists its tactics and takes others; earlier lines say which release can."""
    builder, _ = make(line, locks)
    blob = builder.build(
        build_inputs(options=twc.BuildOptions() if line not in EDITABLE else twc.BuildOptions(timing="editable"))
    ).timing
    assert blob is not None
    if line not in EDITABLE:
        with pytest.raises(twc.ConfigError, match=r"10\.8 or later"):
            builder.timing_entries(blob)
        return
    first, second = builder.timing_entries(blob)
    assert first.key < second.key
    assert first.milliseconds > 0
    pinned = builder.pin_timing(blob, twc.TacticReplay(entries={first.key: 42}))
    assert [entry.tactic for entry in builder.timing_entries(pinned)] == [42, second.tactic]
    with pytest.raises(twc.ConfigError, match="no entry for 0x0000"):
        builder.pin_timing(blob, twc.TacticReplay(entries={"0x" + "0" * 32: 1}))


@pytest.mark.parametrize("line", LINES)
def test_replicas_get_the_same_tactics(line: Line, locks: Path) -> None:
    """Tactics drawn by noisy timing are recorded once and reproduced by every replica that has the record."""
    recorder, _ = make(line, locks, nondeterministic=True)
    recorded = recorder.build(build_inputs(options=twc.BuildOptions(record_tactics=True)))
    assert recorded.tactics is not None
    wanted = read_plan(recorded.plan)["tactics"]
    assert twc.TacticReplay.from_json(json.loads(json.dumps(recorded.tactics.to_json()))) == recorded.tactics
    pinned = twc.BuildOptions(tactics=recorded.tactics)
    if line in {"8.6", "10.3"}:
        # A selector can only choose among what this replica offers, and noise may not offer it.
        replica, _ = make(line, locks)
        deterministic = replica.build(build_inputs(options=twc.BuildOptions(record_tactics=True)))
        assert deterministic.tactics is not None
        options = twc.BuildOptions(tactics=deterministic.tactics)
        assert (
            read_plan(replica.build(build_inputs(options=options)).plan)["tactics"]
            == read_plan(deterministic.plan)["tactics"]
        )
        with pytest.raises(twc.BuildError, match="recorded tactics do not exist for layers 'mul'"):
            replica.build(build_inputs(options=pinned))
        return
    for _ in range(3):
        replica, module = make(line, locks, nondeterministic=True)
        output = replica.build(build_inputs(options=pinned))
        assert read_plan(output.plan)["tactics"] == wanted
        assert record_of(module).builds == 2  # the first taught the keys, the second used the tactics
        again = replica.build(build_inputs(options=pinned, timing=output.timing))
        assert read_plan(again.plan)["tactics"] == wanted
        assert record_of(module).builds == 3


@pytest.mark.parametrize("line", LINES)
def test_foreign_tactics_are_refused(line: Line, locks: Path) -> None:
    """A record of another model, or of a kind that the line lacks, is an error and not silently ignored."""
    builder, _ = make(line, locks)
    layers = twc.BuildOptions(tactics={"layers": {"mul": (1, 2)}})
    entries = twc.BuildOptions(tactics={"entries": {"0x" + "1" * 32: 5}})
    if line == "11.4":
        with pytest.raises(twc.ConfigError, match=r"tactics='layers' does not exist in TensorRT 11\.4"):
            builder.build(build_inputs(options=layers))
    else:
        with pytest.raises(twc.BuildError, match="do not exist for layers 'mul'"):
            builder.build(build_inputs(options=layers))
    with pytest.raises(twc.ConfigError if line not in EDITABLE else twc.BuildError):
        builder.build(build_inputs(options=entries))


WIDE = {"x": ("1x5", "2x5", "8x5")}


@pytest.mark.parametrize("line", EDITABLE)
def test_a_record_is_of_one_build(line: Line, locks: Path) -> None:
    """Recording over a cache that many models share records this build's tactics alone, and loses none of the others'."""
    builder, _ = make(line, locks, nondeterministic=True)
    others = builder.build(build_inputs(tiny_model(width=5), profiles=WIDE)).timing
    assert others is not None
    ours = builder.build(build_inputs(timing=others)).timing
    recorded = builder.build(build_inputs(options=twc.BuildOptions(record_tactics=True), timing=ours))
    assert recorded.tactics is not None
    assert len(recorded.tactics.entries) == 2
    # what is stored already stays in force, pins set by hand among it
    assert read_plan(recorded.plan)["tactics"] == read_plan(builder.build(build_inputs(timing=ours)).plan)["tactics"]
    assert recorded.timing == ours
    replica, _ = make(line, locks, nondeterministic=True)
    output = replica.build(build_inputs(options=twc.BuildOptions(tactics=recorded.tactics)))
    assert read_plan(output.plan)["tactics"] == read_plan(recorded.plan)["tactics"]
    damaged = builder.build(build_inputs(options=twc.BuildOptions(record_tactics=True), timing=b"x" * 400))
    assert damaged.timing_rejected
    assert damaged.tactics is not None


@pytest.mark.parametrize("line", EDITABLE)
def test_pins_stay_with_their_build(line: Line, locks: Path) -> None:
    """Tactics pinned by one request's options do not reach other models through the cache that they share."""
    builder, _ = make(line, locks)
    measured = builder.build(build_inputs()).timing
    assert measured is not None
    first, second = builder.timing_entries(
        builder.build(build_inputs(options=twc.BuildOptions(timing="editable"))).timing or b""
    )
    pins = twc.BuildOptions(tactics={"entries": {first.key: 42}}, record_tactics=True)
    for blob in (None, measured):
        output = builder.build(build_inputs(options=pins, timing=blob))
        assert set(read_plan(output.plan)["tactics"].values()) == {42, second.tactic}
        assert output.tactics == twc.TacticReplay(entries={first.key: 42, second.key: second.tactic})
        assert output.timing == measured


@pytest.mark.parametrize("line", LINES)
def test_recording_without_or_by_a_complete_cache(line: Line, locks: Path) -> None:
    """Where an algorithm selector exists it records also without a timing cache; what cannot record is refused."""
    builder, _ = make(line, locks)
    off = twc.BuildOptions(record_tactics=True, timing="off")
    if line == "11.4":
        with pytest.raises(twc.ConfigError, match="timing='off' forbids"):
            builder.build(build_inputs(options=off))
    else:
        output = builder.build(build_inputs(options=off))
        assert output.timing is None
        assert output.tactics is not None
        assert set(output.tactics.layers) == {"mul", "act"}
        pinned = builder.build(build_inputs(options=twc.BuildOptions(tactics=output.tactics, timing="off")))
        assert read_plan(pinned.plan)["tactics"] == read_plan(output.plan)["tactics"]
    require = twc.BuildOptions(record_tactics=True, timing="require")
    if line == "10.3":
        blob = builder.build(build_inputs()).timing
        assert builder.build(build_inputs(options=require, timing=blob)).tactics is not None
    elif line in EDITABLE:
        with pytest.raises(twc.ConfigError, match="timing='require' forbids"):
            builder.build(build_inputs(options=require))


@pytest.mark.parametrize("line", EDITABLE)
def test_nothing_to_record_is_told(line: Line, locks: Path) -> None:
    """Where nothing was timed there is no record, and the entry says so."""
    options = twc.BuildOptions(record_tactics=True, optimization_level=0)
    output = make(line, locks)[0].build(build_inputs(options=options))
    assert output.tactics is None
    assert output.warnings == ("record_tactics found nothing to record: TensorRT timed nothing in this build.",)


@pytest.mark.parametrize("line", SELECTOR)
def test_layers_that_never_occur_are_told(line: Line, locks: Path) -> None:
    """A recorded layer that TensorRT never asks about was pinned by nobody: an error, not silence."""
    builder, _ = make(line, locks)
    record = builder.build(build_inputs(options=twc.BuildOptions(record_tactics=True, timing="off"))).tactics
    assert record is not None
    implementation, tactic = record.layers["mul"]
    other = twc.TacticReplay(layers={"mul": (implementation + 1, tactic)})
    with pytest.raises(twc.BuildError, match="do not exist for layers 'mul'"):
        builder.build(build_inputs(options=twc.BuildOptions(tactics=other)))
    strange = twc.TacticReplay(layers={**record.layers, "elsewhere": (1, 2)})
    with pytest.raises(twc.BuildError, match="do not occur in this build, such as 'elsewhere'"):
        builder.build(build_inputs(options=twc.BuildOptions(tactics=strange)))


# ---- one build per GPU ------------------------------------------------------------------------------------------


def test_one_build_per_gpu_at_a_time(locks: Path) -> None:
    """Builds on one GPU never overlap, so that timings stay clean; builds on several GPUs do."""
    guard = threading.Lock()
    running, most = [0], [0]

    def build(uuid: str, inside: Any) -> None:
        def on_progress(step: Progress) -> None:
            if step.phase == "Building engine" and step.step == 0:
                inside()

        builder, _ = make("10.16", locks)
        builder.build(build_inputs(target=twc.Target(**{**A10.to_json(), "uuid": uuid}), on_progress=on_progress))

    def alone() -> None:
        with guard:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.05)
        with guard:
            running[0] -= 1

    together = threading.Barrier(4, timeout=60)  # passed only by four builds at once
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(build, ["GPU-1"] * 4, [alone] * 4))
        assert most == [1]
        list(pool.map(build, [f"GPU-{number}" for number in range(4)], [together.wait] * 4))
    assert not together.broken


def test_targets_that_do_not_name_their_gpu_wait_for_this_ones_turn(locks: Path) -> None:
    """A spelled-out target is built for on this process's GPU, so its turn is the same as a detected target's."""
    from trt_warmcache.builders._device_lock import device_turn

    class Here(TensorRTBuilder):
        def current_device(self) -> str:
            return "GPU-a10"

    def impatient() -> None:
        if next(calls) > 6:
            raise twc.BuildTimeout("enough")

    nameless = twc.Target(**{**A10.to_json(), "uuid": None})
    builder, calls = Here(make_tensorrt("10.16"), lock_folder=locks), iter(range(100))
    with device_turn("GPU-a10", lambda: None, folder=locks), pytest.raises(twc.BuildTimeout, match="enough"):
        builder.build(build_inputs(target=nameless, checkpoint=impatient))
    assert builder.build(build_inputs(target=nameless)).plan.nbytes > 0


def test_waiting_for_the_gpu_can_be_cancelled(locks: Path) -> None:
    """A build that waits for its turn still listens to its deadline, and a dead holder keeps nobody out."""
    from trt_warmcache.builders._device_lock import device_turn

    calls = iter(range(100))

    def checkpoint() -> None:
        if next(calls) > 6:
            raise twc.BuildTimeout("enough")

    steps: list[Progress] = []
    with device_turn("GPU-a10", lambda: None, folder=locks), pytest.raises(twc.BuildTimeout, match="enough"):
        make("11.4", locks)[0].build(build_inputs(checkpoint=checkpoint, on_progress=steps.append))
    assert steps == [Progress("Waiting for the GPU", None, 0, 1)]
    assert make("11.4", locks)[0].build(build_inputs()).plan.nbytes > 0


def test_no_turn_to_be_had(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where no lock can be made the build goes on, with a warning; an error of the caller's own is not taken for that."""
    (tmp_path / "locks").write_text("in the way")
    assert make("11.4", tmp_path / "locks")[0].build(build_inputs()).plan.nbytes > 0
    assert "without waiting for other builds" in caplog.text

    def checkpoint() -> None:
        raise BrokenPipeError("the other side is gone")

    with pytest.raises(BrokenPipeError):
        make("11.4", tmp_path / "more")[0].build(build_inputs(checkpoint=checkpoint))


def test_waiting_for_the_gpu_is_progress(locks: Path) -> None:
    """Who watches a build sees that it waits, and that the wait is over; nothing is said where nobody waits."""
    from trt_warmcache.builders._device_lock import device_turn

    steps: list[Progress] = []
    turn = device_turn("GPU-a10", lambda: None, folder=locks)
    turn.__enter__()

    def on_progress(step: Progress) -> None:
        steps.append(step)
        if len(steps) == 1:
            turn.__exit__(None, None, None)

    make("8.6", locks)[0].build(build_inputs(on_progress=on_progress))
    assert steps == [Progress("Waiting for the GPU", None, done, 1) for done in (0, 1)]
    make("8.6", locks)[0].build(build_inputs(on_progress=on_progress))
    assert len(steps) == 2


# ---- plugins ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", LINES)
def test_plugin_libraries(line: Line, locks: Path, tmp_path: Path) -> None:
    """A library is loaded once, what it registers is recorded, and one that changed under the process is refused."""
    library = tmp_path / "libmine.so"
    library.write_text("example Shout 1\nexample Whisper 2\n")
    builder, _ = make(line, locks)
    output = builder.build(build_inputs(plugins=(library,)))
    assert output.plugins == ("example::Shout:1", "example::Whisper:2")
    builder.build(build_inputs(plugins=(library,)))
    library.write_text("example Shout 1\nexample Whisper 3\n\n"[:-1])
    library.touch()
    with pytest.raises(twc.ConfigError, match="changed after this process loaded it"):
        builder.build(build_inputs(plugins=(library,)))
    bad = tmp_path / "libbad.so"
    bad.write_text("junk\n")
    with pytest.raises(twc.ConfigError, match="could not load the plugin library"):
        builder.build(build_inputs(plugins=(bad,)))
