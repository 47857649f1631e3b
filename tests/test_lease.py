"""Leases: one builder in the fleet, dead holders replaced in time, zombies harmless."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.stores.fleet import Heard, Remote
from tests.support import PROFILE, tiny_model

import trt_warmcache as twc
from trt_warmcache import singleflight
from trt_warmcache.errors import ConfigError, StoreError
from trt_warmcache.events import EventKind, Events
from trt_warmcache.keys import Kind
from trt_warmcache.lease import Lease, lease_name
from trt_warmcache.stores import LayeredStore, LocalStore, MemoryStore
from trt_warmcache.testing import FakeBuilder
from trt_warmcache.testing._stores import race

KEY = "ab" * 32
NAME = lease_name(KEY)


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def poll(lease: Lease, clock: Clock, until: float, step: float = 0.1) -> float | None:
    """Try until the lease is ours; the time at which it was, or None."""
    while clock.now < until:
        if lease.try_acquire():
            return clock.now
        clock.now += step
    return None


def stopped(lease: Lease) -> Lease:
    """The lease of a holder that has just died: no more heartbeats, no release."""
    lease._stop.set()
    assert lease._thread is not None
    lease._thread.join()
    return lease


# ---- one store, no processes ------------------------------------------------------------------------------------


def test_take_and_give_back() -> None:
    """A lease keeps a second taker out until it is given back, and leaves nothing behind."""
    store = MemoryStore()
    first, second = Lease(store, KEY), Lease(store, KEY)
    assert first.try_acquire()
    assert not first.try_acquire()
    assert not second.try_acquire()
    assert second.owner() == f"process {os.getpid()} on {os.uname().nodename}"
    first.release()
    first.release()
    assert list(store.list("leases/")) == []
    time.sleep(0.5)
    assert second.try_acquire()
    second.release()


def test_one_of_many_takes_it() -> None:
    """Of sixteen that try at once exactly one gets the lease."""
    store = Remote(MemoryStore())
    leases = [Lease(store, KEY) for _ in range(16)]
    assert race(16, lambda number: leases[number].try_acquire()).count(True) == 1
    for lease in leases:
        lease.release()


@pytest.mark.parametrize("jump", [0.0, 3600.0, -3600.0])
def test_dead_holder_is_replaced_in_time(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher takes over within the lease and a second of the last sign of life, whatever the wall clock does."""
    wall = time.time()
    monkeypatch.setattr(time, "time", lambda: wall + jump)
    store, clock = MemoryStore(), Clock()
    holder, waiter = Lease(store, KEY, clock=clock), Lease(store, KEY, clock=clock)
    assert holder.try_acquire()
    died = clock.now
    stopped(holder)
    taken = poll(waiter, clock, died + 40)
    assert taken is not None
    assert 30 <= taken - died <= 31
    waiter.release()


def test_living_holder_is_waited_for() -> None:
    """However long a build takes, its heartbeats keep the lease: only silence counts, not duration."""
    store, clock = MemoryStore(), Clock()
    holder, waiter = Lease(store, KEY, clock=clock), Lease(store, KEY, clock=clock)
    assert holder.try_acquire()
    stopped(holder)
    for beat in range(1, 16):
        assert poll(waiter, clock, clock.now + 10) is None
        assert holder._beat(beat)
    assert holder.verify()
    holder.release()


def test_one_of_many_takes_over() -> None:
    """Of sixteen that see a lease expire at the same moment exactly one becomes its successor, without any swap."""
    for _ in range(10):
        store, clock = Remote(MemoryStore()), Clock()
        dead = Lease(store, KEY, clock=clock)
        assert dead.try_acquire()
        stopped(dead)
        waiters = [Lease(store, KEY, clock=clock) for _ in range(16)]
        for waiter in waiters:
            assert not waiter.try_acquire()
        clock.now += 31
        store.calls.clear()
        won = race(16, lambda number, waiters=waiters: waiters[number].try_acquire())  # type: ignore[misc]
        assert won.count(True) == 1
        assert waiters[won.index(True)].verify()
        for waiter in waiters:
            waiter.release()


