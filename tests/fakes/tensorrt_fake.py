"""Stand-ins for the classic `tensorrt` module, one per release line, for machines without its libraries.

They parse real ONNX bytes and "build" plans that tell what the builder was given. They have only members that the
real bindings of that release have (`test_fakes_matrix.py` sees to it), and they fail as quietly as those do.
"""

from __future__ import annotations

import contextlib
import json
import sys
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tests.fakes import _build, _callbacks, _config, _memory, _network, _runtime, _timing
from tests.fakes._pybind import LINES, Line, exists, make_enum, specialise
from tests.fakes._world import Gpu, Record, World

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LINES", "Gpu", "Line", "Record", "installed", "make_tensorrt", "record_of"]

# Bases before derived classes: a class is copied after its base.
_CLASSES: tuple[type, ...] = (
    _callbacks.Callback, _callbacks.ILogger, _callbacks.Logger, _callbacks.IErrorRecorder, _callbacks.IProgressMonitor,
    _callbacks.IStreamWriter, _callbacks.IInt8Calibrator, _callbacks.IInt8LegacyCalibrator,
    _callbacks.IInt8EntropyCalibrator, _callbacks.IInt8EntropyCalibrator2, _callbacks.IInt8MinMaxCalibrator,
    _callbacks.IAlgorithmVariant, _callbacks.IAlgorithmIOInfo, _callbacks.IAlgorithm, _callbacks.IAlgorithmContext,
    _callbacks.IAlgorithmSelector, _memory.IHostMemory, _timing.TimingCacheKey, _timing.TimingCacheValue,
    _timing.ITimingCache, _network.ITensor, _network.ILayer, _network.INetworkDefinition,
    _network.IOptimizationProfile, _network.ParserError, _network.OnnxParser, _network.OnnxParserRefitter,
    _config.IBuilderConfig, _build.Builder, _runtime.ISerializationConfig, _runtime.ICudaEngine, _runtime.Runtime,
    _runtime.Refitter,
)  # fmt: skip
_HIDDEN = {"Callback"}  # our own base, no class of the bindings
_DATA = Path(__file__).parent.parent / "data"


@lru_cache(maxsize=1)
def enum_numbers() -> dict[str, dict[str, dict[str, int]]]:
    """Release line to enum to member to number, as read from the real bindings."""
    return json.loads((_DATA / "trt_enum_numbers.json").read_text())  # type: ignore[no-any-return]


class FakeTensorRT(ModuleType):
    """A module whose attributes are made at run time."""

    _fake: World

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"module 'tensorrt' has no attribute '{name}'")


def make_tensorrt(
    version: Line,
    *,
    gpu: Gpu | None = Gpu(),  # noqa: B008 - frozen
    seconds_per_layer: float = 0.0,
    nondeterministic: bool = False,
    fail_build: str | None = None,
) -> FakeTensorRT:
    """A fresh fake module; two of them share nothing.

    Args:
        version: The release line to imitate.
        gpu: The device, or None for a machine without one: Builder and Runtime then raise TypeError.
        seconds_per_layer: What timing a tactic that is in no timing cache costs, in seconds.
        nondeterministic: Draw tactics at random when timing, so that plans differ from build to build.
        fail_build: An error to log instead of building.

    Returns:
        An object to be used wherever the module `tensorrt` is expected.
    """
    world = World(
        version, gpu, seconds_per_layer=seconds_per_layer, nondeterministic=nondeterministic, fail_build=fail_build
    )
    module = FakeTensorRT("tensorrt")
    module._fake = world
    module.__dict__["__version__"] = world.version
    for name, numbers in enum_numbers()[version].items():
        world.enums[name] = make_enum(name, numbers)
        if name != "Severity":  # lives inside ILogger only
            setattr(module, name, world.enums[name])
    done: dict[type, type] = {}
    for cls in _CLASSES:
        if exists(cls, version):
            done[cls] = world.classes[cls.__name__] = specialise(cls, world, done)
            if cls.__name__ not in _HIDDEN:
                setattr(module, cls.__name__, done[cls])
    severity = world.enums["Severity"]
    for cls in (world.classes["ILogger"], world.classes["Logger"]):
        type.__setattr__(cls, "Severity", severity)
        for name, member in severity.__members__.items():
            type.__setattr__(cls, name, member)
    if "TimingCacheKey" in world.classes:
        type.__setattr__(world.classes["TimingCacheKey"], "parse", staticmethod(partial(_timing.make_key, world)))
    for alias, name in {
        "float32": "FLOAT",
        "float16": "HALF",
        "int8": "INT8",
        "int32": "INT32",
        "bool": "BOOL",
    }.items():
        setattr(module, alias, world.member("DataType", name))
    setattr(module, "get_nv_onnx_parser_version", lambda: world.version_int)  # noqa: B010 - a module attribute
    setattr(module, "init_libnvinfer_plugins", lambda logger, namespace: True)  # noqa: B010
    return module


def record_of(module: ModuleType) -> Record:
    """Counts of what a fake module was asked to do."""
    world: World = vars(module)["_fake"]
    return world.record


@contextlib.contextmanager
def installed(module: ModuleType) -> Iterator[ModuleType]:
    """Makes `import tensorrt` give the module for the duration of a with block."""
    missing = object()
    before: Any = sys.modules.get("tensorrt", missing)
    sys.modules["tensorrt"] = module
    try:
        yield module
    finally:
        if before is missing:
            del sys.modules["tensorrt"]
        else:
            sys.modules["tensorrt"] = before
