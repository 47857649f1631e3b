"""Several stores as one, nearest first: a folder of this machine before a bucket shared by the fleet.

What is found far away is verified and published into the nearer layers, once per machine. A layer that is sick costs at
most its deadline and is then left alone for a while; a layer that is read-only is only read. Which manifest counts is
decided by the farthest writable layer, because that is the one all hosts share.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from trt_warmcache._fields import to_enum
from trt_warmcache._words import Word
from trt_warmcache.errors import ConfigError, IntegrityError, StoreError, StoreReason, UntrustedError
from trt_warmcache.events import EventKind, Events
from trt_warmcache.keys import Kind
from trt_warmcache.lease import DEFAULT_LEASE_SECONDS
from trt_warmcache.manifest import BlobRef, Manifest
from trt_warmcache.stores._background import Background
from trt_warmcache.stores._base import (
    Lock,
    LockScope,
    ObjectInfo,
    Payload,
    Store,
    StoreCapabilities,
    missing,
)
from trt_warmcache.stores._fill import Filler, adopt, keep, says_the_same
from trt_warmcache.stores._layered_lock import LayeredLocks, leases
from trt_warmcache.stores._tier import Layer, LayerCounters, Tier

__all__ = ["Layer", "LayerCounters", "LayeredStore", "WriteTo"]

log = logging.getLogger("trt_warmcache")

_T = TypeVar("_T")

#: Entries of these kinds grow and are replaced; a near copy may be old, so the far one is asked first.
_GROWING = frozenset({Kind.TIMING, Kind.RUNTIME})

#: Most seconds that listing a whole layer may take.
_LISTING_SECONDS = 600.0


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
        self._events = Events()
        self._barred: set[tuple[int, Kind, str]] = set()
        self._filler = Filler(fill_seconds, clock, self._emit)
        self._background = Background(queue_size, flush_seconds, self._emit)
        self._locks = LayeredLocks(lease_seconds, self._background, self._emit)
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
            if leases(decider):
                scope = LockScope.FLEET
        return StoreCapabilities(
            writable=bool(writable),
            deletable=any(tier.capabilities.deletable for tier in writable),
            listable=any(tier.capabilities.listable for tier in self._tiers),
            exclusive_create=decider is not None and decider.capabilities.exclusive_create,
            mappable=(writable or self._tiers)[0].capabilities.mappable,
            lock_scope=scope,
            known=all(tier.capabilities.known for tier in writable),
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

    def nearby(self) -> Iterator[Store]:
        for tier in self._tiers:
            if tier.direct:
                yield from tier.store.nearby()

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
        if self._nearer(tier):
            self._filler.remember(manifest)

    def _nearer(self, tier: Tier) -> Sequence[Tier]:
        """The layers in front of this one that take what it has."""
        return [other for other in self._tiers[: self._tiers.index(tier)] if other.writable and other.accepts(tier)]

    def fetch(self, ref: BlobRef, *, rehash: bool = False) -> Payload:
        damaged: dict[Tier, IntegrityError] = {}
        failure: StoreError | None = None
        for tier in self._tiers:
            nearer = self._nearer(tier)
            try:
                payload = self._filler.fill(ref, tier, nearer) if nearer else tier.fetch(ref, rehash=rehash)
            except IntegrityError as error:
                if error.reason != "missing-blob":
                    damaged[tier] = error
            except StoreError as error:
                if tier.layer.required:
                    raise
                failure = failure or error
            else:
                waiting = self._filler.recall(ref)
                if waiting is not None and tier.writable and len(waiting.blobs) == 1:
                    keep(tier, waiting, {ref.role: payload.view})
                for where, damage in damaged.items():
                    self._note_damage(where, ref, damage)
                return payload
        if damaged:
            raise next(iter(damaged.values()))
        # A layer that did not answer may well have the bytes: its error is the truth, "missing" would be a guess.
        raise failure or missing(ref, self.url)

    # ---- entries: writing -------------------------------------------------------------------------------------

    def publish(
        self, manifest: Manifest, payloads: Mapping[str, Any], *, replacing: Manifest | None = None
    ) -> Manifest:
        writable, decider = self._writable(), self._decider()
        if decider is None:
            raise self._read_only_error(f"publish {manifest.key[:12]}")
        self._locks.check_fence(manifest.key)
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
        if not says_the_same(winner, manifest):
            self._remember(decider, winner)  # nearer layers take it when its blobs are fetched
            return winner
        kept = decided
        for tier in reversed(others):
            try:
                if decided:
                    adopt(tier, manifest, payloads)
                    tier.count(bytes_written=manifest.size)
                else:
                    # Cut off from the layer that decides: the nearest reachable one does, for this machine.
                    winner = tier.publish(winner, payloads, replacing=replacing)
                    if not says_the_same(winner, manifest):
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
        if not says_the_same(winner, manifest) and near.accepts(decider):
            fetched = {ref.role: decider.fetch(ref, rehash=False) for ref in winner.blobs}
            try:
                adopt(near, winner, {role: payload.view for role, payload in fetched.items()})
            finally:
                for payload in fetched.values():
                    payload.close()

    def remove(self, kind: Kind, digest: str) -> bool:
        self._filler.forget(kind, digest)
        return any(self._everywhere(lambda store: store.remove(kind, digest)))

    # ---- damage -----------------------------------------------------------------------------------------------

    def quarantine(self, kind: Kind, digest: str, error: IntegrityError) -> None:
        self._filler.forget(kind, digest)
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
        lock = None if self._locks.holds(digest) else tier.lock(digest)
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

    # ---- locking ----------------------------------------------------------------------------------------------

    def lock(self, name: str) -> Lock | None:
        """The nearest layer's lock and then the deciding layer's: one process per machine asks the fleet."""
        decider = self._decider()
        return None if decider is None else self._locks.lock(name, self._writable(), decider)

    # ---- the end ----------------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Wait for background publications; False if some did not make it within ``flush_seconds``."""
        return self._background.flush()

    def close(self) -> None:
        self._background.close()
        for tier in self._tiers:
            tier.store.close()
