"""What a cache must know of an ONNX model, read from its protobuf bytes without onnx, protobuf or numpy.

A warm hit must not pay for importing onnx, and a graph file may hold gigabytes of embedded weights. So this walks
the wire format itself: length-delimited fields that do not matter are stepped over, not read. Field numbers are those
of ``onnx.proto``; as protobuf does, a field with an unexpected wire type counts as unknown and is skipped, repeated
scalars may be packed or not, and the last of several singular values wins.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, overload

import msgspec

from trt_warmcache.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "SUMMARY_VERSION",
    "Buffer",
    "ExternalTensor",
    "FileView",
    "ModelSummary",
    "TensorInfo",
    "summarize",
    "summary_from_json",
    "summary_to_json",
    "tensor_names",
]

SUMMARY_VERSION = 1
"""Goes up whenever :class:`ModelSummary` changes shape or meaning; remembered summaries of another version are void."""

_MAX_DEPTH = 100  # protobuf's own default limit on nested messages
_MAX_TEXT = 1 << 20  # names are short; a longer one is damage, and reading it could take all memory
_MAX_RANK = 1024
_MAX_BYTES = 1 << 63

# ONNX element types: number -> (name, bits per element; 0 where the size is not fixed).
_DTYPES: dict[int, tuple[str, int]] = {
    0: ("undefined", 0),
    1: ("float32", 32),
    2: ("uint8", 8),
    3: ("int8", 8),
    4: ("uint16", 16),
    5: ("int16", 16),
    6: ("int32", 32),
    7: ("int64", 64),
    8: ("string", 0),
    9: ("bool", 8),
    10: ("float16", 16),
    11: ("float64", 64),
    12: ("uint32", 32),
    13: ("uint64", 64),
    14: ("complex64", 64),
    15: ("complex128", 128),
    16: ("bfloat16", 16),
    17: ("float8e4m3fn", 8),
    18: ("float8e4m3fnuz", 8),
    19: ("float8e5m2", 8),
    20: ("float8e5m2fnuz", 8),
    21: ("uint4", 4),
    22: ("int4", 4),
    23: ("float4e2m1", 4),
    24: ("float8e8m0", 8),
    25: ("uint2", 2),
    26: ("int2", 2),
    27: ("float6e2m3", 6),
    28: ("float6e3m2", 6),
}
_EXTERNAL = 1  # TensorProto.DataLocation.EXTERNAL
_DIGITS = re.compile(r"[0-9]{1,19}")

# First bytes of files that people pass by mistake, and what to do about it.
_LOOKALIKES = (
    (b"version https://git-lfs", "it is a Git LFS pointer, not the file itself; run `git lfs pull`"),
    (b"PK\x03\x04", "it is a zip archive (perhaps a PyTorch checkpoint); export the model to ONNX"),
    (b"<!DOCTYPE", "it is a web page, probably a failed download"),
    (b"<html", "it is a web page, probably a failed download"),
)


class Buffer(Protocol):
    """Bytes that can be looked at one by one or in slices: ``bytes``, ``memoryview`` or :class:`FileView`."""

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, key: int, /) -> int: ...
    @overload
    def __getitem__(self, key: slice, /) -> bytes | memoryview: ...


class FileView:
    """An open file as a :class:`Buffer`, read on demand through ``os.pread`` with one cached window.

    Not a memory map: a file truncated by someone else would then kill this process with SIGBUS. Here it is a
    :class:`~trt_warmcache.errors.ModelError`.

    Args:
        fd: An open file descriptor; the caller keeps it open, and closes it.
        size: Length of the view in bytes.
        window: Bytes fetched at a time.
    """

    def __init__(self, fd: int, size: int, *, window: int = 64 << 10) -> None:
        self._fd = fd
        self._size = size
        self._step = window
        self._start = 0
        self._window = b""

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, key: int, /) -> int: ...
    @overload
    def __getitem__(self, key: slice, /) -> bytes: ...
    def __getitem__(self, key: int | slice, /) -> int | bytes:
        if isinstance(key, int):
            offset = key - self._start
            if not 0 <= offset < len(self._window):
                if not 0 <= key < self._size:
                    raise IndexError(key)
                self._window = self._read(key, min(self._step, self._size - key))
                self._start, offset = key, 0
            return self._window[offset]
        start, stop, step = key.indices(self._size)
        if step != 1:
            raise ValueError("a FileView is sliced with step 1 only")
        offset = start - self._start
        if offset >= 0 and stop - self._start <= len(self._window):
            return self._window[offset : stop - self._start]
        return self._read(start, max(stop - start, 0))

    def _read(self, start: int, size: int) -> bytes:
        data = os.pread(self._fd, size, start)
        while len(data) < size:
            more = os.pread(self._fd, size - len(data), start + len(data))
            if not more:
                raise ModelError(
                    f"The model file ended at byte {start + len(data)} of {self._size} while it was being read; "
                    "it is being changed. Try again once it is complete.",
                    offset=start + len(data),
                )
            data += more
        return data


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    r"""One input or output of the graph.

    Attributes:
        name: Its name. Bytes that are not UTF-8 appear as ``\xNN``.
        elem_type: ONNX element type number (``TensorProto.DataType``); 0 for anything that is not a tensor.
        dtype: The same for people, like ``float32``; or ``sequence``, ``map``, ``optional``, ``opaque``.
        dims: One entry per dimension: its size, its symbolic name, or None where it is dynamic without a name.
            None instead of a tuple where even the rank is unknown.
    """

    name: str
    elem_type: int
    dtype: str
    dims: tuple[int | str | None, ...] | None

    @property
    def is_dynamic(self) -> bool:
        """Whether any dimension, or the rank, is open."""
        return self.dims is None or any(not isinstance(size, int) for size in self.dims)

    def __str__(self) -> str:
        shape = "?" if self.dims is None else "x".join("?" if size is None else str(size) for size in self.dims)
        return f"{self.name} ({self.dtype} {shape or 'scalar'})"


class ExternalTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor whose bytes live in a side file.

    Attributes:
        tensor: Its name; that of the node attribute holding it where it has none of its own.
        location: The side file as the model spells it, unchecked.
        offset: First byte inside the side file.
        length: Bytes there as the model states it, or None where it does not.
        nbytes: Bytes needed: ``length``, else what dims and element type ask for, else 0 (size not known).
    """

    tensor: str
    location: str
    offset: int
    length: int | None
    nbytes: int


