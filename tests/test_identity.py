"""Which GPUs share an engine, seen from `get`: made-up targets, one store, and the builds that they cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support import PROFILE, tiny_model

import trt_warmcache as twc
from trt_warmcache.testing import FakeBuilder

MIB = 1024 * 1024


def card(gpu: str, capability: str, sm_count: int, **more: Any) -> twc.Target:
    """A target as the driver would describe it."""
    facts: dict[str, Any] = {"os": "linux", "arch": "x86_64", "cuda": "12.8", "driver": "570.86.15"}
    return twc.Target(gpu=gpu, compute_capability=capability, sm_count=sm_count, **{**facts, **more})


T4 = card("Tesla T4", "7.5", 40)
RTX_2080 = card("NVIDIA GeForce RTX 2080", "7.5", 46)
RTX_3090 = card("NVIDIA GeForce RTX 3090", "8.6", 82)
A10 = card("NVIDIA A10", "8.6", 72)
RTX_4090 = card("NVIDIA GeForce RTX 4090", "8.9", 128)
H100 = card("NVIDIA H100 80GB HBM3", "9.0", 132)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model."""
    path = tmp_path / "tiny.onnx"
    path.write_bytes(tiny_model())
    return path


@pytest.fixture
def builder() -> FakeBuilder:
    """A builder that counts."""
    return FakeBuilder()


@pytest.fixture
def manager(tmp_path: Path, builder: FakeBuilder) -> Any:
    """A manager over an empty folder."""
    with twc.EngineManager(tmp_path / "store", builder=builder, memo=twc.DigestMemo(None)) as manager:
        yield manager


def outcomes(manager: twc.EngineManager, model: Path, targets: list[twc.Target], **fields: Any) -> list[str]:
    """How each target's engine was come by."""
    return [manager.get(model, profiles=PROFILE, target=target, **fields).outcome.value for target in targets]


def test_other_compute_capability_is_a_miss(manager: twc.EngineManager, model: Path) -> None:
    """Case 66: the engine of one card is not taken for another's, and the explanation names both capabilities."""
    manager.get(model, profiles=PROFILE, target=card("Quadro P6000", "6.1", 30))
    turing = card("NVIDIA GeForce RTX 2080 Ti", "7.5", 68)
    assert manager.lookup(model, profiles=PROFILE, target=turing) is None
    explanation = manager.explain(model, profiles=PROFILE, target=turing)
    assert not explanation.hit
    found = {difference.part: (difference.wanted, difference.stored) for difference in explanation.differences}
    assert found["target.compute_capability"] == ("7.5", "6.1")
    assert found.keys() == {"target.gpu", "target.compute_capability", "target.sm_count"}
    assert "target.compute_capability: wanted 7.5, stored 6.1" in str(explanation)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (None, ["built", "built", "built", "built", "built", "hit", "hit"]),
        ("none", ["built", "built", "built", "built", "built", "hit", "hit"]),
        ("same_compute_capability", ["built", "hit", "built", "hit", "built", "hit", "hit"]),
        ("ampere_plus", ["built", "hit", "hit", "hit", "hit", "hit", "hit"]),
    ],
)
def test_levels(manager: twc.EngineManager, model: Path, level: Any, expected: list[str]) -> None:
    """Case 68: exact card, same compute capability, Ampere and newer: who gets whose engine."""
    options = twc.BuildOptions(hardware_compatibility=level)
    cards = [RTX_2080, T4, RTX_3090, A10, RTX_4090, T4, RTX_3090]
    assert outcomes(manager, model, cards, options=options) == expected


def test_levels_do_not_mix(manager: twc.EngineManager, model: Path) -> None:
    """An engine made for one level is not the engine of another, even on the very same card."""
    levels: list[Any] = ["none", "same_compute_capability", "ampere_plus"]
    keys = {
        manager.key(model, profiles=PROFILE, target=H100, options=twc.BuildOptions(hardware_compatibility=level)).digest
        for level in levels
    }
    assert len(keys) == 3


def test_no_default_for_a_card_without_engine(manager: twc.EngineManager, model: Path) -> None:
    """Case 69: a store with engines for another capability only: a miss that names what there is."""
    manager.get(model, profiles=PROFILE, target=H100)
    with pytest.raises(twc.MissError, match=r"(?s)8\.6.*9\.0"):
        manager.get(model, profiles=PROFILE, target=RTX_3090, policy=twc.Policy(on_miss="raise"))


def test_two_cards_of_one_machine(manager: twc.EngineManager, model: Path, builder: FakeBuilder) -> None:
    """Case 70: interleaved requests for two cards: each always gets its own plan."""
    plans = [
        (target, bytes(manager.get(model, profiles=PROFILE, target=target).plan))
        for target in (RTX_3090, RTX_4090, RTX_3090, RTX_4090)
    ]
    assert builder.builds == 2
    for target, plan in plans:
        assert (target.gpu or "?").encode() in plan


