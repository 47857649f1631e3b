"""Housekeeping: the right entries go, in the right order, and nothing that somebody needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.stores.fleet import Heard, Remote
from tests.support import PROFILE, run_python, tiny_model

import trt_warmcache as twc
from trt_warmcache import manifest as manifests
from trt_warmcache.churn import CHURN_KEYS, ChurnWatch
from trt_warmcache.errors import ConfigError, StoreError
from trt_warmcache.events import EventKind, Events
from trt_warmcache.eviction import EvictionPlan, EvictionRules, Quota, plan_eviction, scan
from trt_warmcache.keys import EngineKey, Kind
from trt_warmcache.lease import Lease
from trt_warmcache.manifest import Labels, Manifest, Provenance
from trt_warmcache.memo import default_memo_folder
from trt_warmcache.stores import FsspecStore, LayeredStore, LocalStore, MemoryStore, Store
from trt_warmcache.stores._base import blob_name, manifest_name
from trt_warmcache.testing import FakeBuilder
from trt_warmcache.uses import UseLog, is_pinned, pin, unpin

HOUR = 3600.0
DAY = 24 * HOUR


def put(
    store: Store, number: int, *, model: str = "model", size: int = 1000, age: float = 0.0, gpu: str = "NVIDIA L4",
    version: str = "10.9.0", data: bytes | None = None, kind: Kind = Kind.ENGINE,
) -> Manifest:  # fmt: skip
    """An entry of some size, written some seconds ago."""
    plan = data if data is not None else (b"%d " % number).ljust(size, b"x")
    parts = {"model": f"blake3:{number:064x}", "builder.version": version, "target.gpu": gpu, "profiles": []}
    key = EngineKey(kind, parts, f"{model}-{number}")
    ref = manifests.describe_blob("plan", plan)
    manifest = manifests.seal(
        key, (ref,), provenance=Provenance(created=time.time() - age, library=version, target={"gpu": gpu}),
        labels=Labels(name=model, model=model, entry=key.name),
    )  # fmt: skip
    store.publish(manifest, {"plan": plan})
    if age and isinstance(store, LocalStore):
        for name in (manifest_name(kind, key.digest), blob_name(ref)):
            set_age(store, name, age)
    return manifest


def set_age(store: LocalStore, name: str, age: float) -> None:
    """Make a file of a store look as old as this."""
    at = time.time() - age
    os.utime(store.root / "trtwc-1" / name, (at, at))


def gc(store: Store, *, uses: UseLog | None = None, keep: Any = (), **rules: Any) -> EvictionPlan:
    """Scan, plan, execute; the plan."""
    plan = plan_eviction(scan(store, uses=uses), EvictionRules(**rules), keep=keep)
    plan.execute(store)
    return plan


def alive(store: Store, *entries: Manifest) -> list[bool]:
    """Which entries can be served, verified."""
    found = []
    for entry in entries:
        manifest = store.manifest(Kind(entry.kind), entry.key)
        if manifest is not None:
            store.fetch(manifest.blobs[0], rehash=True).close()
        found.append(manifest is not None)
    return found


def blobs(store: Store) -> int:
    """How many blobs there are."""
    return len(list(store.list("blobs/")))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """An empty local store."""
    return LocalStore(tmp_path / "store")


# ---- rules ------------------------------------------------------------------------------------------------------


def test_by_size_least_recently_used_first(store: LocalStore, tmp_path: Path) -> None:
    """Exactly enough entries go, those unused for longest first; a hit counts, not only the time of writing."""
    entries = [put(store, number, age=(10 - number) * HOUR) for number in range(5)]
    uses = UseLog(tmp_path / "uses")
    uses.note(Kind.ENGINE, entries[0].key)
    plan = gc(store, uses=uses, max_bytes=3000)
    assert alive(store, *entries) == [True, False, False, True, True]
    assert [item.reason for item in plan.evictions] == ["size", "size"]
    assert (plan.size_before, plan.size_after, plan.freed) == (5000, 3000, 2000)
    assert blobs(store) == 3


def test_by_age_and_by_last_use(store: LocalStore, tmp_path: Path) -> None:
    """Age counts from writing, idleness from the last use."""
    entries = [put(store, number, age=days * DAY) for number, days in enumerate((40, 40, 5, 0))]
    uses = UseLog(tmp_path)
    uses.note(Kind.ENGINE, entries[1].key)
    uses.flush()
    gc(store, uses=UseLog(tmp_path), max_idle=30 * DAY)
    assert alive(store, *entries) == [False, True, True, True]
    gc(store, max_age=30 * DAY)
    assert alive(store, *entries) == [False, False, True, True]


def test_by_model_and_target(store: LocalStore) -> None:
    """What is chosen by model, GPU or key goes, what is not stays; patterns are understood."""
    entries = [
        put(store, 1, model="face"), put(store, 2, model="face_beauty"), put(store, 3, model="ocr", gpu="NVIDIA H200"),
        put(store, 4, model="ocr"), put(store, 5, model="speech"),
    ]  # fmt: skip
    gc(store, models=("face",))
    assert alive(store, *entries) == [False, True, True, True, True]
    gc(store, targets=("*h200",))
    assert alive(store, *entries) == [False, True, False, True, True]
    gc(store, models=("o*", "nothing"))
    assert alive(store, *entries) == [False, True, False, False, True]
    gc(store, keys=(entries[4].key[:12].upper(),))
    assert alive(store, *entries) == [False, True, False, False, False]
    gc(store, models=(f"{2:064x}",))
    assert not any(alive(store, *entries))
    assert blobs(store) == 0


def test_choice_with_a_limit_is_a_scope(store: LocalStore) -> None:
    """With a limit, the choice says which entries the limit is about."""
    mine = [put(store, number, model="mine", age=number * HOUR) for number in range(4)]
    other = put(store, 9, model="other", age=99 * HOUR)
    gc(store, models=("mine",), max_bytes=2000)
    assert alive(store, *mine, other) == [True, True, False, False, True]


def test_superseded_versions(store: LocalStore) -> None:
    """What exists for a newer library goes, by version order and not by spelling; what does not, stays."""
    old, new = put(store, 1, version="10.9.0"), put(store, 1, version="10.13.0")
    only = put(store, 2, version="10.9.0")
    elsewhere = put(store, 1, version="10.9.0", gpu="NVIDIA H200")
    plan = plan_eviction(scan(store), EvictionRules(superseded=True))
    assert [(item.entry.digest, item.reason) for item in plan.evictions] == [(old.key, "superseded")]
    assert "superseded" in str(plan)
    plan.execute(store)
    assert alive(store, old, new, only, elsewhere) == [False, True, True, True]


def test_without_rules_only_litter_goes(store: LocalStore) -> None:
    """A bare run evicts nothing."""
    entry = put(store, 1, age=400 * DAY)
    assert gc(store).evictions == ()
    assert alive(store, entry) == [True]


def test_rules_are_checked() -> None:
    """A misspelt rule names the nearest, a negative number is refused."""
    with pytest.raises(ConfigError, match="max_bytes"):
        EvictionRules(max_byte=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError):
        EvictionRules(max_age=-1)


# ---- plans ------------------------------------------------------------------------------------------------------


def test_planning_changes_nothing(store: LocalStore) -> None:
    """Scan and plan write nothing; the plan prints, is JSON, and says the same again."""
    entries = [put(store, number, age=number * HOUR) for number in range(4)]
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}
    plan = plan_eviction(scan(store), EvictionRules(max_bytes=1500))
    assert {path: path.stat().st_mtime_ns for path in store.root.rglob("*")} == before
    assert json.loads(json.dumps(plan.to_json()))["freed"] == 3000
    assert "evict" in str(plan)
    assert all(alive(store, *entries))


def test_read_only_store_can_be_planned_not_executed(store: LocalStore) -> None:
    """A read-only store can be looked at; executing says that nothing can be deleted."""
    put(store, 1)
    locked = LocalStore(store.root, read_only=True)
    plan = plan_eviction(scan(locked), EvictionRules(max_bytes=0))
    assert len(plan.evictions) == 1
    with pytest.raises(StoreError):
        plan.execute(locked)


def test_shared_blobs(store: LocalStore) -> None:
    """A blob of two entries counts once and stays until the second goes."""
    first = put(store, 1, data=b"same" * 250, age=5 * HOUR)
    second = put(store, 2, data=b"same" * 250, age=4 * HOUR)
    third = put(store, 3)
    assert scan(store).size == 2000
    gc(store, keys=(first.key,))
    assert alive(store, first, second, third) == [False, True, True]
    gc(store, max_bytes=1000)
    assert alive(store, second, third) == [False, True]
    assert blobs(store) == 1


def test_manifest_goes_before_blob(store: LocalStore) -> None:
    """An interrupted run leaves blobs without an entry, never an entry without its blob."""
    entry = put(store, 1)
    watched = Remote(store)
    gc(watched, max_bytes=0)
    assert watched.names("delete") == [manifest_name(Kind.ENGINE, entry.key), blob_name(entry.blobs[0])]

    put(store, 2)

    def die(call: str, name: str) -> None:
        if call == "delete" and name.startswith("blobs/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gc(Remote(store, die), max_bytes=0)
    assert list(store.entries(Kind.ENGINE)) == []
    assert blobs(store) == 1


def test_vanishing_files_do_not_stop_it(store: LocalStore) -> None:
    """Whatever single file is taken away between scan and execution, the run goes on."""
    entries = [put(store, number) for number in range(6)]
    plan = plan_eviction(scan(store), EvictionRules(max_bytes=0))
    store.delete(manifest_name(Kind.ENGINE, entries[0].key))
    store.delete(blob_name(entries[1].blobs[0]))
    plan.execute(store)
    assert blobs(store) == 0
    assert list(store.entries(Kind.ENGINE)) == []


def test_trouble_with_one_object_is_reported(store: LocalStore) -> None:
    """An entry that cannot be deleted is named, the others go."""
    entries = [put(store, number) for number in range(3)]

    def refuse(call: str, name: str) -> None:
        if call == "delete" and entries[1].key in name:
            raise StoreError("stuck", store="x")

    report = plan_eviction(scan(store), EvictionRules(max_bytes=0)).execute(Remote(store, refuse))
    assert report.failed == ("stuck",)
    assert alive(store, *entries) == [False, True, False]


# ---- what must stay ---------------------------------------------------------------------------------------------


def test_pins(store: LocalStore) -> None:
    """A pinned entry stays, whatever the rules, until it is unpinned; even when pinned after the scan."""
    first, second = put(store, 1), put(store, 2)
    pin(store, Kind.ENGINE, first.key, note="release")
    assert is_pinned(store, Kind.ENGINE, first.key)
    plan = plan_eviction(scan(store), EvictionRules(max_bytes=0))
    assert plan.kept == {"pinned": 1}
    pin(store, Kind.ENGINE, second.key)
    assert plan.execute(store).evicted == ()
    assert alive(store, first, second) == [True, True]
    assert unpin(store, Kind.ENGINE, first.key)
    assert not unpin(store, Kind.ENGINE, first.key)
    gc(store, max_bytes=0)
    assert alive(store, first, second) == [False, True]


HOLDER = """
import sys, time
from trt_warmcache.keys import Kind
from trt_warmcache.stores import LocalStore
store = LocalStore(sys.argv[1])
manifest = store.manifest(Kind.ENGINE, sys.argv[2])
payload = store.fetch(manifest.blobs[0])
print("mapped", flush=True)
sys.stdin.read(1)
assert bytes(payload.view[:2]) == b"1 "
payload.close()
print("closed", flush=True)
sys.stdin.read(1)
"""


def test_mapped_entries_stay(store: LocalStore) -> None:
    """An entry that another process has mapped stays until it is unmapped, or that process is killed."""
    entry = put(store, 1)
    for end in ("close", "kill"):
        child = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(store.root), entry.key],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "mapped\n"
        report = plan_eviction(scan(store), EvictionRules(max_bytes=0)).execute(store)
        assert len(report.in_use) == 1
        assert alive(store, entry) == [True]
        if end == "close":
            child.stdin.write("x")
            child.stdin.flush()
            assert child.stdout.readline() == "closed\n"
            gc(store, max_bytes=0)
            assert alive(store, entry) == [False]
            put(store, 1)
        child.kill()
        child.communicate()
    gc(store, max_bytes=0)
    assert alive(store, entry) == [False]


def test_mapped_by_this_process_stays(store: LocalStore) -> None:
    """Also what this very process has mapped is in use, several times over, and readable all along."""
    entry = put(store, 1)
    first, second = store.fetch(entry.blobs[0]), store.fetch(entry.blobs[0])
    first.close()
    assert store.in_use(entry.blobs[0])
    gc(store, max_bytes=0)
    assert bytes(second.view[:2]) == b"1 "
    second.close()
    assert not store.in_use(entry.blobs[0])


def test_leased_entries_stay(tmp_path: Path) -> None:
    """An entry under whose key somebody in the fleet is building stays; a lease of long ago protects nothing."""
    store = LocalStore(tmp_path)
    entry, other = put(store, 1), put(store, 2)
    lease = Lease(store, entry.key)
    assert lease.try_acquire()
    plan = gc(Remote(store), max_bytes=0)
    assert plan.kept == {"leased": 1}
    assert alive(store, entry, other) == [True, False]
    lease._stop.set()
    set_age(store, f"leases/{entry.key}.json", 2 * HOUR)
    gc(Remote(store), max_bytes=0)
    assert alive(store, entry) == [False]
    assert list(store.list("leases/")) == []


BUILD = """
import sys
from tests.support import PROFILE, tiny_model
import trt_warmcache as twc
from trt_warmcache.testing import FakeBuilder
def say(inputs):
    print("building", flush=True)
