"""What the crash matrix promises: killed, cut off, full, forbidden; a reader sees nothing or a whole entry."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.stores.fleet import Remote
from tests.support import PROFILE, run_python, tiny_model

import trt_warmcache as twc
from trt_warmcache.errors import IntegrityError, StoreError, StoreReason
from trt_warmcache.eviction import EvictionRules, plan_eviction, scan
from trt_warmcache.keys import Kind
from trt_warmcache.stores import Layer, LayeredStore, LocalStore, MemoryStore, Store
from trt_warmcache.stores._base import blob_name
from trt_warmcache.testing import FakeBuilder
from trt_warmcache.testing._stores import sample_entry

ENTRY, PAYLOADS = sample_entry(1, bytes(range(256)) * 400)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def whole_or_nothing(store: Store) -> bool:
    """Whether the entry is there; an entry that is there and not whole fails the test."""
    found = store.manifest(Kind.ENGINE, ENTRY.key)
    if found is None:
        return False
    payload = store.fetch(found.blobs[0], rehash=True)
    payload.close()
    return True


# ---- SIGKILL ----------------------------------------------------------------------------------------------------

#: A process on one machine that dies at the n-th call of a primitive of one layer, before or after the call.
DIE = """
import os, signal, sys
from tests.stores.fleet import Remote
from tests.test_crashes import ENTRY, PAYLOADS, whole_or_nothing
from trt_warmcache.keys import Kind
from trt_warmcache.stores import LayeredStore, LocalStore
near, far, act, layer, call, number, moment = sys.argv[1:]
count = 0
def wrap(name, function):
    def deadly(*args, **kwargs):
        global count
        count += name == call
        last = name == call and count == int(number)
        if last and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return deadly
stores = {"near": LocalStore(near), "far": Remote(LocalStore(far))}
for name in ("put_blob", "land_blob", "create", "swap", "write", "delete", "read", "fetch"):
    setattr(stores[layer], name, wrap(name, getattr(stores[layer], name)))
store = LayeredStore([stores["near"], stores["far"]], lease_seconds=1)
if act == "publish":
    lock = store.lock(ENTRY.key)
    while not lock.try_acquire():
        pass
    store.publish(ENTRY, PAYLOADS)
    lock.release()
else:
    whole_or_nothing(store)
print("survived")
"""

POINTS = [
    (act, layer, call, moment)
    for act, layer, calls in (
        ("publish", "far", ("create", "put_blob", "delete")),
        ("publish", "near", ("put_blob", "create")),
        ("fill", "far", ("read", "fetch")),
        ("fill", "near", ("land_blob", "create")),
    )
    for call in calls
    for moment in ("before", "after")
]


@pytest.mark.parametrize(("act", "layer", "call", "moment"), POINTS)
def test_killed_between_layers(tmp_path: Path, act: str, layer: str, call: str, moment: str) -> None:
    """SIGKILL around every primitive of a layered publication or fill: no torn entry in any layer, and no one stuck."""
    near, far = tmp_path / "near", tmp_path / "far"
    if act == "fill":
        LocalStore(far).publish(ENTRY, PAYLOADS)
    arguments = [str(near), str(far), act, layer, call, "1", moment]
    done = subprocess.run([sys.executable, "-c", DIE, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    for store in (LocalStore(near), LocalStore(far)):
        whole_or_nothing(store)
    started = time.monotonic()
    layered = LayeredStore([LocalStore(near), Remote(LocalStore(far))], lease_seconds=1)
    lock = layered.lock(ENTRY.key)
    assert lock is not None
    while not lock.try_acquire():
        assert time.monotonic() - started < 1 + 1
        time.sleep(0.01)
    layered.publish(ENTRY, PAYLOADS)
    lock.release()
    assert whole_or_nothing(LocalStore(near))
    assert whole_or_nothing(LocalStore(far))
    assert whole_or_nothing(layered)


# ---- full, forbidden, read-only ---------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of its own, that small."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr!r}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@as_root
@pytest.mark.parametrize("free", [0, 4, 8, 96, 100, 104])
def test_disk_full_at_every_write(tmp_path: Path, free: int) -> None:
    """With so many kilobytes left, whichever write fails: a typed error or a whole entry, the old ones untouched."""
    old, payloads = sample_entry(9, b"an older plan")
    with small_disk(tmp_path / "disk", 400) as disk:
        store = LocalStore(disk)
        store.publish(old, payloads)
        usage = os.statvfs(disk)
        ballast = disk / "ballast"
        with ballast.open("wb") as file:
            file.write(bytes(max(0, usage.f_bavail * usage.f_frsize - free * 1024)))
        failure: StoreError | None = None
        try:
            store.publish(ENTRY, PAYLOADS)
        except StoreError as error:
            failure = error
        assert whole_or_nothing(store) == (failure is None)
        assert failure is None or (failure.reason is StoreReason.FULL and "bytes free" in failure.message)
        assert (failure is None) == (free >= 104)
        assert store.manifest(Kind.ENGINE, old.key) == old
        store.fetch(old.blobs[0], rehash=True).close()
        ballast.unlink()
        store.publish(ENTRY, PAYLOADS)
        assert whole_or_nothing(store)


@as_root
def test_full_near_layer(tmp_path: Path) -> None:
    """A near disk that is full: the entry lands in the far layer, is served from there, and nothing breaks."""
    with small_disk(tmp_path / "disk", 40) as disk:
        far = MemoryStore()
        store = LayeredStore([LocalStore(disk), Remote(far)])
        store.publish(ENTRY, PAYLOADS)
        assert whole_or_nothing(far)
        assert whole_or_nothing(store)
        assert store.counters()[0].errors["full"] >= 1


EFBIG = """
import resource, signal, sys
from tests.test_crashes import ENTRY, PAYLOADS, whole_or_nothing
from trt_warmcache.errors import StoreError
from trt_warmcache.stores import LocalStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    LocalStore(sys.argv[1]).publish(ENTRY, PAYLOADS)
    print("stored")
