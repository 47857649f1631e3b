"""Calibration tables end to end: found or made once, in the key of the engine, and never silently wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.support import run_python

import trt_warmcache as twc
from trt_warmcache import calibration_run
from trt_warmcache.builders import BuilderCapabilities, BuildInputs
from trt_warmcache.events import Event, EventKind
from trt_warmcache.keys import Kind
from trt_warmcache.stores._base import blob_name, manifest_name
from trt_warmcache.testing import FakeBuilder, FlakyStore

pytest.importorskip("onnxruntime")

TABLES = BuilderCapabilities(progress=True, calibration_table=True)
PROFILE = {"x": ("1x3x8x8", "2x3x8x8", "4x3x8x8")}
WIDER = {"x": ("1x3x8x8", "2x3x8x8", "8x3x8x8")}


def conv_model(*, seed: int = 0, prefix: str = "", channels: int = 32) -> bytes:
    """Conv, Relu, Conv over input ``x`` of shape ?x3x8x8."""
    rng = np.random.default_rng(seed)
    weights = {
        "w1": rng.normal(0, 0.3, (channels, 3, 3, 3)),
        "w2": rng.normal(0, 0.3, (channels, channels, 3, 3)),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w1"], [f"{prefix}a"], "first", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"{prefix}a"], [f"{prefix}b"], "relu"),
            helper.make_node("Conv", [f"{prefix}b", "w2"], [f"{prefix}y"], "second", pads=[1, 1, 1, 1]),
        ],
        "conv",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info(f"{prefix}y", TensorProto.FLOAT, ["n", channels, 8, 8])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def batch(seed: int, scale: float = 1.0) -> dict[str, Any]:
    return {"x": (scale * np.random.default_rng(seed).normal(0, 1, (2, 3, 8, 8))).astype(np.float32)}


def batches(count: int = 3, first: int = 0) -> list[dict[str, Any]]:
    return [batch(first + seed) for seed in range(count)]


class Seen:
    """A hook that keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: EventKind) -> list[Event]:
        return [event for event in self.events if event.kind is kind]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "conv.onnx"
    path.write_bytes(conv_model())
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Calibration files, old enough for the digest memo."""
    path = tmp_path / "data"
    path.mkdir()
    for seed in range(3):
        np.save(path / f"{seed}.npy", batch(seed)["x"])
        os.utime(path / f"{seed}.npy", (1, 1))
    return path


def make(store: Any, builder: Any = None, **options: Any) -> twc.EngineManager:
    options.setdefault("memo", twc.DigestMemo(None))
    return twc.EngineManager(store, builder=builder or FakeBuilder(capabilities=TABLES), **options)


def ran(manager: twc.EngineManager) -> int:
    """How many calibrations this manager has begun."""
    return manager.counters().get("calibration_start", 0)


def stored(manager: twc.EngineManager, kind: Kind = Kind.CALIBRATION) -> list[str]:
    return [entry.digest for entry in manager.store.entries(kind)]


def table_of(plan: Any) -> twc.CalibrationTable:
    """The table that a fake builder was given."""
    import json

    return twc.CalibrationTable.parse(json.loads(bytes(plan)[8:])["calibration"])


# ---- table first, then the engine -------------------------------------------------------------------------------


def test_calibrated_once_for_all_engines(root: Path, model: Path) -> None:
    """The first engine calibrates; another profile, another target and another process find the table."""
    calibration = twc.Calibration(data=batches(), algorithm="minmax")
    with make(root) as manager:
        first = manager.get(model, profiles=PROFILE, calibration=calibration)
        assert first.outcome is twc.Outcome.BUILT
        assert ran(manager) == 1
        assert manager.get(model, profiles=WIDER, calibration=calibration).outcome is twc.Outcome.BUILT
        other = twc.Target(gpu="other", compute_capability="8.9")
        assert manager.get(model, profiles=PROFILE, calibration=calibration, target=other).outcome is twc.Outcome.BUILT
        assert ran(manager) == 1
        assert len(stored(manager)) == 1
        assert len(stored(manager, Kind.ENGINE)) == 3
    with make(root) as again:
        hit = again.get(model, profiles=PROFILE, calibration=twc.Calibration(data=batches(), algorithm="minmax"))
        assert hit.outcome is twc.Outcome.HIT
        assert ran(again) == 0


def test_engine_names_its_table(root: Path, model: Path) -> None:
    """The engine's key holds the table's digest, its manifest the table's key, and int8 is switched on."""
    calibration = twc.Calibration(data=batches())
    with make(root) as manager:
        engine = manager.get(model, profiles=PROFILE, calibration=calibration)
        entry = manager.store.manifest(Kind.CALIBRATION, engine.manifest.extra["calibration_key"])
        assert entry is not None
        assert engine.key.parts["calibration"] == entry.extra["table"] == table_of(engine.plan).digest
        assert engine.key.parts["options.int8"] is True
        assert "qdq" not in engine.key.parts
        assert manager.key(model, profiles=PROFILE, calibration=calibration) == engine.key
        assert manager.get(model, profiles=PROFILE).key != engine.key


