"""Locks of a layered store: first the machine's, then the fleet's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from trt_warmcache.errors import StoreError
from trt_warmcache.events import EventKind
from trt_warmcache.lease import Lease
from trt_warmcache.stores._background import Background
from trt_warmcache.stores._base import Lock, LockScope
from trt_warmcache.stores._tier import Tier

__all__ = ["LayeredLocks", "leases"]

log = logging.getLogger("trt_warmcache")


class LayeredLocks:
    """Makes locks, and knows those that are held.

    Args:
        lease_seconds: How long a builder that died on another machine can block this one.
        background: Publications on their way; a lease is kept until those under its key have arrived.
        emit: Takes events.
    """

    def __init__(self, lease_seconds: float, background: Background, emit: Callable[..., None]) -> None:
        self._lease_seconds = lease_seconds
        self._background = background
        self._emit = emit
        self._guard = threading.Lock()
        self._held: dict[str, tuple[int, Lease | None]] = {}
        self._leaseless_told = False

    def lock(self, name: str, writable: Sequence[Tier], decider: Tier) -> Lock | None:
        """The nearest layer's lock and then the deciding layer's: one process per machine asks the fleet."""
        nearer = [tier for tier in writable if tier is not decider and not tier.layer.shared]
        near_tier = max(nearer, key=lambda tier: tier.capabilities.lock_scope, default=None)
        near = None if near_tier is None else near_tier.lock(name)
        far = self._fleet_lock(decider, name)
        return None if near is None and far is None else _LayeredLock(self, name, near, far)

    def holds(self, name: str) -> bool:
        """Whether the calling thread holds this lock."""
        with self._guard:
            return self._held.get(name, (0, None))[0] == threading.get_ident()

    def check_fence(self, name: str) -> None:
        """Notice a lost lease before publishing. Publishing goes on: create-if-absent is what keeps the winner safe."""
        with self._guard:
            _, lease = self._held.get(name, (0, None))
        if lease is not None:
            with suppress(StoreError):  # the publication itself will meet the same trouble and report it
                lease.verify()

    def taken(self, name: str, lease: Lock | None) -> None:
        """Note that the calling thread holds a lock."""
        with self._guard:
            self._held[name] = (threading.get_ident(), lease if isinstance(lease, Lease) else None)

    def given_back(self, name: str, far: Lock | None) -> None:
        """Note that a lock is held no longer, and release its far part once nothing is on its way there."""
        with self._guard:
            self._held.pop(name, None)
        # While a publication is on its way, the other machines had better wait for it.
        if far is not None and not self._background.submit_after(name, far.release):
            far.release()

    def _fleet_lock(self, decider: Tier, name: str) -> Lock | None:
        if leases(decider):
            return Lease(decider.guarded(), name, seconds=self._lease_seconds, on_lost=self._lease_lost)
        lock = None if decider.layer.shared else decider.lock(name)
        if lock is None and not self._leaseless_told and decider.capabilities.known:
            self._leaseless_told = True
            self._emit(
                EventKind.LOCK_UNAVAILABLE,
                reason="no-exclusive-create",
                text=f"{decider.name} does not honour create-if-absent, so machines cannot agree on one builder: the "
                "same engine may be built once per machine. The result stays right.",
            )
        return lock

    def _lease_lost(self, text: str) -> None:
        self._emit(EventKind.LEASE_LOST, text=text)


def leases(tier: Tier) -> bool:
    """Whether builders meet in a layer through lease objects that are kept from here."""
    able = tier.capabilities
    near = able.lock_scope in {LockScope.PROCESS, LockScope.HOST}
    return able.exclusive_create and (tier.layer.shared or not near)


class _LayeredLock:
    """First the machine's lock, then the fleet's."""

    def __init__(self, locks: LayeredLocks, name: str, near: Lock | None, far: Lock | None) -> None:
        self._locks = locks
        self._name = name
        self._near = near
        self._far = far
        self._near_held = False

    def try_acquire(self) -> bool:
        if self._near is not None and not self._near_held:
            if not self._near.try_acquire():
                return False
            self._near_held = True
        # The machine's lock is kept while the fleet's is waited for, so that one process per machine asks for it.
        try:
            taken = self._far is None or self._far.try_acquire()
        except StoreError as error:
            # A shared layer that does not answer must not stop this machine; it may build what another builds too.
            log.warning("no lease: %s", error.message)
            self._far, taken = None, True
        except BaseException:
            self.abandon()
            raise
        if taken:
            self._locks.taken(self._name, self._far)
        return taken

    def abandon(self) -> None:
        """Stop waiting."""
        if self._near is not None and self._near_held:
            self._near_held = False
            self._near.release()

    def release(self) -> None:
        try:
            self._locks.given_back(self._name, self._far)
        finally:
            self.abandon()

    def owner(self) -> str:
        if self._near_held and self._far is not None:
            return self._far.owner()
        return self._near.owner() if self._near is not None else ""
