"""Real models through the real TensorRT-RTX builder: what builds, what is refused, and with which words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.support import real_model

import trt_warmcache as twc
from trt_warmcache.builders._plan import read_header
from trt_warmcache.keys import Kind

BUILDS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "PP-OCRv4 detection": (
        "rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx", {"x": ("1x3x320x320", "1x3x640x640", "1x3x960x960")},
    ),
    "PP-OCRv4 classification": (
        "rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": ("1x3x48x48", "4x3x48x48", "8x3x48x48")},
    ),
    "PP-OCRv6 recognition": ("rapidocr", "models/PP-OCRv6_rec_small.onnx", {"x": ("1x3x48x320", "1x3x48x320", "4x3x48x640")}),
    "YOLOv8n (nudenet)": ("nudenet", "320n.onnx", {"images": "1x3x320x320"}),
    "magika": ("magika", "models/standard_v3_3/model.onnx", {"bytes": ("1x2048", "4x2048", "16x2048")}),
    "ddddocr common": ("ddddocr", "common.onnx", {"input1": ("1x1x64x64", "1x1x64x128", "1x1x64x256")}),
    "ddddocr common_det": ("ddddocr", "common_det.onnx", None),
    "silero-vad 16k sequence": ("silero_vad", "data/silero_vad_16k_sequence.onnx", {"input": ("1x576", "4x576", "16x576")}),
}  # fmt: skip

REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "ddddocr common_old": ("ddddocr", "common_old.onnx", {"input1": ("1x1x64x64", "1x1x64x128", "1x1x64x256")}, "unsupported node.*44 more errors.*DynamicQuantizeLSTM"),
    "silero-vad with control flow": (
        "silero_vad", "data/silero_vad.onnx", {"input": ("1x512", "1x512", "1x512"), "state": "2x1x128"}, r"Error Code 2.*kUNDEFINED",
    ),
}  # fmt: skip


@pytest.fixture
def manager(tmp_path: Path) -> twc.EngineManager:
    """A manager that builds with the real TensorRT-RTX."""
    return twc.EngineManager(tmp_path / "store", builder="tensorrt_rtx", memo=twc.DigestMemo(None))


@pytest.mark.parametrize("name", BUILDS)
def test_builds_cold_and_hits_warm(manager: twc.EngineManager, tmp_path: Path, name: str) -> None:
    """The model builds, progress is reported, the plan is a whole RTX plan, and the second call hits with equal bytes."""
    package, path, profiles = BUILDS[name]
    events: list[twc.Event] = []
    manager = twc.EngineManager(
        tmp_path / "store", builder="tensorrt_rtx", memo=twc.DigestMemo(None), hooks=[events.append]
    )
    with manager:
        cold = manager.get(real_model(package, path), profiles=profiles)
        assert cold.outcome is twc.Outcome.BUILT
        header = read_header(cold.plan)
        assert header is not None
        assert header.flavour == "tensorrt_rtx"
        assert header.size == cold.plan.nbytes
        assert ".".join(map(str, header.version)) == ".".join(cold.key.parts["builder.version"].split(".")[:3])
        warm = manager.get(real_model(package, path), profiles=profiles)
        assert warm.outcome is twc.Outcome.HIT
        assert warm.plan == cold.plan
        progress = [event.detail for event in events if event.kind is twc.EventKind.BUILD_PROGRESS]
        assert any(detail["parent"] is None for detail in progress)
        assert all(0 <= detail["step"] <= detail["total"] for detail in progress)
        assert warm.manifest.provenance.config["profiles"] == (1 if profiles else 0) or name == "YOLOv8n (nudenet)"
        assert warm.manifest.provenance.library == cold.key.parts["builder.version"]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_models_say_why(manager: twc.EngineManager, name: str) -> None:
    """A model that TensorRT-RTX refuses: a typed error with the first real reason, and no entry."""
    package, path, profiles, words = REFUSED[name]
    with manager:
        with pytest.raises((twc.ModelError, twc.BuildError)) as caught:
            manager.get(real_model(package, path), profiles=profiles)
        message = caught.value.message
        assert re.search(words, message)
        assert "cuda" not in message.lower(), "the first reason counts, not a later one about the driver"
        if isinstance(caught.value, twc.ModelError):
            assert caught.value.node
            assert caught.value.node in message
        for kind in Kind:
            assert list(manager.store.entries(kind)) == []


def test_targets_give_different_plans(manager: twc.EngineManager) -> None:
    """Compute capabilities are part of the key and of the plan: 8.6, 8.9, both, and the portable one."""
    model = real_model("magika", "models/standard_v3_3/model.onnx")
    plans = {}
    with manager:
        for wanted in ((), ("8.6",), ("8.9",), ("8.9", "8.6")):
            engine = manager.get(model, profiles={"bytes": "1x2048"}, target=twc.Target(compute_capabilities=wanted))
            header = read_header(engine.plan)
            assert header is not None
            assert not wanted or header.compute_capabilities == tuple(sorted(wanted))
            plans[engine.key.digest] = bytes(engine.plan)
        same = manager.get(
            model, profiles={"bytes": "1x2048"}, target=twc.Target(compute_capabilities=["SM86", (8, 9)])
        )
        assert same.outcome is twc.Outcome.HIT
    assert len(plans) == len(set(plans.values())) == 4


def test_unknown_compute_capability(manager: twc.EngineManager) -> None:
    """A compute capability that TensorRT-RTX does not build for is refused by name, before anything is built."""
    with manager, pytest.raises(twc.ConfigError, match=r"9\.0.*it offers"):
        manager.get(
            real_model("magika", "models/standard_v3_3/model.onnx"),
            profiles={"bytes": "1x2048"},
            target=twc.Target(compute_capabilities=["9.0"]),
        )


def test_static_plan_is_reproducible(tmp_path: Path) -> None:
    """The network's name follows from the key, so the same request with fixed shapes gives the same bytes anywhere."""
    model = real_model("magika", "models/standard_v3_3/model.onnx")
    plans = []
    for folder in ("a", "b"):
        with twc.EngineManager(tmp_path / folder, builder="tensorrt_rtx", memo=twc.DigestMemo(None)) as manager:
            plans.append(bytes(manager.get(model, profiles={"bytes": "1x2048"}).plan))
            manager.get(model, profiles={"bytes": "2x2048"})
    assert plans[0] == plans[1]


