"""Stores that pack their blobs, together with everything that moves, signs or sweeps entries."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import pytest

from trt_warmcache import manifest as manifests
from trt_warmcache.bundle import copy_store, export_bundle, import_bundle, verify_store
from trt_warmcache.eviction import EvictionRules, plan_eviction, scan
from trt_warmcache.keys import Kind
from trt_warmcache.stores import FsspecStore, LayeredStore, LocalStore, MemoryStore, Store
from trt_warmcache.stores._base import blob_name
from trt_warmcache.testing._stores import sample_entry
from trt_warmcache.trust import Keyring, Signer, secured

ENTRY, PAYLOADS = sample_entry(1, b"weights that repeat, " * 20_000)
REF = ENTRY.blobs[0]


@pytest.fixture
def packing() -> FsspecStore:
    """A store that packs, and a check that it did."""
    return FsspecStore(f"memory://packed-{secrets.token_hex(8)}")


def get(store: Store) -> bytes | None:
    """What a hit returns."""
    found = store.manifest(Kind.ENGINE, ENTRY.key)
    if found is None:
        return None
    payload = store.fetch(found.blobs[0], rehash=True)
    try:
        return bytes(payload.view)
    finally:
        payload.close()


def blobs(store: Store) -> list[str]:
    """File names of all blobs."""
    return [info.name.rpartition("/")[2] for info in store.list("blobs/")]


def test_it_packs(packing: FsspecStore) -> None:
    """What the tests below rely on."""
    packing.publish(ENTRY, PAYLOADS)
    assert blobs(packing) == [f"{REF.hex}.zst"]
    assert get(packing) == PAYLOADS["plan"]


def test_layers_keep_plain_copies(packing: FsspecStore, tmp_path: Path) -> None:
    """A packed far entry is a plain, mapped one near; and the two count as the same entry."""
    packing.publish(ENTRY, PAYLOADS)
    near = LocalStore(tmp_path)
    store = LayeredStore([near, packing])
    assert get(store) == PAYLOADS["plan"]
    assert blobs(near) == [REF.hex]
    assert near.manifest(Kind.ENGINE, ENTRY.key) == ENTRY
    assert store.publish(ENTRY, PAYLOADS) == ENTRY
    assert store.counters()[0].backfills == 1


def test_published_plain_and_packed(packing: FsspecStore, tmp_path: Path) -> None:
    """One publication: plain near, packed far."""
    near = LocalStore(tmp_path)
    assert LayeredStore([near, packing]).publish(ENTRY, PAYLOADS) == ENTRY
    assert blobs(near) == [REF.hex]
    assert blobs(packing) == [f"{REF.hex}.zst"]
    assert get(near) == get(packing) == PAYLOADS["plan"]


def test_housekeeping_knows_packed_blobs(packing: FsspecStore) -> None:
    """A packed blob belongs to its entry: it stays as long as that does, however old, and goes with it."""
    packing.publish(ENTRY, PAYLOADS)
    later = lambda: time.time() + 10 * 86400  # noqa: E731
    plan_eviction(scan(packing, clock=later), EvictionRules()).execute(packing)
    assert get(packing) == PAYLOADS["plan"]
    plan = plan_eviction(scan(packing), EvictionRules(max_bytes=0))
    assert 0 < plan.size_before < REF.size
    plan.execute(packing)
    assert blobs(packing) == []
    assert get(packing) is None


@pytest.mark.parametrize("way", ["out", "in"])
def test_copies(packing: FsspecStore, tmp_path: Path, way: str) -> None:
    """Copying between a store that packs and one that does not, both ways; the second time there is nothing to do."""
    local = LocalStore(tmp_path)
    source, target = (packing, local) if way == "out" else (local, packing)
    source.publish(ENTRY, PAYLOADS)
    assert [row.outcome for row in copy_store(source, target).rows] == ["copied"]
    assert get(target) == PAYLOADS["plan"]
    assert [row.outcome for row in copy_store(source, target).rows] == ["present"]
    assert verify_store(target).ok


def test_bundles_do_not_depend_on_packing(packing: FsspecStore, tmp_path: Path) -> None:
    """The same entry gives the same bundle, from whichever store, and goes into whichever."""
    local = LocalStore(tmp_path / "s")
    for number, store in enumerate((packing, local)):
        store.publish(ENTRY, PAYLOADS)
        found = store.manifest(Kind.ENGINE, ENTRY.key)
        assert found is not None
        export_bundle(store, [found], tmp_path / f"{number}.tar")
    assert (tmp_path / "0.tar").read_bytes() == (tmp_path / "1.tar").read_bytes()
    assert [row.outcome for row in import_bundle(packing, tmp_path / "1.tar").rows] == ["present"]
    store = MemoryStore()
    import_bundle(store, tmp_path / "0.tar")
    assert get(store) == PAYLOADS["plan"]


def test_signatures_survive_packing(packing: FsspecStore, tmp_path: Path) -> None:
    """A signature made before packing verifies after it, and after unpacking again."""
    signer = Signer.generate("release-1")
    ring = Keyring([signer.public])
    secured(packing, signer=signer).publish(ENTRY, PAYLOADS)
    found = packing.manifest(Kind.ENGINE, ENTRY.key)
    assert found is not None
    assert found.blobs[0].codec == "zstd"
    assert get(secured(packing, keyring=ring)) == PAYLOADS["plan"]
    assert ring.verify(found) == ring.verify(manifests.plain(found)) == "release-1"
    assert get(secured(LayeredStore([LocalStore(tmp_path), packing]), keyring=ring)) == PAYLOADS["plan"]
    assert get(secured(LocalStore(tmp_path), keyring=ring)) == PAYLOADS["plan"]
    assert blob_name(found.blobs[0]).endswith(".zst")
