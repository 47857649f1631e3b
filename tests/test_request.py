"""Requests, policies and options: validated, hashable, and told apart by every field."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from trt_warmcache import BuildOptions, EngineRequest, Policy, ShapeProfile, Target
from trt_warmcache.errors import ConfigError, UnknownFieldError
from trt_warmcache.request import as_request

# ---- requests -------------------------------------------------------------------------------------------------------


def test_normalized() -> None:
    """Equal requests are equal and hash alike, however they were written."""
    one = EngineRequest(
        "m.onnx", profiles={"x": ("1x3", "2x3", "4x3")}, plugins="libp.so", options=BuildOptions(tf32=True)
    )
    two = EngineRequest(
        "m.onnx",
        profiles=[ShapeProfile({"x": [[1, 3], [2, 3], [4, 3]]})],
        plugins=[Path("libp.so")],
        options=BuildOptions(tf32=True),
    )
    assert one == two
    assert hash(one) == hash(two)
    assert one.plugins == (Path("libp.so"),)
    assert len({EngineRequest(b"bytes"), EngineRequest(b"bytes"), EngineRequest(b"other")}) == 2


def test_user_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """``~`` is the home folder in plugin paths, and a name of its own where no such user exists."""
    monkeypatch.setenv("HOME", "/home/me")
    plugins = EngineRequest("m", plugins=["~/p.so", "~no-such-user/p.so"]).plugins
    assert plugins == (Path("/home/me/p.so"), Path("~no-such-user/p.so"))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"profiles": 5}, "profiles"),
        ({"options": {"fp16": True}}, "options must be a BuildOptions"),
        ({"calibration": "data"}, "calibration must be a Calibration"),
        ({"policy": "raise"}, "policy must be a Policy"),
        ({"target": "L4"}, "target must be a Target"),
        ({"plugins": [3]}, "plugins"),
        ({"plugins": None}, "plugins"),
        ({"recipe": 3}, "recipe"),
        ({"recipe": "\ud800"}, "recipe"),
        ({"name": b"m"}, "name"),
        ({"name": "m\udce9"}, "name"),
        ({"version": 7}, "version"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": math.nan}, "timeout"),
        ({"timeout": math.inf}, "timeout"),
        ({"timeout": "10"}, "timeout"),
        ({"timeout": True}, "timeout"),
    ],
)
def test_mistakes(fields: dict[str, Any], word: str) -> None:
    """A value that cannot be meant is a ConfigError that names the field."""
    with pytest.raises(ConfigError, match=word):
        EngineRequest("m.onnx", **fields)


def test_as_request() -> None:
    """A model with fields and a request of them are the same; both at once is a mistake."""
    request = EngineRequest("m.onnx", name="a")
    assert as_request("m.onnx", {"name": "a"}) == request
    assert as_request(request, {}) is request
    with pytest.raises(ConfigError, match=r"not both \(got name\)"):
        as_request(request, {"name": "b"})


@pytest.mark.parametrize(
    ("make", "field", "nearest"),
    [
        (lambda **fields: as_request("m", fields), "profile", "profiles"),
        (lambda **fields: as_request("m", fields), "Options", "options"),
        (lambda **fields: EngineRequest("m", **fields), "calibrator", "calibration"),
        (BuildOptions, "optimisation_level", "optimization_level"),
        (BuildOptions, "FP16", "fp16"),
        (Policy, "on_mis", "on_miss"),
        (Policy, "wait_second", "wait_seconds"),
        (lambda **fields: ShapeProfile({}, **fields), "value", "values"),
        (Target, "sm_cout", "sm_count"),
    ],
)
def test_unknown_fields(make: Any, field: str, nearest: str) -> None:
    """Case 9: an unknown field is a TypeError and a ConfigError that names the nearest known one."""
    with pytest.raises(UnknownFieldError, match=f"did you mean {nearest!r}") as caught:
        make(**{field: 1})
    assert isinstance(caught.value, (TypeError, ValueError))
    assert (caught.value.field, caught.value.nearest) == (field, nearest)


def test_unknown_field_like_nothing() -> None:
    """A field like no other lists the known ones."""
    with pytest.raises(UnknownFieldError, match="known fields: on_miss, cover, trust"):
        Policy(zzzzzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "value",
    [EngineRequest("m"), BuildOptions(), Policy(), Target(), ShapeProfile({"x": (1,)})],
    ids=lambda v: type(v).__name__,
)
def test_frozen(value: Any) -> None:
    """Values cannot be changed once made."""
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)


# ---- policies -------------------------------------------------------------------------------------------------------


def test_policy_spellings() -> None:
    """Choices are taken as members or as their words, and are members afterwards."""
    policy = Policy(on_miss="raise", cover="wider", trust="signed", store_errors="degrade", on_wait="build")
    assert Policy(**{f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}) == policy
    assert hash(policy) == hash(dataclasses.replace(policy))
    assert all(
        isinstance(getattr(policy, name), type(getattr(Policy(), name))) for name in ("on_miss", "cover", "trust")
    )
    assert Policy().slow_build_seconds == 10


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"on_miss": "rebuild"}, "on_miss must be one of 'build', 'raise', 'fallback'"),
        ({"cover": None}, "cover"),
        ({"trust": "yes"}, "trust"),
        ({"wait_seconds": -1}, "wait_seconds"),
        ({"wait_seconds": None}, "wait_seconds"),
        ({"build_seconds": math.inf}, "build_seconds"),
        ({"slow_build_seconds": "10"}, "slow_build_seconds"),
        ({"rehash": 1}, "rehash"),
        ({"driver_in_key": "no"}, "driver_in_key"),
        ({"refresh": None}, "refresh"),
    ],
)
def test_policy_mistakes(fields: dict[str, Any], word: str) -> None:
    """An unknown choice lists the known ones; other nonsense names the field."""
    with pytest.raises(ConfigError, match=word):
        Policy(**fields)


def test_policy_limits() -> None:
    """Zero is a limit: do not wait at all. Without a limit on builds, None."""
    policy = Policy(wait_seconds=0, build_seconds=None)
    assert (policy.wait_seconds, policy.build_seconds) == (0, None)


# ---- options: one meaning, one value --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"workspace": 1 << 30}, {"memory_pools": {"workspace": 1 << 30}}),
        ({}, {"memory_pools": {}}),
        ({}, {"preview_features": {}}),
        ({}, {"layer_precisions": []}),
        ({"tactic_sources": ["cudnn", "CUDNN", "Cublas"]}, {"tactic_sources": ("CUBLAS", "CUDNN")}),
        ({"layer_precisions": {"a": "int8"}}, {"layer_precisions": [("a", "int8")]}),
        ({"tiling": "fast"}, BuildOptions(tiling="fast").to_json()),
    ],
)
def test_one_meaning(one: dict[str, Any], two: dict[str, Any]) -> None:
    """Two spellings of one option are equal, hash alike and are the same parts of a key."""
    assert BuildOptions(**one) == BuildOptions(**two)
    assert hash(BuildOptions(**one)) == hash(BuildOptions(**two))
    assert BuildOptions(**one).to_json() == BuildOptions(**two).to_json()


def test_different_meanings() -> None:
    """Order of layer rules, and an empty list of tactic sources, do mean something."""
    rules = [("a*", "int8"), ("*", "float16")]
    assert BuildOptions(layer_precisions=rules) != BuildOptions(layer_precisions=rules[::-1])
    assert BuildOptions(tactic_sources=()) != BuildOptions()
    assert BuildOptions(tf32=False) != BuildOptions()


@pytest.mark.parametrize(
    "fields",
    [
        {"workspace": 1, "memory_pools": {"workspace": 1}},
        {"memory_pools": {"workspace": 0}},
        {"workspace": 2**63},
        {"workspace": 1.5e9},
        {"optimization_level": 6},
        {"optimization_level": True},
        {"build_route": "\ud800"},
        {"refittable_weights": ["w"]},
        {"refittable_weights": "w", "refit": "individual"},
        {"exclude_lean_runtime": True},
        {"memory_pools": {"nowhere": 1}},
        {"fp16": "yes"},
    ],
)
def test_option_mistakes(fields: dict[str, Any]) -> None:
    """Options that cannot be meant are refused when they are written."""
    with pytest.raises(ConfigError):
        BuildOptions(**fields)