with twc.EngineManager(sys.argv[1], builder=FakeBuilder(seconds=float(sys.argv[2]), on_build=say), memo=twc.DigestMemo(None)) as manager:
    print(manager.get(tiny_model(), profiles=PROFILE).key.digest, flush=True)
"""


def test_build_in_progress_survives(store: LocalStore) -> None:
    """Housekeeping down to zero bytes, without any grace, while a build is under way: its entry is there, and whole."""
    child = subprocess.Popen([sys.executable, "-c", BUILD, str(store.root), "1"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "building\n"
    until = time.monotonic() + 0.8
    while time.monotonic() < until:
        gc(store, max_bytes=0, grace_seconds=HOUR)
    output, _ = child.communicate(timeout=30)
    (entry,) = store.entries(Kind.ENGINE)
    assert entry.digest == output.strip()
    manifest = store.manifest(Kind.ENGINE, entry.digest)
    assert manifest is not None
    assert alive(store, manifest) == [True]


def test_entry_published_after_the_scan_keeps_its_blob(store: LocalStore) -> None:
    """A blob that was nobody's at the scan and has an entry by now stays; also one that was written again."""
    doomed = put(store, 1, data=b"shared" * 100, age=5 * HOUR)
    orphan = put(store, 2, data=b"orphan" * 100, age=5 * HOUR)
    store.remove(Kind.ENGINE, orphan.key)
    plan = plan_eviction(scan(store), EvictionRules(keys=(doomed.key,)))
    assert len(plan.orphans) == 2
    late = [put(store, 11, data=b"shared" * 100), put(store, 12, data=b"orphan" * 100)]
    for entry in late:
        set_age(store, blob_name(entry.blobs[0]), 5 * HOUR)
    plan.execute(store)
    assert alive(store, *late) == [True, True]


