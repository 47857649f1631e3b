"""INT8 calibration tables: TensorRT's text format, checks against a model, and files of other tools.

A table maps tensor names to scales. Its first line names a TensorRT version and an algorithm; TensorRT recalibrates
when the version is another one, although the scales mean the same everywhere, so tables are re-headed on the way out.
"""

from __future__ import annotations

import json
import logging
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from trt_warmcache.errors import ConfigError, IntegrityError, ModelError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["CalibrationTable", "Coverage", "ScaleChange", "TableDiff", "diff", "read_table", "version_number"]

log = logging.getLogger("trt_warmcache")

INT8_MAX: Final = 127
"""A scale is the dynamic range divided by this: symmetric int8 leaves -128 out."""

MAX_TABLE_BYTES: Final = 64 << 20  # the largest real tables hold some ten thousand tensors, about 1 MB
_HEADER: Final = re.compile(r"TRT-(\d{1,9})-([A-Za-z0-9_]{1,64})")
_HEX: Final = re.compile(r"[0-9A-Fa-f]{1,8}")
_UNNAMED: Final = "(Unnamed Layer*"  # TensorRT's own names for tensors that no ONNX model knows


def version_number(version: str) -> int:
    """TensorRT's version integer, as in a table's header: ``"8.6.1"`` is 8601, ``"10.14.1"`` is 101401.

    Raises:
        ConfigError: Text that is not a version.
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise ConfigError(f"{version!r} is not a TensorRT version; write it like 10.14.1.")
    major, minor, patch = (int(part or 0) for part in match.groups())
    # Classic releases before 10 used a smaller factor. TensorRT-RTX counts from 1 and uses the new one.
    return major * (1000 if 4 <= major < 10 else 10_000) + minor * 100 + patch


@dataclass(frozen=True)
class Coverage:
    """How a table fits a model.

    Attributes:
        matched: Tensors with a usable scale.
        missing: Tensors of the model that the table does not mention.
        unknown: Tensors of the table that the model does not have.
        unusable: Tensors of the model whose scale is zero, negative, infinite or not a number.
    """

    matched: tuple[str, ...]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    unusable: Mapping[str, float]

    @property
    def complete(self) -> bool:
        """Whether every tensor of the model has a usable scale."""
        return not self.missing and not self.unusable

    def to_json(self) -> dict[str, int]:
        """The counts, as recorded beside a stored table."""
        return {
            "matched": len(self.matched),
            "missing": len(self.missing),
            "unknown": len(self.unknown),
            "unusable": len(self.unusable),
        }

    def __str__(self) -> str:
        text = f"{len(self.matched)} tensors with a scale"
        for word, names in (("missing", self.missing), ("unusable", tuple(self.unusable)), ("unknown", self.unknown)):
            if names:
                text += f", {len(names)} {word} ({_some(names)})"
        return text


@dataclass(frozen=True)
class CalibrationTable:
    """Scales of a model's tensors.

    Args:
        version: TensorRT version integer of the header (see :func:`version_number`); 0 where no TensorRT was involved.
        algorithm: The header's algorithm, such as ``"EntropyCalibration2"`` or ``"MinMaxCalibration"``.
        scales: Tensor name to scale: the dynamic range divided by 127, kept as float32.

    Raises:
        ConfigError: A name, scale, version or algorithm that the text format cannot hold.
    """

    version: int
    algorithm: str
    scales: Mapping[str, float]

    def __post_init__(self) -> None:
        header = f"TRT-{self.version}-{self.algorithm}"
        if _HEADER.fullmatch(header) is None:
            raise ConfigError(f"{header!r} is no table header; the algorithm is a word such as EntropyCalibration2.")
        for name in self.scales:
            if not name or any(char in name for char in "\0\r\n"):
                raise ConfigError(f"A calibration table cannot hold the tensor name {name!r}.")
        scales = {name: _float32(name, scale) for name, scale in self.scales.items()}
        object.__setattr__(self, "scales", MappingProxyType(scales))

    def __hash__(self) -> int:
        return hash((self.version, self.algorithm, self.digest))

    def __reduce__(self) -> tuple[Any, ...]:
        # a read-only view cannot be pickled, and worker processes are handed tables
        return (type(self), (self.version, self.algorithm, dict(self.scales)))

    def __len__(self) -> int:
        return len(self.scales)

    @classmethod
    def parse(
        cls, data: bytes | bytearray | memoryview | str, *, source: str = "The calibration table"
    ) -> CalibrationTable:
        """Read TensorRT's text format strictly; files of trtexec and Polygraphy are of this format.

        Args:
            data: The whole file.
            source: What error messages call it.

        Raises:
            IntegrityError: Anything but a whole table; ``reason`` is ``truncated`` (empty), ``header`` or ``table``.
        """
        lines = _lines(data, source)
        match = _HEADER.fullmatch(lines[0].strip())
        if match is None:
            what = f"starts with {lines[0][:60]!r}, not TRT-<version>-<algorithm> (read_table imports other formats)"
            raise _damaged(source, what, "header")
        scales: dict[str, float] = {}
        for number, line in enumerate(lines[1:], start=2):
            if not line.strip():
                continue
            # tensor names may hold colons, brackets and spaces: only the last separator is one
            name, separator, digits = line.rpartition(": ")
            if not separator or not name or _HEX.fullmatch(digits.strip()) is None:
                raise _damaged(
                    source, f"has {line[:80]!r} in line {number}, which is not '<tensor>: <hexadecimal float>'"
                )
            if name in scales:
                raise _damaged(source, f"names the tensor {name!r} again in line {number}")
            scales[name] = struct.unpack(">f", int(digits, 16).to_bytes(4, "big"))[0]
        return cls(int(match[1]), match[2], scales)

    def to_bytes(self) -> bytes:
        """The table in TensorRT's text format."""
        lines = [f"TRT-{self.version}-{self.algorithm}"]
        lines += [f"{name}: {_hex(scale)}" for name, scale in self.scales.items()]
        return ("\n".join(lines) + "\n").encode()

    def with_header(self, version: int | str, algorithm: str | None = None) -> CalibrationTable:
        """The same scales under the header of another TensorRT version, and of another algorithm if given."""
        number = version if isinstance(version, int) else version_number(version)
        return CalibrationTable(number, self.algorithm if algorithm is None else algorithm, self.scales)

    @property
    def digest(self) -> str:
        """BLAKE3 of names and scales, hex. Neither header nor order counts: they change nothing in an engine."""
        from blake3 import blake3

        hasher = blake3()
        for name, scale in sorted(self.scales.items()):
            encoded = name.encode()
            hasher.update(struct.pack("<I", len(encoded)) + encoded + struct.pack(">f", scale))
        return hasher.hexdigest()

    def coverage(self, tensors: Iterable[str]) -> Coverage:
        """Compare with the names of a model's tensors."""
        wanted = dict.fromkeys(tensors)
        unusable = {name: scale for name, scale in self.scales.items() if name in wanted and not usable(scale)}
        return Coverage(
            matched=tuple(name for name in wanted if name in self.scales and name not in unusable),
            missing=tuple(name for name in wanted if name not in self.scales),
            unknown=tuple(name for name in self.scales if name not in wanted),
            unusable=MappingProxyType(unusable),
        )

    def check(self, tensors: Iterable[str], *, model: str = "this model") -> Coverage:
        """As :meth:`coverage`, but refuse a table that was made for another model.

        TensorRT adds tensors of its own and leaves out fused ones, so a table need not match exactly: it is another
        model's when less than half of the tensors it names occur in this one.

        Raises:
            ModelError: The table is another model's; ``matching`` and ``mismatching`` count its tensors.
        """
        found = self.coverage(tensors)
        foreign = [name for name in found.unknown if not name.startswith(_UNNAMED)]
        known = len(found.matched) + len(found.unusable)
        if known <= len(foreign) or not known:
            raise ModelError(
                f"The calibration table belongs to another model: {len(foreign)} of its {known + len(foreign)} tensors "
                f"do not occur in {model} ({_some(foreign)}). Calibrate this model, or give the table made for it.",
                matching=known,
                mismatching=len(foreign),
            )
        return found


