"""Classes that callers subclass: loggers, recorders, monitors, calibrators, selectors, stream writers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar

from tests.fakes._pybind import PybindObject, at_least, only, only_class

if TYPE_CHECKING:
    from tests.fakes._pybind import PybindEnum


class Callback(PybindObject):
    """Base of classes whose `__init__` Python may and must call."""

    def __init__(self) -> None:
        self._constructed = True


def _pure(name: str) -> None:
    sys.stderr.write(f'[ERROR] Exception caught in {name}(): Tried to call pure virtual function "{name}"\n')


class ILogger(Callback):
    Severity: ClassVar[type[PybindEnum]]

    def log(self, severity: PybindEnum, msg: str) -> None:
        _pure("log")


class Logger(ILogger):
    def __init__(self, min_severity: PybindEnum | None = None) -> None:
        self._constructed = True
        self._min_severity = min_severity or self._world.member("Severity", "WARNING")

    @property
    def min_severity(self) -> PybindEnum:
        return self._min_severity

    @min_severity.setter
    def min_severity(self, value: PybindEnum) -> None:
        self._min_severity = self._world.need_enum(value, "Severity", "min_severity")

    def log(self, severity: PybindEnum, msg: str) -> None:
        if int(severity) <= int(self._min_severity):
            sys.stderr.write(f"[TRT] [{severity.name[0]}] {msg}\n")


class IErrorRecorder(Callback):
    @property
    def MAX_DESC_LENGTH(self) -> int:
        raise TypeError("(): incompatible function arguments")  # the real property fails the same way

    def num_errors(self) -> int:
        _pure("get_num_errors")
        return -1

    def get_error_code(self, arg0: int) -> Any:
        _pure("get_error_code")

    def get_error_desc(self, arg0: int) -> str:
        _pure("get_error_desc")
        return ""

    def has_overflowed(self) -> bool:
        _pure("has_overflowed")
        return False

    def clear(self) -> None:
        _pure("clear")

    def report_error(self, arg0: PybindEnum, arg1: str) -> bool:
        _pure("report_error")
        return False


@only_class("10.0")
class IProgressMonitor(Callback):
    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        _pure("phase_start")

    def phase_finish(self, phase_name: str) -> None:
        _pure("phase_finish")

    def step_complete(self, phase_name: str, step: int) -> bool:
        _pure("step_complete")
        return True


@only_class("10.13")
class IStreamWriter(Callback):
    def write(self, data: bytes) -> int:
        _pure("write")
        return 0


@only_class(last="10.16")
class IInt8Calibrator(Callback):
    """Base of the calibrators. `_algorithm` and `_header` differ between them."""

    _algorithm: ClassVar[str] = "LEGACY_CALIBRATION"
    _header: ClassVar[str] = "LegacyCalibration"

    def get_batch_size(self) -> int:
        # Only this base method warns, not the constructor: a subclass that overrides it never sees the warning.
        if at_least(self._world.line, "10.0"):
            self._world.deprecated("Implicit batch dimensions support has been removed")
        _pure("get_batch_size")
        return -1

    def get_batch(self, names: list[str]) -> list[int] | None:
        _pure("get_batch")
        return []

    def read_calibration_cache(self) -> Any:
        return None

    def write_calibration_cache(self, cache: Any) -> None:
        _pure("write_calibration_cache")

    def get_algorithm(self) -> PybindEnum:
        return self._world.member("CalibrationAlgoType", self._algorithm)


@only_class(last="10.16")
class IInt8LegacyCalibrator(IInt8Calibrator):
    pass


@only_class(last="10.16")
class IInt8EntropyCalibrator(IInt8Calibrator):
    _algorithm = "ENTROPY_CALIBRATION"
    _header = "EntropyCalibration"


@only_class(last="10.16")
class IInt8EntropyCalibrator2(IInt8Calibrator):
    _algorithm = "ENTROPY_CALIBRATION_2"
    _header = "EntropyCalibration2"


@only_class(last="10.16")
class IInt8MinMaxCalibrator(IInt8Calibrator):
    _algorithm = "MINMAX_CALIBRATION"
    _header = "MinMaxCalibration"


@only_class(last="10.16")
class IAlgorithmVariant(PybindObject):
    _implementation: int
    _tactic: int

    @property
    def implementation(self) -> int:
        return self._implementation

    @property
    def tactic(self) -> int:
        return self._tactic


@only_class(last="10.16")
class IAlgorithmIOInfo(PybindObject):
    @property
    def dtype(self) -> PybindEnum:
        return self._world.member("DataType", "FLOAT")

    @property
    def strides(self) -> tuple[int, ...]:
        return (1,)

    @property
    def vectorized_dim(self) -> int:
        return -1

    @property
    def components_per_element(self) -> int:
        return 1

    @property
    @only(last="8.6")
    def tensor_format(self) -> PybindEnum:
        return self._world.member("TensorFormat", "LINEAR")


@only_class(last="10.16")
class IAlgorithm(PybindObject):
    _variant: IAlgorithmVariant
    _timing: float

    @property
    def algorithm_variant(self) -> IAlgorithmVariant:
        return self._variant

    @property
    def timing_msec(self) -> float:
        return self._timing

    @property
    def workspace_size(self) -> int:
        return 0

    def get_algorithm_io_info(self, index: int) -> IAlgorithmIOInfo:
        return self._world.new(IAlgorithmIOInfo)


@only_class(last="10.16")
class IAlgorithmContext(PybindObject):
    _name: str
    _inputs: int
    _outputs: int

    @property
    def name(self) -> str:
        return self._name

    @property
    def num_inputs(self) -> int:
        return self._inputs

    @property
    def num_outputs(self) -> int:
        return self._outputs

    def get_shape(self, index: int) -> list[tuple[int, ...]]:
        return [(-1,), (-1,), (-1,)]


@only_class(last="10.16")
class IAlgorithmSelector(Callback):
    def select_algorithms(self, context: IAlgorithmContext, choices: list[IAlgorithm]) -> list[int]:
        _pure("select_algorithms")
        return []

    def report_algorithms(self, contexts: list[IAlgorithmContext], choices: list[IAlgorithm]) -> None:
        _pure("report_algorithms")
