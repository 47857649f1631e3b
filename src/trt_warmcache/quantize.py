"""Q/DQ nodes made of a calibration table, for TensorRT 11 and TensorRT-RTX, which have no calibrators.

There int8 comes from QuantizeLinear/DequantizeLinear pairs in the model. ONNX Runtime inserts them; what it does beyond
the chosen nodes is undone. Needs the ``int8`` extra (onnxruntime, onnx, numpy).
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

from trt_warmcache._onnxruntime import ModelLike, first_line, import_extra, load_model
from trt_warmcache.calibration_table import INT8_MAX, CalibrationTable, usable
from trt_warmcache.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import onnx

__all__ = ["QUANTIZED_OP_TYPES", "insert_qdq"]

log = logging.getLogger("trt_warmcache")

QUANTIZED_OP_TYPES: Final = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""What is quantized by default: the operators with weights, where int8 pays. TensorRT fuses the rest around them."""

_QUANTIZERS: Final = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
_OPSET: Final = 13  # the first whose DequantizeLinear has an axis, as weights per channel need
_OPSET_HALF: Final = 19  # the first that quantizes float16


def insert_qdq(
    model: ModelLike,
    table: CalibrationTable,
    *,
    op_types: Collection[str] | None = None,
    nodes_exclude: Collection[str] = (),
    per_channel_weights: bool = True,
    min_channels: int = 17,
) -> bytes:
    """Insert Q/DQ pairs so that TensorRT runs the model's weighted operators in int8.

    Symmetric int8 throughout (zero points are 0): one scale per activation, taken from the table as it is; weights
    are stored as int8 with a scale per output channel. Outputs and biases stay in floating point, which TensorRT fuses.
    A node whose input has no usable scale in the table stays in floating point, and the log says so.

    Args:
        model: Path, bytes or ``onnx.ModelProto``.
        table: A table of any TensorRT version or tool, made for this model.
        op_types: Operators to quantize; :data:`QUANTIZED_OP_TYPES` by default.
        nodes_exclude: Names of nodes that stay in floating point.
        per_channel_weights: A scale per output channel rather than one for the whole weight.
        min_channels: Nodes with fewer input channels (per group) or output channels stay in floating point. Int8
            units work on bundles of channels, so such nodes, depthwise convolutions above all, gain little, and they
            lose most accuracy: leaving them out lifts the cosine of PP-OCRv4's detection map from 0.965 to 0.995.

    Returns:
        The quantized model, serialized.

    Raises:
        ConfigError: An excluded node that does not exist, nothing left to quantize, or a model that is quantized already.
        ModelError: The model cannot be read, or the table belongs to another model.
    """
    quantizer_module = import_extra("onnxruntime.quantization.qdq_quantizer")
    calibrate_module = import_extra("onnxruntime.quantization.calibrate")
    helpers = import_extra("onnxruntime.quantization.quant_utils")
    np = import_extra("numpy")

    types = sorted(set(QUANTIZED_OP_TYPES if op_types is None else op_types))
    proto = _prepare(load_model(model, side_files=True)[0])
    initializers = {tensor.name for tensor in proto.graph.initializer}
    produced = {name for node in proto.graph.node for name in node.output}
    table.check({name for name in (*produced, *(value.name for value in proto.graph.input)) if name} - initializers)
    chosen = _nodes_to_quantize(proto, table, set(types), set(nodes_exclude), min_channels)

    # scales must be of the type of what they scale
    half = {
        value.name
        for value in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output)
        if value.type.tensor_type.elem_type == helpers.onnx_proto.TensorProto.FLOAT16
    }
    ranges = {}
    for name, scale in table.scales.items():
        if usable(scale):
            limit = np.array(scale * INT8_MAX, np.float16 if name in half else np.float32)
            ranges[name] = calibrate_module.TensorData(lowest=-limit, highest=limit)
    helpers.add_infer_metadata(proto)  # types are known already; without the mark they are inferred through a file
    quantizer = quantizer_module.QDQQuantizer(
        proto,
        per_channel=per_channel_weights,
        reduce_range=False,
        weight_qType=helpers.QuantType.QInt8,
        activation_qType=helpers.QuantType.QInt8,
        tensors_range=calibrate_module.TensorsData(calibrate_module.CalibrationMethod.MinMax, ranges),
        nodes_to_quantize=chosen,
        nodes_to_exclude=[],
        op_types_to_quantize=types,
        extra_options={
            "ActivationSymmetric": True,
            "WeightSymmetric": True,
            "QuantizeBias": False,  # TensorRT takes no int32 biases
            "OpTypesToExcludeOutputQuantization": types,
        },
    )
    try:
        quantizer.quantize_model()
    except (ValueError, RuntimeError) as error:
        raise ModelError(
            f"ONNX Runtime cannot insert Q/DQ nodes: {first_line(error)}. Leave the node out with nodes_exclude."
        ) from error
    quantizer.model.topological_sort()
    return _finish(quantizer.model.model, set(chosen))


