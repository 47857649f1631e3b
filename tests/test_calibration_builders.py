"""INT8 end to end with each kind of builder: classic TensorRT of every line (fakes), TensorRT-RTX (real builds)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from tests.fakes.tensorrt_fake import Line, make_tensorrt, record_of
from tests.support import real_model
from tests.test_calibration import PROFILE, batches, conv_model
from tests.test_quantize import cosine, detection_input, run, yolo_input

import trt_warmcache as twc
from trt_warmcache.builders import TensorRTBuilder, TensorRTRTXBuilder
from trt_warmcache.calibration_files import read_table
from trt_warmcache.keys import Kind
from trt_warmcache.policy import Isolation

pytest.importorskip("onnxruntime")

GPU = twc.Target(gpu="NVIDIA Fake", compute_capability="8.9", sm_count=58)
WITH_CALIBRATORS: tuple[Line, ...] = ("8.6", "10.3", "10.16")


def classic(root: Path, line: Line) -> tuple[twc.EngineManager, Any]:
    module = make_tensorrt(line)
    manager = twc.EngineManager(root, builder=TensorRTBuilder(module), target=GPU, memo=twc.DigestMemo(None))
    return manager, module


def plan_of(engine: twc.Engine) -> dict[str, Any]:
    """What a fake plan says of its build."""
    from tests.fakes._build import read_plan

    return read_plan(engine.plan)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


# ---- classic TensorRT -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("line", WITH_CALIBRATORS)
def test_classic_reads_the_table(root: Path, line: Line) -> None:
    """8.6 to 10.16 get the table through a calibrator and ask for no batch; the engine goes by it."""
    manager, module = classic(root, line)
    with manager:
        calibration = twc.Calibration(data=batches(), algorithm="minmax")
        engine = manager.get(conv_model(), profiles=PROFILE, calibration=calibration)
        table = manager.calibrate(conv_model(), calibration).table
        assert table is not None
        assert record_of(module).calibration_batches == 0
        used = plan_of(engine)["calibration"]
        assert used is not None
        assert engine.key.parts["options.int8"] is True
        assert engine.manifest.provenance.config["flags"].count("INT8") == 1
        assert manager.counters()["calibration_start"] == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_calibration_for_all_versions(root: Path) -> None:
    """The same entry serves 8.6, 10.3, 10.16, 11.4 and TensorRT-RTX: one calibration, five engines."""
    pytest.importorskip("tensorrt_rtx")
    calibration = twc.Calibration(data=batches(), algorithm="percentile")
    digests, began = set(), 0
    lines: tuple[Line, ...] = (*WITH_CALIBRATORS, "11.4")
    managers = [classic(root, line)[0] for line in lines]
    managers.append(twc.EngineManager(root, builder=TensorRTRTXBuilder(), memo=twc.DigestMemo(None)))
    for manager in managers:
        with manager:
            engine = manager.get(conv_model(), profiles=PROFILE, calibration=calibration)
            assert engine.outcome is twc.Outcome.BUILT
            digests.add(engine.key.parts["calibration"])
            began += manager.counters().get("calibration_start", 0)
    assert began == 1
    assert len(digests) == 1
    store = twc.open_store(root)
    assert len(list(store.entries(Kind.CALIBRATION))) == 1
    assert len(list(store.entries(Kind.ENGINE))) == 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorrt_11_gets_a_qdq_model(root: Path) -> None:
    """11.x has no calibrators: the model that is parsed has Q/DQ nodes, and no precision flag is asked for."""
    manager, _ = classic(root, "11.4")
    with manager:
        engine = manager.get(conv_model(), profiles=PROFILE, calibration=twc.Calibration(data=batches()))
    assert "qdq" in engine.key.parts
    layers = json.dumps(plan_of(engine))
    assert "QuantizeLinear" in layers or "QUANTIZE" in layers


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_strongly_typed_10_gets_a_qdq_model(root: Path) -> None:
    """A strongly typed network of 10.x refuses calibrators, and the model is quantized instead."""
    manager, _ = classic(root, "10.16")
    with manager:
        engine = manager.get(
            conv_model(),
            profiles=PROFILE,
            calibration=twc.Calibration(data=batches()),
            options=twc.BuildOptions(strongly_typed=True),
        )
    assert "qdq" in engine.key.parts


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_table_that_was_not_asked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that never asks for the table is no int8 build: an error, an event, and nothing is stored."""
    manager, _ = classic(root, "10.3")
    monkeypatch.setattr("tests.fakes._build._calibrate", lambda *_: None)
    with manager:
        with pytest.raises(twc.BuildError, match="without asking for the calibration table"):
            manager.get(conv_model(), profiles=PROFILE, calibration=twc.Calibration(data=batches()))
        assert list(manager.store.entries(Kind.ENGINE)) == []
        assert manager.counters()["build_failed"] == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("8.6", "TRT-8601-EntropyCalibration2\nx: 3caa54fc\na: 3d000000\n(Unnamed Layer* 1) [Activation]_output: 0\nb: 3c8\ny: 3d100000\n"),
        ("10.14", "TRT-101401-MinMaxCalibration\nx: 3caa54fc\na: 3d000000\nb: 3c800000\ny: 3d100000\n"),
    ],
)  # fmt: skip
def test_tables_of_real_calibrators(root: Path, tmp_path: Path, name: str, text: str) -> None:
    """Tables in the format of 8.x and 10.x import and serve another version: the header is rewritten, scales stay."""
    path = tmp_path / f"{name}.cache"
    path.write_text(text)
    manager, module = classic(root, "10.16")
    with manager:
        engine = manager.get(conv_model(), profiles=PROFILE, calibration=twc.Calibration(table=path))
        assert engine.key.parts["calibration"] == read_table(path).digest
        assert record_of(module).calibration_batches == 0
        assert manager.counters().get("calibration_start", 0) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (None, twc.ConfigError),
        (b"", twc.IntegrityError),
        (b"TRT-8601\nx: 3caa54fc\n", twc.IntegrityError),
        (b"TRT-8601-EntropyCalibration2\nx: 3caa54zz\n", twc.IntegrityError),
        (b"TRT-8601-EntropyCalibration2\nx\0: 3caa54fc\n", twc.IntegrityError),
    ],
    ids=["missing", "empty", "header", "hex", "nul"],
)
def test_bad_table_files_fail_before_any_build(
    root: Path, tmp_path: Path, content: bytes | None, kind: type[Exception]
) -> None:
    """A file that is missing, empty or damaged is a typed error before TensorRT sees anything."""
    path = tmp_path / "t.cache"
    if content is not None:
        path.write_bytes(content)
    manager, module = classic(root, "8.6")
    with manager:
        with pytest.raises(kind):
            manager.get(conv_model(), profiles=PROFILE, calibration=twc.Calibration(table=path))
        assert record_of(module).builds == 0
        assert list(manager.store.entries(Kind.ENGINE)) == []


