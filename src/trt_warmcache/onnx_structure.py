"""A model's graph without its weights: what decides whether two models can share a weight-stripped engine.

Only values that TensorRT can exchange later may be left out, and only where that is certain: floating-point
initializers of the main graph that nothing but known weight inputs of known operators reads. Everything else counts
with its bytes: shapes, axes, scales of a Resize, constants, whatever a sub-graph reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import blake3

from trt_warmcache.onnx_graph import Buffer, _fields, _text, _Walk

__all__ = ["Structure", "structure"]

_FLOATS = frozenset({1, 10, 16})  # float32, float16, bfloat16

#: Operator to the positions of those inputs that hold weights, which TensorRT's ONNX refitter can set.
_WEIGHT_INPUTS: dict[str, frozenset[int]] = {
    "Conv": frozenset({1, 2}),
    "ConvTranspose": frozenset({1, 2}),
    "Gemm": frozenset({1, 2}),
    "MatMul": frozenset({0, 1}),
    "BatchNormalization": frozenset({1, 2, 3, 4}),
    "InstanceNormalization": frozenset({1, 2}),
    "LayerNormalization": frozenset({1, 2}),
    "GroupNormalization": frozenset({1, 2}),
    "PRelu": frozenset({1}),
    "Gather": frozenset({0}),
    "Add": frozenset({0, 1}),
    "Sub": frozenset({0, 1}),
    "Mul": frozenset({0, 1}),
    "Div": frozenset({0, 1}),
    "LSTM": frozenset({1, 2, 3}),
    "GRU": frozenset({1, 2, 3}),
    "RNN": frozenset({1, 2, 3}),
}
#: Fields of a TensorProto that hold its values: float, int32, string, int64, raw, double, uint64, external.
_PAYLOAD = frozenset({4, 5, 6, 7, 9, 10, 11, 13})


@dataclass(frozen=True)
class Structure:
    """A graph without weights.

    Attributes:
        digest: 64 hex digits over every byte of the graph file that is not a weight's value.
        weights: Names of the initializers left out, sorted.
        locations: Side files that hold anything else; their bytes belong to the structure.
    """

    digest: str
    weights: tuple[str, ...]
    locations: frozenset[str]


@dataclass
class _Initializer:
    elem_type: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)


class _Consumers(_Walk):
    """Notes the main graph's initializers, and who reads what."""

    def __init__(self, buf: Buffer) -> None:
        super().__init__(buf)
        self.initializers: dict[str, _Initializer] = {}
        self.kept: set[str] = set()

    def graph(self, start: int, stop: int, depth: int, found: Any) -> None:
        super().graph(start, stop, depth, found)
        main = depth == 1
        for tag, a, b in _fields(self.buf, start, stop):
            if main and tag == 5 << 3 | 2:
                self._initializer(a, b)
            elif tag == 12 << 3 | 2:
                self.kept.add(self.value_info(a, b).name)

    def node(self, start: int, stop: int, depth: int) -> None:
        super().node(start, stop, depth)
        inputs, operator, domain = [], "", ""
        for tag, a, b in _fields(self.buf, start, stop):
            if tag == 1 << 3 | 2:
                inputs.append(_text(self.buf, a, b))
            elif tag == 4 << 3 | 2:
                operator = _text(self.buf, a, b)
            elif tag == 7 << 3 | 2:
                domain = _text(self.buf, a, b)
        main = depth == 2 and domain in {"", "ai.onnx"}
        weights = _WEIGHT_INPUTS.get(operator, frozenset()) if main else frozenset()
        self.kept.update(name for position, name in enumerate(inputs) if position not in weights)

    def _initializer(self, start: int, stop: int) -> None:
        name, found = "", _Initializer()
        for tag, a, b in _fields(self.buf, start, stop):
            number, wire = tag >> 3, tag & 7
            if tag == 2 << 3:
                found.elem_type = a
            elif tag == 8 << 3 | 2:
                name = _text(self.buf, a, b)
            elif number in _PAYLOAD and wire in {1, 2, 5}:
                found.spans.append((a, b))
        if name in self.initializers:
            self.kept.add(name)  # two of one name: nothing is certain
        self.initializers[name] = found


def structure(buf: Buffer) -> Structure:
    """The structure of an ONNX model.

    Args:
        buf: The bytes of a serialized ``ModelProto``. Values of weights are stepped over, not read.

    Raises:
        ModelError: The bytes are no readable model.
    """
    walk = _Consumers(buf)
    summary = walk.model()
    weights = {
        name
        for name, found in walk.initializers.items()
        if name and found.elem_type in _FLOATS and name not in walk.kept
    }
    spans = sorted(span for name in weights for span in walk.initializers[name].spans)
    hasher, position = blake3.blake3(), 0
    for start, stop in [*spans, (len(walk.buf), len(walk.buf))]:
        hasher.update(start.to_bytes(8, "little"))
        for at in range(position, start, 1 << 20):
            hasher.update(bytes(walk.buf[at : min(at + (1 << 20), start)]))
        position = stop
    locations = frozenset(tensor.location for tensor in summary.external if tensor.tensor not in weights)
    return Structure(hasher.hexdigest(), tuple(sorted(weights)), locations)
