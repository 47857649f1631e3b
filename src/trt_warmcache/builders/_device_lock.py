"""One classic build per GPU at a time: TensorRT times kernels while it builds, and two at once spoil both timings."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["default_lock_folder", "device_turn"]

log = logging.getLogger("trt_warmcache")

_PAUSE = 0.05


def default_lock_folder() -> Path:
    """Where the processes of this user on this host meet: a folder that no other host shares."""
    return Path(tempfile.gettempdir()) / f"trt_warmcache-gpus-{os.getuid()}"


@contextmanager
def device_turn(device: str, checkpoint: Callable[[], None], *, folder: Path | None = None) -> Iterator[None]:
    """Wait for, and hold, the turn to build on a GPU. The kernel gives it back when the holder dies.

    Args:
        device: UUID of the GPU.
        checkpoint: Called while waiting; an exception raised by it ends the wait.
        folder: Where the locks lie; by default :func:`default_lock_folder`.
    """
    from filelock import Timeout, UnixFileLock

    folder = folder or default_lock_folder()
    path = folder / hashlib.sha256(device.encode()).hexdigest()[:32]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = UnixFileLock(path, fallback_to_soft=False, thread_local=False)
        while True:
            checkpoint()
            try:
                lock.acquire(blocking=False)
                break
            except Timeout:
                time.sleep(_PAUSE)
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        # A turn only keeps timings clean; where no lock can be had, the build is still right.
        log.warning("building on %s without waiting for other builds: %s", device, error)
        yield
        return
    try:
        yield
    finally:
        lock.release()
