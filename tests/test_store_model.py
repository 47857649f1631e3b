"""A model of the store under everything that can happen to it: a reader sees nothing, or a verified entry.

Two machines, each with a folder of its own, share one store. Hypothesis builds, publishes, kills, evicts, corrupts,
cuts the network and moves clocks in any order, and after each step every reader is checked.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.stores.fleet import Remote

from trt_warmcache.errors import IntegrityError, StoreError, StoreReason
from trt_warmcache.eviction import EvictionRules, plan_eviction, scan
from trt_warmcache.keys import Kind
from trt_warmcache.lease import Lease
from trt_warmcache.manifest import Manifest
from trt_warmcache.stores import LayeredStore, LocalStore, MemoryStore
from trt_warmcache.stores._base import blob_name, manifest_name
from trt_warmcache.testing._stores import sample_entry

KEYS = st.integers(0, 2)
HOSTS = st.integers(0, 1)
VERSIONS = st.integers(0, 2)


class Killed(BaseException):
    """The process is gone: nothing after this runs."""


class Network:
    """The way of one machine to the shared store: up, down, or about to lose its user."""

    def __init__(self) -> None:
        self.up = True
        self.dies_at: str | None = None

    def __call__(self, call: str, name: str) -> None:
        if not self.up:
            raise StoreError("unreachable", reason=StoreReason.TIMEOUT, store="shared")
        if self.dies_at == call:
            self.dies_at = None
            raise Killed


class StoreModel(RuleBasedStateMachine):
    """What may happen, and what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="twc-model-"))
        self.now = 0.0

    @initialize()
    def machines(self) -> None:
        self.far = MemoryStore()
        self.networks = [Network(), Network()]
        self.start(0)
        self.start(1)
        #: Every plan that was ever published under a key; only one of these may be read.
        self.plans: dict[str, set[bytes]] = {}
        self.leases: dict[tuple[int, int], Lease] = {}
        self.corrupted: set[str] = set()

    def start(self, host: int) -> None:
        """A new process on a machine, with nothing remembered."""
        near = LocalStore(self.root / str(host))
        if not hasattr(self, "stores"):
            self.stores: list[LayeredStore] = []
        store = LayeredStore([near, Remote(self.far, self.networks[host])], cooldown=10, clock=lambda: self.now)
        self.stores[host : host + 1] = [store]

    def entry(self, key: int, version: int) -> tuple[Manifest, dict[str, bytes]]:
        """One of several different engines that builders may make for a key."""
        manifest, payloads = sample_entry(key, b"key %d built %d" % (key, version) * 50, created=float(version))
        self.plans.setdefault(manifest.key, set()).add(payloads["plan"])
        return manifest, payloads

    # ---- what may happen ----------------------------------------------------------------------------------------

    @rule(host=HOSTS, key=KEYS, version=VERSIONS)
    def build_and_publish(self, host: int, key: int, version: int) -> None:
        manifest, payloads = self.entry(key, version)
        try:
            winner = self.stores[host].publish(manifest, payloads)
        except (StoreError, IntegrityError):
            return
        assert winner.key == manifest.key

    @rule(host=HOSTS, key=KEYS, version=VERSIONS, call=st.sampled_from(["put_blob", "create", "read"]))
    def killed_while_publishing(self, host: int, key: int, version: int, call: str) -> None:
        manifest, payloads = self.entry(key, version)
        self.networks[host].dies_at = call
        with suppress(Killed, StoreError, IntegrityError):
            self.stores[host].publish(manifest, payloads)
        self.networks[host].dies_at = None
        self.start(host)

    @rule(host=HOSTS, key=KEYS)
    def request(self, host: int, key: int) -> None:
        self.read(self.stores[host], sample_entry(key)[0].key)

    @rule(host=HOSTS, key=KEYS)
    def take_a_lease(self, host: int, key: int) -> None:
        if (host, key) not in self.leases and self.networks[host].up:
            lease = Lease(Remote(self.far, self.networks[host]), f"{key:064x}", clock=lambda: self.now)
            if lease.try_acquire():
                # The holder may be stopped at any time, so no thread keeps it alive behind the model's back.
                lease._stop.set()
                self.leases[host, key] = lease

    @rule(host=HOSTS, key=KEYS)
    def release_a_lease(self, host: int, key: int) -> None:
        lease = self.leases.pop((host, key), None)
        if lease is not None:
            lease.release()

    @rule(max_bytes=st.integers(0, 2000), host=HOSTS)
    def evict(self, max_bytes: int, host: int) -> None:
        store = self.far if host else LocalStore(self.root / "0")
        plan_eviction(scan(store), EvictionRules(max_bytes=max_bytes, grace_seconds=0)).execute(store)

    @rule(
        key=KEYS,
        version=VERSIONS,
        where=st.sampled_from(["0", "1", "far"]),
        data=st.binary(max_size=40),
        blob=st.booleans(),
    )
    def corrupt(self, key: int, version: int, where: str, data: bytes, blob: bool) -> None:
        manifest, _ = sample_entry(key, b"key %d built %d" % (key, version) * 50, created=float(version))
        name = blob_name(manifest.blobs[0]) if blob else manifest_name(Kind.ENGINE, manifest.key)
        if where == "far":
            if self.far.read(name, limit=0) is not None:
                self.far.write(name, data)
        else:
            path = self.root / where / "trtwc-1" / name
            if path.exists():
                path.write_bytes(data)

    @rule(host=HOSTS)
    def cut_the_network(self, host: int) -> None:
        self.networks[host].up = False

    @rule(host=HOSTS)
    def mend_the_network(self, host: int) -> None:
        self.networks[host].up = True

    @rule(seconds=st.sampled_from([0.5, 9.0, 31.0, 86400.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(host=HOSTS)
    def restart(self, host: int) -> None:
        self.start(host)

    # ---- what must hold -----------------------------------------------------------------------------------------

    def read(self, store: LayeredStore, key: str) -> None:
        """The two steps of a hit: nothing, a typed error, or bytes that somebody published under this key."""
        try:
            manifest = store.manifest(Kind.ENGINE, key)
            if manifest is None:
                return
            payload = store.fetch(manifest.blobs[0])
        except (StoreError, IntegrityError):
            return
        plan = bytes(payload.view)
        payload.close()
        assert plan in self.plans[key]

    @invariant()
    def readers_see_nothing_or_the_truth(self) -> None:
        for host in (0, 1):
            for key in range(3):
                self.read(LayeredStore([LocalStore(self.root / str(host)), self.far]), sample_entry(key)[0].key)

    @precondition(lambda self: all(network.up for network in self.networks))
    @rule(key=KEYS, host=HOSTS)
    def a_builder_always_gets_through(self, key: int, host: int) -> None:
        """With the network up, build, quarantine and publish end with a whole entry on this machine, whatever was before."""
        self.now += 11  # past any cool-down
        manifest, payloads = self.entry(key, 0)
        store = self.stores[host]
        for _ in range(3):
            try:
                found = store.manifest(Kind.ENGINE, manifest.key)
                if found is not None:
                    store.fetch(found.blobs[0]).close()
                    return
            except IntegrityError as error:
                store.quarantine(Kind.ENGINE, manifest.key, error)
            store.publish(manifest, payloads)
        raise AssertionError("three builds, and still no entry that can be read")

    def teardown(self) -> None:
        for lease in getattr(self, "leases", {}).values():
            lease._stop.set()
        shutil.rmtree(self.root, ignore_errors=True)


TestStoreModel = StoreModel.TestCase
TestStoreModel.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