@dataclass(frozen=True)
class ScaleChange:
    """One tensor with two scales.

    Attributes:
        name: The tensor.
        before: Scale in the first table.
        after: Scale in the second.
    """

    name: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """``after / before``; infinite when the first is zero, NaN when either is not finite."""
        if not (math.isfinite(self.before) and math.isfinite(self.after)):
            return math.nan
        return self.after / self.before if self.before else math.inf


@dataclass(frozen=True)
class TableDiff:
    """What differs between two tables.

    Attributes:
        added: Tensors only in the second.
        removed: Tensors only in the first.
        changed: Tensors with another scale, the largest relative change first.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[ScaleChange, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, limit: int | None = None) -> str:
        """The differences for people, one line each: what changed most, then what was added and removed.

        Args:
            limit: Name at most this many of each kind, and count the rest; None for all.
        """
        changed = [f"~ {c.name}: {c.before:.6g} -> {c.after:.6g} (x{c.ratio:.4g})" for c in self.changed]
        lines: list[str] = []
        for word, part in (
            ("changed", changed),
            ("added", [f"+ {name}" for name in self.added]),
            ("removed", [f"- {name}" for name in self.removed]),
        ):
            lines += part[:limit]
            if limit is not None and len(part) > limit:
                lines.append(f"  ... and {len(part) - limit} more {word}")
        return "\n".join(lines) or "no differences"


def diff(a: CalibrationTable, b: CalibrationTable) -> TableDiff:
    """What changed from table `a` to table `b`; headers are not compared."""
    changed = [
        ScaleChange(name, scale, b.scales[name])
        for name, scale in a.scales.items()
        if name in b.scales and _hex(scale) != _hex(b.scales[name])
    ]
    changed.sort(key=lambda change: (-_distance(change.ratio), change.name))
    return TableDiff(
        added=tuple(name for name in b.scales if name not in a.scales),
        removed=tuple(name for name in a.scales if name not in b.scales),
        changed=tuple(changed),
    )


def usable(scale: float) -> bool:
    """Whether int8 values can be made with this scale."""
    return math.isfinite(scale) and scale > 0


def read_table(path: str | os.PathLike[str], *, algorithm: str = "EntropyCalibration2") -> CalibrationTable:
    """Read a table file of TensorRT, trtexec, Polygraphy or ONNX Runtime; the format is recognised by content.

    ONNX Runtime writes three files. Read ``calibration.json``: its ``.flatbuffers`` and ``.cache`` hold only the larger
    of minimum and maximum. A tensor that is never positive has a negative scale then, which is not usable; the range of
    one that is mostly negative is too small, and nothing in the file tells which those are. A warning is logged.

    Args:
        path: The file.
        algorithm: What to call the algorithm of formats that do not say it.

    Raises:
        ConfigError: No such file.
        IntegrityError: A file that is none of these formats, or a damaged one.
    """
    file = Path(path)
    source = f"Calibration table {file}"
    try:
        if file.stat().st_size > MAX_TABLE_BYTES:
            raise _damaged(source, f"is larger than {MAX_TABLE_BYTES >> 20} MiB, which no table is")
        data = file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{source} does not exist. Check the path, or leave it out to calibrate from data.") from None
    except (IsADirectoryError, PermissionError) as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}.") from error
    if not data.strip():
        raise _damaged(source, "is empty, as after an interrupted calibration", "truncated")
    if data.startswith(b"TRT-"):
        return CalibrationTable.parse(data, source=source)
    if data.lstrip().startswith(b"{"):
        ranges, method = _from_json(data, source)
        algorithm = method or algorithm
    else:
        ranges = _from_flatbuffers(data, source) if b"\0" in data else _from_words(data, source)
        log.warning(
            "%s holds only the larger of each tensor's minimum and maximum: scales of tensors that reach further below "
            "zero than above are too small. Read the calibration.json that ONNX Runtime writes beside it instead.",
            source,
        )
    return CalibrationTable(0, algorithm, {name: value / INT8_MAX for name, value in ranges.items()})


def _from_json(data: bytes, source: str) -> tuple[dict[str, float], str | None]:
    """ONNX Runtime's JSON: objects with ``lowest`` and ``highest``, or pairs of both in older releases.

    Some of its files say which method chose the ranges.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(source, f"is damaged JSON ({error})") from error
    algorithm = None
    if content.get("CLS") == "TensorsData":
        is_minmax = "MinMax" in str(content.get("calibration_method"))
        algorithm = "MinMaxCalibration" if is_minmax else "EntropyCalibration2"
        content = content.get("data")
    if not isinstance(content, dict) or not content:
        raise _damaged(source, "holds no tensors")
    ranges: dict[str, float] = {}
    for name, entry in content.items():
        bounds = [entry.get("lowest"), entry.get("highest")] if isinstance(entry, dict) else entry
        numbers = [_number(bound) for bound in bounds] if isinstance(bounds, list) and len(bounds) == 2 else [None]
        if None in numbers:
            raise _damaged(source, f"has no lowest and highest value for tensor {name!r}")
        ranges[name] = _largest(abs(number) for number in numbers if number is not None)
    return ranges, algorithm


