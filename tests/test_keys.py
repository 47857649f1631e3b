"""Keys: golden vectors, purity, and what does and does not split them."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.vectors import complete, from_vector

from trt_warmcache.errors import ConfigError
from trt_warmcache.keys import (
    KEY_SCHEMA,
    EngineKey,
    Kind,
    calibration_key,
    canonical_json,
    differences,
    digest_of,
    engine_key,
    timing_key,
)
from trt_warmcache.options import BuildOptions
from trt_warmcache.profiles import normalize_profiles
from trt_warmcache.target import Target

if TYPE_CHECKING:
    from tests.conftest import RunPython

VECTORS = sorted((Path(__file__).parent / "data" / "keys").glob("*.json"))

MODEL = "blake3:" + "ab" * 32
OTHER = "blake3:" + "cb" * 32
L4 = {
    "gpu": "NVIDIA L4",
    "compute_capability": "8.9",
    "sm_count": 58,
    "os": "linux",
    "arch": "x86_64",
    "cuda": "13.0",
    "driver": "580.65.06",
    "memory_bytes": 24_152_899_584,
    "uuid": "GPU-1",
}


def l4(**changes: Any) -> Target:
    """An L4, or something nearly like it."""
    return Target(**{**L4, **changes})


def key(**changes: Any) -> EngineKey:
    """The key of a classic request, with some fields changed."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "profiles": normalize_profiles({"x": "1x3:2x3:4x3"}),
        "options": BuildOptions(fp16=True),
        "flavour": "tensorrt",
        "version": "10.13.3.9",
        "target": l4(),
    }
    return engine_key(**{**fields, **changes})


# ---- the bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_golden_vectors(path: Path) -> None:
    """The digest of a request never changes within one KEY_SCHEMA; a change here needs another schema number."""
    vector = json.loads(path.read_text(encoding="utf-8"))
    assert vector["schema"] == KEY_SCHEMA
    found = from_vector(vector)
    assert dict(found.parts) == vector["parts"]
    assert found.digest == vector["digest"]
    assert found.kind.value == vector["kind"]


def test_vectors_change_with_the_schema_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rewrites the vectors refuses to change a digest, unless KEY_SCHEMA changed as well."""
    vector = json.loads(VECTORS[0].read_text(encoding="utf-8"))
    assert complete(vector) == vector
    assert complete({"kind": vector["kind"], "request": vector["request"]})["digest"] == vector["digest"]
    with pytest.raises(ValueError, match="change KEY_SCHEMA"):
        complete({**vector, "digest": "0" * 64})
    for module in ("trt_warmcache.keys", "tests.vectors"):
        monkeypatch.setattr(f"{module}.KEY_SCHEMA", KEY_SCHEMA + 1)
    assert complete(vector)["digest"] != vector["digest"]


def test_there_are_golden_vectors() -> None:
    """A dozen requests are pinned, each with a digest of its own."""
    digests = {json.loads(path.read_text(encoding="utf-8"))["digest"] for path in VECTORS}
    assert len(digests) == len(VECTORS) >= 12


def test_recipe() -> None:
    """The digest is SHA-256 of sorted, compact ASCII JSON of kind, parts and schema: anyone can compute it."""
    assert canonical_json({"b": [1, True, None], "a": {"输": "é"}}) == (
        b'{"a":{"\\u8f93":"\\u00e9"},"b":[1,true,null]}'
    )
    assert digest_of(Kind.ENGINE, {"model": "m"}) == (
        # printf '{"kind":"engines","parts":{"model":"m"},"schema":1}' | sha256sum
        "33d4d87f5391b0a145c7c42b1e9ede24efc1bf4f69d5900c456d88cfb30080e3"
    )


PURE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tests.vectors import from_vector
for path in sys.argv[2:]:
    print(from_vector(json.load(open(path, encoding="utf-8"))).digest)
"""


def shuffled(value: Any, chance: random.Random) -> Any:
    """The same JSON value with every mapping in another order."""
    if isinstance(value, dict):
        items = [(name, shuffled(item, chance)) for name, item in value.items()]
        chance.shuffle(items)
        return dict(items)
    return [shuffled(item, chance) for item in value] if isinstance(value, list) else value


