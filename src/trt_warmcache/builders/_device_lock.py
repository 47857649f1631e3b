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
def device_turn(
    device: str,
    checkpoint: Callable[[], None],
    *,
    folder: Path | None = None,
    on_wait: Callable[[int], None] = lambda _: None,
) -> Iterator[None]:
    """Wait for, and hold, the turn to build on a GPU. The kernel gives it back when the holder dies.

    A turn only keeps timings clean; where no lock can be had, the build is still right, and goes on with a warning.

    Args:
        device: UUID of the GPU.
        checkpoint: Called while waiting; an exception raised by it ends the wait.
        folder: Where the locks lie; by default :func:`default_lock_folder`.
        on_wait: Called with 0 where others have the turn, and with 1 when the wait is over.
    """
    checkpoint()
    lock = _Lock(device, folder or default_lock_folder())
    waiting = False
    try:
        while not lock.acquired():
            if not waiting:
                waiting = True
                log.info("waiting for another build on %s to finish", device)
                on_wait(0)
            time.sleep(_PAUSE)
            checkpoint()
        if waiting:
            on_wait(1)
        yield
    finally:
        lock.release()


class _Lock:
    """A kernel lock on a file, or none where the folder allows none."""

    def __init__(self, device: str, folder: Path) -> None:
        from filelock import UnixFileLock

        self._device = device
        self._folder = folder
        path = folder / hashlib.sha256(device.encode()).hexdigest()[:32]
        self._lock = UnixFileLock(path, fallback_to_soft=False, thread_local=False)

    def acquired(self) -> bool:
        """Whether nobody else has it now."""
        from filelock import Timeout

        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
        except Timeout:
            return False
        except OSError as error:
            log.warning("building on %s without waiting for other builds: %s", self._device, error)
        return True

    def release(self) -> None:
        self._lock.release()
