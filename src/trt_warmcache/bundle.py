"""Moving entries: bundles for people and pipelines, copies between stores, and checking a whole store.

A bundle is a tar (plain or zstd) or a folder. It holds, under readable names, each payload and its manifest, a list of
what belongs to what, and ``SHA256SUMS`` for ``sha256sum -c``. Equal entries give equal bytes. Reading one trusts no
name in it: nothing is ever unpacked to a path, every payload is checked against its manifest, and a member that a
bundle of ours cannot have is a reason to refuse the whole.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import re
import secrets
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec

from trt_warmcache import manifest as manifests
from trt_warmcache.errors import (
    ConfigError,
    IntegrityError,
    StoreError,
    StoreReason,
    UntrustedError,
    WarmCacheError,
)
from trt_warmcache.export import EXTENSIONS, file_names
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import BlobRef, Manifest
from trt_warmcache.names import MAX_NAME_BYTES
from trt_warmcache.stores import EntryInfo, Payload, Store
from trt_warmcache.stores._base import PACKED_SUFFIX, verify_view
from trt_warmcache.stores._errors import from_os_error

__all__ = [
    "CopyReport",
    "Moved",
    "VerifyReport",
    "copy_store",
    "export_bundle",
    "import_bundle",
    "read_bundle",
    "verify_store",
]

_FORMAT = "trt_warmcache-bundle/1"
_INDEX = "trt_warmcache-bundle.json"
_SUMS = "SHA256SUMS"
_MAX_INDEX_BYTES = 256 * 1024 * 1024

_EXTENSION_KINDS = {extension: kind for kind, extension in EXTENSIONS.items()}

#: Names that could mean anything but a plain file beside the bundle's others, on any system.
_UNSAFE = re.compile(r"[/\\:\x00-\x1f]|^\.|^$")


class _Item(msgspec.Struct, frozen=True):
    """One entry of a bundle: the name of its manifest, and of each payload by role."""

    kind: str
    key: str
    manifest: str
    payloads: dict[str, str]


class _Index(msgspec.Struct, frozen=True):
    format: str
    entries: tuple[_Item, ...]


@dataclass(frozen=True)
class Moved:
    """What became of one entry.

    Attributes:
        kind: Kind of entry.
        key: Its key.
        label: What people call it.
        outcome: ``copied``; ``present``: it was there already; ``differs``: another entry holds the key and stays;
            ``failed``.
        size: Bytes moved.
        error: Why it failed, or None.
    """

    kind: Kind
    key: str
    label: str
    outcome: str
    size: int = 0
    error: WarmCacheError | None = None


@dataclass(frozen=True)
class CopyReport:
    """What became of all entries, in order."""

    rows: tuple[Moved, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(row.error is None for row in self.rows)

    def count(self, outcome: str) -> int:
        """How many entries came to this."""
        return sum(row.outcome == outcome for row in self.rows)

    @property
    def size(self) -> int:
        """Bytes moved."""
        return sum(row.size for row in self.rows)

    def to_json(self) -> list[dict[str, Any]]:
        """The report as plain JSON values."""
        return [
            {
                "kind": row.kind.value, "key": row.key, "name": row.label, "outcome": row.outcome, "size": row.size,
                "error": None if row.error is None else row.error.message,
            }
            for row in self.rows
        ]  # fmt: skip


# ---- writing a bundle -------------------------------------------------------------------------------------------


def export_bundle(store: Store, entries: Iterable[Manifest], target: str | os.PathLike[str]) -> list[str]:
    """Write entries to a bundle.

    Args:
        store: Where they are.
        entries: Their manifests.
        target: A path that ends in ``.tar`` or ``.tar.zst``, or a folder, which must be new or empty. A file is
            written whole or not at all.

    Returns:
        The names of the files in the bundle.

    Raises:
        IntegrityError: A payload is damaged; nothing is written.
        StoreError: A payload cannot be read, or the bundle cannot be written.
        ConfigError: No entries; a folder that is not empty; zstd without its package.
    """
    path = Path(target)
    # As their makers sealed them, so that a bundle does not depend on how a store packs its blobs.
    plain = [manifests.plain(one) for one in entries]
    chosen = sorted({(one.kind, one.key): one for one in plain}.values(), key=lambda one: (one.kind, one.key))
    if not chosen:
        raise ConfigError("Nothing to export: no entry was chosen.")
    names = _names(chosen)
    try:
        if path.name.endswith((".tar", ".tar.zst", ".tzst")):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.parent / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
            try:
                with _tar_sink(temporary, compress=not path.name.endswith(".tar")) as sink:
                    found = _write_bundle(store, chosen, names, sink)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            return found
        if path.exists() and any(path.iterdir()):
            raise ConfigError(f"{path} is not empty; a bundle gets a folder of its own.")
        path.mkdir(parents=True, exist_ok=True)
        return _write_bundle(store, chosen, names, lambda name, view: _write_file(path / name, view))
    except OSError as error:
        raise from_os_error(error, doing=f"write {path.name}", store=str(path.parent)) from error


_Sink = Callable[[str, memoryview], None]


def _names(chosen: Sequence[Manifest]) -> dict[tuple[str, str], str]:
    """One file name per entry, unique across kinds."""
    found: dict[tuple[str, str], str] = {}
    for kind in Kind:
        of_kind = [manifest for manifest in chosen if manifest.kind == kind.value]
        for key, name in file_names(of_kind).items():
            found[kind.value, key] = name
    return found


def _write_bundle(
    store: Store, chosen: Sequence[Manifest], names: Mapping[tuple[str, str], str], sink: _Sink
) -> list[str]:
    items = []
    for manifest in chosen:
        name = names[manifest.kind, manifest.key]
        payloads = {
            ref.role: name if number == 0 else f"{name}.{ref.role}" for number, ref in enumerate(manifest.blobs)
        }
        items.append(_Item(manifest.kind, manifest.key, f"{name}.json", payloads))
    sums: dict[str, str] = {}

    def put(name: str, view: memoryview) -> None:
        sums[name] = hashlib.sha256(view).hexdigest()
        sink(name, view)

    # The index comes first, so that a reader knows what to expect before the first large member.
    put(_INDEX, memoryview(_pretty(_Index(_FORMAT, tuple(items)))))
    for item, manifest in zip(items, chosen, strict=True):
        put(item.manifest, memoryview(manifests.encode(manifest)))
        for ref in manifest.blobs:
            payload = store.fetch(ref)
            try:
                put(item.payloads[ref.role], payload.view)
            finally:
                payload.close()
    sink(_SUMS, memoryview("".join(f"{digest}  {name}\n" for name, digest in sums.items()).encode()))
    return [*sums, _SUMS]


def _pretty(document: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=1) + b"\n"


@contextmanager
def _tar_sink(path: Path, *, compress: bool) -> Iterator[_Sink]:
    """A tar whose bytes depend on nothing but its members: no times, owners or order of the file system."""
    with path.open("xb") as file, _compressed(file, compress=compress) as out:
        with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as tar:

            def put(name: str, view: memoryview) -> None:
                member = tarfile.TarInfo(name)
                member.size, member.mode = view.nbytes, 0o644
                tar.addfile(member, _ViewReader(view))

            yield put
        out.flush()


@contextmanager
def _compressed(file: IO[bytes], *, compress: bool) -> Iterator[IO[bytes]]:
    if not compress:
        yield file
        return
    # One thread and a fixed level, so that equal input gives equal output.
    with _zstd().ZstdCompressor(level=3, threads=0).stream_writer(file, closefd=False) as out:
        yield out


class _ViewReader(io.RawIOBase):
    """A buffer as a file, without a copy."""

    def __init__(self, view: memoryview) -> None:
        self._view = view.cast("B")
        self._at = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        end = self._view.nbytes if size < 0 else min(self._view.nbytes, self._at + size)
        data = bytes(self._view[self._at : end])
        self._at = end
        return data


def _write_file(path: Path, view: memoryview) -> None:
    with path.open("xb") as file:
        file.write(view)


# ---- reading a bundle -------------------------------------------------------------------------------------------


def read_bundle(source: str | os.PathLike[str]) -> list[Manifest]:
    """The manifests of all entries in a bundle, its structure checked, its payloads not yet.

    Raises:
        IntegrityError: It is no bundle, is damaged, or has members that no bundle has.
        StoreError: It cannot be read.
    """
    with _opened(source) as bundle:
        return [manifest for _, manifest in _entries(bundle)]


def import_bundle(
    store: Store, source: str | os.PathLike[str], *, choose: Callable[[Manifest], bool] = lambda _: True
) -> CopyReport:
    """Put a bundle's entries into a store. What is there already stays.

    The whole bundle's structure is checked before anything is stored, and each payload before its entry is.

    Args:
        store: Where to.
        source: A ``.tar``, ``.tar.zst`` or folder.
        choose: Which entries.

    Raises:
        IntegrityError: It is no bundle, is damaged, or has members that no bundle has.
        StoreError: It cannot be read, or the store cannot be written.
    """
    rows = []
    with _opened(source) as bundle:
        for item, manifest in _entries(bundle):
            if choose(manifest):
                rows.append(_import_one(store, bundle, item, manifest))
    return CopyReport(tuple(rows))


def _import_one(store: Store, bundle: _Bundle, item: _Item, manifest: Manifest) -> Moved:
    kind = Kind(manifest.kind)
    state = _state(store, manifest)
    if state != "missing":
        return Moved(kind, manifest.key, manifest.labels.entry, state)
    payloads = {ref.role: bundle.payload(item.payloads[ref.role], ref) for ref in manifest.blobs}
    try:
        current = store.publish(manifest, {role: payload.view for role, payload in payloads.items()})
    finally:
        for payload in payloads.values():
            payload.close()
    outcome = "copied" if _same(current, manifest) else "differs"
    return Moved(kind, manifest.key, manifest.labels.entry, outcome, manifest.size)


def _entries(bundle: _Bundle) -> list[tuple[_Item, Manifest]]:
    """Index and manifests, every name and claim checked."""
    try:
        index = msgspec.json.decode(bundle.small(_INDEX, _MAX_INDEX_BYTES), type=_Index)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bundle.refused(f"{_INDEX} cannot be read: {error}") from error
    if index.format != _FORMAT:
        raise bundle.refused(f"it has format {index.format!r}, this release reads {_FORMAT!r}")
    found, named = [], [_INDEX]
    for item in index.entries:
        try:
            kind = Kind(item.kind)
        except ValueError as error:
            raise bundle.refused(f"it has an entry of unknown kind {item.kind!r}") from error
        data = bundle.small(item.manifest, manifests.MAX_MANIFEST_BYTES)
        manifest = manifests.decode(data, kind=kind, digest=item.key)
        if {ref.role for ref in manifest.blobs} != item.payloads.keys():
            raise bundle.refused(f"{item.manifest} does not fit its list of payloads")
        named += [item.manifest, *item.payloads.values()]
        found.append((item, manifest))
    if len(set(named)) != len(named):
        raise bundle.refused("one file is listed twice")
    unlisted = bundle.names - set(named) - {_SUMS}
    if unlisted or set(named) - bundle.names:
        odd = sorted(unlisted | (set(named) - bundle.names))
        raise bundle.refused(f"its list and its files do not agree about {odd[0]!r}")
    return found


class _Bundle:
    """Members of a bundle by name; nothing is unpacked."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.names: set[str] = set()
        self._folded: set[str] = set()

    def small(self, name: str, limit: int) -> bytes:
        """A small member's bytes."""
        if name not in self.names:
            raise self.refused(f"{name!r} is missing")
        with self.opened(name) as (file, size):
            if size > limit:
                raise self.refused(f"{name!r} has {size} bytes, more than the {limit} it can need")
            return bytes(file.read(size))

    def payload(self, name: str, ref: BlobRef) -> Payload:
        """A member's bytes, verified against the manifest that names it."""
        with self.opened(name) as (file, size):
            if size != ref.size:
                raise self.refused(f"{name!r} has {size} bytes, its manifest says {ref.size}")
            payload = _mapped_copy(file, size)
        try:
            verify_view(ref, payload.view, f"{self.where} ({name})")
        except IntegrityError:
            payload.close()
            raise
        return payload

    def opened(self, name: str) -> Any:
        """A context with a member's file and size."""
        raise NotImplementedError

    def admit(self, name: str) -> None:
        """Check a member's name.

        Raises:
            IntegrityError: It could lead anywhere but to a file of this bundle.
        """
        if _UNSAFE.search(name) or len(name.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES + 64:
            raise self.refused(f"a member is called {name!r}")
        if name.casefold() in self._folded:  # some file systems do not tell A from a
            raise self.refused(f"the member {name!r} is there twice")
        self.names.add(name)
        self._folded.add(name.casefold())

    def refused(self, why: str) -> IntegrityError:
        """The error for a bundle that cannot be one of ours."""
        return IntegrityError(
            f"The bundle {self.where} is refused: {why}. Nothing was unpacked; export it again.",
            name=self.where,
            reason="bundle",
        )


class _FolderBundle(_Bundle):
    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder
        with os.scandir(folder) as scan:
            for entry in sorted(scan, key=lambda entry: entry.name):
                self.admit(entry.name)
                if entry.is_symlink() or not entry.is_file(follow_symlinks=False):
                    raise self.refused(f"{entry.name!r} is not a plain file")

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[IO[bytes], int]]:
        if name not in self.names:
            raise self.refused(f"{name!r} is missing")
        fd = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as file:
            yield file, os.fstat(fd).st_size


