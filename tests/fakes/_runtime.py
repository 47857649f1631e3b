"""`Runtime`, `ICudaEngine` and `Refitter`, as far as a cache needs them."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.fakes._build import MAGIC, read_plan, write_plan
from tests.fakes._callbacks import IErrorRecorder, ILogger
from tests.fakes._memory import host_memory
from tests.fakes._pybind import PybindObject, only, only_class
from tests.fakes._world import as_bytes

if TYPE_CHECKING:
    from tests.fakes._pybind import PybindEnum


@only_class("10.0")
class ISerializationConfig(PybindObject):
    _flags: int

    @property
    def flags(self) -> int:
        return self._flags

    @flags.setter
    def flags(self, value: int) -> None:
        self._flags = int(value)

    def set_flag(self, flag: PybindEnum) -> bool:
        self._flags |= 1 << int(self._world.need_enum(flag, "SerializationFlag", "set_flag"))
        return True

    def clear_flag(self, flag: PybindEnum) -> bool:
        self._flags &= ~(1 << int(self._world.need_enum(flag, "SerializationFlag", "clear_flag")))
        return True

    def get_flag(self, flag: PybindEnum) -> bool:
        return bool(self._flags >> int(self._world.need_enum(flag, "SerializationFlag", "get_flag")) & 1)


class ICudaEngine(PybindObject):
    _plan: dict[str, Any]
    _log: Any

    @property
    def name(self) -> str:
        return str(self._plan["network"])

    @property
    def num_io_tensors(self) -> int:
        return len(self._plan["inputs"]) + len(self._plan["outputs"])

    @property
    def num_layers(self) -> int:
        return len(self._plan["layers"])

    @property
    def num_optimization_profiles(self) -> int:
        return max(1, len(self._plan["profiles"]))

    @property
    def refittable(self) -> bool:
        return bool({"REFIT", "REFIT_IDENTICAL", "REFIT_INDIVIDUAL"} & set(self._plan["flags"]))

    @property
    def hardware_compatibility_level(self) -> PybindEnum:
        return self._world.member("HardwareCompatibilityLevel", self._plan["settings"]["hardware_compatibility_level"])

    def get_tensor_name(self, index: int) -> str:
        return str([*self._plan["inputs"], *self._plan["outputs"]][index])

    def get_tensor_mode(self, name: str) -> PybindEnum:
        side = "INPUT" if name in self._plan["inputs"] else "OUTPUT" if name in self._plan["outputs"] else "NONE"
        return self._world.member("TensorIOMode", side)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._plan["inputs"].get(name, ()))

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return [tuple(dims) for dims in self._plan["profiles"][profile_index].get(name, ())]

    def create_execution_context(self) -> Any:
        if self._plan["weights"] is None:
            self._log(
                "ERROR", "ICudaEngine::createExecutionContext: the engine's weights were stripped and not restored."
            )
            return None
        return object()

    def serialize(self) -> Any:
        if "STRIP_PLAN" in self._plan["flags"]:
            return self.serialize_with_config(self.create_serialization_config())
        return host_memory(self._world, write_plan(self._world.numbers, self._plan))

    @only("10.0")
    def create_serialization_config(self) -> ISerializationConfig:
        config: ISerializationConfig = self._world.new(ISerializationConfig)
        config._flags = 0
        if "STRIP_PLAN" in self._plan["flags"]:
            # A guess from what callers have to do: the samples clear this flag to get the weights of a refitted engine.
            config.set_flag(self._world.member("SerializationFlag", "EXCLUDE_WEIGHTS"))
        return config

    @only("10.0")
    def serialize_with_config(self, arg0: ISerializationConfig) -> Any:
        self._world.need(arg0, ISerializationConfig, "serialize_with_config")
        plan = dict(self._plan)
        if arg0.get_flag(self._world.member("SerializationFlag", "EXCLUDE_WEIGHTS")):
            if not self.refittable:
                self._log(
                    "ERROR", "ICudaEngine::serializeWithConfig: weights can be left out of a refittable engine only."
                )
                return None
            plan.update(weights=None, stripped_weights=plan["weights"] or plan["stripped_weights"])
        return host_memory(self._world, write_plan(self._world.numbers, plan))


class Runtime(PybindObject):
    """Refuses quietly: a plan it cannot use is a logged error and None."""

    def __init__(self, logger: ILogger) -> None:
        self._world.need(logger, ILogger, "__init__()")
        if self._world.gpu is None:
            self._world.log(logger, "ERROR", "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._constructed = True
        self._logger = logger
        self._recorder: IErrorRecorder | None = None
        self._host_code = False
        self._lean = False
        self._max_threads = 1
        self._world.record.runtimes += 1

    @property
    def logger(self) -> ILogger:
        return self._logger

    @property
    def error_recorder(self) -> IErrorRecorder | None:
        return self._recorder

    @error_recorder.setter
    def error_recorder(self, value: IErrorRecorder | None) -> None:
        if value is not None:
            self._world.need(value, IErrorRecorder, "error_recorder")
        self._recorder = value

    @property
    def engine_host_code_allowed(self) -> bool:
        return self._host_code

    @engine_host_code_allowed.setter
    def engine_host_code_allowed(self, value: bool) -> None:
        self._host_code = bool(value)

    def get_plugin_registry(self) -> Any:
        return self._world.registry

    @property
    def max_threads(self) -> int:
        return self._max_threads

    @max_threads.setter
    def max_threads(self, value: int) -> None:
        self._max_threads = int(value)

    def load_runtime(self, path: str) -> Runtime | None:
        if not isinstance(path, str):
            raise TypeError(f"load_runtime(): incompatible function arguments. Invoked with: {path!r}")
        other: Runtime = self._world.classes["Runtime"](self._logger)
        other._lean, other._host_code = True, self._host_code
        return other

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        blob = as_bytes(serialized_engine, "deserialize_cuda_engine")
        problem = self._problem(blob)
        if problem:
            self._log("ERROR", f"IRuntime::deserializeCudaEngine: {problem}")
            return None
        engine: ICudaEngine = self._world.new(ICudaEngine)
        engine._plan, engine._log = read_plan(blob), self._log
        return engine

    def _problem(self, blob: bytes) -> str | None:
        if len(blob) < 32 or blob[:4] != MAGIC:
            return "Error Code 1: Serialization (Serialization assertion magicTagRead == kMAGIC_TAG failed.)"
        if struct.unpack_from("<Q", blob, 16)[0] != len(blob):
            return "Error Code 1: Serialization (plan.header.size == blobSize failed)"
        plan = read_plan(blob)
        found = tuple(blob[24:28])
        compatible = "VERSION_COMPATIBLE" in plan["flags"]
        if compatible and not self._host_code:
            return "the plan carries host code: set engine_host_code_allowed to load version compatible plans"
        if compatible and "EXCLUDE_LEAN_RUNTIME" in plan["flags"] and not self._lean:
            return "the plan has no lean runtime: load one with load_runtime first"
        newer = compatible and found <= self._world.numbers
        if found != self._world.numbers and not newer:
            want, have = (".".join(map(str, numbers)) for numbers in (self._world.numbers, found))
            return (
                "Error Code 1: Serialization (Version tag does not match: "
                f"expecting library version {want} got {have}, please rebuild.)"
            )
        gpu = self._world.gpu
        assert gpu is not None
        made_for = tuple(int(part) for part in plan["compute_capability"].split("."))
        level = plan["settings"]["hardware_compatibility_level"]
        if level == "AMPERE_PLUS" and gpu.compute_capability >= (8, 0):
            return None
        if made_for != gpu.compute_capability:
            return (
                f"Error Code 6: API Usage Error (expecting compute {plan['compute_capability']} got compute {gpu.cc})"
            )
        return None

    def _log(self, severity: str, message: str) -> None:
        self._world.log(self._logger, severity, message, self._recorder)


class Refitter(PybindObject):
    def __init__(self, engine: ICudaEngine, logger: ILogger) -> None:
        self._world.need(engine, ICudaEngine, "__init__()")
        self._world.need(logger, ILogger, "__init__()")
        if not engine.refittable:
            self._world.log(logger, "ERROR", "The engine was not built with a refit flag.")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._constructed = True
        self._engine = engine
        self._logger = logger
        self._weights: str | None = None

    @property
    def logger(self) -> ILogger:
        return self._logger

    def get_all_weights(self) -> list[str]:
        return list(self._engine._plan["layers"])

    def get_missing_weights(self) -> list[str]:
        return [] if self._engine._plan["weights"] or self._weights else self.get_all_weights()

    @only("10.0")
    def get_named_weights(self, weights_name: str) -> Any:
        # The real one gives Weights of size 0 for a name that was never set.
        unset = self._weights is None or weights_name in self._world.forgotten_weights
        return SimpleNamespace(size=0 if unset else 12)

    def refit_cuda_engine(self) -> bool:
        if self._weights is None:
            self._world.log(self._logger, "ERROR", "IRefitter::refitCudaEngine: weights are missing.")
            return False
        plan = self._engine._plan
        if "REFIT_IDENTICAL" in plan["flags"] and self._weights != (plan["stripped_weights"] or plan["weights"]):
            # The real library cannot notice this and would compute nonsense; a test must.
            self._world.log(self._logger, "ERROR", "REFIT_IDENTICAL was given different weights.")
            return False
        if not self._world.refit_is_lost:
            plan.update(weights=self._weights, stripped_weights=None)
        return True
