"""From what a user writes to a store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from trt_warmcache.errors import ConfigError
from trt_warmcache.memo import DigestMemo
from trt_warmcache.stores._base import Store
from trt_warmcache.stores._local import LocalStore
from trt_warmcache.stores._memory import MemoryStore

__all__ = ["open_store"]


def open_store(where: Any, *, memo: DigestMemo | None = None) -> Store:
    """A store from a path, a URL, or a :class:`Store` (returned as it is).

    Args:
        where: A folder, ``file:///folder``, ``memory://`` (of this store only), any fsspec URL, a store object, or a
            list of these and of :class:`Layer` objects, nearest first. For options of a backend, pass
            ``FsspecStore(url, storage_options=...)``.
        memo: Remembers verified blob files of local stores.

    Raises:
        ConfigError: Anything else, or a URL whose backend is not installed.
    """
    if isinstance(where, Store):
        return where
    if isinstance(where, os.PathLike):
        return LocalStore(where, memo=memo)
    if isinstance(where, Sequence) and not isinstance(where, (str, bytes, bytearray)) and len(where) == 1:
        return open_store(where[0], memo=memo)
    if not isinstance(where, str):
        from trt_warmcache.stores._layered import LayeredStore
        from trt_warmcache.stores._tier import Layer

        if isinstance(where, Layer):
            return LayeredStore([where])
        if isinstance(where, Sequence) and where and not isinstance(where, (bytes, bytearray)):
            return LayeredStore([one if isinstance(one, Layer) else open_store(one, memo=memo) for one in where])
        raise ConfigError(f"A store is a path, a URL, a Store, or a list of those, not {type(where).__name__}.")
    scheme, separator, rest = where.partition("://")
    if not separator:
        return LocalStore(where, memo=memo)
    if scheme in {"file", "local"}:
        return LocalStore(rest, memo=memo)
    if scheme == "memory":
        return MemoryStore()
    from trt_warmcache.stores._fsspec import FsspecStore

    return FsspecStore(where)