def test_pure_in_fresh_processes(tmp_path: Path, run_python: RunPython) -> None:
    """Case 4: 20 fresh processes, each with another hash seed, dict order and folder, agree on every key."""
    vectors = [json.loads(path.read_text(encoding="utf-8")) for path in VECTORS]
    expected = [vector["digest"] for vector in vectors]
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        paths = []
        for number, vector in enumerate(vectors):
            paths.append(folder / f"{number}.json")
            paths[-1].write_text(json.dumps(shuffled(vector, random.Random(seed))), encoding="utf-8")
        env = {"PYTHONHASHSEED": str(seed + 1), "TZ": f"UTC{seed - 10}", "LC_ALL": "C"}
        root = Path(__file__).parent.parent
        assert run_python(PURE, root, *paths, cwd=folder, env=env).split() == expected


def test_labels_never_count() -> None:
    """Readable names take no part in digest, equality or hash."""
    one, two = key(name="a"), key(name="面_7")
    assert one == two
    assert hash(one) == hash(two)
    assert one.digest == two.digest == str(one)
    assert (one.file_name, key().file_name) == ("a", one.digest[:12])


def test_kinds_are_apart() -> None:
    """Equal parts under another kind are another key."""
    assert len({digest_of(kind, {"a": 1}) for kind in Kind}) == len(Kind)


@pytest.mark.parametrize(
    "value", [1.5, float("nan"), 2.0, [1, {"x": 0.0}], 2**63, -(2**63), b"x", {1: 2}, "\ud800", {1}]
)
def test_unfit_parts(value: Any) -> None:
    """Floats, numbers beyond 64 bits, bytes and text that UTF-8 cannot hold have no place in a key."""
    with pytest.raises(ConfigError, match=r"key part"):
        EngineKey(Kind.ENGINE, {"part": value})


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), json_values, max_size=4),
    st.randoms(),
)
def test_any_parts(parts: dict[str, Any], chance: random.Random) -> None:
    """Any JSON parts give a key that survives JSON and any order of mappings."""
    parts = {name: value for name, value in parts.items() if "\ud800" not in name}
    again = shuffled(json.loads(json.dumps(parts)), chance)
    assert EngineKey(Kind.ENGINE, parts).digest == EngineKey(Kind.ENGINE, again).digest
    assert differences(parts, again) == ()


@given(json_values, json_values)
def test_differences_agree_with_digests(one: Any, two: Any) -> None:
    """Two tables of parts have differences exactly where their keys differ."""
    same = digest_of(Kind.ENGINE, {"p": one}) == digest_of(Kind.ENGINE, {"p": two})
    assert (differences({"p": one}, {"p": two}) == ()) is same


def test_differences() -> None:
    """Each differing part with both values, in order; None stands for what is not there."""
    found = differences(
        {"b": 1, "a": "x", "only": [1], "same": {"k": [1]}, "n": None, "t": True},
        {"b": 2, "a": "y", "same": {"k": [1]}, "t": 1, "extra": "e"},
    )
    assert [(d.part, d.wanted, d.stored) for d in found] == [
        ("a", "x", "y"),
        ("b", 1, 2),
        ("extra", None, "e"),
        ("n", None, None),
        ("only", [1], None),
        ("t", True, 1),
    ]
    assert str(found[0]) == "a: wanted x, stored y"
    assert str(found[4]) == "only: wanted [1], stored nothing"
    (model,) = differences({"model": MODEL}, {"model": OTHER})
    assert str(model) == "model: wanted blake3:abababababab, stored blake3:cbcbcbcbcbcb"


# ---- what counts ----------------------------------------------------------------------------------------------------


def test_every_field_counts() -> None:
    """Model, profiles, options, flavour, version, target, plugins, calibration, Q/DQ and recipe each split the key."""
    variants = [
        key(),
        key(model=OTHER),
        key(profiles=()),
        key(profiles=normalize_profiles({"x": "1x3:3x3:4x3"})),
        key(profiles=normalize_profiles([{"x": (1, 3)}, {"x": (2, 3)}])),
        key(profiles=normalize_profiles([{"x": (2, 3)}, {"x": (1, 3)}])),
        key(options=BuildOptions()),
        key(flavour="tensorrt_rtx"),
        key(version="10.13.3.8"),
        key(plugins=["blake3:1"]),
        key(plugins=["blake3:1", "blake3:2"]),
        key(calibration="blake3:1"),
        key(recipe=""),
        key(recipe="2"),
        key(qdq={}),
        key(qdq={"weights": True}),
        key(driver_in_key=True),
    ]
    assert len({variant.digest for variant in variants}) == len(variants)


