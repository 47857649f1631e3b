"""Network, profiles and the ONNX parser. The parser reads real ONNX bytes, so layers are the model's nodes."""

from __future__ import annotations

import hashlib
import importlib
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fakes._callbacks import ILogger
from tests.fakes._pybind import PybindObject, at_least, only, only_class
from tests.fakes._world import NativeCrash, as_bytes

if TYPE_CHECKING:
    from tests.fakes._pybind import PybindEnum

_ONNX_TO_TRT = {
    1: "FLOAT", 2: "UINT8", 3: "INT8", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "HALF", 16: "BF16", 17: "FP8",
}  # fmt: skip


class ITensor(PybindObject):
    _name: str
    _shape: tuple[int, ...]
    _dtype: PybindEnum
    _input: bool

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, value: str) -> None:
        self._name = value

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @shape.setter
    def shape(self, value: tuple[int, ...]) -> None:
        self._shape = tuple(value)

    @property
    def dtype(self) -> PybindEnum:
        return self._dtype

    @dtype.setter
    def dtype(self, value: PybindEnum) -> None:
        self._dtype = self._world.need_enum(value, "DataType", "dtype")

    @property
    def is_network_input(self) -> bool:
        return self._input

    @property
    def is_network_output(self) -> bool:
        return not self._input

    @property
    def is_shape_tensor(self) -> bool:
        return False

    @property
    def is_execution_tensor(self) -> bool:
        return True


class ILayer(PybindObject):
    _name: str
    _signature: str
    _inputs: int
    _outputs: int
    _precision: PybindEnum | None = None

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, value: str) -> None:
        self._name = value

    @property
    @only(last="10.16")
    def precision(self) -> PybindEnum:
        return self._precision or self._world.member("DataType", "FLOAT")

    @precision.setter
    def precision(self, value: PybindEnum) -> None:
        self._precision = self._world.need_enum(value, "DataType", "precision")

    @property
    @only(last="10.16")
    def precision_is_set(self) -> bool:
        return self._precision is not None

    @property
    def num_inputs(self) -> int:
        return self._inputs

    @property
    def num_outputs(self) -> int:
        return self._outputs


class INetworkDefinition(PybindObject):
    _flags: int
    _name: str
    _builder: Any
    _inputs: list[ITensor]
    _outputs: list[ITensor]
    _layers: list[ILayer]
    _weights: str
    _refittable: set[str]

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, value: str) -> None:
        self._name = value

    @property
    def builder(self) -> Any:
        return self._builder

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    @only(last="10.16")
    def has_implicit_batch_dimension(self) -> bool:
        return self._implicit_batch()

    def _implicit_batch(self) -> bool:
        return self._world.line == "8.6" and not self._has_flag("EXPLICIT_BATCH")

    def _has_flag(self, name: str) -> bool:
        flag = getattr(self._world.enums["NetworkDefinitionCreationFlag"], name, None)
        return flag is not None and bool(self._flags >> int(flag) & 1)

    def get_input(self, index: int) -> ITensor | None:
        return self._inputs[index] if 0 <= index < len(self._inputs) else None

    def get_output(self, index: int) -> ITensor | None:
        return self._outputs[index] if 0 <= index < len(self._outputs) else None

    def get_layer(self, index: int) -> ILayer | None:
        return self._layers[index] if 0 <= index < len(self._layers) else None

    @property
    @only("10.0")
    def flags(self) -> int:
        return self._flags

    @only("10.0")
    def get_flag(self, flag: PybindEnum) -> bool:
        self._world.need_enum(flag, "NetworkDefinitionCreationFlag", "get_flag")
        if self._world.line == "11.4" and flag.name == "STRONGLY_TYPED":
            return True
        return bool(self._flags >> int(flag) & 1)

    @only("10.2")
    def mark_weights_refittable(self, name: str) -> bool:
        self._refittable.add(name)
        return True

    @only("10.2")
    def unmark_weights_refittable(self, name: str) -> bool:
        self._refittable.discard(name)
        return True

    @only("10.2")
    def are_weights_marked_refittable(self, name: str) -> bool:
        return name in self._refittable


class IOptimizationProfile(PybindObject):
    """Shapes per input. A bad order is not an error here: the profile becomes falsy and cannot be added."""

    _shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    _values: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    _extra: float

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        self._shapes[input] = (_dims(min), _dims(opt), _dims(max))

    def get_shape(self, input: str) -> list[tuple[int, ...]]:
        return list(self._shapes.get(input, ()))

    def set_shape_input(self, input: str, min: Any, opt: Any, max: Any) -> None:
        self._values[input] = (_dims(min), _dims(opt), _dims(max))

    def get_shape_input(self, input: str) -> list[tuple[int, ...]]:
        return list(self._values.get(input, ()))

    @property
    def extra_memory_target(self) -> float:
        return self._extra

    @extra_memory_target.setter
    def extra_memory_target(self, value: float) -> None:
        self._extra = value

    def __bool__(self) -> bool:
        return all(
            len(low) == len(best) == len(high) and all(a <= b <= c for a, b, c in zip(low, best, high, strict=True))
            for low, best, high in (*self._shapes.values(), *self._values.values())
        )