class _TarBundle(_Bundle):
    def __init__(self, file: IO[bytes], where: str) -> None:
        super().__init__(where)
        try:
            self._tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115  closed with the file
            self._members = {}
            for member in self._tar:
                self.admit(member.name)
                if not member.isreg() or member.issparse():
                    raise self.refused(f"the member {member.name!r} is not a plain file")
                self._members[member.name] = member
        except (tarfile.TarError, UnicodeError, OverflowError, ValueError) as error:
            raise self.refused(f"it is no tar: {error}") from error

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[IO[bytes], int]]:
        member = self._members.get(name)
        file = None if member is None else self._tar.extractfile(member)
        if member is None or file is None:
            raise self.refused(f"{name!r} is missing")
        with file:
            yield file, member.size


@contextmanager
def _opened(source: str | os.PathLike[str]) -> Iterator[_Bundle]:
    path = Path(source)
    try:
        if path.is_dir():
            yield _FolderBundle(path)
            return
        with path.open("rb") as file, _uncompressed(file, str(path)) as plain:
            yield _TarBundle(plain, str(path))
    except OSError as error:
        raise from_os_error(error, doing=f"read {path.name}", store=str(path.parent)) from error


@contextmanager
def _uncompressed(file: IO[bytes], where: str) -> Iterator[IO[bytes]]:
    magic = file.read(4)
    file.seek(0)
    if magic != b"\x28\xb5\x2f\xfd":
        yield file
        return
    zstd = _zstd()
    # Members are read by position, so the plain tar needs a place; a file, since engines are large.
    with tempfile.TemporaryFile() as plain:
        try:
            zstd.ZstdDecompressor().copy_stream(file, plain)
        except zstd.ZstdError as error:
            raise IntegrityError(f"The bundle {where} is damaged: {error}.", name=where, reason="bundle") from error
        plain.seek(0)
        yield plain


