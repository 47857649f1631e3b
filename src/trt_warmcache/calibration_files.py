"""Calibration tables in files, of TensorRT and of other tools."""

from __future__ import annotations

import json
import logging
import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trt_warmcache.calibration_table import INT8_MAX, CalibrationTable, damaged, text_lines
from trt_warmcache.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

__all__ = ["read_table"]

log = logging.getLogger("trt_warmcache")

MAX_TABLE_BYTES: Final = 64 << 20  # the largest real tables hold some ten thousand tensors, about 1 MB


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
            raise damaged(source, f"is larger than {MAX_TABLE_BYTES >> 20} MiB, which no table is")
        data = file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{source} does not exist. Check the path, or leave it out to calibrate from data.") from None
    except (IsADirectoryError, PermissionError) as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}.") from error
    if not data.strip():
        raise damaged(source, "is empty, as after an interrupted calibration", "truncated")
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
        raise damaged(source, f"is damaged JSON ({error})") from error
    algorithm = None
    if content.get("CLS") == "TensorsData":
        is_minmax = "MinMax" in str(content.get("calibration_method"))
        algorithm = "MinMaxCalibration" if is_minmax else "EntropyCalibration2"
        content = content.get("data")
    if not isinstance(content, dict) or not content:
        raise damaged(source, "holds no tensors")
    ranges: dict[str, float] = {}
    for name, entry in content.items():
        bounds = [entry.get("lowest"), entry.get("highest")] if isinstance(entry, dict) else entry
        numbers = [_number(bound) for bound in bounds] if isinstance(bounds, list) and len(bounds) == 2 else [None]
        if None in numbers:
            raise damaged(source, f"has no lowest and highest value for tensor {name!r}")
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
    for number, line in enumerate(text_lines(data, source), start=1):
        if not line.strip():
            continue
        name, _, value = line.rstrip().rpartition(" ")
        amount = _number(value)
        if not name or amount is None:
            what = (
                f"has {line[:80]!r} in line {number}, neither a header TRT-<version>-<algorithm> nor '<tensor> <range>'"
            )
            raise damaged(source, what, "header" if number == 1 else "table")
        if name in ranges:
            raise damaged(source, f"names the tensor {name!r} again in line {number}")
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
                raise damaged(source, f"names the tensor {name!r} twice")
    except (struct.error, ValueError) as error:  # UnicodeDecodeError is a ValueError
        what = f"is neither text nor a whole flatbuffers table of ONNX Runtime ({error})"
        raise damaged(source, what, "header") from error
    return ranges
