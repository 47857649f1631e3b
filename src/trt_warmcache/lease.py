"""Leases: how builders on different hosts keep out of each other's way with nothing but an object store.

A lease is one small object that its holder rewrites at intervals. Whoever waits watches it: a lease whose content has
not changed for as long as it promised to, by the waiter's own monotonic clock, belongs to a dead holder. No two clocks
are ever compared. Everything rests on create-if-absent alone, so a lease is offered only for stores that have it.

A lease saves work, no more. A holder that was paused past its expiry and wakes up finds another's claim and finishes
as if it had none: the first manifest wins, and it never removes what is not its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from trt_warmcache.errors import ConfigError, StoreError

__all__ = ["DEFAULT_LEASE_SECONDS", "Lease", "LeaseStore", "lease_name"]

log = logging.getLogger("trt_warmcache")

#: How long a dead holder can block the others.
DEFAULT_LEASE_SECONDS = 30.0

_FORMAT = "trtwc-lease-1"
_MAX_BYTES = 4096

#: Longest pause between two looks at somebody else's lease; also the most by which a takeover is late.
_POLL_SECONDS = 0.5

#: A lease that claims to live longer than this is taken for one of the waiter's own length.
_LONGEST_SECONDS = 3600.0


class LeaseStore(Protocol):
    """The part of a store that leases need; ``create`` must let exactly one of any number of writers win."""

    url: str

    def read(self, name: str, *, limit: int) -> bytes | None:
        """An object's bytes, or None."""

    def write(self, name: str, data: Any) -> None:
        """Write an object whole."""

    def create(self, name: str, data: Any) -> bool:
        """Write an object if none exists; False if one does."""

    def swap(self, name: str, data: Any, *, expected: bytes) -> bool:
        """Replace an object if it still holds the expected bytes."""

    def delete(self, name: str) -> bool:
        """Delete an object."""


class _Record(msgspec.Struct, frozen=True):
    """What a lease object says."""

    format: str
    claim: str
    beat: int
    seconds: float
    owner: str