# ---- litter -----------------------------------------------------------------------------------------------------


def test_killed_builders_leave_nothing_for_long(store: LocalStore) -> None:
    """Writers killed in the middle of a write leave temporary files; the old ones are swept, the young ones not."""
    code = """
import os, signal, sys
from trt_warmcache.stores import LocalStore, _local
def die(fd):
    os.kill(os.getpid(), signal.SIGKILL)
_local.os.fsync = die
LocalStore(sys.argv[1]).write("blobs/ab/" + "ab" * 32, b"x" * 500)
"""
    for _ in range(5):
        with pytest.raises(AssertionError):
            run_python(code, store.root)
    found = list(store.temporaries())
    assert len(found) == 5
    assert list(store.list("blobs/")) == []
    for info in found[:3]:
        set_age(store, info.name, 2 * HOUR)
    plan = gc(store)
    assert len(plan.litter) == 3
    assert {info.name for info in store.temporaries()} == {info.name for info in found[3:]}


def test_temporaries_of_remote_file_systems_are_swept(tmp_path: Path) -> None:
    """Where a remote file system has no atomic writes, what dead writers left there goes too, once it is old enough."""
    store = FsspecStore(f"file://{tmp_path}")
    put(store, 1)
    folder = tmp_path / "trtwc-1" / "blobs" / "ab"
    folder.mkdir(parents=True, exist_ok=True)
    for name, age in ((".tmp-old-x", 2 * HOUR), (".tmp-new-x", 0.0)):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - age,) * 2)
    gc(store)
    assert sorted(path.name for path in folder.glob(".tmp-*")) == [".tmp-new-x"]
    assert len(list(store.entries(Kind.ENGINE))) == 1