def test_order_of_plugins_does_not_count() -> None:
    """Plugin libraries are a set."""
    assert key(plugins=["b", "a"]) == key(plugins=iter(["a", "b"]))


def test_absent_parts_stay_absent() -> None:
    """A request without plugins, calibration or recipe has no such parts, so parts added later leave it alone."""
    assert not {"plugins", "calibration", "recipe", "qdq", "target.driver"} & set(key().parts)
    assert {name for name in key(options=BuildOptions()).parts if name.startswith("options.")} == set()


def test_options_count_by_name() -> None:
    """Options appear by name and readable value, never as numbers of an enum."""
    options = BuildOptions(refit="individual", refittable_weights=["b", "a"], memory_pools={"tactic_dram": 4})
    parts = key(options=options).parts
    assert parts["options.refit"] == "individual"
    assert parts["options.refittable_weights"] == ["a", "b"]
    assert parts["options.memory_pools"] == {"tactic_dram": 4}
    # `timing` and the number of threads cannot change the plan.
    assert key(options=BuildOptions(timing="off", builder_threads=4)) == key(options=BuildOptions())


NEVER: dict[str, Any] = {"memory_bytes": 24_152_899_600, "uuid": "GPU-2"}
ALWAYS = {"os": "windows", "arch": "aarch64", "cuda": "12.9"}
EXACT = {"gpu": "NVIDIA L40S", "sm_count": 142, "mig_profile": "1g.10gb"}


@pytest.mark.parametrize(
    ("level", "splits"),
    [
        ("none", {**ALWAYS, **EXACT, "compute_capability": "8.6"}),
        ("same_compute_capability", {**ALWAYS, "compute_capability": "8.6"}),
        ("ampere_plus", ALWAYS),
    ],
)
def test_how_much_of_the_target_counts(level: Any, splits: dict[str, Any]) -> None:
    """Cases 68, 77, 78, 122: what splits the key at each hardware-compatibility level, and what never does."""
    options = BuildOptions(hardware_compatibility=level)
    base = key(options=options)
    facts = {**NEVER, **ALWAYS, **EXACT, "compute_capability": "8.6", "driver": "535.161.08"}
    split = {name for name, value in facts.items() if key(options=options, target=l4(**{name: value})) != base}
    assert split == set(splits)


CARDS = {
    "T4": Target(gpu="Tesla T4", compute_capability="7.5", sm_count=40, os="linux", arch="x86_64"),
    "RTX 2080": Target(gpu="NVIDIA GeForce RTX 2080", compute_capability="7.5", sm_count=46, os="linux", arch="x86_64"),
    "P6000": Target(gpu="Quadro P6000", compute_capability="6.1", sm_count=30, os="linux", arch="x86_64"),
    "3090": Target(gpu="NVIDIA GeForce RTX 3090", compute_capability="8.6", sm_count=82, os="linux", arch="x86_64"),
    "A10": Target(gpu="NVIDIA A10", compute_capability="8.6", sm_count=72, os="linux", arch="x86_64"),
    "4090": Target(gpu="NVIDIA GeForce RTX 4090", compute_capability="8.9", sm_count=128, os="linux", arch="x86_64"),
}


@pytest.mark.parametrize(
    ("level", "groups"),
    [
        ("none", [["T4"], ["RTX 2080"], ["P6000"], ["3090"], ["A10"], ["4090"]]),
        ("same_compute_capability", [["T4", "RTX 2080"], ["P6000"], ["3090", "A10"], ["4090"]]),
        ("ampere_plus", [["T4", "RTX 2080", "P6000", "3090", "A10", "4090"]]),
    ],
)
def test_matrix_of_cards(level: Any, groups: list[list[str]]) -> None:
    """Cases 66, 68, 70: which cards share an engine at each level."""
    options = BuildOptions(hardware_compatibility=level)
    found: dict[str, list[str]] = {}
    for name, target in CARDS.items():
        found.setdefault(key(options=options, target=target).digest, []).append(name)
    assert sorted(found.values()) == sorted(groups)


