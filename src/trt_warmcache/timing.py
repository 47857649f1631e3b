"""The timing ("algorithm") cache: shared by all models of one device, merged and never overwritten.

Policy lives here; the mechanics of merging need TensorRT, so a builder does them. Trouble with a timing cache never
fails a build: it only costs the measurements again.
"""

from __future__ import annotations

from dataclasses import dataclass

from trt_warmcache import manifest as manifests
from trt_warmcache.builders import EngineBuilder
from trt_warmcache.errors import BuildError, ConfigError, IntegrityError, StoreError, UntrustedError
from trt_warmcache.events import EventKind, Events
from trt_warmcache.keys import TimingKey
from trt_warmcache.manifest import Labels, Manifest, Provenance
from trt_warmcache.stores import Store

__all__ = ["StoredTiming", "load", "publish"]

_ROLE = "timing"

#: Writers that collide read and merge again; more collisions than this in a row mean that something else is wrong.
_ATTEMPTS = 32


@dataclass(frozen=True)
class StoredTiming:
    """A timing cache as it lies in a store.

    Attributes:
        data: TensorRT's blob.
        manifest: Its manifest, for replacing exactly this one.
    """

    data: bytes
    manifest: Manifest


def load(store: Store, key: TimingKey, events: Events) -> StoredTiming | None:
    """The stored timing cache, or None where there is none that can be trusted.

    The digest decides, not TensorRT: it makes an empty cache of damaged bytes and says nothing.
    """
    try:
        manifest = store.manifest(key.kind, key.digest)
        if manifest is None:
            return None
        payload = store.fetch(manifest.blob(_ROLE), rehash=True)
    except IntegrityError as error:
        events.emit(EventKind.TIMING_DROPPED, key=key.digest, label=key.name, reason="damaged", text=error.message)
        try:
            store.quarantine(key.kind, key.digest, error)
        except StoreError as denied:
            events.emit(EventKind.STORE_ERROR, key=key.digest, reason=denied.reason.value, text=denied.message)
        return None
    except UntrustedError as error:
        events.emit(EventKind.TIMING_DROPPED, key=key.digest, label=key.name, reason="untrusted", text=error.message)
        return None
    except StoreError as error:
        events.emit(
            EventKind.STORE_ERROR, key=key.digest, label=key.name, reason=error.reason.value, text=error.message
        )
        return None
    try:
        return StoredTiming(bytes(payload.view), manifest)
    finally:
        payload.close()


def publish(
    store: Store,
    key: TimingKey,
    builder: EngineBuilder,
    fresh: bytes,
    base: StoredTiming | None,
    *,
    provenance: Provenance,
    labels: Labels,
    events: Events,
) -> Manifest | None:
    """Merge what a build learnt into the stored timing cache, so that no builder's measurements are lost.

    Args:
        store: Where.
        key: Which.
        builder: Does the merging.
        fresh: The cache as the build left it; it began with `base`.
        base: What the build started from.
        provenance: Goes into the manifest.
        labels: Go into the manifest.
        events: Told about trouble.

    Returns:
        The manifest in force, or None where it could not be stored.
    """
    merged = fresh
    try:
        for _ in range(_ATTEMPTS):
            if base is not None and base.data == merged:
                return base.manifest
            ref = manifests.describe_blob(_ROLE, merged)
            manifest = manifests.seal(key, (ref,), provenance=provenance, labels=labels)
            current = store.publish(manifest, {_ROLE: merged}, replacing=None if base is None else base.manifest)
            if current == manifest:
                return manifest
            # Somebody else was first: take their union with ours, and try to replace theirs.
            base = load(store, key, events)
            merged = fresh if base is None else builder.merge_timing(fresh, base.data)
        reason, text = "contention", f"gave up after {_ATTEMPTS} collisions with other writers"
    except StoreError as error:
        reason, text = error.reason.value, error.message
    except (BuildError, ConfigError, IntegrityError) as error:
        reason, text = "merge", error.message
    events.emit(EventKind.TIMING_DROPPED, key=key.digest, label=key.name, reason=reason, text=text)
    return None