def test_table_entry_tells_what_it_is(root: Path, model: Path) -> None:
    """The entry names model, data, algorithm, coverage, batches and samples, and who calibrated."""
    with make(root) as manager:
        found = manager.calibrate(
            model, twc.Calibration(data=batches(5), batches=4, preprocess="v2"), name="n", version="7"
        )
        assert found.manifest is not None
        manifest = found.manifest
    assert manifest.parts["model"].startswith("blake3:")
    assert manifest.parts["data"].startswith("batches:")
    assert (manifest.parts["algorithm"], manifest.parts["batches"], manifest.parts["preprocess"]) == (
        "entropy",
        4,
        "v2",
    )
    assert (manifest.extra["batches"], manifest.extra["samples"]) == (4, 8)
    assert manifest.extra["coverage"] == {"matched": 4, "missing": 0, "unknown": 0, "unusable": 0}
    assert manifest.extra["calibrator"].startswith("onnxruntime ")
    assert manifest.labels.entry == "n_7_int8-entropy_4-batches"
    assert not any(part.startswith("target") for part in manifest.parts)


@pytest.mark.parametrize(
    "change",
    [
        {"data": batches(3, first=50)},
        {"data": batches()[::-1]},
        {"data": batches(2)},
        {"algorithm": "percentile"},
        {"algorithm": "percentile", "percentile": 99.0},
        {"batches": 2},
        {"preprocess": "v2"},
    ],
    ids=["sample", "order", "fewer", "algorithm", "percentile", "batches", "preprocess"],
)
def test_what_makes_another_table(root: Path, model: Path, change: dict[str, Any]) -> None:
    """One sample, the order, the algorithm, the number of batches, the preprocessing: each makes a new table."""
    with make(root) as manager:
        manager.calibrate(model, twc.Calibration(data=batches(), algorithm="minmax"))
        manager.calibrate(model, twc.Calibration(**{"data": batches(), "algorithm": "minmax", **change}))
        assert ran(manager) == 2
        assert len(stored(manager)) == 2


def test_changed_weight_makes_another_table(root: Path, model: Path) -> None:
    """A retrained model is calibrated anew; the same content under another name is not."""
    calibration = twc.Calibration(data=batches(), algorithm="minmax")
    with make(root) as manager:
        manager.calibrate(model, calibration)
        copy = model.with_name("copy.onnx")
        copy.write_bytes(model.read_bytes())
        manager.calibrate(copy, calibration)
        assert ran(manager) == 1
        manager.calibrate(conv_model(seed=1), calibration)
        assert ran(manager) == 2


def test_one_table_for_classic_and_rtx(root: Path, model: Path) -> None:
    """A builder that reads tables and one that takes Q/DQ models share one calibration; their keys differ."""
    calibration = twc.Calibration(data=batches(), algorithm="minmax")
    seen: list[BuildInputs] = []
    with make(root) as classic:
        engine = classic.get(model, profiles=PROFILE, calibration=calibration)
    with make(root, FakeBuilder(on_build=seen.append)) as rtx:
        other = rtx.get(model, profiles=PROFILE, calibration=calibration)
        assert ran(rtx) == 0
    assert other.key.parts["calibration"] == engine.key.parts["calibration"]
    assert other.key.parts["model"] == engine.key.parts["model"]
    assert other.key.parts["qdq"]["min_channels"] == 17
    assert "options.int8" not in other.key.parts
    (inputs,) = seen
    assert inputs.calibration is None
    operators = [node.op_type for node in onnx.load_model_from_string(inputs.model.read()).graph.node]
    assert operators.count("QuantizeLinear") == 1


def test_qdq_options_are_part_of_the_engine_key_only(root: Path, model: Path) -> None:
    """Another way to insert Q/DQ nodes is another engine from the same table; the order of names means nothing."""

    def ask(manager: twc.EngineManager, **how: Any) -> twc.Engine:
        calibration = twc.Calibration(data=batches(), qdq=twc.QdqOptions(**how))
        return manager.get(model, profiles=PROFILE, calibration=calibration)

    with make(root, FakeBuilder()) as manager:
        assert ask(manager).outcome is twc.Outcome.BUILT
        assert ask(manager, min_channels=1).outcome is twc.Outcome.BUILT
        assert ask(manager, min_channels=1, op_types=["Gemm", "Conv"]).outcome is twc.Outcome.BUILT
        assert ask(manager, min_channels=1, op_types=("Conv", "Gemm", "Conv")).outcome is twc.Outcome.HIT
        assert ran(manager) == 1
        with pytest.raises(twc.ConfigError, match="did you mean 'min_channels'"):
            twc.QdqOptions(min_channel=1)  # type: ignore[call-arg]


def test_strongly_typed_networks_get_qdq(root: Path, model: Path) -> None:
    """A strongly typed network refuses calibrators, so the model is quantized there too."""
    with make(root) as manager:
        engine = manager.get(
            model,
            profiles=PROFILE,
            calibration=twc.Calibration(data=batches()),
            options=twc.BuildOptions(strongly_typed=True),
        )
    assert "qdq" in engine.key.parts
    assert "options.int8" not in engine.key.parts


def test_one_request_serves_all_builders(root: Path, model: Path) -> None:
    """int8=True beside a calibration is met by Q/DQ nodes where the option itself does not exist."""
    pytest.importorskip("tensorrt_rtx")
    options = twc.BuildOptions(int8=True)
    calibration = twc.Calibration(data=batches())
    with twc.EngineManager(root, builder="tensorrt_rtx", memo=twc.DigestMemo(None)) as manager:
        engine = manager.get(model, profiles=PROFILE, calibration=calibration, options=options)
        assert engine.outcome is twc.Outcome.BUILT
        assert manager.get(model, profiles=PROFILE, calibration=calibration).outcome is twc.Outcome.HIT
        with pytest.raises(twc.ConfigError, match="int8"):
            manager.get(model, profiles=PROFILE, options=options)
    with make(root) as classic:
        assert classic.get(model, profiles=PROFILE, calibration=calibration, options=options).key.parts["options.int8"]


