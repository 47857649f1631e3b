"""Names of files that people see."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_warmcache import ShapeProfile, Target
from trt_warmcache.keys import label_for
from trt_warmcache.names import MAX_NAME_BYTES, readable_name, with_digest

DIGEST = "0123456789abcdef" * 4
SUFFIXES = (".engine", ".cache", ".calib")
DEVICES = "CON PRN AUX NUL COM1 com9 LPT1 COM¹ lpt² con.txt nul.tar.gz Aux.onnx".split()  # noqa: SIM905

text = st.text(max_size=300)


def check(name: str) -> None:
    """A name is short, made of safe characters, and no device of Windows."""
    for suffix in SUFFIXES:
        full = with_digest(name, DIGEST) + suffix
        assert len(full.encode()) <= MAX_NAME_BYTES
    assert re.fullmatch(r"[\w.+=@-]+", name), name
    assert not name.startswith((".", "-")), name
    assert name.partition(".")[0].lower() not in {"con", "prn", "aux", "nul", "com1", "lpt1", "com¹"}, name


@given(text, text, text, text)
def test_any_text_gives_a_safe_name(model: str, version: str, gpu: str, shape: str) -> None:
    """Cases 89 and 90: whatever people call things, the file name is safe on every file system and bounded."""
    name = readable_name(model, version, gpu, shape)
    check(name)
    assert readable_name(model, version, gpu, shape) == name


@pytest.mark.parametrize("device", DEVICES)
def test_windows_devices(device: str) -> None:
    """A model called like a device of Windows gets a name that is none, at any length."""
    check(readable_name(device, "1", "L4", "1x3"))
    check(readable_name(f"{device}.{'x' * 300}", "1", "L4", "1x3"))


def test_plain_names_stay() -> None:
    """The documented form, with the readable parts untouched."""
    assert readable_name("face_beauty", "7", "NVIDIA L4", "1x3x224x224") == "face_beauty_7_NVIDIA-L4_1x3x224x224"
    assert with_digest("a", DIGEST) == "a-0123456789ab"


def test_scripts_stay() -> None:
    """Letters of every script stay readable; what no file system likes goes."""
    assert readable_name("人脸 模型", "v2", "é", "1x3") == "人脸-模型_v2_é_1x3"
    assert readable_name('a/b\\c:d*e?f"g<h>i|j\n', "1", "g", "s") == "a-b-c-d-e-f-g-h-i-j_1_g_s"
    assert readable_name("😀", "..", "", "-") == "x_x_x_x"
    assert readable_name("mod\udce9le", "1", "g", "s") == "mod-le_1_g_s"


def test_composed_and_decomposed_are_one() -> None:
    """File systems that decompose accents give the same name as those that do not."""
    assert readable_name("e\u0301", "1", "g", "s") == readable_name("\u00e9", "1", "g", "s")


def test_longest_part_gives_way() -> None:
    """Case 90: a model name of 250 characters leaves the other parts whole; wide characters count by bytes."""
    name = readable_name("m" * 250, "7", "NVIDIA-L4", "1x3x224x224")
    assert name.endswith("m_7_NVIDIA-L4_1x3x224x224")
    assert len(name.encode()) == MAX_NAME_BYTES - len("-0123456789ab.runtime")
    check(readable_name("模" * 250, "型" * 250, "卡" * 250, "形" * 250))


def label(model_name: str = "m", version: str | None = None, *profiles: ShapeProfile, **target: Any) -> str:
    """The label of a request for a fixed model."""
    return label_for(
        model_name=model_name,
        version=version,
        model=f"blake3:{DIGEST}",
        target=Target(**target),
        profiles=profiles,
        shapes=[(1, 3), ()],
    )


def test_labels() -> None:
    """The parts of a label: version or digest, GPU or capabilities, static shapes or ranges."""
    assert label() == "m_01234567_portable_1x3+scalar"
    assert label("m", "7", gpu="NVIDIA L4") == "m_7_NVIDIA-L4_1x3+scalar"
    fixed, ranged = ShapeProfile({"x": (1, 3)}), ShapeProfile({"x": "1x3:2x3:4x3", "y": (5,)})
    assert label("m", "7", fixed) == "m_7_portable_1x3"
    assert label("m", "7", fixed, ranged) == "m_7_portable_1x3_1x3-2x3-4x3+5"


def test_labels_of_many_inputs() -> None:
    """Case 90: six inputs and a long name still give a name that fits."""
    profile = ShapeProfile({f"input{n}": "1x3x512x512:4x3x768x768:8x3x1024x1024" for n in range(6)})
    check(label("n" * 250, "1.0", profile, gpu="NVIDIA A100-SXM4-80GB", mig_profile="1g.10gb"))
