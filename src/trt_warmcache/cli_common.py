"""What the command line's modules share: options, lookups, and how things are shown."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import click

from trt_warmcache.errors import ConfigError, MissError
from trt_warmcache.events import Event, EventKind
from trt_warmcache.explain import stored_manifests
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import Manifest
from trt_warmcache.progress import ENDS, TimeLeft
from trt_warmcache.settings import DEFAULT_STORE, Settings
from trt_warmcache.stores import Store

__all__ = ["date_text", "find_entry", "json_option", "progress_hook", "store_argument", "store_option"]

_F = TypeVar("_F", bound=Callable[..., Any])


def store_option(command: _F) -> _F:
    """``--store``."""
    return click.option(
        "--store", "stores", multiple=True, metavar="PATH|URL",
        help=f"Where engines are kept; repeat it for layers, nearest first. [default: $TRT_WARMCACHE_STORE or {DEFAULT_STORE}]",
    )(command)  # fmt: skip


def json_option(command: _F) -> _F:
    """``--json``."""

    def remember(ctx: click.Context, _parameter: click.Parameter, value: bool) -> bool:
        ctx.meta["json"] = value
        return value

    return click.option(
        "--json", "as_json", is_flag=True, callback=remember, is_eager=True, help="Print JSON for programs."
    )(command)


def store_argument(stores: tuple[str, ...]) -> Any:
    """What `open_store` and managers take: the stores given, or those of the environment.

    Raises:
        ConfigError: Nothing is given, and others may write to the default folder.
    """
    chosen = stores or Settings.from_env(os.environ).stores
    if chosen == (DEFAULT_STORE,) and not stores:
        _keep_private(Path(DEFAULT_STORE).expanduser())
    return chosen[0] if len(chosen) == 1 else list(chosen)


def _keep_private(folder: Path) -> None:
    """Make the default folder for its user alone. A plan is code: who can write there can have it run by others."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return  # the store meets the same trouble, and says more about it
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{folder} belongs to another user, or others may write to it, and whoever can may put code there. Take the "
            f"right away (chmod go-w {folder}), or say that you trust them by naming it: --store {folder}."
        )


def find_entry(store: Store, key_or_name: str, kinds: Iterable[Kind] = tuple(Kind)) -> Manifest:
    """The one entry with this name, or whose key begins so.

    Raises:
        MissError: There is none.
        ConfigError: There are several.
    """
    matches = [
        manifest
        for kind in kinds
        for manifest in stored_manifests(store, kind)
        if manifest.key.startswith(key_or_name.lower()) or key_or_name in {manifest.labels.entry, manifest.labels.name}
    ]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise MissError(
            f"Nothing stored in {store.url} is called {key_or_name!r} or has a key that begins so; see trt-warmcache ls."
        )
    raise ConfigError(
        f"{key_or_name!r} means several entries: {', '.join(manifest.key[:12] for manifest in matches[:5])}; give more of the key."
    )


def date_text(seconds: float) -> str:
    """A moment for people, UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M") if seconds else "-"


@contextmanager
def progress_hook(*, quiet: bool) -> Iterator[Callable[[Event], None]]:
    """A hook that shows a build: a bar on a terminal, a few plain lines elsewhere, nothing for programs.

    Trouble with stores, and warnings that the library logs, are shown too.
    """
    if quiet:
        yield lambda _event: None
        return
    if not sys.stderr.isatty():

        def show(text: str) -> None:
            click.echo(text, err=True)

        with _warnings(show):
            yield _both(_trouble_hook(show), _plain_progress)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def print_above(text: str) -> None:
            bars.console.print(text, markup=False)

        with _warnings(print_above):
            yield _both(_trouble_hook(print_above), _bars_hook(bars))


def _both(first: Callable[[Event], None], second: Callable[[Event], None]) -> Callable[[Event], None]:
    def hook(event: Event) -> None:
        first(event)
        second(event)

    return hook


def _trouble_hook(show: Callable[[str], None]) -> Callable[[Event], None]:
    """A hook that tells of stores that failed without stopping the command: each sentence once."""
    told: set[str] = set()

    def hook(event: Event) -> None:
        text = event.detail.get("text", "")
        if event.kind in _TROUBLE and text and text not in told:
            told.add(text)
            show(f"warning: {text}")

    return hook


def _bars_hook(bars: Any) -> Callable[[Event], None]:
    """A hook that draws the phases of each build on a ``rich.progress.Progress``."""
    tasks: dict[tuple[str, str], Any] = {}
    left = TimeLeft()

    def show(event: Event) -> None:
        rest = left.text(event)
        if event.kind is EventKind.BUILD_PROGRESS:
            phase, inner = event.detail["phase"], event.detail["parent"] is not None
            total, place = event.detail["total"], (event.key, event.detail["phase"])
            if place not in tasks:
                tasks[place] = bars.add_task("  " * inner + phase, total=total, left="")
            bars.update(tasks[place], completed=event.detail["step"], total=total, left="" if inner else rest)
            if inner and total is not None and event.detail["step"] >= total:
                bars.remove_task(tasks.pop(place))
        elif event.kind in ENDS:
            for place in [place for place in tasks if place[0] == event.key]:
                bars.remove_task(tasks.pop(place))
        elif event.kind is EventKind.BUILD_START and rest:
            bars.console.print(_expected(event))

    return show


class _Warnings(logging.Handler):
    """Shows warnings of the library itself, but for those of events, which hooks show, and of TensorRT."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "trt_warmcache" and record.module != "events":
            self._show(f"warning: {record.getMessage()}")


@contextmanager
def _warnings(show: Callable[[str], None]) -> Iterator[None]:
    log, handler = logging.getLogger("trt_warmcache"), _Warnings(show)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


_TROUBLE = {
    EventKind.STORE_ERROR,
    EventKind.LAYER_DOWN,
    EventKind.LOCK_UNAVAILABLE,
    EventKind.LEASE_LOST,
    EventKind.PUBLISH_FAILED,
}

_TOLD = {
    EventKind.CALIBRATION_START,
    EventKind.CALIBRATION_END,
    EventKind.CALIBRATION_INCOMPLETE,
    EventKind.CALIBRATION_CONFLICT,
    EventKind.BUILD_START,
    EventKind.BUILD_SLOW,
    EventKind.BUILD_END,
    EventKind.WAIT,
    EventKind.QUARANTINED,
    EventKind.WARNING,
}


def _expected(event: Event) -> str:
    return f"earlier builds of this model took {event.detail['expected_seconds']:.0f} s"


def _plain_progress(event: Event) -> None:
    if event.kind in _TOLD:
        if "expected_seconds" in event.detail:
            click.echo(_expected(event), err=True)
        seconds = "" if event.seconds is None else f" ({event.seconds:.1f} s)"
        click.echo(
            f"{event.kind.value.replace('_', ' ')}: {event.detail.get('text') or event.label}{seconds}", err=True
        )
