"""From a request to a call: model hashed, target known, calibration table found, key derived."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

from trt_warmcache.builders import BuildInputs, CalibrationRun, EngineBuilder, select_builder
from trt_warmcache.calibration import CalibrationTables, Limits, StoredTable
from trt_warmcache.calibration_data import QdqOptions
from trt_warmcache.calibration_table import CalibrationTable
from trt_warmcache.call import Call
from trt_warmcache.errors import BuildError, BuildTimeout, ConfigError, MissError
from trt_warmcache.events import Events
from trt_warmcache.int8 import route
from trt_warmcache.keys import EngineKey, engine_key, label_for
from trt_warmcache.memo import DigestMemo
from trt_warmcache.model import ModelSource, ModelSummary, file_digest
from trt_warmcache.options import BuildOptions, HardwareCompatibility, RefitMode
from trt_warmcache.policy import Policy, StoreErrors
from trt_warmcache.profiles import ShapeProfile, validate_profiles
from trt_warmcache.request import EngineRequest
from trt_warmcache.target import Target
from trt_warmcache.trust import StoreViews

__all__ = ["Resolver", "derive"]

_DEFAULT_OPTIONS = BuildOptions()
_PORTABLE = Target()

#: Stands for the digest of a table that is not made yet, where a key is only explained.
_NO_TABLE = "not calibrated yet"


class Resolver:
    """Makes requests concrete.

    Args:
        views: The store as policies see it.
        builder: ``"auto"``, a flavour, or a builder.
        target: What engines are for where the request does not say; None to find out.
        policy: For requests without one.
        memo: Remembers digests of unchanged files.
        events: Told what happens to calibration tables.
        closed: Whether the manager was closed meanwhile.
    """

    def __init__(
        self,
        views: StoreViews,
        *,
        builder: Any,
        target: Target | None,
        policy: Policy,
        memo: DigestMemo,
        events: Events,
        closed: Callable[[], bool],
    ) -> None:
        self._views = views
        self._builder_choice = builder
        self._builder: EngineBuilder | None = None
        self._target = target
        self._detected: Target | None = None
        self._policy = policy
        self._memo = memo
        self._closed = closed
        self._tables = {id(store): CalibrationTables(store, memo=memo, events=events) for store in views.all}

    def tables_for(self, policy: Policy) -> CalibrationTables:
        """The calibration tables in the store as a policy sees it."""
        return self._tables[id(self._views.of(policy))]

    @property
    def builder(self) -> EngineBuilder:
        """The builder in use; chosen when first needed.

        Raises:
            ConfigError: Nothing fitting is installed.
        """
        if self._builder is None:
            self._builder = select_builder(self._builder_choice, memo=self._memo)
        return self._builder

    def resolve(self, request: EngineRequest, *, tables: Literal["make", "find", "guess"] = "find") -> Call:
        """Make a request concrete. A calibration's table is made if missing, or only found, or left open."""
        if self._closed():
            raise ConfigError("This manager is closed; make another.")
        started = time.perf_counter()
        deadline = None if request.timeout is None else time.monotonic() + request.timeout
        policy = request.policy or self._policy
        options = request.options or _DEFAULT_OPTIONS
        builder = self.builder
        source = ModelSource.open(request.model, memo=self._memo)
        version = builder.version()
        target = self._target_for(request, options)
        plugins: dict[str, str] = {}
        for path in request.plugins:
            digest = file_digest(path, self._memo)
            if plugins.setdefault(path.name, digest) != digest:
                raise ConfigError(
                    f"Two different plugin libraries are called {path.name!r}, and entries list them by name; rename one."
                )
        if plugins and not builder.capabilities.plugins:
            raise ConfigError(f"{builder.flavour} takes no plugin libraries.")
        table, qdq = None, None
        if request.calibration is not None:
            takes = builder.capabilities.calibration_table
            options, qdq = route(options, request.calibration, takes_tables=takes)
            try:
                table = self._table(request, source, target, options, deadline, make=tables == "make")
            except MissError as miss:
                if tables != "guess" or miss.reason == "vetoed":
                    raise
        profiles, key = derive(
            source.summary,
            source.graph_digest if _shares_graph(options) else source.digest,
            request.profiles,
            options,
            builder.flavour,
            version,
            target,
            tuple(plugins.values()),
            _NO_TABLE if table is None and request.calibration is not None else table and table.digest,
            qdq,
            request.recipe,
            policy.driver_in_key,
            request.name or source.stem,
            request.version,
        )
        store = self._views.of(policy)
        call = Call(
            request, policy, deadline, store, builder, source, profiles, options, target, plugins, key, table, qdq
        )
        call.timings["hash"] = time.perf_counter() - started
        return call

    def with_table(self, call: Call) -> Call:
        """The call with its calibration table read and held against the model, as a build needs it.

        A damaged table is made anew, and if it comes out different the call has another key.
        """
        if call.table is None:
            return call
        with call.stage("calibrate"):
            table = self._table(
                call.request, call.source, call.target, call.options, call.deadline, known=call.table, verify=True
            )
        if table.digest != call.table.digest:
            call = self.resolve(call.request)
        call.table = table
        return call

    def _table(
        self,
        request: EngineRequest,
        source: ModelSource,
        target: Target,
        options: BuildOptions,
        deadline: float | None,
        **how: Any,
    ) -> StoredTable:
        policy = request.policy or self._policy

        def wait_seconds() -> float:
            return (
                policy.wait_seconds
                if deadline is None
                else min(policy.wait_seconds, max(0.0, deadline - time.monotonic()))
            )

        def checkpoint() -> None:
            if deadline is not None and time.monotonic() >= deadline:
                raise BuildTimeout(f"Calibrating ran into the request's timeout of {request.timeout:g} s.")
            if self._closed():
                raise BuildError("The manager was closed during a calibration.")

        def on_gpu(run: CalibrationRun) -> CalibrationTable | None:
            inputs = BuildInputs(
                model=source,
                network_name="calibration",
                profiles=validate_profiles(request.profiles, source.summary),
                options=options,
                target=target,
                calibration=run,
                plugins=request.plugins,
                checkpoint=checkpoint,
            )
            table: CalibrationTable | None = self.builder.calibrate(inputs)  # type: ignore[attr-defined]
            return table

        assert request.calibration is not None
        able = self.builder.capabilities.calibration_table and hasattr(self.builder, "calibrate")
        return self.tables_for(policy).get(
            source,
            request.calibration,
            name=request.name,
            version=request.version,
            target=target,
            degrade=policy.store_errors is StoreErrors.DEGRADE,
            limits=Limits(wait_seconds, policy.slow_build_seconds, checkpoint),
            tensorrt=on_gpu if able else None,
            before=lambda: self.builder.check(options, target),
            **how,
        )

    def _target_for(self, request: EngineRequest, options: BuildOptions) -> Target:
        target = request.target or self._target
        if target is None:
            if self.builder.capabilities.needs_gpu:
                if self._detected is None:
                    self._detected = Target.detect()
                target = self._detected
            else:
                target = _PORTABLE
        if self.builder.capabilities.needs_gpu:
            needed = {
                HardwareCompatibility.NONE: ("gpu", "compute_capability"),
                HardwareCompatibility.SAME_COMPUTE_CAPABILITY: ("compute_capability",),
                HardwareCompatibility.AMPERE_PLUS: (),
            }[options.hardware_level]
            missing = [name for name in needed if getattr(target, name) is None]
            if missing:
                raise ConfigError(
                    f"The target must say {' and '.join(missing)}: use Target.detect(), or spell them out."
                )
        return target


