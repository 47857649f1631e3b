"""The local folder store: the public conformance suite, and what only a folder can do or suffer."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support import run_python

from trt_warmcache import DigestMemo, IntegrityError, LocalStore, StoreError, StoreReason
from trt_warmcache.keys import Kind
from trt_warmcache.stores import Store
from trt_warmcache.stores._base import blob_name, manifest_name
from trt_warmcache.stores._local import LockUnavailable
from trt_warmcache.testing import StoreConformance
from trt_warmcache.testing._stores import sample_entry

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root (geteuid() != 0)")


class TestConformance(StoreConformance):
    """The public suite over a folder."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.root = tmp_path / "store"

    def make_store(self) -> Store:
        return LocalStore(self.root)

    def raw_get(self, name: str) -> bytes | None:
        path = self.root / "trtwc-1" / name
        return path.read_bytes() if path.exists() else None

    def raw_put(self, name: str, data: bytes) -> None:
        path = self.root / "trtwc-1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class TestConformanceAfterCopy(TestConformance):
    """The same over a tree reached through a symbolic link, as mounted volumes and model hubs have it."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        self.root = tmp_path / "link"


def test_plan_is_mapped_from_its_file(tmp_path: Path) -> None:
    """A fetched blob is a map of the very file in the store, not a copy."""
    store = LocalStore(tmp_path)
    manifest, payloads = sample_entry(1, b"x" * 100_000)
    store.publish(manifest, payloads)
    payload = store.fetch(manifest.blob("plan"))
    assert str(tmp_path / "trtwc-1" / blob_name(manifest.blob("plan"))) in Path("/proc/self/maps").read_text()
    payload.close()


def test_blob_verified_once_per_inode_and_time(tmp_path: Path) -> None:
    """With a memo, a blob is hashed once; a file of another inode or time stamp is hashed again."""
    store = LocalStore(tmp_path, memo=DigestMemo(None))
    manifest, payloads = sample_entry(1)
    store.publish(manifest, payloads)
    ref = manifest.blob("plan")
    time.sleep(0.05)  # past the clock's granularity, within which no file is trusted
    assert store.fetch(ref).verified_now
    assert not store.fetch(ref).verified_now
    assert store.fetch(ref, rehash=True).verified_now
    store.put_blob(ref, payloads["plan"])  # same bytes, new inode
    time.sleep(0.05)
    assert store.fetch(ref).verified_now


def test_flip_with_restored_mtime_is_found(tmp_path: Path) -> None:
    """A bit flipped in place is found although size and mtime say that nothing changed."""
    store = LocalStore(tmp_path, memo=DigestMemo(None))
    manifest, payloads = sample_entry(1)
    store.publish(manifest, payloads)
    time.sleep(0.05)
    store.fetch(manifest.blob("plan"))
    path = tmp_path / "trtwc-1" / blob_name(manifest.blob("plan"))
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"A")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(IntegrityError, match="damaged"):
        store.fetch(manifest.blob("plan"))


def test_no_temporary_file_stays(tmp_path: Path) -> None:
    """Publishing leaves the manifest and the blob, nothing else."""
    store = LocalStore(tmp_path)
    manifest, payloads = sample_entry(1)
    store.publish(manifest, payloads)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {
        "CACHEDIR.TAG",
        f"trtwc-1/{manifest_name(Kind.ENGINE, manifest.key)}",
        f"trtwc-1/{blob_name(manifest.blob('plan'))}",
    }


def test_temporary_names_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with the same pid on hosts of the same name, random sources seeded alike, still publish both."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr("socket.gethostname", lambda: "same")
    import random

    store = LocalStore(tmp_path)
    names = []
    original = os.open

    def spy(path: Any, *args: Any, **kwargs: Any) -> int:
        if ".tmp-" in str(path):
            names.append(str(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", spy)
    for number in (1, 2):
        random.seed(0)
        store.publish(*sample_entry(number))
    assert len(names) == len(set(names)) == 4


def test_read_only_folder(tmp_path: Path) -> None:
    """A folder without write permission is read as ever; writing is refused as denied and changes nothing."""
    store = LocalStore(tmp_path)
    manifest, payloads = sample_entry(1)
    store.publish(manifest, payloads)
    code = """
import os, sys
root, key = sys.argv[1:]
from trt_warmcache import LocalStore, StoreError
from trt_warmcache.keys import Kind
from trt_warmcache.testing._stores import sample_entry
if os.geteuid() == 0:  # root may write anywhere; nobody may not, nor may it read where Python may be installed
    os.setgid(65534); os.setuid(65534)
store = LocalStore(root)
manifest = store.manifest(Kind.ENGINE, key)
assert bytes(store.fetch(manifest.blob("plan")).view) == b"a plan"
assert not store.capabilities.writable and not store.capabilities.deletable
try:
    store.publish(*sample_entry(2))
except StoreError as error:
    print(error.reason)