def _prepare(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Bring a model to the form the quantizer needs: opset 13, weights as initializers, named nodes, known types."""
    onnx = import_extra("onnx")
    version = next((entry.version for entry in proto.opset_import if entry.domain in {"", "ai.onnx"}), 0)
    half = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in _constants(proto))
    needed = _OPSET_HALF if half else _OPSET
    if version < needed:
        try:
            proto = onnx.version_converter.convert_version(proto, needed)
        except (RuntimeError, onnx.onnx_cpp2py_export.version_converter.ConvertError) as error:
            raise ModelError(
                f"The model has opset {version}, and Q/DQ nodes for it need {needed}; converting failed: "
                f"{first_line(error)}. Export it with a newer opset."
            ) from error
    graph = proto.graph
    kept = []
    for node in graph.node:
        # the quantizer takes weights from initializers only
        tensor = next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)
        if node.op_type == "Constant" and tensor is not None:
            constant = graph.initializer.add()
            constant.CopyFrom(tensor)
            constant.name = node.output[0]
        else:
            kept.append(node)
    names = Counter(node.name for node in kept)
    for number, node in enumerate(kept):
        if not node.name or names[node.name] > 1:
            node.name = f"{node.op_type}_{number}"
    del graph.node[:]
    graph.node.extend(kept)
    try:
        return onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError) as error:
        raise ModelError(f"The model's types cannot be inferred: {first_line(error)}.") from error


def _constants(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from proto.graph.initializer
    for node in proto.graph.node:
        if node.op_type == "Constant":
            yield from (attribute.t for attribute in node.attribute if attribute.name == "value")


def _nodes_to_quantize(
    proto: onnx.ModelProto, table: CalibrationTable, op_types: set[str], exclude: set[str], min_channels: int
) -> list[str]:
    already = next((node for node in proto.graph.node if node.op_type in _QUANTIZERS), None)
    if already is not None:
        raise ConfigError(
            f"The model is quantized already ({already.op_type} {already.name!r}). Build it without a calibration, or "
            "calibrate the model that it was made from."
        )
    known = {node.name for node in proto.graph.node}
    if not exclude <= known:
        missing = min(exclude - known)
        raise ConfigError(f"The model has no node {missing!r} to exclude; a viewer such as Netron shows the names.")
    weights = {tensor.name: tensor.dims for tensor in proto.graph.initializer}
    chosen: dict[str, onnx.NodeProto] = {}
    left = []
    for node in proto.graph.node:
        if node.op_type not in op_types or node.name in exclude:
            continue
        if node.op_type in QUANTIZED_OP_TYPES and not _worthwhile(node, weights.get(node.input[1]), min_channels):
            continue
        scaled = node.input[:2] if node.op_type in QUANTIZED_OP_TYPES else node.input  # biases need none
        if all(usable(table.scales.get(name, 0.0)) for name in scaled if name and name not in weights):
            chosen[node.name] = node
        else:
            left.append(node.name)
    # a weight that something else reads too, such as a tied embedding, must keep its values
    readers = Counter(name for node in proto.graph.node for name in node.input)
    inside = Counter(name for node in chosen.values() for name in node.input)
    chosen = {
        name: node
        for name, node in chosen.items()
        if all(inside[weight] == readers[weight] for weight in node.input[:2] if weight in weights)
    }
    if left:
        total = len(left) + len(chosen)
        log.warning("%d of %d nodes stay in floating point: no usable scale (%s ...)", len(left), total, left[0])
    if not chosen:
        raise ConfigError(
            f"Nothing to quantize: no {', '.join(sorted(op_types))} node with constant weights of at least "
            f"{min_channels} channels and a usable scale is left. Lower min_channels, or build the model as it is."
        )
    return list(chosen)


def _worthwhile(node: onnx.NodeProto, dims: Sequence[int] | None, min_channels: int) -> bool:
    """Whether a weighted operator gains by int8, and its weight has the layout that scales per channel are made for."""
    if dims is None or len(dims) < 2 or min(dims[:2]) < min_channels:
        return False  # a product of two activations gains little and loses accuracy, as few channels do
    if node.op_type == "ConvTranspose":  # with groups, output channels are spread over both axes
        return all(attribute.i == 1 for attribute in node.attribute if attribute.name == "group")
    return node.op_type == "Conv" or len(dims) == 2


def _finish(proto: onnx.ModelProto, quantized: set[str]) -> bytes:
    """Undo what the quantizer does beyond the chosen nodes, sort, and serialize.

    It reroutes every consumer of a quantized tensor, graph outputs too, through the rounded values. Nodes that stay in
    floating point, and whoever reads the outputs, get the original tensor back.
    """
    outputs = {output.name for output in proto.graph.output}
    quantize = {node.output[0]: node for node in proto.graph.node if node.op_type == "QuantizeLinear"}
    original, renamed = {}, {}
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in quantize:
            source, rounded = quantize[node.input[0]].input[0], node.output[0]
            if rounded in outputs:  # the quantizer took the output's name for the rounded tensor
                renamed[source], renamed[rounded] = rounded, f"{rounded}_DequantizeLinear_Output"
                source, rounded = renamed[source], renamed[rounded]
            original[rounded] = source
    for node in proto.graph.node:
        restore = node.op_type not in {"QuantizeLinear", "DequantizeLinear"} and node.name not in quantized
        for position, name in enumerate(node.input):
            current = renamed.get(name, name)
            node.input[position] = original.get(current, current) if restore else current
        for position, name in enumerate(node.output):
            node.output[position] = renamed.get(name, name)
    # the marks that the quantizer leaves for itself
    kept = [entry for entry in proto.metadata_props if entry.key != "onnx.infer"]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    return bytes(proto.SerializeToString(deterministic=True))
