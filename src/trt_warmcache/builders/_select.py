"""From the ``builder`` argument to a builder."""

from __future__ import annotations

from typing import Any

from trt_warmcache._gpu import gpu_present
from trt_warmcache.builders._base import EngineBuilder
from trt_warmcache.builders._library import LIBRARIES, module_available
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
    if not isinstance(builder, str):
        if not isinstance(builder, EngineBuilder):
            raise _unknown(builder)
        return builder
    flavour = _flavour_here() if builder == "auto" else builder
    if flavour == "tensorrt":
        from trt_warmcache.builders._tensorrt import TensorRTBuilder

        return TensorRTBuilder(memo=memo)
    if flavour == "tensorrt_rtx":
        from trt_warmcache.builders._tensorrt_rtx import TensorRTRTXBuilder

        return TensorRTRTXBuilder(memo=memo)
    raise _unknown(builder)


def _flavour_here() -> str:
    classic, rtx = (module_available(LIBRARIES[flavour].module) for flavour in ("tensorrt", "tensorrt_rtx"))
    if classic and gpu_present():
        return "tensorrt"
    if rtx:
        return "tensorrt_rtx"
    why = (
        "classic TensorRT is installed but there is no GPU, and TensorRT-RTX is not installed"
        if classic
        else "neither TensorRT is installed"
    )
    raise ConfigError(
        f"No builder: {why}. Install pip install 'trt_warmcache[rtx]' (builds without a GPU), or 'trt_warmcache[tensorrt]' on a machine with one."
    )


def _unknown(builder: Any) -> ConfigError:
    return ConfigError(f"builder must be 'auto', 'tensorrt', 'tensorrt_rtx' or an EngineBuilder, not {builder!r}.")
