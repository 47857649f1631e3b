"""The timing ("algorithm") cache: shared by all models of one device, merged and never overwritten.

Policy lives here; the mechanics of merging need TensorRT, so a builder does them. Trouble with a timing cache never
fails a build: it only costs the measurements again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from trt_warmcache import manifest as manifests
from trt_warmcache._version import __version__
from trt_warmcache.builders import BuildOutput, EngineBuilder
from trt_warmcache.errors import BuildError, ConfigError, IntegrityError, MissError, StoreError, UntrustedError
from trt_warmcache.events import EventKind, Events
from trt_warmcache.keys import Key, Kind, TimingKey, timing_key
from trt_warmcache.manifest import Labels, Manifest, Provenance
from trt_warmcache.options import BuildOptions, TimingMode, TimingScope
from trt_warmcache.stores import Store
from trt_warmcache.tactics import TacticReplay
from trt_warmcache.target import Target

__all__ = ["StoredTiming", "TimingSession", "entries", "key_for", "load", "merge", "pin", "publish"]

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


def key_for(builder: EngineBuilder, target: Target, options: BuildOptions, model_name: str) -> TimingKey | None:
    """The key of the timing cache that a build uses, or None where it uses none.

    Timings of one GPU are wrong on another. So a target that does not name the GPU gets no stored timing cache.
    """
    capabilities = builder.capabilities
    if not capabilities.timing_cache or options.timing is TimingMode.OFF:
        return None
    if capabilities.needs_gpu and target.gpu is None:
        return None
    scope = model_name if options.timing_scope is TimingScope.MODEL else ""
    name = "_".join(filter(None, [scope or "timing", builder.version(), target.gpu_type]))
    return timing_key(flavour=builder.flavour, version=builder.version(), target=target, scope=scope, name=name)


@dataclass
class TimingSession:
    """The timing cache's part in one build: loaded before, merged after.

    Attributes:
        store: Where it lies.
        builder: Does the merging.
        events: Told about trouble.
        key: Which it is; None where the build uses none.
        base: What lies there.
    """

    store: Store
    builder: EngineBuilder
    events: Events
    key: TimingKey | None
    base: StoredTiming | None

    @classmethod
    def begin(
        cls,
        store: Store,
        builder: EngineBuilder,
        target: Target,
        options: BuildOptions,
        *,
        model_name: str,
        events: Events,
    ) -> TimingSession:
        """Find and load the timing cache of a build."""
        key = key_for(builder, target, options, model_name)
        return cls(store, builder, events, key, None if key is None else load(store, key, events))

    @property
    def blob(self) -> bytes | None:
        """What the build starts from; None for nothing."""
        return None if self.base is None else self.base.data

    def finish(self, output: BuildOutput, provenance: Provenance) -> Manifest | None:
        """Store what the build learnt.

        Returns:
            The manifest in force, or None where nothing was learnt or it could not be stored.
        """
        if self.key is None or output.timing is None:
            return None
        if output.timing_rejected and self.base is not None:
            # Its digest was right, so it was stored like this; keeping it would cost every build its measurements.
            _set_aside(self.store, self.key, IntegrityError(output.timing_rejected, reason="mismatch"), self.events)
            self.base = None
        extra = {} if output.timing_entries is None else {"entries": output.timing_entries}
        return publish(
            self.store,
            self.key,
            self.builder,
            output.timing,
            self.base,
            provenance=_of_cache(provenance),
            labels=Labels(entry=self.key.name),
            events=self.events,
            extra=extra,
        )


def _of_cache(provenance: Provenance) -> Provenance:
    """The provenance of a build as that of the timing cache it leaves: who and where, not which engine."""
    return Provenance(
        created=provenance.created,
        build_seconds=provenance.build_seconds,
        creator=provenance.creator,
        host=provenance.host,
        library=provenance.library,
        target=provenance.target,
    )


def load(store: Store, key: Key, events: Events) -> StoredTiming | None:
    """The stored timing cache, or None where there is none that can be trusted.

    The digest decides, not TensorRT: it makes an empty cache of damaged bytes and says nothing.
    """
    try:
        manifest = store.manifest(key.kind, key.digest)
        if manifest is None:
            return None
        payload = store.fetch(manifest.blob(_ROLE), rehash=True)
    except IntegrityError as error:
        _set_aside(store, key, error, events, reason="damaged")
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


def _set_aside(store: Store, key: Key, error: IntegrityError, events: Events, *, reason: str = "") -> None:
    events.emit(
        EventKind.TIMING_DROPPED, key=key.digest, label=key.name, reason=reason or error.reason, text=error.message
    )
    try:
        store.quarantine(key.kind, key.digest, error)
    except StoreError as denied:
        events.emit(EventKind.STORE_ERROR, key=key.digest, reason=denied.reason.value, text=denied.message)


def publish(
    store: Store,
    key: Key,
    builder: EngineBuilder,
    fresh: bytes,
    base: StoredTiming | None,
    *,
    provenance: Provenance,
    labels: Labels,
    events: Events,
    extra: dict[str, Any] | None = None,
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
        extra: Goes into the manifest; counted anew where something had to be merged.

    Returns:
        The manifest in force, or None where it could not be stored.
    """
    merged, facts = fresh, extra
    try:
        for _ in range(_ATTEMPTS):
            if base is not None and base.data == merged:
                return base.manifest
            ref = manifests.describe_blob(_ROLE, merged)
            manifest = manifests.seal(key, (ref,), provenance=provenance, labels=labels, extra=facts)
            current = store.publish(manifest, {_ROLE: merged}, replacing=None if base is None else base.manifest)
            if current == manifest:
                return manifest
            # Somebody else was first: take their union with ours, and try to replace theirs.
            base = load(store, key, events)
            merged, facts = fresh, extra
            if base is not None:
                merged = builder.merge_timing(fresh, base.data)
                facts = _counted(builder, merged)
        reason, text = "contention", f"gave up after {_ATTEMPTS} collisions with other writers"
    except StoreError as error:
        reason, text = error.reason.value, error.message
    except (BuildError, ConfigError, IntegrityError) as error:
        reason, text = "merge", error.message
    events.emit(EventKind.TIMING_DROPPED, key=key.digest, label=key.name, reason=reason, text=text)
    return None


