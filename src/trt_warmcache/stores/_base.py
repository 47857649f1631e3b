"""What every store can do, and what it may promise beyond that.

A store keeps named objects under one root and builds entries from them: content-addressed blobs first, one manifest
last. It knows nothing of TensorRT. The layout is part of the contract, so that a copy of the tree made with any tool
is a working store::

    trtwc-1/<kind>/<aa>/<key digest>.json     manifest, the commit point
    trtwc-1/blobs/<aa>/<digest>               payloads; with .zst where packed for the wire
    trtwc-1/leases/ locks/ quarantine/        housekeeping

To write a store of your own, derive from :class:`Store`, implement the five primitives and state honest
:class:`StoreCapabilities`; ``trt_warmcache.testing.StoreConformance`` checks both.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import blake3
import msgspec

from trt_warmcache import manifest as manifests
from trt_warmcache._hashing import hash_threads
from trt_warmcache.errors import IntegrityError, StoreError, StoreReason
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import BlobRef, Manifest

if TYPE_CHECKING:
    from trt_warmcache.events import Events

__all__ = [
    "LAYOUT",
    "PACKED_SUFFIX",
    "EntryInfo",
    "Lock",
    "LockScope",
    "ObjectInfo",
    "Payload",
    "Store",
    "StoreCapabilities",
    "WritePiece",
    "blob_name",
    "manifest_name",
    "verify_view",
]

#: Folder under the root; a later, incompatible layout gets another name beside it.
LAYOUT = "trtwc-1"

#: Packed blobs lie beside plain ones under their digest and this.
PACKED_SUFFIX = ".zst"

#: Takes a piece of a blob and its offset.
WritePiece: TypeAlias = Callable[[Any, int], None]

_ENTRY_NAME = re.compile(r"(?P<kind>[a-z]+)/(?P<fan>[0-9a-f]{2})/(?P<digest>[0-9a-f]{64})\.json")


class LockScope(IntEnum):
    """How far a store's lock reaches. Locks save work; correctness never depends on them."""

    NONE = 0
    PROCESS = 1
    HOST = 2
    FLEET = 3


@dataclass(frozen=True)
class StoreCapabilities:
    """What one store instance can do.

    Attributes:
        writable: Objects can be written now, by this process, as far as is known without trying.
        deletable: Objects can be deleted.
        listable: Objects can be listed.
        exclusive_create: :meth:`Store.create` lets exactly one of any number of racing writers win.
        mappable: Payloads are mapped from local files, not copied.
        lock_scope: Who is kept out by :meth:`Store.lock`.
        known: False where a server has to be asked for these and has not answered yet; then they are a guess.
    """

    writable: bool = True
    deletable: bool = True
    listable: bool = True
    exclusive_create: bool = False
    mappable: bool = False
    lock_scope: LockScope = LockScope.NONE
    known: bool = True


@dataclass(frozen=True)
class ObjectInfo:
    """One object of a store.

    Attributes:
        name: Path under the layout folder.
        size: Bytes.
        modified: Unix time in seconds by the store's clock; 0 where the store does not tell.
    """

    name: str
    size: int
    modified: float = 0.0


@dataclass(frozen=True)
class EntryInfo:
    """One entry as found by listing, its manifest not yet read."""

    kind: Kind
    digest: str
    modified: float


class Payload:
    """Verified bytes of a blob, readable until closed.

    Attributes:
        view: Read-only; mapped from the file where the store is local.
    """

    def __init__(
        self, view: memoryview, release: Callable[[], None] | None = None, *, verified_now: bool = True
    ) -> None:
        self.view = view
        self.verified_now = verified_now
        self._release = release

    def close(self) -> None:
        """Give the bytes back. Views that the caller still holds keep them alive; closing twice is fine."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Lock(Protocol):
    """A lock that one key's builder holds. Not reentrant, and held by at most one thread."""

    def try_acquire(self) -> bool:
        """Take the lock if nobody has it; never waits."""

    def release(self) -> None:
        """Give it back."""

    def owner(self) -> str:
        """Who holds it, for log lines; "" if unknown."""