def test_models_too_large_for_qdq(root: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that no ONNX file can hold in one piece is refused with advice, before it is read."""
    monkeypatch.setattr("trt_warmcache.int8._LARGEST_PROTO", 1000)
    calibration = twc.Calibration(data=batches())
    with make(root, FakeBuilder()) as manager, pytest.raises(twc.ModelError, match="where the model is exported"):
        manager.get(model, profiles=PROFILE, calibration=calibration)
    with make(root) as classic:
        assert classic.get(model, profiles=PROFILE, calibration=calibration).outcome is twc.Outcome.BUILT


def test_contradictions_are_refused(root: Path, model: Path) -> None:
    """int8=False beside a calibration, and a calibration that is none, fail before any work."""
    with make(root) as manager:
        with pytest.raises(twc.ConfigError, match="int8=False"):
            manager.get(
                model,
                profiles=PROFILE,
                calibration=twc.Calibration(data=batches()),
                options=twc.BuildOptions(int8=False),
            )
        with pytest.raises(twc.ConfigError, match="calibration must be a Calibration"):
            manager.get(model, profiles=PROFILE, calibration=batches())
        assert ran(manager) == 0


def test_refused_request_does_not_calibrate(root: Path, model: Path) -> None:
    """What the builder would refuse anyway is refused before the data is run."""

    class Picky(FakeBuilder):
        def check(self, options: twc.BuildOptions, target: twc.Target) -> None:
            raise twc.ConfigError("no such option")

    with make(root, Picky()) as manager:
        with pytest.raises(twc.ConfigError, match="no such option"):
            manager.get(model, profiles=PROFILE, calibration=twc.Calibration(data=batches()))
        assert ran(manager) == 0


def test_data_that_does_not_fit(root: Path, model: Path, folder: Path) -> None:
    """Wrong names and shapes are refused before anything runs, in memory as in a folder."""
    np.save(folder / "0.npy", np.zeros((2, 4, 8, 8), np.float32))
    with make(root) as manager:
        for data in ([{"images": batch(0)["x"]}], folder):
            with pytest.raises(twc.ConfigError, match="batch 1"):
                manager.get(model, profiles=PROFILE, calibration=twc.Calibration(data=data))
        assert stored(manager) == []
        assert stored(manager, Kind.ENGINE) == []


def test_progress(root: Path, model: Path) -> None:
    """Every batch is told as progress of the phase 'Calibrating', with the total where it is known."""
    seen = Seen()
    with make(root, hooks=[seen]) as manager:
        manager.get(model, profiles=PROFILE, calibration=twc.Calibration(data=batches(5), batches=3))
    steps = [event.detail for event in seen.of(EventKind.BUILD_PROGRESS) if event.detail["phase"] == "Calibrating"]
    assert [(step["step"], step["total"]) for step in steps] == [(1, 3), (2, 3), (3, 3)]
    order = [event.kind for event in seen.events]
    assert order.index(EventKind.CALIBRATION_START) < order.index(EventKind.CALIBRATION_END)
    assert order.index(EventKind.CALIBRATION_END) < order.index(EventKind.BUILD_START)


def test_explain_shows_the_calibration(root: Path, model: Path) -> None:
    """Whoever asks why int8 missed sees the calibration as the difference, also before any table exists."""
    with make(root, FakeBuilder()) as manager:
        manager.get(model, profiles=PROFILE, calibration=twc.Calibration(data=batches()))
        fresh = manager.explain(model, profiles=PROFILE, calibration=twc.Calibration(data=batches(first=9)))
        assert [d.part for d in fresh.differences] == ["calibration"]
        assert "calibration: wanted not calibrated yet, stored " in str(fresh)
        none = manager.explain(model, profiles=PROFILE)
        assert {d.part for d in none.differences} == {"calibration", "qdq"}
        assert ran(manager) == 1


# ---- a hit is cheap ---------------------------------------------------------------------------------------------


def test_hit_loads_nothing_heavy(root: Path, model: Path, folder: Path, tmp_path: Path) -> None:
    """A hit with a folder, a fingerprint or a table loads neither numpy nor onnx nor onnxruntime, and hashes no file."""
    memo = tmp_path / "memo"
    table = tmp_path / "t.calib"
    os.utime(model, (1, 1))
    with make(root, memo=twc.DigestMemo(memo)) as manager:
        for calibration in (twc.Calibration(data=folder), twc.Calibration(data=batches(), fingerprint="f")):
            manager.get(model, profiles=PROFILE, calibration=calibration)
        found = manager.calibrate(model, twc.Calibration(data=folder))
        assert found.table is not None
        table.write_bytes(found.table.to_bytes())
        manager.get(model, profiles=PROFILE, calibration=twc.Calibration(table=table))
    code = """
import sys
import trt_warmcache as twc
from trt_warmcache import model as models
from trt_warmcache.builders import BuilderCapabilities
from trt_warmcache.testing import FakeBuilder
from pathlib import Path

def refuse(path):
    raise AssertionError(f"hashed {path}")

models._hash_local = refuse
root, model, memo, folder, table = sys.argv[1:]
builder = FakeBuilder(capabilities=BuilderCapabilities(progress=True, calibration_table=True))
asked = twc.Calibration(data=folder), twc.Calibration(fingerprint="f"), twc.Calibration(table=table)
with twc.EngineManager(root, builder=builder, memo=twc.DigestMemo(Path(memo))) as manager:
    for calibration in asked:
        engine = manager.get(model, profiles={"x": ("1x3x8x8", "2x3x8x8", "4x3x8x8")}, calibration=calibration)
        assert engine.outcome is twc.Outcome.HIT, engine
heavy = {"numpy", "onnx", "onnxruntime", "google.protobuf", "torch", "tensorrt", "tensorrt_rtx"} & set(sys.modules)
print(sorted(heavy))
"""
    assert run_python(code, root, model, memo, folder, table).strip() == "[]"


def test_hit_reads_no_table(model: Path) -> None:
    """A repeated hit reads two manifests and maps the plan; it writes, lists and locks nothing."""
    store = FlakyStore(twc.MemoryStore())
    calibration = twc.Calibration(data=batches(), fingerprint="f")
    with make(store) as manager:
        manager.get(model, profiles=PROFILE, calibration=calibration)
        store.calls.clear()
        manager.get(model, profiles=PROFILE, calibration=calibration)
    assert [call for call, _ in store.calls] == ["read", "read", "fetch"]


# ---- without data -----------------------------------------------------------------------------------------------


def untouchable() -> Any:
    pytest.fail("the data was touched")


def test_fingerprint_alone(root: Path, model: Path) -> None:
    """Where the data set is not at hand its fingerprint does; an unknown one fails without touching any data."""
    with make(root) as manager:
        manager.calibrate(model, twc.Calibration(data=batches(), fingerprint="set-1"))
        engine = manager.get(model, profiles=PROFILE, calibration=twc.Calibration(fingerprint="set-1"))
        assert engine.outcome is twc.Outcome.BUILT
        with pytest.raises(twc.MissError, match="no data to make one") as miss:
            manager.get(model, profiles=PROFILE, calibration=twc.Calibration(fingerprint="set-2"))
        assert miss.value.reason == "missing"
        assert ran(manager) == 1


def test_locked_down(root: Path, model: Path) -> None:
    """'Use what is stored or fail' neither runs the loader nor builds, but serves what is stored."""
    locked = twc.Policy(on_miss="raise")
    calibration = twc.Calibration(data=untouchable, fingerprint="set-1")
    with make(root) as manager:
        with pytest.raises(twc.MissError, match="Calibrate beforehand"):
            manager.get(model, profiles=PROFILE, calibration=calibration, policy=locked)
        assert manager.lookup(model, profiles=PROFILE, calibration=calibration) is None
        with pytest.raises(twc.MissError):
            manager.key(model, profiles=PROFILE, calibration=calibration)
        manager.get(model, profiles=PROFILE, calibration=twc.Calibration(data=batches(), fingerprint="set-1"))
        hit = manager.get(model, profiles=PROFILE, calibration=calibration, policy=locked)
        assert hit.outcome is twc.Outcome.HIT
        assert manager.lookup(model, profiles=PROFILE, calibration=calibration) is not None


def test_fallback_calibrates_in_the_background(root: Path, model: Path) -> None:
    """on_miss='fallback' does not block on a calibration; table and engine are there when the future is done."""
    calibration = twc.Calibration(data=batches(), fingerprint="set-1")
    with make(root, policy=twc.Policy(on_miss="fallback")) as manager:
        with pytest.raises(twc.MissError, match="in the background") as miss:
            manager.get(model, profiles=PROFILE, calibration=calibration)
        assert miss.value.pending.result(60).outcome is twc.Outcome.BUILT
        assert manager.get(model, profiles=PROFILE, calibration=calibration).outcome is twc.Outcome.HIT


# ---- tables from elsewhere --------------------------------------------------------------------------------------


def given(**scales: float) -> twc.CalibrationTable:
    return twc.CalibrationTable(8601, "EntropyCalibration2", scales)


def test_a_dead_tensor_alone_is_reported(root: Path, model: Path) -> None:
    """One scale of zero in an otherwise complete table is told by name and value."""
    seen = Seen()
    with make(root, hooks=[seen]) as manager:
        manager.calibrate(model, twc.Calibration(table=given(x=0.5, a=0.0, b=0.125, y=0.5)))
    (event,) = seen.of(EventKind.CALIBRATION_INCOMPLETE)
    assert (event.detail["missing_count"], event.detail["unusable"]) == (0, {"a": "0.0"})


def test_given_table(root: Path, model: Path) -> None:
    """A table in the request is used as it is, stored beside the engine, and calibrates nothing."""
    table = given(x=0.5, a=0.25, b=0.125, y=0.5)
    with make(root) as manager:
        engine = manager.get(model, profiles=PROFILE, calibration=twc.Calibration(table=table))
        assert table_of(engine.plan) == table
        assert engine.key.parts["calibration"] == table.digest
        assert stored(manager) == [engine.manifest.extra["calibration_key"]]
        assert ran(manager) == 0
        reheaded = twc.Calibration(table=table.with_header("10.3.0", "MinMaxCalibration"))
        assert manager.get(model, profiles=PROFILE, calibration=reheaded).outcome is twc.Outcome.HIT


def test_table_file_is_read_once_per_request(
    root: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table file that is rewritten meanwhile cannot end up under the key of the one before."""
    from trt_warmcache import calibration_data

    path = tmp_path / "t.calib"
    read: list[Any] = []

    def counting(*arguments: Any, **options: Any) -> Any:
        read.append(arguments)
        return twc.read_table(*arguments, **options)

    monkeypatch.setattr(calibration_data, "read_table", counting)
    path.write_bytes(given(x=0.5, a=0.25, b=0.125, y=0.5).to_bytes())
    with make(root) as manager:
        found = manager.calibrate(model, twc.Calibration(table=path))
    assert len(read) == 1
    assert found.key.parts["data"] == f"table:{found.digest}"


def test_foreign_table_is_refused_with_counts(root: Path, model: Path) -> None:
    """A table of another model is refused before any build, and the error counts its tensors."""
    builder = FakeBuilder(capabilities=TABLES)
    table = given(x=0.5, other_a=0.5, other_b=0.5, other_y=0.5)
    with make(root, builder) as manager:
        with pytest.raises(twc.ModelError, match="3 of its 4 tensors") as caught:
            manager.get(model, profiles=PROFILE, calibration=twc.Calibration(table=table))
        assert (caught.value.matching, caught.value.mismatching) == (1, 3)  # type: ignore[attr-defined]
        assert stored(manager) == []
    assert builder.builds == 0


def test_unusable_scales_are_told_and_not_handed_over(root: Path, model: Path) -> None:
    """Zero, infinite and missing scales are an event with names and counts, and the builder never sees them."""
    seen = Seen()
    table = given(x=0.5, a=float("inf"), b=0.0)
    with make(root, hooks=[seen]) as manager:
        engine = manager.get(model, profiles=PROFILE, calibration=twc.Calibration(table=table))
    assert dict(table_of(engine.plan).scales) == {"x": 0.5}
    (event,) = seen.of(EventKind.CALIBRATION_INCOMPLETE)
    assert event.detail["missing"] == ["y"]
    assert event.detail["missing_count"] == 1
    assert event.detail["unusable"] == {"a": "inf", "b": "0.0"}


def test_import_under_a_fingerprint(root: Path, model: Path) -> None:
    """A table stored under a fingerprint is found by requests that name it, without a file or data."""
    with make(root) as manager:
        table = given(x=0.5, a=0.25, b=0.125, y=0.5)
        manager.import_table(model, table, twc.Calibration(fingerprint="set-1"), name="imported")
        engine = manager.get(model, profiles=PROFILE, calibration=twc.Calibration(fingerprint="set-1"))
        assert table_of(engine.plan) == table


# ---- damage and conflict ----------------------------------------------------------------------------------------


def test_second_result_is_a_conflict(root: Path, model: Path) -> None:
    """Published tables are immutable: another result for the same key is told, and the first one stays in force."""
    seen = Seen()
    with make(root, hooks=[seen]) as manager:
        calibration = twc.Calibration(fingerprint="set-1")
        first, second = given(x=0.5, a=0.25), given(x=0.5, a=0.75)
        assert manager.import_table(model, first, calibration).table == first
        assert manager.import_table(model, first, calibration).table == first
        assert manager.counters().get("calibration_conflict", 0) == 0
        assert manager.import_table(model, second, calibration).table == first
        assert manager.counters()["calibration_conflict"] == 1
        assert manager.calibrate(model, calibration).table == first
    (event,) = seen.of(EventKind.CALIBRATION_CONFLICT)
    assert (event.detail["stored"], event.detail["refused"]) == (first.digest, second.digest)


@pytest.mark.parametrize("what", ["manifest", "blob"])
def test_damaged_table_is_made_anew(root: Path, model: Path, what: str) -> None:
    """A damaged entry is set aside with its reason and calibrated again; an engine hit does not even need it."""
    calibration = twc.Calibration(data=batches(), algorithm="minmax")
    with make(root) as manager:
        engine = manager.get(model, profiles=PROFILE, calibration=calibration)
        key = engine.manifest.extra["calibration_key"]
        entry = manager.store.manifest(Kind.CALIBRATION, key)
        assert entry is not None
    name = manifest_name(Kind.CALIBRATION, key) if what == "manifest" else blob_name(entry.blobs[0])
    path = root / "trtwc-1" / name
    os.chmod(path, 0o644)
    path.write_bytes(path.read_bytes()[:-9])
    with make(root) as manager:
        again = manager.get(model, profiles=WIDER, calibration=calibration)
        assert again.outcome is twc.Outcome.BUILT
        assert again.key.parts["calibration"] == engine.key.parts["calibration"]
        assert manager.counters()["quarantined"] == 1
        assert ran(manager) == 1
        assert manager.get(model, profiles=PROFILE, calibration=calibration).outcome is twc.Outcome.HIT


def test_damage_without_permission_to_build(root: Path, model: Path) -> None:
    """Where nothing may be built, a damaged table is an error of its own, not a miss."""
    calibration = twc.Calibration(data=batches(), fingerprint="f")
    with make(root) as manager:
        key = manager.calibrate(model, calibration).key
    path = root / "trtwc-1" / manifest_name(Kind.CALIBRATION, key.digest)
    os.chmod(path, 0o644)
    path.write_bytes(b"{")
    with make(root, policy=twc.Policy(on_miss="raise")) as manager, pytest.raises(twc.IntegrityError):
        manager.get(model, profiles=PROFILE, calibration=calibration)


def test_signed_tables(root: Path, model: Path) -> None:
    """Where only signed entries count, an unsigned table is refused and a signed one is used."""
    pytest.importorskip("cryptography")
    from trt_warmcache.trust import Keyring, Signer

    signer = Signer.generate("ci-1")
    keyring = Keyring([signer.public])
    strict = twc.Policy(trust="signed")
    calibration = twc.Calibration(data=batches(), fingerprint="f")
    with make(root) as manager:
        manager.calibrate(model, calibration)
    for options in ({"policy": strict}, {}):
        with make(root, keyring=keyring, **options) as manager, pytest.raises(twc.UntrustedError):
            manager.get(model, profiles=PROFILE, calibration=calibration, policy=strict)
    other = twc.Calibration(data=batches(), fingerprint="g")
    with make(root, signer=signer) as manager:
        manager.get(model, profiles=PROFILE, calibration=other)
    with make(root, keyring=keyring, policy=strict) as manager:
        assert manager.get(model, profiles=PROFILE, calibration=other).outcome is twc.Outcome.HIT


def test_read_only_store(root: Path, model: Path) -> None:
    """Where nothing can be stored the table still serves this engine, and an event tells of it."""

    class ReadOnly(twc.MemoryStore):
        def put_blob(self, ref: Any, data: Any) -> None:
            raise twc.StoreError("read-only", reason=twc.StoreReason.DENIED)

    with make(ReadOnly()) as manager:
        engine = manager.get(model, profiles=PROFILE, calibration=twc.Calibration(data=batches()))
        assert engine.outcome is twc.Outcome.BUILT
        assert len(table_of(engine.plan)) == 4
        assert manager.counters()["publish_failed.denied"] == 2  # table and engine
        assert ran(manager) == 1


# ---- interruption and concurrency -------------------------------------------------------------------------------


def test_exception_in_the_loader(root: Path, model: Path) -> None:
    """What the data raises reaches the caller unchanged; there is no table, no engine and no lock, and a retry works."""

    def broken() -> Any:
        yield batch(0)
        raise KeyError("lost")

    with make(root) as manager:
        with pytest.raises(KeyError, match="lost"):
            manager.get(model, profiles=PROFILE, calibration=twc.Calibration(data=broken, fingerprint="f"))
        assert stored(manager) == stored(manager, Kind.ENGINE) == []
        assert manager.counters()["calibration_failed"] == 1
        engine = manager.get(model, profiles=PROFILE, calibration=twc.Calibration(data=batches(), fingerprint="f"))
        assert engine.outcome is twc.Outcome.BUILT


def test_folder_that_changes_meanwhile(root: Path, model: Path, folder: Path) -> None:
    """Files written during the calibration make no table: nobody knows which of them were read."""

    def load(path: Path) -> Any:
        np.save(folder / "9.npy", batch(9)["x"])
        return np.load(path)

    with make(root) as manager:
        with pytest.raises(twc.ConfigError, match="changed during the calibration"):
            manager.calibrate(model, twc.Calibration(data=folder, loader=load))
        assert stored(manager) == []
        assert manager.counters()["calibration_failed"] == 1


def test_model_that_changes_meanwhile(root: Path, model: Path) -> None:
    """A model file that is replaced during its calibration gives no table under the old model's key."""

    def data() -> Any:
        yield batch(0)
        model.write_bytes(conv_model(seed=9))

    with make(root) as manager:
        with pytest.raises(twc.ModelError, match="changed"):
            manager.calibrate(model, twc.Calibration(data=data, fingerprint="f"))
        assert stored(manager) == []


def test_misfit_is_told_before_any_work(root: Path, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder made for another model is refused before ONNX Runtime so much as loads this one."""
    monkeypatch.setattr("trt_warmcache.calibration_run.open_session", lambda *_: pytest.fail("loaded the model"))
    np.save(folder / "0.npy", np.zeros((2, 4, 8, 8), np.float32))
    with make(root) as manager, pytest.raises(twc.ConfigError, match="batch 1"):
        manager.calibrate(model, twc.Calibration(data=folder))


def test_store_that_cannot_answer(model: Path) -> None:
    """With store_errors='degrade' a store that is down costs a calibration and no more; else it is an error."""

    def down(call: str, name: str) -> None:
        if call != "lock":
            raise twc.StoreError("down", reason=twc.StoreReason.UNAVAILABLE)

    calibration = twc.Calibration(data=batches(), fingerprint="f")
    with make(FlakyStore(twc.MemoryStore(), down)) as manager:
        with pytest.raises(twc.StoreError):
            manager.get(model, profiles=PROFILE, calibration=calibration)
        assert ran(manager) == 0
        degraded = twc.Policy(store_errors="degrade")
        target = twc.Target(gpu="A", compute_capability="8.7")
        engine = manager.get(model, profiles=PROFILE, calibration=calibration, policy=degraded, target=target)
        assert engine.outcome is twc.Outcome.BUILT
        assert ran(manager) == 1


def test_changing_data_is_refused(root: Path, model: Path) -> None:
    """Data that differs between two passes makes no table, and the message says what to do."""
    rng = np.random.default_rng()
    calibration = twc.Calibration(data=lambda: ({"x": rng.normal(size=(1, 3, 8, 8)).astype(np.float32)} for _ in "ab"))
    with make(root) as manager:
        with pytest.raises(twc.ConfigError, match="changed between two passes"):
            manager.get(model, profiles=PROFILE, calibration=calibration)
        assert stored(manager) == stored(manager, Kind.ENGINE) == []


def test_killed_while_calibrating(root: Path, model: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a calibration leaves no table, no engine and no lock; the next process just works."""
    code = """
import sys, time
import numpy as np
import trt_warmcache as twc
from trt_warmcache.testing import FakeBuilder

def data():
    yield {"x": np.ones((1, 3, 8, 8), np.float32)}
    open(sys.argv[3], "w").close()
    time.sleep(100)

manager = twc.EngineManager(sys.argv[1], builder=FakeBuilder(), memo=twc.DigestMemo(None))
manager.get(
    sys.argv[2],
    profiles={"x": ("1x3x8x8", "2x3x8x8", "4x3x8x8")},
    calibration=twc.Calibration(data=data, fingerprint="f"),
)
"""
    mark = tmp_path / "calibrating"
    child = subprocess.Popen([sys.executable, "-c", code, str(root), str(model), str(mark)])
    try:
        deadline = time.monotonic() + 60
        while not mark.exists():
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait(30)
    with make(root, FakeBuilder()) as manager:
        assert stored(manager) == stored(manager, Kind.ENGINE) == []
        started = time.monotonic()
        engine = manager.get(model, profiles=PROFILE, calibration=twc.Calibration(data=batches(), fingerprint="f"))
        assert engine.outcome is twc.Outcome.BUILT
        assert time.monotonic() - started < 30
        assert ran(manager) == 1


def test_timeout_ends_a_calibration(root: Path, model: Path) -> None:
    """A request's timeout holds for the calibration too; nothing half-done is stored."""

    def endless() -> Any:
        while True:
            yield batch(0)

    with make(root) as manager:
        for vouched in ("f", None):  # without, the first pass takes the fingerprint
            with pytest.raises(twc.BuildTimeout):
                manager.get(
                    model, profiles=PROFILE, calibration=twc.Calibration(data=endless, fingerprint=vouched), timeout=0.5
                )
        assert stored(manager) == []


def test_threads_calibrate_once(root: Path, model: Path) -> None:
    """Many threads, several managers, different profiles: one calibration."""
    barrier = threading.Barrier(6)

    def work(number: int) -> tuple[int, str]:
        with make(root, FakeBuilder(capabilities=TABLES)) as manager:
            barrier.wait(30)
            size = f"{4 + number % 3}x3x8x8"
            engine = manager.get(
                model,
                profiles={"x": ("1x3x8x8", "2x3x8x8", size)},
                calibration=twc.Calibration(data=batches(20), algorithm="minmax"),
            )
            return ran(manager), engine.key.parts["calibration"]

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(work, range(6)))
    assert sum(count for count, _ in results) == 1
    assert len({digest for _, digest in results}) == 1


def test_processes_calibrate_once(root: Path, model: Path) -> None:
    """Processes that start together on one cold store calibrate once between them."""
    code = """
import sys
import numpy as np
import trt_warmcache as twc
from trt_warmcache.testing import FakeBuilder

data = [{"x": np.full((1, 3, 8, 8), seed, np.float32)} for seed in range(1, 40)]
with twc.EngineManager(sys.argv[1], builder=FakeBuilder(), memo=twc.DigestMemo(None)) as manager:
    manager.get(
        sys.argv[2],
        profiles={"x": ("1x3x8x8", "2x3x8x8", sys.argv[3] + "x3x8x8")},
        calibration=twc.Calibration(data=data, algorithm="minmax"),
    )
    print(manager.counters().get("calibration_start", 0))
"""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(root), str(model), str(4 + number)], stdout=subprocess.PIPE, text=True
        )
        for number in range(4)
    ]
    counts = [int(child.communicate(timeout=120)[0]) for child in children]
    assert all(child.returncode == 0 for child in children)
    assert sum(counts) == 1