def _counted(builder: EngineBuilder, blob: bytes) -> dict[str, Any]:
    """How many entries a timing cache has, for its manifest; nothing where the builder cannot tell."""
    list_entries = getattr(builder, "timing_entries", None)
    try:
        return {} if list_entries is None else {"entries": len(list_entries(blob))}
    except (BuildError, ConfigError):
        return {}


# ---- by hand ----------------------------------------------------------------------------------------------------


def entries(builder: EngineBuilder, blob: bytes) -> tuple[Any, ...]:
    """The entries of an editable timing cache: key, tactic, milliseconds.

    Raises:
        ConfigError: The builder cannot list them.
        BuildError: The blob belongs to another version or device.
    """
    listed: tuple[Any, ...] = _ability(builder, "timing_entries")(blob)
    return listed


def merge(store: Store, manifest: Manifest, builder: EngineBuilder, blob: bytes, *, events: Events) -> Manifest:
    """Merge a blob, such as one exported on another host with the same GPU, into a stored timing cache.

    Args:
        store: Where.
        manifest: The stored timing cache.
        builder: Does the merging; must be of the cache's version and, for classic TensorRT, see its GPU.
        blob: TensorRT's blob. Its measurements win over stored ones.
        events: Told about trouble.

    Raises:
        BuildError: The blob belongs to another version or device.
        StoreError: It could not be stored.
    """
    stored = _stored(store, manifest, events)
    return _replace(store, stored, builder, builder.merge_timing(blob, stored.data), events)


def pin(store: Store, manifest: Manifest, builder: EngineBuilder, tactics: TacticReplay, *, events: Events) -> Manifest:
    """Put other tactics into a stored timing cache; builds that use it follow them.

    Raises:
        ConfigError: The builder's version cannot edit timing caches, or a key is unknown.
        StoreError: It could not be stored.
    """
    stored = _stored(store, manifest, events)
    return _replace(store, stored, builder, _ability(builder, "pin_timing")(stored.data, tactics), events)


def _ability(builder: EngineBuilder, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(builder, name, None)
    if found is None:
        raise ConfigError(f"{builder.flavour} {builder.version()} cannot list or edit timing caches.")
    return found


def _key_of(manifest: Manifest) -> Key:
    return Key(Kind(manifest.kind), manifest.parts, manifest.labels.entry)


def _stored(store: Store, manifest: Manifest, events: Events) -> StoredTiming:
    stored = load(store, _key_of(manifest), events)
    if stored is None:
        raise MissError(f"The timing cache {manifest.key[:12]} is gone or damaged; see trt-warmcache timing ls.")
    return stored


def _replace(store: Store, stored: StoredTiming, builder: EngineBuilder, data: bytes, events: Events) -> Manifest:
    done = publish(
        store,
        _key_of(stored.manifest),
        builder,
        data,
        stored,
        provenance=msgspec.structs.replace(stored.manifest.provenance, creator=f"trt_warmcache {__version__}"),
        labels=stored.manifest.labels,
        events=events,
        extra=_counted(builder, data),
    )
    if done is None:
        raise StoreError(f"The timing cache could not be stored in {store.url}; the log says why.", store=store.url)
    return done