class Store(ABC):
    """Keeps entries. Safe for use by many threads, processes and, where the medium allows, hosts.

    Attributes:
        url: Where it is, for people and logs; never with credentials.
        local: In memory or on this machine: calls need no deadline.
        verifies: Every manifest that it returns carries a signature that was verified.
    """

    url: str
    local: bool = False
    verifies: bool = False

    # ---- primitives -------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def capabilities(self) -> StoreCapabilities:
        """What this instance can do."""

    @abstractmethod
    def read(self, name: str, *, limit: int) -> bytes | None:
        """A small object's bytes, or None if there is no such object.

        Args:
            name: Path under the layout folder.
            limit: Most bytes to read; an object that is larger comes back cut to ``limit + 1`` bytes.

        Raises:
            StoreError: The store could not answer. Never raised for a missing object.
        """

    @abstractmethod
    def write(self, name: str, data: Any) -> None:
        """Write an object whole, replacing any older one; readers see the old or the new bytes, nothing between.

        Raises:
            StoreError: Denied, full, or unavailable; nothing is left under `name` that was not there before.
        """

    def create(self, name: str, data: Any) -> bool:
        """Write an object if none exists; False if one does.

        This default looks first and writes then, so two racing writers may both win. Override it where the medium
        can do better, and only then claim ``exclusive_create``.
        """
        if self.read(name, limit=0) is not None:
            return False
        self.write(name, data)
        return True

    def swap(self, name: str, data: Any, *, expected: bytes) -> bool:
        """Replace an object if it still holds the `expected` bytes; False if it does not.

        This default looks first and writes then; override it where the medium has compare-and-swap.
        """
        if self.read(name, limit=len(expected)) != expected:
            return False
        self.write(name, data)
        return True

    @abstractmethod
    def delete(self, name: str) -> bool:
        """Delete an object; False if there was none."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose name starts with `prefix` (a folder path ending in "/"); temporary files are not shown."""

    @abstractmethod
    def fetch(self, ref: BlobRef, *, rehash: bool = False) -> Payload:
        """A blob's bytes, verified.

        Args:
            ref: The blob, as its manifest describes it.
            rehash: Verify anew even if these very bytes were verified before.

        Raises:
            IntegrityError: Missing, of another size, or of another digest.
            StoreError: The store could not answer.
        """

    def put_blob(self, ref: BlobRef, data: Any) -> None:
        """Store a blob. Idempotent: the content decides the name, so writing twice is harmless.

        Raises:
            StoreError: Denied, full, or unavailable.
        """
        self.write(blob_name(ref), data)

    def fetch_into(self, ref: BlobRef, write: WritePiece) -> None:
        """Hand over a blob's bytes piece by piece, each verified before.

        Args:
            ref: The blob, as its manifest describes it. One of several chunks without chunk digests may be handed over
                unverified; check it whole.
            write: Called with bytes and their offset, perhaps from several threads at once and in any order.

        Raises:
            IntegrityError: Missing, of another size, or of another digest; some pieces may have been handed over.
            StoreError: The store could not answer.
        """
        payload = self.fetch(ref)
        try:
            write(payload.view, 0)
        finally:
            payload.close()

    def land_blob(self, ref: BlobRef, fill: Callable[[WritePiece], None]) -> Payload:
        """Store a blob that arrives in pieces, without a copy of it in between.

        This default collects the pieces in memory. Override it where pieces can be written in their final place.

        Args:
            ref: The blob, as its manifest describes it.
            fill: Called with the function that takes verified bytes and their offset, from any number of threads and
                in any order. Nothing is stored if it raises.

        Returns:
            The blob's bytes.

        Raises:
            StoreError: Denied, full, or unavailable.
        """
        buffer = bytearray(ref.size)

        def write(data: Any, offset: int) -> None:
            piece = memoryview(data).cast("B")
            buffer[offset : offset + piece.nbytes] = piece

        fill(write)
        view = memoryview(buffer).toreadonly()
        self.put_blob(*self.pack(ref, view))
        return Payload(view)

    def pack(self, ref: BlobRef, data: Any) -> tuple[BlobRef, Any]:
        """The form in which this store keeps a blob; asked before the manifest that describes it is written.

        This default keeps blobs as they are, so that they can be mapped. Whatever it is, the digests stay those of
        the unpacked bytes.

        Args:
            ref: The blob, perhaps as another store packed it.
            data: Its unpacked bytes.

        Returns:
            The reference as it goes into the manifest, and the bytes to store.
        """
        return manifests.unpacked(ref), data

    def lock(self, name: str) -> Lock | None:
        """A lock for one key, or None where the store has none."""
        return None

    def in_use(self, ref: BlobRef) -> bool:
        """Whether some process of this machine has the blob mapped, as far as can be told."""
        return False

    def temporaries(self) -> Iterator[ObjectInfo]:
        """Unfinished objects of writers at work or dead; :meth:`list` does not show them."""
        return iter(())

    def nearby(self) -> Iterator[Store]:
        """The parts of this store that answer at once: itself, if it is local; of several layers, those that are."""
        if self.local:
            yield self

    def view(self, wrap: Callable[[Store], Store]) -> Store:
        """This store seen through another; of several layers each is wrapped, except those that are trusted."""
        return wrap(self)

    def bind(self, events: Events) -> None:  # noqa: B027  most stores have nothing to tell
        """Send events there."""

    def close(self) -> None:  # noqa: B027  most stores hold nothing
        """Release threads, connections and locks. Idempotent."""

    # ---- entries ----------------------------------------------------------------------------------------------

    def manifest(self, kind: Kind, digest: str) -> Manifest | None:
        """The manifest of an entry, or None.

        Raises:
            IntegrityError: There is one and it is damaged.
            StoreError: The store could not answer.
        """
        data = self.read(manifest_name(kind, digest), limit=manifests.MAX_MANIFEST_BYTES)
        return None if data is None else manifests.decode(data, kind=kind, digest=digest)

    def publish(
        self, manifest: Manifest, payloads: Mapping[str, Any], *, replacing: Manifest | None = None
    ) -> Manifest:
        """Store an entry: all blobs, then its manifest.

        The first manifest under a key wins. With `replacing`, the new manifest takes the place of that one, and only
        of that one.

        Args:
            manifest: Sealed manifest.
            payloads: Bytes per role; those of a blob that lies in the store already may be left out.
            replacing: The manifest that this one supersedes; for kinds of entries that grow.

        Returns:
            The manifest in force afterwards: `manifest` itself, or the one that somebody else published first.

        Raises:
            StoreError: Denied, full, or unavailable; no entry was created and none was lost.
        """
        kind = Kind(manifest.kind)
        name = manifest_name(kind, manifest.key)
        blobs = []
        for plain in manifest.blobs:
            if plain.role not in payloads:  # it lies there already
                blobs.append(plain)
                continue
            ref, stored = self.pack(plain, payloads[plain.role])
            self.put_blob(ref, stored)
            blobs.append(ref)
        data = manifests.encode(msgspec.structs.replace(manifest, blobs=tuple(blobs)))
        published = self.create(name, data) if replacing is None else self._supersede(name, data, replacing)
        if published:
            return manifest
        winner = self.manifest(kind, manifest.key)
        if winner is not None:
            return manifest if _same(winner, manifest) else winner
        raise StoreError(
            f"Publishing {name} in {self.url} was refused, yet there is no such entry; something else occupies its name. "
            "Remove what lies there.",
            store=self.url,
            reason=StoreReason.UNAVAILABLE,
        )

    def _supersede(self, name: str, data: bytes, replacing: Manifest) -> bool:
        expected = manifests.encode(replacing)
        if self.swap(name, data, expected=expected):
            return True
        # The same manifest may be written here with blobs packed otherwise than where the caller read it.
        kind, digest = Kind(replacing.kind), replacing.key
        present = self.read(name, limit=manifests.MAX_MANIFEST_BYTES)
        if (
            present is None
            or present == expected
            or not _same(manifests.decode(present, kind=kind, digest=digest), replacing)
        ):
            return False
        return self.swap(name, data, expected=present)

    def entries(self, kind: Kind) -> Iterator[EntryInfo]:
        """All entries of a kind. Anything else that lies around in the store is passed over."""
        for found in self.list(f"{kind.value}/"):
            match = _ENTRY_NAME.fullmatch(found.name)
            if match and match["fan"] == match["digest"][:2]:
                yield EntryInfo(kind, match["digest"], found.modified)

    def remove(self, kind: Kind, digest: str) -> bool:
        """Remove an entry's manifest. Its blobs may serve other entries; housekeeping collects those that do not."""
        return self.delete(manifest_name(kind, digest))

    def quarantine(self, kind: Kind, digest: str, error: IntegrityError) -> None:
        """Set a damaged entry aside: keep its manifest and the reason, remove it and its damaged blob from service.

        Raises:
            StoreError: The store does not allow it; the entry stays where it is.
        """
        name = manifest_name(kind, digest)
        data = self.read(name, limit=manifests.MAX_MANIFEST_BYTES) or b""
        aside = f"quarantine/{kind.value}-{digest}"
        self.write(f"{aside}.reason", f"{error.reason}: {error.message}\n".encode())
        self.write(f"{aside}.json", data)
        self.delete(name)
        if error.name.startswith("blobs/"):
            self.delete(error.name)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def manifest_name(kind: Kind, digest: str) -> str:
    """Where the manifest of a key lies, under the layout folder."""
    return f"{kind.value}/{digest[:2]}/{digest}.json"


