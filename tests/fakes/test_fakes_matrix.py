"""The fakes have nothing that the real bindings of their release lack, and number things as those do."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.fakes import LINES, Line, make_tensorrt
from tests.fakes.tensorrt_fake import enum_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = Path(__file__).parent.parent / "data"
MODULE_NAMES = {"float16", "float32", "int8", "int32", "bool", "get_nv_onnx_parser_version", "init_libnvinfer_plugins"}
"""Plain module attributes, which the matrix does not list and every release has."""


def read_matrix(path: Path) -> tuple[list[str], dict[str, set[str]]]:
    """Releases, and for each name the releases that have it."""
    header, *lines = path.read_text().splitlines()
    releases: list[str] = ast.literal_eval(header)
    table: dict[str, set[str]] = {}
    for line in lines:
        name, span = line.split(" ")
        first, _, last = span.partition("..")
        table[name] = set(releases[releases.index(first) : releases.index(last or first) + 1])
    return releases, table


def real_names(line: Line) -> set[str]:
    """Classes and `Class.member` of one release, from both files."""
    names: set[str] = set()
    for file in ("trt_api_matrix.txt", "trt_api_matrix_more.txt"):
        releases, table = read_matrix(DATA / file)
        assert line in releases
        names |= {name for name, span in table.items() if line in span}
    return names


def public(thing: object) -> list[str]:
    return [name for name in dir(thing) if not name.startswith("_")]


def fake_names(module: Any) -> Iterator[str]:
    """Every public class and member of a fake, in the matrix's spelling."""
    for name in public(module):
        value = getattr(module, name)
        if isinstance(value, type):
            yield name
            for member in public(value):
                yield f"{name}.{member}"
        else:
            assert name in MODULE_NAMES, f"{name} is neither a class nor a known module attribute"


@pytest.mark.parametrize("line", LINES)
def test_no_member_the_real_binding_lacks(line: Line) -> None:
    """Each public class, method, property and enum member of a fake exists in the real binding of that release."""
    invented = set(fake_names(make_tensorrt(line))) - real_names(line)
    assert not invented


@pytest.mark.parametrize("line", LINES)
def test_enums_are_complete(line: Line) -> None:
    """Each enum that the fake offers has all members that the real one has in that release."""
    module, real = make_tensorrt(line), real_names(line)
    for name in public(module):
        value = getattr(module, name)
        if hasattr(value, "__members__"):
            wanted = {n.partition(".")[2] for n in real if n.startswith(f"{name}.")} - {"name", "value", "itemsize"}
            assert set(value.__members__) == {m for m in wanted if not m.startswith("_")}, name


@pytest.mark.parametrize("line", LINES)
def test_classes_a_builder_needs_are_there(line: Line) -> None:
    """A member that the real binding has and the library may use is not missing by mistake of ours."""
    real, fake = real_names(line), set(fake_names(make_tensorrt(line)))
    for cls in (
        "IBuilderConfig",
        "ITimingCache",
        "TimingCacheKey",
        "TimingCacheValue",
        "IProgressMonitor",
        "IHostMemory",
    ):
        unused = {"can_run_on_DLA", "get_device_type", "set_device_type", "is_device_type_set", "reset_device_type"}
        missing = {n for n in real if n.startswith(f"{cls}.") and not n.startswith(f"{cls}._")} - fake
        assert missing <= {f"{cls}.{name}" for name in unused}


@pytest.mark.parametrize(
    ("flag", "numbers"),
    [
        ("REFIT", (5, 4, 4, 4)),
        ("TF32", (7, 6, 6, 6)),
        ("DISABLE_TIMING_CACHE", (6, 5, 5, 5)),
        ("VERSION_COMPATIBLE", (15, 13, 13, 12)),
        ("ERROR_ON_TIMING_CACHE_MISS", (None, 16, 16, 15)),
        ("STRIP_PLAN", (None, 19, 19, 18)),
        ("REFIT_IDENTICAL", (None, 20, 20, 19)),
        ("WEIGHT_STREAMING", (None, 21, 21, 20)),
        ("EDITABLE_TIMING_CACHE", (None, None, 27, 26)),
    ],
)
def test_builder_flags_are_renumbered(flag: str, numbers: tuple[int | None, ...]) -> None:
    """A key made of enum numbers would be wrong across majors, and the fakes let a test see that."""
    for line, number in zip(LINES, numbers, strict=True):
        member = getattr(make_tensorrt(line).BuilderFlag, flag, None)
        assert (None if member is None else int(member)) == number


def test_network_flag_bits_change_their_meaning() -> None:
    """`create_network(1)` means three different things; the fakes keep that trap."""
    by_line = {
        line: {int(m): n for n, m in make_tensorrt(line).NetworkDefinitionCreationFlag.__members__.items()}
        for line in LINES
    }
    assert [by_line[line][0] for line in LINES] == [
        "EXPLICIT_BATCH",
        "EXPLICIT_BATCH",
        "EXPLICIT_BATCH",
        "STRONGLY_TYPED",
    ]
    expected = ["EXPLICIT_PRECISION", "STRONGLY_TYPED", "STRONGLY_TYPED", "PREFER_JIT_PYTHON_PLUGINS"]
    assert [by_line[line][1] for line in LINES] == expected


def test_first_name_wins_where_two_share_a_number() -> None:
    """On 10.x the real `STRIP_PLAN.name` reads WEIGHTLESS; code that records names must know."""
    assert make_tensorrt("10.16").BuilderFlag.STRIP_PLAN.name == "WEIGHTLESS"
    assert make_tensorrt("11.4").BuilderFlag.STRIP_PLAN.name == "STRIP_PLAN"
    assert make_tensorrt("8.6").EngineCapability.STANDARD.name == "DEFAULT"


@pytest.mark.parametrize("line", LINES)
def test_enum_numbers_file_agrees_with_the_matrix(line: Line) -> None:
    """The two data files were read at different times; they must tell the same story."""
    real = real_names(line)
    for enum, members in enum_numbers()[line].items():
        if enum != "Severity":
            assert {f"{enum}.{member}" for member in members} <= real


def test_enums_are_not_python_enums() -> None:
    """No iteration, no subscript, no equality with int, no shift without int(): as in the bindings."""
    flags: Any = make_tensorrt("10.16").BuilderFlag
    with pytest.raises(TypeError):
        list(flags)
    with pytest.raises(TypeError):
        flags["TF32"]
    with pytest.raises(TypeError):
        1 << flags.TF32
    assert flags.TF32 != 6
    assert str(flags.TF32) == "BuilderFlag.TF32"
    assert flags(99).name == "???"
