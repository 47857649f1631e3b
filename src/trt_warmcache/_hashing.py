"""Hashing on all cores, where that is safe and pays."""

from __future__ import annotations

import os

import blake3

__all__ = ["hash_threads"]

#: Below, starting threads costs more than they save.
_WORTH_THREADS = 1024 * 1024

#: The process in which all cores were first used: blake3 keeps one pool of threads for the whole process.
_POOL_OF: list[int] = []


def hash_threads(size: int = _WORTH_THREADS + 1) -> int:
    """What to give blake3 as ``max_threads``.

    One in a process that was forked from another which had hashed on all cores: the pool's threads do not survive a
    fork, and whoever waits for them waits for ever.

    Args:
        size: Bytes to hash; many, if left out.
    """
    if size <= _WORTH_THREADS:
        return 1
    if not _POOL_OF:
        _POOL_OF.append(os.getpid())
    return blake3.blake3.AUTO if _POOL_OF[0] == os.getpid() else 1
