"""Stand-ins for a shared bucket: a folder or a dictionary reduced to what an object store offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trt_warmcache.events import Event, EventKind
from trt_warmcache.manifest import BlobRef
from trt_warmcache.stores import Lock, LockScope, Payload, Store, StoreCapabilities
from trt_warmcache.testing import FlakyStore


class Heard:
    """A hook that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def kinds(self) -> list[EventKind]:
        """Kinds of the events, in order."""
        return [event.kind for event in self.events]


class Remote(FlakyStore):
    """Another store without its locks, its maps and its nearness: all that remains is objects and create-if-absent.

    Args:
        inner: Where the objects are.
        before: See :class:`FlakyStore`.
        exclusive: Claim create-if-absent; where False, it really is look-then-write.
        writable: Claim to be writable.
    """

    def __init__(
        self,
        inner: Store,
        before: Callable[[str, str], None] | None = None,
        *,
        exclusive: bool = True,
        writable: bool = True,
    ) -> None:
        super().__init__(inner, before)
        self.url = f"remote:{inner.url}"
        self._exclusive = exclusive
        self._writable = writable

    @property
    def capabilities(self) -> StoreCapabilities:
        return replace(
            self.inner.capabilities,
            lock_scope=LockScope.NONE,
            mappable=False,
            exclusive_create=self._exclusive,
            writable=self._writable,
            deletable=self._writable,
        )

    def create(self, name: str, data: Any) -> bool:
        if self._exclusive:
            return super().create(name, data)
        self._note("create", name)
        return Store.create(self, name, data)

    def swap(self, name: str, data: Any, *, expected: bytes) -> bool:
        self._note("swap", name)
        if self.inner.read(name, limit=len(expected)) != expected:
            return False
        self.inner.write(name, data)
        return True

    def fetch(self, ref: BlobRef, *, rehash: bool = False) -> Payload:
        with_map = super().fetch(ref, rehash=rehash)
        data = bytes(with_map.view)
        with_map.close()
        return Payload(memoryview(data))

    def lock(self, name: str) -> Lock | None:
        return None

    def names(self, call: str) -> list[str]:
        """Objects that a primitive was called with."""
        return [name for called, name in self.calls if called == call]
