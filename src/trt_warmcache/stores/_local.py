"""A store in a folder of this machine: payloads are mapped, publication is atomic, a hit writes nothing.

What this module owes to the failures of other caches: it never goes through fsspec's local file system, whose
``mode="create"`` lets several racing writers win, nor through fsspec's download caches, which hand out torn files.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_warmcache import manifest as manifests
from trt_warmcache.errors import ConfigError, IntegrityError, StoreError
from trt_warmcache.manifest import BlobRef
from trt_warmcache.memo import DigestMemo
from trt_warmcache.stores import _packing
from trt_warmcache.stores._base import (
    LAYOUT,
    Lock,
    LockScope,
    ObjectInfo,
    Payload,
    Store,
    StoreCapabilities,
    WritePiece,
    blob_name,
    missing,
    truncated,
    verify_view,
)
from trt_warmcache.stores._errors import from_os_error
from trt_warmcache.stores._landing import Landing, map_file

if TYPE_CHECKING:
    from filelock import BaseFileLock

__all__ = ["LocalStore"]

log = logging.getLogger("trt_warmcache")

#: Cache folders carry this mark so that backup and indexing tools can skip them (https://bford.info/cachedir/).
_CACHEDIR_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# Engines kept by trt_warmcache; safe to delete.\n"

#: File systems without hard links answer with one of these.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})

#: Lock services that are not there answer with one of these (NFS without lockd, some FUSE file systems).
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

#: A temporary file that nothing was written to for so long belongs to no living writer.
_ABANDONED_SECONDS = 3600

#: An open file that another NFS client replaced; opening it again reaches the new one.
_STALE = errno.ESTALE


class LocalStore(Store):
    """Entries in a folder.

    Args:
        root: The folder; created on the first write. ``~`` is expanded.
        memo: Remembers which blob files were verified already; None verifies at every fetch.
        read_only: Never try to write, delete or lock.
    """

    local = True

    def __init__(
        self, root: str | os.PathLike[str], *, memo: DigestMemo | None = None, read_only: bool = False
    ) -> None:
        text = os.fspath(root)
        if not text or "\0" in text:
            raise ConfigError(f"A store's folder must be a path, not {text!r}.")
        self.root = Path(text).expanduser().absolute()
        self.url = str(self.root)
        self._base = self.root / LAYOUT
        self._prefix = f"{self._base}/"  # joining text is several times faster than joining paths, and a hit joins two
        self._memo = memo if memo is not None else DigestMemo(None)
        self._read_only = read_only
        self._swept = False

    @property
    def capabilities(self) -> StoreCapabilities:
        writable = not self._read_only and _writable(self._base)
        return StoreCapabilities(
            writable=writable,
            deletable=writable,
            exclusive_create=True,
            mappable=True,
            lock_scope=LockScope.HOST if writable else LockScope.NONE,
        )

    # ---- reading ----------------------------------------------------------------------------------------------

    def read(self, name: str, *, limit: int) -> bytes | None:
        opened = self._open(name)
        if opened is None:
            return None
        fd, size = opened
        try:
            data = b""
            while len(data) <= limit and (part := os.read(fd, min(size + 1, limit + 1) - len(data))):
                data += part
            return data
        except OSError as error:
            raise self._error(error, f"read {name}") from error
        finally:
            os.close(fd)

    def fetch(self, ref: BlobRef, *, rehash: bool = False) -> Payload:
        plain = manifests.unpacked(ref)
        name = blob_name(plain)
        opened = self._open(name)
        if opened is None:
            return self._fetch_packed(ref)
        ref = plain
        fd, size = opened
        try:
            if size != ref.size:
                raise truncated(ref, size, self.url)
            # Verified and mapped from one open file: what was checked is what is handed out, whatever happens to
            # the name meanwhile.
            payload = map_file(fd, size, verified_now=False)
            _mark_in_use(fd)
            status = os.fstat(fd)
        except OSError as error:
            raise self._error(error, f"map {name}") from error
        finally:
            os.close(fd)
        path = self._prefix + name
        if rehash or self._memo.get(path, status) != ref.digest:
            started = self._memo.clock()
            try:
                verify_view(ref, payload.view, self.url)
            except BaseException:
                payload.close()
                raise
            self._memo.put(path, status, ref.digest, started)
            payload.verified_now = True
        return payload

    def _fetch_packed(self, ref: BlobRef) -> Payload:
        """A blob in a tree that was copied from a store which packs; it costs memory and time that a plain one does not."""
        packed = self.read(blob_name(ref), limit=ref.stored_size) if ref.codec == _packing.CODEC else None
        if packed is None:
            raise missing(ref, self.url)
        try:
            view = memoryview(_packing.unpack(ref, packed))
        except _packing.PackedError as error:
            name = blob_name(ref)
            raise IntegrityError(f"{name} in {self.url} {error}.", name=name, reason="digest") from error
        verify_view(ref, view, self.url)
        return Payload(view)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        yield from self._walk(self._base / prefix, prefix.rstrip("/"))

    def in_use(self, ref: BlobRef) -> bool:
        opened = self._open(blob_name(ref))
        if opened is None:
            return False
        try:
            fcntl.flock(opened[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in {errno.EWOULDBLOCK, errno.EACCES}
        finally:
            os.close(opened[0])
        return False

    def temporaries(self) -> Iterator[ObjectInfo]:
        for folder, _, files in os.walk(self._base):
            for file in files:
                if file.startswith(".tmp-"):
                    path = Path(folder, file)
                    with suppress(OSError):  # finished meanwhile, or in a folder that is not ours to look into
                        status = path.stat()
                        yield ObjectInfo(path.relative_to(self._base).as_posix(), status.st_size, status.st_mtime)

    def _walk(self, folder: Path, name: str) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(folder) as scan:
                found = sorted(scan, key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._error(error, f"list {name or '/'}") from error
        for entry in found:
            if entry.name.startswith("."):
                continue  # temporary files of writers at work
            try:
                if entry.is_dir():
                    yield from self._walk(Path(entry.path), f"{name}/{entry.name}")
                elif entry.is_file():
                    status = entry.stat()
                    yield ObjectInfo(f"{name}/{entry.name}", status.st_size, status.st_mtime)
            except FileNotFoundError:
                continue  # deleted between the scan and the look
            except OSError as error:
                raise self._error(error, f"look at {name}/{entry.name}") from error

    def _open(self, name: str) -> tuple[int, int] | None:
        """Descriptor and size of a regular file, or None where there is none."""
        path = self._prefix + name
        for attempt in (1, 2):
            try:
                # O_NONBLOCK: a FIFO left under an entry's name must not hang the reader.
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno == _STALE and attempt == 1:
                    continue
                raise self._error(error, f"open {name}") from error
            break
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)  # a folder or device under an entry's name is no entry
            return None
        return fd, status.st_size

    # ---- writing ----------------------------------------------------------------------------------------------

    def write(self, name: str, data: Any) -> None:
        def publish(temporary: Path, path: Path) -> bool:
            temporary.replace(path)
            return True

        self._publish(name, data, publish)

    def create(self, name: str, data: Any) -> bool:
        return self._publish(name, data, _link)

    def delete(self, name: str) -> bool:
        self._refuse_if_read_only(f"delete {name}")
        try:
            (self._base / name).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._error(error, f"delete {name}") from error
        return True

    def land_blob(self, ref: BlobRef, fill: Callable[[WritePiece], None]) -> Payload:
        name = blob_name(manifests.unpacked(ref))
        with self._unfinished(name, ref.size) as (temporary, path):
            with Landing(_create(temporary), ref.size) as landing:
                fill(landing.write)
                # Without this a power cut may leave the right name, size and times over zeros.
                os.fsync(landing.fd)
                payload = landing.payload()
                _mark_in_use(landing.fd)
            try:
                temporary.replace(path)
                _sync_folder(path.parent)
            except BaseException:
                payload.close()
                raise
        return payload

    def _publish(self, name: str, data: Any, publish: Callable[[Path, Path], bool]) -> bool:
        view = memoryview(data).cast("B")
        with self._unfinished(name, view.nbytes) as (temporary, path):
            with Landing(_create(temporary), view.nbytes) as landing:
                landing.write(view, 0)
                os.fsync(landing.fd)
            published = publish(temporary, path)
            _sync_folder(path.parent)
            return published

    @contextmanager
    def _unfinished(self, name: str, size: int) -> Iterator[tuple[Path, Path]]:
        """A name for a temporary file, and its final one beside it. What still has the temporary name is removed."""
        self._refuse_if_read_only(f"write {name}")
        path = self._base / name
        temporary: Path | None = None
        self._sweep_once()
        try:
            self._make_folder(path.parent)
            temporary = path.parent / f".tmp-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(16)}"
            yield temporary, path
        except OSError as error:
            raise self._error(error, f"write {name}", needed=size) from error
        finally:
            if temporary is not None:
                # After a successful rename there is nothing left to remove; a failure to tidy up is no failure to
                # publish, and housekeeping sweeps what stays.
                try:
                    temporary.unlink(missing_ok=True)
                except OSError as error:
                    log.debug("could not remove %s: %s", temporary, error)

    def _sweep_once(self) -> None:
        """Remove what killed writers left behind, before the first write of this store object."""
        if self._swept:
            return
        self._swept = True
        now = time.time()
        for left in self.temporaries():
            if now - left.modified > _ABANDONED_SECONDS:
                with suppress(OSError):  # another process sweeps too, or it is not ours to remove
                    (self._base / left.name).unlink()
                    log.info("removed %s, which a writer left unfinished", left.name)

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        if not self._base.is_dir():
            self.root.mkdir(parents=True, exist_ok=True)
            tag = self.root / "CACHEDIR.TAG"
            if not tag.exists():
                with suppress(OSError):  # a courtesy to other tools, nothing depends on it
                    tag.write_bytes(_CACHEDIR_TAG)
        folder.mkdir(parents=True, exist_ok=True)

    def _refuse_if_read_only(self, doing: str) -> None:
        if self._read_only:
            raise from_os_error(OSError(errno.EROFS, "the store was opened read-only"), doing=doing, store=self.url)

    def _error(self, error: OSError, doing: str, *, needed: int | None = None) -> StoreError:
        facts = ""
        if needed is not None:
            facts = f"needed {needed} bytes"
            with suppress(OSError):
                facts += f", {shutil.disk_usage(_existing(self.root)).free} bytes free"
        return from_os_error(error, doing=doing, store=self.url, facts=facts)

    # ---- locking ----------------------------------------------------------------------------------------------

    def lock(self, name: str) -> Lock | None:
        return None if self._read_only else _FileLock(self._base / "locks" / f"{name}.lock", self)

    def swap(self, name: str, data: Any, *, expected: bytes) -> bool:
        # Two writers of one growing entry are kept apart by a kernel lock; it is held for one read and one write.
        guard = _FileLock(self._base / "locks" / f"swap-{name.replace('/', '-')}.lock", self)
        guard.acquire()
        try:
            return super().swap(name, data, expected=expected)
        finally:
            guard.release()


class _FileLock:
    """A kernel lock (flock): it dies with its owner, so no crash leaves it behind."""

    def __init__(self, path: Path, store: LocalStore) -> None:
        self._path = path
        self._store = store
        self._lock: BaseFileLock | None = None

    def try_acquire(self) -> bool:
        return self._acquire(blocking=False)

    def acquire(self) -> None:
        """Wait for the lock; only for holders that need it for moments."""
        self._acquire(blocking=True)

    def _acquire(self, *, blocking: bool) -> bool:
        from filelock import Timeout, UnixFileLock

        try:
            self._store._make_folder(self._path.parent)
            if self._lock is None:
                # fallback_to_soft=False: a lock file that outlives a killed owner would block everyone for ever.
                self._lock = UnixFileLock(
                    self._path, fallback_to_soft=False, thread_local=False, on_acquired=_record_owner, mode=0o666
                )
            self._lock.acquire(blocking=blocking, poll_interval=0.005)
        except Timeout:
            return False
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise LockUnavailable(str(self._path), error) from error
            raise self._store._error(error, f"lock {self._path.name}") from error
        return True

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def owner(self) -> str:
        try:
            return self._path.read_text("utf-8")[:200].strip()
        except (OSError, UnicodeDecodeError):
            return ""


class LockUnavailable(StoreError):
    """The file system has no kernel locks; building goes on without one, at the price of possible double work."""

    def __init__(self, path: str, cause: OSError) -> None:
        super().__init__(
            f"No kernel locks on {path}: {cause.strerror or cause}. Builders on this host may build the same engine "
            "twice; the result stays right. Keep the nearest store on a local disk to avoid it.",
            store=path,
        )


def _record_owner(fd: int) -> None:
    text = f"process {os.getpid()} on {socket.gethostname()}".encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, text, 0)


def _link(temporary: Path, path: Path) -> bool:
    """Give the temporary file its final name unless that name is taken: exclusive, and complete at birth."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # No hard links here. Reserving the name first would show readers half an entry, so look and rename: two
        # racing writers may both win, and the later of two whole entries stays.
        if path.exists():
            return False
        temporary.replace(path)
    return True


def _create(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}:
            raise  # some network file systems cannot sync folders; anything else is trouble
    finally:
        os.close(fd)


def _mark_in_use(fd: int) -> None:
    """Show housekeeping that a file is mapped: a shared kernel lock, which needs no write and dies with the map.

    The map keeps a duplicate of the descriptor, and a lock belongs to the open file behind both.
    """
    with suppress(OSError):  # no locks here, or the file is being removed this moment; the map stays good either way
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _writable(path: Path) -> bool:
    return os.access(_existing(path), os.W_OK | os.X_OK)


def _existing(path: Path) -> Path:
    """The path, or its nearest ancestor that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