def test_successor_that_dies_is_replaced_too() -> None:
    """A successor killed between its claim and its lease delays the others by one more lease, not for ever."""
    store, clock = MemoryStore(), Clock()
    dead = Lease(store, KEY, clock=clock)
    assert dead.try_acquire()
    stopped(dead)

    def die(call: str, name: str) -> None:
        if call == "write" and name == NAME:
            raise KeyboardInterrupt

    second = Lease(Remote(store, die), KEY, clock=clock)
    third = Lease(store, KEY, clock=clock)
    assert not second.try_acquire()
    assert not third.try_acquire()
    clock.now += 30.5
    with pytest.raises(KeyboardInterrupt):
        second.try_acquire()
    started = clock.now
    taken = poll(third, clock, started + 70)
    assert taken is not None
    assert taken - started <= 31
    third.release()


def test_zombie_touches_nothing() -> None:
    """A holder that wakes up after its lease was taken over notices, and neither renews nor removes the other's."""
    store, clock = MemoryStore(), Clock()
    told: list[str] = []
    zombie = Lease(store, KEY, clock=clock, on_lost=told.append)
    heir = Lease(store, KEY, clock=clock)
    assert zombie.try_acquire()
    stopped(zombie)
    assert poll(heir, clock, clock.now + 40) is not None
    after = store.read(NAME, limit=4096)
    assert not zombie._beat(9)
    assert not zombie.verify()
    zombie.release()
    assert store.read(NAME, limit=4096) == after
    assert heir.verify()
    assert len(told) == 1
    assert "was lost to process" in told[0]
    heir.release()
    assert store.read(NAME, limit=4096) is None


def test_release_past_expiry_leaves_it_to_the_others() -> None:
    """Past its time a holder does not delete: somebody may be taking over between its look and its deletion."""
    store, clock = MemoryStore(), Clock()
    holder = Lease(store, KEY, clock=clock)
    assert holder.try_acquire()
    stopped(holder)
    clock.now += 30.1
    holder.release()
    assert store.read(NAME, limit=4096) is not None


@pytest.mark.parametrize("call", ["create", "swap"])
def test_lost_answers(call: str) -> None:
    """A write that succeeded and whose answer was lost, so that the repeat is refused, is recognised as our own."""

    class Lossy(MemoryStore):
        def create(self, name: str, data: Any) -> bool:
            done = super().create(name, data)
            return done and call != "create"

        def swap(self, name: str, data: Any, *, expected: bytes) -> bool:
            done = super().swap(name, data, expected=expected)
            return done and call != "swap"

    store = Lossy()
    lease = Lease(store, KEY)
    assert lease.try_acquire()
    stopped(lease)
    assert lease._beat(1)
    assert lease.verify()
    lease.release()
    assert store.read(NAME, limit=4096) is None


def test_failing_heartbeat_is_repeated() -> None:
    """A heartbeat that cannot be written is tried again before the lease is over."""
    failures = iter([True, True])

    def flaky(call: str, name: str) -> None:
        if call == "swap" and next(failures, False):
            raise StoreError("no answer", store="x")

    store = MemoryStore()
    lease = Lease(Remote(store, flaky), KEY, seconds=0.6)
    assert lease.try_acquire()
    before = store.read(NAME, limit=4096)
    time.sleep(0.55)
    assert store.read(NAME, limit=4096) != before
    lease.release()


@pytest.mark.parametrize(
    "content", [b"", b"not json", b"[" * 3000, b'{"format":"trtwc-lease-9"}', b'{"format":"trtwc-lease-1","claim":"x"}']
)
def test_foreign_content_expires_too(content: bytes) -> None:
    """Whatever lies under a lease's name blocks nobody longer than a lease."""
    store, clock = MemoryStore(), Clock()
    store.write(NAME, content)
    lease = Lease(store, KEY, clock=clock)
    assert not lease.try_acquire()
    started = clock.now
    assert poll(lease, clock, started + 40) is not None
    assert clock.now - started <= 31
    lease.release()


