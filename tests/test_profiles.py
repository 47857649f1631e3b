"""Profiles: every spelling, one meaning; mistakes named by input and dimension."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import models

from trt_warmcache.errors import ConfigError
from trt_warmcache.onnx_graph import ModelSummary, summarize
from trt_warmcache.profiles import (
    ShapeProfile,
    ShapeRange,
    cover_size,
    covers_all,
    normalize_profiles,
    parse_profile,
    profile_gaps,
    validate_profiles,
)

if TYPE_CHECKING:
    import random

WIDE = ((1, 3, 64, 64), (4, 3, 80, 80), (8, 3, 96, 96))


def summary(*dims: int | str | None) -> ModelSummary:
    """The summary of a model with one input ``x``."""
    return summarize(models.tiny_model(dims=dims).SerializeToString())


def both(x: Any, y: Any) -> ModelSummary:
    """The summary of a model with inputs ``x`` and ``y``."""
    return summarize(models.two_input_model(x, y).SerializeToString())


@pytest.mark.parametrize(
    "spelling",
    [
        {"x": WIDE},
        {"x": [list(part) for part in WIDE]},
        {"x": np.array(WIDE)},
        {"x": tuple(np.array(part, np.int32) for part in WIDE)},
        {"x": tuple(tuple(np.int64(size) for size in part) for part in WIDE)},
        {"x": ("1x3x64x64", "4x3x80x80", "8x3x96x96")},
        {"x": ("1X3x64x64", " 4x3x80x80 ", (8, 3, 96, 96))},
        {"x": "1x3x64x64:4x3x80x80:8x3x96x96"},
        {"x": "1,3,64,64:4,3,80,80:8,3,96,96"},
        {"x": ShapeRange(*WIDE)},
        "x=1x3x64x64:4x3x80x80:8x3x96x96",
        ShapeProfile({"x": WIDE}),
        [{"x": WIDE}],
        (ShapeProfile({"x": WIDE}),),
        ["x=1x3x64x64:4x3x80x80:8x3x96x96"],
        ({"x": WIDE} for _ in range(1)),
    ],
)
def test_spellings(spelling: Any) -> None:
    """Case 14: however a profile is written, it is the same profile."""
    (profile,) = normalize_profiles(spelling)
    expected = ShapeProfile({"x": WIDE})
    assert profile == expected
    assert hash(profile) == hash(expected)
    assert profile.to_json() == {"shapes": {"x": [list(part) for part in WIDE]}}


@pytest.mark.parametrize("spelling", [{"x": (1, 3)}, {"x": [1, 3]}, {"x": "1x3"}, "x=1x3", {"x": ("1x3",) * 3}])
def test_fixed_spellings(spelling: Any) -> None:
    """One shape alone means min, opt and max at once."""
    assert normalize_profiles(spelling) == (ShapeProfile({"x": ((1, 3), (1, 3), (1, 3))}),)


def test_scalars_and_single_dimensions() -> None:
    """A bare number is one dimension; an empty shape is a scalar."""
    assert normalize_profiles({"x": 5, "y": np.int32(7)}) == (ShapeProfile({"x": (5,), "y": (7,)}),)
    assert normalize_profiles({"x": np.array(5)}) == (ShapeProfile({"x": (5,)}),)
    assert normalize_profiles({"x": ()}) == normalize_profiles({"x": "scalar"}) == (ShapeProfile({"x": ""}),)


def test_nothing() -> None:
    """No profile, in all its spellings, is none."""
    spellings: list[Any] = [None, (), [], {}, "", [{}], ShapeProfile({})]
    for spelling in spellings:
        assert normalize_profiles(spelling) == ()


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ({"x": ((1, 3), (2, 3))}, ["'x'", "(min, opt, max)", "2"]),
        ({"x": "1x3:2x3"}, ["'x'", "(min, opt, max)"]),
        ({"x": ((1, 3), (2, 3), (4, 3, 3))}, ["'x'", "2, 2 and 3 dimensions"]),
        ({"x": ((1, 5), (2, 3), (4, 9))}, ["'x'", "dimension 1", "5, 3, 9"]),
        ({"x": ((4, 3), (2, 3), (1, 3))}, ["'x'", "dimension 0", "4, 2, 1"]),
        ({"x": (1, -1)}, ["'x'", "dimension 1", "-1"]),
        ({"x": "1x?x3"}, ["'x'", "1x?x3"]),
        ({"x": (1.5, 3)}, ["'x'", "whole numbers"]),
        ({"x": (1, None)}, ["'x'", "whole numbers"]),
        ({"x": None}, ["'x'", "whole numbers"]),
        ({"x": {"min": 1}}, ["'x'", "whole numbers"]),
        ({"x": (1, 2**63)}, ["'x'", "dimension 1", "64 bits"]),
        ({"": (1, 3)}, ["non-empty"]),
        ({3: (1, 3)}, ["non-empty"]),
        ("1x3", ["INPUT=MIN:OPT:MAX"]),
        ("x=", ["INPUT=MIN:OPT:MAX"]),
        ("x=1 x=2", ["'x'", "twice"]),
        (5, ["profiles must be"]),
        ([5], ["mapping"]),
        (["x=1", None], ["mapping"]),
    ],
)
def test_mistakes(spelling: Any, words: list[str]) -> None:
    """What cannot be meant is a ConfigError that names input and dimension."""
    with pytest.raises(ConfigError) as caught:
        normalize_profiles(spelling)
    for word in words:
        assert word in str(caught.value)


def test_input_order_does_not_count_profile_order_does() -> None:
    """Inputs are a set, profiles are numbered: TensorRT addresses them by index."""
    x, y = ((1, 3), (2, 3), (4, 3)), ((5,), (6,), (7,))
    assert ShapeProfile({"x": x, "y": y}).to_json() == ShapeProfile({"y": y, "x": x}).to_json()
    assert list(ShapeProfile({"y": y, "x": x}).to_json()["shapes"]) == ["x", "y"]
    assert normalize_profiles([{"x": (1,)}, {"x": (2,)}]) != normalize_profiles([{"x": (2,)}, {"x": (1,)}])


def test_values() -> None:
    """Values of shape tensors are kept apart from shapes, and may be negative."""
    profile = ShapeProfile({"x": (1, 3)}, values={"size": ((1, -1), (2, 0), (4, 4))})
    assert profile.to_json()["values"] == {"size": [[1, -1], [2, 0], [4, 4]]}
    assert parse_profile("x=1x3 size=values:1,-1:2,0:4,4") == profile
    assert ShapeProfile.from_json(profile.to_json()) == profile
    with pytest.raises(ConfigError, match="both as shape and as shape-tensor value"):
        ShapeProfile({"x": (1,)}, values={"x": (1,)})


def test_pickle() -> None:
    """A profile travels to worker processes whole."""
    profile = ShapeProfile({"x": WIDE}, {"s": (1,)})
    assert pickle.loads(pickle.dumps(profile)) == profile


names = st.text(st.characters(exclude_categories=["Cs", "Z", "C"]), min_size=1, max_size=8)
ranges = st.integers(0, 5).flatmap(
    lambda rank: st.lists(
        st.lists(st.integers(0, 2**40), min_size=3, max_size=3).map(sorted), min_size=rank, max_size=rank
    ).map(lambda columns: tuple(tuple(column[row] for column in columns) for row in range(3)))
)


@given(st.dictionaries(names, ranges, max_size=5), st.randoms(use_true_random=False))
def test_round_trips(shapes: dict[str, Any], chance: random.Random) -> None:
    """Any profile survives JSON, text and another order of its inputs, with equal hash."""
    profile = ShapeProfile(shapes)
    shuffled = list(shapes.items())
    chance.shuffle(shuffled)
    for again in (ShapeProfile.from_json(profile.to_json()), parse_profile(str(profile)), ShapeProfile(dict(shuffled))):
        assert again == profile
        assert hash(again) == hash(profile)
        assert list(again.to_json().get("shapes", {})) == sorted(shapes)
    assert profile.covers(profile)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=10,
)


@given(junk)
def test_junk(spelling: Any) -> None:
    """Whatever is passed as profiles is a tuple of profiles or a ConfigError."""
    try:
        profiles = normalize_profiles(spelling)
    except ConfigError:
        return
    assert all(isinstance(profile, ShapeProfile) for profile in profiles)


# ---- against a model ------------------------------------------------------------------------------------------------


def test_dynamic_model_needs_profiles() -> None:
    """A model with open inputs and no profile is a ConfigError that lists them."""
    with pytest.raises(ConfigError) as caught:
        validate_profiles((), both(["N", 3], [None]))
    assert "x (float32 Nx3)" in str(caught.value)
    assert "y (float32 ?)" in str(caught.value)


@pytest.mark.parametrize(
    ("profiles", "words"),
    [
        ({"images": (1, 3, 8, 8)}, ["no input 'images'", "x (float32 Nx3xHxW)"]),
        ({"X": (1, 3, 8, 8)}, ["'X'", "did you mean 'x'"]),
        ({"x": (1, 3, 8)}, ["'x'", "4 dimensions", "gives 3"]),
        ({"x": (1, 4, 8, 8)}, ["'x'", "dimension 1", "fixed at 3", "min says 4"]),
        ({"x": ((1, 3, 8, 8), (1, 3, 8, 8), (1, 5, 8, 8))}, ["'x'", "dimension 1", "max says 5"]),
        ([{"x": (1, 3, 8, 8)}, {"x": (1, 4, 8, 8)}], ["'x' in profile 1", "dimension 1"]),
        ([{"x": (1, 3, 8, 8)}, ShapeProfile({}, {"x": (1,)})], ["No shape in profile 1", "x (float32 Nx3xHxW)"]),
    ],
)
def test_profiles_against_model(profiles: Any, words: list[str]) -> None:
    """Unknown inputs, wrong ranks and changed static sizes are refused by name."""
    with pytest.raises(ConfigError) as caught:
        validate_profiles(normalize_profiles(profiles), summary("N", 3, "H", "W"))
    for word in words:
        assert word in str(caught.value)


def test_static_inputs_are_dropped() -> None:
    """Naming a static input changes nothing in the engine, so nothing in the key."""
    model = both(["N", 3], [7])
    alone = validate_profiles(normalize_profiles({"x": "1x3:2x3:4x3"}), model)
    named = validate_profiles(normalize_profiles({"x": "1x3:2x3:4x3", "y": 7}), model)
    assert alone == named
    assert validate_profiles(normalize_profiles({"x": (2, 3)}), summary(2, 3)) == ()


def test_unknown_rank_is_left_to_tensorrt() -> None:
    """An input without a rank takes any shape."""
    model = models.tiny_model()
    model.graph.input[0].type.tensor_type.ClearField("shape")
    profiles = normalize_profiles({"x": (1, 2, 3)})
    assert validate_profiles(profiles, summarize(model.SerializeToString())) == profiles


SAME_NAME = [
    # x, y, accepted
    ("1x3:2x3:4x3", "1x3:2x3:4x3", True),
    ("1x3:2x3:4x3", "4x3:6x3:8x3", True),
    ("1x3:1x3:1x3", "1x3:2x3:2x3", True),
    ("1x3:3x3:4x3", "2x3:3x3:8x3", True),
    ("1x3:2x3:4x3", "5x3:6x3:8x3", False),
    ("1x3", "2x3", False),
    ("1x3:2x3:4x3", "1x3:3x3:4x3", False),
    ("1x3:2x3:4x3", "2x3:6x3:8x3", False),
]


@pytest.mark.parametrize(("x", "y", "accepted"), SAME_NAME)
def test_one_symbol_one_size(x: str, y: str, accepted: bool) -> None:
    """Dimensions of one symbolic name are equal at run time, so their ranges must meet and their opt agree."""
    model = both(["batch", 3], ["batch", 3])
    profiles = normalize_profiles({"x": x, "y": y})
    if accepted:
        assert validate_profiles(profiles, model) == profiles
        return
    with pytest.raises(ConfigError) as caught:
        validate_profiles(profiles, model)
    for word in ("'batch'", "input 'x' dimension 0", "input 'y' dimension 0"):
        assert word in str(caught.value)
    # Other names, other sizes.
    assert validate_profiles(profiles, both(["n", 3], ["m", 3]))
    assert validate_profiles(profiles, both([None, 3], [None, 3]))


def test_one_symbol_twice_in_one_input() -> None:
    """The same holds within one input, and in each profile by itself."""
    model = both(["n", "n"], [1])
    validate_profiles(normalize_profiles([{"x": (2, 2)}, {"x": (3, 3)}]), model)
    with pytest.raises(ConfigError, match=r"'n'.* in profile 1: input 'x' dimension 0 .*; input 'x' dimension 1"):
        validate_profiles(normalize_profiles([{"x": (2, 2)}, {"x": (2, 3)}]), model)


@pytest.mark.parametrize(("x", "y", "accepted"), SAME_NAME)
def test_one_symbol_as_tensorrt_sees_it(x: str, y: str, accepted: bool) -> None:
    """The rule is TensorRT's own: the real builder takes exactly what passes."""
    trt = pytest.importorskip("tensorrt_rtx")
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network()
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(models.two_input_model(["batch", 3], ["batch", 3]).SerializeToString())
    config = builder.create_builder_config()
    shapes = builder.create_optimization_profile()
    for name, limits in normalize_profiles({"x": x, "y": y})[0].shapes.items():
        shapes.set_shape(name, limits.min, limits.opt, limits.max)
    config.add_optimization_profile(shapes)
    assert (builder.build_serialized_network(network, config) is not None) == accepted