def _shares_graph(options: BuildOptions) -> bool:
    """Whether the plan holds no weights that cannot be exchanged, so that one serves all models of a graph."""
    return bool(options.strip_plan) and options.refit is RefitMode.ALL


@lru_cache(maxsize=256)
def derive(
    summary: ModelSummary,
    model: str,
    asked: tuple[ShapeProfile, ...],
    options: BuildOptions,
    flavour: str,
    version: str,
    target: Target,
    plugins: tuple[str, ...],
    calibration: str | None,
    qdq: QdqOptions | None,
    recipe: str | None,
    driver_in_key: bool,
    model_name: str,
    model_version: str | None,
) -> tuple[tuple[ShapeProfile, ...], EngineKey]:
    """Validated profiles and key of a request. Pure, so a service that asks again gets them at once."""
    profiles = validate_profiles(asked, summary)
    name = label_for(
        model_name=model_name,
        version=model_version,
        model=model,
        target=target,
        profiles=profiles,
        shapes=[tensor.dims or () for tensor in summary.inputs],
    )
    key = engine_key(
        model=model,
        profiles=profiles,
        options=options,
        flavour=flavour,
        version=version,
        target=target,
        plugins=plugins,
        calibration=calibration,
        qdq=None if qdq is None else qdq.to_json(),
        recipe=recipe,
        driver_in_key=driver_in_key,
        name=name,
    )
    return profiles, key
