"""Publications on their way to farther layers while the caller goes on."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from trt_warmcache.errors import WarmCacheError
from trt_warmcache.events import EventKind

__all__ = ["Background"]

log = logging.getLogger("trt_warmcache")


class Background:
    """Publications on their way, in order, from one thread.

    Args:
        size: How many may wait.
        flush_seconds: Longest time to wait for them.
        emit: Takes events.
    """

    def __init__(self, size: int, flush_seconds: float, emit: Callable[..., None]) -> None:
        self._size = size
        self._flush_seconds = flush_seconds
        self._emit = emit
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._tasks: queue.Queue[tuple[str, Callable[[], None]] | None] = queue.Queue(self._size)
        self._guard = threading.Lock()
        self._pending: Counter[str] = Counter()
        self._idle = threading.Condition(self._guard)
        self._thread: threading.Thread | None = None

    def _after_fork(self) -> None:
        """In a forked process, start anew: what was on its way is the parent's, and so is the thread that sends it."""
        if self._pid != os.getpid():
            self._reset()

    def submit(self, key: str, act: Callable[[], None]) -> None:
        """Do it later; waits while the queue is full. After closing it is done at once."""
        self._after_fork()
        with self._guard:
            closed = self._closed
            if not closed:
                self._pending[key] += 1
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._run, name="trt_warmcache-publish", daemon=True)
                    self._thread.start()
        if closed:
            act()
        else:
            self._tasks.put((key, act))

    def submit_after(self, key: str, act: Callable[[], None]) -> bool:
        """Do it after what is pending for this key; False, and nothing done, if nothing is."""
        self._after_fork()
        with self._guard:
            pending = self._pending[key] > 0 and not self._closed
        if pending:
            self.submit(key, act)
        return pending

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            key, act = task
            try:
                act()
            except WarmCacheError as error:
                self._emit(EventKind.PUBLISH_FAILED, key=key, reason="background", text=error.message)
            except Exception as error:  # the publications behind it must not be lost with this one
                log.exception("publishing %s failed", key[:12])
                self._emit(EventKind.PUBLISH_FAILED, key=key, reason="background", text=f"{key[:12]}: {error!r}")
            finally:
                with self._guard:
                    self._pending[key] -= 1
                    if not self._pending[key]:
                        del self._pending[key]
                    self._idle.notify_all()

    def flush(self) -> bool:
        """Wait until nothing is pending, or too long."""
        self._after_fork()
        with self._guard:
            return self._idle.wait_for(lambda: not self._pending, self._flush_seconds)

    def close(self) -> None:
        """Flush, and end the thread."""
        if not self.flush():
            with self._guard:
                lost = sorted(self._pending)
            self._emit(
                EventKind.PUBLISH_FAILED,
                reason="background",
                text=f"{len(lost)} entries did not reach the farther layers in time; copy them later (trt-warmcache copy).",
            )
        with self._guard:
            thread, self._thread, self._closed = self._thread, None, True
        if thread is not None and thread.is_alive():
            with suppress(queue.Full):
                self._tasks.put_nowait(None)
            thread.join(1.0)
