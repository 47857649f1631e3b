"""A store that passes everything on: the base of stores that change one thing about another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trt_warmcache.errors import IntegrityError
from trt_warmcache.events import Events
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import BlobRef, Manifest
from trt_warmcache.stores._base import Lock, ObjectInfo, Payload, Store, StoreCapabilities, WritePiece

__all__ = ["ForwardingStore"]


class ForwardingStore(Store):
    """Another store under the same name. Override what should be different.

    Attributes:
        inner: The other store.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.local = inner.local
        self.verifies = inner.verifies

    @property
    def capabilities(self) -> StoreCapabilities:
        return self.inner.capabilities

    def read(self, name: str, *, limit: int) -> bytes | None:
        return self.inner.read(name, limit=limit)

    def write(self, name: str, data: Any) -> None:
        self.inner.write(name, data)

    def create(self, name: str, data: Any) -> bool:
        return self.inner.create(name, data)

    def swap(self, name: str, data: Any, *, expected: bytes) -> bool:
        return self.inner.swap(name, data, expected=expected)

    def delete(self, name: str) -> bool:
        return self.inner.delete(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self.inner.list(prefix)

    def fetch(self, ref: BlobRef, *, rehash: bool = False) -> Payload:
        return self.inner.fetch(ref, rehash=rehash)

    def put_blob(self, ref: BlobRef, data: Any) -> None:
        self.inner.put_blob(ref, data)

    def fetch_into(self, ref: BlobRef, write: WritePiece) -> None:
        self.inner.fetch_into(ref, write)

    def land_blob(self, ref: BlobRef, fill: Callable[[WritePiece], None]) -> Payload:
        return self.inner.land_blob(ref, fill)

    def pack(self, ref: BlobRef, data: Any) -> tuple[BlobRef, Any]:
        return self.inner.pack(ref, data)

    def lock(self, name: str) -> Lock | None:
        return self.inner.lock(name)

    def in_use(self, ref: BlobRef) -> bool:
        return self.inner.in_use(ref)

    def temporaries(self) -> Iterator[ObjectInfo]:
        return self.inner.temporaries()

    def nearby(self) -> Iterator[Store]:
        return super().nearby() if self.local else self.inner.nearby()

    def bind(self, events: Events) -> None:
        self.inner.bind(events)

    def close(self) -> None:
        self.inner.close()

    def remove(self, kind: Kind, digest: str) -> bool:
        return self.inner.remove(kind, digest)

    def quarantine(self, kind: Kind, digest: str, error: IntegrityError) -> None:
        self.inner.quarantine(kind, digest, error)

    def manifest(self, kind: Kind, digest: str) -> Manifest | None:
        return self.inner.manifest(kind, digest)

    def publish(
        self, manifest: Manifest, payloads: Mapping[str, Any], *, replacing: Manifest | None = None
    ) -> Manifest:
        return self.inner.publish(manifest, payloads, replacing=replacing)
