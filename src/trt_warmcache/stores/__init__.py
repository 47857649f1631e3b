"""Where entries live. :func:`open_store` turns a path, a URL or a list of them into a store."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from trt_warmcache.stores._fsspec import Compression, FsspecStore, Transport
    from trt_warmcache.stores._layered import LayeredStore, WriteTo
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

#: Loaded when first asked for: whoever has a folder needs none of it.
_FAR = {
    "Compression": "_fsspec",
    "FsspecStore": "_fsspec",
    "Layer": "_tier",
    "LayerCounters": "_tier",
    "LayeredStore": "_layered",
    "Transport": "_fsspec",
    "WriteTo": "_layered",
}

if not TYPE_CHECKING:  # type checkers that saw it would take any misspelt name for real

    def __getattr__(name: str) -> Any:
        module = _FAR.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{module}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
