"""Where bytes land: a file, full-sized from the start, written at any place, mapped when whole."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from trt_warmcache.stores._base import Payload

__all__ = ["Landing", "map_file"]

log = logging.getLogger("trt_warmcache")

#: Linux writes no more than 2 GiB in one call; smaller bites let a killed process die sooner.
_MOST_AT_ONCE = 64 * 1024 * 1024

_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})


class Landing:
    """A file of its full size from the start, filled in any order by any number of threads.

    Args:
        fd: The file, new, open for reading and writing; the landing's from now on.
        size: Bytes; reserved at once, so that a full disk shows before the download and not in its middle.

    Raises:
        OSError: No space.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._fd = fd
        self._guard = threading.Lock()
        self._holders = 1  # the landing itself; and each write under way
        self._closed = False
        try:
            if size:
                _reserve(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def nameless(cls, size: int, folder: Path | None) -> Landing:
        """One without a name, so that nobody else can open it and no crash leaves it behind.

        Args:
            size: Bytes.
            folder: Where to make it; None keeps it in memory.

        Raises:
            OSError: No space, or the folder cannot be written.
        """
        return cls(_memory_file() if folder is None else _nameless_file(folder), size)

    @property
    def fd(self) -> int:
        """The open file's descriptor."""
        return self._fd

    def write(self, data: Any, offset: int) -> None:
        """Put bytes in their place. Any number of threads may write different places at once.

        Raises:
            OSError: No space, or the landing was given up: a download that nobody waits for any more must not write
                to whatever file has got this descriptor's number since.
        """
        self._hold()
        try:
            view = memoryview(data).cast("B")
            done = 0
            while done < view.nbytes:
                done += os.pwrite(self._fd, view[done : done + _MOST_AT_ONCE], offset + done)
        finally:
            self._let_go()

    def payload(self) -> Payload:
        """The whole content, read-only and mapped; the landing may be closed."""
        return map_file(self._fd, self.size)

    def close(self) -> None:
        """Give up the file; what was mapped stays mapped, and writes under way are finished. Idempotent."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
        self._let_go()

    def _hold(self) -> None:
        with self._guard:
            if self._closed:
                raise OSError(errno.EBADF, "nobody waits for these bytes any more")
            self._holders += 1

    def _let_go(self) -> None:
        with self._guard:
            self._holders -= 1
            last = not self._holders
        if last:
            os.close(self._fd)

    def __enter__(self) -> Landing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("trt_warmcache", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _nameless_file(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    flags = getattr(os, "O_TMPFILE", 0)
    if flags:
        try:
            return os.open(folder, flags | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            # File systems without nameless files answer with one of these; anything else is trouble.
            if error.errno not in {errno.EOPNOTSUPP, errno.ENOTSUP, errno.EISDIR, errno.ENOENT, errno.EINVAL}:
                raise
    fd, name = tempfile.mkstemp(prefix=".tmp-", dir=folder)
    Path(name).unlink()
    return fd


def _reserve(fd: int, size: int) -> None:
    """Give an open file its size, and the space for it where the file system can: a full disk shows now, not later."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
        os.ftruncate(fd, size)


def map_file(fd: int, size: int, *, verified_now: bool = True) -> Payload:
    """An open file's bytes, read-only and mapped; the file may be closed."""
    if not size:
        return Payload(memoryview(b""), verified_now=verified_now)
    mapped = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    view = memoryview(mapped)

    def release() -> None:
        try:
            view.release()
            mapped.close()
        except BufferError:
            # The caller still holds views (a numpy array over the plan, say); the map goes when the last of them goes.
            log.debug("plan still in use, left mapped")

    return Payload(view, release, verified_now=verified_now)
