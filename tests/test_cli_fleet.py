"""The commands for shared, moved, cleaned and signed stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.test_eviction import HOUR, alive, put

from trt_warmcache.cli import EXIT_DAMAGED, EXIT_FAILED, EXIT_MISS, EXIT_USAGE, main
from trt_warmcache.keys import Kind
from trt_warmcache.stores import LocalStore
from trt_warmcache.stores._base import blob_name


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """The store that commands use by default."""
    monkeypatch.setenv("TRT_WARMCACHE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return LocalStore(tmp_path / "store")


def run(*arguments: Any, code: int = 0) -> Result:
    """Run a command; its exit code is checked."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def test_gc(store: LocalStore) -> None:
    """A dry run says what would go and deletes nothing; the real run deletes just that."""
    entries = [put(store, number, age=number * HOUR) for number in range(4)]
    for _ in range(2):
        plan = json.loads(run("gc", "--max-bytes", "2kB", "--dry-run", "--json").output)
        assert plan["done"] is None
        assert {row["key"] for row in plan["plan"]["evict"]} == {entries[2].key, entries[3].key}
    assert "Nothing was deleted" in run("gc", "--max-bytes", "2kB", "--dry-run").output
    assert all(alive(store, *entries))
    assert "evicted 2 entries, freed 2.0 kB" in run("gc", "--max-bytes", "2kB").output
    assert alive(store, *entries) == [True, True, False, False]


def test_gc_rules(store: LocalStore) -> None:
    """Age, idleness, model, GPU, kind and superseded versions from the command line."""
    entries = [
        put(store, 1, model="a", age=50 * HOUR), put(store, 2, model="b"), put(store, 3, gpu="NVIDIA H200"),
        put(store, 4, version="10.9.0"), put(store, 4, version="10.13.0"),
    ]  # fmt: skip
    run("gc", "--max-age", "2d")
    assert alive(store, *entries) == [False, True, True, True, True]
    run("gc", "--model", "b")
    assert alive(store, *entries) == [False, False, True, True, True]
    run("gc", "--gpu", "*H200*")
    assert alive(store, *entries) == [False, False, False, True, True]
    run("gc", "--superseded")
    assert alive(store, *entries) == [False, False, False, False, True]
    run("gc", "--kind", "timing")
    assert alive(store, entries[4]) == [True]


@pytest.mark.parametrize("text", ["much", "5 parsecs", "-1", ""])
def test_bad_measures(store: LocalStore, text: str) -> None:
    """A size or duration that cannot be meant is a usage error."""
    run("gc", "--max-bytes", text, code=EXIT_USAGE)
    run("gc", "--max-age", text, code=EXIT_USAGE)
    assert not store.root.exists()


def test_rm_and_pins(store: LocalStore) -> None:
    """Removing by key or name leaves the others; a pinned entry stays until it is unpinned."""
    first, second = put(store, 1), put(store, 2)
    run("pin", first.key[:10], "--note", "release 7")
    assert "keep   1 pinned" in run("rm", first.key).output
    run("rm", second.labels.entry)
    assert alive(store, first, second) == [True, False]
    run("unpin", first.key)
    run("rm", first.key[:8])
    assert alive(store, first) == [False]
    run("rm", first.key, code=EXIT_MISS)


def test_rm_of_an_entry_in_use(store: LocalStore) -> None:
    """An entry that somebody has mapped is not removed, and the exit code says so."""
    entry = put(store, 1)
    payload = store.fetch(entry.blobs[0])
    assert "left 1 in use" in run("rm", entry.key, code=EXIT_FAILED).output
    payload.close()
    run("rm", entry.key)


def test_export_import(store: LocalStore, tmp_path: Path) -> None:
    """A bundle made here fills a store there."""
    entries = [put(store, 1, model="face"), put(store, 2, model="ocr")]
    run("export", "--output", tmp_path / "b.tar", code=EXIT_USAGE)
    run("export", "--model", "face", "--output", tmp_path / "b.tar")
    run("export", "--all", "--output", tmp_path / "all.tar.zst")
    run("export", entries[1].key[:9], "--output", tmp_path / "folder")
    other = LocalStore(tmp_path / "other")
    assert "1 copied" in run("import", tmp_path / "b.tar", "--store", other.root).output
    assert alive(other, *entries) == [True, False]
    rows = json.loads(run("import", tmp_path / "all.tar.zst", "--store", other.root, "--json").output)
    assert sorted(row["outcome"] for row in rows) == ["copied", "present"]
    (tmp_path / "b.tar").write_bytes(b"junk")
    run("import", tmp_path / "b.tar", code=EXIT_DAMAGED)


def test_copy(store: LocalStore, tmp_path: Path) -> None:
    """Copying between two stores, twice; damage in the source is an exit code of its own."""
    entries = [put(store, 1, model="face"), put(store, 2, model="ocr")]
    other = LocalStore(tmp_path / "other")
    assert "1 copied, 0 present" in run("copy", store.root, other.root, "--model", "ocr").output
    assert "1 copied, 1 present" in run("copy", store.root, other.root).output
    assert alive(other, *entries) == [True, True]
    (store.root / "trtwc-1" / blob_name(entries[0].blobs[0])).write_bytes(b"")
    run("copy", store.root, tmp_path / "third", code=EXIT_DAMAGED)


def test_keys_signatures_and_verify(store: LocalStore, tmp_path: Path) -> None:
    """A key is made, entries are signed with it, and checking with and without it tells the difference."""
    entries = [put(store, 1), put(store, 2)]
    secret, trusted = tmp_path / "secret", tmp_path / "trusted"
    public = run("keygen", "release-1", "--output", secret).output
    assert public.startswith("trtwc-public:release-1:")
    trusted.write_text(public)
    run("keygen", "release-1", "--output", secret, code=EXIT_USAGE)
    run("keygen", "nonumber", "--output", tmp_path / "x", code=EXIT_USAGE)
    run("verify", "--signed", code=EXIT_USAGE)
    run("verify")
    run("sign", entries[0].key, "--key", secret)
    found = json.loads(run("verify", "--signed", "--trusted", trusted, "--json", code=EXIT_DAMAGED).output)
    assert (found["good"], [row["reason"] for row in found["damaged"]]) == (1, ["unsigned"])
    assert json.loads(run("sign", "--all", "--key", secret, "--json").output)
    run("verify", "--signed", "--trusted", trusted)
    trusted.write_text(public + "revoked release-1\n")
    run("verify", "--signed", "--trusted", trusted, code=EXIT_DAMAGED)


def test_damaged_entries_are_not_signed(store: LocalStore, tmp_path: Path) -> None:
    """Signing checks the bytes first: a signature never vouches for damage."""
    entry = put(store, 1)
    (store.root / "trtwc-1" / blob_name(entry.blobs[0])).write_bytes(b"x" * entry.size)
    run("keygen", "release-1", "--output", tmp_path / "secret")
    run("sign", "--all", "--key", tmp_path / "secret", code=EXIT_DAMAGED)
    found = store.manifest(Kind.ENGINE, entry.key)
    assert found is not None
    assert found.signature == {}