def test_explains_other_card() -> None:
    """Case 66: the difference names both compute capabilities."""
    found = {d.part: str(d) for d in differences(key(target=CARDS["T4"]).parts, key(target=CARDS["P6000"]).parts)}
    assert found["target.compute_capability"] == "target.compute_capability: wanted 7.5, stored 6.1"


def test_mig_slices() -> None:
    """Case 76: seven equal slices share an engine, a bigger one does not, nor does the whole card."""
    slices = [l4(mig_profile="1g.10gb", sm_count=14, uuid=f"MIG-{n}", memory_bytes=10**10 + n) for n in range(7)]
    bigger = l4(mig_profile="2g.20gb", sm_count=28, uuid="MIG-8")
    assert len({key(target=target) for target in [*slices, bigger, l4()]}) == 3


def test_driver_counts_on_request() -> None:
    """Case 77: another driver is the same engine, unless the policy says otherwise."""
    one, two = l4(driver="535.171.04"), l4(driver="535.161.08")
    assert key(target=one) == key(target=two)
    strict = [key(target=target, driver_in_key=True) for target in (one, two)]
    assert [d.part for d in differences(strict[0].parts, strict[1].parts)] == ["target.driver"]


@pytest.mark.parametrize(
    ("os_name", "arch"),
    [("Windows", "AMD64"), ("win32", "x64"), ("windows", "x86_64"), ("WIN64", "x86-64"), (" win ", "X86_64")],
)
def test_one_spelling_of_a_platform(os_name: str, arch: str) -> None:
    """Case 80: every spelling of one platform gives one key."""
    assert key(target=l4(os=os_name, arch=arch)) == key(target=l4(os="windows", arch="x86_64"))


def test_rtx_targets() -> None:
    """An RTX plan is for a set of compute capabilities, or portable; the GPU at hand does not count."""

    def rtx(**target: Any) -> EngineKey:
        return key(
            flavour="tensorrt_rtx", version="1.7.1.116", target=Target(**{"os": "linux", "arch": "x86_64", **target})
        )

    assert rtx() == rtx(gpu="NVIDIA L4", compute_capability="8.9", sm_count=58, cuda="13.0", driver="1")
    assert rtx(compute_capabilities=["8.9", "12.0"]) == rtx(compute_capabilities=[(12, 0), "SM89", "8.9"])
    keys = {rtx(), rtx(compute_capabilities=["8.9"]), rtx(compute_capabilities=["8.9", "12.0"]), rtx(os="windows")}
    assert len(keys) == 4


def test_timing_keys() -> None:
    """A timing cache belongs to exact device, library, CUDA and driver; a scope narrows it."""

    def timing(scope: str = "", version: str = "10.13.3.9", **changes: Any) -> Any:
        return timing_key(flavour="tensorrt", version=version, target=l4(**changes), scope=scope)

    assert timing() == timing(**NEVER)
    changes: dict[str, Any] = {**ALWAYS, **EXACT, "driver": "1.0"}
    others = [timing(**{name: value}) for name, value in changes.items()]
    assert len({timing(), timing("m"), timing(version="10.13.3.8"), *others}) == 3 + len(others)
    assert timing().kind is Kind.TIMING


def test_calibration_keys() -> None:
    """A calibration table belongs to model, data and method; no GPU or library is in it."""
    base: dict[str, Any] = {"model": MODEL, "data": "d", "algorithm": "entropy2", "batches": 8, "preprocess": None}
    changes = {"model": "m", "data": "e", "algorithm": "minmax", "batches": None, "preprocess": "p"}
    keys = {calibration_key(**{**base, name: value}) for name, value in changes.items()}
    assert len(keys | {calibration_key(**base)}) == 1 + len(changes)
    assert not [part for part in calibration_key(**base).parts if part.startswith(("target", "builder"))]


def test_target_fields_are_all_accounted_for() -> None:
    """A fact added to Target must be put into one of the groups above."""
    known = {*NEVER, *ALWAYS, *EXACT, "compute_capability", "driver", "tensorrt", "compute_capabilities"}
    assert {field.name for field in dataclasses.fields(Target)} == known
