"""What TensorRT says, kept: its calls answer None, False or nothing at all, and the reason is in its log only."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["TrtLog", "make_logger"]

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

    def add(self, severity: str, message: str) -> None:
        """Take one line. Called by TensorRT, possibly from its own threads."""
        text = message.strip()
        if severity in {"ERROR", "INTERNAL_ERROR"} and len(self.errors) < _KEPT_LINES:
            self.errors.append(text)
        elif severity == "WARNING" and len(self.warnings) < _KEPT_LINES:
            self.warnings.setdefault(text)
        if severity != "VERBOSE":
            self.tail.append(f"[{severity}] {text}")
        log.debug("[%s] %s", severity, text)

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


def make_logger(trt: Any, messages: TrtLog) -> Any:
    """An ``ILogger`` that fills `messages`. The class is made here because its base lives in the bindings."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # the bindings refuse an instance whose base was not initialized

        def log(self, severity: Any, msg: str) -> None:
            messages.add(severity.name, msg)

    return Logger()