"""
    for path in [*tmp_path.rglob("*"), tmp_path]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), manifest.key], capture_output=True, text=True, check=False
    )
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "denied"


def test_opened_read_only(tmp_path: Path) -> None:
    """A store opened read-only makes no attempt to write, delete or lock."""
    LocalStore(tmp_path).publish(*sample_entry(1))
    store = LocalStore(tmp_path, read_only=True)
    assert not store.capabilities.writable
    assert store.lock("x") is None
    for attempt in (lambda: store.write("engines/a", b""), lambda: store.delete("engines/a")):
        with pytest.raises(StoreError) as caught:
            attempt()
        assert caught.value.reason is StoreReason.DENIED


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOSPC, StoreReason.FULL),
        (errno.EDQUOT, StoreReason.FULL),
        (errno.EACCES, StoreReason.DENIED),
        (errno.EROFS, StoreReason.DENIED),
        (errno.ETIMEDOUT, StoreReason.TIMEOUT),
        (errno.EIO, StoreReason.UNAVAILABLE),
    ],
)
@pytest.mark.parametrize("step", ["posix_fallocate", "pwrite", "fsync", "link"])
def test_failing_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: StoreReason, step: str
) -> None:
    """Whatever fails at whatever step of publishing: a typed error with errno and cause, and no trace of the entry."""
    store = LocalStore(tmp_path)
    old, old_payloads = sample_entry(1)
    store.publish(old, old_payloads)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    manifest, payloads = sample_entry(2)
    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(StoreError) as caught:
            store.publish(manifest, payloads)
    assert caught.value.reason is reason
    assert isinstance(caught.value.__cause__, OSError)
    assert errno.errorcode[code] in caught.value.message
    assert store.manifest(Kind.ENGINE, manifest.key) is None
    assert store.manifest(Kind.ENGINE, old.key) == old
    assert not list(tmp_path.rglob(".tmp*"))
    assert store.publish(manifest, payloads) == manifest


@as_root
def test_full_disk(tmp_path: Path) -> None:
    """A full file system: an error that names the space needed and the space free, and nothing half-written."""
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr!r}")
    try:
        store = LocalStore(mount)
        small, payloads = sample_entry(1)
        store.publish(small, payloads)
        with pytest.raises(StoreError) as caught:
            store.publish(*sample_entry(2, bytes(2_000_000)))
        assert caught.value.reason is StoreReason.FULL
        assert "2000000 bytes" in caught.value.message
        assert "bytes free" in caught.value.message
        assert [entry.digest for entry in store.entries(Kind.ENGINE)] == [small.key]
        assert not list(mount.rglob(".tmp*"))
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without hard links publication still is atomic and the first entry still stays."""

    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", no_links)
    store = LocalStore(tmp_path)
    first, payloads = sample_entry(1, created=1.0)
    second, _ = sample_entry(1, created=2.0)
    assert store.publish(first, payloads) == first
    assert store.publish(second, payloads) == first


