"""One call of `get` on its way: the request made concrete, the clock, and what was found out so far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trt_warmcache.builders import EngineBuilder
from trt_warmcache.calibration import StoredTable
from trt_warmcache.calibration_data import QdqOptions
from trt_warmcache.errors import IntegrityError
from trt_warmcache.keys import EngineKey, Kind
from trt_warmcache.manifest import Labels
from trt_warmcache.model import ModelSource
from trt_warmcache.options import BuildOptions
from trt_warmcache.policy import Policy
from trt_warmcache.profiles import ShapeProfile
from trt_warmcache.request import EngineRequest
from trt_warmcache.stores import Store
from trt_warmcache.target import Target

__all__ = ["PLAN", "Call"]

#: What the plan is called among an entry's payloads.
PLAN = "plan"


@dataclass
class Call:
    """A request made concrete, with the store as its policy sees it and the builder in use.

    Attributes:
        deadline: ``time.monotonic()`` when the request's timeout is over; None without one.
        timings: Seconds spent so far, by stage.
        damage: What the last look found damaged.
    """

    request: EngineRequest
    policy: Policy
    deadline: float | None
    store: Store
    builder: EngineBuilder
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
