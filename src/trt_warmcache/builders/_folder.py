"""Temporary folders of builds, and what is left of those whose process was killed."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["working_folder"]

log = logging.getLogger("trt_warmcache")

_PREFIX = "trt_warmcache-build-"

#: Seconds in which a new folder may not be locked yet.
_YOUNG = 60.0


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """A private folder that is gone afterwards. A killed process leaves its own, so those are swept first.

    Its owner holds a lock on it, which the kernel releases with the process; what nobody locks is nobody's.
    """
    _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with _opened(folder) as handle:
            # Without a lock, as on some network mounts, nobody else can lock it either, and it is never swept.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove abandoned folders of this user; whatever is in the way of that can wait for the next build."""
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    status = folder.lstat()
    young = time.time() - status.st_mtime < _YOUNG
    if young or not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return
    with _opened(folder) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError where its owner lives
        shutil.rmtree(folder, ignore_errors=True)
    log.info("removed %s, which a killed build left", folder)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield handle
    finally:
        os.close(handle)