def test_orphans_wait_for_the_grace_period(store: LocalStore) -> None:
    """A blob without an entry is swept when it is old enough that nobody can be about to publish it."""
    young, old = put(store, 1), put(store, 2, age=2 * HOUR)
    for entry in (young, old):
        store.remove(Kind.ENGINE, entry.key)
    assert [info.name for info in gc(store).orphans] == [blob_name(old.blobs[0])]
    assert blobs(store) == 1


def test_entries_of_other_releases_protect_their_blobs(store: LocalStore) -> None:
    """While there are manifests this release cannot judge, blobs without a known entry stay."""
    entry = put(store, 1, age=2 * HOUR)
    path = store.root / "trtwc-1" / manifest_name(Kind.ENGINE, entry.key)
    path.write_bytes(path.read_bytes().replace(b'"trt_warmcache/1"', b'"trt_warmcache/2"'))
    inventory = scan(store)
    assert inventory.foreign == (manifest_name(Kind.ENGINE, entry.key),)
    gc(store)
    assert blobs(store) == 1


def test_stray_files_are_ignored(store: LocalStore) -> None:
    """Things that other programs leave in a store are neither listed, nor deleted, nor a reason to fail."""
    entry = put(store, 1)
    base = store.root / "trtwc-1"
    strays = [
        "engines/.DS_Store", "engines/ab/x.tmp", "engines/README", "blobs/ab/y.lock", "pins/notes.txt", "use/z.json",
        "leases/odd", "engines/zz/short.json",
    ]  # fmt: skip
    for name in strays:
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(b"\x00junk")
    (base / "engines/cd" / ("cd" * 32 + ".json")).mkdir(parents=True)
    (base / manifest_name(Kind.ENGINE, "ef" * 32)).parent.mkdir(parents=True, exist_ok=True)
    (base / manifest_name(Kind.ENGINE, "ef" * 32)).write_bytes(b"")
    inventory = scan(store)
    assert [found.digest for found in inventory.entries] == [entry.key]
    assert inventory.damaged == (manifest_name(Kind.ENGINE, "ef" * 32),)
    gc(store, max_age=0.0)
    assert all((base / name).exists() for name in strays)


