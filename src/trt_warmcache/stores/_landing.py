"""Where downloaded bytes land: a nameless file, full-sized from the start, written at any place, mapped when whole."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from trt_warmcache.stores._base import Payload

__all__ = ["Landing"]

_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})


class Landing:
    """A file without a name, so that nobody else can open it and no crash leaves it behind.

    Args:
        size: Bytes; reserved at once, so that a full disk shows before the download and not in its middle.
        folder: Where to make it; None keeps it in memory.

    Raises:
        OSError: No space, or the folder cannot be written.
    """

    def __init__(self, size: int, folder: Path | None) -> None:
        self.size = size
        self._fd = _memory_file() if folder is None else _nameless_file(folder)
        try:
            if size:
                _reserve(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, data: Any, offset: int) -> None:
        """Put bytes in their place. Any number of threads may write different places at once."""
        view = memoryview(data).cast("B")
        done = 0
        while done < view.nbytes:
            done += os.pwrite(self._fd, view[done:], offset + done)

    def payload(self) -> Payload:
        """The whole content, read-only and mapped; the landing may be closed."""
        if not self.size:
            return Payload(memoryview(b""))
        mapped = mmap.mmap(self._fd, self.size, access=mmap.ACCESS_READ)
        view = memoryview(mapped)

        def release() -> None:
            try:
                view.release()
                mapped.close()
            except BufferError:
                return  # the caller still holds views; the map goes when the last of them goes

        return Payload(view, release)

    def close(self) -> None:
        """Give up the file; what was mapped stays mapped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

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
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
        os.ftruncate(fd, size)