def blob_name(ref: BlobRef) -> str:
    """Where a blob lies, under the layout folder.

    A packed blob has a name of its own: the same content may be kept packed for one entry and plain for another, and
    neither writer may put the other's form under its name.
    """
    return f"blobs/{ref.hex[:2]}/{ref.hex}{PACKED_SUFFIX if ref.codec else ''}"


def _same(one: Manifest, other: Manifest) -> bool:
    """Whether two manifests claim the same, however their blobs are packed."""
    return manifests.plain(one) == manifests.plain(other)


def verify_view(ref: BlobRef, view: memoryview, store: str) -> None:
    """Check bytes against the reference that promised them.

    Raises:
        IntegrityError: Other size or other digest.
    """
    name = blob_name(ref)
    if view.nbytes != ref.size:
        raise truncated(ref, view.nbytes, store)
    digest = blake3.blake3(view, max_threads=hash_threads(ref.size)).hexdigest()
    if digest != ref.hex:
        raise IntegrityError(
            f"{name} in {store} is damaged: its bytes have digest {digest[:12]}..., its name says {ref.hex[:12]}....",
            name=name,
            reason="digest",
        )


def truncated(ref: BlobRef, size: int, store: str) -> IntegrityError:
    """The error for a blob of another length than promised."""
    name = blob_name(ref)
    return IntegrityError(
        f"{name} in {store} has {size} bytes, its manifest says {ref.size}.", name=name, reason="truncated"
    )


def missing(ref: BlobRef, store: str) -> IntegrityError:
    """The error for a blob that its manifest promises and that is not there."""
    name = blob_name(ref)
    return IntegrityError(f"{name} is missing in {store}.", name=name, reason="missing-blob")
