"""The memory store under the public conformance suite."""

from __future__ import annotations

import pytest

from trt_warmcache import MemoryStore
from trt_warmcache.stores import Store
from trt_warmcache.testing import StoreConformance


class _Handle(MemoryStore):
    """Another handle on the same objects, as the suite asks for."""

    def __init__(self, first: MemoryStore) -> None:
        super().__init__()
        self._objects, self._locks, self._guard = first._objects, first._locks, first._guard


class TestConformance(StoreConformance):
    """The public suite over a dictionary."""

    @pytest.fixture(autouse=True)
    def _shared(self) -> None:
        self.first = MemoryStore()

    def make_store(self) -> Store:
        return _Handle(self.first)

    def raw_get(self, name: str) -> bytes | None:
        found = self.first._objects.get(name)
        return None if found is None else found.data

    def raw_put(self, name: str, data: bytes) -> None:
        self.first.write(name, data)


def test_instances_share_nothing() -> None:
    """Two memory stores are two stores."""
    first, second = MemoryStore(), MemoryStore()
    first.write("engines/x", b"1")
    assert second.read("engines/x", limit=10) is None
