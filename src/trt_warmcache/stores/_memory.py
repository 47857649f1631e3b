"""A store in this process's memory: for tests, notebooks, and as the nearest layer of a read-only deployment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trt_warmcache.manifest import BlobRef
from trt_warmcache.stores._base import (
    LockScope,
    ObjectInfo,
    Payload,
    Store,
    StoreCapabilities,
    blob_name,
    missing,
    verify_view,
)

__all__ = ["MemoryStore"]


@dataclass
class _Object:
    data: bytes
    verified: bool = False


class MemoryStore(Store):
    """Keeps everything in a dictionary of its own. Nothing is shared between instances."""

    url = "memory:"
    local = True

    def __init__(self) -> None:
        self._objects: dict[str, _Object] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    @property
    def capabilities(self) -> StoreCapabilities:
        return StoreCapabilities(exclusive_create=True, lock_scope=LockScope.PROCESS)

    def read(self, name: str, *, limit: int) -> bytes | None:
        found = self._objects.get(name)
        return None if found is None else found.data[: limit + 1]

    def write(self, name: str, data: Any) -> None:
        self._objects[name] = _Object(bytes(data))

    def create(self, name: str, data: Any) -> bool:
        fresh = _Object(bytes(data))
        return self._objects.setdefault(name, fresh) is fresh

    def swap(self, name: str, data: Any, *, expected: bytes) -> bool:
        with self._guard:
            return super().swap(name, data, expected=expected)

    def delete(self, name: str) -> bool:
        return self._objects.pop(name, None) is not None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for name, found in sorted(self._objects.items()):
            if name.startswith(prefix):
                yield ObjectInfo(name, len(found.data))

    def fetch(self, ref: BlobRef, *, rehash: bool = False) -> Payload:
        found = self._objects.get(blob_name(ref))
        if found is None:
            raise missing(ref, self.url)
        view = memoryview(found.data)
        known = found.verified and not rehash
        if not known:
            verify_view(ref, view, self.url)
            found.verified = True
        return Payload(view, verified_now=not known)

    def lock(self, name: str) -> _MemoryLock:
        with self._guard:
            return _MemoryLock(self._locks.setdefault(name, threading.Lock()))


class _MemoryLock:
    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def try_acquire(self) -> bool:
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        self._lock.release()

    def owner(self) -> str:
        return "another thread of this process"
