"""Targets: one spelling for each fact, and nothing that cannot be meant."""

from __future__ import annotations

import copy
import pickle
import platform
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_warmcache import ConfigError, Target
from trt_warmcache.target import canonical_arch, canonical_os, compute_capability


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Linux", "linux"), ("linux2", "linux"), ("Windows", "windows"), ("win32", "windows"), ("Win64", "windows"),
        ("win", "windows"), ("Darwin", "macos"), ("macOS", "macos"), (" LINUX ", "linux"), ("FreeBSD", "freebsd"),
    ],
)  # fmt: skip
def test_operating_systems(spelling: str, name: str) -> None:
    """Case 80: every spelling in the wild gives one value, and that value gives itself."""
    assert canonical_os(spelling) == canonical_os(name) == name == Target(os=spelling).os


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("AMD64", "x86_64"), ("x86_64", "x86_64"), ("x64", "x86_64"), ("X86-64", "x86_64"), ("arm64", "aarch64"),
        ("AArch64", "aarch64"), ("ARMv8", "aarch64"), ("SBSA", "aarch64"), ("ppc64le", "ppc64le"),
    ],
)  # fmt: skip
def test_architectures(spelling: str, name: str) -> None:
    """Case 80: likewise for CPUs."""
    assert canonical_arch(spelling) == canonical_arch(name) == name == Target(arch=spelling).arch


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("8.9", "8.9"), ((8, 9), "8.9"), ([8, 9], "8.9"), (89, "8.9"), (8.9, "8.9"), ("SM89", "8.9"), ("sm_89", "8.9"),
        (" 8.9 ", "8.9"), (120, "12.0"), ("sm_120", "12.0"), ((12, 0), "12.0"), (12.0, "12.0"), (75, "7.5"),
        ("08.9", "8.9"),
    ],
)  # fmt: skip
def test_compute_capabilities(value: Any, text: str) -> None:
    """Text, pairs, numbers and NVIDIA's SM names are one value."""
    assert compute_capability(value) == Target(compute_capability=value).compute_capability == text


@pytest.mark.parametrize(
    "value",
    [None, True, "", "8", 8, "8.9.1", "sm", "8.x", (8,), (8, 9, 0), (-1, 5), (8, 90), (8, "x"), (8, True), "8.٩", b"89", {}, -89, 1e9],
)  # fmt: skip
def test_unreadable_compute_capabilities(value: Any) -> None:
    """What is no compute capability is refused with the way to write one."""
    with pytest.raises(ConfigError, match=r"write it like '8\.9'"):
        compute_capability(value)


def test_sets_of_capabilities() -> None:
    """For TensorRT-RTX: sorted as numbers, each once; a single one needs no list; empty is the portable plan."""
    assert Target(compute_capabilities=["12.0", "sm_89", 86, "8.9"]).compute_capabilities == ("8.6", "8.9", "12.0")
    assert Target(compute_capabilities="8.9") == Target(compute_capabilities=8.9) == Target(compute_capabilities={89})
    assert Target().compute_capabilities == ()
    for wrong in (None, b"89", ["8.9", None], [""]):
        with pytest.raises(ConfigError, match="write it like"):
            Target(compute_capabilities=wrong)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for name in ("sm_count", "memory_bytes") for value in (0, -1, 1.5, "72", True, 2**63)),
        *(
            (name, value)
            for name in ("gpu", "mig_profile", "uuid", "tensorrt", "cuda", "driver")
            for value in ("", "  ", 3, b"x", "\udcff")
        ),
        *((name, value) for name in ("os", "arch") for value in ("  ", 3, b"x", "\udcff", ["linux"])),
        *((name, "latest") for name in ("tensorrt", "cuda", "driver")),
    ],
)  # fmt: skip
def test_mistakes(field: str, value: Any) -> None:
    """Each field refuses what cannot be meant, naming itself and the value."""
    with pytest.raises(ConfigError, match=rf"^Target\.{field} must be"):
        Target(**{field: value})


@pytest.mark.parametrize(
    ("field", "nearest"), [("gpus", "gpu"), ("sm_counts", "sm_count"), ("compute_capabilty", "compute_capability")]
)
def test_unknown_fields(field: str, nearest: str) -> None:
    """A misspelt field names the nearest one."""
    with pytest.raises(TypeError, match=f"Target has no field '{field}'; did you mean '{nearest}'"):
        Target(**{field: 1})  # type: ignore[arg-type]


def test_defaults_are_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operating system and architecture come from this machine, in their one spelling; a GPU is not looked for."""
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    monkeypatch.setattr(platform, "machine", lambda: "AMD64")
    assert Target().to_json() == {"os": "windows", "arch": "x86_64"}
    assert Target(os="linux", arch="arm64").to_json() == {"os": "linux", "arch": "aarch64"}


def test_blanks_around_names() -> None:
    """Blanks around a name, as tools print them, do not make another GPU."""
    assert Target(gpu=" NVIDIA L4\n", driver="570.1 ") == Target(gpu="NVIDIA L4", driver="570.1")


texts = st.text("abcXYZ 0189.-_é上", min_size=1).filter(str.strip)
targets = st.builds(
    Target,
    gpu=st.none() | texts,
    compute_capability=st.none() | st.sampled_from(["7.5", (8, 9), 120]),
    sm_count=st.none() | st.integers(1, 2**63 - 1),
    memory_bytes=st.none() | st.integers(1, 2**63 - 1),
    mig_profile=st.none() | texts,
    uuid=st.none() | texts,
    os=st.sampled_from(["", "linux", "Windows", "plan9"]),
    arch=st.sampled_from(["", "AMD64", "arm64", "riscv64"]),
    tensorrt=st.none() | st.sampled_from(["10.13.3.9", "8.6"]),
    compute_capabilities=st.lists(st.sampled_from(["8.6", "8.9", "12.0"])),
)


@given(targets)
def test_round_trips(target: Target) -> None:
    """A target survives JSON, pickling and copying, equal and with an equal hash; newer facts are ignored."""
    for back in (
        Target.from_json({**target.to_json(), "added_later": 1}),
        pickle.loads(pickle.dumps(target)),
        copy.deepcopy(target),
    ):
        assert back == target
        assert hash(back) == hash(target)


def test_frozen() -> None:
    """A target cannot be changed once made."""
    target = Target(gpu="NVIDIA L4")
    with pytest.raises(AttributeError):
        target.gpu = "NVIDIA A10"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({}, "portable"),
        ({"compute_capability": "8.9"}, "sm89"),
        ({"gpu": "NVIDIA L4", "compute_capability": "8.9"}, "NVIDIA L4"),
        ({"gpu": "NVIDIA A100", "mig_profile": "1g.10gb"}, "NVIDIA A100-mig-1g.10gb"),
        ({"gpu": "NVIDIA L4", "compute_capabilities": ["8.9", "12.0"]}, "sm89+sm120"),
    ],
)
def test_gpu_type(facts: dict[str, Any], name: str) -> None:
    """The word for file names: what the plan is made for."""
    assert Target(**facts).gpu_type == name


def test_with_tensorrt() -> None:
    """Another library version, all else equal."""
    assert Target(gpu="g").with_tensorrt("10.8") == Target(gpu="g", tensorrt="10.8")
