"""What is shown of a build under way: phases, how far they are, and how long it will still take."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tests.support import PROFILE, tiny_model

import trt_warmcache as twc
from trt_warmcache import progress
from trt_warmcache.builders import BuildInputs
from trt_warmcache.builders import Progress as Step
from trt_warmcache.cli_common import _bars_hook, progress_hook
from trt_warmcache.events import Event, EventKind
from trt_warmcache.testing import FakeBuilder


def make(root: Path, builder: Any = None, **more: Any) -> twc.EngineManager:
    return twc.EngineManager(root, builder=builder or FakeBuilder(), memo=twc.DigestMemo(None), **more)


def start(expected: float | None = None) -> Event:
    return Event(EventKind.BUILD_START, "k", "tiny", None, {} if expected is None else {"expected_seconds": expected})


def step(done: int, seconds: float, phase: str = "Building engine", parent: str | None = None, total: int = 5) -> Event:
    detail = {"phase": phase, "parent": parent, "step": done, "total": total}
    return Event(EventKind.BUILD_PROGRESS, "k", "tiny", seconds, detail)


END = Event(EventKind.BUILD_END, "k", "tiny", 9.0)


def test_time_left() -> None:
    """What earlier builds took, less what has passed; nothing for a model that was never built, or once it is over."""
    left = progress.TimeLeft()
    assert left.text(start(10.0)) == "about 10 s left"
    assert left.text(step(1, 4.0)) == "about 6 s left"
    assert left.text(Event(EventKind.BUILD_SLOW, "k", "tiny", 8.0)) == "about 2 s left"
    assert left.text(step(2, 30.0)) == "earlier builds took 10 s"
    assert left.text(Event(EventKind.BUILD_PROGRESS, "other", "other", 1.0)) == ""
    assert left.text(END) == left.text(step(2, 1.0)) == ""
    assert left.text(start()) == ""


class Bar:
    """Stands for a tqdm bar."""

    made: list[Bar] = []  # noqa: RUF012  emptied by the tests that read it

    def __init__(self, **options: Any) -> None:
        self.options, self.n, self.closed, self.postfix = options, 0, False, list[str]()
        Bar.made.append(self)

    def update(self, n: int) -> None:
        self.n += n

    def set_postfix_str(self, text: str) -> None:
        self.postfix.append(text)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def no_bars() -> None:
    Bar.made.clear()


def test_notebook_hook(tmp_path: Path) -> None:
    """One bar per build and outer phase, filled to the end and closed, also when the build fails."""
    with make(tmp_path / "s", FakeBuilder(steps=5), hooks=[progress.notebook_hook(Bar)]) as manager:
        manager.get(tiny_model(), profiles=PROFILE, name="tiny")
    (bar,) = Bar.made
    assert bar.options["total"] == 5
    assert bar.options["desc"].startswith("tiny_")
    assert bar.closed
    assert bar.n == 4
    assert bar.postfix == []

    def inner(inputs: BuildInputs) -> None:
        inputs.on_progress(Step("Timing", "Building engine", 1, 2))

    broken = FakeBuilder(error=twc.BuildError("no"), on_build=inner)
    with make(tmp_path / "s", broken, hooks=[progress.notebook_hook(Bar)]) as manager, pytest.raises(twc.BuildError):
        manager.get(tiny_model(weight=2.0), profiles=PROFILE)
    assert all(one.closed for one in Bar.made)
    assert len(Bar.made) == 2


def test_notebook_hook_tells_the_time_left(tmp_path: Path) -> None:
    """The second build of a model says how long it will still take, from the first."""
    with make(tmp_path / "s", FakeBuilder(seconds=1.2), hooks=[progress.notebook_hook(Bar)]) as manager:
        manager.get(tiny_model(), profiles=PROFILE)
        manager.get(tiny_model(), profiles=PROFILE, recipe="b")
    first, second = Bar.made
    assert first.postfix == []
    assert second.postfix[0] == "about 1 s left"


def test_real_tqdm(tmp_path: Path) -> None:
    """tqdm's own bars take all that the hook asks of them."""
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    out = io.StringIO()
    hook = progress.notebook_hook(lambda **options: tqdm(file=out, mininterval=0, **options))
    for event in (start(10.0), step(0, 0.0), step(3, 2.0), END):
        hook(event)
    assert "tiny: Building engine" in out.getvalue()
    assert "about 8 s left" in out.getvalue()


def test_bars_of_the_command_line() -> None:
    """Phases of several builds at once are told apart, inner ones go when done, all go at the end, and the time left shows."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=console, auto_refresh=False) as bars:
        hook = _bars_hook(bars)
        hook(start(10.0))
        hook(step(1, 2.0))
        hook(step(0, 2.0, "Timing", "Building engine"))
        hook(Event(EventKind.BUILD_PROGRESS, "other", "other", 1.0, step(1, 1.0).detail))
        bars.refresh()
        assert [task.description for task in bars.tasks] == ["Building engine", "  Timing", "Building engine"]
        assert [task.fields["left"] for task in bars.tasks] == ["about 8 s left", "", ""]
        hook(step(5, 3.0, "Timing", "Building engine"))
        assert len(bars.tasks) == 2
        hook(END)
        hook(Event(EventKind.CALIBRATION_END, "other", "other"))
        assert bars.tasks == []
    assert "earlier builds of this model took 10 s" in out.getvalue()
    assert "about 8 s left" in out.getvalue()


def test_trouble_with_stores_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A remote that fails while the command succeeds is seen at the command line, however often it fails."""
    with progress_hook(quiet=False) as hook:
        for kind in (EventKind.STORE_ERROR, EventKind.STORE_ERROR, EventKind.LAYER_DOWN):
            hook(Event(kind, detail={"text": f"the bucket does not exist, {kind.value}"}))
        hook(Event(EventKind.HIT, detail={"text": "nothing to tell"}))
    assert capsys.readouterr().err.splitlines() == [
        "warning: the bucket does not exist, store_error",
        "warning: the bucket does not exist, layer_down",
    ]
