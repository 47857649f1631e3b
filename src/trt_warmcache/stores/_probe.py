"""What a server really does with conditional writes: found out by trying, never assumed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trt_warmcache.stores._faults import Fault, diagnose
from trt_warmcache.stores._wire import Wire, look

__all__ = ["Proof", "probe"]

_RACERS = 8


@dataclass(frozen=True)
class Proof:
    """What a probe found out about a server.

    Attributes:
        create: Create-if-absent lets one of many racing writers win.
        replace: A write on condition of a stale version is refused.
        writable: We may write here.
    """

    create: bool = False
    replace: bool = False
    writable: bool = True


def probe(wire: Wire, name: str, seconds: float) -> Proof:
    """Race some writers for one object, then try what must be refused.

    Args:
        wire: The server.
        name: The object; it may stay behind.
        seconds: Time for each request.
    """
    barrier = threading.Barrier(_RACERS)

    def compete(number: int) -> bool:
        barrier.wait(seconds)
        return _accepted(lambda: wire.create(name, b"racer %d" % number, seconds))

    with ThreadPoolExecutor(_RACERS, "trt_warmcache-probe") as pool:
        wins = list(pool.map(compete, range(_RACERS)))
    if not any(wins):
        # Every racer was told of a collision: nothing is known yet.
        raise FileExistsError(name)
    if wins.count(True) > 1 or look(wire, name, 100, seconds) != b"racer %d" % wins.index(True):
        return Proof()
    if _accepted(lambda: wire.create(name, b"late", seconds)):
        return Proof()
    return Proof(create=True, replace=_replaces(wire, name, seconds))


def _replaces(wire: Wire, name: str, seconds: float) -> bool:
    tag = wire.head(name, seconds).tag
    if not tag:
        return False
    try:
        fresh = _accepted(lambda: wire.replace(name, b"second", tag, seconds))
        stale = _accepted(lambda: wire.replace(name, b"third", tag, seconds))
    except NotImplementedError:
        return False
    return fresh and not stale and look(wire, name, 100, seconds) == b"second"


def _accepted(send: Callable[[], None]) -> bool:
    try:
        send()
        return True
    except Exception as error:
        if diagnose(error).fault in {Fault.EXISTS, Fault.CONFLICT}:
            return False
        raise
