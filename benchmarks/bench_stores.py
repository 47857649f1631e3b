"""Large stores: listing and planning at growing sizes, a request on a full store beside an empty one, verification.

The entries are real manifests with small blobs, written straight into the folder. Listing is put beside bare
``os.scandir`` over the same files, since no listing can be faster; verification beside bare blake3 over the same bytes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import blake3

import trt_warmcache as twc
from common import Table, arguments, machine, medians
from trt_warmcache import manifest as manifests
from trt_warmcache.bundle import verify_store
from trt_warmcache.eviction import EvictionRules, plan_eviction, scan
from trt_warmcache.keys import EngineKey, Kind
from trt_warmcache.manifest import Labels, Provenance
from trt_warmcache.testing import FakeBuilder


def main() -> None:
    given = arguments(__doc__)
    print(machine())
    sizes = (10, 100) if given.quick else (1_000, 10_000, 100_000)
    folder = given.work / "stores"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    grown(folder, sizes, given.repeats(3))
    verified(folder, given.quick, given.repeats(3))
    shutil.rmtree(folder)


def grown(folder: Path, sizes: tuple[int, ...], repeats: int) -> None:
    """Listing, planning, and a request, as one store grows."""
    root = folder / "grown"
    store = twc.LocalStore(root)
    table = Table("A store that grows")
    model = tiny_model()
    empty = EmptyAndFull(folder / "empty", root, model)
    have = 0
    for size in sizes:
        fill(root, have, size)
        have = size
        listed, walked = medians(lambda: list(store.entries(Kind.ENGINE)), lambda: walk(root), repeats=repeats)
        table.add(f"list {size} entries", listed, "os.scandir", walked)
        planned, read = medians(
            lambda: plan(store), lambda: read_all(root), repeats=min(repeats, 1 if size > 10_000 else repeats)
        )
        table.add(f"gc plan over {size} entries", planned, "read every manifest", read)
        full, bare = medians(empty.hit_full, empty.hit_empty, repeats=100)
        table.add(f"hit on {size} entries", full, "hit on a store of one", bare, target="flat")
        full, bare = medians(empty.miss_full, empty.miss_empty, repeats=100)
        table.add(f"miss on {size} entries", full, "miss on a store of one", bare, target="flat")
    table.show()


def verified(folder: Path, quick: bool, repeats: int) -> None:
    """Verification of a whole store beside the hash it cannot do without."""
    store = twc.LocalStore(folder / "verified")
    count, size = (2, 1 << 20) if quick else (16, 64 << 20)
    blobs = []
    for number in range(count):
        data = os.urandom(size)
        manifest, payloads = entry(number, data)
        store.publish(manifest, payloads)
        blobs.append(store.root / "trtwc-1" / "blobs" / manifest.blobs[0].hex[:2] / manifest.blobs[0].hex)

    def bare() -> None:
        for path in blobs:
            blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).digest()

    ours, hashed = medians(lambda: verify_store(store), bare, repeats=repeats)
    table = Table(f"Verification of {count * size >> 20} MiB")
    table.add("verify_store", ours, "bare blake3", hashed, note=f"{count * size / 1e9 / ours:.2f} GB/s")
    table.show()


class EmptyAndFull:
    """One request against a store with nothing else in it, and against a full one."""

    def __init__(self, empty: Path, full: Path, model: bytes) -> None:
        self._managers = [
            twc.EngineManager(root, builder=FakeBuilder(), memo=twc.DigestMemo(None)) for root in (empty, full)
        ]
        self._request = twc.EngineRequest(model)
        self._missing = 0
        for manager in self._managers:
            manager.get(self._request).close()

    def hit_empty(self) -> None:
        """A hit on the store with nothing else in it."""
        self._managers[0].get(self._request).close()

    def hit_full(self) -> None:
        """A hit on the full store."""
        self._managers[1].get(self._request).close()

    def miss_empty(self) -> None:
        """A miss on the store with nothing else in it."""
        self._miss(self._managers[0])

    def miss_full(self) -> None:
        """A miss on the full store."""
        self._miss(self._managers[1])

    def _miss(self, manager: twc.EngineManager) -> None:
        self._missing += 1
        assert manager.lookup(twc.EngineRequest(self._request.model, recipe=f"miss {self._missing}")) is None


def tiny_model() -> bytes:
    """A model of one Relu, written by hand in the wire format: graph with a node, an input and an output."""

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    def value(name: bytes) -> bytes:
        shape = field(2, field(1, bytes([1 << 3, 4])))
        return field(1, name) + field(2, field(1, bytes([1 << 3, 1]) + shape))

    node = field(1, b"x") + field(2, b"y") + field(4, b"Relu")
    graph = field(1, node) + field(2, b"g") + field(11, value(b"x")) + field(12, value(b"y"))
    return bytes([1 << 3, 8]) + field(7, graph) + field(8, bytes([2 << 3, 17]))


def entry(number: int, data: bytes) -> tuple[twc.Manifest, dict[str, Any]]:
    """A sealed manifest with its payload."""
    parts = {"model": f"blake3:{number % 97:064x}", "builder.version": "10.13.3", "number": number}
    key = EngineKey(Kind.ENGINE, parts, f"model-{number % 97}_1_gpu_{number}")
    ref = manifests.describe_blob("plan", data)
    labels = Labels(name=f"model-{number % 97}", entry=key.name)
    return manifests.seal(key, (ref,), provenance=Provenance(created=float(number)), labels=labels), {"plan": data}


def fill(root: Path, start: int, stop: int) -> None:
    """Write entries past the store: no locks, no fsync."""
    base = root / "trtwc-1"
    for number in range(start, stop):
        data = number.to_bytes(8, "little")
        manifest, _ = entry(number, data)
        blob = base / "blobs" / manifest.blobs[0].hex[:2] / manifest.blobs[0].hex
        path = base / "engines" / manifest.key[:2] / f"{manifest.key}.json"
        for file, content in ((blob, data), (path, manifests.encode(manifest))):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def plan(store: twc.LocalStore) -> None:
    plan_eviction(scan(store), EvictionRules(max_bytes=0))


def walk(root: Path) -> None:
    for fan in os.scandir(root / "trtwc-1" / "engines"):
        for found in os.scandir(fan.path):
            found.stat()


def read_all(root: Path) -> None:
    for fan in os.scandir(root / "trtwc-1" / "engines"):
        for found in os.scandir(fan.path):
            Path(found.path).read_bytes()


if __name__ == "__main__":
    main()