# ---- TensorRT's own calibrators ----------------------------------------------------------------------------------


class Buffers:
    """Device memory that is none."""

    def __init__(self) -> None:
        self.uploads = 0
        self.freed = 0

    def upload(self, name: str, array: Any) -> int:
        self.uploads += 1
        return 4096

    def free(self) -> None:
        self.freed += 1


def fake_names() -> bytes:
    """A model whose tensors are called as the fake's layers call theirs."""
    model = onnx.load_model_from_string(conv_model())
    for node in model.graph.node:
        old, new = node.output[0], f"{node.name}_output"
        for other in model.graph.node:
            for position, name in enumerate(other.input):
                other.input[position] = new if name == old else name
        node.output[0] = new
    model.graph.output[0].name = model.graph.node[-1].output[0]
    return bytes(model.SerializeToString())


def on_gpu(root: Path, line: Line, **options: Any) -> tuple[twc.EngineManager, Any, Buffers]:
    module, buffers = make_tensorrt(line), Buffers()
    builder = TensorRTBuilder(module, buffers=buffers)
    return twc.EngineManager(root, builder=builder, target=GPU, memo=twc.DigestMemo(None), **options), module, buffers


OWN = twc.Calibration(data=lambda: iter(batches()), fingerprint="f", runner="tensorrt")


