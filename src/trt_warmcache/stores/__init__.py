"""Where entries live. :func:`open_store` turns a path, a URL or a list of them into a store."""

from __future__ import annotations

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
from trt_warmcache.stores._fsspec import Compression, FsspecStore, Transport
from trt_warmcache.stores._layered import Layer, LayerCounters, LayeredStore, WriteTo
from trt_warmcache.stores._local import LocalStore
from trt_warmcache.stores._memory import MemoryStore
from trt_warmcache.stores._open import open_store

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
