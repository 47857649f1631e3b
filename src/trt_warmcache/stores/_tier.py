"""A layer of a layered store at work: bounded, counted, and left alone while it is sick."""

from __future__ import annotations

import copy
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trt_warmcache.errors import ConfigError, IntegrityError, StoreError, StoreReason, UntrustedError
from trt_warmcache.events import EventKind
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import BlobRef, Manifest
from trt_warmcache.stores._base import Lock, Payload, Store, StoreCapabilities, WritePiece

__all__ = ["Layer", "LayerCounters", "Tier"]

_T = TypeVar("_T")

#: Deadline for one small answer of a store that is neither memory nor a folder of this machine, in seconds.
_REMOTE_DEADLINE = 10.0

#: Failures in a row that open a layer's breaker. One timeout is enough: it has already cost the whole deadline.
_FAILURES_TO_OPEN = 3

#: Of a layer that does not answer: it is tried, so that its own failure is told, and nothing is built on its promises.
_UNKNOWN = StoreCapabilities(known=False)


@dataclass(frozen=True)
class Layer:
    """One store of several.

    Attributes:
        store: The store.
        read_only: Never write here, whatever the store can do.
        trusted: Entries here need no signature, because only trusted processes can write here. Such a layer takes
            nothing from an untrusted layer unless its signature was verified.
        required: A failure here is raised, instead of being counted and passed over.
        shared: Other machines write here too, though it looks like a folder of this one; builders then use a lease.
        deadline: Seconds allowed for one small answer; None: 10 for a store behind a network, no limit for others.
        least_rate: Bytes per second that a payload must at least arrive at; with `deadline` it bounds a transfer.
        name: For counters and logs; the store's URL if left out.
    """

    store: Store
    read_only: bool = False
    trusted: bool = False
    required: bool = False
    shared: bool = False
    deadline: float | None = None
    least_rate: float = 10e6
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.store, Store):
            raise ConfigError(
                f"A layer is made of a Store, not {self.store!r}; open_store() makes one from a path or URL."
            )
        if self.deadline is not None and not self.deadline > 0:
            raise ConfigError(f"Layer.deadline must be a positive number of seconds, not {self.deadline!r}.")
        if not self.least_rate > 0:
            raise ConfigError(
                f"Layer.least_rate must be a positive number of bytes per second, not {self.least_rate!r}."
            )


@dataclass(frozen=True)
class LayerCounters:
    """What one layer did so far.

    Attributes:
        name: The layer.
        hits: Manifests found.
        misses: Manifests asked for and not there.
        errors: Failed calls by reason: ``denied``, ``timeout``, ``full``, ``unavailable``, ``damaged``, ``untrusted``.
        skipped: Calls not made because the layer's breaker was open.
        backfills: Blobs filled in from a farther layer.
        bytes_read: Payload bytes read.
        bytes_written: Payload bytes written.
        seconds: Time spent in calls.
        calls: Calls made.
    """

    name: str
    hits: int
    misses: int
    errors: Mapping[str, int]
    skipped: int
    backfills: int
    bytes_read: int
    bytes_written: int
    seconds: float
    calls: int


@dataclass
class _Record:
    """What is known of a layer's behaviour, shared by all views of it."""

    guard: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    failures: int = 0
    closed_until: float = -math.inf