# ---- vetoes -----------------------------------------------------------------------------------------------------


def test_veto_for_one_gpu(root: Path, model: Path) -> None:
    """A table that is poor on one GPU is vetoed there: A hits, B misses with the reason; lifting it helps B again."""
    calibration = twc.Calibration(data=batches(), fingerprint="f")
    gpus = {name: twc.Target(gpu=name, compute_capability="8.7") for name in ("A", "B")}
    with make(root) as manager:
        for target in gpus.values():
            manager.get(model, profiles=PROFILE, calibration=calibration, target=target)
        key = manager.calibrate(model, calibration).key
        assert manager.tables.veto(key.digest, "B", "mAP drops by 7") == {"B": "mAP drops by 7"}
        assert (
            manager.get(model, profiles=PROFILE, calibration=calibration, target=gpus["A"]).outcome is twc.Outcome.HIT
        )
        with pytest.raises(twc.MissError, match=r"vetoed for B: mAP drops by 7\.") as miss:
            manager.get(model, profiles=PROFILE, calibration=calibration, target=gpus["B"])
        assert miss.value.reason == "vetoed"
        assert manager.lookup(model, profiles=PROFILE, calibration=calibration, target=gpus["B"]) is None
        assert manager.counters()["miss.vetoed"] == 2
        assert stored(manager) == [key.digest]
        with pytest.raises(twc.MissError, match="vetoed"):
            manager.explain(model, profiles=PROFILE, calibration=calibration, target=gpus["B"])
        assert manager.tables.veto(key.digest, "B", None) == {}
        assert (
            manager.get(model, profiles=PROFILE, calibration=calibration, target=gpus["B"]).outcome is twc.Outcome.HIT
        )
        with pytest.raises(twc.MissError):
            manager.tables.veto("0" * 64, "B", "no such table")