def _mapped_copy(file: IO[bytes], size: int) -> Payload:
    """A member's bytes in a mapped file without a name: large payloads do not need memory."""
    if size == 0:
        return Payload(memoryview(b""))
    with tempfile.TemporaryFile() as copy:
        left = size
        while left and (part := file.read(min(left, 8 * 1024 * 1024))):
            copy.write(part)
            left -= len(part)
        copy.flush()
        if left:
            return Payload(memoryview(b""))  # shorter than announced; verification says so
        mapped = mmap.mmap(copy.fileno(), size, access=mmap.ACCESS_READ)
    view = memoryview(mapped)

    def release() -> None:
        with suppress(BufferError):  # somebody holds a view of it; the map goes with that
            view.release()
            mapped.close()

    return Payload(view, release)


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError("Compressed bundles need the extra: pip install 'trt_warmcache[zstd]'.") from error
    return zstandard


# ---- copying ----------------------------------------------------------------------------------------------------


def copy_store(
    source: Store,
    target: Store,
    *,
    choose: Callable[[Manifest], bool] = lambda _: True,
    workers: int = 4,
    progress: Callable[[Moved], None] | None = None,
) -> CopyReport:
    """Copy entries from one store to another: only what is missing there, each payload verified on the way.

    Safe to interrupt and to run again: entries appear whole, and what has arrived is not sent a second time.

    Args:
        source: Where from.
        target: Where to.
        choose: Which entries.
        workers: Entries under way at once.
        progress: Called with each entry as it is done, from several threads.

    Returns:
        One row per entry; failures are in it and stop nothing, except a target that is full or denies writing.

    Raises:
        StoreError: The source cannot be listed, or the target is full or denies writing.
    """
    found = [info for kind in Kind for info in source.entries(kind)]
    there = {(kind, info.digest) for kind in Kind for info in target.entries(kind)}
    arrived = {info.name.rpartition("/")[2]: info.size for info in target.list("blobs/")}

    def move(info: EntryInfo) -> Moved | None:
        row = _copy_one(source, target, info, choose, arrived, known=(info.kind, info.digest) in there)
        if row is not None and progress is not None:
            progress(row)
        return row

    with ThreadPoolExecutor(workers, "trt_warmcache-copy") as pool:
        rows = [row for row in pool.map(move, found) if row is not None]
    return CopyReport(tuple(rows))


