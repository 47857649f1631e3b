"""Several stores as one, nearest first: a folder of this machine before a bucket shared by the fleet.

What is found far away is verified and published into the nearer layers, once per machine. A layer that is sick costs at
most its deadline and is then left alone for a while; a layer that is read-only is only read. Which manifest counts is
decided by the farthest writable layer, because that is the one all hosts share.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from trt_warmcache import manifest as manifests
from trt_warmcache._fields import to_enum
from trt_warmcache._words import Word
from trt_warmcache.errors import ConfigError, IntegrityError, StoreError, StoreReason, UntrustedError
from trt_warmcache.events import EventKind, Events
from trt_warmcache.keys import Kind
from trt_warmcache.lease import DEFAULT_LEASE_SECONDS, Lease
from trt_warmcache.manifest import CHUNK_BYTES, BlobRef, Manifest
from trt_warmcache.stores._background import Background
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
from trt_warmcache.stores._tier import Layer, LayerCounters, Tier

__all__ = ["Layer", "LayerCounters", "LayeredStore", "WriteTo"]

log = logging.getLogger("trt_warmcache")

_T = TypeVar("_T")

#: Entries of these kinds grow and are replaced; a near copy may be old, so the far one is asked first.
_GROWING = frozenset({Kind.TIMING, Kind.RUNTIME})

#: Most seconds that listing a whole layer may take.
_LISTING_SECONDS = 600.0

#: Far manifests remembered until their blobs have been filled into nearer layers.
_REMEMBERED = 1024

#: Seconds between two looks while another process of this machine downloads the same blob.
_FILL_PAUSE = 0.02


class WriteTo(Word):
    """Which layers a finished entry is published to."""

    ALL = "all"
    """Every writable layer, before the call returns."""
    NEAREST = "nearest"
    """The nearest writable layer only."""
    BACKGROUND = "background"
    """The nearest writable layer at once, the others from a thread; :meth:`LayeredStore.close` waits for it."""


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
        self._tiers = tuple(Tier(layer, cooldown, clock, self._emit) for layer in made)
        self._lease_seconds = lease_seconds
        self._fill_seconds = fill_seconds
        self._clock = clock
        self._events = Events()
        self._guard = threading.Lock()
        self._far: OrderedDict[str, Manifest] = OrderedDict()
        self._barred: set[tuple[int, Kind, str]] = set()
        self._held: dict[str, tuple[int, Lease | None]] = {}
        self._leaseless_told = False
        self._background = Background(queue_size, flush_seconds, self._emit)
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

    def _writable(self) -> Sequence[Tier]:
        return [tier for tier in self._tiers if tier.writable]

    def _decider(self) -> Tier | None:
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

    def _first(self, ask: Callable[[Tier], _T | None]) -> _T | None:
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

    def _repeat(self, decider: Tier, act: Callable[[Store], Any], size: int) -> None:
        """What the deciding layer accepted, in the others too, as far as they can."""
        if self._write_to is WriteTo.NEAREST:
            return
        for tier in self._writable():
            if tier is not decider:
                with suppress(StoreError):  # counted by the tier; the deciding layer has it
                    tier.call(act, size)

    def _must_decide(self, name: str) -> Tier:
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

    def _remember(self, tier: Tier, manifest: Manifest) -> None:
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

    def _nearer(self, tier: Tier) -> Sequence[Tier]:
        """The layers in front of this one that take what it has."""
        return [other for other in self._tiers[: self._tiers.index(tier)] if other.writable and other.accepts(tier)]

    def fetch(self, ref: BlobRef, *, rehash: bool = False) -> Payload:
        damaged: dict[Tier, IntegrityError] = {}
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

    def _fill(self, ref: BlobRef, source: Tier, nearer: Sequence[Tier]) -> Payload:
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

    def _land(self, ref: BlobRef, source: Tier, keeper: Tier) -> tuple[Payload, bool]:
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

    def _wait_for_fill(self, ref: BlobRef, keeper: Tier, lock: Lock) -> tuple[Payload | None, bool]:
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
        tier: Tier,
        ref: BlobRef,
        payload: Payload,
        manifest: Manifest | None,
        source: Tier,
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

    def _adopts(self, tier: Tier, manifest: Manifest) -> bool:
        """Whether a layer has another manifest under the key, or none."""
        current = self._manifest_or_none(tier, manifest)
        return current is None or not _same(current, manifest)

    def _keep(self, tier: Tier, manifest: Manifest, payloads: Mapping[str, Any]) -> None:
        """Adopt an entry in a nearer layer, as far as that can be done."""
        try:
            self._adopt(tier, manifest, payloads)
        except (StoreError, IntegrityError, UntrustedError) as error:
            log.info("entry %s not kept in %s: %s", manifest.key[:12], tier.name, error.message)

    def _adopt(self, tier: Tier, manifest: Manifest, payloads: Mapping[str, Any]) -> None:
        """Make a manifest the one in force in a layer that does not decide."""
        current = self._manifest_or_none(tier, manifest)
        if current is None or not _same(current, manifest):
            tier.publish(manifest, payloads, replacing=current)

    def _manifest_or_none(self, tier: Tier, manifest: Manifest) -> Manifest | None:
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
        decider: Tier,
        others: Sequence[Tier],
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

    def _publish_far(self, manifest: Manifest, near: Tier, tiers: Sequence[Tier], decider: Tier) -> None:
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

    def _set_aside(self, tier: Tier, kind: Kind, digest: str, error: IntegrityError) -> None:
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

    def _note_damage(self, tier: Tier, ref: BlobRef, error: IntegrityError) -> None:
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

    def _leases(self, tier: Tier) -> bool:
        """Whether builders meet in this layer through lease objects that are kept from here."""
        able = tier.capabilities
        near = able.lock_scope in {LockScope.PROCESS, LockScope.HOST}
        return able.exclusive_create and (tier.layer.shared or not near)

    def _fleet_lock(self, decider: Tier, name: str) -> Lock | None:
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


class _SourceFailed(Exception):
    """Carries a download's failure past the layer that it should have landed in, which is not to blame."""

    def __init__(self, error: StoreError | IntegrityError) -> None:
        super().__init__(error.message)
        self.error = error


def _same(one: Manifest, other: Manifest) -> bool:
    """Whether two manifests say the same, signatures and packing aside."""
    bare = [msgspec.structs.replace(manifests.plain(manifest), signature={}) for manifest in (one, other)]
    return bare[0] == bare[1]


def _put_packed(store: Store, ref: BlobRef, data: Any) -> None:
    packed, stored = store.pack(ref, data)
    store.put_blob(packed, stored)
