"""Showing progress outside the command line. Hooks are plain callables for ``EngineManager(hooks=[...])``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trt_warmcache.errors import ConfigError
from trt_warmcache.events import Event, EventKind

__all__ = ["notebook_hook"]


def notebook_hook(bar: Callable[..., Any] | None = None) -> Callable[[Event], None]:
    """A hook that shows each build as a tqdm bar: a widget in notebooks, text in terminals.

    Args:
        bar: Makes a bar, called like ``tqdm.tqdm``; by default ``tqdm.auto.tqdm``.

    Raises:
        ConfigError: tqdm is not installed.
    """
    if bar is None:
        try:
            from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]
        except ImportError as error:
            raise ConfigError("notebook_hook needs tqdm: pip install tqdm.") from error
        bar = tqdm
    make = bar
    bars: dict[tuple[str, str], Any] = {}

    def show(event: Event) -> None:
        if event.kind is EventKind.BUILD_PROGRESS:
            # The outer phases only: TensorRT opens and closes hundreds of inner ones.
            phase, total, step = event.detail["phase"], event.detail["total"], event.detail["step"]
            if event.detail["parent"] is not None:
                return
            place = (event.key, phase)
            if place not in bars:
                bars[place] = make(total=total, desc=f"{event.label}: {phase}", leave=False)
            bars[place].update(step - bars[place].n)
        elif event.kind in {EventKind.BUILD_END, EventKind.BUILD_FAILED}:
            for place in [place for place in bars if place[0] == event.key]:
                bars.pop(place).close()

    return show
