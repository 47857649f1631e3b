"""The calibration table of a request: found in the store, or made once for everybody.

A table belongs to a model and to data, not to a GPU or a TensorRT version, so one entry serves every builder. It is
made with ONNX Runtime on the CPU and stored only after a complete run. What is stored never changes: a second, other
result for the same key is told as a conflict, and the first one stays.

    key ─► look ─────────────────────────────────► found: the manifest names the table's digest, nothing is parsed
            │ nothing there
            ▼
    wait for the lock, looking ─► look again ─► calibrate ─► publish
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from trt_warmcache import manifest as manifests
from trt_warmcache import onnx_graph
from trt_warmcache._onnxruntime import CPU, runtime_version
from trt_warmcache._version import __version__
from trt_warmcache.builders import CalibrationRun
from trt_warmcache.calibration_data import Calibration, CalibrationRunner
from trt_warmcache.calibration_run import Measured, measure
from trt_warmcache.calibration_table import CalibrationTable, Coverage
from trt_warmcache.calibration_vetoes import Vetoes
from trt_warmcache.errors import (
    BuildError,
    BuildTimeout,
    ConfigError,
    IntegrityError,
    MissError,
    StoreError,
    WarmCacheError,
)
from trt_warmcache.events import EventKind, Events
from trt_warmcache.int8 import activations, coverage_of, input_specs, model_at_hand
from trt_warmcache.keys import CalibrationKey, calibration_key
from trt_warmcache.manifest import Labels, Manifest, Provenance
from trt_warmcache.memo import DigestMemo
from trt_warmcache.model import ModelSource, file_digest
from trt_warmcache.names import readable_name
from trt_warmcache.singleflight import SingleFlight, WaitLimits, acquire_or_find
from trt_warmcache.stores import Store
from trt_warmcache.target import Target

__all__ = ["ROLE", "CalibrationTables", "Limits", "StoredTable"]

#: Role of the payload: a table in TensorRT's text format.
ROLE = "calibration"

#: Names listed in manifests and events; the counts are always complete.
_NAMED = 20

_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredTable:
    """A calibration table, not yet read.

    Attributes:
        key: Its key.
        digest: Hex digest of names and scales; part of the key of every engine made with the table.
        manifest: Its entry; None where it is not stored.
        table: The table itself where it is in memory already.
    """

    key: CalibrationKey
    digest: str
    manifest: Manifest | None = None
    table: CalibrationTable | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Limits:
    """How long a calibration may wait and run.

    Attributes:
        wait_seconds: Longest wait for another process that calibrates.
        report_every: Seconds between two reports of waiting.
        checkpoint: Called after each batch; what it raises ends the run, and no table is stored.
    """

    wait_seconds: Callable[[], float] = lambda: 3600.0
    report_every: float = 10.0
    checkpoint: Callable[[], None] = lambda: None


class CalibrationTables:
    """The calibration entries of a store.

    Safe for many threads and processes; each table is made by one of them.

    Args:
        store: Where they are.
        memo: Remembers digests of unchanged calibration files.
        events: Told what happens.
    """

    def __init__(self, store: Store, *, memo: DigestMemo, events: Events) -> None:
        self._store = store
        self._memo = memo
        self._events = events
        self._flights: SingleFlight[StoredTable] = SingleFlight()
        self._vetoes = Vetoes(store, events)

    # ---- identity ---------------------------------------------------------------------------------------------

    def key(
        self,
        source: ModelSource,
        calibration: Calibration,
        *,
        name: str | None = None,
        version: str | None = None,
        checkpoint: Callable[[], None] = lambda: None,
    ) -> CalibrationKey:
        """The key of a table: model content, data, algorithm, batches and preprocessing tag; never a GPU.

        Reads the data where its fingerprint is made of the batches, calling `checkpoint` after each; a folder's files are
        hashed once and remembered.

        Raises:
            ConfigError: Data that does not fit the model.
        """
        fingerprint = calibration.find_fingerprint(
            input_specs(source), digest_file=self._digest_file, checkpoint=checkpoint
        )
        label = readable_name(
            name or source.stem,
            version or source.digest.rpartition(":")[2][:8],
            f"int8-{calibration.algorithm}",
            "any" if calibration.batches is None else f"{calibration.batches}-batches",
        )
        return calibration_key(model=source.digest, name=label, **calibration.key_parts(fingerprint))

    def _digest_file(self, path: Path) -> str:
        return file_digest(path, self._memo).rpartition(":")[2]

    # ---- finding ----------------------------------------------------------------------------------------------

    def find(self, key: CalibrationKey, *, verify: bool = False) -> StoredTable | None:
        """The entry of a key, or None.

        Args:
            key: Which.
            verify: Read the table too, and hold it against the digests that its manifest names.

        Raises:
            IntegrityError: There is an entry and it is damaged.
            StoreError: The store could not answer.
        """
        manifest = self._store.manifest(key.kind, key.digest)
        return None if manifest is None else self._opened(key, manifest, verify=verify)

    def _opened(self, key: CalibrationKey, manifest: Manifest, *, verify: bool) -> StoredTable:
        digest = manifest.extra.get("table")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise IntegrityError(
                f"Calibration entry {key.digest[:12]} does not name its table's digest.",
                name=f"{key.kind}/{key.digest}",
                reason="manifest",
            )
        return StoredTable(key, digest, manifest, self.read(manifest) if verify else None)

    def read(self, manifest: Manifest) -> CalibrationTable:
        """The table of an entry, verified.

        Raises:
            IntegrityError: Damaged.
        """
        payload = self._store.fetch(manifest.blob(ROLE), rehash=True)
        try:
            table = CalibrationTable.parse(payload.view, source=f"Calibration entry {manifest.key[:12]}")
        finally:
            payload.close()
        if table.digest != manifest.extra.get("table"):
            raise IntegrityError(
                f"Calibration entry {manifest.key[:12]} holds another table than its manifest says.",
                name=f"{manifest.kind}/{manifest.key}",
                reason="table",
            )
        return table

    # ---- getting ----------------------------------------------------------------------------------------------

    def get(
        self,
        source: ModelSource,
        calibration: Calibration,
        *,
        known: StoredTable | None = None,
        name: str | None = None,
        version: str | None = None,
        target: Target | None = None,
        make: bool = True,
        verify: bool = False,
        degrade: bool = False,
        limits: Limits | None = None,
        tensorrt: Callable[[CalibrationRun], CalibrationTable | None] | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> StoredTable:
        """The table of a model and its calibration: found, or made once.

        Args:
            source: The model.
            calibration: Data, algorithm; or the table itself.
            known: What an earlier call returned. It spares finding the key, which may mean reading all the data.
            name: A name for people.
            version: A version for people.
            target: What it will be used for; a table may be vetoed there.
            make: Calibrate where nothing is stored.
            verify: Read and check the table, and make it anew if it is damaged. Without, a stored table's manifest
                is all that is read.
            degrade: Take a store that cannot answer for an empty one.
            limits: How long to wait and run.
            tensorrt: Calibrates with TensorRT, where the calibration asks for that.
            before: Called before any calibration, to refuse a request that cannot be served anyway.

        Raises:
            MissError: Nothing is stored, and calibrating is not allowed or there is no data; or the table is vetoed
                for the target (``reason`` is ``"missing"`` or ``"vetoed"``).
            ConfigError: Data that does not fit the model, or is not the same on each pass.
            ModelError: The model cannot be run, or the table belongs to another model.
            BuildTimeout: A wait took longer than allowed.
            IntegrityError: The entry is damaged and may not be made anew.
            StoreError: The store could not answer.
        """
        limits = limits or Limits()
        given = calibration.load_table()
        if given is not None:  # read once, so that key and table are of the same file
            calibration = replace(calibration, table=given)
        key = (
            self.key(source, calibration, name=name, version=version, checkpoint=limits.checkpoint)
            if known is None
            else known.key
        )
        job = _Job(source, calibration, key, verify, degrade, limits, name, version, tensorrt)
        self._vetoes.refuse(key, target, degrade=degrade)
        if given is not None and not verify:
            return StoredTable(key, given.digest, None, given)
        try:
            fresh = known if given is None and known is not None and known.table is not None else None
            found = fresh or self._look(job)
        except IntegrityError as error:
            if not make or error.reason == "format":
                raise
            found = None  # judged again under the lock
        if found is None:
            if given is not None:
                found = self._take(job, given)
            elif not make or calibration.data is None:
                raise self._missing(job)
            else:
                before()
                found, _ = self._flights.run(key.digest, lambda: self._make_once(job), timeout=job.limits.wait_seconds)
        elif known is None:
            self._events.emit(EventKind.CALIBRATION_HIT, key=key.digest, label=key.name)
        if verify:
            self._check(job, found)
        return found

    def _look(self, job: _Job) -> StoredTable | None:
        try:
            return self.find(job.key, verify=job.verify)
        except StoreError as error:
            self._events.emit(
                EventKind.STORE_ERROR, key=job.key.digest, label=job.key.name, reason=error.reason.value, text=error.message
            )  # fmt: skip
            if not job.degrade:
                raise
            return None

    def _missing(self, job: _Job) -> MissError:
        self._events.emit(EventKind.MISS, key=job.key.digest, label=job.key.name, reason="uncalibrated")
        todo = (
            "The request has no data to make one: pass Calibration(data=..., fingerprint=...) once where the data is, or import the table."
            if job.calibration.data is None
            else "Calibrate beforehand (EngineManager.calibrate, or trt-warmcache calibrate), or allow building."
        )
        return MissError(
            f"No calibration table {job.key.name} ({job.key.digest[:12]}) is stored in {self._store.url} for this model and data. {todo}",
            key=job.key.digest,
            reason="missing",
        )

    def _check(self, job: _Job, found: StoredTable) -> Coverage:
        """Hold a table against the model at hand; tell what has no usable scale."""
        assert found.table is not None
        coverage = found.table.check(onnx_graph.tensor_names(job.source.read()), model=job.source.stem)
        missing = [] if found.manifest is None else found.manifest.extra.get("missing", [])
        counts = {} if found.manifest is None else found.manifest.extra.get("coverage", {})
        lacking = counts.get("missing", 0)
        if coverage.unusable or lacking:
            self._events.emit(
                EventKind.CALIBRATION_INCOMPLETE, key=job.key.digest, label=job.key.name,
                missing=list(missing), missing_count=lacking,
                unusable={name: repr(scale) for name, scale in list(coverage.unusable.items())[:_NAMED]},
                unusable_count=len(coverage.unusable),
                text=f"{job.key.name}: {lacking} tensors have no scale and {len(coverage.unusable)} no usable one; they stay in floating point",
            )  # fmt: skip
        return coverage

    # ---- making -----------------------------------------------------------------------------------------------

    def _make_once(self, job: _Job) -> StoredTable:
        """The part that at most one thread of this process runs per key: wait for the lock, or for the table."""
        lock = self._lock(job.key)
        if lock is None:
            return self._make(job)

        def told(waited: float, owner: str) -> None:
            text = f"waiting for {job.key.name}: {owner or 'another process'} has been calibrating for at least {waited:.0f} s"
            self._events.emit(
                EventKind.WAIT, key=job.key.digest, label=job.key.name, seconds=waited, text=text, owner=owner
            )

        def look() -> StoredTable | None:
            try:
                return self._look(job)
            except IntegrityError:
                return None  # judged under the lock

        try:
            limits = WaitLimits(job.limits.wait_seconds(), max(job.limits.report_every, 0.01), told)
            found = acquire_or_find(lock, look, limits)
        except StoreError as error:
            self._tell_lockless(job.key, error)
            return self._make(job)
        except BuildTimeout as error:
            raise BuildTimeout(
                f"Another process is still calibrating {job.key.name}, and the time to wait for it is over. Allow more (Policy.wait_seconds), or ask again later.",
                waited=getattr(error, "waited", 0.0),
            ) from error
        if found is not None:
            return found
        try:
            try:
                found = self._look(job)
            except IntegrityError as error:
                self._quarantine(job.key, error)
            return self._make(job) if found is None else found
        finally:
            lock.release()

    def _lock(self, key: CalibrationKey) -> Any:
        try:
            return self._store.lock(key.digest)
        except StoreError as error:
            self._tell_lockless(key, error)
            return None

    def _tell_lockless(self, key: CalibrationKey, error: StoreError) -> None:
        self._events.emit(
            EventKind.LOCK_UNAVAILABLE, key=key.digest, label=key.name, reason=error.reason.value, text=error.message
        )

    def _quarantine(self, key: CalibrationKey, error: IntegrityError) -> None:
        self._events.emit(
            EventKind.QUARANTINED, key=key.digest, label=key.name, reason=error.reason, text=error.message
        )
        try:
            self._store.quarantine(key.kind, key.digest, error)
        except StoreError as denied:
            self._events.emit(
                EventKind.STORE_ERROR, key=key.digest, label=key.name, reason=denied.reason.value, text=denied.message
            )

    def _make(self, job: _Job) -> StoredTable:
        """Calibrate and publish."""
        key, started = job.key, time.monotonic()

        def progress(done: int, total: int | None) -> None:
            self._events.emit(
                EventKind.BUILD_PROGRESS, key=key.digest, label=key.name, seconds=time.monotonic() - started,
                phase="Calibrating", parent=None, step=done, total=total,
            )  # fmt: skip
            job.limits.checkpoint()

        self._events.emit(EventKind.CALIBRATION_START, key=key.digest, label=key.name)
        began = time.time()
        try:
            job.limits.checkpoint()
            job.calibration.check(input_specs(job.source))
            if job.calibration.runner is CalibrationRunner.TENSORRT:
                measured, by = self._measure_with_tensorrt(job, progress), "tensorrt"
            else:
                with model_at_hand(job.source) as model:
                    measured = measure(model, job.calibration, fingerprint=key.parts["data"], progress=progress)
                devices = [name for name in job.calibration.providers if name not in CPU]
                by = " ".join(("onnxruntime", runtime_version(), *devices))
            job.source.verify_unchanged()
            job.calibration.check_unchanged(key.parts["data"], digest_file=self._digest_file)
        except BaseException as error:
            # What the caller's own data raised goes to the caller as it is.
            text = f"{key.name}: {error.message if isinstance(error, WarmCacheError) else repr(error)}"
            self._events.emit(
                EventKind.CALIBRATION_FAILED, key=key.digest, label=key.name, seconds=time.monotonic() - started, text=text
            )  # fmt: skip
            raise
        seconds = time.monotonic() - started
        self._events.emit(EventKind.CALIBRATION_END, key=key.digest, label=key.name, seconds=seconds)
        facts = {
            "batches": measured.batches,
            "samples": measured.samples,
            "calibrator": by if measured.table.version == 0 else f"{by}, header {measured.table.version}",
        }
        made = Provenance(
            created=began, build_seconds=seconds, creator=f"trt_warmcache {__version__}",
            host=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs", library=by,
            model_bytes=job.source.total_bytes,
        )  # fmt: skip
        coverage = measured.table.coverage(measured.tensors)
        return self.publish(key, measured.table, coverage, facts=facts, provenance=made, labels=job.labels)

    def _measure_with_tensorrt(self, job: _Job, progress: Callable[[int, int | None], None]) -> Measured:
        """The same as with ONNX Runtime, but TensorRT pulls the batches."""
        if job.tensorrt is None:
            raise ConfigError(
                "runner='tensorrt' needs a builder with INT8 calibrators, which is classic TensorRT 8.6 to 10.16, and a request that says what to build: EngineManager.get. TensorRT 11 and TensorRT-RTX have none: use runner='onnxruntime', whose table becomes Q/DQ nodes there."
            )
        inputs = input_specs(job.source)
        feed = job.calibration.feed(inputs, expected=job.key.parts["data"])
        first = next(feed)  # its shapes are needed beforehand, and a one-shot iterator cannot be asked twice
        count = {"batches": 0, "samples": 0}
        total = job.calibration.expected_batches

        def batches() -> Iterator[Mapping[str, Any]]:
            for number, batch in enumerate(chain([first], feed), start=1):
                yield batch
                shape = next(iter(batch.values())).shape
                count["batches"], count["samples"] = number, count["samples"] + (shape[0] if shape else 1)
                progress(number, total)

        shapes = {name: tuple(map(int, array.shape)) for name, array in first.items()}
        table = job.tensorrt(CalibrationRun(str(job.calibration.algorithm), shapes, batches()))
        if table is None:
            text = f"{job.key.name}: TensorRT calibrated and wrote no table"
            self._events.emit(EventKind.CALIBRATION_UNWRITTEN, key=job.key.digest, label=job.key.name, text=text)
            raise BuildError(f"{text}, so nothing was stored. Use runner='onnxruntime', or look at TensorRT's log.")
        return Measured(table, activations(job.source, table), **count)

    def _take(self, job: _Job, table: CalibrationTable) -> StoredTable:
        """Store a table that the request brought along, checked against the model first."""
        return self.publish(job.key, table, coverage_of(job.source, table), labels=job.labels)

    def publish(
        self,
        key: CalibrationKey,
        table: CalibrationTable,
        coverage: Coverage,
        *,
        facts: Mapping[str, Any] | None = None,
        provenance: Provenance | None = None,
        labels: Labels | None = None,
    ) -> StoredTable:
        """Store a finished table. The first one under a key stays; another one is a conflict, told and not stored.

        Args:
            key: Under which key.
            table: The table.
            coverage: How it fits the model; its counts are recorded.
            facts: Further facts for the manifest, such as the number of samples.
            provenance: Who made it.
            labels: Words for people.

        Returns:
            The table in force. It is not stored where the store cannot take it; an event says so.
        """
        data = table.to_bytes()
        extra = {
            "table": table.digest,
            "tensors": len(table),
            "coverage": coverage.to_json(),
            "missing": list(coverage.missing[:_NAMED]),
            "unusable": {name: repr(scale) for name, scale in list(coverage.unusable.items())[:_NAMED]},
            "header": f"TRT-{table.version}-{table.algorithm}",
            **(facts or {}),
        }
        made = provenance or Provenance(created=time.time(), creator=f"trt_warmcache {__version__}")
        manifest = manifests.seal(
            key,
            (manifests.describe_blob(ROLE, data),),
            provenance=made,
            labels=labels or Labels(entry=key.name),
            extra=extra,
        )
        try:
            current = self._store.publish(manifest, {ROLE: data})
            found = self._opened(key, current, verify=current != manifest)
        except (StoreError, IntegrityError) as error:
            self._events.emit(
                EventKind.PUBLISH_FAILED, key=key.digest, label=key.name, reason=str(error.reason), text=error.message
            )
            return StoredTable(key, table.digest, None, table)
        if found.digest != table.digest:
            self._events.emit(
                EventKind.CALIBRATION_CONFLICT, key=key.digest, label=key.name, stored=found.digest, refused=table.digest,
                text=f"{key.name} is stored with other scales already; those stay. Is the calibration not deterministic?",
            )  # fmt: skip
            return found
        if current == manifest:
            self._events.emit(EventKind.PUBLISHED, key=key.digest, label=key.name)
        return StoredTable(key, table.digest, current, table)

    def store_table(
        self,
        source: ModelSource,
        calibration: Calibration,
        table: CalibrationTable,
        *,
        name: str | None = None,
        version: str | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> StoredTable:
        """Store a table made elsewhere under the key of a calibration, so that requests with the same one find it.

        Args:
            source: The model that the table was made for.
            calibration: What requests will say; ``Calibration(fingerprint=...)`` needs no data.
            table: The table.
            name: A name for people.
            version: A version for people.
            facts: Further facts for the manifest.

        Raises:
            ModelError: The table belongs to another model; it carries the counts.
        """
        key = self.key(source, calibration, name=name, version=version)
        labels = Labels(name=name or source.stem, version=version or "", model=source.stem, entry=key.name)
        return self.publish(key, table, coverage_of(source, table), facts=facts, labels=labels)

    # ---- vetoes -----------------------------------------------------------------------------------------------

    def vetoes(self, digest: str) -> dict[str, str]:
        """GPUs on which a table is not to be used, with the reasons; see :meth:`veto`.

        Args:
            digest: Digest of the table's key.

        Raises:
            IntegrityError: The note is damaged.
        """
        return self._vetoes.of(digest)

    def veto(self, digest: str, gpu: str, note: str | None) -> dict[str, str]:
        """Note that a table is not to be used on a GPU, because accuracy is poor there; the entry itself stays.

        Args:
            digest: Digest of the table's key.
            gpu: Name of the GPU, or a compute capability such as ``"8.7"``.
            note: Why; None lifts the veto.

        Returns:
            All vetoes in force.

        Raises:
            MissError: No such entry.
            StoreError: The note could not be stored.
        """
        return self._vetoes.note(digest, gpu, note)


@dataclass(frozen=True)
class _Job:
    """One call of `get` on its way."""

    source: ModelSource
    calibration: Calibration
    key: CalibrationKey
    verify: bool
    degrade: bool
    limits: Limits
    name: str | None
    version: str | None
    tensorrt: Callable[[CalibrationRun], CalibrationTable | None] | None

    @cached_property
    def labels(self) -> Labels:
        stem = self.source.stem
        return Labels(name=self.name or stem, version=self.version or "", model=stem, entry=self.key.name)
