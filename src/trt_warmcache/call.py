"""One call of `get` on its way: the request made concrete, and the key that follows from it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

from trt_warmcache.calibration import StoredTable
from trt_warmcache.calibration_data import QdqOptions
from trt_warmcache.errors import IntegrityError
from trt_warmcache.keys import EngineKey, Kind, engine_key, label_for
from trt_warmcache.manifest import Labels
from trt_warmcache.model import ModelSource, ModelSummary
from trt_warmcache.options import BuildOptions, RefitMode
from trt_warmcache.policy import Policy
from trt_warmcache.profiles import ShapeProfile, validate_profiles
from trt_warmcache.request import EngineRequest
from trt_warmcache.target import Target

__all__ = ["Call", "derive", "shares_graph"]


@dataclass
class Call:
    """One call of `get` on its way: the request made concrete, the clock, and the time spent so far."""

    request: EngineRequest
    policy: Policy
    deadline: float | None
    source: ModelSource
    profiles: tuple[ShapeProfile, ...]
    options: BuildOptions
    target: Target
    plugins: dict[str, str]
    key: EngineKey
    table: StoredTable | None = None
    qdq: QdqOptions | None = None
    timings: dict[str, float] = field(default_factory=dict)
    damage: tuple[Kind, str, IntegrityError] | None = None

    @property
    def label(self) -> str:
        """Readable name of the engine, for logs and events."""
        return self.key.name

    def take_damage(self) -> tuple[Kind, str, IntegrityError] | None:
        """What the last look found damaged, once."""
        damage, self.damage = self.damage, None
        return damage

    def remaining(self) -> float | None:
        """Seconds left of the request's timeout; None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def labels(self) -> Labels:
        """The words for people that go into the manifest."""
        return Labels(
            name=self.request.name or self.source.stem,
            version=self.request.version or "",
            model=self.source.stem,
            entry=self.key.name,
        )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Book the time spent inside under a stage's name."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - started


def shares_graph(options: BuildOptions) -> bool:
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
