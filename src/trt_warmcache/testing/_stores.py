"""What every store must keep to, as tests."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trt_warmcache import manifest as manifests
from trt_warmcache.errors import IntegrityError, StoreError
from trt_warmcache.keys import EngineKey, Kind
from trt_warmcache.manifest import Labels, Manifest, Provenance
from trt_warmcache.stores import Store
from trt_warmcache.stores._base import WritePiece, blob_name, manifest_name

__all__ = ["StoreConformance"]


def sample_entry(
    number: int = 0, plan: bytes = b"a plan", *, created: float = 0.0
) -> tuple[Manifest, dict[str, bytes]]:
    """A small, valid entry; different numbers give different keys."""
    key = EngineKey(Kind.ENGINE, {"model": f"blake3:{number:064x}", "profiles": []}, f"sample-{number}")
    ref = manifests.describe_blob("plan", plan)
    manifest = manifests.seal(key, (ref,), provenance=Provenance(created=created), labels=Labels(entry=key.name))
    return manifest, {"plan": plan}


class StoreConformance(ABC):
    """Derive, say how to make the store and how to reach its medium around it, and pytest does the rest.

    The raw access must not go through the store under test, so that a write is never checked by the same code's read.
    Claims are tested both ways: what is claimed must work, what is not claimed must be refused with a typed error.
    """

    @abstractmethod
    def make_store(self) -> Store:
        """A fresh handle on one and the same medium at each call within a test."""

    @abstractmethod
    def raw_get(self, name: str) -> bytes | None:
        """An object's bytes, past the store; `name` is under the layout folder."""

    @abstractmethod
    def raw_put(self, name: str, data: bytes) -> None:
        """Write an object, past the store."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """The store under test."""
        with self.make_store() as store:
            yield store

    def require_writable(self, store: Store) -> None:
        """Skip a test that a read-only store cannot take."""
        if not store.capabilities.writable:
            pytest.skip("the store says that it is not writable")

    # ---- objects ----------------------------------------------------------------------------------------------

    def test_missing_is_none(self, store: Store) -> None:
        """A missing object, and one in a missing folder, is None and no error."""
        assert store.read("engines/00/none.json", limit=10) is None
        assert store.read("never/was/here", limit=10) is None
        assert store.manifest(Kind.ENGINE, "0" * 64) is None

    def test_write_then_raw(self, store: Store) -> None:
        """What is written lies where the layout says, byte for byte, and is replaced whole."""
        self.require_writable(store)
        store.write("engines/ab/x.json", b"first, longer")
        store.write("engines/ab/x.json", b"second")
        assert self.raw_get("engines/ab/x.json") == b"second"

    def test_read_is_raw(self, store: Store) -> None:
        """What lies there is read, and no more than the limit and one byte of it."""
        self.raw_put("engines/ab/y.json", b"0123456789")
        assert store.read("engines/ab/y.json", limit=100) == b"0123456789"
        assert store.read("engines/ab/y.json", limit=4) == b"01234"

    def test_empty_object(self, store: Store) -> None:
        """An empty object is there: b"", not None."""
        self.raw_put("engines/ab/empty.json", b"")
        assert store.read("engines/ab/empty.json", limit=10) == b""

    def test_create_refuses_second(self, store: Store) -> None:
        """Creating does not replace."""
        self.require_writable(store)
        assert store.create("engines/cd/z.json", b"one")
        assert not store.create("engines/cd/z.json", b"two")
        assert self.raw_get("engines/cd/z.json") == b"one"

    def test_create_race(self, store: Store) -> None:
        """Where exclusive creation is claimed, one of many racing writers wins, every time."""
        self.require_writable(store)
        if not store.capabilities.exclusive_create:
            pytest.skip("the store does not claim exclusive_create")
        for round_ in range(10):
            name = f"engines/ef/race-{round_}.json"
            wins = race(8, lambda number, name=name: store.create(name, f"writer {number}".encode()))  # type: ignore[misc]
            assert wins.count(True) == 1, wins
            assert self.raw_get(name) == f"writer {wins.index(True)}".encode()

    def test_swap(self, store: Store) -> None:
        """Swapping replaces exactly the expected bytes."""
        self.require_writable(store)
        store.write("timing/ab/t.json", b"old")
        assert not store.swap("timing/ab/t.json", b"new", expected=b"older")
        assert self.raw_get("timing/ab/t.json") == b"old"
        assert store.swap("timing/ab/t.json", b"new", expected=b"old")
        assert self.raw_get("timing/ab/t.json") == b"new"

    def test_delete(self, store: Store) -> None:
        """Deleting tells whether there was anything; a store that cannot delete says so with a typed error."""
        self.raw_put("engines/ab/gone.json", b"x")
        if not store.capabilities.deletable:
            with pytest.raises(StoreError):
                store.delete("engines/ab/gone.json")
            return
        assert store.delete("engines/ab/gone.json")
        assert not store.delete("engines/ab/gone.json")
        assert self.raw_get("engines/ab/gone.json") is None

    def test_list(self, store: Store) -> None:
        """Listing finds every object under a prefix, with sizes, and nothing beside it."""
        if not store.capabilities.listable:
            pytest.skip("the store says that it cannot list")
        assert list(store.list("engines/")) == []
        for name, data in (("engines/ab/1.json", b"1"), ("engines/cd/2.json", b"22"), ("timing/ab/3.json", b"3")):
            self.raw_put(name, data)
        found = {info.name: info.size for info in store.list("engines/")}
        assert found == {"engines/ab/1.json": 1, "engines/cd/2.json": 2}

    # ---- entries ----------------------------------------------------------------------------------------------

    def test_publish_and_read(self, store: Store) -> None:
        """A published entry is found by a fresh handle, its blob verified and equal."""
        self.require_writable(store)
        manifest, payloads = sample_entry(1)
        assert store.publish(manifest, payloads) == manifest
        with self.make_store() as other:
            found = other.manifest(Kind.ENGINE, manifest.key)
            assert found == manifest
            payload = other.fetch(found.blob("plan"))
            assert bytes(payload.view) == payloads["plan"]
            assert payload.view.readonly
            payload.close()
            payload.close()
            assert [entry.digest for entry in other.entries(Kind.ENGINE)] == [manifest.key]

    def test_blob_before_manifest(self, store: Store) -> None:
        """The manifest is the commit point: when it appears, every blob it names is there."""
        self.require_writable(store)
        manifest, payloads = sample_entry(2)
        store.publish(manifest, payloads)
        assert self.raw_get(blob_name(manifest.blob("plan"))) == payloads["plan"]
        assert (
            manifests.decode(
                self.raw_get(manifest_name(Kind.ENGINE, manifest.key)) or b"", kind=Kind.ENGINE, digest=manifest.key
            )
            == manifest
        )

    def test_first_publish_wins(self, store: Store) -> None:
        """A second entry under a key leaves the first in force and returns it."""
        self.require_writable(store)
        first, payloads = sample_entry(3, created=1.0)
        second, other = sample_entry(3, b"another plan", created=2.0)
        store.publish(first, payloads)
        assert store.publish(second, other) == first
        assert store.manifest(Kind.ENGINE, first.key) == first

    def test_replacing(self, store: Store) -> None:
        """A growing entry is replaced only by whoever saw the one in force."""
        self.require_writable(store)
        first, payloads = sample_entry(4, created=1.0)
        second, more = sample_entry(4, b"grown", created=2.0)
        third, stale = sample_entry(4, b"stale", created=3.0)
        store.publish(first, payloads)
        assert store.publish(second, more, replacing=first) == second
        assert store.publish(third, stale, replacing=first) == second

    def test_damaged_blobs(self, store: Store) -> None:
        """A blob that is short, long, flipped or gone is an IntegrityError and never bytes."""
        self.require_writable(store)
        plan = bytes(range(256)) * 64
        manifest, payloads = sample_entry(5, plan)
        store.publish(manifest, payloads)
        ref = manifest.blob("plan")
        for reason, damaged in (
            ("truncated", plan[:-1]),
            ("truncated", b""),
            ("truncated", plan + b"x"),
            ("digest", bytes([plan[0] ^ 1]) + plan[1:]),
        ):
            self.raw_put(blob_name(ref), damaged)
            with self.make_store() as fresh, pytest.raises(IntegrityError) as caught:
                fresh.fetch(ref)
            assert caught.value.reason == reason
        if store.capabilities.deletable:
            store.delete(blob_name(ref))
            with self.make_store() as fresh, pytest.raises(IntegrityError) as caught:
                fresh.fetch(ref)
            assert caught.value.reason == "missing-blob"

    def test_damaged_manifests(self, store: Store) -> None:
        """A manifest that is empty, cut, not JSON, too deep, too long or another key's is an IntegrityError."""
        manifest, _ = sample_entry(6)
        whole = manifests.encode(manifest)
        other, _ = sample_entry(7)
        for damaged in (
            b"",
            whole[: len(whole) // 2],
            b"\x80\x04\x95pickle",
            b"[" * 200_000,
            whole + b" " * manifests.MAX_MANIFEST_BYTES,
            manifests.encode(other),
            whole.replace(b'"profiles":', b'"profilez":'),
        ):
            self.raw_put(manifest_name(Kind.ENGINE, manifest.key), damaged)
            with self.make_store() as fresh, pytest.raises(IntegrityError):
                fresh.manifest(Kind.ENGINE, manifest.key)

    def test_quarantine(self, store: Store) -> None:
        """A damaged entry set aside is a miss, its manifest and the reason are kept, and it can be published anew."""
        self.require_writable(store)
        manifest, payloads = sample_entry(8)
        store.publish(manifest, payloads)
        self.raw_put(blob_name(manifest.blob("plan")), b"a flan")
        with self.make_store() as fresh:
            with pytest.raises(IntegrityError) as caught:
                fresh.fetch(manifest.blob("plan"))
            fresh.quarantine(Kind.ENGINE, manifest.key, caught.value)
            assert fresh.manifest(Kind.ENGINE, manifest.key) is None
            assert b"digest" in (self.raw_get(f"quarantine/engines-{manifest.key}.reason") or b"")
            assert fresh.publish(manifest, payloads) == manifest
            assert bytes(fresh.fetch(manifest.blob("plan")).view) == payloads["plan"]

    def test_stray_objects(self, store: Store) -> None:
        """Whatever else lies around is no entry and does no harm."""
        manifest, payloads = sample_entry(9)
        if store.capabilities.writable:
            store.publish(manifest, payloads)
        for name in (
            "engines/.DS_Store",
            "engines/ab/README",
            "engines/ab/x.tmp",
            "engines/ab/x.lock",
            f"engines/zz/{'0' * 64}.json",
        ):
            self.raw_put(name, b"stray")
        expected = [manifest.key] if store.capabilities.writable else []
        assert [entry.digest for entry in store.entries(Kind.ENGINE)] == expected

    def test_large_blob(self, store: Store) -> None:
        """A blob of several chunks comes back whole."""
        self.require_writable(store)
        plan = bytes(range(251)) * (manifests.CHUNK_BYTES // 251 * 2 + 999)
        manifest, payloads = sample_entry(10, plan)
        assert len(manifest.blob("plan").chunks) == -(-len(plan) // manifests.CHUNK_BYTES)
        store.publish(manifest, payloads)
        with self.make_store() as fresh:
            assert fresh.fetch(manifest.blob("plan")).view == plan

    def test_pieces(self, store: Store) -> None:
        """A blob that arrives in pieces, in any order, is stored whole or not at all; it is handed over in pieces too."""
        self.require_writable(store)
        plan = bytes(range(251)) * (manifests.CHUNK_BYTES // 251 * 2 + 999)
        ref = sample_entry(12, plan)[0].blob("plan")

        def half(write: WritePiece) -> None:
            write(plan[:1000], 0)
            raise KeyError("the download broke off")

        with pytest.raises(KeyError, match="broke off"):
            store.land_blob(ref, half)
        with pytest.raises(IntegrityError, match="missing"):
            store.fetch(ref)

        def backwards(write: WritePiece) -> None:
            for at in range(len(plan) // 3000 * 3000, -1, -3000):
                write(plan[at : at + 3000], at)

        landed = store.land_blob(ref, backwards)
        assert landed.view == plan
        assert landed.view.readonly
        landed.close()
        pieces = bytearray(len(plan))

        def take(data: Any, offset: int) -> None:
            pieces[offset : offset + len(data)] = data

        with self.make_store() as fresh:
            fresh.fetch_into(ref, take)
        assert pieces == plan

    def test_lock_excludes(self, store: Store) -> None:
        """A lock that is offered keeps a second taker out until it is given back."""
        self.require_writable(store)
        first, second = store.lock("k"), store.lock("k")
        if first is None or second is None:
            pytest.skip("the store has no locks")
        assert first.try_acquire()
        assert not second.try_acquire()
        first.release()
        until = time.monotonic() + 5
        while not second.try_acquire():  # locks across hosts ask their store only now and then
            assert time.monotonic() < until
            time.sleep(0.05)
        second.release()

    def test_concurrent_publish(self, store: Store) -> None:
        """Eight writers of one key and as many readers: every reader sees nothing or a whole, verified entry."""
        self.require_writable(store)
        if not store.capabilities.exclusive_create:
            pytest.skip("the store does not claim exclusive_create")
        key = sample_entry(11)[0].key

        def act(number: int) -> Any:
            if number % 2:
                manifest, payloads = sample_entry(11, b"plan %d" % number * 1000, created=float(number))
                return store.publish(manifest, payloads).provenance.created
            for _ in range(20):
                found = store.manifest(Kind.ENGINE, key)
                if found is not None:
                    payload = store.fetch(found.blob("plan"))
                    assert bytes(payload.view) == b"plan %d" % found.provenance.created * 1000
                    payload.close()
            return None

        winners = {value for value in race(16, act) if value is not None}
        assert len(winners) == 1


def race(count: int, act: Callable[[int], Any]) -> list[Any]:
    """Run `act` in `count` threads that start together; the results in order, the first error raised."""
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = act(number)
        except BaseException as error:  # noqa: BLE001  carried to the test's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
