"""TensorRT's timing cache, driven so that its quiet failures are seen.

A blob that is damaged, or was measured on another device or by another release, gives an *empty* cache and at most a
warning; ``set_timing_cache`` then says True. So what was loaded is counted: by ``queryKeys`` where the release has it
(10.8 and later), by the length of the serialized cache elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "AttachedTiming",
    "TimingEntry",
    "adopt_entries",
    "attach_timing",
    "cache_entries",
    "count_entries",
    "load_timing",
    "lost",
    "pin_entries",
    "restore_entries",
]

#: What ``query`` answers for a key that is not there.
_NO_TACTIC = 2**64 - 1

_NOTHING_USABLE = "TensorRT found no usable entry in the stored timing cache"


@dataclass(frozen=True)
class TimingEntry:
    """One line of an editable timing cache.

    Attributes:
        key: Timing-cache key, ``0x`` and 32 hex digits.
        tactic: Tactic hash.
        milliseconds: Measured time.
    """

    key: str
    tactic: int
    milliseconds: float


@dataclass
class AttachedTiming:
    """The timing cache of one build.

    Attributes:
        cache: ``ITimingCache``; must outlive the build.
        rejected: Why the blob that was to be loaded gave nothing, or "".
    """

    cache: Any
    rejected: str = ""


def attach_timing(config: Any, blob: bytes | None) -> AttachedTiming:
    """Give a configuration its timing cache: the blob's, or an empty one where the blob gives nothing.

    A cache is always attached, since TensorRT otherwise warns that there is none.
    """
    cache, rejected = load_timing(config, blob)
    if cache is not None and not config.set_timing_cache(cache, ignore_mismatch=False):
        cache, rejected = None, "TensorRT refused the stored timing cache: it was measured on another device"
    if cache is None:
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    return AttachedTiming(cache, rejected)


def lost(config: Any, cache: Any, blob: bytes) -> bool:
    """Whether a blob had something in it and the cache made from it has not."""
    empty = bytes(config.create_timing_cache(b"").serialize())
    if blob in {b"", empty}:
        return False
    count = count_entries(cache)
    return count == 0 if count is not None else memoryview(cache.serialize()).nbytes <= len(empty)


def count_entries(cache: Any) -> int | None:
    """How many entries a cache has, or None where the release cannot tell."""
    if not hasattr(cache, "queryKeys"):
        return None
    try:
        return len(cache.queryKeys())
    except RuntimeError:
        return None


def cache_entries(cache: Any) -> tuple[TimingEntry, ...]:
    """All entries, by key. Empty where the cache was not made editable."""
    found = []
    for key in cache.queryKeys():
        value = cache.query(key)
        found.append(TimingEntry(str(key), int(value.tacticHash), float(value.timingMSec)))
    return tuple(sorted(found, key=lambda entry: entry.key))


def pin_entries(trt: Any, cache: Any, tactics: Mapping[str, int]) -> tuple[tuple[str, ...], dict[Any, Any]]:
    """Put tactics into a cache.

    Returns:
        The keys that the cache does not have (TensorRT cannot add any), and what was there before, for
        :func:`restore_entries`.
    """
    missing, replaced = [], {}
    known = {str(key).lower(): key for key in cache.queryKeys()}
    for text, tactic in tactics.items():
        key = known.get(text)
        value = None if key is None else cache.query(key)
        if value is None or int(value.tacticHash) == _NO_TACTIC:
            missing.append(text)
        elif int(value.tacticHash) != tactic:
            if cache.update(key, trt.TimingCacheValue(tactic, float(value.timingMSec))):
                replaced[text] = (key, value)
            else:
                missing.append(text)
    return tuple(missing), replaced


def restore_entries(cache: Any, replaced: Mapping[Any, Any]) -> None:
    """Undo :func:`pin_entries`."""
    for key, value in replaced.values():
        cache.update(key, value)


def adopt_entries(cache: Any, other: Any) -> bool:
    """Take over another cache's entries for the keys that both have.

    Returns:
        Whether any tactic changed.
    """
    changed, theirs = False, {str(key).lower(): key for key in other.queryKeys()}
    for key in cache.queryKeys():
        there = theirs.get(str(key).lower())
        if there is not None:
            value = other.query(there)
            changed |= int(value.tacticHash) != int(cache.query(key).tacticHash)
            cache.update(key, value)
    return changed


def load_timing(config: Any, blob: bytes | None) -> tuple[Any, str]:
    """A cache from a blob, or None where there is no blob or it gives nothing; and why it gave nothing, or ""."""
    if not blob:
        return None, ""
    cache = config.create_timing_cache(blob)
    return (None, _NOTHING_USABLE) if lost(config, cache, blob) else (cache, "")
