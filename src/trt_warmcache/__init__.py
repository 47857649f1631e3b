"""Remove TensorRT's cold start: build an engine once, on the right target, and let everyone after get it.

    import trt_warmcache as twc

    manager = twc.EngineManager("~/.cache/trt_warmcache")
    engine = manager.get("model.onnx", profiles={"x": ("1x3x224x224", "4x3x224x224", "8x3x224x224")})
    engine.plan  # a memoryview of the serialized engine

Importing this package reads no environment, opens no file and loads neither TensorRT nor onnx nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_warmcache._lazy import lazy
from trt_warmcache._version import __version__

if TYPE_CHECKING:
    from trt_warmcache.builders import BuilderCapabilities, BuildInputs, BuildOutput, EngineBuilder, Progress
    from trt_warmcache.calibration import CalibrationTables, StoredTable
    from trt_warmcache.calibration_data import Calibration, CalibrationAlgorithm, CalibrationRunner, QdqOptions
    from trt_warmcache.calibration_files import read_table
    from trt_warmcache.calibration_table import CalibrationTable
    from trt_warmcache.engine import Engine, Outcome
    from trt_warmcache.errors import (
        BuildError,
        BuildTimeout,
        ConfigError,
        IncompatibleError,
        IntegrityError,
        MissError,
        ModelError,
        StoreError,
        StoreReason,
        UnknownFieldError,
        UntrustedError,
        WarmCacheError,
    )
    from trt_warmcache.events import Event, EventKind, Hook
    from trt_warmcache.explain import Explanation
    from trt_warmcache.keys import KEY_SCHEMA, CalibrationKey, EngineKey, TimingKey
    from trt_warmcache.manager import EngineManager
    from trt_warmcache.manifest import Manifest
    from trt_warmcache.memo import DigestMemo
    from trt_warmcache.options import BuildOptions
    from trt_warmcache.policy import Policy
    from trt_warmcache.profiles import ShapeProfile
    from trt_warmcache.request import EngineRequest
    from trt_warmcache.stores import (
        FsspecStore,
        Layer,
        LayeredStore,
        LocalStore,
        MemoryStore,
        Store,
        StoreCapabilities,
        open_store,
    )
    from trt_warmcache.tactics import TacticReplay
    from trt_warmcache.target import Target
    from trt_warmcache.trust import Keyring, Signer
    from trt_warmcache.warm import WarmReport, WarmRow

__all__ = [
    "KEY_SCHEMA",
    "BuildError",
    "BuildInputs",
    "BuildOptions",
    "BuildOutput",
    "BuildTimeout",
    "BuilderCapabilities",
    "Calibration",
    "CalibrationAlgorithm",
    "CalibrationKey",
    "CalibrationRunner",
    "CalibrationTable",
    "CalibrationTables",
    "ConfigError",
    "DigestMemo",
    "Engine",
    "EngineBuilder",
    "EngineKey",
    "EngineManager",
    "EngineRequest",
    "Event",
    "EventKind",
    "Explanation",
    "FsspecStore",
    "Hook",
    "IncompatibleError",
    "IntegrityError",
    "Keyring",
    "Layer",
    "LayeredStore",
    "LocalStore",
    "Manifest",
    "MemoryStore",
    "MissError",
    "ModelError",
    "Outcome",
    "Policy",
    "Progress",
    "QdqOptions",
    "ShapeProfile",
    "Signer",
    "Store",
    "StoreCapabilities",
    "StoreError",
    "StoreReason",
    "StoredTable",
    "TacticReplay",
    "Target",
    "TimingKey",
    "UnknownFieldError",
    "UntrustedError",
    "WarmCacheError",
    "WarmReport",
    "WarmRow",
    "__version__",
    "open_store",
    "read_table",
]

#: Where each public name is defined. They are imported on first use, so that an application which imports this package
#: and may never need an engine pays next to nothing for it. The imports above say the same to type checkers; a test
#: holds the two against each other.
_HOME = {
    "LayeredStore": "trt_warmcache.stores",
    "Layer": "trt_warmcache.stores",
    "Signer": "trt_warmcache.trust",
    "Keyring": "trt_warmcache.trust",
    "BuilderCapabilities": "trt_warmcache.builders",
    "BuildInputs": "trt_warmcache.builders",
    "BuildOutput": "trt_warmcache.builders",
    "EngineBuilder": "trt_warmcache.builders",
    "Progress": "trt_warmcache.builders",
    "CalibrationTables": "trt_warmcache.calibration",
    "StoredTable": "trt_warmcache.calibration",
    "Calibration": "trt_warmcache.calibration_data",
    "CalibrationAlgorithm": "trt_warmcache.calibration_data",
    "CalibrationRunner": "trt_warmcache.calibration_data",
    "QdqOptions": "trt_warmcache.calibration_data",
    "CalibrationTable": "trt_warmcache.calibration_table",
    "read_table": "trt_warmcache.calibration_files",
    "Engine": "trt_warmcache.engine",
    "Outcome": "trt_warmcache.engine",
    "BuildError": "trt_warmcache.errors",
    "BuildTimeout": "trt_warmcache.errors",
    "ConfigError": "trt_warmcache.errors",
    "IncompatibleError": "trt_warmcache.errors",
    "IntegrityError": "trt_warmcache.errors",
    "MissError": "trt_warmcache.errors",
    "ModelError": "trt_warmcache.errors",
    "StoreError": "trt_warmcache.errors",
    "StoreReason": "trt_warmcache.errors",
    "UnknownFieldError": "trt_warmcache.errors",
    "UntrustedError": "trt_warmcache.errors",
    "WarmCacheError": "trt_warmcache.errors",
    "Event": "trt_warmcache.events",
    "EventKind": "trt_warmcache.events",
    "Hook": "trt_warmcache.events",
    "Explanation": "trt_warmcache.explain",
    "KEY_SCHEMA": "trt_warmcache.keys",
    "CalibrationKey": "trt_warmcache.keys",
    "EngineKey": "trt_warmcache.keys",
    "TimingKey": "trt_warmcache.keys",
    "EngineManager": "trt_warmcache.manager",
    "Manifest": "trt_warmcache.manifest",
    "DigestMemo": "trt_warmcache.memo",
    "BuildOptions": "trt_warmcache.options",
    "Policy": "trt_warmcache.policy",
    "ShapeProfile": "trt_warmcache.profiles",
    "EngineRequest": "trt_warmcache.request",
    "FsspecStore": "trt_warmcache.stores",
    "LocalStore": "trt_warmcache.stores",
    "MemoryStore": "trt_warmcache.stores",
    "Store": "trt_warmcache.stores",
    "StoreCapabilities": "trt_warmcache.stores",
    "open_store": "trt_warmcache.stores",
    "TacticReplay": "trt_warmcache.tactics",
    "Target": "trt_warmcache.target",
    "WarmReport": "trt_warmcache.warm",
    "WarmRow": "trt_warmcache.warm",
}


if not TYPE_CHECKING:  # type checkers that saw it would take any misspelt name for real
    __getattr__ = lazy(__name__, _HOME, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