def test_deleted_behind_its_back(store: LocalStore) -> None:
    """Entries are what lies there, not what an index says: a deleted file is gone from the list at once."""
    first, second = put(store, 1), put(store, 2)
    (store.root / "trtwc-1" / manifest_name(Kind.ENGINE, first.key)).unlink()
    assert [found.digest for found in scan(store).entries] == [second.key]


# ---- last use ---------------------------------------------------------------------------------------------------


def test_hits_are_remembered_without_writing_to_the_store(tmp_path: Path) -> None:
    """A hit refreshes recency for a later process, and the store sees no write, not even on closing."""
    store, memo = LocalStore(tmp_path / "store"), tmp_path / "memo"
    model = tiny_model()
    with twc.EngineManager(store, builder=FakeBuilder(), memo=twc.DigestMemo(memo)) as manager:
        key = manager.get(model, profiles=PROFILE).key.digest
    set_age(store, manifest_name(Kind.ENGINE, key), 5 * HOUR)
    watched = Remote(store)
    with twc.EngineManager(watched, builder=FakeBuilder(), memo=twc.DigestMemo(memo)) as manager:
        assert manager.get(model, profiles=PROFILE).outcome is twc.Outcome.HIT
    assert {call for call, _ in watched.calls} <= {"read", "fetch", "lock"}
    (entry,) = scan(store, uses=UseLog(memo / "uses")).entries
    assert time.time() - entry.used < 60
    assert time.time() - entry.written > 4 * HOUR