class Tier:
    """A layer at work: every call is timed, counted, bounded, and held back while the layer is sick."""

    def __init__(self, layer: Layer, cooldown: float, clock: Callable[[], float], emit: Callable[..., None]) -> None:
        self.layer = layer
        self.store = layer.store
        self.name = layer.name or layer.store.url
        self._cooldown = cooldown
        self._clock = clock
        self._emit = emit
        self._record = _Record()
        self.deadline = layer.deadline or (math.inf if layer.store.local else _REMOTE_DEADLINE)
        self.direct = math.isinf(self.deadline)

    @property
    def capabilities(self) -> StoreCapabilities:
        """What the store can do, as far as it answers; to find out, it may have to ask its server."""
        if self.direct:
            return self.store.capabilities
        try:
            return self.call(lambda store: store.capabilities)
        except StoreError:
            return _UNKNOWN

    @property
    def writable(self) -> bool:
        """Whether this layer is written to."""
        return not self.layer.read_only and self.capabilities.writable

    def accepts(self, source: Tier) -> bool:
        """Whether entries of another layer may be copied here: trust is never gained by copying."""
        return not self.layer.trusted or source.layer.trusted or source.store.verifies

    def wrapped(self, wrap: Callable[[Store], Store]) -> Tier:
        """The same layer seen through another store."""
        view = copy.copy(self)
        view.store = wrap(self.store)
        return view

    def counters(self) -> LayerCounters:
        """A snapshot."""
        record = self._record
        with record.guard:
            count = record.counts
            return LayerCounters(
                self.name, count["hits"], count["misses"], dict(record.errors), count["skipped"], count["backfills"],
                count["bytes_read"], count["bytes_written"], record.seconds, count["calls"],
            )  # fmt: skip

    def count(self, **counts: int) -> None:
        """Add to counters."""
        with self._record.guard:
            self._record.counts.update(counts)

    # ---- typed calls ------------------------------------------------------------------------------------------

    def manifest(self, kind: Kind, digest: str, *, counted: bool = True) -> Manifest | None:
        found = self.call(lambda store: store.manifest(kind, digest))
        if counted:
            self.count(**{"misses" if found is None else "hits": 1})
        return found

    def fetch(self, ref: BlobRef, *, rehash: bool, counted: bool = True) -> Payload:
        payload = self.call(lambda store: store.fetch(ref, rehash=rehash), ref.size, counted=counted)
        self.count(bytes_read=ref.size)
        return payload

    def fetch_into(self, ref: BlobRef, write: WritePiece) -> None:
        self.call(lambda store: store.fetch_into(ref, write), ref.size)
        self.count(bytes_read=ref.size)

    def publish(
        self, manifest: Manifest, payloads: Mapping[str, Any], *, replacing: Manifest | None = None
    ) -> Manifest:
        return self.call(lambda store: store.publish(manifest, payloads, replacing=replacing), manifest.size)

    def lock(self, name: str) -> Lock | None:
        if not self.writable:
            return None
        try:
            return self.call(lambda store: store.lock(name))
        except StoreError:
            return None  # counted and told; locks only save work

    def damage(self, kind: Kind, digest: str) -> IntegrityError | None:
        """What is wrong with an entry here; None if it is whole or not there."""
        try:
            found = self.manifest(kind, digest, counted=False)
            for ref in found.blobs if found is not None else ():
                self.fetch(ref, rehash=True, counted=False).close()
        except IntegrityError as error:
            return error
        return None

    def guarded(self) -> _Guarded:
        """The store's primitives under this tier's deadline and breaker."""
        return _Guarded(self)

    # ---- every call -------------------------------------------------------------------------------------------

    def call(self, act: Callable[[Store], _T], size: int = 0, *, counted: bool = True, seconds: float = 0.0) -> _T:
        """Call the store.

        Args:
            act: The call.
            size: Payload bytes that it moves.
            counted: Whether damage counts as an error of this layer.
            seconds: Time allowed beyond what deadline and size give.

        Raises:
            StoreError: What the store raised; or the deadline passed; or the layer is being left alone.
        """
        self._admit()
        started = self._clock()
        try:
            if self.direct:
                result = act(self.store)
            else:
                limit = self.deadline + seconds + size / self.layer.least_rate
                result = _bounded(lambda: act(self.store), limit, self.name)
        except StoreError as error:
            self._failed(error)
            raise
        except (IntegrityError, UntrustedError) as error:
            self._record.failures = 0
            # A blob that is not here yet is how every far hit begins.
            if counted and getattr(error, "reason", "") != "missing-blob":
                with self._record.guard:
                    self._record.errors["damaged" if isinstance(error, IntegrityError) else "untrusted"] += 1
            raise
        finally:
            with self._record.guard:
                self._record.counts["calls"] += 1
                self._record.seconds += self._clock() - started
        self._record.failures = 0
        return result

    def _admit(self) -> None:
        record, now = self._record, self._clock()
        if now >= record.closed_until:
            return
        self.count(skipped=1)
        raise StoreError(
            f"{self.name} failed a moment ago and is left alone for another {record.closed_until - now:.0f} s.",
            reason=StoreReason.UNAVAILABLE,
            store=self.name,
        )

    def _failed(self, error: StoreError) -> None:
        record, opens = self._record, False
        with record.guard:
            record.errors[error.reason.value] += 1
            # "Denied" and "full" are answers, and quick ones: there is nothing to be spared.
            if error.reason in {StoreReason.TIMEOUT, StoreReason.UNAVAILABLE} and not self.direct:
                record.failures += 1
                opens = error.reason is StoreReason.TIMEOUT or record.failures >= _FAILURES_TO_OPEN
            if opens:
                record.closed_until = self._clock() + self._cooldown
                record.failures = _FAILURES_TO_OPEN - 1  # the first call after the pause is the test
        self._emit(
            EventKind.LAYER_DOWN if opens else EventKind.STORE_ERROR,
            reason=error.reason.value,
            layer=self.name,
            text=f"{error.message} It is left alone for {self._cooldown:g} s." if opens else error.message,
        )


class _Guarded:
    """What a lease needs of a store, under a layer's deadline."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.url = tier.name

    def read(self, name: str, *, limit: int) -> bytes | None:
        return self._tier.call(lambda store: store.read(name, limit=limit))

    def write(self, name: str, data: Any) -> None:
        self._tier.call(lambda store: store.write(name, data))

    def create(self, name: str, data: Any) -> bool:
        return self._tier.call(lambda store: store.create(name, data))

    def swap(self, name: str, data: Any, *, expected: bytes) -> bool:
        return self._tier.call(lambda store: store.swap(name, data, expected=expected))

    def delete(self, name: str) -> bool:
        return self._tier.call(lambda store: store.delete(name))


class _Bounded:
    """A call in a thread of its own, so that the caller can stop waiting for it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._guard = threading.Lock()
        self._left = False
        self.result: Future[Any] = Future()

    def run(self) -> None:
        try:
            value = self._work()
        except BaseException as error:  # noqa: BLE001  carried to the thread that waits
            self.result.set_exception(error)
            return
        with self._guard:
            if not self._left:
                self.result.set_result(value)
                return
        if isinstance(value, Payload):
            value.close()  # nobody is there to take it any more

    def leave(self) -> bool:
        """Stop waiting; False if the result has come at the last moment."""
        with self._guard:
            self._left = not self.result.done()
            return self._left


def _bounded(work: Callable[[], _T], seconds: float, name: str) -> _T:
    """Do the work, but wait at most so many seconds for it; a thread that is stuck is left behind.

    Raises:
        StoreError: Reason ``timeout``: it took longer.
    """
    call = _Bounded(work)
    threading.Thread(target=call.run, name="trt_warmcache-call", daemon=True).start()
    try:
        return call.result.result(seconds)  # type: ignore[no-any-return]
    except FutureTimeoutError as error:
        if not call.leave():
            return call.result.result()  # type: ignore[no-any-return]
        raise StoreError(
            f"{name} did not answer within {seconds:.1f} s.", reason=StoreReason.TIMEOUT, store=name
        ) from error
