"""A model and its calibration table: how they fit, and how int8 gets into the engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trt_warmcache import onnx_graph
from trt_warmcache.calibration_batches import InputSpec
from trt_warmcache.calibration_data import Calibration, QdqOptions
from trt_warmcache.calibration_run import float_tensors
from trt_warmcache.calibration_table import CalibrationTable, Coverage, usable
from trt_warmcache.errors import ConfigError, ModelError
from trt_warmcache.memo import DigestMemo
from trt_warmcache.model import ModelSource
from trt_warmcache.options import BuildOptions
from trt_warmcache.quantize import insert_qdq

__all__ = ["activations", "bytes_for_builder", "coverage_of", "input_specs", "model_at_hand", "quantized", "route"]

_LARGEST_PROTO = 2**31


def route(
    options: BuildOptions, calibration: Calibration, *, takes_tables: bool
) -> tuple[BuildOptions, QdqOptions | None]:
    """How int8 reaches the engine: by the table itself, or by Q/DQ nodes made of it.

    Classic TensorRT up to 10.16 reads tables; its int8 option is switched on then. TensorRT 11 and TensorRT-RTX have
    no calibrators, and strongly typed networks refuse them, so there the model gets Q/DQ nodes, and ``int8=True`` is
    dropped, which such a builder would refuse: one request serves all builders.

    Args:
        options: The request's options.
        calibration: The request's calibration.
        takes_tables: Whether the builder reads tables.

    Returns:
        The options to build with, and how to insert Q/DQ nodes; None where the builder reads the table.

    Raises:
        ConfigError: The options forbid int8.
    """
    if options.int8 is False:
        raise ConfigError("The request has a calibration and int8=False. Leave one of them out.")
    if not takes_tables or options.strongly_typed:
        return replace(options, int8=None), calibration.qdq
    return replace(options, int8=True), None


def quantized(source: ModelSource, table: CalibrationTable, how: QdqOptions, *, memo: DigestMemo) -> ModelSource:
    """The model with Q/DQ nodes made of a table; equal arguments give equal bytes.

    Raises:
        ConfigError: An excluded node that does not exist, or nothing to quantize.
        ModelError: The model cannot be read or is too large, or the table belongs to another model.
    """
    if source.total_bytes >= _LARGEST_PROTO:
        raise ModelError(
            f"Q/DQ nodes are inserted into the whole model, and {source.stem} has {source.total_bytes / 1e9:.1f} GB, more "
            "than the 2 GB of one ONNX file. Insert them where the model is exported and build that without a calibration."
        )
    with model_at_hand(source) as model:
        data = insert_qdq(
            model,
            table,
            op_types=how.op_types,
            nodes_exclude=how.nodes_exclude,
            per_channel_weights=how.per_channel_weights,
            min_channels=how.min_channels,
        )
    source.verify_unchanged()
    return ModelSource.open(data, memo=memo)


def bytes_for_builder(table: CalibrationTable) -> bytes:
    """A table as a builder may have it: in TensorRT's text format, without scales that are zero or not finite.

    TensorRT leaves tensors without a scale in floating point; what it does with an unusable scale is its own secret.
    """
    scales = {name: scale for name, scale in table.scales.items() if usable(scale)}
    return CalibrationTable(table.version, table.algorithm, scales).to_bytes()


@contextmanager
def model_at_hand(source: ModelSource) -> Iterator[Path | bytes]:
    """A model in the form that tools for ONNX take: its bytes, or a path where it has side files."""
    if not source.summary.external:
        yield source.read()
    elif source.local_path is not None:
        yield source.local_path
    else:
        with tempfile.TemporaryDirectory(prefix="trt_warmcache-") as folder:
            yield source.stage(Path(folder))


def input_specs(source: ModelSource) -> tuple[InputSpec, ...]:
    """The model's inputs, as calibration data is checked against them."""
    return tuple(InputSpec(tensor.name, tensor.dtype, tensor.dims) for tensor in source.summary.inputs)


def coverage_of(source: ModelSource, table: CalibrationTable) -> Coverage:
    """How a table made elsewhere fits the model.

    Raises:
        ModelError: It belongs to another model.
    """
    table.check(onnx_graph.tensor_names(source.read()), model=source.stem)
    return table.coverage(activations(source, table))


def activations(source: ModelSource, table: CalibrationTable) -> tuple[str, ...]:
    """The model's floating-point activations, as far as can be told."""
    try:
        with model_at_hand(source) as model:
            return float_tensors(model)
    except ConfigError:
        # Without ONNX Runtime nobody tells which tensors are activations, so none can be said to be missing.
        return tuple(name for name in onnx_graph.tensor_names(source.read()) if name in table.scales)
