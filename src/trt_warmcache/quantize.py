"""INT8 without TensorRT's calibrators: ranges measured with ONNX Runtime, and Q/DQ nodes made of a table.

TensorRT 11 and TensorRT-RTX have no calibrators; there int8 comes from QuantizeLinear/DequantizeLinear pairs in the
model. Needs the ``int8`` extra (onnxruntime, onnx, numpy).

ONNX Runtime runs the model and inserts the nodes, but its calibrators are not used: they keep every activation of
every batch, or let histograms grow with the data, and their default entropy search has a single candidate. The
statistics here are of fixed size per tensor.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from trt_warmcache.calibration_data import CalibrationAlgorithm, InputSpec
from trt_warmcache.calibration_table import INT8_MAX, CalibrationTable, usable
from trt_warmcache.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterator, Sequence
    from typing import Protocol

    import numpy as np
    import onnx

    from trt_warmcache.calibration_data import Calibration

    class _Statistic(Protocol):
        def add(self, values: np.ndarray[Any, Any]) -> None: ...
        def threshold(self) -> float: ...


__all__ = [
    "QUANTIZED_OP_TYPES",
    "Measured",
    "calibrate",
    "float_tensors",
    "insert_qdq",
    "measure",
    "model_inputs",
    "onnxruntime_version",
]

log = logging.getLogger("trt_warmcache")

ModelLike: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto"

QUANTIZED_OP_TYPES: Final = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""What is quantized by default: the operators with weights, where int8 pays. TensorRT fuses the rest around them."""

BINS: Final = 4096
"""Bins of a histogram; at least half of them are in use once ranges have grown."""
QUANTIZED_BINS: Final = 128
"""Magnitudes that int8 can tell apart."""
SEARCH_BINS: Final = 1024
"""At most this many for the entropy search: with more of them, sparse tails look like noise and are clipped."""
_SMALLEST_LIMIT: Final = 2.0**-100  # below it, float32 cannot hold the reciprocal of a bin's width
_CANDIDATES: Final = 256
"""Thresholds that the search compares: steps of at most 0.8 % of the range, finer than int8 itself."""
_FLOATS: Final = frozenset({"tensor(float)", "tensor(float16)"})
_SIDE_FILES: Final = "session.model_external_initializers_file_folder_path"
_OPSET: Final = 13  # the first whose DequantizeLinear has an axis, as weights per channel need
_OPSET_HALF: Final = 19  # the first that quantizes float16


def onnxruntime_version() -> str:
    """Which ONNX Runtime is installed; several packages bring it."""
    return str(_import("onnxruntime").__version__)


def model_inputs(model: ModelLike) -> tuple[InputSpec, ...]:
    """The inputs that calibration data must supply; initializers listed as inputs are none.

    Raises:
        ModelError: The model cannot be read.
    """
    return _inputs(_load(model)[0])


def float_tensors(model: ModelLike) -> tuple[str, ...]:
    """Names of the model's floating-point activations: what a calibration table covers.

    Raises:
        ModelError: The model cannot be read, or ONNX Runtime cannot run it.
    """
    proto, folder = _load(model)
    return _activations(proto, _session(proto, folder))


@dataclass(frozen=True)
class Measured:
    """A complete calibration.

    Attributes:
        table: Scales of all tensors but those that held NaN or infinity. Of version 0: re-head it for a TensorRT that
            reads tables.
        tensors: The model's floating-point activations, with and without a scale.
        batches: How many were run.
        samples: Sum of their leading dimensions.
    """

    table: CalibrationTable
    tensors: tuple[str, ...]
    batches: int
    samples: int