def test_absurd_lifetime_is_not_believed() -> None:
    """A lease object that claims to live for a year is given a normal life."""
    store, clock = MemoryStore(), Clock()
    record = {"format": "trtwc-lease-1", "claim": "c", "beat": 0, "seconds": 3.2e7, "owner": "o"}
    store.write(NAME, json.dumps(record).encode())
    lease = Lease(store, KEY, clock=clock)
    assert not lease.try_acquire()
    assert poll(lease, clock, clock.now + 40) is not None
    lease.release()


def test_waiting_asks_seldom() -> None:
    """However often a waiter tries, the store sees two requests a second at most."""
    inner, clock = MemoryStore(), Clock()
    held = Lease(inner, KEY, clock=clock)
    assert held.try_acquire()
    watched = Remote(inner)
    waiter = Lease(watched, KEY, clock=clock)
    started = clock.now
    assert poll(waiter, clock, started + 10, step=0.005) is None
    assert len(watched.calls) <= 21
    held.release()


def test_fork_does_not_release(tmp_path: Path) -> None:
    """A child that inherits a lease by fork and gives it back leaves the parent's in place."""
    store = LocalStore(tmp_path)
    lease = Lease(store, KEY)
    assert lease.try_acquire()
    child = os.fork()
    if child == 0:
        lease.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert lease.verify()
    lease.release()


@pytest.mark.parametrize("seconds", [0, -1, 1e9])
def test_refused_lifetimes(seconds: float) -> None:
    """A lease without a sensible life is refused."""
    with pytest.raises(ConfigError):
        Lease(MemoryStore(), KEY, seconds=seconds)


# ---- machines ---------------------------------------------------------------------------------------------------

#: One process of one machine: local folder, shared store, a builder that logs. Arguments: near, far, log, options.
NODE = """
import json, os, pathlib, sys, time
from tests.stores.fleet import Remote
from tests.support import PROFILE, tiny_model
import trt_warmcache as twc
from trt_warmcache import singleflight
from trt_warmcache.stores import LayeredStore, LocalStore
from trt_warmcache.testing import FakeBuilder
near, far, log, options = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
def on_build(inputs):
    with open(log, "a") as file:
        file.write(json.dumps({"pid": os.getpid(), "near": near, "at": time.monotonic()}) + "\\n")
events = []
store = LayeredStore(
    [LocalStore(near), Remote(LocalStore(far), exclusive=options.get("exclusive", True))], lease_seconds=options.get("lease", 30)
)
builder = FakeBuilder(seconds=options.get("seconds", 0.5), steps=20, on_build=on_build)
with twc.EngineManager(store, builder=builder, memo=twc.DigestMemo(None), hooks=[lambda e: events.append(e.kind.value)]) as manager:
    engine = manager.get(tiny_model(), profiles=PROFILE)
    print(json.dumps({"outcome": engine.outcome.value, "created": engine.manifest.provenance.created, "events": events}))
"""


class Fleet:
    """Processes on simulated machines: each machine has a local folder, all share one store."""

    def __init__(self, root: Path) -> None:
        self.root, self.far, self.log = root, root / "far", root / "log"
        self.children: list[subprocess.Popen[str]] = []

    def start(self, machine: str, **options: Any) -> subprocess.Popen[str]:
        """One process on a machine."""
        arguments = [str(self.root / machine), str(self.far), str(self.log), json.dumps(options)]
        child = subprocess.Popen([sys.executable, "-c", NODE, *arguments], stdout=subprocess.PIPE, text=True)
        self.children.append(child)
        return child

    def close(self) -> None:
        """Leave no process behind, whatever the test came to."""
        for child in self.children:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()

    def builds(self) -> list[dict[str, Any]]:
        """Builds that have begun."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def wait_for_build(self, count: int, seconds: float = 60) -> dict[str, Any]:
        """Wait until so many builds have begun; the last of them."""
        wait_for(lambda: len(self.builds()) >= count, seconds)
        return self.builds()[-1]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Two machines and a shared store."""
    made = Fleet(tmp_path)
    yield made
    made.close()