def _copy_one(
    source: Store,
    target: Store,
    info: EntryInfo,
    choose: Callable[[Manifest], bool],
    arrived: Mapping[str, int],
    *,
    known: bool,
) -> Moved | None:
    label, size = info.digest[:12], 0
    try:
        manifest = source.manifest(info.kind, info.digest)
        if manifest is None or not choose(manifest):
            return None
        label = manifest.labels.entry or label
        state = _state(target, manifest, arrived) if known else "missing"
        if state != "missing":
            return Moved(info.kind, info.digest, label, state)
        payloads: dict[str, Payload] = {}
        try:
            for ref in manifest.blobs:
                if _has(target, ref, arrived):
                    continue
                size += ref.size
                if _lands(target, ref):
                    target.land_blob(ref, partial(source.fetch_into, ref)).close()
                else:
                    payloads[ref.role] = source.fetch(ref)
            views = {role: payload.view for role, payload in payloads.items()}
            current = target.publish(manifests.plain(manifest), views)
        finally:
            for payload in payloads.values():
                payload.close()
    except StoreError as error:
        if error.reason in {StoreReason.FULL, StoreReason.DENIED}:
            raise
        return Moved(info.kind, info.digest, label, "failed", size, error)
    except (IntegrityError, UntrustedError) as error:
        return Moved(info.kind, info.digest, label, "failed", size, error)
    return Moved(info.kind, info.digest, label, "copied" if _same(current, manifest) else "differs", size)