def calibrate(
    model: ModelLike,
    calibration: Calibration,
    *,
    fingerprint: str | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> CalibrationTable:
    """The table of :func:`measure`."""
    return measure(model, calibration, fingerprint=fingerprint, progress=progress).table


def measure(
    model: ModelLike,
    calibration: Calibration,
    *,
    fingerprint: str | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Measured:
    """Measure the range of every floating-point activation.

    Memory holds one batch's activations and a fixed amount per tensor, however many batches there are.

    Args:
        model: Path, bytes or ``onnx.ModelProto``; side files are found beside a path.
        calibration: The data, the algorithm, and where to run the model.
        fingerprint: What ``calibration.find_fingerprint`` returned earlier; the data must still be the same.
        progress: Called after each batch with the number done and the number in all, None where that is unknown. What
            it raises ends the run.

    Raises:
        ConfigError: Data that does not fit the model, or that changed since `fingerprint`; or an execution provider that
            this ONNX Runtime lacks.
        ModelError: The model cannot be read or run.
    """
    proto, folder = _load(model)
    session = _session(proto, folder, calibration.providers)
    tensors = _activations(proto, session)
    specs = _inputs(proto)
    outputs = {output.name for output in session.get_outputs()}
    fetched = [name for name in tensors if name in outputs]
    make = _statistic_factory(calibration)
    statistics: dict[str, _Statistic] = {name: make() for name in tensors}
    done = samples = 0
    total = calibration.expected_batches
    for done, batch in enumerate(calibration.feed(specs, expected=fingerprint), start=1):
        for name, values in zip(fetched, _run(session, fetched, batch, done), strict=True):
            statistics[name].add(values)
        for name in statistics.keys() & batch.keys() - outputs:
            statistics[name].add(batch[name])
        shape = next(iter(batch.values())).shape
        samples += shape[0] if shape else 1
        if progress is not None:
            progress(done, total)
    thresholds = {name: statistic.threshold() for name, statistic in statistics.items()}
    kept = {name: value / INT8_MAX for name, value in thresholds.items() if not math.isnan(value)}
    if len(kept) < len(thresholds):
        log.warning(
            "%d of %d tensors held NaN or infinity and have no scale", len(thresholds) - len(kept), len(thresholds)
        )
    table = CalibrationTable(0, CalibrationAlgorithm(calibration.algorithm).header, kept)
    return Measured(table, tensors, done, samples)


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
        ConfigError: An excluded node that does not exist, or nothing left to quantize.
        ModelError: The model cannot be read, or the table belongs to another model.
    """
    quantizer_module = _import("onnxruntime.quantization.qdq_quantizer")
    calibrate_module = _import("onnxruntime.quantization.calibrate")
    helpers = _import("onnxruntime.quantization.quant_utils")
    np = _import("numpy")

    types = sorted(set(QUANTIZED_OP_TYPES if op_types is None else op_types))
    proto = _prepare(_load(model, side_files=True)[0])
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
            f"ONNX Runtime cannot insert Q/DQ nodes: {_first_line(error)}. Leave the node out with nodes_exclude."
        ) from error
    quantizer.model.topological_sort()
    return _finish(quantizer.model.model, set(chosen))


def _load(model: ModelLike, *, side_files: bool = False) -> tuple[onnx.ModelProto, str | None]:
    """The model as a proto of our own, and the folder of its side files where they were not read in."""
    onnx = _import("onnx")
    if isinstance(model, onnx.ModelProto):
        proto = onnx.ModelProto()
        proto.CopyFrom(model)
        return proto, None
    try:
        if isinstance(model, bytes):
            return onnx.load_model_from_string(model), None
        path = Path(model).expanduser()
        return onnx.load(path, load_external_data=side_files), None if side_files else str(path.absolute().parent)
    except FileNotFoundError as error:
        raise ModelError(
            f"{error.filename or error} does not exist; it is the model or one of its side files."
        ) from error
    except (_import("google.protobuf.message").DecodeError, onnx.checker.ValidationError, OSError) as error:
        raise ModelError(f"The model cannot be read as ONNX: {error}. Export it again.") from error


def _inputs(proto: onnx.ModelProto) -> tuple[InputSpec, ...]:
    onnx = _import("onnx")
    constants = {tensor.name for tensor in proto.graph.initializer}
    specs = []
    for value in proto.graph.input:
        if value.name in constants:
            continue
        kind = value.type.tensor_type
        if not kind.elem_type:
            raise ModelError(f"Input {value.name!r} of the model is no tensor; only tensors can be calibrated.")
        dims = tuple(_size(dim) for dim in kind.shape.dim)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name
        specs.append(InputSpec(value.name, dtype, dims if kind.HasField("shape") else None))
    return tuple(specs)


def _size(dim: Any) -> int | str | None:
    # some exporters write -1 for a dimension that may vary
    return dim.dim_param or None if not dim.HasField("dim_value") or dim.dim_value < 0 else int(dim.dim_value)


def _session(proto: onnx.ModelProto, folder: str | None, providers: Sequence[str] = ("CPUExecutionProvider",)) -> Any:
    """A session that returns every tensor of the main graph under the name it has in the model."""
    onnx, runtime = _import("onnx"), _import("onnxruntime")
    available = runtime.get_available_providers()
    missing = [name for name in providers if name not in available]
    if missing:  # a session would only warn, and run on the CPU
        raise ConfigError(
            f"This ONNX Runtime has no {', '.join(missing)}; it has {', '.join(available)}. GPUs need another package, "
            "such as onnxruntime-gpu in place of onnxruntime."
        )
    seen = {output.name for output in proto.graph.output}
    for node in proto.graph.node:
        if node.op_type == "Constant":
            continue
        for name in node.output:
            if name and name not in seen:
                # no type given: ONNX Runtime infers more than onnx does, and tells
                proto.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
                seen.add(name)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL  # fused tensors have no range
    options.log_severity_level = 3
    # an arena keeps the largest batch of every shape for good
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    if folder is not None:
        options.add_session_config_entry(_SIDE_FILES, folder)
    try:
        return runtime.InferenceSession(proto.SerializeToString(), options, providers=list(providers))
    except _runtime_errors() as error:
        raise ModelError(f"ONNX Runtime cannot load the model: {_first_line(error)}.") from error


def _runtime_errors() -> tuple[type[Exception], ...]:
    """What ONNX Runtime raises: one class per status code, with no base of its own."""
    state = _import("onnxruntime.capi.onnxruntime_pybind11_state")
    return tuple(
        getattr(state, name)
        for name in (
            "Fail",
            "InvalidArgument",
            "InvalidGraph",
            "InvalidProtobuf",
            "NoSuchFile",
            "NotImplemented",
            "RuntimeException",
        )
        if hasattr(state, name)
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def _activations(proto: onnx.ModelProto, session: Any) -> tuple[str, ...]:
    floats = [value.name for value in (*session.get_inputs(), *session.get_outputs()) if value.type in _FLOATS]
    constants = {tensor.name for tensor in proto.graph.initializer}
    return tuple(name for name in dict.fromkeys(floats) if name not in constants)


def _run(session: Any, names: list[str], batch: dict[str, Any], number: int) -> Any:
    try:
        return session.run(names, batch)
    except _runtime_errors() as error:
        raise ModelError(f"The model fails on calibration batch {number}: {_first_line(error)}.") from error


def _statistic_factory(calibration: Calibration) -> Callable[[], _Statistic]:
    if calibration.algorithm is CalibrationAlgorithm.MINMAX:
        return _Largest
    if calibration.algorithm is CalibrationAlgorithm.PERCENTILE:
        return lambda: _Percentile(calibration.percentile)
    return _Entropy


class _Largest:
    """The largest magnitude; NaN once anything was not finite."""

    def __init__(self) -> None:
        self._largest = 0.0

    def add(self, values: np.ndarray[Any, Any]) -> None:
        if values.size:
            # both reductions hand on NaN and infinity, and spare a copy of magnitudes
            largest = max(abs(float(values.max())), abs(float(values.min())))
            finite = math.isfinite(largest) and math.isfinite(self._largest)
            self._largest = max(self._largest, largest) if finite else math.nan

    def threshold(self) -> float:
        return self._largest


class _Histogram:
    """Counts of magnitudes in a fixed number of bins over [0, limit).

    When a value exceeds the limit, the limit doubles and neighbouring bins are added up. So the size stays the same,
    and the result depends on the values alone, not on the order of batches.
    """

    def __init__(self) -> None:
        self.counts = _import("numpy").zeros(BINS, dtype="int64")
        self.limit = 0.0
        self.largest = 0.0  # NaN once anything was not finite
        self.zeros = 0

    def add(self, values: np.ndarray[Any, Any]) -> None:
        np = _import("numpy")
        if not values.size:
            return
        magnitudes = np.abs(values, dtype=np.float32).reshape(-1)
        largest = float(magnitudes.max())
        if not (math.isfinite(largest) and math.isfinite(self.largest)):
            self.largest = math.nan
            return
        self.largest = max(self.largest, largest)
        if largest == 0:
            self.zeros += magnitudes.size
            return
        # the power of two above, so that bins of early and late batches coincide
        limit = max(2.0 ** math.frexp(largest)[1], _SMALLEST_LIMIT)
        self.limit = self.limit or limit
        while self.limit < limit:
            self.limit *= 2
            folded = self.counts[0::2] + self.counts[1::2]
            self.counts = np.concatenate([folded, np.zeros(BINS - folded.size, folded.dtype)])
        places = (magnitudes * np.float32(BINS / self.limit)).astype(np.int32)  # exact, being a power of two
        self.counts += np.bincount(places, minlength=BINS)

    def used(self) -> np.ndarray[Any, Any]:
        """Counts up to the largest magnitude, zeros included."""
        counts = self.counts.copy()
        counts[0] += self.zeros
        used: np.ndarray[Any, Any] = counts[: int(counts.nonzero()[0][-1]) + 1]
        return used


class _Percentile(_Histogram):
    """The magnitude below which a share of the values lies."""

    def __init__(self, percentile: float) -> None:
        super().__init__()
        self._share = percentile / 100

    def threshold(self) -> float:
        np = _import("numpy")
        if not self.largest > 0:
            return self.largest
        cumulated = np.cumsum(self.used())
        place = int(np.searchsorted(cumulated, self._share * cumulated[-1]))
        return min((place + 1) * self.limit / BINS, self.largest)


class _Entropy(_Histogram):
    """The clipping whose 128 int8 magnitudes tell most about the distribution (least Kullback-Leibler divergence)."""

    def threshold(self) -> float:
        np = _import("numpy")
        if not self.largest > 0:
            return self.largest
        counts, width = self.used().astype(np.float64), self.limit / BINS
        while counts.size > SEARCH_BINS:
            counts, width = np.add.reduceat(counts, np.arange(0, counts.size, 2)), width * 2
        # The first bin collects what ReLU cut off; its size says nothing about where to clip (TensorRT does the same).
        counts[0] = counts[1] if counts.size > 1 else counts[0]
        if counts.size <= QUANTIZED_BINS or not counts.any():
            return self.largest
        ends = np.unique(np.linspace(QUANTIZED_BINS, counts.size, _CANDIDATES).astype(int))
        best = min(ends[::-1], key=lambda end: _divergence(counts, int(end)))
        return min(float(best) * width, self.largest)


def _divergence(counts: np.ndarray[Any, Any], end: int) -> float:
    """Kullback-Leibler divergence between the distribution clipped at bin `end` and its int8 image."""
    np = _import("numpy")
    clipped = counts[:end]
    reference = clipped.copy()
    reference[-1] += counts[end:].sum()
    occupied = reference > 0
    level = np.arange(end) * QUANTIZED_BINS // end
    sums = np.bincount(level, weights=clipped, minlength=QUANTIZED_BINS)
    shares = np.bincount(level, weights=occupied, minlength=QUANTIZED_BINS)
    image = np.where(occupied, (sums / np.maximum(shares, 1))[level], 0)
    total = image.sum()
    if not total:
        return math.inf
    p = reference[occupied] / reference.sum()
    q = np.maximum(image[occupied] / total, 1e-12)  # the last bin may hold nothing but what was clipped
    return float((p * np.log(p / q)).sum())


def _prepare(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Bring a model to the form the quantizer needs: opset 13, weights as initializers, named nodes, known types."""
    onnx = _import("onnx")
    version = next((entry.version for entry in proto.opset_import if entry.domain in {"", "ai.onnx"}), 0)
    half = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in _constants(proto))
    needed = _OPSET_HALF if half else _OPSET
    if version < needed:
        try:
            proto = onnx.version_converter.convert_version(proto, needed)
        except (RuntimeError, onnx.onnx_cpp2py_export.version_converter.ConvertError) as error:
            raise ModelError(
                f"The model has opset {version}, and Q/DQ nodes for it need {needed}; converting failed: "
                f"{_first_line(error)}. Export it with a newer opset."
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
        raise ModelError(f"The model's types cannot be inferred: {_first_line(error)}.") from error


def _constants(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from proto.graph.initializer
    for node in proto.graph.node:
        if node.op_type == "Constant":
            yield from (attribute.t for attribute in node.attribute if attribute.name == "value")


def _nodes_to_quantize(
    proto: onnx.ModelProto, table: CalibrationTable, op_types: set[str], exclude: set[str], min_channels: int
) -> list[str]:
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


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"INT8 calibration and Q/DQ need the package {error.name}: pip install 'trt_warmcache[int8]'."
        ) from error