def test_failed_clean_up_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary file that cannot be removed after publication does not turn success into an error."""

    def stuck(*_: Any, **__: Any) -> None:
        raise OSError(errno.EBUSY, "busy")

    store = LocalStore(tmp_path)
    manifest, payloads = sample_entry(1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", stuck)
        assert store.publish(manifest, payloads) == manifest
    assert store.manifest(Kind.ENGINE, manifest.key) == manifest


def test_denied_read_is_no_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that may not be read is an error of reason denied, not a miss."""
    store = LocalStore(tmp_path)
    manifest, payloads = sample_entry(1)
    store.publish(manifest, payloads)
    original = os.open

    def denied(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(".json"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(StoreError) as caught:
        store.manifest(Kind.ENGINE, manifest.key)
    assert caught.value.reason is StoreReason.DENIED


def test_stale_handle_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file replaced while it was being opened (ESTALE) is opened once more."""
    store = LocalStore(tmp_path)
    manifest, payloads = sample_entry(1)
    store.publish(manifest, payloads)
    original, stale = os.open, [True]

    def once(path: Any, *args: Any, **kwargs: Any) -> int:
        if stale and str(path).endswith(".json"):
            stale.clear()
            raise OSError(errno.ESTALE, "Stale file handle")
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", once)
    assert store.manifest(Kind.ENGINE, manifest.key) == manifest
    assert not stale


def test_things_in_the_way(tmp_path: Path) -> None:
    """A folder or FIFO under an entry's name is no entry and hangs nobody; publishing over it fails with a reason."""
    store = LocalStore(tmp_path)
    manifest, payloads = sample_entry(1)
    path = tmp_path / "trtwc-1" / manifest_name(Kind.ENGINE, manifest.key)
    path.mkdir(parents=True)
    assert store.manifest(Kind.ENGINE, manifest.key) is None
    assert list(store.entries(Kind.ENGINE)) == []
    with pytest.raises(StoreError, match="occupies its name"):
        store.publish(manifest, payloads)
    path.rmdir()
    os.mkfifo(path)
    assert store.manifest(Kind.ENGINE, manifest.key) is None


def test_root_is_a_file(tmp_path: Path) -> None:
    """A root that is a file is an error, not an empty store."""
    (tmp_path / "file").write_text("x")
    store = LocalStore(tmp_path / "file")
    with pytest.raises(StoreError):
        store.manifest(Kind.ENGINE, "0" * 64)
    with pytest.raises(StoreError):
        store.publish(*sample_entry(1))


@pytest.mark.parametrize("name", ["缓存", "café crème", "with space", "🚀", "100%", "#hash", "a" * 180])
def test_awkward_roots(tmp_path: Path, name: str) -> None:
    """Roots with any characters work, and no path inside is longer than the root plus 90 characters."""
    root = tmp_path / name
    store = LocalStore(root)
    manifest, payloads = sample_entry(1)
    store.publish(manifest, payloads)
    assert bytes(store.fetch(manifest.blob("plan")).view) == payloads["plan"]
    assert all(len(str(path)) <= len(str(root)) + 90 for path in root.rglob("*"))
    assert all(str(path.relative_to(root)).isascii() for path in root.rglob("*"))


def test_no_kernel_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks says so with a type of its own, naming path and reason."""
    import fcntl

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock = LocalStore(tmp_path).lock("k")
    assert lock is not None
    with pytest.raises(LockUnavailable, match="No locks available"):
        lock.try_acquire()


def test_lock_names_its_owner(tmp_path: Path) -> None:
    """Whoever waits can be told which process holds the lock."""
    first, second = LocalStore(tmp_path).lock("k"), LocalStore(tmp_path).lock("k")
    assert first is not None
    assert second is not None
    assert first.try_acquire()
    assert f"process {os.getpid()}" in second.owner()
    first.release()


def test_lock_dies_with_its_owner(tmp_path: Path) -> None:
    """SIGKILL of the holder frees the lock at once; nothing left on disk blocks the next."""
    code = f"""
import sys, time
from trt_warmcache import LocalStore
lock = LocalStore({str(tmp_path)!r}).lock("k")
assert lock.try_acquire()
print("held", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        lock = LocalStore(tmp_path).lock("k")
        assert lock is not None
        assert not lock.try_acquire()
        holder.kill()
        holder.wait()
        assert lock.try_acquire()
        lock.release()


def test_swap_keeps_every_update(tmp_path: Path) -> None:
    """Counting up in one object from eight threads with swap loses no count."""
    store = LocalStore(tmp_path)
    store.write("timing/ab/n", b"0")

    def count() -> None:
        for _ in range(10):
            while True:
                seen = store.read("timing/ab/n", limit=100) or b""
                if store.swap("timing/ab/n", b"%d" % (int(seen) + 1), expected=seen):
                    break

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read("timing/ab/n", limit=100) == b"80"


def test_readers_against_writer(tmp_path: Path) -> None:
    """One writer removes and publishes, readers read: no failed read, no wrong byte, no lost entry."""
    store = LocalStore(tmp_path)
    manifest, payloads = sample_entry(1, bytes(range(256)) * 400)
    stop = threading.Event()
    reads, errors = [], []

    def read() -> None:
        mine = LocalStore(tmp_path)
        while not stop.is_set():
            try:
                found = mine.manifest(Kind.ENGINE, manifest.key)
                if found is not None:
                    payload = mine.fetch(found.blob("plan"))
                    assert payload.view == payloads["plan"]
                    payload.close()
                    reads.append(1)
            except BaseException as error:  # noqa: BLE001  carried to the test's thread
                errors.append(error)
                return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        store.publish(manifest, payloads)
        time.sleep(0.01)
        store.remove(Kind.ENGINE, manifest.key)
    store.publish(manifest, payloads)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert reads
    assert store.manifest(Kind.ENGINE, manifest.key) == manifest


#: A writer that is killed while a blob is on its way into its file.
HALF = """
import os, signal, sys
from trt_warmcache.manifest import describe_blob
from trt_warmcache.stores import LocalStore
def half(write):
    write(b"half", 0)
    os.kill(os.getpid(), signal.SIGKILL)
LocalStore(sys.argv[1]).land_blob(describe_blob("plan", b"half and half"), half)
"""


def test_leftovers_of_killed_writers_are_swept(tmp_path: Path) -> None:
    """The next writer's start removes what killed ones left, once it is surely old; a reader removes nothing."""
    for _ in range(5):
        with pytest.raises(AssertionError):
            run_python(HALF, tmp_path)
    left = sorted(tmp_path.rglob(".tmp-*"))
    assert len(left) == 5
    for path in left[:3]:
        os.utime(path, (time.time() - 7200,) * 2)
    store = LocalStore(tmp_path)
    assert store.manifest(Kind.ENGINE, "0" * 64) is None
    list(store.list("engines/"))
    assert sorted(tmp_path.rglob(".tmp-*")) == left
    store.publish(*sample_entry(1))
    assert sorted(tmp_path.rglob(".tmp-*")) == left[3:]