# ---- covering -------------------------------------------------------------------------------------------------------


def test_gaps_name_input_dimension_and_range() -> None:
    """Case 16: asked 10, stored 1..8: said so."""
    stored = normalize_profiles({"x": WIDE})
    assert covers_all(stored, normalize_profiles({"x": (8, 3, 64, 64)}))
    assert not covers_all(stored, normalize_profiles({"x": (10, 3, 64, 64)}))
    assert profile_gaps(normalize_profiles({"x": (10, 3, 64, 64)}), stored) == (
        "input 'x' dimension 0: 10 not in 1..8",
    )
    gaps = profile_gaps(normalize_profiles({"x": ((0, 3, 64, 64), (2, 3, 64, 64), (9, 3, 99, 64))}), stored)
    assert gaps == ("input 'x' dimension 0: 9 not in 1..8", "input 'x' dimension 2: 99 not in 64..96")


def test_gaps_of_several_profiles() -> None:
    """Case 17: what two stored resolutions serve is served, and the nearest is named for what they do not."""
    stored = normalize_profiles([{"x": "1x64:1x64:2x64"}, {"x": "1x96:1x96:2x96"}])
    assert profile_gaps(normalize_profiles([{"x": (2, 64)}, {"x": (1, 96)}]), stored) == ()
    assert profile_gaps(normalize_profiles({"x": (3, 96)}), stored) == ("input 'x' dimension 0: 3 not in 1..2",)
    assert profile_gaps(normalize_profiles({"x": (1, 96)}), ()) == ("it has no profile",)
    assert profile_gaps(normalize_profiles({"x": (1,)}), stored) == ("input 'x': 1 dimensions asked, 2 stored",)