def _lands(target: Store, ref: BlobRef) -> bool:
    """Whether a blob can be written where it stays while it arrives: it needs no memory then, whatever its size."""
    return target.local and target.capabilities.mappable and bool(ref.chunks or ref.size <= manifests.CHUNK_BYTES)


def _state(store: Store, manifest: Manifest, blobs: Mapping[str, int] | None = None) -> str:
    """Whether a store has this very entry (``present``), another under its key (``differs``), or none (``missing``).

    With a list of blobs, an entry whose blobs are not all there is missing as well.
    """
    kind = Kind(manifest.kind)
    try:
        current = store.manifest(kind, manifest.key)
    except IntegrityError as error:
        store.quarantine(kind, manifest.key, error)  # a whole one is about to take its place
        return "missing"
    if current is None:
        return "missing"
    if not _same(current, manifest):
        return "differs"
    whole = blobs is None or all(_has(store, ref, blobs) for ref in manifest.blobs)
    return "present" if whole else "missing"


def _has(store: Store, ref: BlobRef, blobs: Mapping[str, int]) -> bool:
    """Whether a blob is among those listed: whole by its size, or packed where a store packs."""
    return blobs.get(ref.hex) == ref.size or (not store.local and f"{ref.hex}{PACKED_SUFFIX}" in blobs)


