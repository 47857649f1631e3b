"""The timing cache: a blob with a verified header, and entries that save build time."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from tests.fakes._memory import host_memory
from tests.fakes._pybind import PybindObject, only, only_class

MAGIC = b"fakeTC01"
MISS = 2**64 - 1


@only_class("10.8")
class TimingCacheKey(PybindObject):
    """A 128-bit key. Compares by identity, as the real one does: compare `str(key)` instead."""

    _text: str

    @staticmethod
    def parse(text: str) -> TimingCacheKey:
        raise NotImplementedError  # replaced for every module, because a static method knows no release

    def __str__(self) -> str:
        return self._text


@only_class("10.8")
class TimingCacheValue(PybindObject):
    def __init__(self, arg0: int, arg1: float) -> None:
        self._constructed = True
        self._hash, self._msec = int(arg0), float(arg1)

    @property
    def tacticHash(self) -> int:
        return self._hash

    @tacticHash.setter
    def tacticHash(self, value: int) -> None:
        self._hash = int(value)

    @property
    def timingMSec(self) -> float:
        return self._msec

    @timingMSec.setter
    def timingMSec(self, value: float) -> None:
        self._msec = float(value)


class ITimingCache(PybindObject):
    """Entries map a key's text to (tactic hash, milliseconds)."""

    _entries: dict[str, tuple[int, float]]
    _origin: str
    _log: Any

    def serialize(self) -> Any:
        return host_memory(self._world, pack(self._origin, self._entries))

    def combine(self, input_cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self._world.need(input_cache, ITimingCache, "combine")
        # A mismatch of the device may be waved through, a mismatch of the TensorRT version never.
        mine, other = json.loads(self._origin), json.loads(input_cache._origin)
        if mine["tensorrt"] != other["tensorrt"] or (mine != other and not ignore_mismatch):
            self._log("ERROR", "ITimingCache::combine: the caches were made by different TensorRT versions or devices.")
            return False
        self._entries = {**input_cache._entries, **self._entries}
        return True

    def reset(self) -> bool:
        self._entries = {}
        return True

    @only("10.8")
    def queryKeys(self) -> list[TimingCacheKey]:
        return [make_key(self._world, text) for text in self._entries]

    @only("10.8")
    def query(self, key: TimingCacheKey) -> TimingCacheValue:
        self._world.need(key, TimingCacheKey, "query")
        found = self._entries.get(str(key))
        if found is None:
            self._log("ERROR", f"ITimingCache::query: no entry for {key}.")
        value: TimingCacheValue = self._world.classes["TimingCacheValue"](*(found or (MISS, 0.0)))
        return value

    @only("10.8")
    def update(self, key: TimingCacheKey, value: TimingCacheValue) -> bool:
        self._world.need(key, TimingCacheKey, "update")
        self._world.need(value, TimingCacheValue, "update")
        if str(key) not in self._entries:
            return False
        if value.timingMSec != value.timingMSec:  # NaN asks to delete the entry
            del self._entries[str(key)]
        else:
            self._entries[str(key)] = (value.tacticHash, value.timingMSec)
        return True


def make_key(world: Any, text: str) -> TimingCacheKey:
    """A key from its text, with the checks of the real `parse`."""
    if len(text) != 34:
        raise ValueError("The text should have exactly 34 characters.")
    if not re.fullmatch("0x[0-9a-fA-F]{32}", text):
        raise ValueError("The text has invalid content.")
    key: TimingCacheKey = world.new(TimingCacheKey)
    key._text = text
    return key


def pack(origin: str, entries: dict[str, tuple[int, float]]) -> bytes:
    """Magic, SHA-256 of the rest, then JSON."""
    body = json.dumps({"origin": origin, "entries": entries}, sort_keys=True).encode()
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(world: Any, origin: str, blob: bytes, log: Any) -> ITimingCache:
    """A cache from a blob. What cannot be used becomes an empty cache and a warning, never an error."""
    cache: ITimingCache = world.new(ITimingCache)
    cache._entries, cache._origin, cache._log = {}, origin, log
    if not blob:
        return cache
    digest, body = blob[8:40], blob[40:]
    if blob[:8] != MAGIC or hashlib.sha256(body).digest() != digest:
        log("WARNING", "Timing cache header is corrupt. The timing cache will not be used!")
        return cache
    content = json.loads(body)
    if content["origin"] != origin:
        log(
            "WARNING", "Timing cache was made by another TensorRT version or device. The timing cache will not be used!"
        )
        return cache
    cache._entries = {key: (int(tactic), float(msec)) for key, (tactic, msec) in content["entries"].items()}
    return cache