def _dims(value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not all(isinstance(n, int) for n in value):
        raise TypeError(f"set_shape(): incompatible function arguments, expected Dims. Invoked with: {value!r}")
    return tuple(value)


@dataclass
class _Problem:
    code: str
    desc: str
    node: int = -1
    name: str = ""
    operator: str = ""


class ParserError(PybindObject):
    """What went wrong; every accessor is a method."""

    _problem: _Problem

    def code(self) -> PybindEnum:
        return self._world.member("ErrorCode", self._problem.code)

    def desc(self) -> str:
        return self._problem.desc

    def file(self) -> str:
        return "ModelImporter.cpp"

    def line(self) -> int:
        return 1

    def func(self) -> str:
        return "parseNode"

    def node(self) -> int:
        return self._problem.node

    @only("10.0")
    def node_name(self) -> str:
        return self._problem.name

    @only("10.0")
    def node_operator(self) -> str:
        return self._problem.operator

    @only("10.0")
    def local_function_stack(self) -> list[str]:
        return []

    @only("10.0")
    def local_function_stack_size(self) -> int:
        return 0


class OnnxParser(PybindObject):
    """Parses with the onnx package. Keeps its logger alive but, like the real one, not its network."""

    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self._world.need(network, INetworkDefinition, "__init__()")
        self._world.need(logger, ILogger, "__init__()")
        self._constructed = True
        self._network = weakref.ref(network)
        self._logger = logger
        self._problems: list[_Problem] = []
        self._flags = 0

    def parse(self, model: Any, path: str | None = None) -> bool:
        blob = as_bytes(model, "parse")
        if path is not None and not isinstance(path, str):
            raise TypeError(f"parse(): incompatible function arguments. Invoked with: {path!r}")
        return self._parse(blob, Path(path).parent if path else Path())

    def parse_from_file(self, model: str) -> bool:
        if not isinstance(model, str):
            raise TypeError(f"parse_from_file(): incompatible function arguments. Invoked with: {model!r}")
        try:
            blob = Path(model).read_bytes()
        except OSError:
            return self._fail(_Problem("MODEL_DESERIALIZE_FAILED", f"Failed to open file: {model}"))
        return self._parse(blob, Path(model).parent)

    @only("10.1")
    def supports_model_v2(self, model: Any, path: str | None = None) -> bool:
        return self.parse(model, path)

    @only(last="10.16")
    def supports_model(self, model: Any, path: str | None = None) -> tuple[bool, list[Any]]:
        return (self.parse(model, path), [])

    def supports_operator(self, op_name: str) -> bool:
        import onnx

        return bool(onnx.defs.has(op_name))

    @property
    def num_errors(self) -> int:
        return len(self._problems)

    def get_error(self, index: int) -> ParserError:
        error: ParserError = self._world.new(ParserError)
        error._problem = self._problems[index]
        return error

    def clear_errors(self) -> None:
        self._problems.clear()

    @property
    def flags(self) -> int:
        return self._flags

    @flags.setter
    def flags(self, value: int) -> None:
        self._flags = int(value)

    def set_flag(self, flag: PybindEnum) -> None:
        self._flags |= 1 << int(self._world.need_enum(flag, "OnnxParserFlag", "set_flag"))

    def clear_flag(self, flag: PybindEnum) -> None:
        self._flags &= ~(1 << int(self._world.need_enum(flag, "OnnxParserFlag", "clear_flag")))

    def get_flag(self, flag: PybindEnum) -> bool:
        return bool(self._flags >> int(self._world.need_enum(flag, "OnnxParserFlag", "get_flag")) & 1)

    def get_used_vc_plugin_libraries(self) -> list[str]:
        return []

    def _fail(self, problem: _Problem) -> bool:
        self._problems.append(problem)
        network = self._network()
        recorder = network._builder._recorder if network is not None else None
        self._world.log(self._logger, "ERROR", f"ModelImporter.cpp: {problem.desc}", recorder)
        return False

    def _parse(self, blob: bytes, folder: Path) -> bool:
        import onnx

        broken = importlib.import_module("google.protobuf.message").DecodeError  # protobuf ships no types
        network = self._network()
        if network is None:
            raise NativeCrash("the parser's network was collected: keep a reference to it while parsing")
        self._world.record.parses += 1
        if network._implicit_batch():
            return self._fail(
                _Problem("INVALID_VALUE", "The parser only supports networks with an explicit batch dimension")
            )
        if not blob:
            return True  # an empty buffer is an empty protobuf message, hence an empty but valid network
        try:
            model = onnx.load_model_from_string(blob)
        except broken:
            return self._fail(_Problem("MODEL_DESERIALIZE_FAILED", "Failed to parse the ONNX model."))
        if not model.HasField("graph"):
            return self._fail(_Problem("MODEL_DESERIALIZE_FAILED", "Failed to parse the ONNX model."))
        return self._import(network, model, folder)

    def _import(self, network: INetworkDefinition, model: Any, folder: Path) -> bool:
        digest = hashlib.sha256()
        shapes: dict[str, list[int]] = {}
        for tensor in sorted(model.graph.initializer, key=lambda t: str(t.name)):
            shapes[tensor.name] = list(tensor.dims)
            digest.update(f"{tensor.name} {tensor.data_type} {list(tensor.dims)} ".encode())
            if tensor.data_location == tensor.EXTERNAL:
                place = {entry.key: entry.value for entry in tensor.external_data}
                try:
                    content = (folder / place["location"]).read_bytes()
                except OSError:
                    return self._fail(
                        _Problem("INVALID_GRAPH", f"Failed to open external weights: {place['location']}")
                    )
                start = int(place.get("offset", 0))
                digest.update(content[start : start + int(place.get("length", len(content) - start))])
            else:
                digest.update(tensor.SerializeToString(deterministic=True))
        for index, node in enumerate(model.graph.node):
            if node.domain not in {"", "ai.onnx"}:
                return self._fail(
                    _Problem(
                        "UNSUPPORTED_NODE",
                        f"No importer registered for op: {node.op_type}",
                        index,
                        node.name,
                        node.op_type,
                    )
                )
            layer: ILayer = self._world.new(ILayer)
            attributes = sorted(a.SerializeToString(deterministic=True).hex() for a in node.attribute)
            layer._name = node.name or f"(Unnamed Layer* {index}) [{node.op_type}]"
            layer._signature = f"{node.op_type} {attributes} {[shapes.get(name) for name in node.input]}"
            layer._inputs, layer._outputs = len(node.input), len(node.output)
            network._layers.append(layer)
        for values, tensors, is_input in (
            (model.graph.input, network._inputs, True),
            (model.graph.output, network._outputs, False),
        ):
            for value in values:
                if is_input and value.name in shapes:
                    continue
                kind = value.type.tensor_type
                tensor = self._world.new(ITensor)
                tensor._name, tensor._input = value.name, is_input
                tensor._shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim)
                tensor._dtype = self._data_type(kind.elem_type)
                tensors.append(tensor)
        network._weights = digest.hexdigest()
        return True

    def _data_type(self, number: int) -> PybindEnum:
        # 8.6 has no INT64 and narrows it, as its parser does with a warning.
        name = _ONNX_TO_TRT.get(number, "FLOAT")
        known = self._world.enums["DataType"].__members__
        found: PybindEnum = known[name if name in known else "INT32"]
        return found


