"""Blobs packed for the wire: each chunk a zstd frame of its own, then a table of frames.

This is zstd's seekable format, so ``zstd -d`` unpacks such an object too. Chunk digests are over the unpacked bytes,
and a frame holds exactly one chunk, so ranges of a packed blob can be fetched, unpacked and verified as they land.
Local stores never pack: their blobs are mapped.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from trt_warmcache.errors import ConfigError
from trt_warmcache.manifest import CHUNK_BYTES, BlobRef

__all__ = ["CODEC", "Frame", "PackedError", "available", "frames_of", "pack", "unpack", "unpack_frame"]

#: Name of the packing in :attr:`BlobRef.codec <trt_warmcache.manifest.BlobRef.codec>`.
CODEC = "zstd"

#: Largest table read: over a hundred thousand chunks of 8 MiB.
TABLE_BYTES = 1024 * 1024

_LEVEL = 1  # higher levels gain nothing on weights and cost a multiple
_SAMPLE_BYTES = 4 * 1024 * 1024
_PAYS_BELOW = 0.9
_SMALLEST = 64 * 1024  # below, the request costs more than the bytes
_ALWAYS = frozenset({"timing", "calibration"})  # text and tables: two to four times smaller, every time

_SKIPPABLE = 0x184D2A5E
_SEEKABLE = 0x8F92EAB1


class PackedError(ValueError):
    """Bytes that are not what :func:`pack` makes."""


@dataclass(frozen=True)
class Frame:
    """Where one chunk lies in a packed blob."""

    start: int
    stop: int
    size: int


def pack(ref: BlobRef, data: Any) -> tuple[BlobRef, Any]:
    """Pack a blob if a sample says that it pays; else give both back as they are.

    Args:
        ref: The blob's unpacked reference.
        data: Its bytes.

    Returns:
        The reference with codec and stored size, and the bytes to store.
    """
    view = memoryview(data).cast("B")
    if view.nbytes < _SMALLEST or not (ref.role in _ALWAYS or _pays(view)):
        return ref, data
    chunks = [view[start : start + CHUNK_BYTES] for start in range(0, view.nbytes, CHUNK_BYTES)]
    with ThreadPoolExecutor(min(4, len(chunks)), "trt_warmcache-pack") as pool:
        frames = list(pool.map(_compressed, chunks))
    packed = b"".join([*frames, _table(frames, chunks)])
    if len(packed) >= view.nbytes:
        return ref, data
    return msgspec.structs.replace(ref, codec=CODEC, stored_size=len(packed)), packed


def frames_of(tail: bytes, stored_size: int, size: int) -> list[Frame]:
    """The frames of a packed blob.

    Args:
        tail: The end of the packed blob, at least its table.
        stored_size: Size of the packed blob.
        size: Unpacked size.

    Raises:
        PackedError: There is no such table, or it cannot be true.
    """
    if len(tail) < 17:
        raise PackedError("is too short for a packed blob")
    count, flags, magic = struct.unpack("<IBI", tail[-9:])
    length = 17 + 8 * count
    if magic != _SEEKABLE or flags or len(tail) < length:
        raise PackedError("does not end in a table of frames")
    if struct.unpack("<II", tail[-length : 8 - length]) != (_SKIPPABLE, 9 + 8 * count):
        raise PackedError("has a table of frames that is cut")
    frames = []
    start = 0
    for packed, unpacked in struct.iter_unpack("<II", tail[8 - length : -9]):
        frames.append(Frame(start, start + packed, unpacked))
        start += packed
    expected = [min(CHUNK_BYTES, size - at) for at in range(0, size, CHUNK_BYTES)]
    if start + length != stored_size or [frame.size for frame in frames] != expected:
        raise PackedError("has a table of frames that does not add up")
    return frames


def unpack_frame(data: Any, size: int) -> bytes:
    """One chunk, unpacked.

    Args:
        data: Its frame.
        size: Bytes expected; no frame can make this function use more memory than that.

    Raises:
        PackedError: Damaged, or of another size.
    """
    zstandard = _zstandard()
    try:
        if zstandard.frame_content_size(data) != size:
            raise PackedError("has a frame of another size than its table says")
        return bytes(zstandard.ZstdDecompressor().decompress(data, max_output_size=size))
    except zstandard.ZstdError as error:
        raise PackedError(f"has a damaged frame ({error})") from error


def unpack(ref: BlobRef, packed: Any) -> bytes:
    """A whole packed blob, unpacked; not yet verified.

    Raises:
        PackedError: Damaged.
    """
    view = memoryview(packed).cast("B")
    tail = bytes(view[max(0, view.nbytes - TABLE_BYTES) :])
    frames = frames_of(tail, view.nbytes, ref.size)
    return b"".join(unpack_frame(view[frame.start : frame.stop], frame.size) for frame in frames)


def available() -> bool:
    """Whether this process can pack."""
    import importlib.util

    return importlib.util.find_spec("zstandard") is not None


def _pays(view: memoryview) -> bool:
    """Whether a sample taken at four places gains more than a tenth."""
    piece = _SAMPLE_BYTES // 4
    if view.nbytes <= _SAMPLE_BYTES:
        sample: Sequence[memoryview] = [view]
    else:
        step = (view.nbytes - piece) // 3
        sample = [view[at : at + piece] for at in (0, step, 2 * step, view.nbytes - piece)]
    return sum(len(_compressed(part)) for part in sample) < _PAYS_BELOW * sum(part.nbytes for part in sample)


def _compressed(part: memoryview) -> bytes:
    return bytes(_zstandard().ZstdCompressor(level=_LEVEL, write_content_size=True).compress(part))


def _table(frames: Sequence[bytes], chunks: Sequence[memoryview]) -> bytes:
    rows = b"".join(struct.pack("<II", len(frame), chunk.nbytes) for frame, chunk in zip(frames, chunks, strict=True))
    head = struct.pack("<II", _SKIPPABLE, len(rows) + 9)
    return head + rows + struct.pack("<IBI", len(frames), 0, _SEEKABLE)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            "This store holds blobs packed with zstd, and the zstandard package is not installed. "
            "Install trt_warmcache[remote]."
        ) from error
    return zstandard