class Lease:
    """A lock that reaches across hosts. Not reentrant; one object stands for one taker.

    Args:
        store: Where the lease object lives.
        key: What is locked: the digest of an entry's key.
        seconds: How long the lease outlives its last heartbeat. The holder beats three times as often.
        on_lost: Told once, with a sentence, when a holder finds that its lease was taken over.
        clock: Monotonic seconds.

    Raises:
        ConfigError: `seconds` is not positive.
    """

    def __init__(
        self,
        store: LeaseStore,
        key: str,
        *,
        seconds: float = DEFAULT_LEASE_SECONDS,
        on_lost: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < seconds <= _LONGEST_SECONDS:
            raise ConfigError(f"A lease lasts more than 0 and at most {_LONGEST_SECONDS:g} s, not {seconds!r}.")
        self._store = store
        self._key = key
        self._name = lease_name(key)
        self._seconds = seconds
        self._on_lost = on_lost
        self._clock = clock
        self._claim = ""
        self._mine = b""
        self._beaten_at = 0.0
        self._holder_pid = 0
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # What was last seen of somebody else's lease, and since when it has not changed.
        self._seen: bytes | None = None
        self._seen_at = 0.0
        self._next_look = 0.0

    # ---- the lock protocol ------------------------------------------------------------------------------------

    def try_acquire(self) -> bool:
        """Take the lease if it is free or its holder is dead; never waits.

        May be called as often as one likes: the store is asked at most twice a second.

        Raises:
            StoreError: The store could not answer.
        """
        if self._mine:
            return False
        now = self._clock()
        if now < self._next_look:
            return False
        self._next_look = now + min(_POLL_SECONDS, self._seconds / 10)
        claim = secrets.token_hex(16)
        document = self._document(claim, 0)
        current = self._store.read(self._name, limit=_MAX_BYTES)
        if current is None:
            taken = self._create(self._name, document)
            if not taken:
                self._next_look = now  # somebody was quicker; see who at the next call
        else:
            taken = self._is_abandoned(current, now) and self._take_over(current, document)
        if taken:
            self._start(claim, document)
        return taken

    def release(self) -> None:
        """Give the lease back. Removes the lease object only while it is our own."""
        if not self._mine:
            return
        # After a fork the lease still belongs to the parent, whose thread keeps it alive.
        ours = self._holder_pid == os.getpid()
        if ours:
            self._stop.set()
            if self._thread is not None:
                self._thread.join(self._seconds)  # a beat may be stuck in a store that does not answer
        with self._guard:
            mine, self._mine, self._thread = self._mine, b"", None
        # Past its time, others may be taking it over this very moment; then it is left to them.
        if ours and self._clock() - self._beaten_at < self._seconds:
            try:
                if self._store.read(self._name, limit=_MAX_BYTES) == mine:
                    self._store.delete(self._name)
            except StoreError as error:
                log.warning("the lease %s in %s stays until it expires: %s", self._name, self._store.url, error.message)

    def owner(self) -> str:
        """Who holds it, as far as the last look told; "" if unknown."""
        record = _parse(self._seen)
        return record.owner if record is not None else ""

    # ---- for the holder ---------------------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Whether this object took the lease and has not noticed its loss."""
        return bool(self._mine)

    def verify(self) -> bool:
        """Ask the store whether the lease is still ours: the fence before publishing.

        Raises:
            StoreError: The store could not answer.
        """
        with self._guard:
            if not self._mine:
                return False
            record = _parse(self._store.read(self._name, limit=_MAX_BYTES))
            if record is not None and record.claim == self._claim:
                return True
        self._lost(record)
        return False

    # ---- taking -----------------------------------------------------------------------------------------------

    def _create(self, name: str, document: bytes) -> bool:
        if self._store.create(name, document):
            return True
        # A client library that repeats a request whose answer was lost is told "exists" about its own object.
        return self._store.read(name, limit=_MAX_BYTES) == document

    def _is_abandoned(self, current: bytes, now: float) -> bool:
        """Whether a lease has stood unchanged for as long as it promised to show life."""
        if current != self._seen:
            self._seen, self._seen_at = current, now
        expires = self._seen_at + self._lifetime(current)
        # Look again at the very moment of expiry, not up to one pause later.
        self._next_look = min(self._next_look, max(expires, now))
        return now >= expires

    def _lifetime(self, current: bytes) -> float:
        record = _parse(current)
        stated = record.seconds if record is not None else 0.0
        return stated if 0 < stated <= _LONGEST_SECONDS else self._seconds

    def _take_over(self, current: bytes, document: bytes) -> bool:
        """Step into a dead holder's place: exactly one of those who wait may.

        Who that is gets decided by creating a marker for this very state of the lease, since not every store can
        replace an object conditionally. A successor that dies before it has replaced the lease leaves the marker
        behind; after another lifetime the next marker is tried.
        """
        rounds = int((self._clock() - self._seen_at) / self._lifetime(current))
        state = hashlib.sha256(current).hexdigest()[:16]
        marker = f"leases/{self._key}.{state}-{rounds}.json"
        if not self._create(marker, document):
            return False
        if self._store.read(self._name, limit=_MAX_BYTES) == current:
            self._store.write(self._name, document)
            taken = True
        else:
            taken = False  # the holder was only slow, or gone and followed by another
        self._store.delete(marker)
        return taken

    def _document(self, claim: str, beat: int) -> bytes:
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        return msgspec.json.encode(_Record(_FORMAT, claim, beat, self._seconds, owner))

    # ---- holding ----------------------------------------------------------------------------------------------

    def _start(self, claim: str, document: bytes) -> None:
        self._claim, self._mine, self._beaten_at, self._holder_pid = claim, document, self._clock(), os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="trt_warmcache-lease", daemon=True)
        self._thread.start()

    def _keep_alive(self) -> None:
        beat, pause = 0, self._seconds / 3
        while not self._stop.wait(pause):
            beat += 1
            try:
                if not self._beat(beat):
                    return
                pause = self._seconds / 3
            except StoreError as error:
                # Trouble on the way is no loss yet; try again before the others run out of patience.
                pause = self._seconds / 10
                log.warning("heartbeat of lease %s in %s failed: %s", self._name, self._store.url, error.message)

    def _beat(self, beat: int) -> bool:
        document = self._document(self._claim, beat)
        with self._guard:
            if not self._mine:
                return False
            if self._store.swap(self._name, document, expected=self._mine):
                self._mine, self._beaten_at = document, self._clock()
                return True
            found = self._store.read(self._name, limit=_MAX_BYTES)
            record = _parse(found)
            if record is not None and record.claim == self._claim:
                # Our own write, whose answer was lost.
                self._mine, self._beaten_at = found or b"", self._clock()
                return True
        self._lost(record)
        return False

    def _lost(self, record: _Record | None) -> None:
        with self._guard:
            lost, self._mine = bool(self._mine), b""
        self._stop.set()
        if lost:
            who = record.owner if record is not None else "nobody"
            text = (
                f"The lease {self._name} in {self._store.url} was lost to {who}: this process showed no life for "
                f"{self._seconds:g} s. Work goes on; whoever publishes first wins."
            )
            if self._on_lost is not None:
                self._on_lost(text)
            else:
                log.warning("%s", text)


def lease_name(key: str) -> str:
    """Where the lease for a key lies, under the layout folder."""
    return f"leases/{key}.json"


def _parse(data: bytes | None) -> _Record | None:
    """A lease object's content, or None for one that is missing, damaged or of another release."""
    try:
        record = msgspec.json.decode(data or b"", type=_Record)
    except (msgspec.DecodeError, RecursionError):
        return None
    return record if record.format == _FORMAT else None
