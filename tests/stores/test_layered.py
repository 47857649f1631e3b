"""Layers: nearest first, filled once per machine, read-only one by one, and a sick one costs little."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.stores.fleet import Heard, Remote
from tests.support import run_python, run_together

import trt_warmcache as twc
from trt_warmcache import manifest as manifests
from trt_warmcache.errors import IntegrityError, StoreError, StoreReason
from trt_warmcache.events import EventKind, Events
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import BlobRef, Manifest
from trt_warmcache.stores import (
    FsspecStore,
    Layer,
    LayeredStore,
    LocalStore,
    LockScope,
    MemoryStore,
    Store,
    StoreCapabilities,
    WriteTo,
    open_store,
)
from trt_warmcache.stores._base import WritePiece, blob_name, manifest_name
from trt_warmcache.testing import StoreConformance
from trt_warmcache.testing._stores import sample_entry

ENTRY, PAYLOADS = sample_entry(1, b"a plan of some length" * 100)
REF = ENTRY.blob("plan")


def has(store: Store, manifest: Manifest = ENTRY) -> bool:
    """Whether a store holds an entry whole."""
    found = store.manifest(Kind(manifest.kind), manifest.key)
    if found is None:
        return False
    for ref in found.blobs:
        store.fetch(ref, rehash=True).close()
    return True


def get(store: Store, manifest: Manifest = ENTRY) -> bytes | None:
    """An entry's bytes by the two calls that a hit makes."""
    found = store.manifest(Kind(manifest.kind), manifest.key)
    if found is None:
        return None
    payload = store.fetch(found.blob("plan"))
    try:
        return bytes(payload.view)
    finally:
        payload.close()


def stall(seconds: float) -> Callable[[str, str], None]:
    """A hook that makes every call take this long."""
    return lambda call, name: time.sleep(seconds)


def fail(reason: StoreReason, only: str = "") -> Callable[[str, str], None]:
    """A hook that fails every call, or those of one primitive."""

    def hook(call: str, name: str) -> None:
        if not only or call == only:
            raise StoreError(f"{call} {name} refused", reason=reason, store="x")

    return hook


class TestConformance(StoreConformance):
    """The public suite over a folder in front of a bucket; the raw access damages and reads both."""

    @pytest.fixture(autouse=True)
    def _stores(self, tmp_path: Path) -> None:
        self.near, self.far = tmp_path / "near", MemoryStore()

    def make_store(self) -> Store:
        return LayeredStore([LocalStore(self.near), Remote(self.far)], lease_seconds=5)

    def raw_get(self, name: str) -> bytes | None:
        found = self.far._objects.get(name)
        path = self.near / "trtwc-1" / name
        # Housekeeping of a layer stays in that layer, entries are everywhere.
        return found.data if found is not None else path.read_bytes() if path.is_file() else None

    def raw_put(self, name: str, data: bytes) -> None:
        self.far.write(name, data)
        path = self.near / "trtwc-1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


# ---- reading and filling ----------------------------------------------------------------------------------------


def test_far_hit_is_kept_near(tmp_path: Path) -> None:
    """An entry found far away is a local entry afterwards, and the far layer is not asked again."""
    far = Remote(MemoryStore())
    far.publish(ENTRY, PAYLOADS)
    store = LayeredStore([LocalStore(tmp_path), far])
    assert get(store) == PAYLOADS["plan"]
    assert has(LocalStore(tmp_path))
    far.calls.clear()
    assert get(store) == PAYLOADS["plan"]
    assert far.calls == []
    near, distant = store.counters()
    assert (near.hits, near.misses, near.backfills) == (1, 1, 1)
    assert (distant.hits, distant.bytes_read) == (1, REF.size)


