"""Showing progress. Hooks are plain callables for ``EngineManager(hooks=[...])``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trt_warmcache.errors import ConfigError
from trt_warmcache.events import Event, EventKind

__all__ = ["ENDS", "TimeLeft", "notebook_hook"]

#: After these there is nothing left to show of a build or a calibration.
ENDS = frozenset({EventKind.BUILD_END, EventKind.BUILD_FAILED, EventKind.CALIBRATION_END, EventKind.CALIBRATION_FAILED})


class TimeLeft:
    """How long builds will still take, judged by earlier builds of the same models."""

    def __init__(self) -> None:
        self._expected: dict[str, float] = {}

    def text(self, event: Event) -> str:
        """Take an event of a build; what can be said of the rest, or "" for a model that was never built before."""
        if event.kind is EventKind.BUILD_START and "expected_seconds" in event.detail:
            self._expected[event.key] = event.detail["expected_seconds"]
        expected = self._expected.get(event.key)
        if event.kind in ENDS:
            self._expected.pop(event.key, None)
        if expected is None or event.kind in ENDS:
            return ""
        left = expected - (event.seconds or 0.0)
        return f"about {left:.0f} s left" if left >= 0.5 else f"earlier builds took {expected:.0f} s"


def notebook_hook(bar: Callable[..., Any] | None = None) -> Callable[[Event], None]:
    """A hook that shows each build as a tqdm bar: a widget in notebooks, text in terminals.

    Where the same model was built before, the bar says how long the build will still take.

    Args:
        bar: Makes a bar, called like ``tqdm.tqdm``; by default ``tqdm.auto.tqdm``.

    Raises:
        ConfigError: tqdm is not installed.
    """
    if bar is None:
        try:
            from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]
        except ImportError as error:
            raise ConfigError("notebook_hook needs tqdm: pip install 'trt_warmcache[notebook]'.") from error
        bar = tqdm
    make, left = bar, TimeLeft()
    bars: dict[tuple[str, str], Any] = {}

    def show(event: Event) -> None:
        rest = left.text(event)
        if event.kind is EventKind.BUILD_PROGRESS:
            # The outer phases only: TensorRT opens and closes hundreds of inner ones.
            phase, total, step = event.detail["phase"], event.detail["total"], event.detail["step"]
            place = (event.key, phase)
            if event.detail["parent"] is None:
                if place not in bars:
                    bars[place] = make(total=total, desc=f"{event.label}: {phase}", leave=False)
                bars[place].update(step - bars[place].n)
        if rest:
            for place in [place for place in bars if place[0] == event.key]:
                bars[place].set_postfix_str(rest)
        if event.kind in ENDS:
            for place in [place for place in bars if place[0] == event.key]:
                bars.pop(place).close()

    return show
