"""The ONNX reader against the onnx package, and against damage."""

from __future__ import annotations

import itertools
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from tests import models

from trt_warmcache import onnx_graph
from trt_warmcache.errors import ModelError
from trt_warmcache.onnx_graph import FileView, summarize, summary_from_json, summary_to_json, tensor_names

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def expected_dims(value: Any) -> tuple[int | str | None, ...] | None:
    """The dimensions of a ValueInfoProto as the onnx package sees them."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(
        dim.dim_value
        if dim.HasField("dim_value") and dim.dim_value >= 0
        else (dim.dim_param or None if dim.HasField("dim_param") else None)
        for dim in tensor.shape.dim
    )


def graphs_of(model: Any) -> Iterator[Any]:
    """Every graph, with those in attributes, by way of the onnx package; functions appear as node lists."""
    pending = [model.graph, *(g for t in model.training_info for g in (t.initialization, t.algorithm))]
    pending += model.functions
    while pending:
        graph = pending.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                pending += [attribute.g] if attribute.HasField("g") else []
                pending += attribute.graphs


def check_against_onnx(data: bytes) -> None:
    """Everything in the summary equals what the onnx package reads from the same bytes."""
    model = onnx.load_model_from_string(data)
    summary = summarize(data)
    initial = {tensor.name for tensor in model.graph.initializer}
    initial |= {sparse.values.name for sparse in model.graph.sparse_initializer}
    fed = [value for value in model.graph.input if value.name not in initial]
    assert [tensor.name for tensor in summary.inputs] == [value.name for value in fed]
    for tensor, value in zip((*summary.inputs, *summary.outputs), (*fed, *model.graph.output), strict=True):
        assert tensor.name == value.name
        if value.type.HasField("tensor_type"):
            assert tensor.elem_type == value.type.tensor_type.elem_type
            assert tensor.dtype.replace("_", "") == TensorProto.DataType.Name(tensor.elem_type).lower().replace(
                "_", ""
            ).replace("float", "float32" if tensor.elem_type == TensorProto.FLOAT else "float").replace(
                "double", "float64"
            )
            assert tensor.dims == expected_dims(value)
    assert summary.ir_version == model.ir_version
    assert summary.opset == next((o.version for o in model.opset_import if o.domain in {"", "ai.onnx"}), 0)
    assert summary.producer == f"{model.producer_name} {model.producer_version}".strip()
    assert summary.graph_name == model.graph.name
    assert summary.num_nodes == len(model.graph.node)
    names = set(tensor_names(data))
    for graph in graphs_of(model):
        assert {output for node in graph.node for output in node.output if output} <= names
    assert initial <= names


@pytest.mark.parametrize(("package", "relative"), [entry[1:] for entry in models.REAL_MODELS])
def test_real_models(package: str, relative: str) -> None:
    """Real models read as the onnx package reads them, in a fraction of a second each."""
    data = models.real_model(package, relative).read_bytes()
    started = time.perf_counter()
    summary = summarize(data)
    assert time.perf_counter() - started < 5
    assert summary.inputs
    assert summary.num_nodes
    check_against_onnx(data)


def test_file_view_equals_bytes(tmp_path: Path) -> None:
    """Reading through a file, by windows of any size, gives what reading from memory gives."""
    data = models.real_model("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx").read_bytes()
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    for window in (1 << 10, 64 << 10):
        fd = os.open(path, os.O_RDONLY)
        try:
            assert summarize(FileView(fd, len(data), window=window)) == summarize(data)
        finally:
            os.close(fd)


def test_file_shrinks_while_read(tmp_path: Path) -> None:
    """A file cut short under the reader is a ModelError, not a crash of the process."""
    path = models.save(models.tiny_model(), tmp_path / "m.onnx")
    size = path.stat().st_size
    fd = os.open(path, os.O_RDONLY)
    try:
        os.truncate(path, size // 2)
        with pytest.raises(ModelError, match="ended at byte"):
            summarize(FileView(fd, size))
    finally:
        os.close(fd)


def test_element_types() -> None:
    """Every element type of the installed onnx has its name and its size in bits."""
    for name, number in TensorProto.DataType.items():
        if number in {TensorProto.UNDEFINED, TensorProto.STRING}:
            continue
        known, bits = onnx_graph._DTYPES[number]
        assert known.replace("float64", "double").replace("float32", "float") == name.lower().replace("_", ""), name
        dtype = helper.tensor_dtype_to_np_dtype(number)
        packed = {"uint4": 4, "int4": 4, "float4e2m1": 4, "uint2": 2, "int2": 2, "float6e2m3": 6, "float6e3m2": 6}
        assert bits == packed.get(known, dtype.itemsize * 8), name


def test_external_data_everywhere() -> None:
    """Case 13: tensors with side files are found in every place that can hold one."""
    model = models.everywhere_model()
    summary = summarize(model.SerializeToString())
    assert {tensor.tensor for tensor in summary.external} == models.EVERYWHERE
    assert all(tensor.location == f"{tensor.tensor}.bin" and tensor.nbytes == 16 for tensor in summary.external)
    check_against_onnx(model.SerializeToString())


def test_external_ranges() -> None:
    """Offset and length come from the model; where the length is missing the shape gives it."""
    model = models.tiny_model()
    model.graph.initializer.extend(
        [
            models.external_tensor("a", "d", count=5),
            models.external_tensor("b", "d", count=5, offset=4096),
            models.external_tensor("c", "d", count=5, offset=8192, length=99),
        ]
    )
    found = {t.tensor: (t.offset, t.length, t.nbytes) for t in summarize(model.SerializeToString()).external}
    assert found == {"a": (0, None, 20), "b": (4096, None, 20), "c": (8192, 99, 99)}


@pytest.mark.parametrize(
    ("key", "value"), [("offset", "-1"), ("length", "1e3"), ("offset", "٣"), ("length", ""), ("offset", "9" * 30)]
)
def test_external_nonsense_numbers(key: str, value: str) -> None:
    """An offset or length that is no plain number is damage."""
    model = models.tiny_model()
    tensor = models.external_tensor("a", "d")
    tensor.external_data.add(key=key, value=value)
    model.graph.initializer.append(tensor)
    with pytest.raises(ModelError, match=key):
        summarize(model.SerializeToString())


@pytest.mark.parametrize("dims", [[-1], [2**62, 2**62], [2**62], [2**31, 2**31]])
def test_external_impossible_sizes(dims: list[int]) -> None:
    """A side tensor larger than any file is damage, also where only its bytes do not fit 64 bits."""
    model = models.tiny_model()
    tensor = models.external_tensor("a", "d")
    del tensor.dims[:]
    tensor.dims.extend(dims)
    tensor.data_type = TensorProto.COMPLEX128
    model.graph.initializer.append(tensor)
    with pytest.raises(ModelError, match="'a'"):
        summarize(model.SerializeToString())


def test_external_without_location() -> None:
    """A side tensor that does not say where is damage."""
    model = models.tiny_model()
    tensor = models.external_tensor("a", "d")
    del tensor.external_data[:]
    model.graph.initializer.append(tensor)
    with pytest.raises(ModelError, match="without a location"):
        summarize(model.SerializeToString())


def test_inputs_less_initializers() -> None:
    """An input with an initializer, dense or sparse, is a weight with a default and needs no shape."""
    model = models.tiny_model()
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, ["N"]))
    model.graph.input.append(helper.make_tensor_value_info("s", TensorProto.FLOAT, ["N"]))
    values = helper.make_tensor("s", TensorProto.FLOAT, [1], [1.0])
    model.graph.sparse_initializer.append(
        models.sparse_tensor(values, helper.make_tensor("", TensorProto.INT64, [1], [0]))
    )
    assert [tensor.name for tensor in summarize(model.SerializeToString()).inputs] == ["x"]


def test_dimensions() -> None:
    """Static, named, open and missing shapes are told apart, and read well."""
    model = models.tiny_model(dims=(1, "batch", None))
    rankless = helper.make_tensor_value_info("r", TensorProto.FLOAT16, None)
    scalar = helper.make_tensor_value_info("s", TensorProto.INT64, [])
    sequence = helper.make_tensor_sequence_value_info("q", TensorProto.FLOAT, [1])
    model.graph.input.extend([rankless, scalar, sequence])
    x, r, s, q = summarize(model.SerializeToString()).inputs
    assert (x.dims, x.is_dynamic, str(x)) == ((1, "batch", None), True, "x (float32 1xbatchx?)")
    assert (r.dims, r.is_dynamic, str(r)) == (None, True, "r (float16 ?)")
    assert (s.dims, s.is_dynamic, str(s)) == ((), False, "s (int64 scalar)")
    assert (q.dims, q.dtype) == (None, "sequence")


def test_unpacked_and_packed_dims() -> None:
    """Repeated numbers may be packed or one by one; both are protobuf."""
    entry = models.field(13, models.field(1, b"location") + models.field(2, b"d"))
    tail = b"\x10\x01" + models.field(8, b"t") + entry + b"\x70\x01"
    for dims in (b"\x08\x03\x08\x05", models.field(1, b"\x03\x05")):
        data = models.field(7, models.field(5, dims + tail))
        onnx.load_model_from_string(data)
        assert [tensor.nbytes for tensor in summarize(data).external] == [60]


def test_depth_is_bounded() -> None:
    """Sub-graphs as deep as protobuf reads them are read; deeper ones are refused, quickly, at any depth."""
    summarize(models.nested_model(20))
    for depth in (60, 5_000):
        started = time.perf_counter()
        with pytest.raises(ModelError, match="nested"):
            summarize(models.nested_model(depth))
        assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"PK\x03\x04rest of a checkpoint", "zip"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\x00" * 64, "field number"),
        (b"\xff" * 64, "number"),
        (b"just some text that is no model", "byte"),
    ],
)
def test_not_a_model(data: bytes, hint: str) -> None:
    """Files passed by mistake are refused with what they are."""
    with pytest.raises(ModelError, match=hint):
        summarize(data)


def test_summary_json_round_trip() -> None:
    """A summary survives JSON; other versions and damage are None."""
    summary = summarize(models.everywhere_model().SerializeToString())
    data = msgspec.json.decode(msgspec.json.encode(summary_to_json(summary)))
    assert summary_from_json(data) == summary
    assert summary_from_json([data[0] + 1, data[1]]) is None
    cut: list[Any] = [None, [], {}, "x", [data[0]], [data[0], []], [data[0], {"inputs": 3}], [data[0], data[1][:-1]]]
    for damaged in cut:
        assert summary_from_json(damaged) is None


SEEDS = [
    models.everywhere_model().SerializeToString(),
    models.tiny_model(dims=("N", 3)).SerializeToString(),
    models.nested_model(10),
]


def survives(data: bytes) -> None:
    """Reading damaged bytes ends soon, with a summary that can be remembered or a ModelError."""
    started = time.perf_counter()
    try:
        msgspec.json.encode(summary_to_json(summarize(data)))
        list(tensor_names(data))
    except ModelError as error:
        offset = vars(error)["offset"]
    else:
        offset = 0
    assert 0 <= offset <= len(data)
    assert time.perf_counter() - started < 2


@given(seed=st.sampled_from(SEEDS), cut=st.floats(0, 1))
def test_truncation(seed: bytes, cut: float) -> None:
    """A model cut anywhere is a ModelError or a smaller model, never anything else."""
    survives(seed[: int(len(seed) * cut)])


@settings(max_examples=400)
@given(seed=st.sampled_from(SEEDS), edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1))
def test_flips(seed: bytes, edits: list[tuple[float, int]]) -> None:
    """A model with any bytes overwritten is a ModelError or another model, never anything else."""
    data = bytearray(seed)
    for where, value in edits:
        data[min(int(where * len(data)), len(data) - 1)] = value
    survives(bytes(data))


@given(st.binary(max_size=200))
def test_noise(data: bytes) -> None:
    """Noise is a ModelError or a model, never anything else."""
    survives(data)


def test_every_single_flip() -> None:
    """All 8 flips of every byte of a small model."""
    seed = SEEDS[1]
    for position, bit in itertools.product(range(len(seed)), range(8)):
        data = bytearray(seed)
        data[position] ^= 1 << bit
        survives(bytes(data))
