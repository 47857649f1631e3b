"""Finding the stored engine for a call: the exact one, a compatible one, or one with a wider profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

from trt_warmcache.builders import EngineBuilder
from trt_warmcache.call import PLAN, Call
from trt_warmcache.churn import ChurnWatch
from trt_warmcache.engine import Engine, Outcome
from trt_warmcache.errors import IncompatibleError, IntegrityError, StoreError, UntrustedError
from trt_warmcache.events import EventKind, Events
from trt_warmcache.explain import explain, stored_manifests
from trt_warmcache.judge import drift
from trt_warmcache.keys import EngineKey, Kind
from trt_warmcache.ladder import Step, exact_steps, older_versions
from trt_warmcache.manifest import Manifest
from trt_warmcache.policy import Cover, OnMiss, Rung, StoreErrors
from trt_warmcache.profiles import ShapeProfile, cover_size, covers_all
from trt_warmcache.stores import Lock, Payload

__all__ = ["Finder"]

#: Longest search for the nearest entries, for the message of a miss.
_EXPLAIN_SECONDS = 0.05

MakeEngine: TypeAlias = Callable[[Call, EngineKey, Manifest, Payload, Outcome], Engine]


class Finder:
    """Finds stored engines, judges them, and sets damaged ones aside.

    Args:
        events: Told of hits, misses and damage.
        churn: Told of hits.
        make: Makes the engine that callers get from what was found.
    """

    def __init__(self, events: Events, churn: ChurnWatch, make: MakeEngine) -> None:
        self._events = events
        self._churn = churn
        self._make = make
        self._drift_checked: set[tuple[str, Any]] = set()
        self._headers_checked: set[tuple[str, bool]] = set()

    def find(self, call: Call) -> Engine | None:
        """A stored engine for the call: exact, or wider where the policy allows. Emits hit or miss."""
        engine = self.look(call, Outcome.HIT)
        if engine is None and call.policy.ladder:
            engine = self._look_further(call, self._look_down)
        if engine is None and (call.policy.cover is Cover.WIDER or call.policy.on_miss is OnMiss.FALLBACK):
            engine = self._look_further(call, self._look_wider)
        if engine is None:
            self._events.emit(EventKind.MISS, key=call.key.digest, label=call.label)
        return engine

    def look(self, call: Call, outcome: Outcome) -> Engine | None:
        """The engine stored under the call's own key, verified; None where there is none to be used."""
        if call.policy.refresh and outcome is not Outcome.HIT:
            return None
        kind, digest = call.key.kind, call.key.digest
        started = time.perf_counter()
        try:
            manifest = call.store.manifest(kind, digest)
            looked = time.perf_counter()
            call.timings["lookup"] = call.timings.get("lookup", 0.0) + looked - started
            if manifest is None:
                return None
            engine = self.open(call, call.key, manifest, outcome)
        except IntegrityError as error:
            if error.reason == "format":  # another release's entry: no damage, and not ours to judge
                self._events.emit(EventKind.WARNING, key=digest, label=call.label, reason="format", text=error.message)
            else:
                call.damage = (kind, digest, error)
            return None
        except StoreError as error:
            self._store_failed(call, error)
            return None
        call.timings["verify"] = time.perf_counter() - looked
        self._events.emit(EventKind(outcome.value), key=digest, label=call.label)
        self._churn.hit(manifest)
        self._tell_drift(call, manifest)
        return engine

    def _look_further(self, call: Call, look: Callable[[Call], Engine | None]) -> Engine | None:
        """A look for an engine that was not built for exactly this, under the policy's word on failing stores."""
        try:
            with call.stage("lookup"):
                return look(call)
        except StoreError as error:
            self._store_failed(call, error)
            return None

    def _store_failed(self, call: Call, error: StoreError) -> None:
        """Tell a store's failure; it goes on as a miss where the policy says so, and else as the error."""
        self._events.emit(
            EventKind.STORE_ERROR, key=call.key.digest, label=call.label, reason=error.reason.value, text=error.message
        )
        if call.policy.store_errors is StoreErrors.RAISE:
            raise error

    def _tell_drift(self, call: Call, manifest: Manifest) -> None:
        """Report drift of an entry, once for each hook it is asked with."""
        asked = (manifest.key, call.request.configure)
        if asked in self._drift_checked:
            return
        self._drift_checked.add(asked)
        for text in drift(manifest, call.options, call.request.configure):
            self._events.emit(EventKind.DRIFT, key=manifest.key, label=call.label, text=f"{call.label}: {text}")

    def open(self, call: Call, key: EngineKey, manifest: Manifest, outcome: Outcome, *, older: bool = False) -> Engine:
        """The engine of an entry: its plan verified, and its header held against the library in use.

        Args:
            call: Who asks.
            key: The entry's key; the call's own, or that of an entry that may serve instead.
            manifest: The entry.
            outcome: What to tell the caller.
            older: A plan of an earlier release will do.

        Raises:
            IntegrityError: The plan is missing, damaged, or not what its key claims.
            StoreError: It cannot be read.
        """
        ref = manifest.blob(PLAN)
        payload = call.store.fetch(ref, rehash=call.policy.rehash)
        if (ref.digest, older) not in self._headers_checked:
            try:
                _check_header(call.builder, payload.view, older=older)
            except BaseException:
                payload.close()
                raise
            # The same bytes would get the same verdict, and touching a fresh map costs a tenth of a repeated hit.
            self._headers_checked.add((ref.digest, older))
        return self._make(call, key, manifest, payload, outcome)

    def _look_down(self, call: Call) -> Engine | None:
        """A stored engine of a rung that the policy allows; see :mod:`trt_warmcache.ladder`."""
        allowed = [Rung(rung) for rung in call.policy.ladder]
        for step in exact_steps(call.key.parts, call.target, allowed):
            try:
                manifest = call.store.manifest(Kind.ENGINE, step.digest)
            except (IntegrityError, UntrustedError) as error:
                self._pass_over(call, step.digest, error)
                continue
            engine = None if manifest is None else self._open_step(call, step, manifest)
            if engine is not None:
                return engine
        if Rung.VERSION_COMPATIBLE in allowed:
            stored = stored_manifests(call.store, Kind.ENGINE)
            for step, manifest in older_versions(call.key.parts, call.target, allowed, stored):
                engine = self._open_step(call, step, manifest, older=True)
                if engine is not None:
                    return engine
        return None

    def _pass_over(self, call: Call, digest: str, error: IntegrityError | UntrustedError) -> None:
        """Leave out an entry of a rung that cannot be used, setting it aside where it is damaged."""
        if isinstance(error, IntegrityError) and error.reason != "format":
            self.quarantine(call, Kind.ENGINE, digest, error)
        else:
            self._events.emit(EventKind.WARNING, key=digest, label=call.label, reason=error.reason, text=error.message)

    def _open_step(self, call: Call, step: Step, manifest: Manifest, *, older: bool = False) -> Engine | None:
        key = EngineKey(Kind.ENGINE, manifest.parts, manifest.labels.entry)
        try:
            engine = self.open(call, key, manifest, Outcome.COVERED, older=older)
        except IntegrityError as error:
            self._pass_over(call, key.digest, error)
            return None
        engine.reason = step.reason
        self._events.emit(EventKind.COVERED, key=key.digest, label=call.label, reason="ladder", text=step.reason)
        return engine

    def _look_wider(self, call: Call) -> Engine | None:
        wanted = {part: value for part, value in call.key.parts.items() if part != "profiles"}
        candidates = []
        for manifest in stored_manifests(call.store, Kind.ENGINE):
            parts = dict(manifest.parts)
            stored = tuple(ShapeProfile.from_json(profile) for profile in parts.pop("profiles", ()))
            if parts == wanted and stored and covers_all(stored, call.profiles):
                candidates.append((cover_size(stored), manifest.key, manifest))
        for _, digest, manifest in sorted(candidates, key=lambda found: found[:2]):
            key = EngineKey(Kind.ENGINE, manifest.parts, manifest.labels.entry)
            try:
                engine = self.open(call, key, manifest, Outcome.COVERED)
            except IntegrityError as error:
                self.quarantine(call, Kind.ENGINE, digest, error)
                continue
            engine.reason = "built with a wider profile"
            self._events.emit(EventKind.COVERED, key=digest, label=call.label)
            return engine
        return None

    def explained(self, call: Call) -> str:
        """The nearest entries and what differs, for the message of a miss."""
        try:
            return str(explain(call.store, call.key, seconds=_EXPLAIN_SECONDS))
        except StoreError as error:
            return f"(The store could not be searched for the nearest entry: {error.message})"

    def raise_damage(self, call: Call) -> None:
        """Raise what the last look found damaged, if anything, where nobody is going to build it anew."""
        if call.damage is None:
            return
        error = call.damage[2]
        lock = self._try_lock(call)
        if lock is not None:
            # Only with the lock: otherwise a builder may just have put a good entry in the damaged one's place.
            try:
                call.take_damage()
                if self.look(call, Outcome.HIT) is None and call.damage is not None:
                    self.quarantine(call, *call.damage)
            finally:
                lock.release()
        raise error

    def _try_lock(self, call: Call) -> Lock | None:
        try:
            lock = call.store.lock(call.key.digest)
            return lock if lock is not None and lock.try_acquire() else None
        except StoreError:
            return None

    def quarantine(self, call: Call, kind: Kind, digest: str, error: IntegrityError) -> None:
        """Set a damaged entry aside, as far as the store allows."""
        self._events.emit(EventKind.QUARANTINED, key=digest, label=call.label, reason=error.reason, text=error.message)
        try:
            call.store.quarantine(kind, digest, error)
        except StoreError as denied:
            self._events.emit(
                EventKind.STORE_ERROR, key=digest, label=call.label, reason=denied.reason.value, text=denied.message
            )


def _check_header(builder: EngineBuilder, plan: memoryview, *, older: bool) -> None:
    try:
        if older:
            builder.check_plan(plan, older=True)
        else:
            builder.check_plan(plan)
    except IncompatibleError as error:
        # The key says that the plan is for this very library; bytes that say otherwise are not what they claim.
        raise IntegrityError(f"The stored plan contradicts its key: {error.message}", reason="header") from error