except StoreError as error:
    print(error.reason.value)
"""


@pytest.mark.parametrize("limit", [0, 1, 100, 50_000, ENTRY.size - 1, ENTRY.size])
def test_file_size_limit(tmp_path: Path, limit: int) -> None:
    """Writes that stop after exactly so many bytes: a typed error and no entry, or a whole one."""
    outcome = run_python(EFBIG, tmp_path / "s", limit).strip()
    assert outcome == ("full" if limit < ENTRY.size else "stored")
    assert whole_or_nothing(LocalStore(tmp_path / "s")) == (outcome == "stored")


@as_root
def test_read_only_file_system(tmp_path: Path) -> None:
    """On a file system mounted read-only hits are hits, and a write says that it is denied."""
    with small_disk(tmp_path / "disk", 400) as disk:
        LocalStore(disk).publish(ENTRY, PAYLOADS)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        store = LocalStore(disk)
        assert not store.capabilities.writable
        assert whole_or_nothing(store)
        with pytest.raises(StoreError) as caught:
            store.publish(*sample_entry(2))
        assert caught.value.reason is StoreReason.DENIED
        assert caught.value.__cause__ is not None
        assert getattr(caught.value.__cause__, "errno", None) == errno.EROFS


UNPRIVILEGED = """
import json, os, sys
import filelock
from tests.test_crashes import ENTRY, PAYLOADS, whole_or_nothing
from trt_warmcache.errors import StoreError
from trt_warmcache.stores import LayeredStore, LocalStore, MemoryStore
from trt_warmcache.testing._stores import sample_entry
os.setgid(65534); os.setuid(65534)  # after the imports: the interpreter may lie where only root can read
store = LocalStore(sys.argv[1])
found = {"writable": store.capabilities.writable, "hit": None, "write": None, "layered": None}
try:
    found["hit"] = whole_or_nothing(store)
except StoreError as error:
    found["hit"] = error.reason.value
try:
    store.publish(*sample_entry(2))
except StoreError as error:
    found["write"] = error.reason.value
try:
    found["layered"] = whole_or_nothing(LayeredStore([store, MemoryStore()]))
except StoreError as error:
    found["layered"] = error.reason.value