def _largest(numbers: Iterable[float]) -> float:
    """The maximum; NaN when one is NaN, which plain max() would hide or not depending on the order."""
    return max(numbers, key=lambda number: (math.isnan(number), number))


def _number(value: Any) -> float | None:
    """A number however ONNX Runtime's encoder wrapped it: plain, text, nested list or tagged numpy array."""
    if isinstance(value, dict):
        value = value.get("data")
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _from_words(data: bytes, source: str) -> dict[str, float]:
    """ONNX Runtime's ``calibration.cache``: a name, a space and the range in decimal, per line."""
    ranges: dict[str, float] = {}
    for number, line in enumerate(_lines(data, source), start=1):
        if not line.strip():
            continue
        name, _, value = line.rstrip().rpartition(" ")
        amount = _number(value)
        if not name or amount is None:
            what = (
                f"has {line[:80]!r} in line {number}, neither a header TRT-<version>-<algorithm> nor '<tensor> <range>'"
            )
            raise _damaged(source, what, "header" if number == 1 else "table")
        if name in ranges:
            raise _damaged(source, f"names the tensor {name!r} again in line {number}")
        ranges[name] = amount
    return ranges


def _from_flatbuffers(data: bytes, source: str) -> dict[str, float]:
    """ONNX Runtime's ``calibration.flatbuffers``: a root table with one vector of (key, value) string pairs."""

    def u32(at: int) -> int:
        return int(struct.unpack_from("<I", data, at)[0])

    def field(table: int, slot: int) -> int:
        """Position of a field that holds an offset, following the offset; every step is bounds-checked by struct."""
        vtable = table - int(struct.unpack_from("<i", data, table)[0])
        size = struct.unpack_from("<H", data, vtable)[0] if vtable >= 0 else 0
        offset = struct.unpack_from("<H", data, vtable + slot)[0] if slot + 2 <= size else 0
        if not offset:
            raise ValueError("a field is missing")
        return int(table + offset + u32(table + offset))

    def text(at: int) -> str:
        length = u32(at)
        raw = data[at + 4 : at + 4 + length]
        if len(raw) != length:
            raise ValueError("a string is cut off")
        return raw.decode()

    def pairs() -> Iterator[tuple[str, float]]:
        vector = field(u32(0), 4)
        count = u32(vector)
        if count > len(data) // 4:
            raise ValueError("more entries than the file has room for")
        for slot in range(vector + 4, vector + 4 + 4 * count, 4):
            entry = slot + u32(slot)
            yield text(field(entry, 4)), float(text(field(entry, 6)))

    ranges: dict[str, float] = {}
    try:
        for name, value in pairs():
            if ranges.setdefault(name, value) is not value:
                raise _damaged(source, f"names the tensor {name!r} twice")
    except (struct.error, ValueError) as error:  # UnicodeDecodeError is a ValueError
        what = f"is neither text nor a whole flatbuffers table of ONNX Runtime ({error})"
        raise _damaged(source, what, "header") from error
    return ranges