@pytest.mark.parametrize("line", WITH_CALIBRATORS)
def test_tensorrt_calibrates_itself(root: Path, line: Line) -> None:
    """With runner='tensorrt' its calibrator takes every batch once; the table is stored, and the engine reads it."""
    steps: list[int] = []

    def hook(event: twc.Event) -> None:
        if event.detail.get("phase") == "Calibrating":
            steps.append(event.detail["step"])

    manager, module, buffers = on_gpu(root, line, hooks=[hook])
    with manager:
        engine = manager.get(fake_names(), profiles=PROFILE, calibration=OWN)
        entry = manager.store.manifest(Kind.CALIBRATION, engine.manifest.extra["calibration_key"])
        assert entry is not None
        assert entry.parts["runner"] == "tensorrt"
        assert (entry.extra["batches"], entry.extra["samples"]) == (3, 6)
        assert entry.extra["table"] == engine.key.parts["calibration"]
        assert steps == [1, 2, 3]
        assert (record_of(module).calibration_batches, buffers.uploads) == (3, 3)
        assert buffers.freed >= 1
        manager.get(fake_names(), profiles={"x": ("1x3x8x8", "2x3x8x8", "9x3x8x8")}, calibration=OWN)
        assert record_of(module).calibration_batches == 3
        assert manager.counters()["calibration_start"] == 1
        other = manager.calibrate(fake_names(), twc.Calibration(data=batches(), fingerprint="f"))
        assert other.key.digest != entry.key


def test_tensorrt_gets_every_batch_of_a_one_shot_iterator(root: Path) -> None:
    """Looking at the first batch for its shapes takes it away from nobody."""
    manager, module, buffers = on_gpu(root, "10.3")
    once = twc.Calibration(data=iter(batches()), fingerprint="once", runner="tensorrt")
    with manager:
        engine = manager.get(fake_names(), profiles=PROFILE, calibration=once)
        entry = manager.store.manifest(Kind.CALIBRATION, engine.manifest.extra["calibration_key"])
    assert entry is not None
    assert (entry.extra["batches"], buffers.uploads, record_of(module).calibration_batches) == (3, 3, 3)


def test_its_table_serves_tensorrt_rtx(root: Path) -> None:
    """A table that TensorRT 10.3 made becomes Q/DQ nodes for TensorRT-RTX, which could not have made it."""
    manager, _, _ = on_gpu(root, "10.3")
    with manager:
        digest = manager.get(fake_names(), profiles=PROFILE, calibration=OWN).key.parts["calibration"]
    with rtx(root) as manager:
        engine = manager.get(fake_names(), profiles=PROFILE, calibration=OWN)
        assert engine.key.parts["calibration"] == digest
        assert manager.counters().get("calibration_start", 0) == 0


@pytest.mark.parametrize("builder", ["11.4", "rtx"])
def test_calibrators_that_are_gone(root: Path, builder: str) -> None:
    """TensorRT 11 and TensorRT-RTX (the real module) have no calibrators: the error names Q/DQ as the way."""
    manager = rtx(root) if builder == "rtx" else on_gpu(root, "11.4")[0]
    with manager, pytest.raises(twc.ConfigError, match="Q/DQ"):
        manager.get(fake_names(), profiles=PROFILE, calibration=OWN)
    with pytest.raises(twc.ConfigError, match="percentile"):
        twc.Calibration(data=batches(), runner="tensorrt", algorithm="percentile")


