"""What a builder takes and gives. A builder handles buffers and knows no store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from trt_warmcache._words import Word
from trt_warmcache.options import BuildOptions
from trt_warmcache.profiles import ShapeProfile
from trt_warmcache.tactics import TacticReplay
from trt_warmcache.target import Target

if TYPE_CHECKING:
    from pathlib import Path

    from trt_warmcache.calibration_table import CalibrationTable
    from trt_warmcache.model import ModelSource

__all__ = [
    "BuildInputs",
    "BuildOutput",
    "BuilderCapabilities",
    "CalibrationRun",
    "EngineBuilder",
    "Flavour",
    "LoadNeeds",
    "Progress",
]


class Flavour(Word):
    """The two TensorRT products; their plans are not interchangeable."""

    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt_rtx"


@dataclass(frozen=True)
class BuilderCapabilities:
    """What a builder can do beyond building.

    Attributes:
        timing_cache: It reads and writes a timing cache.
        calibration_table: It takes an INT8 calibration table.
        progress: It reports progress, and so can be cancelled and limited in time.
        needs_gpu: It builds for, and only with, a GPU of this machine.
        compute_capabilities: It takes a set of compute capabilities as target.
        plugins: It takes plugin libraries.
    """

    timing_cache: bool = False
    calibration_table: bool = False
    progress: bool = False
    needs_gpu: bool = False
    compute_capabilities: bool = False
    plugins: bool = False


@dataclass(frozen=True)
class Progress:
    """One step of a build.

    Attributes:
        phase: What TensorRT calls the phase.
        parent: The phase it is part of, or None for the outermost.
        step: Steps done.
        total: Steps in all.
    """

    phase: str
    parent: str | None
    step: int
    total: int


def _ignore(_: Progress) -> None:
    return None


def _go_on() -> None:
    return None


def _drop(_: CalibrationTable) -> None:
    return None


@dataclass(frozen=True)
class CalibrationRun:
    """Data for a calibration by TensorRT itself.

    Attributes:
        algorithm: ``"entropy"`` or ``"minmax"``.
        shapes: Shape of each input in every batch.
        batches: The batches, walked once; what it raises ends the run and is raised by it.
        write: Given the table, after all batches.
    """

    algorithm: str
    shapes: Mapping[str, tuple[int, ...]]
    batches: Iterable[Mapping[str, Any]]
    write: Callable[[CalibrationTable], None] = _drop


@dataclass(frozen=True)
class BuildInputs:
    """All that a build depends on.

    Attributes:
        model: The model, digest already taken.
        network_name: Name given to the network; it ends up in the plan, so it follows from the key.
        profiles: Validated optimization profiles.
        options: What the build is told.
        target: What the engine is for.
        timing: Timing cache to start from; None for an empty one.
        calibration: INT8 calibration table in TensorRT's text format, or data to calibrate with, or None.
        plugins: Plugin libraries to load first.
        configure: Called with network and builder configuration after everything else was set.
        on_progress: Called on the building thread at each step.
        checkpoint: Called at each step; an exception raised by it cancels the build and is raised by it.
    """

    model: ModelSource
    network_name: str
    profiles: tuple[ShapeProfile, ...]
    options: BuildOptions
    target: Target
    timing: bytes | None = None
    calibration: bytes | CalibrationRun | None = None
    plugins: tuple[Path, ...] = ()
    configure: Callable[[Any, Any], None] | None = None
    on_progress: Callable[[Progress], None] = _ignore
    checkpoint: Callable[[], None] = _go_on


@dataclass(frozen=True)
class LoadNeeds:
    """What a plan needs besides its bytes to become an engine.

    Attributes:
        plugins: Plugin libraries to load first.
        creators: Plugins that must be registered then, as ``namespace::name:version``.
        host_code: Let a version-compatible plan bring host code along, and accept an older plan. Only for plans from
            stores that are trusted like code.
        weights: The model whose weights a stripped plan gets.
    """

    plugins: tuple[Path, ...] = ()
    creators: tuple[str, ...] = ()
    host_code: bool = False
    weights: ModelSource | None = None


@dataclass(frozen=True)
class BuildOutput:
    """What a build gives.

    Attributes:
        plan: The serialized engine, any contiguous buffer.
        library: Version that the loaded library reported while building.
        config: Effective builder configuration, read back before the build.
        warnings: What TensorRT warned about.
        timing: The timing cache afterwards, or None.
        target: Facts about the device that really built it; empty where no device took part.
        timing_entries: How many entries `timing` has, where the release can tell.
        timing_rejected: Why the timing cache that was given served for nothing, or "".
        tactics: Recorded tactics, where the options ask for them.
        plugins: Plugins that the libraries registered, as ``namespace::name:version``.
    """

    plan: Any
    library: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    timing: bytes | None = None
    target: Mapping[str, Any] = field(default_factory=dict)
    timing_entries: int | None = None
    timing_rejected: str = ""
    tactics: TacticReplay | None = None
    plugins: tuple[str, ...] = ()


@runtime_checkable
class EngineBuilder(Protocol):
    """Builds engines with one flavour of TensorRT. Cheap to make; loads nothing until asked to.

    One that can calibrate by itself also has ``calibrate(inputs: BuildInputs) -> CalibrationTable | None``, called with
    a :class:`CalibrationRun` among its inputs; None says that no table was written.
    """

    @property
    def flavour(self) -> str:
        """``"tensorrt"``, ``"tensorrt_rtx"``, or a name of your own; part of every key."""

    @property
    def capabilities(self) -> BuilderCapabilities:
        """What it can do."""

    def version(self) -> str:
        """Version of the library that would build, asked from the library itself; part of every key."""

    def check(self, options: BuildOptions, target: Target) -> None:
        """Refuse what this flavour and version cannot do, before anything is built.

        Raises:
            ConfigError: Naming the option or the part of the target.
        """

    def build(self, inputs: BuildInputs) -> BuildOutput:
        """Build.

        Raises:
            ModelError: The parser refused the model.
            BuildError: TensorRT gave no plan.
        """

    def check_plan(self, plan: memoryview, *, older: bool = False) -> None:
        """Look at a plan's header, no more; cheap enough for every hit.

        Args:
            plan: All of it.
            older: A plan of an earlier version will do; only asked for version-compatible plans.

        Raises:
            IntegrityError: Not a plan, or not all of it.
            IncompatibleError: A plan of another version.
        """

    def deserialize(self, plan: memoryview, needs: LoadNeeds | None = None) -> Any:
        """An ``ICudaEngine`` from a plan.

        Args:
            plan: All of it.
            needs: What it needs besides; None for nothing.

        Raises:
            IncompatibleError: This machine cannot run it.
        """

    def merge_timing(self, newer: bytes, older: bytes) -> bytes:
        """The union of two timing caches; on conflict the newer measurement stays.

        Raises:
            BuildError: They do not belong together.
        """