def _same(one: Manifest, other: Manifest) -> bool:
    return manifests.plain(one) == manifests.plain(other)


# ---- checking ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifyReport:
    """What a check of a whole store found.

    Attributes:
        good: Entries whose every byte is right.
        bad: Entries that are damaged, not trusted, or that the store could not read: kind, key, error.
        size: Payload bytes read.
    """

    good: int
    bad: tuple[tuple[Kind, str, IntegrityError | UntrustedError | StoreError], ...] = ()
    size: int = 0

    @property
    def ok(self) -> bool:
        """Whether everything is right."""
        return not self.bad


@dataclass
class _Verified:
    info: EntryInfo
    size: int = 0
    error: IntegrityError | UntrustedError | StoreError | None = field(default=None)


def verify_store(
    store: Store,
    *,
    workers: int | None = None,
    quarantine: bool = False,
    progress: Callable[[int, int, int], None] | None = None,
) -> VerifyReport:
    """Read every entry of a store and check every byte, several entries at once.

    Args:
        store: The store; wrap it with :func:`trt_warmcache.trust.secured` to check signatures too.
        workers: Threads. None: as many as there are CPUs, at least 4.
        quarantine: Set damaged entries aside.
        progress: Called on this thread with entries done, entries in all, and payload bytes read.

    Raises:
        StoreError: The store cannot be read at all. A single entry that cannot be, because of its permissions or a bad
            sector, is in the report.
    """
    found = [info for kind in Kind for info in store.entries(kind)]

    def check(info: EntryInfo) -> _Verified:
        done = _Verified(info)
        try:
            manifest = store.manifest(info.kind, info.digest)
            for ref in manifest.blobs if manifest is not None else ():
                store.fetch(ref, rehash=True).close()
                done.size += ref.size
        except (IntegrityError, UntrustedError) as error:
            done.error = error
        except StoreError as error:
            if not store.local and error.reason is not StoreReason.DENIED:
                raise  # the service is down; the other entries would only wait for it one by one
            done.error = error
        return done

    bad, size = [], 0
    with ThreadPoolExecutor(workers or max(4, os.cpu_count() or 1), "trt_warmcache-verify") as pool:
        for count, done in enumerate(pool.map(check, found), 1):
            size += done.size
            if done.error is not None:
                bad.append((done.info.kind, done.info.digest, done.error))
                if quarantine and isinstance(done.error, IntegrityError) and done.error.reason != "format":
                    store.quarantine(done.info.kind, done.info.digest, done.error)
            if progress is not None:
                progress(count, len(found), size)
    return VerifyReport(len(found) - len(bad), tuple(bad), size)
