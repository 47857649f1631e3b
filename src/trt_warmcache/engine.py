"""What a caller gets: a plan with its provenance, and the way it was come by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trt_warmcache._words import Word
from trt_warmcache.errors import StoreError
from trt_warmcache.keys import EngineKey
from trt_warmcache.manifest import Manifest
from trt_warmcache.names import size_text
from trt_warmcache.stores import Payload

__all__ = ["Engine", "Outcome"]


class Outcome(Word):
    """How an engine was come by."""

    HIT = "hit"
    """It was stored."""
    JOINED = "joined"
    """Somebody else built it while this caller waited."""
    BUILT = "built"
    """This caller built it."""
    COVERED = "covered"
    """A stored engine with a wider profile serves instead."""


@dataclass(eq=False, repr=False)
class Engine:
    """A serialized engine, ready to be loaded.

    Attributes:
        outcome: How it was come by.
        key: Its identity; with outcome COVERED that of the wider engine.
        manifest: What its entry claims.
        timings: Seconds per stage of this call: ``hash``, ``lookup``, ``wait``, ``build``, ``publish``, ``verify``.
        stored: Whether an entry exists for it now.
        reason: With outcome COVERED, why it serves.
        publish_error: Why it could not be stored, where it was built and could not.
    """

    outcome: Outcome
    key: EngineKey
    manifest: Manifest
    timings: Mapping[str, float]
    stored: bool = True
    publish_error: StoreError | None = None
    reason: str = ""
    _payload: Payload = field(kw_only=True)
    _load: Callable[[Engine], Any] = field(kw_only=True)

    @property
    def plan(self) -> memoryview:
        """The plan: read-only, and mapped from the file where the store is local."""
        return self._payload.view

    @property
    def stripped(self) -> bool:
        """Whether the plan has no weights; :meth:`deserialize` gives it those of the requested model."""
        return bool(self.key.parts.get("options.strip_plan"))

    def deserialize(self) -> Any:
        """An ``ICudaEngine``; needs a GPU that the plan fits. A stripped plan is refitted from the requested model.

        Raises:
            IncompatibleError: This machine cannot run the plan; the message says why.
        """
        return self._load(self)

    def __repr__(self) -> str:
        # For a notebook's cell or a debugger: the manifest of a large plan fills pages.
        seconds = sum(self.timings.values())
        return (
            f"<Engine {self.outcome}: {self.key.name} ({self.key.digest[:12]}), {size_text(self.manifest.size)} "
            f"in {seconds:.3f} s>"
        )

    def close(self) -> None:
        """Unmap the plan. Views of it that you still hold keep it alive; closing twice is fine."""
        self._payload.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