def test_values_must_be_equal_to_cover() -> None:
    """A profile with other shape-tensor values does not cover."""
    stored = (ShapeProfile({"x": WIDE}, {"s": (1,)}),)
    wanted = (ShapeProfile({"x": WIDE}, {"s": (2,)}),)
    assert not covers_all(stored, wanted)
    assert profile_gaps(wanted, stored) == ("shape-tensor input 's': other values",)


def test_cover_size_prefers_the_tighter() -> None:
    """Of two profiles that cover, the tighter one counts as smaller."""
    tight, wide = normalize_profiles({"x": "1x3:2x3:4x3"}), normalize_profiles({"x": "1x3:2x3:8x3"})
    assert cover_size(tight) < cover_size(wide)
    assert cover_size(normalize_profiles({"x": "2x3:2x3:4x3"})) < cover_size(tight)


def test_shape_tensor_values_fit_the_input() -> None:
    """The values given for a shape tensor are as many as it holds, and an input of more dimensions is none."""
    from trt_warmcache.onnx_graph import ModelSummary, TensorInfo

    def summary(dims: tuple[int, ...]) -> ModelSummary:
        tensor = TensorInfo("s", 7, "int64", dims)
        return ModelSummary((tensor,), (), (), 8, 17, "", "", 1)

    profile = ShapeProfile({}, values={"s": ((1, 1), (2, 2), (4, 4))})
    assert validate_profiles((profile,), summary((2,))) == (profile,)
    with pytest.raises(ConfigError, match=r"'s' holds 3 value\(s\), the profile gives 2"):
        validate_profiles((profile,), summary((3,)))
    with pytest.raises(ConfigError, match=r"holds 1 value\(s\)"):
        validate_profiles((profile,), summary(()))
    with pytest.raises(ConfigError, match="no shape tensor"):
        validate_profiles((profile,), summary((2, 2)))


@pytest.mark.parametrize("spelling", [list, tuple])
def test_what_was_read_once_is_not_taken_for_its_likes(spelling: type) -> None:
    """Shapes are remembered by their spelling; 1.0 equals 1 in a dict and is no size all the same."""
    assert ShapeProfile({"x": spelling([(1, 3), (2, 3), (4, 3)])}) == ShapeProfile({"x": "1x3:2x3:4x3"})
    with pytest.raises(ConfigError, match="whole numbers"):
        ShapeProfile({"x": spelling([(1.0, 3), (2, 3), (4, 3)])})
    with pytest.raises(ConfigError, match="whole numbers"):
        ShapeProfile({"x": spelling([1.0, 3])})