def test_uses_of_many_processes_add_up(tmp_path: Path) -> None:
    """What several processes note one after the other is all remembered."""
    for number in range(4):
        log = UseLog(tmp_path)
        log.note(Kind.ENGINE, f"{number:064x}")
        log.flush()
    assert len(UseLog(tmp_path).all()) == 4


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04pickle", b'{"format":"other","used":{}}', b"[" * 10**5])
def test_damaged_use_records_cost_nothing(tmp_path: Path, store: LocalStore, content: bytes) -> None:
    """A damaged or foreign record of uses is as good as none, here and in the store."""
    tmp_path.joinpath("uses.json").write_bytes(content)
    store.write("use/host.json", content)
    entry = put(store, 1)
    log = UseLog(tmp_path)
    assert [found.digest for found in scan(store, uses=log).entries] == [entry.key]
    log.note(Kind.ENGINE, entry.key)
    log.flush()
    assert len(UseLog(tmp_path).all()) == 1


def test_unwritable_folder_is_no_trouble(tmp_path: Path) -> None:
    """Where nothing can be remembered, nothing fails."""
    (tmp_path / "file").write_bytes(b"")
    log = UseLog(tmp_path / "file" / "below")
    log.note(Kind.ENGINE, "ab" * 32)
    log.flush()
    assert log.all() == {}


def test_shared_uses_reach_other_machines(tmp_path: Path, store: LocalStore) -> None:
    """What one machine shares through the store keeps entries for housekeeping on another."""
    entry = put(store, 1, age=9 * DAY)
    log = UseLog(tmp_path)
    log.note(Kind.ENGINE, entry.key)
    log.share(store)
    gc(store, max_idle=DAY)
    assert alive(store, entry) == [True]


# ---- quota ------------------------------------------------------------------------------------------------------


def test_quota_holds_across_restarts(store: LocalStore) -> None:
    """A full store, a new process, one more entry: exactly one goes, the oldest, and not all."""
    entries = [put(store, number, age=(10 - number) * HOUR) for number in range(5)]
    heard = Heard()
    quota = Quota(LocalStore(store.root), 5 * 1000)
    builder = FakeBuilder(size=1000)
    with twc.EngineManager(
        LocalStore(store.root), builder=builder, memo=twc.DigestMemo(None), hooks=[heard, quota]
    ) as manager:
        engine = manager.get(tiny_model(), profiles=PROFILE)
        assert engine.plan.nbytes == 1000
    assert alive(store, *entries, engine.manifest) == [False, True, True, True, True, True]


def test_quota_spares_what_earlier_processes_used(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hits that managers noted in other processes count: the oldest entry stays where it is the one in use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    entries = [put(store, number, age=(10 - number) * HOUR) for number in range(3)]
    used = UseLog(default_memo_folder(os.environ) / "uses")
    used.note(Kind.ENGINE, entries[0].key)
    used.flush()
    Quota(store, 2 * 1000).enforce()
    assert alive(store, *entries) == [True, False, True]


def test_quota_keeps_what_was_just_made(store: LocalStore) -> None:
    """A quota smaller than one engine leaves the engine just built, and says nothing that is not so."""
    put(store, 1)
    with twc.EngineManager(
        store, builder=FakeBuilder(size=1000), memo=twc.DigestMemo(None), hooks=[Quota(store, 10)]
    ) as manager:
        engine = manager.get(tiny_model(), profiles=PROFILE)
    assert [found.digest for found in store.entries(Kind.ENGINE)] == [engine.key.digest]


# ---- churn ------------------------------------------------------------------------------------------------------


def test_churn_names_what_changes(tmp_path: Path) -> None:
    """A hundred engines of one model, each under a new key: an event that names the changing part."""
    heard = Heard()
    with twc.EngineManager(
        MemoryStore(), builder=FakeBuilder(steps=1), memo=twc.DigestMemo(None), hooks=[heard]
    ) as manager:
        for number in range(100):
            manager.get(tiny_model(), profiles=PROFILE, name="leaky", recipe=f"run {number}")
    told = [event for event in heard.events if event.kind is EventKind.CHURN]
    assert [event.detail["keys"] for event in told] == [16, 32, 64]
    assert all(event.label == "leaky" and event.detail["parts"] == ["recipe"] for event in told)
    assert "recipe" in told[0].detail["text"]


def test_no_alarm_where_engines_are_used() -> None:
    """Many shapes of one model are no churn as long as they are served, too."""
    heard = Heard()
    watch = ChurnWatch(Events([heard]))
    store = MemoryStore()
    for number in range(3 * CHURN_KEYS):
        manifest = put(store, number)
        watch.built(manifest)
        if number % (CHURN_KEYS - 1) == 0:
            watch.hit(manifest)
    assert heard.kinds == []


def test_churn_over_restarts_shows_in_the_plan(store: LocalStore, tmp_path: Path) -> None:
    """One new key per start, never a hit: the plan says so, and the event comes when it is executed."""
    log = UseLog(tmp_path)
    for number in range(CHURN_KEYS):
        log.note(Kind.ENGINE, put(store, number, model="leaky").key)
    served = [put(store, 100 + number, model="good", age=HOUR) for number in range(CHURN_KEYS)]
    log.note(Kind.ENGINE, served[0].key)
    plan = plan_eviction(scan(store, uses=log), EvictionRules())
    assert [(churn.model, churn.keys, churn.parts) for churn in plan.churn] == [("leaky", CHURN_KEYS, ("model",))]
    heard = Heard()
    plan.execute(store, events=Events([heard]))
    assert heard.kinds == [EventKind.CHURN]


# ---- size -------------------------------------------------------------------------------------------------------


def fill(store: LocalStore, count: int, write: Callable[[Path, bytes], object] = Path.write_bytes) -> None:
    """Many small entries, written past the store."""
    base = store.root / "trtwc-1"
    blob = b"x" * 100
    ref = manifests.describe_blob("plan", blob)
    template = put(store, 0, data=blob)
    folders: set[Path] = set()
    for number in range(1, count):
        key = EngineKey(Kind.ENGINE, {**template.parts, "model": f"blake3:{number:064x}"})
        manifest = replace_manifest(template, key)
        path = base / manifest_name(Kind.ENGINE, key.digest)
        if path.parent not in folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            folders.add(path.parent)
        write(path, manifests.encode(manifest))
    assert blob_name(ref)


def replace_manifest(manifest: Manifest, key: EngineKey) -> Manifest:
    """The same manifest under another key."""
    import msgspec

    return msgspec.structs.replace(manifest, key=key.digest, parts=dict(key.parts))


@pytest.mark.slow
def test_twenty_thousand_entries(store: LocalStore) -> None:
    """A store of 20,000 entries is planned in seconds, each manifest read once; a get costs what it costs when empty."""
    fill(store, 20_000)
    watched = Remote(store)
    watched.local = True
    started = time.perf_counter()
    plan = plan_eviction(scan(watched), EvictionRules(superseded=True, max_age=DAY))
    assert time.perf_counter() - started < 90  # a shared machine may be slow; quadratic work would take hours
    assert plan.evictions == ()
    reads = [name for name in watched.names("read") if name.startswith("engines/")]
    assert len(reads) == len(set(reads)) == 20_000


def test_layers_are_kept_together(tmp_path: Path) -> None:
    """Housekeeping of a layered store works on all its layers."""
    near, far = LocalStore(tmp_path), MemoryStore()
    store = LayeredStore([near, Remote(far)])
    entries = [put(store, number) for number in range(3)]
    gc(store, keys=(entries[0].key,))
    assert alive(store, *entries) == [False, True, True]
    assert (blobs(near), blobs(far)) == (2, 2)


def test_frozen() -> None:
    """Rules are values."""
    rules = EvictionRules(max_bytes=1)
    assert replace(rules, max_bytes=2).max_bytes == 2
    assert hash(rules) == hash(EvictionRules(max_bytes=1))


def test_killed_in_the_middle(store: LocalStore) -> None:
    """Housekeeping killed half-way leaves a store in which every entry is whole, and the next run finishes."""
    entries = [put(store, number, age=2 * HOUR) for number in range(20)]
    code = """
import os, signal, sys
from trt_warmcache.eviction import EvictionRules, plan_eviction, scan
from trt_warmcache.stores import LocalStore
from trt_warmcache.testing import FlakyStore
left = int(sys.argv[2])
def die(call, name):
    global left
    left -= call == "delete"
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
store = FlakyStore(LocalStore(sys.argv[1]), die)
plan_eviction(scan(store), EvictionRules(max_bytes=0)).execute(store)
"""
    for steps in (3, 9):
        with pytest.raises(AssertionError):
            run_python(code, store.root, steps)
        alive(store, *entries)
    assert 0 < sum(alive(store, *entries)) < 20
    gc(store, max_bytes=0)
    assert blobs(store) == 0
