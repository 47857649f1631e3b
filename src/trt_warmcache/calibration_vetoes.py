"""Notes that a calibration table is not to be used on some GPU, beside its entry, which stays as it is.

A table is shared by all GPUs, and engines are not: where accuracy turns out to be poor, the table is vetoed there.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from trt_warmcache import manifest as manifests
from trt_warmcache.errors import ConfigError, IntegrityError, MissError, StoreError
from trt_warmcache.events import EventKind, Events
from trt_warmcache.keys import CalibrationKey, Kind
from trt_warmcache.stores import Store
from trt_warmcache.target import Target

__all__ = ["Vetoes"]

_MAX_VETO_BYTES = 1 << 20
#: A hit must not ask a far layer every time whether somebody noted a veto; so long an answer holds.
_VETO_SECONDS = 60.0
#: Writers of a veto note that collide read and try again; more collisions in a row than this mean something else.
_ATTEMPTS = 32


class Vetoes:
    """The vetoes of a store.

    Args:
        store: Where the tables are.
        events: Told of requests that a veto turned down.
    """

    def __init__(self, store: Store, events: Events) -> None:
        self._store = store
        self._events = events
        self._known: dict[str, tuple[float, dict[str, str]]] = {}

    def of(self, digest: str) -> dict[str, str]:
        """GPUs on which a table is not to be used, with the reasons.

        Args:
            digest: Digest of the table's key.

        Raises:
            IntegrityError: The note is damaged.
        """
        return _decode_veto(digest, self._store.read(_veto_name(digest), limit=_MAX_VETO_BYTES))

    def note(self, digest: str, gpu: str, why: str | None) -> dict[str, str]:
        """Note that a table is not to be used on a GPU, because accuracy is poor there; the entry itself stays.

        Args:
            digest: Digest of the table's key.
            gpu: Name of the GPU, or a compute capability such as ``"8.7"``.
            why: Why; None lifts the veto.

        Returns:
            All vetoes in force.

        Raises:
            MissError: No such entry.
            StoreError: The note could not be stored.
        """
        if not gpu.strip():
            raise ConfigError("Name the GPU that the veto is for.")
        if self._store.manifest(Kind.CALIBRATION, digest) is None:
            raise MissError(f"No calibration table {digest[:12]} is stored in {self._store.url}.", key=digest)
        name = _veto_name(digest)
        for _ in range(_ATTEMPTS):
            before = self._store.read(name, limit=_MAX_VETO_BYTES)
            vetoes = _decode_veto(digest, before)
            if why is None:
                vetoes.pop(gpu, None)
            else:
                vetoes[gpu] = why
            data = msgspec.json.encode({"format": manifests.FORMAT, "gpus": vetoes}, order="sorted")
            if data == before:
                return vetoes
            written = (
                self._store.create(name, data) if before is None else self._store.swap(name, data, expected=before)
            )
            if written:
                self._known.pop(digest, None)
                return vetoes
        raise StoreError(
            f"The veto on {digest[:12]} could not be written: other writers were faster {_ATTEMPTS} times. Try again.",
            store=self._store.url,
        )

    def refuse(self, key: CalibrationKey, target: Target | None, *, degrade: bool) -> None:
        """Refuse a table that is vetoed for a target.

        Args:
            key: The table's key.
            target: What it is wanted for; None where nobody knows, and then nothing is refused.
            degrade: Take a store that cannot answer for one without vetoes.

        Raises:
            MissError: Vetoed; ``reason`` is ``"vetoed"``.
            StoreError: The store could not answer.
            IntegrityError: The note is damaged.
        """
        if target is None:
            return
        until, vetoes = self._known.get(key.digest, (0.0, {}))
        if time.monotonic() >= until:
            try:
                vetoes = self.of(key.digest)
            except StoreError:
                if not degrade:
                    raise
                return
            self._known[key.digest] = (time.monotonic() + _VETO_SECONDS, vetoes)
        names = {target.gpu, target.gpu_type, target.compute_capability, *target.compute_capabilities}
        for gpu, note in vetoes.items():
            if gpu in names:
                self._events.emit(EventKind.MISS, key=key.digest, label=key.name, reason="vetoed", gpu=gpu)
                raise MissError(
                    f"Calibration table {key.name} ({key.digest[:12]}) is vetoed for {gpu}: {note.rstrip('. ')}. Calibrate with other data or another algorithm for it, or lift the veto.",
                    key=key.digest,
                    reason="vetoed",
                )


def _veto_name(digest: str) -> str:
    return f"{Kind.CALIBRATION.value}/{digest[:2]}/{digest}.veto"


def _decode_veto(digest: str, data: bytes | None) -> dict[str, str]:
    if data is None:
        return {}
    try:
        document = msgspec.json.decode(data, type=dict[str, Any])
        return msgspec.convert(document.get("gpus"), dict[str, str])
    except msgspec.MsgspecError as error:
        raise IntegrityError(
            f"The veto note of calibration table {digest[:12]} is damaged ({error}); delete it and note the veto again.",
            name=_veto_name(digest),
            reason="veto",
        ) from error
