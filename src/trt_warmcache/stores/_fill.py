"""What was found far away, on its way into the nearer layers of its machine: downloaded once, mapped by everybody."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import Any

import msgspec

from trt_warmcache import manifest as manifests
from trt_warmcache.errors import IntegrityError, StoreError, UntrustedError
from trt_warmcache.events import EventKind
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import CHUNK_BYTES, BlobRef, Manifest
from trt_warmcache.stores._base import Lock, Payload, Store, WritePiece, blob_name
from trt_warmcache.stores._tier import Tier

__all__ = ["Filler", "adopt", "keep", "says_the_same"]

log = logging.getLogger("trt_warmcache")

#: Far manifests remembered until their blobs have been filled into nearer layers.
_REMEMBERED = 1024

#: Seconds between two looks while another process of this machine downloads the same blob.
_FILL_PAUSE = 0.02


class Filler:
    """Brings far entries near.

    Args:
        seconds: Longest wait for another process's download of the same blob; after that it is downloaded here.
        clock: Monotonic seconds.
        emit: Takes events.
    """

    def __init__(self, seconds: float, clock: Callable[[], float], emit: Callable[..., None]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._emit = emit
        self._guard = threading.Lock()
        self._far: OrderedDict[str, Manifest] = OrderedDict()

    # ---- far manifests ----------------------------------------------------------------------------------------

    def remember(self, manifest: Manifest) -> None:
        """Keep a far manifest in mind until its blobs pass by on their way to nearer layers."""
        with self._guard:
            for ref in manifest.blobs:
                self._far[ref.hex] = manifest
                self._far.move_to_end(ref.hex)
            while len(self._far) > _REMEMBERED:
                self._far.popitem(last=False)

    def recall(self, ref: BlobRef) -> Manifest | None:
        """The far manifest that waits for this blob; asked for once."""
        if not self._far:
            return None
        with self._guard:
            return self._far.pop(ref.hex, None)

    def forget(self, kind: Kind, digest: str) -> None:
        """Forget what was remembered of an entry."""
        with self._guard:
            for hex_digest in [name for name, kept in self._far.items() if kept.key == digest and kept.kind == kind]:
                del self._far[hex_digest]

    # ---- blobs ------------------------------------------------------------------------------------------------

    def fill(self, ref: BlobRef, source: Tier, nearer: Sequence[Tier]) -> Payload:
        """A blob from a far layer by way of the nearer ones: one download per machine, everybody maps the result."""
        # Of several nearer layers the one whose lock reaches farthest keeps the most processes from downloading too.
        keeper = max(nearer, key=lambda tier: tier.capabilities.lock_scope)
        lock = keeper.lock(f"fill-{ref.hex}")
        held = False
        try:
            if lock is not None:
                found, held = self._wait(ref, keeper, lock)
                if found is not None:
                    self.recall(ref)
                    return found
            payload, landed = _land(ref, source, keeper)
            manifest = self.recall(ref)
            for tier in reversed(nearer):
                _put(tier, ref, payload, manifest, source, present=landed and tier is keeper)
            return payload
        finally:
            if lock is not None and held:
                lock.release()

    def _wait(self, ref: BlobRef, keeper: Tier, lock: Lock) -> tuple[Payload | None, bool]:
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
            if self._clock() - started > self._seconds:
                who = lock.owner() or "another process"
                text = f"{who} did not finish downloading {blob_name(ref)} in time; it is downloaded here as well"
                self._emit(EventKind.WARNING, reason="slow-fill", text=text)
                return None, False
            time.sleep(_FILL_PAUSE)


def _land(ref: BlobRef, source: Tier, keeper: Tier) -> tuple[Payload, bool]:
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


class _SourceFailed(Exception):
    """Carries a download's failure past the layer that it should have landed in, which is not to blame."""

    def __init__(self, error: StoreError | IntegrityError) -> None:
        super().__init__(error.message)
        self.error = error


def _put(tier: Tier, ref: BlobRef, payload: Payload, manifest: Manifest | None, source: Tier, *, present: bool) -> None:
    """Fill a blob, unless it is there, and the entry that it belongs to into a nearer layer.

    A hit does not depend on it.
    """
    others: MutableSequence[Payload] = []
    try:
        if manifest is None or not _adopts(tier, manifest):
            if not present:
                tier.call(lambda store: _put_packed(store, ref, payload.view), ref.size)
        else:
            payloads = {} if present else {ref.role: payload.view}
            for other in manifest.blobs:
                if other.role != ref.role:
                    others.append(source.fetch(other, rehash=False))
                    payloads[other.role] = others[-1].view
            adopt(tier, manifests.plain(manifest), payloads)
        tier.count(backfills=1, bytes_written=ref.size)
    except (StoreError, IntegrityError, UntrustedError) as error:
        log.info("%s not kept in %s: %s", blob_name(ref), tier.name, error.message)
    finally:
        for one in others:
            one.close()


def _put_packed(store: Store, ref: BlobRef, data: Any) -> None:
    packed, stored = store.pack(ref, data)
    store.put_blob(packed, stored)


# ---- entries ----------------------------------------------------------------------------------------------------


def keep(tier: Tier, manifest: Manifest, payloads: Mapping[str, Any]) -> None:
    """Adopt an entry in a nearer layer, as far as that can be done."""
    try:
        adopt(tier, manifest, payloads)
    except (StoreError, IntegrityError, UntrustedError) as error:
        log.info("entry %s not kept in %s: %s", manifest.key[:12], tier.name, error.message)


def adopt(tier: Tier, manifest: Manifest, payloads: Mapping[str, Any]) -> None:
    """Make a manifest the one in force in a layer that does not decide.

    Raises:
        StoreError: The layer does not take it.
        IntegrityError: It holds one of another format under this key.
        UntrustedError: It holds one under this key that no trusted key has signed.
    """
    current = _manifest_or_none(tier, manifest)
    if current is None or not says_the_same(current, manifest):
        tier.publish(manifest, payloads, replacing=current)


def says_the_same(one: Manifest, other: Manifest) -> bool:
    """Whether two manifests say the same, signatures and packing aside."""
    bare = [msgspec.structs.replace(manifests.plain(manifest), signature={}) for manifest in (one, other)]
    return bare[0] == bare[1]


def _adopts(tier: Tier, manifest: Manifest) -> bool:
    """Whether a layer has another manifest under the key, or none."""
    current = _manifest_or_none(tier, manifest)
    return current is None or not says_the_same(current, manifest)


def _manifest_or_none(tier: Tier, manifest: Manifest) -> Manifest | None:
    kind = Kind(manifest.kind)
    try:
        return tier.manifest(kind, manifest.key, counted=False)
    except IntegrityError as error:
        if error.reason == "format":
            raise
        damage = error
    tier.call(lambda store: store.quarantine(kind, manifest.key, damage))
    return None