def wait_for(look: Callable[[], Any], seconds: float) -> Any:
    """Wait until something is so."""
    until = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.01)
    return found


def result(child: subprocess.Popen[str]) -> dict[str, Any]:
    """What a process reported."""
    output, _ = child.communicate(timeout=90)
    assert child.returncode == 0
    return dict(json.loads(output))


def test_two_machines_one_build(tmp_path: Path, fleet: Fleet) -> None:
    """Eight cold processes on two machines over one shared store: one build, one plan for all."""
    children = [fleet.start("ab"[number % 2]) for number in range(8)]
    results = [result(child) for child in children]
    assert len(fleet.builds()) == 1
    assert [found["outcome"] for found in results].count("built") == 1
    assert len({found["created"] for found in results}) == 1
    assert list((tmp_path / "far/trtwc-1/leases").iterdir()) == []


def test_killed_holder_is_replaced(tmp_path: Path, fleet: Fleet) -> None:
    """The builder's machine dies with the lease: another machine builds within the lease and a second."""
    first = fleet.start("a", lease=3, seconds=60)
    fleet.wait_for_build(1)
    second = fleet.start("b", lease=3, seconds=0.1)
    # The waiter must have seen the lease before its holder dies; its interpreter needs a moment.
    wait_for((tmp_path / "b/trtwc-1/locks").exists, 60)
    time.sleep(0.7)
    first.send_signal(signal.SIGKILL)
    died = time.monotonic()
    first.communicate()
    begun = fleet.wait_for_build(2, 10)
    assert begun["at"] - died <= 3 + 1
    assert result(second)["outcome"] == "built"


def test_killed_process_frees_its_own_machine_at_once(tmp_path: Path, fleet: Fleet) -> None:
    """On the dead builder's own machine the kernel lock is free at once; the lease alone is waited for."""
    first = fleet.start("a", lease=2, seconds=60)
    fleet.wait_for_build(1)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    died = time.monotonic()
    second = fleet.start("a", lease=2, seconds=0.1)
    wait_for((tmp_path / "a/trtwc-1/locks").exists, 60)
    assert fleet.wait_for_build(2, 20)["at"] - died < 20
    assert result(second)["outcome"] == "built"


def test_zombie_publishes_late(tmp_path: Path, fleet: Fleet) -> None:
    """A builder stopped past its lease and woken after another has published adopts the other's entry."""
    zombie = fleet.start("a", lease=1.5, seconds=1.5)
    fleet.wait_for_build(1)
    zombie.send_signal(signal.SIGSTOP)
    heir = result(fleet.start("b", lease=1.5, seconds=1.5))
    zombie.send_signal(signal.SIGCONT)
    late = result(zombie)
    assert heir["outcome"] == "built"
    assert late["created"] == heir["created"]
    assert "lease_lost" in late["events"]
    entry = next((tmp_path / "far/trtwc-1/engines").rglob("*.json"))
    assert json.loads(entry.read_bytes())["provenance"]["created"] == heir["created"]
    near = next((tmp_path / "a/trtwc-1/engines").rglob("*.json"))
    assert near.read_bytes() == entry.read_bytes()


def test_zombie_wakes_while_the_heir_builds(fleet: Fleet) -> None:
    """A zombie that publishes while its heir still builds leaves the heir's lease alone; both end with one entry."""
    zombie = fleet.start("a", lease=1.5, seconds=2)
    fleet.wait_for_build(1)
    zombie.send_signal(signal.SIGSTOP)
    heir = fleet.start("b", lease=1.5, seconds=4)
    fleet.wait_for_build(2)
    zombie.send_signal(signal.SIGCONT)
    results = [result(zombie), result(heir)]
    assert len({found["created"] for found in results}) == 1
    assert "lease_lost" in results[0]["events"]
    assert "lease_lost" not in results[1]["events"]


