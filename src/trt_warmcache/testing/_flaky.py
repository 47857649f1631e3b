"""A store that fails on command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trt_warmcache.manifest import BlobRef
from trt_warmcache.stores import Lock, ObjectInfo, Payload, Store, StoreCapabilities
from trt_warmcache.stores._base import blob_name

__all__ = ["FlakyStore"]


class FlakyStore(Store):
    """Another store, with calls counted and failures on command.

    Args:
        inner: The store that does the work.
        before: Called before each primitive with its name and object; what it raises is what the call raises.
    """

    def __init__(self, inner: Store, before: Callable[[str, str], None] | None = None) -> None:
        self.inner = inner
        self.url = inner.url
        self.before = before
        self.calls: list[tuple[str, str]] = []

    def _note(self, call: str, name: str) -> None:
        self.calls.append((call, name))
        if self.before is not None:
            self.before(call, name)

    @property
    def capabilities(self) -> StoreCapabilities:
        return self.inner.capabilities

    def read(self, name: str, *, limit: int) -> bytes | None:
        self._note("read", name)
        return self.inner.read(name, limit=limit)

    def write(self, name: str, data: Any) -> None:
        self._note("write", name)
        self.inner.write(name, data)

    def create(self, name: str, data: Any) -> bool:
        self._note("create", name)
        return self.inner.create(name, data)

    def swap(self, name: str, data: Any, *, expected: bytes) -> bool:
        self._note("swap", name)
        return self.inner.swap(name, data, expected=expected)

    def delete(self, name: str) -> bool:
        self._note("delete", name)
        return self.inner.delete(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._note("list", prefix)
        return self.inner.list(prefix)

    def fetch(self, ref: BlobRef, *, rehash: bool = False) -> Payload:
        self._note("fetch", blob_name(ref))
        return self.inner.fetch(ref, rehash=rehash)

    def put_blob(self, ref: BlobRef, data: Any) -> None:
        self._note("put_blob", blob_name(ref))
        self.inner.put_blob(ref, data)

    def lock(self, name: str) -> Lock | None:
        self._note("lock", name)
        return self.inner.lock(name)

    def close(self) -> None:
        self.inner.close()
