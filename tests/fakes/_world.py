"""What one fake `tensorrt` module knows and remembers: release, GPU, costs, and what was asked of it."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from tests.fakes._pybind import Line, PybindEnum

T = TypeVar("T")

RELEASES: dict[str, tuple[str, tuple[int, int, int, int]]] = {
    "8.6": ("8.6.1", (8, 6, 1, 6)),
    "10.3": ("10.3.0", (10, 3, 0, 26)),
    "10.16": ("10.16.1.11", (10, 16, 1, 11)),
    "11.4": ("11.4.0.106", (11, 4, 0, 106)),
}
"""`__version__` of the bindings, and the four numbers that the library writes into a plan."""


class NativeCrash(BaseException):
    """Stands for a segmentation fault of the real library; derives from BaseException so that nothing swallows it."""


@dataclass(frozen=True)
class Gpu:
    """The device the fake pretends to run on."""

    name: str = "NVIDIA A10"
    compute_capability: tuple[int, int] = (8, 6)
    sm_count: int = 72
    memory_bytes: int = 24 << 30

    @property
    def cc(self) -> str:
        """Compute capability as TensorRT prints it, such as "8.6"."""
        return "{}.{}".format(*self.compute_capability)


@dataclass
class Record:
    """Counts of everything expensive, for tests to assert on."""

    builders: int = 0
    runtimes: int = 0
    parses: int = 0
    builds: int = 0
    tactics_timed: int = 0
    tactics_from_cache: int = 0
    timing_seconds: float = 0.0
    calibration_batches: int = 0
    algorithm_selections: int = 0
    messages: list[tuple[str, str]] = field(default_factory=list)
    """Severity name and text of every message logged, also those that a logger filtered out."""


@dataclass(frozen=True)
class Creator:
    """A registered plugin."""

    plugin_namespace: str
    name: str
    plugin_version: str


class PluginRegistry:
    """One per process, as in the real library. A fake library is a text file of ``namespace name version`` lines."""

    def __init__(self) -> None:
        self.plugin_creator_list: list[Creator] = []
        self.loads = 0

    def load_library(self, plugin_path: str) -> object | None:
        """A handle, or None for what is no library; the reason is in the log only."""
        if not isinstance(plugin_path, str):
            raise TypeError(f"load_library(): incompatible function arguments. Invoked with: {plugin_path!r}")
        try:
            lines = Path(plugin_path).read_text().splitlines()
        except OSError:
            return None
        if any(len(line.split()) != 3 for line in lines):
            return None
        self.loads += 1
        self.plugin_creator_list += [Creator(*line.split()) for line in lines]
        return object()


class World:
    """State shared by all classes of one fake module.

    Args:
        line: The release line to imitate.
        gpu: The device, or None for a machine without one.
        seconds_per_layer: Time slept for every tactic that had to be timed.
        nondeterministic: Draw a new tactic at every timing, as noise does on a real GPU.
        fail_build: An error to log instead of building; the build then returns None.
    """

    def __init__(
        self, line: Line, gpu: Gpu | None, *, seconds_per_layer: float, nondeterministic: bool, fail_build: str | None
    ) -> None:
        self.line: Line = line
        self.version, self.numbers = RELEASES[line]
        self.gpu = gpu
        self.seconds_per_layer = seconds_per_layer
        self.nondeterministic = nondeterministic
        self.fail_build = fail_build
        self.record = Record()
        self.registry = PluginRegistry()
        # Faults that were seen in the field, switched on by tests.
        self.forgotten_weights: set[str] = set()
        self.refit_is_lost = False
        self.classes: dict[str, type] = {}
        self.enums: dict[str, type[PybindEnum]] = {}
        self._lock = threading.Lock()

    @property
    def version_int(self) -> int:
        """The library's own version integer; the factor of the major number changed with 10.0."""
        major, minor, patch, _ = self.numbers
        return major * (1000 if major < 10 else 10000) + minor * 100 + patch

    def new(self, cls: type[T]) -> T:
        """An instance as the library itself hands it out: past the constructor, which Python may not call."""
        real: Any = self.classes[cls.__name__]
        instance = real.__new__(real)
        instance._constructed = True
        return cast("T", instance)

    def isa(self, value: object, cls: type) -> bool:
        """Whether a value is an instance of this module's version of a class."""
        return isinstance(value, self.classes[cls.__name__])

    def need(self, value: object, cls: type, where: str) -> None:
        """Raises pybind11's TypeError unless the value is of the class."""
        if not self.isa(value, cls):
            raise TypeError(
                f"{where}: incompatible function arguments, expected {cls.__name__}. Invoked with: {value!r}"
            )

    def member(self, enum: str, name: str) -> PybindEnum:
        """An enum member of this release."""
        return cast("PybindEnum", getattr(self.enums[enum], name))

    def need_enum(self, value: object, enum: str, where: str) -> PybindEnum:
        """Raises pybind11's TypeError unless the value is a member of the enum; integers are refused."""
        if not isinstance(value, self.enums[enum]):
            raise TypeError(f"{where}: incompatible function arguments, expected {enum}. Invoked with: {value!r}")
        return value

    def log(self, logger: Any, severity: str, message: str, recorder: Any = None) -> None:
        """Sends one message to the logger and, for errors, to the recorder; their exceptions are only printed."""
        with self._lock:
            self.record.messages.append((severity, message))
        guarded("log", logger.log, self.member("Severity", severity), message)
        if recorder is not None and severity in {"ERROR", "INTERNAL_ERROR"}:
            guarded("report_error", recorder.report_error, self.member("ErrorCodeTRT", "INTERNAL_ERROR"), message)

    def spend(self) -> None:
        """Pays for timing one tactic; sleeping lets other threads run, as the real library does."""
        with self._lock:
            self.record.tactics_timed += 1
            self.record.timing_seconds += self.seconds_per_layer
        if self.seconds_per_layer:
            time.sleep(self.seconds_per_layer)

    @staticmethod
    def deprecated(instead: str) -> None:
        """Warns as the bindings do; with warnings as errors pybind11 reports a SystemError."""
        try:
            warnings.warn(f"Use {instead} instead.", DeprecationWarning, stacklevel=3)
        except DeprecationWarning as error:
            raise SystemError("error return without exception set by a deprecated call") from error


def guarded(name: str, function: Any, *args: Any, failed: Any = None) -> Any:
    """Calls back into Python as the trampolines do: an exception is printed, never propagated."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001 - copies the bindings' catch-all
        sys.stderr.write(f"[ERROR] Exception caught in {name}(): {error}\n")
        return failed


def as_bytes(value: object, where: str) -> bytes:
    """The bytes of a buffer, or pybind11's TypeError."""
    try:
        return bytes(memoryview(cast("Any", value)).cast("B"))
    except TypeError as error:
        raise TypeError(
            f"{where}: incompatible function arguments, expected a buffer. Invoked with: {value!r}"
        ) from error
