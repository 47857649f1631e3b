"""Files that leave a store: names that are safe, short and unique, whatever the entries claim."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_warmcache import StoreError
from trt_warmcache.export import EXTENSIONS, file_names, write_whole
from trt_warmcache.keys import KEY_SCHEMA, Kind
from trt_warmcache.manifest import FORMAT, Labels, Manifest
from trt_warmcache.names import MAX_NAME_BYTES, readable_name, safe_name


def entry(label: str, kind: Kind = Kind.ENGINE, key: str | None = None) -> Manifest:
    """An entry's manifest with a label of one's choice."""
    return Manifest(
        format=FORMAT,
        kind=kind.value,
        key=key or secrets.token_hex(32),
        schema=KEY_SCHEMA,
        parts={},
        blobs=(),
        labels=Labels(entry=label),
    )


def names(*manifests: Manifest) -> list[str]:
    """Their file names, in order."""
    found = file_names(manifests)
    return [found[manifest.key] for manifest in manifests]


@pytest.mark.parametrize(("kind", "extension"), EXTENSIONS.items())
def test_extensions(kind: Kind, extension: str) -> None:
    """The kind shows in the extension; an entry without a label is called by its key."""
    assert names(entry("m_1_L4_1x3", kind)) == ["m_1_L4_1x3" + extension]
    assert names(entry("", kind, "ab" * 32)) == ["abababababab" + extension]


def test_every_kind_has_an_extension() -> None:
    """A kind added later needs one, and each its own."""
    assert EXTENSIONS.keys() == set(Kind)
    assert len(set(EXTENSIONS.values())) == len(Kind)


def test_collisions() -> None:
    """Equal names get the beginning of their keys, also where only case differs; different kinds do not collide."""
    first, second, third = entry("m_1", key="a" * 64), entry("M_1", key="b" * 64), entry("other_1", key="c" * 64)
    timing = entry("m_1", Kind.TIMING, "d" * 64)
    assert names(first, second, third, timing) == [
        "m_1-aaaaaaaaaaaa.engine",
        "M_1-bbbbbbbbbbbb.engine",
        "other_1.engine",
        "m_1.cache",
    ]
    assert names(second) == ["M_1.engine"]


def test_name_that_looks_like_a_way_out() -> None:
    """A model that is called as another would be after a collision does not take its file."""
    disguised = entry("m_1-aaaaaaaaaaaa", key="c" * 64)
    found = names(entry("m_1", key="a" * 64), entry("m_1", key="b" * 64), disguised)
    assert found[2] == "m_1-aaaaaaaaaaaa-cccccccccccc.engine"
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    "label",
    ["../../etc/cron.d/x", "/etc/passwd", "C:\\Windows\\x", "\\\\host\\share", "..", ".", "a/b", "a\0b", "con", "NUL.txt",
     "x" * 5000, "模型" * 500, "a\nb", "-rf", "~/x", "\u202egnp.exe"],
)  # fmt: skip
@pytest.mark.parametrize("kind", list(Kind))
def test_labels_are_not_trusted(label: str, kind: Kind, tmp_path: Path) -> None:
    """Case 116: a label is whatever the writer of the store made it; it never leads out of the folder."""
    for name in (*names(entry(label, kind)), *names(entry(label, kind), entry(label, kind))):
        assert Path(name).name == name
        assert len(name.encode()) <= MAX_NAME_BYTES
        write_whole(tmp_path / "out" / name, b"plan")
    assert len(list((tmp_path / "out").iterdir())) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@given(st.lists(st.text(max_size=120), min_size=4, max_size=4))
def test_own_names_stay(parts: list[str]) -> None:
    """A name that this library made is used as it is."""
    name = readable_name(*parts)
    assert safe_name(name) == name


@given(st.text(max_size=400))
def test_names_settle(text: str) -> None:
    """Made safe twice is made safe once."""
    assert safe_name(safe_name(text)) == safe_name(text)


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A file is replaced at once; where it cannot be written nothing stays behind and the error says why."""
    target = tmp_path / "a" / "m.engine"
    assert write_whole(target, b"one").read_bytes() == b"one"
    assert write_whole(target, memoryview(b"two")).read_bytes() == b"two"
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    for place in (blocked / "m.engine", tmp_path / ("n" * 300)):
        with pytest.raises(StoreError, match=f"write {place.name[:20]}") as caught:
            write_whole(place, b"three")
        assert isinstance(caught.value.__cause__, OSError)
    folder = tmp_path / "folder"
    (folder / "child").mkdir(parents=True)
    with pytest.raises(StoreError):
        write_whole(folder, b"four")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file", "folder"]


def test_interrupted_write(tmp_path: Path) -> None:
    """Data that cannot be written leaves neither a file nor a temporary one."""
    bad: Any = object()
    with pytest.raises(TypeError):
        write_whole(tmp_path / "m.engine", bad)
    assert list(tmp_path.iterdir()) == []
