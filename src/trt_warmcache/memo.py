"""Remember the digest of a file that has not changed, so that hashing it again is free.

A memo is only ever a short cut: whatever is doubtful about it is a miss, and a miss costs one more hash. What it
cannot see: a process that writes to pages which it mapped shared *and* had already dirtied before, because the kernel
stamps such writes late. Strict mode is for whoever must expect that.
"""

from __future__ import annotations

import logging
import os
import stat as stat_bits
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import blake3
import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["DigestMemo", "default_memo_folder"]

_LOG = logging.getLogger("trt_warmcache")
_FORMAT = "trtwc-memo-1"
_MAX_FILE = 64 << 20  # a summary with a hundred thousand external tensors fits; anything larger is not ours
_MAX_ENTRIES = 1024
_FINE_TICK_NS = 20_000_000  # kernels stamp files with the time of the last tick, 10 ms at HZ=100; twice that
_COARSE_TICK_NS = 2_000_000_000  # whole seconds, or FAT's two

# Another machine may change such a file, and the attributes seen here may be seconds old.
_NETWORK_TYPES = frozenset(
    [
        "9p",
        "acfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "fuse",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "pvfs2",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
        "wekafs",
    ]
)
_MOUNTS = Path("/proc/self/mountinfo")


class _Identity(NamedTuple):
    """What must be equal for a file to count as unchanged."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, stat: os.stat_result) -> _Identity:
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)

    @property
    def touched_ns(self) -> int:
        return max(self.mtime_ns, self.ctime_ns)


class _Entry(msgspec.Struct, frozen=True):
    format: str
    path: str
    identity: _Identity
    stored_ns: int
    value: Any


class DigestMemo:
    """Values by file, valid while path, size, mtime, ctime, inode and device stay the same.

    Two layers: a bounded dict in this process, and one small JSON file per path that other processes share. Both are
    best effort; nothing here raises for lack of a folder, rights or space. Any number of threads and processes may
    use one folder.

    Args:
        folder: Where to keep the files; made with mode 0700 when first needed. It is left alone, neither read nor
            written, while it belongs to someone else or others may write to it. None: this process only.
        strict: Trust nothing: every ``get`` is a miss, every ``put`` forgets.
        clock: Wall clock in nanoseconds, comparable to file times.
    """

    def __init__(self, folder: Path | None, *, strict: bool = False, clock: Callable[[], int] = time.time_ns) -> None:
        self.folder = folder
        self.strict = strict
        self.clock = clock
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, _Entry] = OrderedDict()
        self._decoded: dict[str, tuple[_Entry, Any]] = {}

    def get(
        self, path: str | os.PathLike[str], stat: os.stat_result, *, decode: Callable[[Any], Any] | None = None
    ) -> Any | None:
        """What was remembered for this file, or None.

        Args:
            path: The file as requested; links are not resolved, relative paths count from the working folder.
            stat: Its present status, links followed.
            decode: Makes something better of the value; its result is kept in this process and returned instead.

        Returns:
            The value given to :meth:`put`, shared between callers: do not change it.
        """
        if self.strict:
            return None
        path, identity, now = _absolute(path), _Identity.of(stat), self.clock()
        self._after_fork()
        with self._lock:
            entry = self._recent.get(path)
            if entry is not None:
                self._recent.move_to_end(path)
        if entry is None or not _holds(entry, identity, now):
            entry = self._load(path)
            if entry is None or not _holds(entry, identity, now) or _on_network(path):
                return None
            self._keep(path, entry)
        return entry.value if decode is None else self._decoded_value(path, entry, decode)

    def _decoded_value(self, path: str, entry: _Entry, decode: Callable[[Any], Any]) -> Any | None:
        kept = self._decoded.get(path)
        if kept is None or kept[0] is not entry:
            if len(self._decoded) >= _MAX_ENTRIES:
                self._decoded.clear()
            kept = self._decoded[path] = (entry, decode(entry.value))
        return kept[1]

    def put(self, path: str | os.PathLike[str], stat: os.stat_result, value: Any, started_ns: int) -> bool:
        """Remember a value computed from a file's content.

        Args:
            path: The file as requested.
            stat: Its status, taken before reading it and found the same afterwards.
            value: Anything JSON can hold.
            started_ns: ``memo.clock()`` from before the first byte was read.

        Returns:
            Whether it is remembered. False where the file cannot be trusted to show its next change.
        """
        path = _absolute(path)
        if not self.trusts(path, stat, started_ns):
            return False
        entry = _Entry(_FORMAT, _printable(path), _Identity.of(stat), self.clock(), value)
        data = msgspec.json.encode(entry)
        self._keep(path, entry)
        self._save(path, data)
        return True

    def trusts(self, path: str | os.PathLike[str], stat: os.stat_result, started_ns: int) -> bool:
        """Whether any later change of this file is bound to show in its status.

        Not so for a file that was touched so shortly before reading began that another write would get the same time
        stamp, for one touched in the future, for one on a network mount, and in strict mode.
        """
        tick = _FINE_TICK_NS if stat.st_ctime_ns % 1_000_000_000 else _COARSE_TICK_NS
        settled = _Identity.of(stat).touched_ns + tick <= started_ns
        return settled and not self.strict and not _on_network(_absolute(path))

    def _after_fork(self) -> None:
        # Another thread of the parent may have held the lock at the fork; it will never release it in this process.
        if self._pid != os.getpid():
            self._reset()

    def _keep(self, path: str, entry: _Entry) -> None:
        self._after_fork()
        with self._lock:
            self._recent[path] = entry
            self._recent.move_to_end(path)
            while len(self._recent) > _MAX_ENTRIES:
                self._recent.popitem(last=False)

    def _load(self, path: str) -> _Entry | None:
        file = self._file(path)
        if file is None:
            return None
        try:
            data = _read_small(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            _LOG.debug("digest memo %s not read: %s", file, error)
            return None
        try:
            entry = msgspec.json.decode(data, type=_Entry)
        except (msgspec.DecodeError, RecursionError) as error:
            _LOG.debug("digest memo %s ignored: %s", file, error)
            return None
        return entry if entry.format == _FORMAT and entry.path == _printable(path) else None

    def _save(self, path: str, data: bytes) -> None:
        file = self._file(path, create=True)
        if file is None:
            return
        temporary = file.with_name(f".{file.name}.{os.getpid()}.{os.urandom(6).hex()}")
        try:
            file.parent.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(fd, "wb") as out:
                    out.write(data)
                temporary.replace(file)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            _LOG.debug("digest memo %s not written: %s", file, error)

    def _file(self, path: str, *, create: bool = False) -> Path | None:
        """The memo file for a path, or None where the folder is missing or not ours alone."""
        if self.folder is None:
            return None
        try:
            if create:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self.folder.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            _LOG.debug("digest memo folder %s not usable: %s", self.folder, error)
            return None
        if owner.st_uid != os.geteuid() or owner.st_mode & 0o022:
            _LOG.debug("digest memo folder %s ignored: not ours, or others may write to it", self.folder)
            return None
        name = blake3.blake3(os.fsencode(path)).hexdigest()
        return self.folder / name[:2] / f"{name}.json"


def default_memo_folder(environ: Mapping[str, str]) -> Path:
    """The folder for digest memos by the XDG rules.

    Args:
        environ: Environment variables to look at, such as ``os.environ``.

    Returns:
        ``trt_warmcache/digests`` below ``$XDG_CACHE_HOME``, or below ``~/.cache`` where that is not an absolute path.
    """
    root = Path(environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():
        home = environ.get("HOME")
        root = (Path(home) if home else Path("~").expanduser()) / ".cache"
    return root / "trt_warmcache" / "digests"


def _absolute(path: str | os.PathLike[str]) -> str:
    # Not abspath: that folds "link/.." lexically, which may name another file than the kernel would open. Nor Path:
    # this runs twice per hit, and an absolute path, the common case, is ready as it is.
    text = os.fspath(path)
    return text if text.startswith("/") else f"{Path.cwd()}/{text}"


def _printable(path: str) -> str:
    # File names need not be UTF-8, JSON must be.
    return path.encode("utf-8", "backslashreplace").decode()


def _holds(entry: _Entry, identity: _Identity, now: int) -> bool:
    # A clock behind the one that wrote the entry was set back: a new edit may carry an old time stamp.
    return entry.identity == identity and identity.touched_ns <= now and entry.stored_ns <= now


def _read_small(file: Path) -> bytes:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as source:
        status = os.fstat(fd)
        if not stat_bits.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE:
            raise OSError(f"{file} is not a memo file")
        return source.read()


def _on_network(path: str) -> bool:
    """Whether the file behind a path lies on a network mount, or on one that cannot be told."""
    try:
        mounts = _MOUNTS.read_bytes()
    except OSError:
        return True
    return _is_network(_file_system(os.fsencode(os.path.realpath(path)), mounts))


def _is_network(file_system: str) -> bool:
    return file_system in _NETWORK_TYPES or file_system.startswith("fuse.") or not file_system


def _file_system(path: bytes, mounts: bytes) -> str:
    """The type of the file system holding an absolute path, by longest mount point; empty where none matches.

    Args:
        path: Absolute, free of links.
        mounts: Content of ``/proc/self/mountinfo``.
    """
    best, found = -1, ""
    for line in mounts.splitlines():
        before, separator, after = line.partition(b" - ")
        fields = before.split(b" ")
        if not separator or len(fields) < 5:
            continue
        point = _unescape(fields[4]).rstrip(b"/")
        # Equal mount points are stacked; the later line is the one on top.
        if len(point) >= best and (path == point or path.startswith(point + b"/")):
            best, found = len(point), after.split(b" ")[0].decode("ascii", "replace")
    return found


def _unescape(text: bytes) -> bytes:
    for code, char in ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\")):
        text = text.replace(code, char)
    return text
