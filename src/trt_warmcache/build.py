"""The building itself: a builder run under a call's limits, watched, and its output judged. No store is touched."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

from trt_warmcache._version import __version__
from trt_warmcache.builders import BuildInputs, BuildOutput, EngineBuilder, Progress, isolated
from trt_warmcache.call import Call
from trt_warmcache.errors import BuildError, BuildTimeout, WarmCacheError
from trt_warmcache.events import EventKind, Events
from trt_warmcache.int8 import bytes_for_builder, quantized
from trt_warmcache.judge import History, fingerprint
from trt_warmcache.manifest import Provenance
from trt_warmcache.memo import DigestMemo
from trt_warmcache.policy import OnSuspect
from trt_warmcache.singleflight import Heartbeat
from trt_warmcache.timing import TimingSession

__all__ = ["BuildStage"]


class BuildStage:
    """Builds for calls that found nothing stored.

    Args:
        builder: What builds.
        events: Told of start, progress, slowness and end.
        memo: Remembers digests of quantized models.
        closed: Whether the manager was closed meanwhile; a build then stops at its next step.
    """

    def __init__(self, builder: EngineBuilder, events: Events, *, memo: DigestMemo, closed: Callable[[], bool]) -> None:
        self._builder = builder
        self._events = events
        self._memo = memo
        self._closed = closed

    def run(self, call: Call, timing_blob: bytes | None, history: History) -> BuildOutput:
        """Build, and make sure that what came back is a plan for what was asked.

        Args:
            call: What is wanted.
            timing_blob: Timing cache to start from.
            history: Earlier builds of the same model, for an estimate of the time.

        Raises:
            BuildError: No plan, or one for something else.
            BuildTimeout: Longer than the policy or the request allows.
            ModelError: The parser refused the model, or its files changed meanwhile.
        """
        policy, key = call.policy, call.key.digest
        limit = policy.build_seconds
        started = time.monotonic()

        def checkpoint() -> None:
            spent = time.monotonic() - started
            if limit is not None and spent > limit:
                raise BuildTimeout(
                    f"Building {call.label} took longer than the {limit:g} s that the policy allows.", waited=spent
                )
            if call.remaining() == 0:
                raise BuildTimeout(
                    f"Building {call.label} ran into the request's timeout of {call.request.timeout:g} s.", waited=spent
                )
            if self._closed():
                raise BuildError(f"The manager was closed while {call.label} was being built.")

        def on_progress(step: Progress) -> None:
            self._events.emit(
                EventKind.BUILD_PROGRESS, key=key, label=call.label, seconds=time.monotonic() - started,
                phase=step.phase, parent=step.parent, step=step.step, total=step.total,
            )  # fmt: skip

        def slow(spent: float) -> None:
            self._events.emit(
                EventKind.BUILD_SLOW, key=key, label=call.label, seconds=spent, text=f"still building {call.label}"
            )

        self._builder.check(call.options, call.target)
        model, table = call.source, None
        if call.table is not None:
            assert call.table.table is not None
            if call.qdq is None:
                table = bytes_for_builder(call.table.table)
            else:
                model = quantized(call.source, call.table.table, call.qdq, memo=self._memo)
        inputs = BuildInputs(
            model=model,
            network_name=f"trtwc-{key[:16]}",
            profiles=call.profiles,
            options=call.options,
            target=call.target,
            timing=timing_blob,
            calibration=table,
            plugins=call.request.plugins,
            configure=call.request.configure,
            on_progress=on_progress,
            checkpoint=checkpoint,
        )
        builder = isolated(
            self._builder,
            policy,
            target=call.target,
            configure=call.request.configure,
            timed=call.deadline is not None,
        )
        expected: dict[str, Any] = {} if history.seconds is None else {"expected_seconds": history.seconds}
        self._events.emit(EventKind.BUILD_START, key=key, label=call.label, **expected)
        try:
            checkpoint()
            with Heartbeat(max(policy.slow_build_seconds, 0.01), slow):
                output = builder.build(inputs)
            self._check_output(call, output)
            call.source.verify_unchanged()
        except BaseException as error:
            self._events.emit(
                EventKind.BUILD_FAILED,
                key=key,
                label=call.label,
                seconds=time.monotonic() - started,
                text=f"{call.label}: {error}",
            )
            if isinstance(error, (WarmCacheError, KeyboardInterrupt, SystemExit, MemoryError)):
                raise
            raise BuildError(f"The builder failed with {type(error).__name__}: {error}") from error
        self._events.emit(EventKind.BUILD_END, key=key, label=call.label, seconds=time.monotonic() - started)
        self._tell_version_conflict(call)
        return output

    def _check_output(self, call: Call, output: Any) -> None:
        if not isinstance(output, BuildOutput):
            raise BuildError(
                f"The builder {type(self._builder).__name__} returned {type(output).__name__} instead of a BuildOutput."
            )
        try:
            size = memoryview(output.plan).nbytes
        except TypeError as error:
            raise BuildError(
                f"The builder returned a plan that is no buffer but {type(output.plan).__name__}."
            ) from error
        if size == 0:
            raise BuildError("The builder returned an empty plan.")
        asked = str(call.key.parts["builder.version"])
        if any(here != there for here, there in zip(output.library.split("."), asked.split("."), strict=False) if here):
            raise BuildError(
                f"The engine was asked of {self._builder.flavour} {asked} and built by {output.library}; it is not stored. Make sure that building processes load the same library as this one."
            )
        for fact in ("compute_capability", "gpu"):
            built, wanted = output.target.get(fact), getattr(call.target, fact)
            if built is not None and wanted is not None and built != wanted:
                raise BuildError(
                    f"The engine was asked for {fact} {wanted} and built on {built}; it is not stored. Build it on the machine it is for."
                )

    def _tell_version_conflict(self, call: Call) -> None:
        look = getattr(self._builder, "version_conflict", None)
        conflict = look() if look is not None else None
        if conflict is not None:
            bindings, library = conflict
            self._events.emit(
                EventKind.VERSION_CONFLICT, key=call.key.digest, label=call.label, bindings=bindings, library=library,
                text=f"the bindings are version {bindings}, the library loaded in this process is {library}; keys use the latter",
            )  # fmt: skip

    def provenance(self, call: Call, output: BuildOutput, started_at: float) -> Provenance:
        """Who built, when, how long it took, and with what."""
        return Provenance(
            created=started_at,
            build_seconds=call.timings["build"],
            creator=f"trt_warmcache {__version__}",
            host=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
            library=output.library or self._builder.version(),
            target={**call.target.to_json(), **output.target},
            config=dict(output.config),
            warnings=output.warnings,
            plugins=call.plugins,
            model_bytes=call.source.total_bytes,
        )

    def facts(self, call: Call, output: BuildOutput, timing: TimingSession, suspicion: str) -> dict[str, Any]:
        """What an entry says beyond key and provenance: the entries it was made with, what it needs, what is odd."""
        configure = call.request.configure
        if suspicion:
            self._events.emit(
                EventKind.SUSPECT,
                key=call.key.digest,
                label=call.label,
                reason="size",
                text=f"{call.label}: {suspicion}",
            )
            if call.policy.on_suspect is OnSuspect.REFUSE:
                raise BuildError(
                    f"The engine of {call.label} is not stored: {suspicion}. Build again, or look into it."
                )
        facts = {
            "configure": None if configure is None else fingerprint(configure),
            "suspect": suspicion or None,
            "calibration_key": None if call.table is None else call.table.key.digest,
            "timing_key": None if timing.key is None else timing.key.digest,
            "tactics": None if output.tactics is None else output.tactics.to_json(),
            "plugins": list(output.plugins) or None,
        }
        return {name: value for name, value in facts.items() if value is not None}