class ModelSummary(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """Facts about a model that requests, labels and side files depend on.

    Attributes:
        inputs: Inputs that a caller must feed: the graph's inputs less those that have an initializer.
        outputs: The graph's outputs.
        external: Every tensor with external data, wherever it hides, in file order.
        ir_version: Version of the ONNX file format.
        opset: Version of the default operator set; 0 where the model imports none.
        producer: Name and version of the exporter, perhaps empty.
        graph_name: Name of the main graph, perhaps empty.
        num_nodes: Nodes of the main graph, sub-graphs not counted.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    external: tuple[ExternalTensor, ...]
    ir_version: int
    opset: int
    producer: str
    graph_name: str
    num_nodes: int


def summarize(buf: Buffer) -> ModelSummary:
    """Read the summary of an ONNX model.

    Args:
        buf: The bytes of a serialized ``ModelProto``.

    Returns:
        The summary. Side files are named, not looked at.

    Raises:
        ModelError: The bytes are empty, damaged, cut short, nested too deeply, or not an ONNX model; ``.offset`` is
            the byte where reading stopped.
    """
    return _Walk(buf).model()


def tensor_names(buf: Buffer) -> Iterator[str]:
    """Names of all values in a model: inputs, initializers and node outputs, sub-graphs and functions included.

    Args:
        buf: The bytes of a serialized ``ModelProto``.

    Yields:
        Each name once, in file order.

    Raises:
        ModelError: As for :func:`summarize`.
    """
    names: dict[str, None] = {}
    _Walk(buf, on_name=names.setdefault).model()
    yield from names


def summary_to_json(summary: ModelSummary) -> list[Any]:
    """The summary as plain lists, numbers and strings, with its version in front."""
    return [SUMMARY_VERSION, msgspec.to_builtins(summary)]


def summary_from_json(data: object) -> ModelSummary | None:
    """The reverse of :func:`summary_to_json`; None for data of another version or any other damage."""
    if not isinstance(data, list) or len(data) != 2 or data[0] != SUMMARY_VERSION:
        return None
    try:
        return msgspec.convert(data[1], ModelSummary)
    except msgspec.ValidationError:
        return None


def _fail(problem: str, offset: int) -> NoReturn:
    raise ModelError(
        f"Not a readable ONNX model: {problem} at byte {offset}. "
        "The file may be cut short, damaged or of another format; export or download it again.",
        offset=offset,
    )


def _varint(buf: Buffer, pos: int, end: int) -> tuple[int, int]:
    """Decode one base-128 number; returns it (64 bits, unsigned) and the position after it."""
    start, value, shift = pos, 0, 0
    while pos < end and shift < 70:
        byte = buf[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, pos
        shift += 7
    _fail("number of more than ten bytes" if shift >= 70 else "number runs past the end of its message", start)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(buf: Buffer, pos: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Walk the fields of one message.

    Yields:
        Tag (field number and wire type in one, so that comparing tags checks both), then for a varint its value and
        its position, for anything else the first byte of the payload and the byte after it.
    """
    while pos < end:
        at = pos
        tag = buf[pos]
        pos += 1
        if tag >= 0x80:
            tag, pos = _varint(buf, at, end)
        if not 8 <= tag <= 0xFFFFFFFF:
            _fail("impossible field number", at)
        wire = tag & 7
        if wire == 2:
            size, pos = _varint(buf, pos, end)
            if size > end - pos:
                _fail(f"field of {size} bytes where only {end - pos} are left", at)
            yield tag, pos, pos + size
            pos += size
        elif wire == 0:
            value, pos = _varint(buf, pos, end)
            yield tag, value, at
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            if size > end - pos:
                _fail(f"field of {size} bytes where only {end - pos} are left", at)
            yield tag, pos, pos + size
            pos += size
        else:
            _fail(f"unknown wire type {wire}", at)


def _text(buf: Buffer, start: int, stop: int) -> str:
    if stop - start > _MAX_TEXT:
        _fail(f"name of {stop - start} bytes", start)
    return bytes(buf[start:stop]).decode("utf-8", "backslashreplace")


def _ignore(_name: str) -> None:
    pass


class _Graph:
    """What is gathered while walking the main graph."""

    def __init__(self) -> None:
        self.name = ""
        self.nodes = 0
        self.inputs: list[TensorInfo] = []
        self.outputs: list[TensorInfo] = []
        self.initializers: set[str] = set()


class _Walk:
    """One pass over a model. Methods are named after the messages they walk, tags are given as ``field << 3 | wire``."""

    def __init__(self, buf: Buffer, *, on_name: Callable[[str], object] = _ignore) -> None:
        self.buf = buf.cast("B") if isinstance(buf, memoryview) and buf.format != "B" else buf
        self.on_name = on_name
        self.external: list[ExternalTensor] = []

    def model(self) -> ModelSummary:
        buf = self.buf
        if not len(buf):
            raise ModelError("The model is empty (0 bytes); export or download it again.", offset=0)
        head = bytes(buf[0:32])
        for magic, meaning in _LOOKALIKES:
            if head.startswith(magic):
                raise ModelError(f"Not an ONNX model: {meaning}.", offset=0)
        ir_version = opset = 0
        producer = producer_version = ""
        graph: _Graph | None = None
        for tag, start, stop in _fields(buf, 0, len(buf)):
            if tag == 7 << 3 | 2:
                graph = graph or _Graph()
                self.graph(start, stop, 1, graph)
            elif tag == 1 << 3:
                ir_version = _signed(start)
            elif tag == 2 << 3 | 2:
                producer = _text(buf, start, stop)
            elif tag == 3 << 3 | 2:
                producer_version = _text(buf, start, stop)
            elif tag == 8 << 3 | 2:
                domain, version = self.opset(start, stop)
                if domain in ("", "ai.onnx"):
                    opset = version
            elif tag == 20 << 3 | 2:
                self.training(start, stop)
            elif tag == 25 << 3 | 2:
                self.function(start, stop)
        if graph is None:
            _fail("no graph before the end", len(buf))
        return ModelSummary(
            inputs=tuple(info for info in graph.inputs if info.name not in graph.initializers),
            outputs=tuple(graph.outputs),
            external=tuple(self.external),
            ir_version=ir_version,
            opset=opset,
            producer=f"{producer} {producer_version}".strip(),
            graph_name=graph.name,
            num_nodes=graph.nodes,
        )

    def opset(self, start: int, stop: int) -> tuple[str, int]:
        domain, version = "", 0
        for tag, a, b in _fields(self.buf, start, stop):
            if tag == 1 << 3 | 2:
                domain = _text(self.buf, a, b)
            elif tag == 2 << 3:
                version = _signed(a)
        return domain, version

    def training(self, start: int, stop: int) -> None:
        for tag, a, b in _fields(self.buf, start, stop):
            if tag in (1 << 3 | 2, 2 << 3 | 2):
                self.graph(a, b, 2, _Graph())

    def function(self, start: int, stop: int) -> None:
        for tag, a, b in _fields(self.buf, start, stop):
            if tag == 7 << 3 | 2:
                self.node(a, b, 2)
            elif tag == 11 << 3 | 2:
                self.attribute(a, b, 2)
            elif tag == 4 << 3 | 2:
                self.on_name(_text(self.buf, a, b))

    def graph(self, start: int, stop: int, depth: int, found: _Graph) -> None:
        for tag, a, b in _fields(self.buf, start, stop):
            if tag == 1 << 3 | 2:
                found.nodes += 1
                self.node(a, b, depth + 1)
            elif tag == 5 << 3 | 2:
                name = self.tensor(a, b, depth + 1)
                found.initializers.add(name)
                self.on_name(name)
            elif tag == 15 << 3 | 2:
                name = self.sparse_tensor(a, b, depth + 1)
                found.initializers.add(name)
                self.on_name(name)
            elif tag == 11 << 3 | 2:
                info = self.value_info(a, b)
                found.inputs.append(info)
                self.on_name(info.name)
            elif tag == 12 << 3 | 2:
                found.outputs.append(self.value_info(a, b))
            elif tag == 2 << 3 | 2:
                found.name = _text(self.buf, a, b)

    def node(self, start: int, stop: int, depth: int) -> None:
        for tag, a, b in _fields(self.buf, start, stop):
            if tag == 5 << 3 | 2:
                self.attribute(a, b, depth + 1)
            elif tag == 2 << 3 | 2 and a < b:
                self.on_name(_text(self.buf, a, b))

    def attribute(self, start: int, stop: int, depth: int) -> None:
        if depth > _MAX_DEPTH:
            _fail(f"messages nested more than {_MAX_DEPTH} deep", start)
        name = ""
        for tag, a, b in _fields(self.buf, start, stop):
            if tag == 1 << 3 | 2:
                name = _text(self.buf, a, b)
            elif tag in (5 << 3 | 2, 10 << 3 | 2):
                self.tensor(a, b, depth + 1, fallback=name)
            elif tag in (6 << 3 | 2, 11 << 3 | 2):
                self.graph(a, b, depth + 1, _Graph())
            elif tag in (22 << 3 | 2, 23 << 3 | 2):
                self.sparse_tensor(a, b, depth + 1, fallback=name)

    def sparse_tensor(self, start: int, stop: int, depth: int, fallback: str = "") -> str:
        name = ""
        for tag, a, b in _fields(self.buf, start, stop):
            if tag == 1 << 3 | 2:
                name = self.tensor(a, b, depth + 1, fallback)
            elif tag == 2 << 3 | 2:
                self.tensor(a, b, depth + 1, fallback)
        return name

    def tensor(self, start: int, stop: int, depth: int, fallback: str = "") -> str:
        if depth > _MAX_DEPTH:
            _fail(f"messages nested more than {_MAX_DEPTH} deep", start)
        buf = self.buf
        name, elem_type, where = "", 0, 0
        dims: list[int] = []
        entries: dict[str, str] = {}
        for tag, a, b in _fields(buf, start, stop):
            if tag == 1 << 3:
                dims.append(_signed(a))
            elif tag == 1 << 3 | 2:
                while a < b:
                    value, a = _varint(buf, a, b)  # noqa: PLW2901  a packed field is read from its own start on
                    dims.append(_signed(value))
                    if len(dims) > _MAX_RANK:
                        break
            elif tag == 2 << 3:
                elem_type = _int32(a)
            elif tag == 8 << 3 | 2:
                name = _text(buf, a, b)
            elif tag == 13 << 3 | 2:
                key, value_text = self.entry(a, b)
                entries[key] = value_text
            elif tag == 14 << 3:
                where = _int32(a)
            if len(dims) > _MAX_RANK:
                _fail(f"tensor of more than {_MAX_RANK} dimensions", start)
        if where == _EXTERNAL:
            self.external.append(_external(name or fallback, elem_type, dims, entries, start))
        return name

    def entry(self, start: int, stop: int) -> tuple[str, str]:
        key = value = ""
        for tag, a, b in _fields(self.buf, start, stop):
            if tag == 1 << 3 | 2:
                key = _text(self.buf, a, b)
            elif tag == 2 << 3 | 2:
                value = _text(self.buf, a, b)
        return key, value

    def value_info(self, start: int, stop: int) -> TensorInfo:
        name, elem_type, dtype = "", 0, _DTYPES[0][0]
        dims: tuple[int | str | None, ...] | None = None
        for tag, a, b in _fields(self.buf, start, stop):
            if tag == 1 << 3 | 2:
                name = _text(self.buf, a, b)
            elif tag == 2 << 3 | 2:
                elem_type, dtype, dims = self.type(a, b)
        return TensorInfo(name, elem_type, dtype, dims)

    def type(self, start: int, stop: int) -> tuple[int, str, tuple[int | str | None, ...] | None]:
        elem_type, dtype = 0, _DTYPES[0][0]
        dims: tuple[int | str | None, ...] | None = None
        others = {4 << 3 | 2: "sequence", 5 << 3 | 2: "map", 9 << 3 | 2: "optional", 7 << 3 | 2: "opaque"}
        for tag, a, b in _fields(self.buf, start, stop):
            if tag in (1 << 3 | 2, 8 << 3 | 2):  # Tensor and SparseTensor have the same two fields
                elem_type, dims = 0, None
                for inner, c, d in _fields(self.buf, a, b):
                    if inner == 1 << 3:
                        elem_type = _int32(c)
                    elif inner == 2 << 3 | 2:
                        dims = self.shape(c, d)
                dtype = _DTYPES[elem_type][0] if elem_type in _DTYPES else f"type {elem_type}"
            elif tag in others:
                elem_type, dtype, dims = 0, others[tag], None
        return elem_type, dtype, dims

    def shape(self, start: int, stop: int) -> tuple[int | str | None, ...]:
        dims: list[int | str | None] = []
        for tag, a, b in _fields(self.buf, start, stop):
            if tag != 1 << 3 | 2:
                continue
            dim: int | str | None = None
            for inner, c, d in _fields(self.buf, a, b):
                if inner == 1 << 3:
                    value = _signed(c)
                    dim = value if value >= 0 else None
                elif inner == 2 << 3 | 2:
                    dim = _text(self.buf, c, d) or None
            dims.append(dim)
            if len(dims) > _MAX_RANK:
                _fail(f"shape of more than {_MAX_RANK} dimensions", start)
        return tuple(dims)


def _int32(value: int) -> int:
    """An enum or int32 as protobuf reads it: the low 32 bits, signed."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _external(tensor: str, elem_type: int, dims: list[int], entries: dict[str, str], at: int) -> ExternalTensor:
    if "location" not in entries:
        _fail(f"external tensor {tensor!r} without a location", at)
    numbers: dict[str, int] = {}
    for key in ("offset", "length"):
        if key in entries:
            if not _DIGITS.fullmatch(entries[key]):
                _fail(f"external tensor {tensor!r} with {key} {entries[key][:40]!r}", at)
            numbers[key] = int(entries[key])
    length = numbers.get("length")
    bits = _DTYPES.get(elem_type, ("", 0))[1]
    nbytes = length if length is not None else (_elements(tensor, dims, at) * bits + 7) // 8
    if nbytes > _MAX_BYTES:
        _fail(f"external tensor {tensor!r} larger than any file", at)
    return ExternalTensor(
        tensor=tensor,
        location=entries["location"],
        offset=numbers.get("offset", 0),
        length=length,
        nbytes=nbytes,
    )


def _elements(tensor: str, dims: list[int], at: int) -> int:
    if min(dims, default=0) < 0:
        _fail(f"external tensor {tensor!r} with a negative dimension", at)
    if 0 in dims:
        return 0
    count = 1
    for dim in dims:
        count *= dim
        if count > _MAX_BYTES:
            _fail(f"external tensor {tensor!r} larger than any file", at)
    return count