def _lines(data: bytes | bytearray | memoryview | str, source: str) -> list[str]:
    # not splitlines(), which also splits at characters that a tensor name may hold
    return _decode(data, source).replace("\r\n", "\n").split("\n")


def _decode(data: bytes | bytearray | memoryview | str, source: str) -> str:
    try:
        text = data if isinstance(data, str) else bytes(data).decode()
    except UnicodeDecodeError as error:
        raise _damaged(source, f"is not text ({error})", "header") from error
    if not text.strip():
        raise _damaged(source, "is empty, as after an interrupted calibration", "truncated")
    if "\0" in text:
        raise _damaged(source, "holds NUL bytes, as after an interrupted write")
    return text


def _damaged(source: str, what: str, reason: str = "table") -> IntegrityError:
    return IntegrityError(f"{source} {what}. Calibrate again or restore the file.", name=source, reason=reason)


def _float32(name: str, scale: float) -> float:
    try:
        return float(struct.unpack(">f", struct.pack(">f", scale))[0])
    except (struct.error, TypeError, OverflowError):
        raise ConfigError(f"The scale of {name!r} is not a float32: {scale!r}.") from None


def _hex(scale: float) -> str:
    return format(struct.unpack(">I", struct.pack(">f", scale))[0], "x")


def _distance(ratio: float) -> float:
    """How far a ratio is from 1, with doubling and halving equally far."""
    return abs(math.log(ratio)) if 0 < ratio < math.inf else math.inf


def _some(names: Iterable[str], limit: int = 3) -> str:
    shown = [repr(name) for name, _ in zip(names, range(limit + 1), strict=False)]
    return ", ".join(shown[:limit]) + (", ..." if len(shown) > limit else "")