@pytest.mark.parametrize("near_writable", [True, False])
@pytest.mark.parametrize("far_writable", [True, False])
@pytest.mark.parametrize("where", ["near", "far", "nowhere"])
def test_read_only_is_per_layer(tmp_path: Path, near_writable: bool, far_writable: bool, where: str) -> None:
    """A read-only layer stops neither filling nor publishing in the others, at either end."""
    inner = MemoryStore()
    LocalStore(tmp_path).publish(ENTRY, PAYLOADS) if where == "near" else None
    inner.publish(ENTRY, PAYLOADS) if where == "far" else None
    near, far = LocalStore(tmp_path, read_only=not near_writable), Remote(inner, writable=far_writable)
    store = LayeredStore([near, far])
    assert store.capabilities.writable == (near_writable or far_writable)
    if where == "nowhere":
        assert get(store) is None
        if near_writable or far_writable:
            store.publish(ENTRY, PAYLOADS)
        else:
            with pytest.raises(StoreError) as caught:
                store.publish(ENTRY, PAYLOADS)
            assert caught.value.reason is StoreReason.DENIED
    else:
        assert get(store) == PAYLOADS["plan"]
    assert has(LocalStore(tmp_path)) == (where == "near" or near_writable)
    assert has(inner) == (where == "far" or (where == "nowhere" and far_writable))


def test_three_layers_with_a_baked_in_one(tmp_path: Path) -> None:
    """Behind a read-only image layer, a far hit is filled into the writable folder and nowhere else."""
    far = Remote(MemoryStore())
    far.publish(ENTRY, PAYLOADS)
    image, disk = LocalStore(tmp_path / "image", read_only=True), LocalStore(tmp_path / "disk")
    assert get(LayeredStore([image, disk, far])) == PAYLOADS["plan"]
    assert has(disk)
    assert not (tmp_path / "image").exists()


def test_near_that_cannot_keep_still_serves(tmp_path: Path) -> None:
    """A full or forbidden near layer costs the copy, not the hit."""
    far = Remote(MemoryStore())
    far.publish(ENTRY, PAYLOADS)
    for reason in (StoreReason.FULL, StoreReason.DENIED):
        near = Remote(LocalStore(tmp_path), fail(reason, "put_blob"))
        store = LayeredStore([near, far])
        assert get(store) == PAYLOADS["plan"]
        assert store.counters()[0].errors == {str(reason): 1}
    assert not has(LocalStore(tmp_path))


@pytest.mark.parametrize("damage", [b"", b"short", PAYLOADS["plan"][:-1] + b"?"])
def test_damage_near_falls_through(tmp_path: Path, damage: bytes) -> None:
    """A damaged blob of the near layer is set aside with its reason, served from afar, and repaired."""
    near, far = LocalStore(tmp_path), Remote(MemoryStore())
    store = LayeredStore([near, far])
    store.publish(ENTRY, PAYLOADS)
    path = tmp_path / "trtwc-1" / blob_name(REF)
    path.write_bytes(damage)
    assert get(store) == PAYLOADS["plan"]
    assert path.read_bytes() == PAYLOADS["plan"]
    assert store.counters()[0].errors["damaged"] >= 1
    assert (tmp_path / "trtwc-1" / f"quarantine/blobs-{REF.hex}.reason").exists()


def test_damaged_manifest_near_falls_through(tmp_path: Path) -> None:
    """A damaged manifest of the near layer is quarantined there, and the far one takes its place."""
    near, far = LocalStore(tmp_path), Remote(MemoryStore())
    store = LayeredStore([near, far])
    store.publish(ENTRY, PAYLOADS)
    (tmp_path / "trtwc-1" / manifest_name(Kind.ENGINE, ENTRY.key)).write_bytes(b"{")
    assert get(store) == PAYLOADS["plan"]
    assert has(near)
    assert (tmp_path / f"trtwc-1/quarantine/engines-{ENTRY.key}.reason").exists()


def test_damage_everywhere_is_an_error(tmp_path: Path) -> None:
    """Damage in every layer is damage, not a miss."""
    near, far = LocalStore(tmp_path), MemoryStore()
    store = LayeredStore([near, Remote(far)])
    store.publish(ENTRY, PAYLOADS)
    (tmp_path / "trtwc-1" / blob_name(REF)).write_bytes(b"x" * REF.size)
    far.write(blob_name(REF), b"y" * REF.size)
    with pytest.raises(IntegrityError):
        get(store)


def test_read_only_damage_is_not_asked_again(tmp_path: Path) -> None:
    """An entry that was refused in a read-only layer stays there, and is passed over from then on."""
    LocalStore(tmp_path / "image").publish(ENTRY, PAYLOADS)
    store = LayeredStore([LocalStore(tmp_path / "image", read_only=True), LocalStore(tmp_path / "disk")])
    assert get(store) is not None
    store.quarantine(Kind.ENGINE, ENTRY.key, IntegrityError("refused by the loader", reason="rejected"))
    assert get(store) is None
    other, payloads = sample_entry(1, b"built anew", created=5.0)
    assert store.publish(other, payloads) == other
    assert get(store) == b"built anew"


