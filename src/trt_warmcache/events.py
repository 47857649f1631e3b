"""What happened, told to whoever wants to know: one small object per event, and no knowledge of any sink."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from trt_warmcache._words import Word

__all__ = ["Event", "EventKind", "Events", "Hook"]

log = logging.getLogger("trt_warmcache")
# Without a handler of its own, Python prints a library's warnings to standard error; this library never prints.
log.addHandler(logging.NullHandler())


class EventKind(Word):
    """Every kind of event; the values are the names used in logs and metrics."""

    HIT = "hit"
    COVERED = "covered"
    JOINED = "joined"
    MISS = "miss"
    BUILD_START = "build_start"
    BUILD_PROGRESS = "build_progress"
    BUILD_SLOW = "build_slow"
    BUILD_END = "build_end"
    BUILD_FAILED = "build_failed"
    WAIT = "wait"
    PUBLISHED = "published"
    PUBLISH_FAILED = "publish_failed"
    PUBLISH_LOST = "publish_lost"
    QUARANTINED = "quarantined"
    STORE_ERROR = "store_error"
    LOCK_UNAVAILABLE = "lock_unavailable"
    LAYER_DOWN = "layer_down"
    LEASE_LOST = "lease_lost"
    INEFFECTIVE = "ineffective"
    SUSPECT = "suspect"
    TIMING_DROPPED = "timing_dropped"
    RUNTIME_DROPPED = "runtime_dropped"
    CALIBRATION_HIT = "calibration_hit"
    CALIBRATION_START = "calibration_start"
    CALIBRATION_END = "calibration_end"
    CALIBRATION_FAILED = "calibration_failed"
    CALIBRATION_INCOMPLETE = "calibration_incomplete"
    CALIBRATION_CONFLICT = "calibration_conflict"
    CALIBRATION_UNWRITTEN = "calibration_unwritten"
    VERSION_CONFLICT = "version_conflict"
    CHURN = "churn"
    DRIFT = "drift"
    WARNING = "warning"


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: What.
        key: Hex digest of the key concerned, or "".
        label: The request's readable name, or "".
        seconds: How long it took, where that has a meaning.
        detail: Further facts, JSON-like.
    """

    kind: EventKind
    key: str = ""
    label: str = ""
    seconds: float | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


class Hook(Protocol):
    """Anything callable with an event. It runs on the thread where the event happens, so it should be quick."""

    def __call__(self, event: Event, /) -> None:
        """Take one event."""


_LEVELS = {
    EventKind.PUBLISH_FAILED: logging.WARNING,
    EventKind.QUARANTINED: logging.WARNING,
    EventKind.STORE_ERROR: logging.WARNING,
    EventKind.LOCK_UNAVAILABLE: logging.WARNING,
    EventKind.LAYER_DOWN: logging.WARNING,
    EventKind.LEASE_LOST: logging.WARNING,
    EventKind.BUILD_SLOW: logging.WARNING,
    EventKind.BUILD_FAILED: logging.WARNING,
    EventKind.INEFFECTIVE: logging.WARNING,
    EventKind.SUSPECT: logging.WARNING,
    EventKind.TIMING_DROPPED: logging.WARNING,
    EventKind.RUNTIME_DROPPED: logging.WARNING,
    EventKind.CALIBRATION_FAILED: logging.WARNING,
    EventKind.CALIBRATION_INCOMPLETE: logging.WARNING,
    EventKind.CALIBRATION_CONFLICT: logging.WARNING,
    EventKind.CALIBRATION_UNWRITTEN: logging.WARNING,
    EventKind.VERSION_CONFLICT: logging.WARNING,
    EventKind.CHURN: logging.WARNING,
    EventKind.DRIFT: logging.WARNING,
    EventKind.WARNING: logging.WARNING,
    EventKind.CALIBRATION_START: logging.INFO,
    EventKind.CALIBRATION_END: logging.INFO,
    EventKind.BUILD_START: logging.INFO,
    EventKind.BUILD_END: logging.INFO,
    EventKind.PUBLISHED: logging.INFO,
    EventKind.WAIT: logging.INFO,
}


class Events:
    """Counts events, logs them, and passes them to hooks. A hook that fails is logged and otherwise ignored.

    Args:
        hooks: Called in order with each event.
    """

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self._hooks = tuple(hooks)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def emit(
        self,
        kind: EventKind,
        *,
        key: str = "",
        label: str = "",
        seconds: float | None = None,
        text: str = "",
        **detail: Any,
    ) -> None:
        """Count, log and pass on one event. `text` is the sentence for the log."""
        with self._lock:
            self._counts[kind.value] += 1
            reason = detail.get("reason")
            if reason is not None:
                self._counts[f"{kind.value}.{reason}"] += 1
        level = _LEVELS.get(kind, logging.DEBUG)
        if log.isEnabledFor(level):
            log.log(
                level,
                "%s %s%s",
                kind.value,
                text or label or key[:12],
                "" if seconds is None else f" ({seconds:.2f} s)",
            )
        if not self._hooks:
            return
        if text:
            detail["text"] = text
        event = Event(kind, key, label, seconds, detail)
        for hook in self._hooks:
            try:
                hook(event)
            except Exception:
                log.warning("hook %r failed on %s", hook, kind.value, exc_info=True)

    def counts(self) -> dict[str, int]:
        """How often each kind occurred, also by reason as ``kind.reason``."""
        with self._lock:
            return dict(self._counts)
