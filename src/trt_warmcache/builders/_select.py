"""From the ``builder`` argument to a builder."""

from __future__ import annotations

from typing import Any

from trt_warmcache._gpu import gpu_present
from trt_warmcache.builders._base import EngineBuilder
from trt_warmcache.builders._tensorrt import TensorRTBuilder
from trt_warmcache.builders._tensorrt_rtx import TensorRTRTXBuilder
from trt_warmcache.errors import ConfigError
from trt_warmcache.memo import DigestMemo

__all__ = ["select_builder"]


def select_builder(builder: Any, *, memo: DigestMemo | None = None) -> EngineBuilder:
    """The builder that a manager's argument means.

    Args:
        builder: ``"tensorrt"``, ``"tensorrt_rtx"``, an :class:`EngineBuilder`, or ``"auto"``: classic TensorRT where
            it is installed and a GPU is there, else TensorRT-RTX.
        memo: Remembers library versions.

    Raises:
        ConfigError: Nothing fitting is installed; the message names both extras.
    """
    if builder == "tensorrt":
        return TensorRTBuilder(memo=memo)
    if builder == "tensorrt_rtx":
        return TensorRTRTXBuilder(memo=memo)
    if builder != "auto":
        if not isinstance(builder, EngineBuilder):
            raise ConfigError(
                f"builder must be 'auto', 'tensorrt', 'tensorrt_rtx' or an EngineBuilder, not {builder!r}."
            )
        return builder
    if TensorRTBuilder.available() and gpu_present():
        return TensorRTBuilder(memo=memo)
    if TensorRTRTXBuilder.available():
        return TensorRTRTXBuilder(memo=memo)
    why = (
        "classic TensorRT is installed but there is no GPU, and TensorRT-RTX is not installed"
        if TensorRTBuilder.available()
        else "neither TensorRT is installed"
    )
    raise ConfigError(
        f"No builder: {why}. Install pip install 'trt_warmcache[rtx]' (builds without a GPU), or 'trt_warmcache[tensorrt]' on a machine with one."
    )
