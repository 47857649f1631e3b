"""The run-time kernel cache of TensorRT-RTX: what the library compiled on this GPU, kept for the next process.

A TensorRT-RTX plan holds no kernels for one GPU; they are compiled when the engine first runs. That, and not the
build, is its cold start. The compiled kernels are kept per GPU, driver and library version, for all engines together.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from trt_warmcache import manifest as manifests
from trt_warmcache._version import __version__
from trt_warmcache.errors import ConfigError, IntegrityError, StoreError
from trt_warmcache.events import EventKind, Events
from trt_warmcache.keys import RuntimeKey, runtime_key
from trt_warmcache.manifest import Labels, Manifest, Provenance
from trt_warmcache.stores import Store
from trt_warmcache.target import Target

__all__ = ["RuntimeCache", "key_for"]

_ROLE = "runtime"
_ATTEMPTS = 8


def key_for(flavour: str, version: str, target: Target) -> RuntimeKey:
    """The key of the kernel cache for a GPU.

    Raises:
        ConfigError: The target does not say which GPU and driver.
    """
    missing = [name for name in ("gpu", "compute_capability", "driver") if getattr(target, name) is None]
    if missing:
        raise ConfigError(
            f"Kernels are compiled for one GPU and driver; the target must say {', '.join(missing)}: use Target.detect()."
        )
    return runtime_key(flavour=flavour, version=version, target=target, name=f"kernels_{version}_{target.gpu_type}")


class RuntimeCache:
    """Kernels of one deserialized engine, loaded before and saved after its first runs.

    Use it as a context manager: it saves at the end. Trouble with the store costs only the compilation again.

    Args:
        store: Where kernels are kept.
        key: Which; see :func:`key_for`.
        engine: ``ICudaEngine`` of TensorRT-RTX.
        events: Told about trouble.

    Attributes:
        config: ``IRuntimeConfig`` with the cache attached, for ``engine.create_execution_context(config)``.
        warm: Whether stored kernels were taken over.

    Raises:
        ConfigError: This engine's library has no kernel cache.
    """

    def __init__(self, store: Store, key: RuntimeKey, engine: Any, *, events: Events) -> None:
        make = getattr(engine, "create_runtime_config", None)
        config: Any = None if make is None else make()
        if not hasattr(config, "create_runtime_cache"):
            raise ConfigError(
                "This TensorRT compiles its kernels when it builds; only TensorRT-RTX has a kernel cache."
            )
        self.config = config
        self._store, self._key, self._events = store, key, events
        self._cache = self.config.create_runtime_cache()
        self._base = self._load()
        self.warm = False
        if self._base is not None:
            self.warm = bool(self._cache.deserialize(self._base[1]))
            if not self.warm:
                self._told("mismatch", "TensorRT-RTX does not take the stored kernels; they are compiled anew")
        self.config.set_runtime_cache(self._cache)

    def save(self) -> Manifest | None:
        """Store the kernels, where there are more than before.

        Returns:
            The manifest in force, or None where nothing was stored.
        """
        data = bytes(self._cache.serialize())
        base = self._base
        try:
            for _ in range(_ATTEMPTS):
                if base is not None and self.warm and len(data) <= len(base[1]):
                    return base[0]
                ref = manifests.describe_blob(_ROLE, data)
                manifest = manifests.seal(
                    self._key,
                    (ref,),
                    provenance=Provenance(creator=f"trt_warmcache {__version__}"),
                    labels=Labels(entry=self._key.name),
                )
                current = self._store.publish(manifest, {_ROLE: data}, replacing=None if base is None else base[0])
                if current == manifest:
                    self._base, self.warm = (manifest, data), True
                    return manifest
                # There is no merging kernels; of two processes that finish together the one with more stays.
                base = self._load()
                self.warm = True
            self._told("contention", f"gave up after {_ATTEMPTS} collisions with other processes")
        except StoreError as error:
            self._told(error.reason.value, error.message)
        return None

    def _load(self) -> tuple[Manifest, bytes] | None:
        try:
            manifest = self._store.manifest(self._key.kind, self._key.digest)
            if manifest is None:
                return None
            payload = self._store.fetch(manifest.blob(_ROLE), rehash=True)
        except IntegrityError as error:
            self._told("damaged", error.message)
            try:
                self._store.quarantine(self._key.kind, self._key.digest, error)
            except StoreError as denied:
                self._told(denied.reason.value, denied.message)
            return None
        except StoreError as error:
            self._told(error.reason.value, error.message)
            return None
        try:
            return manifest, bytes(payload.view)
        finally:
            payload.close()

    def _told(self, reason: str, text: str) -> None:
        self._events.emit(
            EventKind.RUNTIME_DROPPED, key=self._key.digest, label=self._key.name, reason=reason, text=text
        )

    def __enter__(self) -> RuntimeCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.save()