@only_class("10.0")
class OnnxParserRefitter(PybindObject):
    """Restores the weights of a stripped engine from the model's bytes."""

    def __init__(self, refitter: Any, logger: ILogger) -> None:
        self._world.need(logger, ILogger, "__init__()")
        self._constructed = True
        self._refitter = refitter
        self._logger = logger
        self._problems: list[_Problem] = []

    @property
    def num_errors(self) -> int:
        return len(self._problems)

    def get_error(self, index: int) -> ParserError:
        error: ParserError = self._world.new(ParserError)
        error._problem = self._problems[index]
        return error

    def clear_errors(self) -> None:
        self._problems.clear()

    def refit_from_bytes(self, model: Any, path: str | None = None) -> bool:
        return self._refit(as_bytes(model, "refit_from_bytes"), Path(path).parent if path else Path())

    def refit_from_file(self, model: str) -> bool:
        if not isinstance(model, str):
            raise TypeError(f"refit_from_file(): incompatible function arguments. Invoked with: {model!r}")
        return self._refit(Path(model).read_bytes(), Path(model).parent)

    def _refit(self, blob: bytes, folder: Path) -> bool:
        network = new_network(self._world, None, 1, "refit")
        parser = self._world.classes["OnnxParser"](network, self._logger)
        if not parser._parse(blob, folder):
            self._problems.extend(parser._problems)
            return False
        if [layer.name for layer in network._layers] != self._refitter._engine._plan["layers"]:
            self._problems.append(_Problem("REFIT_FAILED", "The model's layers differ from the engine's."))
            return False
        self._refitter._weights = network._weights
        return True


def new_network(world: Any, builder: Any, flags: int, name: str) -> INetworkDefinition:
    """An empty network as `Builder.create_network` makes it."""
    network: INetworkDefinition = world.new(INetworkDefinition)
    network._flags, network._name, network._builder = flags, name, builder
    network._inputs, network._outputs, network._layers = [], [], []
    network._weights, network._refittable = "", set()
    return network


def explicit_batch(network: INetworkDefinition) -> bool:
    """Whether the network has the only batch mode that exists from 10.0 on."""
    return at_least(network._world.line, "10.0") or network._has_flag("EXPLICIT_BATCH")
