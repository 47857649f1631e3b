"""Several stores as one, nearest first: a folder of this machine before a bucket shared by the fleet.

What is found far away is verified and published into the nearer layers, once per machine. A layer that is sick costs at
most its deadline and is then left alone for a while; a layer that is read-only is only read. Which manifest counts is
decided by the farthest writable layer, because that is the one all hosts share.
"""

from __future__ import annotations

import copy
import logging
import math
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import msgspec

from trt_warmcache import manifest as manifests
from trt_warmcache._fields import to_enum
from trt_warmcache.errors import ConfigError, IntegrityError, StoreError, StoreReason, UntrustedError
from trt_warmcache.events import EventKind, Events
from trt_warmcache.keys import Kind
from trt_warmcache.lease import DEFAULT_LEASE_SECONDS, Lease
from trt_warmcache.manifest import CHUNK_BYTES, BlobRef, Manifest
from trt_warmcache.stores._base import (
    Lock,
    LockScope,
    ObjectInfo,
    Payload,
    Store,
    StoreCapabilities,
    WritePiece,
    blob_name,
    missing,
)

__all__ = ["Layer", "LayerCounters", "LayeredStore", "WriteTo"]

log = logging.getLogger("trt_warmcache")

_T = TypeVar("_T")

#: Deadline for one small answer of a store that is neither memory nor a folder of this machine, in seconds.
_REMOTE_DEADLINE = 10.0

#: Entries of these kinds grow and are replaced; a near copy may be old, so the far one is asked first.
_GROWING = frozenset({Kind.TIMING, Kind.RUNTIME})

#: Most seconds that listing a whole layer may take.
_LISTING_SECONDS = 600.0

#: Failures in a row that open a layer's breaker. One timeout is enough: it has already cost the whole deadline.
_FAILURES_TO_OPEN = 3

#: Far manifests remembered until their blobs have been filled into nearer layers.
_REMEMBERED = 1024

#: Seconds between two looks while another process of this machine downloads the same blob.
_FILL_PAUSE = 0.02


class WriteTo(str, Enum):
    """Which layers a finished entry is published to."""

    ALL = "all"
    """Every writable layer, before the call returns."""
    NEAREST = "nearest"
    """The nearest writable layer only."""
    BACKGROUND = "background"
    """The nearest writable layer at once, the others from a thread; :meth:`LayeredStore.close` waits for it."""

    __str__ = str.__str__


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


