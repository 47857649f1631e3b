"""What TensorRT says, kept: its calls answer None, False or nothing at all, and the reason is in its log only."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["TrtLog", "listening"]

log = logging.getLogger("trt_warmcache.tensorrt")

#: Messages kept for error reports; TensorRT logs tens of thousands when verbose.
_KEPT_LINES = 200


class TrtLog:
    """What TensorRT logged during one operation.

    Attributes:
        errors: The first messages of severity ERROR or INTERNAL_ERROR, in order. A second one about the CUDA driver
            often follows the one that tells the reason.
        warnings: Distinct warnings, in order.
        tail: The last lines of any severity.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: dict[str, None] = {}
        self.tail: deque[str] = deque(maxlen=_KEPT_LINES)

    def add(self, severity: str, text: str) -> None:
        """Take one line. Called by TensorRT, possibly from its own threads."""
        if severity in {"ERROR", "INTERNAL_ERROR"} and len(self.errors) < _KEPT_LINES:
            self.errors.append(text)
        elif severity == "WARNING" and len(self.warnings) < _KEPT_LINES:
            self.warnings.setdefault(text)
        if severity != "VERBOSE":
            self.tail.append(f"[{severity}] {text}")

    @contextmanager
    def aside(self) -> Iterator[list[str]]:
        """Errors logged meanwhile are no reason for a later failure; they are in the list afterwards."""
        told: list[str] = []
        before = len(self.errors)
        yield told
        told += self.errors[before:]
        del self.errors[before:]

    def reason(self, otherwise: str) -> str:
        """The first error, or a sentence for when TensorRT gave none."""
        return self.errors[0] if self.errors else otherwise


@contextmanager
def listening(trt: Any) -> Iterator[tuple[Any, TrtLog]]:
    """An ``ILogger`` for the bindings, and what TensorRT logs meanwhile.

    TensorRT keeps one logger for the process, the first it is given, for as long as anything made with it lives. So
    everybody gets the same, and it tells apart whose lines these are: by thread, and what TensorRT's own threads say
    goes to all who listen.
    """
    logger, messages = _logger_of(trt), TrtLog()
    with logger.router.opened(messages):
        yield logger, messages


class _Router:
    """Whose lines are whose."""

    def __init__(self) -> None:
        # Reentrant: a garbage collection in here may end an engine, and TensorRT logs that on this very thread.
        self._lock = threading.RLock()
        self._open: list[tuple[int, TrtLog]] = []

    @contextmanager
    def opened(self, messages: TrtLog) -> Iterator[None]:
        place = (threading.get_ident(), messages)
        with self._lock:
            self._open.append(place)
        try:
            yield
        finally:
            with self._lock:
                self._open.remove(place)

    def send(self, severity: str, message: str) -> None:
        text = message.strip()
        log.debug("[%s] %s", severity, text)
        with self._lock:
            everybody = list(self._open)
        here = [messages for thread, messages in everybody if thread == threading.get_ident()]
        for messages in here[-1:] or [messages for _, messages in everybody]:
            messages.add(severity, text)


@functools.lru_cache(maxsize=4)
def _logger_of(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]  # its base lives in the bindings
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # the bindings refuse an instance whose base was not initialized
            self.router = _Router()

        def log(self, severity: Any, msg: str) -> None:
            self.router.send(severity.name, msg)

    return Logger()
