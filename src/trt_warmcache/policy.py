"""How a manager behaves when things are missing, slow, damaged or untrusted."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trt_warmcache import _checks as checks
from trt_warmcache._fields import strict_fields, to_enum
from trt_warmcache._words import Word
from trt_warmcache.errors import ConfigError

__all__ = ["Cover", "Isolation", "OnMiss", "OnSuspect", "OnWait", "Policy", "Rung", "StoreErrors", "Trust"]


class OnMiss(Word):
    """What `get` does when nothing is stored for a request."""

    BUILD = "build"
    """Build it now, once, and store it."""
    RAISE = "raise"
    """Raise :class:`~trt_warmcache.MissError`: the gate for production nodes that must never build."""
    FALLBACK = "fallback"
    """Never block the caller: serve a stored wider profile if there is one, else start the build in the background
    and raise :class:`~trt_warmcache.MissError` whose ``pending`` is the future of that build."""


class Cover(Word):
    """Whether an engine with a wider profile may answer."""

    EXACT = "exact"
    WIDER = "wider"


class Trust(Word):
    """What an entry must show before its plan reaches TensorRT."""

    DIGEST = "digest"
    """Its bytes match their digests. Finds accidents, not attackers."""
    SIGNED = "signed"
    """Its manifest carries a valid signature by a trusted key as well."""


class StoreErrors(Word):
    """What a store that fails while being read does to the request."""

    RAISE = "raise"
    DEGRADE = "degrade"
    """Report it, count it, and go on as if nothing were stored."""


class OnWait(Word):
    """What happens when another process's build has been waited for long enough."""

    RAISE = "raise"
    BUILD = "build"
    """Build it here as well: twice the work, never a wrong result."""


class OnSuspect(Word):
    """What happens to a finished plan that is oddly large or small beside earlier builds of its model."""

    REPORT = "report"
    """It is stored with the suspicion in its manifest, and an event tells."""
    REFUSE = "refuse"
    """It is not stored, and the build fails."""


class Rung(Word):
    """Stored plans that may serve although they were not built for exactly this GPU and version."""

    SAME_COMPUTE_CAPABILITY = "same_compute_capability"
    """Built for any GPU of the same compute capability."""
    AMPERE_PLUS = "ampere_plus"
    """Built for Ampere and newer; may cost speed."""
    VERSION_COMPATIBLE = "version_compatible"
    """Built by an earlier release of the same major version for later ones. Such plans bring host code along: name
    this rung only where the store is trusted like code."""


class Isolation(Word):
    """In which process builds run."""

    AUTO = "auto"
    """In this process for `get`; in a fresh one for background builds and `warm`, where request and builder can travel,
    and wherever a limit is asked for that only a process of its own can keep."""
    NONE = "none"
    """In this process: no start-up cost, but a crash of TensorRT takes the process along."""
    PROCESS = "process"
    """In a fresh process each: a crash, a hang or a memory hog is a :class:`~trt_warmcache.BuildError`."""
    WHERE_POSSIBLE = "where_possible"
    """In a fresh process where request and builder can travel, else in this one."""


@strict_fields
@dataclass(frozen=True)
class Policy:
    """How a manager, or one request, behaves.

    Args:
        on_miss: See :class:`OnMiss`.
        cover: See :class:`Cover`.
        trust: See :class:`Trust`.
        store_errors: See :class:`StoreErrors`.
        on_wait: See :class:`OnWait`.
        slow_build_seconds: A build or wait longer than this is logged as a warning, and again at every multiple.
        wait_seconds: Longest wait for another process's build, in seconds.
        build_seconds: Longest build, in seconds; None sets no limit. In this process TensorRT can only be stopped at a
            step of its progress; a process of its own is ended at once.
        ladder: Which stored plans may serve instead of the exact one; see :class:`Rung`. None by default.
        on_suspect: See :class:`OnSuspect`.
        isolation: See :class:`Isolation`.
        build_memory_bytes: Most address space of a building process; None sets no limit. See
            :class:`~trt_warmcache.builders.ProcessLimits` on what CUDA needs.
        rehash: Hash model files and stored plans anew at every use instead of trusting the digest memo.
        refresh: Build anew even if an entry is stored, and put the new one in its place. The old one serves others
            until then.
        driver_in_key: Let the driver version split the engine key. Off by default: plans survive driver updates.

    Raises:
        ConfigError: An unknown field (naming the nearest), an unknown choice, or seconds that are negative or not
            finite.
    """

    on_miss: OnMiss | Literal["build", "raise", "fallback"] = OnMiss.BUILD
    cover: Cover | Literal["exact", "wider"] = Cover.EXACT
    trust: Trust | Literal["digest", "signed"] = Trust.DIGEST
    store_errors: StoreErrors | Literal["raise", "degrade"] = StoreErrors.RAISE
    on_wait: OnWait | Literal["raise", "build"] = OnWait.RAISE
    slow_build_seconds: float = 10.0
    wait_seconds: float = 3600.0
    build_seconds: float | None = None
    rehash: bool = False
    refresh: bool = False
    driver_in_key: bool = False
    ladder: Sequence[Rung | Literal["same_compute_capability", "ampere_plus", "version_compatible"]] = ()
    on_suspect: OnSuspect | Literal["report", "refuse"] = OnSuspect.REPORT
    isolation: Isolation | Literal["auto", "none", "process", "where_possible"] = Isolation.AUTO
    build_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for field, kind in (
            ("on_miss", OnMiss),
            ("cover", Cover),
            ("trust", Trust),
            ("store_errors", StoreErrors),
            ("on_wait", OnWait),
            ("isolation", Isolation),
            ("on_suspect", OnSuspect),
        ):
            object.__setattr__(self, field, to_enum(kind, getattr(self, field), f"Policy.{field}"))
        for field in ("slow_build_seconds", "wait_seconds", "build_seconds"):
            check_seconds(getattr(self, field), f"Policy.{field}", optional=field == "build_seconds")
        for field in ("rehash", "refresh", "driver_in_key"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"Policy.{field} must be True or False, not {getattr(self, field)!r}.")
        if isinstance(self.ladder, str) or not isinstance(self.ladder, Iterable):
            raise ConfigError(f"Policy.ladder must be a list such as ('ampere_plus',), not {self.ladder!r}.")
        chosen = {to_enum(Rung, rung, "Policy.ladder") for rung in self.ladder}
        object.__setattr__(self, "ladder", tuple(rung for rung in Rung if rung in chosen))
        memory = self.build_memory_bytes
        if memory is not None:
            checks.whole(1)("Policy.build_memory_bytes", memory)
        if memory is not None and self.isolation is Isolation.NONE:
            raise ConfigError("Policy.build_memory_bytes limits a building process; isolation='none' has none.")

    def detached(self) -> Policy:
        """The same policy for a build that nobody's call waits for in this thread."""
        if self.isolation is not Isolation.AUTO:
            return self
        return replace(self, isolation=Isolation.WHERE_POSSIBLE)


def check_seconds(value: object, field: str, *, optional: bool) -> None:
    """Refuse anything but a number of seconds, zero or more, that a wait can last (or None where that is meaningful)."""
    if value is None and optional:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # The operating system's clocks hold some hundred years; a wait beyond that would fail when it begins.
    if not number or not 0 <= value <= threading.TIMEOUT_MAX:  # type: ignore[operator]
        raise ConfigError(f"{field} must be a number of seconds from 0 to {threading.TIMEOUT_MAX:.0f}, not {value!r}.")
