"""Errors: what they are caught as, and that they reach another process whole."""

from __future__ import annotations

import copy
import inspect
import pickle
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

import trt_warmcache as twc
from trt_warmcache import errors
from trt_warmcache._fields import nearest_name
from trt_warmcache.errors import StoreReason, WarmCacheError

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, WarmCacheError)]

BASES: dict[type[WarmCacheError], tuple[type[BaseException], ...]] = {
    errors.ConfigError: (ValueError,),
    errors.UnknownFieldError: (errors.ConfigError, ValueError, TypeError),
    errors.BuildTimeout: (errors.BuildError, TimeoutError),
    errors.MissError: (LookupError,),
}


def made(cls: type[WarmCacheError]) -> WarmCacheError:
    """One of the class, with facts of every kind, a note and a cause."""
    error = cls("What happened. What to do.", field="x", number=3, words=("a", "b"), reason=StoreReason.FULL)
    error.__cause__ = OSError(28, "No space left on device", "/cache/x")
    return error


@pytest.mark.parametrize("cls", CLASSES)
def test_bases(cls: type[WarmCacheError]) -> None:
    """One root; a child that matches a builtin is also caught as that."""
    assert issubclass(cls, WarmCacheError)
    for base in BASES.get(cls, ()):
        assert issubclass(cls, base)
        with pytest.raises(base):
            raise cls("x")
    assert cls.__name__ in errors.__all__
    assert cls.__doc__


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("cls", CLASSES)
def test_pickle(cls: type[WarmCacheError], protocol: int) -> None:
    """Class, message, facts and cause survive pickling and copying."""
    error = made(cls)
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(again) is cls
        assert str(again) == str(error) == again.message == "What happened. What to do."
        assert again.args == error.args
        facts: dict[str, Any] = vars(again)
        assert (facts["field"], facts["number"], facts["words"], facts["reason"]) == ("x", 3, ("a", "b"), "full")
        assert isinstance(again.__cause__, OSError)
        assert (again.__cause__.errno, again.__cause__.filename) == (28, "/cache/x")


def test_causes_of_foreign_classes() -> None:
    """A cause that another process could not rebuild arrives as a RuntimeError that names and quotes it."""

    class Foreign(Exception):
        """Known here only."""

    for cause, words in (
        (Foreign("odd", object()), ("Foreign", "odd")),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ("UnicodeDecodeError", "bad")),
    ):
        error = twc.BuildError("x")
        error.__cause__ = cause
        again = pickle.loads(pickle.dumps(error))
        assert type(again.__cause__) is RuntimeError
        assert all(word in str(again.__cause__) for word in words)


def test_chain_of_own_errors() -> None:
    """Causes of causes survive where they are ours."""
    inner, outer = made(twc.IntegrityError), twc.StoreError("outer", reason=StoreReason.DENIED)
    outer.__cause__ = inner
    again = pickle.loads(pickle.dumps(outer))
    assert type(again.__cause__) is twc.IntegrityError
    assert isinstance(again.__cause__.__cause__, OSError)


def test_pending_build_stays_at_home() -> None:
    """A future belongs to its process: the miss travels without it."""
    error = twc.MissError("none", key="k", pending=Future())
    again = pickle.loads(pickle.dumps(error))
    assert (again.key, again.pending) == ("k", None)


def fail(name: str) -> None:
    """Raise an error by class name, for another process."""
    raise made(getattr(errors, name)) from KeyError("inner")


def test_through_a_process_pool() -> None:
    """A worker process's error arrives as itself."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        for cls in (twc.BuildTimeout, twc.UnknownFieldError):
            with pytest.raises(cls) as caught:
                pool.submit(fail, cls.__name__).result()
            assert str(caught.value) == "What happened. What to do."
            assert vars(caught.value)["number"] == 3


def test_defaults() -> None:
    """Facts that nobody gave have their documented defaults."""
    assert twc.StoreError("x").reason == "unavailable"
    assert twc.StoreError("x", reason=StoreReason.DENIED).reason == "denied"
    assert twc.IntegrityError("x").reason == "digest"
    assert twc.BuildError("x").log == ()
    assert twc.ModelError("x").node is None
    assert not twc.IncompatibleError("x").about_plan


@pytest.mark.parametrize(
    ("name", "known", "nearest"),
    [
        ("optimisation_level", ["optimization_level", "refit"], "optimization_level"),
        ("FP16", ["fp16", "bf16"], "fp16"),
        ("qqqq", ["fp16"], None),
        ("x", [], None),
    ],
)
def test_nearest_name(name: str, known: list[str], nearest: str | None) -> None:
    """A slip finds the name that was meant, whatever its case."""
    assert nearest_name(name, known) == nearest
