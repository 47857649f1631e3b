"""INT8 calibration tables: TensorRT's text format, and checks against a model.

A table maps tensor names to scales. Its first line names a TensorRT version and an algorithm; TensorRT recalibrates
when the version is another one, although the scales mean the same everywhere, so tables are re-headed on the way out.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from trt_warmcache.errors import ConfigError, IntegrityError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["CalibrationTable", "Coverage", "ScaleChange", "TableDiff", "diff", "version_number"]

INT8_MAX: Final = 127
"""A scale is the dynamic range divided by this: symmetric int8 leaves -128 out."""

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
        lines = text_lines(data, source)
        match = _HEADER.fullmatch(lines[0].strip())
        if match is None:
            what = f"starts with {lines[0][:60]!r}, not TRT-<version>-<algorithm> (read_table imports other formats)"
            raise damaged(source, what, "header")
        scales: dict[str, float] = {}
        for number, line in enumerate(lines[1:], start=2):
            if not line.strip():
                continue
            # tensor names may hold colons, brackets and spaces: only the last separator is one
            name, separator, digits = line.rpartition(": ")
            if not separator or not name or _HEX.fullmatch(digits.strip()) is None:
                raise damaged(
                    source, f"has {line[:80]!r} in line {number}, which is not '<tensor>: <hexadecimal float>'"
                )
            if name in scales:
                raise damaged(source, f"names the tensor {name!r} again in line {number}")
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
            ModelError: The table is another model's, or has no usable scale at all; ``matching`` and ``mismatching``
                count its tensors.
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
        if not found.matched:
            raise ModelError(
                f"The calibration table has no usable scale for {model}: all {known} are zero, negative or not finite. "
                "Calibrate with data that looks like real inputs.",
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


def text_lines(data: bytes | bytearray | memoryview | str, source: str) -> list[str]:
    # not splitlines(), which also splits at characters that a tensor name may hold
    return decode(data, source).replace("\r\n", "\n").split("\n")


def decode(data: bytes | bytearray | memoryview | str, source: str) -> str:
    try:
        text = data if isinstance(data, str) else bytes(data).decode()
    except UnicodeDecodeError as error:
        raise damaged(source, f"is not text ({error})", "header") from error
    if not text.strip():
        raise damaged(source, "is empty, as after an interrupted calibration", "truncated")
    if "\0" in text:
        raise damaged(source, "holds NUL bytes, as after an interrupted write")
    return text


def damaged(source: str, what: str, reason: str = "table") -> IntegrityError:
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