def test_cancelled_build(manager: twc.EngineManager) -> None:
    """A real build is stopped at a step by the policy's limit, and leaves no entry."""
    with manager:
        with pytest.raises(twc.BuildTimeout):
            manager.get(
                real_model("ddddocr", "common.onnx"),
                profiles={"input1": ("1x1x64x64", "1x1x64x128", "1x1x64x256")},
                policy=twc.Policy(build_seconds=0.05),
            )
        assert list(manager.store.entries(Kind.ENGINE)) == []


def test_timing_cache_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-RTX's timing-cache calls are deprecated no-ops that may look for a GPU: none is ever made."""
    import tensorrt_rtx as trt

    calls: list[str] = []
    for name in ("create_timing_cache", "set_timing_cache", "get_timing_cache"):
        monkeypatch.setattr(trt.IBuilderConfig, name, lambda *_, name=name: calls.append(name))
    with twc.EngineManager(tmp_path, builder="tensorrt_rtx", memo=twc.DigestMemo(None)) as manager:
        manager.get(real_model("magika", "models/standard_v3_3/model.onnx"), profiles={"bytes": "1x2048"})
        assert list(manager.store.entries(Kind.TIMING)) == []
    assert calls == []


def test_no_gpu_here_is_said(manager: twc.EngineManager) -> None:
    """Loading a good plan where no driver is: IncompatibleError that blames the machine, and the entry stays."""
    from trt_warmcache._gpu import gpu_present

    if gpu_present():
        pytest.skip("gpu_present(): this machine may be able to load the plan")
    with manager:
        engine = manager.get(real_model("magika", "models/standard_v3_3/model.onnx"), profiles={"bytes": "1x2048"})
        with pytest.raises(twc.IncompatibleError, match="driver") as caught:
            engine.deserialize()
        assert not caught.value.about_plan
        assert manager.lookup(real_model("magika", "models/standard_v3_3/model.onnx"), profiles={"bytes": "1x2048"})


@pytest.mark.parametrize("folder", ["plain", "模型 é 🚀"])
def test_external_data_builds(manager: twc.EngineManager, tmp_path: Path, folder: str) -> None:
    """A model with external data builds from any folder, and a change in the side file alone gives another engine."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "external",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 64])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / folder / "model.onnx"
    path.parent.mkdir()
    onnx.save_model(model, str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    with manager:
        first = manager.get(path)
        assert first.outcome is twc.Outcome.BUILT
        assert first.plan.nbytes > weights.nbytes
        data = bytearray((path.parent / "weights.bin").read_bytes())
        data[1000] ^= 1
        (path.parent / "weights.bin").write_bytes(data)
        second = manager.get(path)
        assert second.outcome is twc.Outcome.BUILT
        assert second.plan != first.plan
        (path.parent / "weights.bin").unlink()
        with pytest.raises(twc.ModelError, match=r"weights\.bin"):
            manager.get(path)
