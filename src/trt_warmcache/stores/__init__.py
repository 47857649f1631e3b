"""Where entries live. :func:`open_store` turns a path, a URL or a list of them into a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_warmcache._lazy import lazy
from trt_warmcache.stores._base import (
    EntryInfo,
    Lock,
    LockScope,
    ObjectInfo,
    Payload,
    Store,
    StoreCapabilities,
)
from trt_warmcache.stores._forward import ForwardingStore
from trt_warmcache.stores._local import LocalStore
from trt_warmcache.stores._memory import MemoryStore
from trt_warmcache.stores._open import open_store

if TYPE_CHECKING:
    from trt_warmcache.stores._fsspec import Compression, FsspecStore
    from trt_warmcache.stores._layered import LayeredStore, WriteTo
    from trt_warmcache.stores._requests import Transport
    from trt_warmcache.stores._tier import Layer, LayerCounters

__all__ = [
    "Compression",
    "EntryInfo",
    "ForwardingStore",
    "FsspecStore",
    "Layer",
    "LayerCounters",
    "LayeredStore",
    "LocalStore",
    "Lock",
    "LockScope",
    "MemoryStore",
    "ObjectInfo",
    "Payload",
    "Store",
    "StoreCapabilities",
    "Transport",
    "WriteTo",
    "open_store",
]

#: Whoever has a folder needs none of these.
_FAR = {
    "Compression": "trt_warmcache.stores._fsspec",
    "FsspecStore": "trt_warmcache.stores._fsspec",
    "Layer": "trt_warmcache.stores._tier",
    "LayerCounters": "trt_warmcache.stores._tier",
    "LayeredStore": "trt_warmcache.stores._layered",
    "Transport": "trt_warmcache.stores._requests",
    "WriteTo": "trt_warmcache.stores._layered",
}

if not TYPE_CHECKING:  # type checkers that saw it would take any misspelt name for real
    __getattr__ = lazy(__name__, _FAR, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
