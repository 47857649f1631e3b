"""One build per key: look, acquire, look again, work, release.

This module knows neither stores nor engines; it takes a lock, a way to look, and the work. The lock only saves work:
with a lock that everybody gets, two builders do the same job twice and the store keeps the first result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

from trt_warmcache.errors import BuildTimeout, WarmCacheError

__all__ = ["Heartbeat", "SingleFlight", "WaitLimits", "acquire_or_find"]

_T = TypeVar("_T")

#: First and longest pause between two looks while somebody else builds. Builds take seconds, looks take microseconds.
_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 0.25


class TryLock(Protocol):
    """The part of a store's lock that is needed here."""

    def try_acquire(self) -> bool:
        """Take the lock if nobody has it; never waits."""

    def owner(self) -> str:
        """Who holds it, for log lines."""


@runtime_checkable
class Abandonable(Protocol):
    """A lock taken in several steps, which can be left half-way."""

    def abandon(self) -> None:
        """Stop waiting for it."""


@dataclass(frozen=True)
class WaitLimits:
    """How long to wait, and how often to say so.

    Attributes:
        seconds: Longest wait.
        report_every: Seconds between two calls of `on_wait`.
        on_wait: Told the seconds waited so far and who holds the lock.
        clock: Monotonic seconds.
        sleep: Pauses; replaced in tests.
    """

    seconds: float
    report_every: float
    on_wait: Callable[[float, str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def acquire_or_find(lock: TryLock, look: Callable[[], _T | None], limits: WaitLimits) -> _T | None:
    """Wait until the lock is ours or somebody else has done the work.

    Waiters look on their own while they wait. So they all leave as soon as the work is there, and need not get the
    lock one after the other just to find that out.

    Returns:
        What `look` found, the lock not held; or None, the lock held and nothing found.

    Raises:
        BuildTimeout: Neither happened within the limit.
    """
    acquired = False
    try:
        found = _acquire_or_find(lock, look, limits)
        acquired = found is None
        return found
    finally:
        if not acquired and isinstance(lock, Abandonable):
            lock.abandon()


def _acquire_or_find(lock: TryLock, look: Callable[[], _T | None], limits: WaitLimits) -> _T | None:
    started = limits.clock()
    pause, reported = _FIRST_PAUSE, 0.0
    while True:
        if lock.try_acquire():
            return None
        found = look()
        if found is not None:
            return found
        waited = limits.clock() - started
        if waited >= limits.seconds:
            raise BuildTimeout(
                f"Waited {waited:.0f} s for {lock.owner() or 'another process'} to build this engine. "
                "Raise Policy.wait_seconds, or set Policy(on_wait='build') to build it here as well.",
                waited=waited,
            )
        if waited - reported >= limits.report_every:
            reported = waited
            limits.on_wait(waited, lock.owner())
        limits.sleep(min(pause, max(0.0, limits.seconds - waited)))
        pause = min(pause * 1.5, _LONGEST_PAUSE)


class SingleFlight(Generic[_T]):
    """Threads of one process that want the same thing: the first does the work, the others get its result."""

    def __init__(self) -> None:
        self._flights: dict[str, Future[_T]] = {}
        self._guard = threading.Lock()

    def run(self, key: str, work: Callable[[], _T], *, timeout: Callable[[], float | None]) -> tuple[_T, bool]:
        """Do the work, or wait for the thread that does it already.

        An error that would hit everybody alike is passed to all who wait. When the working thread was merely
        interrupted or out of its own time, one of those who wait takes over.

        Args:
            key: What is wanted.
            work: How to get it.
            timeout: Seconds that this caller may still wait; None for no limit.

        Returns:
            The result, and whether it is another thread's.

        Raises:
            BuildTimeout: The other thread took longer than this caller may wait.
        """
        while True:
            with self._guard:
                flight = self._flights.get(key)
                if flight is None:
                    mine = self._flights[key] = Future()
                    break
            try:
                return flight.result(timeout()), True
            except BuildTimeout:
                continue  # that thread's own deadline
            except FutureTimeoutError as error:
                raise BuildTimeout(
                    "Another thread of this process is still building this engine, and the time allowed is over. Allow more, or ask again later.",
                ) from error
            except WarmCacheError:
                raise
            except BaseException as error:
                if flight.done() and flight.exception() is error:
                    continue  # interrupted over there
                raise  # interrupted here
        try:
            result = work()
        except BaseException as error:
            self._land(key)
            mine.set_exception(error)
            # Nobody may be waiting; a future that is never asked must not complain about that.
            raise
        self._land(key)
        mine.set_result(result)
        return result, False

    def _land(self, key: str) -> None:
        with self._guard:
            self._flights.pop(key, None)


class Heartbeat:
    """Calls a function at intervals from a thread of its own until closed; for work that reports nothing by itself.

    Args:
        every: Seconds between two calls.
        beat: Called with the seconds since the start.
    """

    def __init__(self, every: float, beat: Callable[[float], None]) -> None:
        self._every = every
        self._beat = beat
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trt_warmcache-heartbeat", daemon=True)

    def _run(self) -> None:
        started = time.monotonic()
        while not self._stop.wait(self._every):
            self._beat(time.monotonic() - started)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