def test_vetoes_by_capability_and_by_many_writers(root: Path, model: Path) -> None:
    """A veto may name a compute capability, as a TensorRT-RTX plan has no other; racing writers lose no note."""
    calibration = twc.Calibration(data=batches(), fingerprint="f")
    with make(root) as manager:
        key = manager.calibrate(model, calibration).key
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: manager.tables.veto(key.digest, f"GPU {n}", "poor"), range(8)))
        assert len(manager.tables.vetoes(key.digest)) == 8
        manager.tables.veto(key.digest, "8.9", "poor")
        ok, bad = (twc.Target(compute_capabilities=cc) for cc in (("8.6",), ("8.6", "8.9")))
        assert manager.get(model, profiles=PROFILE, calibration=calibration, target=ok).outcome is twc.Outcome.BUILT
        with pytest.raises(twc.MissError, match=r"vetoed for 8\.9"):
            manager.get(model, profiles=PROFILE, calibration=calibration, target=bad)
        path = root / "trtwc-1" / "calibration" / key.digest[:2] / f"{key.digest}.veto"
        path.chmod(0o644)
        path.write_bytes(b"{}")
    with make(root) as manager, pytest.raises(twc.IntegrityError, match="veto note"):
        manager.get(model, profiles=PROFILE, calibration=calibration, target=ok)