def test_table_that_is_never_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT that calibrates and writes nothing is told: an event, an error, and neither table nor engine."""
    from tests.fakes import _build
    from tests.fakes._world import guarded

    def forgetful(name: str, function: Any, *arguments: Any, **options: Any) -> Any:
        return None if name == "write_calibration_cache" else guarded(name, function, *arguments, **options)

    monkeypatch.setattr(_build, "guarded", forgetful)
    manager, module, _ = on_gpu(root, "8.6")
    with manager:
        with pytest.raises(twc.BuildError, match="wrote no table"):
            manager.get(fake_names(), profiles=PROFILE, calibration=OWN)
        assert record_of(module).calibration_batches == 3
        assert manager.counters()["calibration_unwritten"] == 1
        assert list(manager.store.entries(Kind.CALIBRATION)) == list(manager.store.entries(Kind.ENGINE)) == []


def test_data_that_fails_inside_tensorrt(root: Path) -> None:
    """What the data raises while TensorRT pulls batches reaches the caller unchanged, and the device memory is freed."""

    def broken() -> Any:
        yield batches(1)[0]
        raise KeyError("lost")

    manager, _, buffers = on_gpu(root, "10.16")
    with manager:
        with pytest.raises(KeyError, match="lost"):
            manager.get(
                fake_names(),
                profiles=PROFILE,
                calibration=twc.Calibration(data=broken, fingerprint="f", runner="tensorrt"),
            )
        assert buffers.freed >= 1
        assert list(manager.store.entries(Kind.CALIBRATION)) == []
        assert manager.get(fake_names(), profiles=PROFILE, calibration=OWN).outcome is twc.Outcome.BUILT


# ---- TensorRT-RTX, for real -------------------------------------------------------------------------------------


def rtx(root: Path) -> twc.EngineManager:
    pytest.importorskip("tensorrt_rtx")
    return twc.EngineManager(root, builder=TensorRTRTXBuilder(), memo=twc.DigestMemo(None))


def test_rtx_builds_are_found_again(root: Path) -> None:
    """A Q/DQ engine is built for real once; equal requests hit, and a rebuild elsewhere gives the same key."""
    calibration = twc.Calibration(data=batches(), qdq=twc.QdqOptions(min_channels=1))
    with rtx(root) as manager:
        built = manager.get(conv_model(), profiles=PROFILE, calibration=calibration)
        assert built.outcome is twc.Outcome.BUILT
        assert manager.get(conv_model(), profiles=PROFILE, calibration=calibration).outcome is twc.Outcome.HIT
        plain = manager.get(conv_model(), profiles=PROFILE)
        assert bytes(plain.plan) != bytes(built.plan)


def test_build_in_another_process(root: Path) -> None:
    """A build in a process of its own gets the Q/DQ model too, and gives the plan that this process would build."""
    calibration = twc.Calibration(data=batches(), qdq=twc.QdqOptions(min_channels=1))
    plans = []
    for number, isolation in enumerate((Isolation.NONE, Isolation.PROCESS)):
        with rtx(root / str(number)) as manager:
            policy = twc.Policy(isolation=isolation)
            plans.append(
                bytes(manager.get(conv_model(), profiles=PROFILE, calibration=calibration, policy=policy).plan)
            )
    assert plans[0] == plans[1]


def test_detection(root: Path) -> None:
    """PP-OCRv4 detection in int8 through the manager: a real plan, and a map within a cosine of 0.99 held out.

    Percentile is the algorithm for it: entropy clips rare large activations of the neck, and min-max lets them coarsen
    everything else; on other pictures than these, both fall below 0.99.
    """
    path = real_model("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx")
    calibration = twc.Calibration(
        data=lambda: ({"x": detection_input(seed)} for seed in range(32)),
        algorithm="percentile",
        fingerprint="drawn-32",
    )
    with rtx(root) as manager:
        engine = manager.get(path, profiles={"x": ("1x3x320x320",) * 3}, calibration=calibration)
        wider = manager.get(
            path, profiles={"x": ("1x3x320x320", "1x3x320x320", "2x3x320x320")}, calibration=twc.Calibration(fingerprint="drawn-32", algorithm="percentile")
        )  # fmt: skip
        assert (engine.outcome, wider.outcome) == (twc.Outcome.BUILT, twc.Outcome.BUILT)
        assert manager.counters()["calibration_start"] == 1
        table = manager.calibrate(path, calibration)
    assert table.manifest is not None
    assert table.manifest.extra["coverage"]["missing"] == table.manifest.extra["coverage"]["unusable"] == 0
    assert table.table is not None
    _require_cosine(path, table.table, [{"x": detection_input(1000 + seed)} for seed in range(8)], 0.99)


def test_yolo(root: Path) -> None:
    """YOLOv8n in int8 through the manager: cosine above 0.995 held out, and a plan at most 0.8 of the fp32 one."""
    path = real_model("nudenet", "320n.onnx")
    calibration = twc.Calibration(
        data=lambda: ({"images": yolo_input(seed)} for seed in range(32)), fingerprint="drawn-32"
    )
    profiles = {"images": ("1x3x320x320",) * 3}
    with rtx(root) as manager:
        int8 = manager.get(path, profiles=profiles, calibration=calibration)
        fp32 = manager.get(path, profiles=profiles)
        assert int8.plan.nbytes < 0.8 * fp32.plan.nbytes
        table = manager.calibrate(path, calibration).table
    assert table is not None
    _require_cosine(path, table, [{"images": yolo_input(1000 + seed)} for seed in range(4)], 0.995)


def _require_cosine(path: Path, table: twc.CalibrationTable, held_out: list[dict[str, Any]], least: float) -> None:
    from trt_warmcache.quantize import insert_qdq

    model = insert_qdq(path, table)
    found = [cosine(run(model, batch)[0], run(str(path), batch)[0]) for batch in held_out]
    assert min(found) >= least, found