def test_without_exclusive_create(tmp_path: Path, fleet: Fleet) -> None:
    """A store without create-if-absent: no lease, one warning, no hang, every machine ends with a right entry."""
    results = [result(child) for child in [fleet.start("ab"[number % 2], exclusive=False) for number in range(4)]]
    assert 1 <= len(fleet.builds()) <= 2
    builders = [found for found in results if found["outcome"] == "built"]
    assert all(found["events"].count("lock_unavailable") == 1 for found in builders)
    assert not (tmp_path / "far/trtwc-1/leases").exists()
    for machine in "ab":
        store = LocalStore(tmp_path / machine)
        (entry,) = store.entries(Kind.ENGINE)
        manifest = store.manifest(Kind.ENGINE, entry.digest)
        assert manifest is not None
        store.fetch(manifest.blob("plan"), rehash=True).close()


def test_two_hosts_over_one_memory_store() -> None:
    """Two lock domains over one shared store in memory: one build; threads of both get it."""
    far = MemoryStore()
    builders = [FakeBuilder(seconds=0.3), FakeBuilder(seconds=0.3)]
    managers = [
        twc.EngineManager(LayeredStore([MemoryStore(), Remote(far)]), builder=builder, memo=twc.DigestMemo(None))
        for builder in builders
    ]
    model = tiny_model()
    outcomes = race(8, lambda number: managers[number % 2].get(model, profiles=PROFILE).outcome.value)
    assert sum(builder.builds for builder in builders) == 1
    assert outcomes.count("built") == 1
    for manager in managers:
        manager.close()


def test_slow_build_with_heartbeats_is_waited_for() -> None:
    """A build of five times the lease is waited for: time-outs measure silence, not length."""
    far = MemoryStore()
    builder = FakeBuilder(seconds=2.0)
    managers = [
        twc.EngineManager(
            LayeredStore([MemoryStore(), Remote(far)], lease_seconds=0.4), builder=builder, memo=twc.DigestMemo(None)
        )
        for _ in range(2)
    ]
    model = tiny_model()
    race(2, lambda number: managers[number].get(model, profiles=PROFILE))
    assert builder.builds == 1


def test_unreachable_lease_store_does_not_stop_building(tmp_path: Path) -> None:
    """When the shared layer cannot answer about leases, this machine builds on its own."""

    def down(call: str, name: str) -> None:
        raise StoreError("unreachable", store="x")

    store = LayeredStore([LocalStore(tmp_path), Remote(MemoryStore(), down)])
    told = Heard()
    store.bind(Events([told]))
    lock = store.lock(KEY)
    assert lock is not None
    assert lock.try_acquire()
    lock.release()
    assert EventKind.STORE_ERROR in told.kinds


def test_giving_up_frees_the_machine(tmp_path: Path) -> None:
    """A process that stops waiting for the fleet lets the next process of its machine wait instead."""
    far = MemoryStore()
    holder = Lease(far, KEY)
    assert holder.try_acquire()
    first, second = (LayeredStore([LocalStore(tmp_path), Remote(far)]).lock(KEY) for _ in range(2))
    assert first is not None
    assert second is not None
    assert not first.try_acquire()
    assert first.owner().startswith("process")
    limits = singleflight.WaitLimits(0.05, 10, lambda waited, owner: None)
    with pytest.raises(twc.BuildTimeout):
        singleflight.acquire_or_find(first, lambda: None, limits)
    holder.release()
    found: list[bool] = []
    waiter = threading.Thread(target=lambda: found.append(bool(wait_for(second.try_acquire, 5))))
    waiter.start()
    waiter.join()
    assert found == [True]
    second.release()
