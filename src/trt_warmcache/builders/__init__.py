"""Builders: what turns a model into a plan. :func:`select_builder` picks one."""

from __future__ import annotations

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
from trt_warmcache.builders._config import disagreements
from trt_warmcache.builders._process import IsolatedBuilder, ProcessLimits, isolated
from trt_warmcache.builders._select import select_builder
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
