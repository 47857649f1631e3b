"""Builders: what turns a model into a plan. :func:`select_builder` picks one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_warmcache._lazy import lazy
from trt_warmcache.builders._base import (
    BuilderCapabilities,
    BuildInputs,
    BuildOutput,
    CalibrationRun,
    EngineBuilder,
    Flavour,
    LoadNeeds,
    Progress,
)
from trt_warmcache.builders._select import select_builder

if TYPE_CHECKING:
    from trt_warmcache.builders._config import disagreements
    from trt_warmcache.builders._process import IsolatedBuilder, ProcessLimits, isolated
    from trt_warmcache.builders._tensorrt import TensorRTBuilder
    from trt_warmcache.builders._tensorrt_rtx import TensorRTRTXBuilder
    from trt_warmcache.builders._timing import TimingEntry

__all__ = [
    "BuildInputs",
    "BuildOutput",
    "BuilderCapabilities",
    "CalibrationRun",
    "EngineBuilder",
    "Flavour",
    "IsolatedBuilder",
    "LoadNeeds",
    "ProcessLimits",
    "Progress",
    "TensorRTBuilder",
    "TensorRTRTXBuilder",
    "TimingEntry",
    "disagreements",
    "isolated",
    "select_builder",
]

#: A process uses one flavour, and most processes build nothing.
_WHEN_USED = {
    "IsolatedBuilder": "trt_warmcache.builders._process",
    "ProcessLimits": "trt_warmcache.builders._process",
    "TensorRTBuilder": "trt_warmcache.builders._tensorrt",
    "TensorRTRTXBuilder": "trt_warmcache.builders._tensorrt_rtx",
    "TimingEntry": "trt_warmcache.builders._timing",
    "disagreements": "trt_warmcache.builders._config",
    "isolated": "trt_warmcache.builders._process",
}

if not TYPE_CHECKING:  # type checkers that saw it would take any misspelt name for real
    __getattr__ = lazy(__name__, _WHEN_USED, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
