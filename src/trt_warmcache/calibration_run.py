"""INT8 ranges without TensorRT: ONNX Runtime runs the model over the data. Needs the ``int8`` extra."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from trt_warmcache._onnxruntime import (
    ModelLike,
    first_line,
    import_extra,
    load_model,
    open_session,
    runtime_errors,
)
from trt_warmcache.calibration_batches import InputSpec
from trt_warmcache.calibration_data import CalibrationAlgorithm
from trt_warmcache.calibration_ranges import statistics_for
from trt_warmcache.calibration_table import INT8_MAX, CalibrationTable, usable
from trt_warmcache.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx

    from trt_warmcache.calibration_data import Calibration
    from trt_warmcache.calibration_ranges import Statistic

__all__ = ["Measured", "calibrate", "float_tensors", "measure", "model_inputs"]

log = logging.getLogger("trt_warmcache")

_FLOATS: Final = frozenset({"tensor(float)", "tensor(float16)"})


def model_inputs(model: ModelLike) -> tuple[InputSpec, ...]:
    """The inputs that calibration data must supply; initializers listed as inputs are none.

    Raises:
        ModelError: The model cannot be read.
    """
    return _inputs(load_model(model)[0])


def float_tensors(model: ModelLike) -> tuple[str, ...]:
    """Names of the model's floating-point activations: what a calibration table covers.

    Raises:
        ModelError: The model cannot be read, or ONNX Runtime cannot run it.
    """
    proto, folder = load_model(model)
    return _activations(proto, open_session(proto, folder))


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
        ModelError: The model cannot be read or run, or no tensor of it has a range.
    """
    proto, folder = load_model(model)
    session = open_session(proto, folder, calibration.providers)
    tensors = _activations(proto, session)
    specs = _inputs(proto)
    outputs = {output.name for output in session.get_outputs()}
    fetched = [name for name in tensors if name in outputs]
    make = statistics_for(calibration)
    statistics: dict[str, Statistic] = {name: make() for name in tensors}
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
    if not any(usable(scale) for scale in kept.values()):
        raise ModelError(
            f"No tensor of the model has a range: over {done} batches each was zero throughout, or held NaN or infinity. "
            "Check the model's weights and the data."
        )
    if len(kept) < len(thresholds):
        log.warning(
            "%d of %d tensors held NaN or infinity and have no scale", len(thresholds) - len(kept), len(thresholds)
        )
    table = CalibrationTable(0, CalibrationAlgorithm(calibration.algorithm).header, kept)
    return Measured(table, tensors, done, samples)


def _inputs(proto: onnx.ModelProto) -> tuple[InputSpec, ...]:
    onnx = import_extra("onnx")
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


def _activations(proto: onnx.ModelProto, session: Any) -> tuple[str, ...]:
    floats = [value.name for value in (*session.get_inputs(), *session.get_outputs()) if value.type in _FLOATS]
    constants = {tensor.name for tensor in proto.graph.initializer}
    return tuple(name for name in dict.fromkeys(floats) if name not in constants)


def _run(session: Any, names: list[str], batch: dict[str, Any], number: int) -> Any:
    try:
        return session.run(names, batch)
    except runtime_errors() as error:
        raise ModelError(
            f"The model fails on calibration batch {number}: {first_line(error)}. Check that the batch is what it expects."
        ) from error