def test_equal_cards_share(manager: twc.EngineManager, model: Path, builder: FakeBuilder) -> None:
    """Cases 78, 122: other slot, other memory size to the megabyte, other driver: the same engine, even so."""
    cards = [
        card("NVIDIA A10", "8.6", 72, uuid=f"GPU-{n}", memory_bytes=(24000 + n) * MIB, driver=f"570.86.{n}")
        for n in range(4)
    ]
    assert outcomes(manager, model, cards) == ["built", "hit", "hit", "hit"]
    assert builder.builds == 1


def test_mig_slices(manager: twc.EngineManager, model: Path, builder: FakeBuilder) -> None:
    """Case 76: seven equal slices share an engine; a bigger slice and the whole card have their own."""
    gpu = "NVIDIA A100-SXM4-80GB"
    slices = [
        card(gpu, "8.0", 14, mig_profile="1g.10gb", uuid=f"MIG-{n}", memory_bytes=(9728 + n) * MIB) for n in range(7)
    ]
    bigger = card(gpu, "8.0", 28, mig_profile="2g.20gb", uuid="MIG-8")
    assert outcomes(manager, model, [*slices, bigger]) == ["built"] + ["hit"] * 6 + ["built"]
    assert outcomes(manager, model, [card(gpu, "8.0", 108)]) == ["built"]


def test_driver_policy(manager: twc.EngineManager, model: Path) -> None:
    """Case 77: a driver update keeps engines, unless the policy counts the driver; the difference is then explained."""
    old, new = (card("NVIDIA A10", "8.6", 72, driver=driver) for driver in ("535.161.08", "535.171.04"))
    assert outcomes(manager, model, [old, new]) == ["built", "hit"]
    strict = twc.Policy(driver_in_key=True)
    assert outcomes(manager, model, [old, new, old, new], policy=strict) == ["built", "built", "hit", "hit"]
    newest = card("NVIDIA A10", "8.6", 72, driver="580.65.06")
    explanation = manager.explain(model, profiles=PROFILE, target=newest, policy=strict)
    assert {difference.part for difference in explanation.differences} == {"target.driver"}


@pytest.mark.parametrize("change", [{"cuda": "13.0"}, {"os": "windows"}, {"arch": "aarch64"}, {"sm_count": 71}])
def test_what_else_splits(manager: twc.EngineManager, model: Path, change: dict[str, Any]) -> None:
    """CUDA version, operating system, architecture and number of multiprocessors split the key."""
    facts: dict[str, Any] = {"gpu": "NVIDIA A10", "capability": "8.6", "sm_count": 72}
    assert outcomes(manager, model, [card(**facts), card(**{**facts, **change})]) == ["built", "built"]


def test_library_version_splits(tmp_path: Path, model: Path) -> None:
    """An update of TensorRT is a miss, and the explanation says that it is the version."""
    store = tmp_path / "store"
    for version, outcome in (("10.8.0", "built"), ("10.9.0", "built"), ("10.8.0", "hit")):
        builder = FakeBuilder(library=version)
        with twc.EngineManager(store, builder=builder, memo=twc.DigestMemo(None), target=T4) as manager:
            assert manager.get(model, profiles=PROFILE).outcome.value == outcome


def test_spellings_of_one_platform(manager: twc.EngineManager, model: Path, builder: FakeBuilder) -> None:
    """Case 80: one machine described in many spellings: one engine."""
    for os_name, arch, capability in (
        ("windows", "x86_64", "8.9"),
        ("Windows", "AMD64", (8, 9)),
        ("win32", "x64", 89),
        ("WIN64", " x86-64 ", "SM89"),
        (" Win ", "amd64", "sm_89"),
    ):
        target = twc.Target(gpu=" NVIDIA L4 ", compute_capability=capability, sm_count=58, os=os_name, arch=arch)
        manager.get(model, profiles=PROFILE, target=target)
    assert builder.builds == 1


def test_plugin_libraries_of_one_name(manager: twc.EngineManager, model: Path, tmp_path: Path) -> None:
    """Case 82: a library's bytes count, not its folder; two different ones of one name cannot be listed, so are refused."""
    libraries = {}
    for folder, content in (("a", b"first"), ("b", b"second"), ("c", b"first")):
        libraries[folder] = tmp_path / folder / "libplugin.so"
        libraries[folder].parent.mkdir()
        libraries[folder].write_bytes(content)

    def digest(*plugins: Path) -> str:
        return manager.key(model, profiles=PROFILE, plugins=plugins).digest

    assert digest(libraries["a"]) == digest(libraries["c"]) == digest(libraries["a"], libraries["c"])
    assert digest(libraries["a"]) != digest(libraries["b"])
    with pytest.raises(twc.ConfigError, match=r"'libplugin\.so'.*rename one"):
        digest(libraries["a"], libraries["b"])
