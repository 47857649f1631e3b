"""Policies: every field checked, spelled once, and equal where it means the same."""

from __future__ import annotations

import math
import pickle
import threading
from dataclasses import fields, replace
from enum import Enum
from typing import Any

import pytest

from trt_warmcache import ConfigError, Policy
from trt_warmcache.policy import Cover, Isolation, OnMiss, OnSuspect, OnWait, Rung, StoreErrors, Trust

CHOICES: dict[str, type[Enum]] = {
    "on_miss": OnMiss,
    "cover": Cover,
    "trust": Trust,
    "store_errors": StoreErrors,
    "on_wait": OnWait,
    "isolation": Isolation,
    "on_suspect": OnSuspect,
}
SECONDS = ("slow_build_seconds", "wait_seconds", "build_seconds")
FLAGS = ("rehash", "refresh", "driver_in_key")


def policy(**fields: Any) -> Policy:
    """A policy from fields that may be wrong."""
    return Policy(**fields)


def test_every_field_is_tested_here() -> None:
    """A field added to Policy needs a check of its own, here and there."""
    assert {field.name for field in fields(Policy)} == {*CHOICES, *SECONDS, *FLAGS, "build_memory_bytes", "ladder"}


@pytest.mark.parametrize(("field", "kind"), CHOICES.items())
def test_choices(field: str, kind: type[Enum]) -> None:
    """A choice may be the member or its text, which are equal; anything else lists all choices."""
    for member in kind:
        by_text, by_member = policy(**{field: member.value}), policy(**{field: member})
        assert by_text == by_member
        assert hash(by_text) == hash(by_member)
        assert getattr(by_text, field) is member
    for wrong in ("other", "", None, True, 1, ["x"], next(iter(kind)).value.upper()):
        with pytest.raises(ConfigError, match=rf"^Policy\.{field} must be one of ") as caught:
            policy(**{field: wrong})
        assert all(repr(member.value) in caught.value.message for member in kind)


@pytest.mark.parametrize("field", SECONDS)
@pytest.mark.parametrize(
    "value", [-1, -0.001, math.nan, math.inf, -math.inf, 1e300, 10**400, "10", True, b"1", [1], 1 + 0j]
)
def test_seconds(field: str, value: Any) -> None:
    """Seconds are a plain number that a wait can last."""
    with pytest.raises(ConfigError, match=rf"^Policy\.{field} must be a number of seconds"):
        policy(**{field: value})


@pytest.mark.parametrize("field", SECONDS)
@pytest.mark.parametrize("value", [0, 0.0, 1, 2.5, threading.TIMEOUT_MAX])
def test_good_seconds(field: str, value: float) -> None:
    """Zero and everything up to the longest possible wait are fine, as int or float."""
    assert getattr(policy(**{field: value}), field) == value
    # What is accepted can really be waited for.
    assert threading.Lock().acquire(timeout=value)


def test_optional_seconds() -> None:
    """Only a build may take for ever."""
    assert Policy(build_seconds=None).build_seconds is None
    for field in ("slow_build_seconds", "wait_seconds"):
        with pytest.raises(ConfigError, match=f"{field} must be a number"):
            policy(**{field: None})


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_flags(field: str, value: Any) -> None:
    """Flags are True or False, nothing that merely counts as such."""
    with pytest.raises(ConfigError, match=rf"^Policy\.{field} must be True or False"):
        policy(**{field: value})


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1 GB", 2**63])
def test_memory(value: Any) -> None:
    """Memory is a positive whole number of bytes."""
    with pytest.raises(ConfigError, match=r"^Policy\.build_memory_bytes must be"):
        policy(build_memory_bytes=value)


def test_memory_needs_a_process() -> None:
    """A limit that nothing could keep is refused."""
    with pytest.raises(ConfigError, match="isolation='none' has none"):
        Policy(build_memory_bytes=2**30, isolation="none")


def test_ladder() -> None:
    """Rungs in any order, each once; never by accident: not a bare word, not None."""
    assert Policy(ladder=["version_compatible", "ampere_plus", Rung.AMPERE_PLUS]).ladder == (
        Rung.AMPERE_PLUS,
        Rung.VERSION_COMPATIBLE,
    )
    assert policy(ladder=iter(Rung)).ladder == tuple(Rung)
    for wrong in ("ampere_plus", Rung.AMPERE_PLUS, None, 3):
        with pytest.raises(ConfigError, match=r"^Policy\.ladder must be a list"):
            policy(ladder=wrong)
    with pytest.raises(ConfigError, match=r"^Policy\.ladder must be one of 'same_compute_capability'"):
        policy(ladder=["hopper_plus"])


@pytest.mark.parametrize(
    ("field", "nearest"),
    [("on_mis", "on_miss"), ("onmiss", "on_miss"), ("covers", "cover"), ("wait_second", "wait_seconds"), ("drivers_in_key", "driver_in_key")],
)  # fmt: skip
def test_unknown_fields(field: str, nearest: str) -> None:
    """Case 9: a misspelt field is a TypeError that names the nearest one."""
    with pytest.raises(TypeError, match=f"Policy has no field '{field}'; did you mean '{nearest}'"):
        policy(**{field: "raise"})


def test_equality_and_travel() -> None:
    """Equal policies hash alike and survive pickling; different ones differ; replace checks again."""
    strict = Policy(on_miss="raise", wait_seconds=5, ladder=["ampere_plus"])
    assert strict == Policy(wait_seconds=5.0, on_miss=OnMiss.RAISE, ladder=(Rung.AMPERE_PLUS,))
    assert len({strict, pickle.loads(pickle.dumps(strict)), Policy()}) == 2
    with pytest.raises(ConfigError):
        replace(strict, cover="narrower")  # type: ignore[arg-type]


def test_detached() -> None:
    """Builds in the background prefer a process of their own, unless the policy says where they run."""
    assert Policy().detached().isolation is Isolation.WHERE_POSSIBLE
    for said in (Isolation.NONE, Isolation.PROCESS, Isolation.WHERE_POSSIBLE):
        assert Policy(isolation=said).detached().isolation is said