def test_veto_through_layers(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A veto in the far layer holds for whoever reads through it, after a while in which hits do not ask again."""
    near, far = tmp_path / "near", tmp_path / "far"
    calibration = twc.Calibration(data=batches(), fingerprint="f")
    target = twc.Target(gpu="B", compute_capability="8.7")
    with make([near, far]) as manager:
        manager.get(model, profiles=PROFILE, calibration=calibration, target=target)
        key = manager.calibrate(model, calibration).key
        with make(far) as other:
            other.tables.veto(key.digest, "B", "poor")
        assert manager.get(model, profiles=PROFILE, calibration=calibration, target=target).outcome is twc.Outcome.HIT
    monkeypatch.setattr("trt_warmcache.calibration_vetoes._VETO_SECONDS", 0.0)
    with make([near, far]) as manager, pytest.raises(twc.MissError, match="vetoed for B"):
        manager.get(model, profiles=PROFILE, calibration=calibration, target=target)
    with make(far) as other:
        other.tables.veto(key.digest, "B", None)
        assert other.get(model, profiles=PROFILE, calibration=calibration, target=target).outcome is twc.Outcome.HIT


# ---- the rest ---------------------------------------------------------------------------------------------------


def test_side_files(root: Path, tmp_path: Path) -> None:
    """A model with its weights in a side file is calibrated and quantized from its own folder."""
    path = tmp_path / "big" / "m.onnx"
    path.parent.mkdir()
    onnx.save(
        onnx.load_model_from_string(conv_model()), path, save_as_external_data=True, location="m.data", size_threshold=0
    )
    with make(root, FakeBuilder()) as manager:
        engine = manager.get(path, profiles=PROFILE, calibration=twc.Calibration(data=batches(), algorithm="minmax"))
        whole = calibration_run.calibrate(conv_model(), twc.Calibration(data=batches(), algorithm="minmax"))
        assert engine.key.parts["calibration"] == whole.digest


def test_memory_stays_flat(root: Path, model: Path) -> None:
    """A thousand batches through the manager cost hardly more memory than fifty (in a process of its own)."""
    code = """
import resource, sys
import numpy as np
import trt_warmcache as twc
from trt_warmcache.testing import FakeBuilder

def batches():
    for seed in range(1000):
        yield {"x": np.random.default_rng(seed).normal(0, 1, (8, 3, 8, 8)).astype(np.float32)}

def hook(event):
    if event.detail.get("phase") == "Calibrating" and event.detail["step"] in {50, 1000}:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

memo = twc.DigestMemo(None)
with twc.EngineManager(sys.argv[1], builder=FakeBuilder(), memo=memo, hooks=[hook]) as manager:
    manager.calibrate(sys.argv[2], twc.Calibration(data=batches, algorithm="percentile"))
"""
    early, late = map(int, run_python(code, root, model).split())
    assert late - early < 20 << 10  # KiB


def test_extra_is_named_where_it_is_missing(root: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without onnxruntime a calibration names the extra to install; a stored table needs no onnxruntime to serve."""
    calibration = twc.Calibration(data=batches(), fingerprint="f")
    with make(root) as manager:
        manager.get(model, profiles=PROFILE, calibration=calibration)
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        assert manager.get(model, profiles=WIDER, calibration=calibration).outcome is twc.Outcome.BUILT
        with pytest.raises(twc.ConfigError, match=r"trt_warmcache\[int8\]"):
            manager.calibrate(model, twc.Calibration(data=batches(), fingerprint="g"))