class LayeredStore(Store):
    """Several stores as one.

    Args:
        layers: Nearest first. A bare :class:`Store` is a layer with default settings.
        write: See :class:`WriteTo`.
        lease_seconds: How long a builder that died on another machine can block this one.
        fill_seconds: Longest wait for another process's download of the same blob; after that it is downloaded here.
        cooldown: Seconds for which a layer that failed is left alone.
        queue_size: Publications that may wait in the background; when it is full, publishing waits.
        flush_seconds: Longest time :meth:`close` waits for background publications.
        clock: Monotonic seconds.

    Raises:
        ConfigError: No layers, or something that is no layer.
    """

    def __init__(
        self,
        layers: Sequence[Layer | Store],
        write: WriteTo = WriteTo.ALL,
        *,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        fill_seconds: float = 600.0,
        cooldown: float = 30.0,
        queue_size: int = 64,
        flush_seconds: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not layers:
            raise ConfigError("A layered store needs at least one layer.")
        made = [layer if isinstance(layer, Layer) else Layer(layer) for layer in layers]
        self._write_to = to_enum(WriteTo, write, "write")
        self._tiers = tuple(_Tier(layer, cooldown, clock, self._emit) for layer in made)
        self._lease_seconds = lease_seconds
        self._fill_seconds = fill_seconds
        self._clock = clock
        self._events = Events()
        self._guard = threading.Lock()
        self._far: OrderedDict[str, Manifest] = OrderedDict()
        self._barred: set[tuple[int, Kind, str]] = set()
        self._held: dict[str, tuple[int, Lease | None]] = {}
        self._leaseless_told = False
        self._background = _Background(queue_size, flush_seconds, self._emit)
        self.url = " > ".join(tier.name for tier in self._tiers)

    def bind(self, events: Events) -> None:
        """Send this store's events there."""
        self._events = events
        for tier in self._tiers:
            tier.store.bind(events)

    def view(self, wrap: Callable[[Store], Store]) -> LayeredStore:
        """The same layers, those that are not trusted seen through another store; counters stay shared."""
        seen = copy.copy(self)
        seen._tiers = tuple(tier if tier.layer.trusted else tier.wrapped(wrap) for tier in self._tiers)
        return seen

    def _emit(self, kind: EventKind, **detail: Any) -> None:
        self._events.emit(kind, **detail)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, nearest first."""
        return tuple(tier.layer for tier in self._tiers)

    def counters(self) -> tuple[LayerCounters, ...]:
        """What each layer did so far, nearest first."""
        return tuple(tier.counters() for tier in self._tiers)

    @property
    def capabilities(self) -> StoreCapabilities:
        writable, decider = self._writable(), self._decider()
        scope = LockScope.NONE
        if decider is not None:
            scope = max(tier.capabilities.lock_scope for tier in writable)
            if self._leases(decider):
                scope = LockScope.FLEET
        return StoreCapabilities(
            writable=bool(writable),
            deletable=any(tier.capabilities.deletable for tier in writable),
            listable=any(tier.capabilities.listable for tier in self._tiers),
            exclusive_create=decider is not None and decider.capabilities.exclusive_create,
            mappable=(writable or self._tiers)[0].capabilities.mappable,
            lock_scope=scope,
        )

    def _writable(self) -> Sequence[_Tier]:
        return [tier for tier in self._tiers if tier.writable]

    def _decider(self) -> _Tier | None:
        """The layer whose first manifest counts: the farthest that all writers share, or the only one written to."""
        writable = self._writable()
        if not writable:
            return None
        if self._write_to is WriteTo.NEAREST:
            return writable[0]
        return writable[-1]

    # ---- objects ----------------------------------------------------------------------------------------------

    def read(self, name: str, *, limit: int) -> bytes | None:
        return self._first(lambda tier: tier.call(lambda store: store.read(name, limit=limit)))

    def write(self, name: str, data: Any) -> None:
        self._everywhere(lambda store: store.write(name, data), len(data))

    def create(self, name: str, data: Any) -> bool:
        decider = self._must_decide(name)
        if not decider.call(lambda store: store.create(name, data), len(data)):
            return False
        self._repeat(decider, lambda store: store.write(name, data), len(data))
        return True

    def swap(self, name: str, data: Any, *, expected: bytes) -> bool:
        decider = self._must_decide(name)
        if not decider.call(lambda store: store.swap(name, data, expected=expected), len(data)):
            return False
        self._repeat(decider, lambda store: store.write(name, data), len(data))
        return True

    def delete(self, name: str) -> bool:
        return any(self._everywhere(lambda store: store.delete(name)))

    def put_blob(self, ref: BlobRef, data: Any) -> None:
        self._everywhere(lambda store: store.put_blob(ref, data), ref.size)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        seen: set[str] = set()
        for tier in self._tiers:
            if not tier.capabilities.listable:
                continue
            try:
                found = tier.call(lambda store: [*store.list(prefix)], seconds=_LISTING_SECONDS)
            except StoreError:
                if tier.layer.required or len(self._tiers) == 1:
                    raise
                continue
            for info in found:
                if info.name not in seen:
                    seen.add(info.name)
                    yield info

    def in_use(self, ref: BlobRef) -> bool:
        return any(tier.store.in_use(ref) for tier in self._writable())

    def temporaries(self) -> Iterator[ObjectInfo]:
        for tier in self._writable():
            yield from tier.call(lambda store: [*store.temporaries()], seconds=_LISTING_SECONDS)

    def _first(self, ask: Callable[[_Tier], _T | None]) -> _T | None:
        """The first answer that is not None. Failing layers are passed over, unless nobody answers at all."""
        answered, failure = False, None
        for tier in self._tiers:
            try:
                found = ask(tier)
            except StoreError as error:
                if tier.layer.required:
                    raise
                failure = failure or error
                continue
            answered = True
            if found is not None:
                return found
        if not answered and failure is not None:
            raise failure
        return None

    def _everywhere(self, act: Callable[[Store], _T], size: int = 0) -> Sequence[_T]:
        """Do something in every writable layer; an error only where no layer managed it."""
        results, failure = [], None
        for tier in self._writable():
            try:
                results.append(tier.call(act, size))
            except StoreError as error:
                if tier.layer.required:
                    raise
                failure = failure or error
        if not results:
            raise failure or self._read_only_error("write")
        return results

    def _repeat(self, decider: _Tier, act: Callable[[Store], Any], size: int) -> None:
        """What the deciding layer accepted, in the others too, as far as they can."""
        if self._write_to is WriteTo.NEAREST:
            return
        for tier in self._writable():
            if tier is not decider:
                with suppress(StoreError):  # counted by the tier; the deciding layer has it
                    tier.call(act, size)

    def _must_decide(self, name: str) -> _Tier:
        decider = self._decider()
        if decider is None:
            raise self._read_only_error(f"write {name}")
        return decider

    def _read_only_error(self, doing: str) -> StoreError:
        return StoreError(
            f"Could not {doing} in {self.url}: no layer is writable. Add a writable layer, such as a local folder, in front.",
            reason=StoreReason.DENIED,
            store=self.url,
        )

    # ---- entries: reading -------------------------------------------------------------------------------------

    def manifest(self, kind: Kind, digest: str) -> Manifest | None:
        failures: MutableSequence[StoreError | IntegrityError | UntrustedError] = []
        missed = False
        tiers = self._tiers if kind not in _GROWING else self._tiers[::-1]
        for tier in tiers:
            if (id(tier), kind, digest) in self._barred:
                continue
            try:
                found = tier.manifest(kind, digest)
            except StoreError as error:
                if tier.layer.required:
                    raise
                failures.append(error)
                continue
            except UntrustedError as error:
                failures.append(error)
                continue
            except IntegrityError as error:
                if error.reason != "format":
                    self._set_aside(tier, kind, digest, error)
                failures.append(error)
                continue
            if found is not None:
                self._remember(tier, found)
                return found
            missed = True
        # A layer that says "not here" beside one that says "I cannot tell" is a miss, and the failure is counted
        # with its own reason. Damage and distrust are never a miss.
        for failure in failures:
            if not (isinstance(failure, StoreError) and missed):
                raise failure
        return None

    def _remember(self, tier: _Tier, manifest: Manifest) -> None:
        """Keep a far manifest in mind until its blobs pass by on their way to nearer layers."""
        if not self._nearer(tier):
            return
        with self._guard:
            for ref in manifest.blobs:
                self._far[ref.hex] = manifest
                self._far.move_to_end(ref.hex)
            while len(self._far) > _REMEMBERED:
                self._far.popitem(last=False)

    def _recall(self, ref: BlobRef) -> Manifest | None:
        """The far manifest that waits for this blob; asked for once."""
        if not self._far:
            return None
        with self._guard:
            return self._far.pop(ref.hex, None)

    def _nearer(self, tier: _Tier) -> Sequence[_Tier]:
        """The layers in front of this one that take what it has."""
        return [other for other in self._tiers[: self._tiers.index(tier)] if other.writable and other.accepts(tier)]

    def fetch(self, ref: BlobRef, *, rehash: bool = False) -> Payload:
        damaged: dict[_Tier, IntegrityError] = {}
        failure: StoreError | None = None
        for tier in self._tiers:
            nearer = self._nearer(tier)
            try:
                payload = self._fill(ref, tier, nearer) if nearer else tier.fetch(ref, rehash=rehash)
            except IntegrityError as error:
                if error.reason != "missing-blob":
                    damaged[tier] = error
            except StoreError as error:
                if tier.layer.required:
                    raise
                failure = failure or error
            else:
                waiting = self._recall(ref)
                if waiting is not None and tier.writable and len(waiting.blobs) == 1:
                    self._keep(tier, waiting, {ref.role: payload.view})
                for where, damage in damaged.items():
                    self._note_damage(where, ref, damage)
                return payload
        if damaged:
            raise next(iter(damaged.values()))
        # A layer that did not answer may well have the bytes: its error is the truth, "missing" would be a guess.
        raise failure or missing(ref, self.url)

    def _fill(self, ref: BlobRef, source: _Tier, nearer: Sequence[_Tier]) -> Payload:
        """A blob from a far layer by way of the nearer ones: one download per machine, everybody maps the result."""
        # Of several nearer layers the one whose lock reaches farthest keeps the most processes from downloading too.
        keeper = max(nearer, key=lambda tier: tier.capabilities.lock_scope)
        lock = keeper.lock(f"fill-{ref.hex}")
        held = False
        try:
            if lock is not None:
                found, held = self._wait_for_fill(ref, keeper, lock)
                if found is not None:
                    self._recall(ref)
                    return found
            payload, landed = self._land(ref, source, keeper)
            manifest = self._recall(ref)
            for tier in reversed(nearer):
                self._put(tier, ref, payload, manifest, source, present=landed and tier is keeper)
            return payload
        finally:
            if lock is not None and held:
                lock.release()

    def _land(self, ref: BlobRef, source: _Tier, keeper: _Tier) -> tuple[Payload, bool]:
        """Download a blob straight into the layer that keeps it; and whether that layer has it now.

        A layer that cannot take it does not stand in the way of the download.
        """
        failure: StoreError | IntegrityError | None = None

        def fill(write: WritePiece) -> None:
            try:
                source.fetch_into(ref, write)
            except (StoreError, IntegrityError) as error:
                raise _SourceFailed(error) from error

        # A blob of several chunks without chunk digests can only be verified whole.
        if keeper.direct and (ref.chunks or ref.size <= CHUNK_BYTES):
            try:
                return keeper.call(lambda store: store.land_blob(ref, fill)), True
            except _SourceFailed as failed:
                failure = failed.error
            except StoreError as error:
                log.info("%s does not keep %s: %s", keeper.name, blob_name(ref), error.message)
        if failure is not None:
            raise failure
        return source.fetch(ref, rehash=False), False

    def _wait_for_fill(self, ref: BlobRef, keeper: _Tier, lock: Lock) -> tuple[Payload | None, bool]:
        """What the lock's holder has filled in meanwhile, or nothing; and whether the lock is held now."""
        started = self._clock()
        while True:
            try:
                taken = lock.try_acquire()
            except StoreError as error:
                log.debug("downloading without a lock: %s", error.message)
                return None, False
            try:
                return keeper.fetch(ref, rehash=False, counted=False), taken
            except (IntegrityError, StoreError):
                if taken:
                    return None, True
            except BaseException:
                if taken:
                    lock.release()
                raise
            if self._clock() - started > self._fill_seconds:
                who = lock.owner() or "another process"
                text = f"{who} did not finish downloading {blob_name(ref)} in time; it is downloaded here as well"
                self._emit(EventKind.WARNING, reason="slow-fill", text=text)
                return None, False
            time.sleep(_FILL_PAUSE)

    def _put(
        self,
        tier: _Tier,
        ref: BlobRef,
        payload: Payload,
        manifest: Manifest | None,
        source: _Tier,
        *,
        present: bool,
    ) -> None:
        """Fill a blob, unless it is there, and the entry that it belongs to into a nearer layer.

        A hit does not depend on it.
        """
        others: MutableSequence[Payload] = []
        try:
            if manifest is None or not self._adopts(tier, manifest):
                if not present:
                    tier.call(lambda store: _put_packed(store, ref, payload.view), ref.size)
            else:
                payloads = {} if present else {ref.role: payload.view}
                for other in manifest.blobs:
                    if other.role != ref.role:
                        others.append(source.fetch(other, rehash=False))
                        payloads[other.role] = others[-1].view
                self._adopt(tier, manifests.plain(manifest), payloads)
            tier.count(backfills=1, bytes_written=ref.size)
        except (StoreError, IntegrityError, UntrustedError) as error:
            log.info("%s not kept in %s: %s", blob_name(ref), tier.name, error.message)
        finally:
            for one in others:
                one.close()

    def _adopts(self, tier: _Tier, manifest: Manifest) -> bool:
        """Whether a layer has another manifest under the key, or none."""
        current = self._manifest_or_none(tier, manifest)
        return current is None or not _same(current, manifest)

    def _keep(self, tier: _Tier, manifest: Manifest, payloads: Mapping[str, Any]) -> None:
        """Adopt an entry in a nearer layer, as far as that can be done."""
        try:
            self._adopt(tier, manifest, payloads)
        except (StoreError, IntegrityError, UntrustedError) as error:
            log.info("entry %s not kept in %s: %s", manifest.key[:12], tier.name, error.message)

    def _adopt(self, tier: _Tier, manifest: Manifest, payloads: Mapping[str, Any]) -> None:
        """Make a manifest the one in force in a layer that does not decide."""
        current = self._manifest_or_none(tier, manifest)
        if current is None or not _same(current, manifest):
            tier.publish(manifest, payloads, replacing=current)

    def _manifest_or_none(self, tier: _Tier, manifest: Manifest) -> Manifest | None:
        kind = Kind(manifest.kind)
        try:
            return tier.manifest(kind, manifest.key, counted=False)
        except IntegrityError as error:
            if error.reason == "format":
                raise
            damage = error
        tier.call(lambda store: store.quarantine(kind, manifest.key, damage))
        return None

    # ---- entries: writing -------------------------------------------------------------------------------------

    def publish(
        self, manifest: Manifest, payloads: Mapping[str, Any], *, replacing: Manifest | None = None
    ) -> Manifest:
        writable, decider = self._writable(), self._decider()
        if decider is None:
            raise self._read_only_error(f"publish {manifest.key[:12]}")
        self._check_fence(manifest)
        if self._write_to is WriteTo.BACKGROUND and writable[0] is not decider and replacing is None:
            near = writable[0]
            published = near.publish(manifest, payloads)
            self._background.submit(manifest.key, lambda: self._publish_far(published, near, writable[1:], decider))
            return published
        others = [] if self._write_to is WriteTo.NEAREST else [tier for tier in writable if tier is not decider]
        return self._publish_all(manifest, payloads, decider, others, replacing)

    def _publish_all(
        self,
        manifest: Manifest,
        payloads: Mapping[str, Any],
        decider: _Tier,
        others: Sequence[_Tier],
        replacing: Manifest | None,
    ) -> Manifest:
        """Publish where the decision falls, then everywhere else what was decided."""
        failure: StoreError | None = None
        try:
            winner = decider.publish(manifest, payloads, replacing=replacing)
            decider.count(bytes_written=manifest.size)
            decided = True
        except StoreError as error:
            if decider.layer.required or not others:
                raise
            winner, decided, failure = manifest, False, error
        if not _same(winner, manifest):
            self._remember(decider, winner)  # nearer layers take it when its blobs are fetched
            return winner
        kept = decided
        for tier in reversed(others):
            try:
                if decided:
                    self._adopt(tier, manifest, payloads)
                    tier.count(bytes_written=manifest.size)
                else:
                    # Cut off from the layer that decides: the nearest reachable one does, for this machine.
                    winner = tier.publish(winner, payloads, replacing=replacing)
                    if not _same(winner, manifest):
                        return winner
                kept = True
            except StoreError as error:
                if tier.layer.required:
                    raise
                failure = failure or error
            except (IntegrityError, UntrustedError) as error:
                log.warning("not published into %s: %s", tier.name, error.message)
        if not kept and failure is not None:
            raise failure
        return manifest

    def _publish_far(self, manifest: Manifest, near: _Tier, tiers: Sequence[_Tier], decider: _Tier) -> None:
        fetched = {ref.role: near.fetch(ref, rehash=False) for ref in manifest.blobs}
        try:
            payloads = {role: payload.view for role, payload in fetched.items()}
            others = [tier for tier in tiers if tier is not decider]
            winner = self._publish_all(manifest, payloads, decider, others, None)
        finally:
            for payload in fetched.values():
                payload.close()
        if not _same(winner, manifest) and near.accepts(decider):
            fetched = {ref.role: decider.fetch(ref, rehash=False) for ref in winner.blobs}
            try:
                self._adopt(near, winner, {role: payload.view for role, payload in fetched.items()})
            finally:
                for payload in fetched.values():
                    payload.close()

    def _check_fence(self, manifest: Manifest) -> None:
        """Notice a lost lease before publishing. Publishing goes on: create-if-absent is what keeps the winner safe."""
        with self._guard:
            _, lease = self._held.get(manifest.key, (0, None))
        if lease is not None:
            with suppress(StoreError):  # the publication itself will meet the same trouble and report it
                lease.verify()

    def entries_removed(self, kind: Kind, digest: str) -> None:
        """Forget what was remembered of an entry."""
        with self._guard:
            for hex_digest in [name for name, kept in self._far.items() if kept.key == digest and kept.kind == kind]:
                del self._far[hex_digest]

    def remove(self, kind: Kind, digest: str) -> bool:
        self.entries_removed(kind, digest)
        return any(self._everywhere(lambda store: store.remove(kind, digest)))

    # ---- damage -----------------------------------------------------------------------------------------------

    def quarantine(self, kind: Kind, digest: str, error: IntegrityError) -> None:
        self.entries_removed(kind, digest)
        # Bytes that match their digest and are refused all the same are refused wherever they lie.
        refused = error.reason in {"header", "rejected"}
        denied: StoreError | None = None
        done = False
        for tier in self._tiers:
            found: IntegrityError | None
            try:
                found = error if refused else tier.damage(kind, digest)
                if found is None:
                    continue
                if tier.writable:
                    tier.call(lambda store, found=found: store.quarantine(kind, digest, found))  # type: ignore[misc]
                    done = True
                    continue
            except StoreError as failure:
                denied = failure
            except UntrustedError:
                continue
            # It stays where it is, and this process does not look at it again.
            self._barred.add((id(tier), kind, digest))
        if denied is not None and not done:
            raise denied

    def _set_aside(self, tier: _Tier, kind: Kind, digest: str, error: IntegrityError) -> None:
        """Quarantine a damaged entry of one layer, unless somebody is at work on it or has repaired it already."""
        self._emit(EventKind.QUARANTINED, key=digest, reason=error.reason, layer=tier.name, text=error.message)
        if not tier.writable:
            return
        lock = None if self._holds(digest) else tier.lock(digest)
        try:
            if lock is not None and not lock.try_acquire():
                return
            try:
                found = tier.damage(kind, digest)
                if found is not None:
                    tier.call(lambda store: store.quarantine(kind, digest, found))
            finally:
                if lock is not None:
                    lock.release()
        except (StoreError, UntrustedError) as failure:
            log.warning("%s keeps a damaged entry: %s", tier.name, failure.message)

    def _note_damage(self, tier: _Tier, ref: BlobRef, error: IntegrityError) -> None:
        """Tell of a damaged blob that a farther layer has just made good."""
        self._emit(EventKind.QUARANTINED, reason=error.reason, layer=tier.name, text=error.message)
        if tier.writable:
            note = f"{error.reason}: {error.message}\n".encode()
            with suppress(StoreError):  # the note is for people; what counts is repaired
                tier.call(lambda store: store.write(f"quarantine/blobs-{ref.hex}.reason", note))

    def _holds(self, digest: str) -> bool:
        with self._guard:
            return self._held.get(digest, (0, None))[0] == threading.get_ident()

    # ---- locking ----------------------------------------------------------------------------------------------

    def lock(self, name: str) -> Lock | None:
        """The nearest layer's lock and then the deciding layer's: one process per machine asks the fleet."""
        decider = self._decider()
        if decider is None:
            return None
        nearer = [tier for tier in self._writable() if tier is not decider and not tier.layer.shared]
        near_tier = max(nearer, key=lambda tier: tier.capabilities.lock_scope, default=None)
        near = None if near_tier is None else near_tier.lock(name)
        far = self._fleet_lock(decider, name)
        return None if near is None and far is None else _LayeredLock(self, name, near, far)

    def _leases(self, tier: _Tier) -> bool:
        """Whether builders meet in this layer through lease objects that are kept from here."""
        able = tier.capabilities
        near = able.lock_scope in {LockScope.PROCESS, LockScope.HOST}
        return able.exclusive_create and (tier.layer.shared or not near)

    def _fleet_lock(self, decider: _Tier, name: str) -> Lock | None:
        if self._leases(decider):
            return Lease(decider.guarded(), name, seconds=self._lease_seconds, on_lost=self._lease_lost)
        lock = None if decider.layer.shared else decider.lock(name)
        if lock is None and not self._leaseless_told and not decider.left_alone:
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

    def _locked(self, name: str, lease: Lock | None) -> None:
        with self._guard:
            self._held[name] = (threading.get_ident(), lease if isinstance(lease, Lease) else None)

    def _unlocked(self, name: str) -> None:
        with self._guard:
            self._held.pop(name, None)

    # ---- the end ----------------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Wait for background publications; False if some did not make it within ``flush_seconds``."""
        return self._background.flush()

    def close(self) -> None:
        self._background.close()
        for tier in self._tiers:
            tier.store.close()


class _LayeredLock:
    """First the machine's lock, then the fleet's."""

    def __init__(self, store: LayeredStore, name: str, near: Lock | None, far: Lock | None) -> None:
        self._store = store
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
            self._store._locked(self._name, self._far)
        return taken

    def abandon(self) -> None:
        """Stop waiting."""
        if self._near is not None and self._near_held:
            self._near_held = False
            self._near.release()

    def release(self) -> None:
        self._store._unlocked(self._name)
        try:
            if self._far is not None:
                # While a publication is on its way, the other machines had better wait for it.
                far = self._far
                if not self._store._background.submit_after(self._name, far.release):
                    far.release()
        finally:
            self.abandon()

    def owner(self) -> str:
        if self._near_held and self._far is not None:
            return self._far.owner()
        return self._near.owner() if self._near is not None else ""


#: Of a layer that does not answer: it is tried, so that its own failure is told, and nothing is built on its promises.
_UNKNOWN = StoreCapabilities()


class _SourceFailed(Exception):
    """Carries a download's failure past the layer that it should have landed in, which is not to blame."""

    def __init__(self, error: StoreError | IntegrityError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass
class _Record:
    """What is known of a layer's behaviour, shared by all views of it."""

    guard: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    failures: int = 0
    closed_until: float = -math.inf


class _Tier:
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

    def accepts(self, source: _Tier) -> bool:
        """Whether entries of another layer may be copied here: trust is never gained by copying."""
        return not self.layer.trusted or source.layer.trusted or source.store.verifies

    def wrapped(self, wrap: Callable[[Store], Store]) -> _Tier:
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

    @property
    def left_alone(self) -> bool:
        """Whether the breaker is open."""
        return self._clock() < self._record.closed_until

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
        return self.store.lock(name) if self.writable else None

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

    def __init__(self, tier: _Tier) -> None:
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


class _Background:
    """Publications on their way, in order, from one thread."""

    def __init__(self, size: int, flush_seconds: float, emit: Callable[..., None]) -> None:
        self._tasks: queue.Queue[tuple[str, Callable[[], None]] | None] = queue.Queue(size)
        self._flush_seconds = flush_seconds
        self._emit = emit
        self._guard = threading.Lock()
        self._pending: Counter[str] = Counter()
        self._idle = threading.Condition(self._guard)
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, key: str, act: Callable[[], None]) -> None:
        """Do it later; waits while the queue is full. After closing it is done at once."""
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
            except (StoreError, IntegrityError, UntrustedError) as error:
                self._emit(EventKind.PUBLISH_FAILED, key=key, reason="background", text=error.message)
            finally:
                with self._guard:
                    self._pending[key] -= 1
                    if not self._pending[key]:
                        del self._pending[key]
                    self._idle.notify_all()

    def flush(self) -> bool:
        """Wait until nothing is pending, or too long."""
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


def _same(one: Manifest, other: Manifest) -> bool:
    """Whether two manifests say the same, signatures and packing aside."""
    bare = [msgspec.structs.replace(manifests.plain(manifest), signature={}) for manifest in (one, other)]
    return bare[0] == bare[1]


def _put_packed(store: Store, ref: BlobRef, data: Any) -> None:
    packed, stored = store.pack(ref, data)
    store.put_blob(packed, stored)