FILL = """
import sys, json
from tests.stores.fleet import Remote
from tests.stores.test_layered import ENTRY, get
from trt_warmcache.stores import LayeredStore, LocalStore
import time
def slow(call, name):
    if call == "fetch":
        open(sys.argv[3], "a").write("download\\n")
        time.sleep(0.3)
far = Remote(LocalStore(sys.argv[2]), slow)
store = LayeredStore([LocalStore(sys.argv[1]), far])
print(json.dumps(len(get(store))))
"""


def test_far_hit_lands_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A far hit is written straight into the near folder's file, hashed only while it arrives, and mapped from there."""
    plan = bytes(range(251)) * (manifests.CHUNK_BYTES // 251 * 2 + 7)
    entry, payloads = sample_entry(3, plan)
    far = MemoryStore()
    far.publish(entry, payloads)
    near = LocalStore(tmp_path)
    written: list[int] = []
    hashed: list[Any] = []
    write = os.pwrite

    def counted(fd: int, data: Any, at: int) -> int:
        written.append(len(data))
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", counted)
    monkeypatch.setattr("trt_warmcache.stores._local.verify_view", lambda *told: hashed.append(told))
    with LayeredStore([near, Remote(far)]) as store:
        found = store.manifest(Kind.ENGINE, entry.key)
        assert found is not None
        payload = store.fetch(found.blob("plan"))
        assert payload.view == plan
        assert near.in_use(entry.blob("plan"))
        payload.close()
        assert not near.in_use(entry.blob("plan"))
    assert sum(size for size in written if size > 100_000) == len(plan)
    assert hashed == []
    monkeypatch.undo()
    assert has(near, entry)
    assert not list(tmp_path.rglob(".tmp-*"))


def test_download_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    """The far layer's failure is raised as it is, counted there and not at the folder it was landing in."""
    far = Remote(MemoryStore())
    far.inner.publish(ENTRY, PAYLOADS)
    store = LayeredStore([LocalStore(tmp_path), far])
    found = store.manifest(Kind.ENGINE, ENTRY.key)
    assert found is not None
    cause = OSError("the wire")

    def broken(call: str, name: str) -> None:
        if call == "fetch":
            raise StoreError(f"{call} {name} refused", reason=StoreReason.UNAVAILABLE, store="x") from cause

    far.before = broken
    with pytest.raises(StoreError, match="fetch") as caught:
        store.fetch(REF)
    assert caught.value.__cause__ is cause
    near_counters, far_counters = store.counters()
    assert near_counters.errors == {}
    assert far_counters.errors == {"unavailable": 1}
    assert not list(tmp_path.rglob(".tmp-*"))
    far.before = None
    assert get(store) == PAYLOADS["plan"]
    assert has(LocalStore(tmp_path))


def test_folder_that_cannot_take_it_costs_no_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the near folder is full, the far plan is served all the same, and not stored."""
    far = Remote(MemoryStore())
    far.inner.publish(ENTRY, PAYLOADS)
    store = LayeredStore([LocalStore(tmp_path), far])

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert get(store) == PAYLOADS["plan"]
    monkeypatch.undo()
    assert not has(LocalStore(tmp_path))
    assert not list(tmp_path.rglob(".tmp-*"))


def test_download_given_up_writes_no_more(tmp_path: Path) -> None:
    """A download that outlives its deadline cannot write to whatever file has its descriptor's number by then."""
    released = threading.Event()
    ended: list[str] = []

    class Stuck(MemoryStore):
        local = False

        def fetch_into(self, ref: BlobRef, write: WritePiece) -> None:
            released.wait(30)
            try:
                write(b"late", 0)
            except OSError as error:
                ended.append(str(error))

    far = Stuck()
    far.publish(ENTRY, PAYLOADS)
    store = LayeredStore([LocalStore(tmp_path), Layer(far, deadline=0.2)])
    assert store.manifest(Kind.ENGINE, ENTRY.key) is not None
    with pytest.raises(StoreError) as caught:
        store.fetch(REF)
    assert caught.value.reason is StoreReason.TIMEOUT
    victim = tmp_path / "victim"
    with victim.open("wb"):
        released.set()
        until = time.monotonic() + 10
        while not ended and time.monotonic() < until:
            time.sleep(0.01)
    assert "nobody waits" in ended[0]
    assert victim.read_bytes() == b""


def test_sixteen_processes_download_once(tmp_path: Path) -> None:
    """Sixteen processes of one machine want the same far entry: one downloads, all get it."""
    LocalStore(tmp_path / "far").publish(ENTRY, PAYLOADS)
    log = tmp_path / "log"
    found = run_together([FILL] * 16, tmp_path / "near", tmp_path / "far", log)
    assert [json.loads(text) for text in found] == [REF.size] * 16
    assert log.read_text().splitlines() == ["download"]


def test_killed_download_does_not_block(tmp_path: Path) -> None:
    """A process killed in the middle of a download frees the others at once."""
    LocalStore(tmp_path / "far").publish(ENTRY, PAYLOADS)
    code = FILL.replace("time.sleep(0.3)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(AssertionError):
        run_python(code, tmp_path / "near", tmp_path / "far", tmp_path / "log")
    started = time.monotonic()
    assert get(LayeredStore([LocalStore(tmp_path / "near"), Remote(LocalStore(tmp_path / "far"))]))
    assert time.monotonic() - started < 2


# ---- writing ----------------------------------------------------------------------------------------------------


def test_write_all(tmp_path: Path) -> None:
    """A published entry is in every writable layer when the call returns."""
    near, far = LocalStore(tmp_path), MemoryStore()
    assert LayeredStore([near, Remote(far)]).publish(ENTRY, PAYLOADS) == ENTRY
    assert has(near)
    assert has(far)


def test_write_nearest(tmp_path: Path) -> None:
    """A policy of writing near leaves the far layer alone and needs no lease from it."""
    near, far = LocalStore(tmp_path), Remote(MemoryStore())
    store = LayeredStore([near, far], WriteTo.NEAREST)
    lock = store.lock(ENTRY.key)
    assert lock is not None
    assert lock.try_acquire()
    store.publish(ENTRY, PAYLOADS)
    lock.release()
    assert has(near)
    assert far.calls == []


def test_write_background(tmp_path: Path) -> None:
    """In the background: near at once, far a little later, everything there after close."""
    near, far = LocalStore(tmp_path), MemoryStore()
    gate = threading.Event()

    def wait(call: str, name: str) -> None:
        if call == "put_blob":
            gate.wait(10)

    store = LayeredStore([near, Remote(far, wait)], WriteTo.BACKGROUND)
    lock = store.lock(ENTRY.key)
    assert lock is not None
    assert lock.try_acquire()
    store.publish(ENTRY, PAYLOADS)
    lock.release()
    assert has(near)
    assert far.manifest(Kind.ENGINE, ENTRY.key) is None
    # The other machines wait for what is on its way instead of building it again.
    assert far.read(f"leases/{ENTRY.key}.json", limit=9) is not None
    gate.set()
    store.close()
    assert has(far)
    assert far.read(f"leases/{ENTRY.key}.json", limit=9) is None


def test_background_loser_adopts(tmp_path: Path) -> None:
    """A background publication that comes second takes over the first one's entry near, too."""
    near, far = LocalStore(tmp_path), MemoryStore()
    winner, theirs = sample_entry(1, b"the other machine's plan", created=9.0)
    far.publish(winner, theirs)
    store = LayeredStore([near, Remote(far)], WriteTo.BACKGROUND)
    store.publish(ENTRY, PAYLOADS)
    store.close()
    assert near.manifest(Kind.ENGINE, ENTRY.key) == winner
    assert get(near) == theirs["plan"]


def test_background_queue_is_bounded(tmp_path: Path) -> None:
    """Publishing waits when too much is on its way, and nothing is lost."""
    far = MemoryStore()
    store = LayeredStore([LocalStore(tmp_path), Remote(far, stall(0.02))], WriteTo.BACKGROUND, queue_size=1)
    entries = [sample_entry(number) for number in range(6)]
    for manifest, payloads in entries:
        store.publish(manifest, payloads)
    store.close()
    assert all(has(far, manifest) for manifest, _ in entries)


def test_first_manifest_wins_across_layers(tmp_path: Path) -> None:
    """Two machines build the same: the far layer's first manifest is the one both use afterwards."""
    far = MemoryStore()
    mine = LayeredStore([LocalStore(tmp_path / "a"), Remote(far)])
    yours = LayeredStore([LocalStore(tmp_path / "b"), Remote(far)])
    second, payloads = sample_entry(1, b"another plan", created=2.0)
    assert mine.publish(ENTRY, PAYLOADS) == ENTRY
    assert yours.publish(second, payloads) == ENTRY
    assert get(yours) == PAYLOADS["plan"]
    assert LocalStore(tmp_path / "b").manifest(Kind.ENGINE, ENTRY.key) == ENTRY


def test_near_entry_of_another_time_is_replaced(tmp_path: Path) -> None:
    """A near layer that holds another entry under the key takes over what the far layer decided."""
    near, far = LocalStore(tmp_path), MemoryStore()
    stale, payloads = sample_entry(1, b"built while cut off", created=1.0)
    near.publish(stale, payloads)
    assert LayeredStore([near, Remote(far)]).publish(ENTRY, PAYLOADS) == ENTRY
    assert near.manifest(Kind.ENGINE, ENTRY.key) == ENTRY


def test_growing_entries_are_read_from_afar(tmp_path: Path) -> None:
    """A timing cache that another machine has grown is seen, although an older copy is near; and merged into."""
    far = MemoryStore()
    mine, yours = (LayeredStore([LocalStore(tmp_path / name), Remote(far)]) for name in "ab")

    def timing(data: bytes) -> tuple[Manifest, dict[str, bytes]]:
        key = twc.TimingKey(Kind.TIMING, {"gpu": "x"})
        ref = manifests.describe_blob("timing", data)
        return manifests.seal(key, (ref,), provenance=manifests.Provenance()), {"timing": data}

    one, payloads = timing(b"1")
    assert mine.publish(one, payloads) == one
    assert yours.manifest(Kind.TIMING, one.key) == one
    two, payloads = timing(b"1 2")
    assert yours.publish(two, payloads, replacing=one) == two
    assert mine.manifest(Kind.TIMING, one.key) == two
    three, payloads = timing(b"1 2 3")
    assert mine.publish(three, payloads, replacing=one) == two
    assert mine.publish(three, payloads, replacing=two) == three
    assert LocalStore(tmp_path / "a").manifest(Kind.TIMING, one.key) == three


# ---- sickness ---------------------------------------------------------------------------------------------------


def test_stalled_remote_costs_one_deadline(tmp_path: Path) -> None:
    """A remote that never answers costs its deadline once, then nothing until the pause is over; it is told."""
    told = Heard()
    far = Remote(MemoryStore(), stall(30))
    store = LayeredStore([LocalStore(tmp_path), Layer(far, deadline=0.3)])
    store.bind(Events([told]))
    started = time.monotonic()
    for number in range(20):
        assert store.manifest(Kind.ENGINE, f"{number:064x}") is None
    assert 0.3 <= time.monotonic() - started < 3  # twenty deadlines would be 6 s
    counters = store.counters()[1]
    assert counters.errors == {"timeout": 1}
    assert counters.skipped == 19
    assert counters.misses == 0
    assert told.kinds == [EventKind.LAYER_DOWN]
    assert told.events[0].detail["reason"] == "timeout"


def test_manager_over_a_stalled_remote(tmp_path: Path) -> None:
    """A whole get with a dead remote: built, stored near, and not slower than the bound."""
    from tests.support import PROFILE, tiny_model

    from trt_warmcache.testing import FakeBuilder

    store = LayeredStore([LocalStore(tmp_path), Layer(Remote(MemoryStore(), stall(30)), deadline=0.3)])
    started = time.monotonic()
    with twc.EngineManager(store, builder=FakeBuilder(), memo=twc.DigestMemo(None)) as manager:
        engine = manager.get(tiny_model(), profiles=PROFILE)
        assert engine.outcome is twc.Outcome.BUILT
        assert engine.stored
        assert manager.get(tiny_model(), profiles=PROFILE).outcome is twc.Outcome.HIT
    assert time.monotonic() - started < 3.0  # a stall is 30 s, the deadline 0.3 s; the rest is the machine


def dead_endpoint(**options: Any) -> Store:
    """A real remote store where nobody answers; its own patience is longer than any test's."""
    account = {
        "key": "key",
        "secret": "secret",
        "endpoint_url": "http://127.0.0.1:1",
        "client_kwargs": {"region_name": "x"},
    }
    return FsspecStore("s3://bucket/x", storage_options=account, timeout=60, **options)


@pytest.mark.parametrize("transport", ["fsspec", "obstore"])
def test_manager_over_a_dead_endpoint(tmp_path: Path, transport: str) -> None:
    """Nothing of a get waits for a dead remote beyond the layer's deadline: no look-up, probe, lock or lease."""
    from tests.support import PROFILE, tiny_model

    from trt_warmcache.testing import FakeBuilder

    told = Heard()
    store = LayeredStore([LocalStore(tmp_path), Layer(dead_endpoint(transport=transport), deadline=2)])
    started = time.monotonic()
    with twc.EngineManager(store, builder=FakeBuilder(), memo=twc.DigestMemo(None), hooks=[told]) as manager:
        engine = manager.get(tiny_model(), profiles=PROFILE)
        assert engine.outcome is twc.Outcome.BUILT
        assert engine.stored
    assert time.monotonic() - started < 10  # one deadline and the import of a client; the store itself would take 60 s
    assert EventKind.LAYER_DOWN in told.kinds
    assert EventKind.LOCK_UNAVAILABLE not in told.kinds  # nobody knows what that server honours


def test_a_get_never_lists_far_away(tmp_path: Path) -> None:
    """However many entries a bucket holds, neither a build nor the error of a forbidden one waits for their list."""
    from tests.support import PROFILE, tiny_model

    from trt_warmcache.testing import FakeBuilder

    far = Remote(MemoryStore())
    far.publish(ENTRY, PAYLOADS)
    far.calls.clear()
    store = LayeredStore([LocalStore(tmp_path), far])
    with twc.EngineManager(store, builder=FakeBuilder(), memo=twc.DigestMemo(None)) as manager:
        with pytest.raises(twc.MissError, match="trt-warmcache explain compares with all"):
            manager.get(tiny_model(), profiles=PROFILE, policy=twc.Policy(on_miss="raise"))
        assert manager.get(tiny_model(), profiles=PROFILE).outcome is twc.Outcome.BUILT
        assert far.names("list") == []
        assert manager.explain(tiny_model(), profiles=PROFILE, recipe="other").examined == 2
    assert far.names("list") == ["engines/"]


def test_server_that_gave_no_answer_is_asked_again(tmp_path: Path) -> None:
    """What a server honours is not concluded from its failing to answer: no warning, and leases once it does answer."""

    class Waking(Remote):
        asleep = True

        @property
        def capabilities(self) -> StoreCapabilities:
            return StoreCapabilities(known=False) if self.asleep else super().capabilities

    told, far = Heard(), Waking(MemoryStore())
    store = LayeredStore([LocalStore(tmp_path), far])
    store.bind(Events([told]))
    able = store.capabilities
    assert (able.lock_scope, able.known) == (LockScope.HOST, False)
    near_only = store.lock("a" * 64)
    assert near_only is not None
    assert told.kinds == []
    far.asleep = False
    able = store.capabilities
    assert (able.lock_scope, able.known) == (LockScope.FLEET, True)
    lease = store.lock("a" * 64)
    assert lease is not None
    assert lease.try_acquire()
    assert list(far.list("leases/"))
    lease.release()


def test_layer_is_tried_again_after_the_pause() -> None:
    """After the pause one call tests the layer; it comes back when it answers, and is left alone when not."""
    now = [0.0]
    inner = MemoryStore()
    inner.publish(ENTRY, PAYLOADS)
    far = Remote(inner, fail(StoreReason.UNAVAILABLE))
    store = LayeredStore([MemoryStore(), far], cooldown=10, clock=lambda: now[0])
    for _ in range(5):
        assert store.manifest(Kind.ENGINE, ENTRY.key) is None
    assert len(far.calls) == 3
    now[0] = 11
    assert store.manifest(Kind.ENGINE, ENTRY.key) is None
    assert store.manifest(Kind.ENGINE, ENTRY.key) is None
    assert len(far.calls) == 4
    now[0], far.before = 22, None
    assert store.manifest(Kind.ENGINE, ENTRY.key) == ENTRY


def test_denied_is_counted_and_not_a_miss() -> None:
    """A remote that forbids reading has its own counter, and its refusals are no misses."""
    store = LayeredStore([MemoryStore(), Remote(MemoryStore(), fail(StoreReason.DENIED))])
    for _ in range(5):
        assert store.manifest(Kind.ENGINE, ENTRY.key) is None
    counters = store.counters()[1]
    assert counters.errors == {"denied": 5}
    assert (counters.hits, counters.misses, counters.skipped) == (0, 0, 0)


def test_required_layer_raises() -> None:
    """A layer that is required is not passed over when it fails."""
    far = Remote(MemoryStore(), fail(StoreReason.DENIED))
    store = LayeredStore([MemoryStore(), Layer(far, required=True)])
    with pytest.raises(StoreError):
        store.manifest(Kind.ENGINE, ENTRY.key)


def test_all_layers_failing_is_an_error() -> None:
    """When nobody can answer, that is an error and no miss."""
    store = LayeredStore([Remote(MemoryStore(), fail(StoreReason.TIMEOUT)) for _ in range(2)])
    with pytest.raises(StoreError) as caught:
        store.manifest(Kind.ENGINE, ENTRY.key)
    assert caught.value.reason is StoreReason.TIMEOUT


def test_blob_of_a_silent_layer_is_not_missing(tmp_path: Path) -> None:
    """When the layer that should have the bytes does not answer, the error says so, and nothing is condemned."""
    far = Remote(MemoryStore())
    far.publish(ENTRY, PAYLOADS)
    store = LayeredStore([LocalStore(tmp_path), far])
    assert store.manifest(Kind.ENGINE, ENTRY.key) == ENTRY
    far.before = fail(StoreReason.UNAVAILABLE)
    with pytest.raises(StoreError):
        store.fetch(REF)


def test_publish_while_cut_off(tmp_path: Path) -> None:
    """With the far layer down, an entry is kept near; with all down, publishing fails and says why."""
    near, far = LocalStore(tmp_path), Remote(MemoryStore(), fail(StoreReason.UNAVAILABLE))
    assert LayeredStore([near, far]).publish(ENTRY, PAYLOADS) == ENTRY
    assert has(near)
    with pytest.raises(StoreError):
        LayeredStore([Remote(MemoryStore(), fail(StoreReason.FULL)), far]).publish(ENTRY, PAYLOADS)


# ---- making one -------------------------------------------------------------------------------------------------


def test_open_store_makes_layers(tmp_path: Path) -> None:
    """A list of places is a layered store, nearest first; layers keep their settings."""
    store = open_store([tmp_path / "a", Layer(LocalStore(tmp_path / "b"), read_only=True, name="image"), "memory://"])
    assert isinstance(store, LayeredStore)
    assert [layer.read_only for layer in store.layers] == [False, True, False]
    assert store.url == f"{tmp_path / 'a'} > image > memory:"


def test_refusals() -> None:
    """What is no layer is refused at once."""
    for wrong in ([], ["a path"], [3]):
        with pytest.raises(twc.ConfigError):
            LayeredStore(wrong)  # type: ignore[arg-type]
    with pytest.raises(twc.ConfigError):
        LayeredStore([MemoryStore()], "everywhere")  # type: ignore[arg-type]
    with pytest.raises(twc.ConfigError):
        Layer(MemoryStore(), deadline=-1)


def test_capabilities_come_from_the_parts(tmp_path: Path) -> None:
    """What the whole can do follows from what its layers can."""
    local, remote = LocalStore(tmp_path), Remote(MemoryStore())
    assert LayeredStore([local, remote]).capabilities.lock_scope is LockScope.FLEET
    assert LayeredStore([local, remote]).capabilities.exclusive_create
    plain = LayeredStore([local, Remote(MemoryStore(), exclusive=False)]).capabilities
    assert not plain.exclusive_create
    assert plain.lock_scope is LockScope.HOST
    assert LayeredStore([local, Layer(remote, read_only=True)]).capabilities.lock_scope is LockScope.HOST
    assert not LayeredStore([Layer(local, read_only=True)]).capabilities.writable


def test_hit_writes_nothing(tmp_path: Path) -> None:
    """A near hit calls no writing primitive of any layer."""
    near, far = Remote(LocalStore(tmp_path)), Remote(MemoryStore())
    store = LayeredStore([near, far])
    store.publish(ENTRY, PAYLOADS)
    near.calls.clear()
    far.calls.clear()
    assert get(store) == PAYLOADS["plan"]
    assert {call for call, _ in near.calls} == {"read", "fetch"}
    assert far.calls == []


def test_prefetch_in_parallel(tmp_path: Path) -> None:
    """Eight entries behind 150 ms of latency are fetched by eight threads in less than three times the time of one."""
    far = Remote(MemoryStore(), stall(0.15))
    entries = [sample_entry(number, b"plan %d" % number) for number in range(9)]
    for manifest, payloads in entries:
        far.inner.publish(manifest, payloads)
    store = LayeredStore([LocalStore(tmp_path), far])

    def timed(act: Callable[[], Any]) -> float:
        started = time.perf_counter()
        act()
        return time.perf_counter() - started

    one = timed(lambda: get(store, entries[8][0]))
    results: list[bytes | None] = [None] * 8

    def run(number: int) -> None:
        results[number] = get(store, entries[number][0])

    def all_of_them() -> None:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert timed(all_of_them) < 3 * one
    assert results == [b"plan %d" % number for number in range(8)]


def test_stalled_probe_costs_one_deadline(tmp_path: Path) -> None:
    """Finding out what a remote can do is bounded too, is no verdict on it, and is made good once it answers."""

    class Slow(Remote):
        wait = 30.0

        @property
        def capabilities(self) -> StoreCapabilities:
            time.sleep(self.wait)
            return super().capabilities

    far, told, now = Slow(MemoryStore()), Heard(), [0.0]
    store = LayeredStore(
        [LocalStore(tmp_path), Layer(far, deadline=0.3)], cooldown=10, clock=lambda: time.monotonic() + now[0]
    )
    store.bind(Events([told]))
    started = time.monotonic()
    for number in range(10):
        lock = store.lock(f"key-{number}")
        assert lock is not None
        assert lock.try_acquire()
        lock.release()
    store.publish(ENTRY, PAYLOADS)
    assert time.monotonic() - started < 3
    assert has(LocalStore(tmp_path))
    assert told.kinds.count(EventKind.LAYER_DOWN) == 1
    assert EventKind.LOCK_UNAVAILABLE not in told.kinds
    far.wait, now[0] = 0.0, 60.0
    assert store.capabilities.exclusive_create
    assert store.capabilities.lock_scope is LockScope.FLEET


def test_remote_alone_that_does_not_answer() -> None:
    """With no other layer the remote's own failure is raised: neither an empty listing nor a read-only store."""
    for act in (lambda store: list(store.list("engines/")), lambda store: store.publish(ENTRY, PAYLOADS)):
        store = LayeredStore([Layer(Remote(MemoryStore(), fail(StoreReason.UNAVAILABLE)), deadline=5)])
        for _ in range(5):  # the breaker opens meanwhile
            with pytest.raises(StoreError) as caught:
                act(store)
            assert caught.value.reason is StoreReason.UNAVAILABLE


def test_one_broken_publication_does_not_stop_the_others(tmp_path: Path) -> None:
    """Whatever goes wrong with one entry in the background, those behind it still arrive, and it is told."""
    told, inner = Heard(), MemoryStore()

    def broken(call: str, name: str) -> None:
        if call == "put_blob" and REF.hex in name:
            raise RuntimeError("a bug in somebody's store")

    store = LayeredStore([LocalStore(tmp_path), Remote(inner, broken)], WriteTo.BACKGROUND, flush_seconds=20)
    store.bind(Events([told]))
    other, payloads = sample_entry(2)
    store.publish(ENTRY, PAYLOADS)
    store.publish(other, payloads)
    assert store.flush()
    assert has(inner, other)
    assert not has(inner)
    assert told.kinds == [EventKind.PUBLISH_FAILED]
    assert "somebody's store" in told.events[0].detail["text"]
    store.close()


def test_fork_leaves_pending_publications_to_the_parent(tmp_path: Path) -> None:
    """A child of a process that still publishes does not wait for what it cannot see ending, and works by itself."""
    far = LocalStore(tmp_path / "far")
    store = LayeredStore(
        [LocalStore(tmp_path / "near"), Layer(Remote(far, stall(0.3)), deadline=5)],
        WriteTo.BACKGROUND,
        flush_seconds=60,
    )
    store.publish(ENTRY, PAYLOADS)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            started = time.monotonic()
            store.close()
            code = 0 if time.monotonic() - started < 5 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    store.close()
    assert has(far)