print(json.dumps(found))
"""


@as_root
@pytest.mark.parametrize(
    ("mode", "hit", "layered"), [(0o555, True, True), (0o000, "denied", False), (0o111, True, True)]
)
def test_permissions(mode: int, hit: Any, layered: Any) -> None:
    """Without the right to write: hits. Without the right to look: denied, which is no miss; other layers still serve."""
    root = Path("/var/tmp") / f"twc-{os.getpid()}-{mode}"
    try:
        LocalStore(root).publish(ENTRY, PAYLOADS)
        root.chmod(0o755)
        (root / "trtwc-1").chmod(mode)
        found = json.loads(run_python(UNPRIVILEGED, root))
        assert found == {"writable": False, "hit": hit, "write": "denied", "layered": layered}
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)


# ---- remote answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", list(StoreReason))
@pytest.mark.parametrize("call", ["read", "fetch", "put_blob", "create"])
def test_remote_trouble_never_stops_a_request(tmp_path: Path, reason: StoreReason, call: str) -> None:
    """A shared layer that answers any call with any kind of error: the engine is had, kept near, and counted as such."""

    def refuse(called: str, name: str) -> None:
        if called == call:
            raise StoreError(f"{reason}", reason=reason, store="bucket")

    store = LayeredStore([LocalStore(tmp_path), Remote(MemoryStore(), refuse)])
    with twc.EngineManager(store, builder=FakeBuilder(), memo=twc.DigestMemo(None)) as manager:
        engine = manager.get(tiny_model(), profiles=PROFILE)
        assert engine.outcome is twc.Outcome.BUILT
        assert engine.stored
        assert manager.get(tiny_model(), profiles=PROFILE).outcome is twc.Outcome.HIT
    counters = store.counters()[1]
    if call != "fetch":  # nothing had to be fetched
        assert counters.errors[str(reason)] >= 1


@pytest.mark.parametrize("damage", ["short", "long", "flipped", "empty", "gone"])
def test_remote_damage_is_rebuilt(tmp_path: Path, damage: str) -> None:
    """Whatever a shared layer returns in place of a payload, it is not served; the engine is built anew and replaces it."""
    far = MemoryStore()
    with twc.EngineManager(Remote(far), builder=FakeBuilder(), memo=twc.DigestMemo(None)) as manager:
        ref = manager.get(tiny_model(), profiles=PROFILE).manifest.blobs[0]
    name = blob_name(ref)
    whole = far.read(name, limit=10**6) or b""
    bad = {"short": whole[:-1], "long": whole + b"x", "flipped": bytes([whole[0] ^ 1]) + whole[1:], "empty": b""}
    far.delete(name) if damage == "gone" else far.write(name, bad[damage])
    store = LayeredStore([LocalStore(tmp_path), Remote(far)])
    with twc.EngineManager(store, builder=FakeBuilder(), memo=twc.DigestMemo(None)) as manager:
        engine = manager.get(tiny_model(), profiles=PROFILE)
        assert engine.outcome is twc.Outcome.BUILT
        assert bytes(engine.plan) == whole
    assert far.read(name, limit=10**6) == whole


def test_lost_answer_of_a_publication(tmp_path: Path) -> None:
    """A manifest that arrived although the answer was lost, and whose repeat is refused: it is the one in force."""

    class Lossy(Remote):
        def create(self, name: str, data: Any) -> bool:
            super().create(name, data)
            return False

    store = LayeredStore([LocalStore(tmp_path), Lossy(MemoryStore())])
    assert store.publish(ENTRY, PAYLOADS) == ENTRY
    assert whole_or_nothing(LocalStore(tmp_path))


def test_gone_between_manifest_and_blob(tmp_path: Path) -> None:
    """Housekeeping that takes an entry away between a reader's two looks: a miss and a rebuild, not an error."""
    far = LocalStore(tmp_path / "far")
    with twc.EngineManager(far, builder=FakeBuilder(), memo=twc.DigestMemo(None)) as manager:
        manager.get(tiny_model(), profiles=PROFILE)

    def sweep(call: str, name: str) -> None:
        if call == "fetch":
            watched.before = None
            plan_eviction(scan(far), EvictionRules(max_bytes=0)).execute(far)

    watched = Remote(far, sweep)
    with twc.EngineManager(watched, builder=FakeBuilder(), memo=twc.DigestMemo(None)) as manager:
        assert manager.get(tiny_model(), profiles=PROFILE).outcome is twc.Outcome.BUILT
    assert len(list(far.entries(Kind.ENGINE))) == 1


def test_fork_with_layers(tmp_path: Path) -> None:
    """A layered store used before a fork works in the child, while the parent publishes in the background."""
    far = LocalStore(tmp_path / "far")
    store = LayeredStore([LocalStore(tmp_path / "near"), Layer(Remote(far), deadline=5)], "background")  # type: ignore[arg-type]
    store.publish(ENTRY, PAYLOADS)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            other, payloads = sample_entry(2)
            store.publish(other, payloads)
            code = 0 if whole_or_nothing(store) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    store.close()
    assert whole_or_nothing(far)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_fork_after_hashing_on_all_cores(tmp_path: Path) -> None:
    """A manager that was used before a fork hashes and builds in the child: the hasher's threads stayed behind."""
    manager = twc.EngineManager(tmp_path, builder=FakeBuilder(size=3_000_000), memo=twc.DigestMemo(None))
    assert manager.get(tiny_model(), profiles=PROFILE).outcome is twc.Outcome.BUILT
    child = os.fork()
    if child == 0:
        code = 1
        signal.alarm(30)  # a hang ends the child, and so the test
        try:
            built = manager.get(tiny_model(), profiles=PROFILE, recipe="child").outcome is twc.Outcome.BUILT
            with twc.EngineManager(tmp_path, builder=FakeBuilder(), memo=twc.DigestMemo(None)) as other:
                found = other.get(tiny_model(), profiles=PROFILE).outcome is twc.Outcome.HIT
            code = 0 if built and found else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    manager.close()


def test_damage_is_an_error_where_nothing_can_heal(tmp_path: Path) -> None:
    """A single store whose bytes are wrong says so; it never returns them."""
    store = LocalStore(tmp_path)
    store.publish(ENTRY, PAYLOADS)
    (tmp_path / "trtwc-1" / blob_name(ENTRY.blobs[0])).write_bytes(b"x" * ENTRY.size)
    with pytest.raises(IntegrityError):
        whole_or_nothing(store)


# ---- the matrix itself ------------------------------------------------------------------------------------------


def test_every_row_names_a_test_that_exists() -> None:
    """The published matrix promises nothing without a test."""
    root = Path(__file__).parents[1]
    rows = [
        line
        for line in (root / "docs/reference/crash-matrix.md").read_text("utf-8").splitlines()
        if line.startswith("| ") and not line.startswith(("| What happens", "| ---"))
    ]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, test in named:
            source = (root / file).read_text("utf-8")
            assert re.search(rf"^(?:    )?(?:def {test}\(|{test} = )", source, re.MULTILINE), f"{file}::{test}"
