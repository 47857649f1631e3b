"""The one place that sees stores and builders together: a request goes in, an engine comes out.

get: resolve ─► find ───────────────────────────────────────────────► HIT
                 │ nothing there, or damaged (set aside, told)
                 ▼
     wait for the lock, looking ────────────────────────────────────► JOINED
                 ▼
     timing, calibration ─► build ─► seal ─► publish ─► merge timing ► BUILT
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

from trt_warmcache import manifest as manifests
from trt_warmcache.build import BuildStage
from trt_warmcache.builders import EngineBuilder, LoadNeeds
from trt_warmcache.calibration import StoredTable
from trt_warmcache.calibration_data import Calibration
from trt_warmcache.calibration_table import CalibrationTable
from trt_warmcache.call import PLAN, Call
from trt_warmcache.churn import ChurnWatch
from trt_warmcache.engine import Engine, Outcome
from trt_warmcache.errors import (
    BuildError,
    BuildTimeout,
    ConfigError,
    IncompatibleError,
    IntegrityError,
    MissError,
    StoreError,
    WarmCacheError,
)
from trt_warmcache.events import EventKind, Events, Hook
from trt_warmcache.explain import Explanation, explain
from trt_warmcache.find import Finder
from trt_warmcache.judge import History, told_apart
from trt_warmcache.keys import EngineKey
from trt_warmcache.manifest import Manifest
from trt_warmcache.memo import DigestMemo, default_memo_folder
from trt_warmcache.model import ModelSource
from trt_warmcache.policy import OnMiss, OnWait, Policy
from trt_warmcache.request import EngineRequest, as_request
from trt_warmcache.resolve import Resolver
from trt_warmcache.runtime_cache import RuntimeCache
from trt_warmcache.runtime_cache import key_for as kernels_key
from trt_warmcache.singleflight import SingleFlight, WaitLimits, acquire_or_find
from trt_warmcache.stores import Payload, Store, open_store
from trt_warmcache.stores._local import LockUnavailable
from trt_warmcache.target import Target
from trt_warmcache.timing import TimingSession
from trt_warmcache.trust import Keyring, Signer, StoreViews
from trt_warmcache.uses import UseLog
from trt_warmcache.warm import WarmReport, WarmRow

__all__ = ["EngineManager"]


class EngineManager:
    """Gets engines, building each at most once.

    Safe for use by many threads. Cheap to make: neither network nor GPU is touched before the first request.

    Args:
        store: A folder, an fsspec URL, a :class:`~trt_warmcache.stores.Store`, or a list of them, nearest first.
        builder: ``"auto"``, ``"tensorrt"``, ``"tensorrt_rtx"``, or an
            :class:`~trt_warmcache.builders.EngineBuilder`.
        target: What engines are for. None: for classic TensorRT the GPU found here; for TensorRT-RTX the portable
            plan, and no GPU is looked for.
        policy: See :class:`~trt_warmcache.Policy`.
        hooks: Called with every :class:`~trt_warmcache.Event`.
        memo: Remembers digests of unchanged files, so that a model is not hashed at every start. None keeps them in
            the user's cache folder (``$XDG_CACHE_HOME/trt_warmcache/digests``).
        signer: Signs every manifest published; see :mod:`trt_warmcache.trust`.
        keyring: Keys whose signatures count where the policy says ``trust="signed"``; the signer's own among them.

    Attributes:
        store: The store, or all layers as one.
        tables: The store's INT8 calibration tables.

    Raises:
        ConfigError: An argument that cannot be meant.
    """

    def __init__(
        self,
        store: Any,
        *,
        builder: Any = "auto",
        target: Target | None = None,
        policy: Policy | None = None,
        hooks: Iterable[Hook] = (),
        memo: DigestMemo | None = None,
        signer: Signer | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        if target is not None and not isinstance(target, Target):
            raise ConfigError(f"target must be a Target, not {target!r}.")
        if policy is not None and not isinstance(policy, Policy):
            raise ConfigError(f"policy must be a Policy, not {policy!r}.")
        if isinstance(builder, str) and builder not in {"auto", "tensorrt", "tensorrt_rtx"}:
            raise ConfigError(
                f"builder must be 'auto', 'tensorrt', 'tensorrt_rtx' or an EngineBuilder, not {builder!r}."
            )
        if not isinstance(builder, (str, EngineBuilder)):
            raise ConfigError(
                f"builder must be 'auto', 'tensorrt', 'tensorrt_rtx' or an EngineBuilder, not {builder!r}."
            )
        hooks = tuple(hooks)
        self._recipe = (store, builder, target, policy, hooks)
        self.policy = policy if policy is not None else Policy()
        self._memo = (
            memo if memo is not None else DigestMemo(default_memo_folder(os.environ), strict=self.policy.rehash)
        )
        self._uses = UseLog(None if self._memo.folder is None else self._memo.folder / "uses")
        self._events = Events((*hooks, self._uses))
        self._churn = ChurnWatch(self._events)
        opened = open_store(store, memo=self._memo)
        opened.bind(self._events)
        self._keys = (signer, keyring)
        self._closed = False
        views = StoreViews(opened, default=self.policy, signer=signer, keyring=keyring)
        self.store: Store = views.default
        self._owns_store = not isinstance(store, Store)
        self._resolver = Resolver(
            views,
            builder=builder,
            target=target,
            policy=self.policy,
            memo=self._memo,
            events=self._events,
            closed=lambda: self._closed,
        )
        self.tables = self._resolver.tables_for(self.policy)
        self._finder = Finder(self._events, self._churn, self._engine)
        self._guard = threading.Lock()
        self._flights: SingleFlight[Engine] = SingleFlight()
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._background: ThreadPoolExecutor | None = None
        self._pending: dict[str, Future[Engine]] = {}
        #: Engines that were rejected after this process had built them; building them again would change nothing.
        self._rejected: dict[str, str] = {}
        self._lockless_told = False

    # ---- the public calls -------------------------------------------------------------------------------------

    def get(self, model: Any, **fields: Any) -> Engine:
        """An engine for a request, built at most once per key across threads, processes and nodes.

        Args:
            model: A model, or a complete :class:`~trt_warmcache.EngineRequest`.
            **fields: Fields of the request; see :class:`~trt_warmcache.EngineRequest`.

        Raises:
            ConfigError: The request cannot be meant, or the builder cannot do what it asks.
            ModelError: The model cannot be read or is refused by the parser.
            BuildError: TensorRT gave no engine.
            BuildTimeout: Waiting or building took longer than allowed.
            StoreError: The store could not be read. Trouble with storing a finished engine is no error: see
                ``Engine.publish_error``.
            MissError: Nothing is stored and the policy forbids building; or the calibration table is missing and there
                is no data to make one, or it is vetoed for the target.
        """
        request = as_request(model, fields)
        on_miss = (request.policy or self.policy).on_miss
        try:
            call = self._resolver.resolve(request, tables="make" if on_miss is OnMiss.BUILD else "find")
        except MissError as miss:
            if on_miss is not OnMiss.FALLBACK or request.calibration is None or request.calibration.data is None:
                raise
            pending = self._in_background(
                miss.key, lambda: self._build_once(self._resolver.resolve(request, tables="make"))
            )
            raise MissError(
                f"{miss.message} It is being made in the background, and the engine after it.",
                key=miss.key,
                pending=pending,
            ) from miss
        if call.policy.refresh:
            return self._build_once(call)
        engine = self._finder.find(call)
        if engine is not None:
            return engine
        if call.policy.on_miss is OnMiss.RAISE:
            self._finder.raise_damage(call)
            raise MissError(
                f"No stored engine, and the policy forbids building.\n{self._finder.explained(call)}\nBuild it beforehand with warm() or trt-warmcache build.",
                key=call.key.digest,
            )
        if call.policy.on_miss is OnMiss.FALLBACK:
            raise MissError(
                f"No stored engine for {call.label} yet; it is being built in the background. Serve without it, and ask again later.",
                key=call.key.digest,
                pending=self._build_in_background(call),
            )
        return self._build_once(call)

    def lookup(self, model: Any, **fields: Any) -> Engine | None:
        """Like :meth:`get`, but never builds: the engine, or None.

        Raises:
            IntegrityError: There is an entry and it is damaged; it was set aside where the store allows that.
            StoreError: The store could not be read.
        """
        try:
            call = self._resolver.resolve(as_request(model, fields))
        except MissError:
            return None  # no calibration table, so no engine made with it
        engine = self._finder.find(call)
        if engine is None:
            self._finder.raise_damage(call)
        return engine

    def key(self, model: Any, **fields: Any) -> EngineKey:
        """The key of a request. The store is not touched, except to find the table of a request with a calibration.

        Raises:
            MissError: The calibration has no table yet, and an engine's key names its table.
        """
        return self._resolver.resolve(as_request(model, fields)).key

    def calibrate(
        self, model: Any, calibration: Calibration, *, name: str | None = None, version: str | None = None
    ) -> StoredTable:
        """The INT8 calibration table of a model and its data, made at most once; needs no TensorRT.

        :meth:`get` does this by itself. On its own it serves to calibrate where the data is, for machines that only
        know the data's fingerprint.

        Args:
            model: As for :meth:`get`.
            calibration: The data, or the table itself.
            name: A name for people.
            version: A version for people.

        Raises:
            ConfigError: Data that does not fit the model, or is not the same on each pass.
            ModelError: The model cannot be run, or the table belongs to another model.
            MissError: There is no data, and no table is stored for its fingerprint.
        """
        source = ModelSource.open(model, memo=self._memo)
        return self.tables.get(source, calibration, name=name, version=version, verify=True)

    def explain(self, model: Any, *, nearest: int = 3, **fields: Any) -> Explanation:
        """Whether a request would hit, and otherwise which stored entries come nearest and in what they differ.

        Args:
            model: As for :meth:`get`.
            nearest: How many entries to compare in detail.
            **fields: As for :meth:`get`.
        """
        return explain(self.store, self._resolver.resolve(as_request(model, fields), tables="guess").key, limit=nearest)

    def warm(
        self,
        requests: Iterable[EngineRequest | Any],
        *,
        max_workers: int | None = None,
        executor: Executor | None = None,
        progress: Callable[[WarmRow], None] | None = None,
    ) -> WarmReport:
        """Build or fetch many engines. Never stops at the first failure.

        Args:
            requests: Requests, or models that need no further fields.
            max_workers: Threads to use without an `executor`.
            executor: Any ``concurrent.futures.Executor``, also one whose workers are other processes or hosts; those
                open the same store by the path or URL given to this manager.
            progress: Called on this thread with each row as it finishes.

        Returns:
            One row per request, in order.
        """
        asked = [request if isinstance(request, EngineRequest) else EngineRequest(request) for request in requests]
        rows: list[WarmRow | None] = [None] * len(asked)
        own = (
            ThreadPoolExecutor(max_workers or min(4, len(asked) or 1), "trt_warmcache-warm")
            if executor is None
            else None
        )
        pool = own if own is not None else executor
        assert pool is not None
        try:
            local = isinstance(pool, ThreadPoolExecutor)
            if not local:
                self._require_portable()
            numbers = {
                (
                    pool.submit(self._warm_row, request)
                    if local
                    else pool.submit(_warm_elsewhere, (*self._recipe[:4], *self._keys), request)
                ): number
                for number, request in enumerate(asked)
            }
            for done in as_completed(numbers):
                number = numbers[done]
                failure = done.exception()
                row = done.result() if failure is None else WarmRow.failed(asked[number], failure)
                rows[number] = row
                if progress is not None:
                    progress(row)
        finally:
            if own is not None:
                own.shutdown(wait=True, cancel_futures=True)
        return WarmReport(tuple(row for row in rows if row is not None))

    def import_table(
        self,
        model: Any,
        table: CalibrationTable,
        calibration: Calibration,
        *,
        name: str | None = None,
        version: str | None = None,
    ) -> StoredTable:
        """Store a calibration table made elsewhere, so that requests with the same calibration find it.

        Args:
            model: The model that the table was made for.
            table: The table; :func:`~trt_warmcache.read_table` reads files of several tools.
            calibration: What requests will say. ``Calibration(fingerprint="...")`` needs no data.
            name: A name for people.
            version: A version for people.

        Returns:
            The table in force: an entry that is stored already stays as it is.

        Raises:
            ModelError: The table belongs to another model; the error carries the counts.
        """
        source = ModelSource.open(model, memo=self._memo)
        return self.tables.store_table(source, calibration, table, name=name, version=version)

    async def aget(self, model: Any, **fields: Any) -> Engine:
        """:meth:`get` for asyncio; the loop is never blocked."""
        import asyncio

        return await asyncio.to_thread(self.get, model, **fields)

    async def awarm(self, requests: Iterable[EngineRequest | Any], **options: Any) -> WarmReport:
        """:meth:`warm` for asyncio; the loop is never blocked."""
        import asyncio

        return await asyncio.to_thread(self.warm, list(requests), **options)

    def runtime_cache(self, engine: Any, *, target: Target | None = None) -> RuntimeCache:
        """The kernels that TensorRT-RTX compiles when an engine first runs, kept in this manager's store.

        Args:
            engine: What :meth:`Engine.deserialize` gave.
            target: The GPU that runs; None detects it.

        Returns:
            A context manager: use its ``config`` to create execution contexts, and leave it after the first runs.

        Raises:
            ConfigError: The engine is not TensorRT-RTX's, or the GPU cannot be told.
        """
        key = kernels_key(self.builder.flavour, self.builder.version(), target or Target.detect())
        return RuntimeCache(self.store, key, engine, events=self._events)

    def counters(self) -> dict[str, int]:
        """How often each kind of event occurred in this manager."""
        return self._events.counts()

    def close(self) -> None:
        """Stop background work and release maps, locks and threads. Idempotent.

        Plans of engines got from this manager are unmapped.
        """
        with self._guard:
            self._closed = True
            background, self._background = self._background, None
        if background is not None:
            background.shutdown(wait=True, cancel_futures=True)
        for engine in list(self._engines):
            engine.close()
        self._uses.flush()
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> EngineManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"EngineManager({self.store.url!r}, builder={self._recipe[1]!r})"

    @property
    def builder(self) -> EngineBuilder:
        """The builder in use; chosen when first needed.

        Raises:
            ConfigError: Nothing fitting is installed.
        """
        return self._resolver.builder

    # ---- building ---------------------------------------------------------------------------------------------

    def _build_once(self, call: Call) -> Engine:
        call = self._resolver.with_table(call)
        leader, joined = self._flights.run(
            call.key.digest, lambda: self._build_or_join(call), timeout=lambda: self._wait_limit(call)
        )
        if not joined:
            return leader
        # Another thread's engine may be closed by its owner, so this caller gets one of its own.
        engine = self._finder.look(call, Outcome.JOINED) if leader.stored else None
        if engine is None:
            payload = Payload(leader.plan)
            engine = self._engine(call, leader.key, leader.manifest, payload, Outcome.JOINED)
            engine.stored, engine.publish_error = leader.stored, leader.publish_error
            self._events.emit(EventKind.JOINED, key=call.key.digest, label=call.label)
        return engine

    def _wait_limit(self, call: Call) -> float:
        remaining = call.remaining()
        return call.policy.wait_seconds if remaining is None else min(remaining, call.policy.wait_seconds)

    def _build_or_join(self, call: Call) -> Engine:
        """The part that at most one thread of this process runs per key: wait for the lock, or for the engine."""
        lock = call.store.lock(call.key.digest)
        if lock is None:
            return self._build_and_publish(call)
        try:
            with call.stage("wait"):
                found = acquire_or_find(lock, lambda: self._finder.look(call, Outcome.JOINED), self._limits(call))
        except LockUnavailable as error:
            self._tell_lockless(call, error)
            return self._build_and_publish(call)
        except StoreError as error:
            # A folder that cannot even hold a lock file cannot hold the engine either; publishing will say so.
            self._events.emit(
                EventKind.LOCK_UNAVAILABLE,
                key=call.key.digest,
                label=call.label,
                reason=error.reason.value,
                text=error.message,
            )
            return self._build_and_publish(call)
        except BuildTimeout:
            if call.policy.on_wait is OnWait.RAISE or call.remaining() == 0:
                raise
            return self._build_and_publish(call)
        if found is not None:
            return found
        try:
            # Between the last look and the lock somebody may have finished; and damage is judged only here, where
            # no writer of this key can be at work.
            call.take_damage()
            engine = self._finder.look(call, Outcome.JOINED)
            if engine is not None:
                return engine
            damage = call.take_damage()
            if damage is not None:
                self._finder.quarantine(call, *damage)
            return self._build_and_publish(call)
        finally:
            lock.release()

    def _limits(self, call: Call) -> WaitLimits:
        def told(waited: float, owner: str) -> None:
            text = f"waiting for {call.label}: {owner or 'another process'} has been building it for at least {waited:.0f} s"
            self._events.emit(
                EventKind.WAIT, key=call.key.digest, label=call.label, seconds=waited, text=text, owner=owner
            )

        return WaitLimits(self._wait_limit(call), max(call.policy.slow_build_seconds, 0.01), told)

    def _tell_lockless(self, call: Call, error: StoreError) -> None:
        if not self._lockless_told:
            self._lockless_told = True
            self._events.emit(EventKind.LOCK_UNAVAILABLE, key=call.key.digest, label=call.label, text=error.message)

    def _build_and_publish(self, call: Call) -> Engine:
        timing = TimingSession.begin(
            call.store,
            call.builder,
            call.target,
            call.options,
            model_name=call.labels().name,
            events=self._events,
        )
        history = History.of(call.store, call.key)
        started_at = time.time()
        self._warn_if_not_writable(call)
        stage = BuildStage(call.builder, self._events, memo=self._memo, closed=lambda: self._closed)
        with call.stage("build"):
            output = stage.run(call, timing.blob, history)
        provenance = stage.provenance(call, output, started_at)
        plan = memoryview(output.plan).cast("B").toreadonly()
        with call.stage("publish"):
            ref = manifests.describe_blob(PLAN, plan)
            extra = stage.facts(call, output, timing, history.suspicion(plan.nbytes))
            manifest = manifests.seal(call.key, (ref,), provenance=provenance, labels=call.labels(), extra=extra)
            self._probe(call, manifest, plan)
            engine = self._publish(call, manifest, plan)
            timing.finish(output, provenance)
        return engine

    def _probe(self, call: Call, manifest: Manifest, plan: memoryview) -> None:
        """Let the caller look at the engine before anybody else can get it."""
        if call.request.probe is None:
            return
        engine = self._engine(call, call.key, manifest, Payload(plan), Outcome.BUILT)
        engine.stored = False
        try:
            good = call.request.probe(engine)
        except WarmCacheError:
            raise
        except Exception as error:
            raise BuildError(f"The probe of {call.label} failed with {type(error).__name__}: {error}") from error
        if not good:
            raise BuildError(f"The probe refused the engine of {call.label}; it is not stored.")

    def _warn_if_not_writable(self, call: Call) -> None:
        if not call.store.capabilities.writable:
            self._events.emit(
                EventKind.WARNING, key=call.key.digest, label=call.label, reason="read-only",
                text=f"{call.label} is built now and cannot be stored: {call.store.url} is not writable",
            )  # fmt: skip

    def _publish(self, call: Call, manifest: Manifest, plan: memoryview) -> Engine:
        key = call.key
        try:
            current = call.store.publish(manifest, {PLAN: plan}, replacing=self._to_replace(call))
            if current != manifest:
                # Somebody built the same without seeing our lock. Theirs stays, and everybody uses one plan.
                self._events.emit(EventKind.PUBLISH_LOST, key=key.digest, label=call.label)
                return self._finder.open(call, key, current, Outcome.BUILT)
            # A store may accept writes and drop them; only a look of its own tells.
            if call.store.manifest(key.kind, key.digest) is None:
                raise StoreError(  # noqa: TRY301  handled like any other failure to store
                    f"{call.store.url} accepted the entry and does not show it; every start will build again. Check the store.",
                    store=call.store.url,
                )
        except StoreError as error:
            self._events.emit(
                EventKind.PUBLISH_FAILED,
                key=key.digest,
                label=call.label,
                reason=error.reason.value,
                text=error.message,
            )
            engine = self._engine(call, key, manifest, Payload(plan), Outcome.BUILT)
            engine.stored, engine.publish_error = False, error
            return engine
        except IntegrityError as error:
            # What lies under the key is damaged, or belongs to another release and must stay.
            if error.reason != "format":
                self._finder.quarantine(call, key.kind, key.digest, error)
            engine = self._engine(call, key, manifest, Payload(plan), Outcome.BUILT)
            engine.stored, engine.publish_error = False, StoreError(error.message, store=call.store.url)
            return engine
        self._events.emit(EventKind.PUBLISHED, key=key.digest, label=call.label)
        self._churn.built(manifest)
        return self._engine(call, key, manifest, Payload(plan), Outcome.BUILT)

    def _to_replace(self, call: Call) -> Manifest | None:
        if not call.policy.refresh:
            return None
        try:
            return call.store.manifest(call.key.kind, call.key.digest)
        except IntegrityError as error:
            self._finder.quarantine(call, call.key.kind, call.key.digest, error)
            return None

    def _build_in_background(self, call: Call) -> Future[Engine]:
        call.policy = call.policy.detached()
        return self._in_background(call.key.digest, lambda: self._build_once(call))

    def _in_background(self, digest: str, work: Callable[[], Engine]) -> Future[Engine]:
        with self._guard:
            if self._background is None:
                self._background = ThreadPoolExecutor(1, "trt_warmcache-build")
            pending = self._pending.get(digest)
            if pending is None or pending.done():
                pending = self._background.submit(work)
                self._pending[digest] = pending
        return pending

    # ---- running ----------------------------------------------------------------------------------------------

    def _load(self, call: Call, engine: Engine) -> Any:
        """Deserialize; an entry that turns out to be unusable is set aside and built anew, once."""
        try:
            return self._deserialize(call, engine)
        except IntegrityError as error:
            first: WarmCacheError = error
        except IncompatibleError as error:
            if not error.about_plan:
                # The machine's fault: no driver, no memory, another GPU. The entry may be fine elsewhere.
                raise told_apart(error, engine.manifest, call.target) from error
            first = error
        digest = engine.key.digest
        if digest in self._rejected:
            self._tell_ineffective(call, f"{call.label} was rejected again: {first.message}")
            raise first
        if engine.outcome is Outcome.BUILT or call.policy.on_miss is not OnMiss.BUILD:
            if engine.outcome is Outcome.BUILT:
                self._rejected[digest] = first.message
            raise first
        self._finder.quarantine(
            call, engine.key.kind, engine.key.digest, IntegrityError(first.message, reason="rejected")
        )
        fresh = self._build_once(call)
        try:
            return self._deserialize(call, fresh)
        except (IncompatibleError, IntegrityError) as second:
            self._rejected[digest] = self._rejected[call.key.digest] = second.message
            self._tell_ineffective(call, f"{call.label} was rejected, rebuilt, and rejected again: {second.message}")
            raise IncompatibleError(
                f"The stored plan was rejected ({first.message}), and so was one built anew ({second.message})."
            ) from second

    def _deserialize(self, call: Call, engine: Engine) -> Any:
        parts = engine.key.parts
        needs = LoadNeeds(
            plugins=call.request.plugins,
            creators=tuple(engine.manifest.extra.get("plugins", ())),
            host_code=bool(parts.get("options.version_compatible")),
            weights=call.source if engine.stripped else None,
        )
        return (
            call.builder.deserialize(engine.plan)
            if needs == LoadNeeds()
            else call.builder.deserialize(engine.plan, needs)
        )

    def _engine(self, call: Call, key: EngineKey, manifest: Manifest, payload: Payload, outcome: Outcome) -> Engine:
        engine = Engine(
            outcome, key, manifest, call.timings, _payload=payload, _load=lambda engine: self._load(call, engine)
        )
        self._engines.add(engine)
        return engine

    def _tell_ineffective(self, call: Call, text: str) -> None:
        self._events.emit(EventKind.INEFFECTIVE, key=call.key.digest, label=call.label, text=text)

    # ---- other processes --------------------------------------------------------------------------------------

    def _warm_row(self, request: EngineRequest) -> WarmRow:
        started = time.perf_counter()
        engine = self.get(replace(request, policy=(request.policy or self.policy).detached()))
        try:
            return WarmRow.done(request, engine, time.perf_counter() - started)
        finally:
            engine.close()

    def _require_portable(self) -> None:
        store = self._recipe[0]
        stores = store if isinstance(store, (list, tuple)) else [store]
        if any(isinstance(one, Store) for one in stores):
            raise ConfigError(
                "Workers in other processes open the store themselves: give the manager a path or URL instead of a Store object."
            )


def _warm_elsewhere(recipe: Sequence[Any], request: EngineRequest) -> WarmRow:
    """One row of `warm` in a worker process, with a manager of its own over the same store."""
    store, builder, target, policy, signer, keyring = recipe
    with EngineManager(store, builder=builder, target=target, policy=policy, signer=signer, keyring=keyring) as manager:
        return manager._warm_row(request)
