"""What an entry claims about itself: the small JSON document whose publication commits the entry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import blake3
import msgspec

from trt_warmcache._fields import LARGEST_INT
from trt_warmcache._hashing import hash_threads
from trt_warmcache.errors import IntegrityError
from trt_warmcache.keys import KEY_SCHEMA, Key, Kind, digest_of

__all__ = [
    "CHUNK_BYTES",
    "FORMAT",
    "MAX_MANIFEST_BYTES",
    "BlobRef",
    "Labels",
    "Manifest",
    "Provenance",
    "blob_digest",
    "decode",
    "describe_blob",
    "encode",
    "plain",
    "seal",
    "unpacked",
]

#: ``name/major``. Readers refuse another major number and ignore fields they do not know.
FORMAT = "trt_warmcache/1"

#: Unit of ranged download and of verification while bytes land.
CHUNK_BYTES = 8 * 1024 * 1024

#: A manifest is small; anything larger is damage or an attack, and is not parsed.
MAX_MANIFEST_BYTES = 4 * 1024 * 1024


class BlobRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One payload of an entry.

    Attributes:
        role: What it is: ``plan``, ``timing``, ``calibration`` or ``runtime``.
        digest: ``blake3:`` and 64 hex digits, over the uncompressed bytes.
        size: Uncompressed size in bytes.
        chunks: Hex digests of each chunk of :data:`CHUNK_BYTES`, in order; empty for blobs of one chunk.
        codec: How the stored bytes are packed: ``""`` for not at all, or ``zstd``.
        stored_size: Bytes in the store, where packed.
    """

    role: str
    digest: str
    size: int
    chunks: tuple[str, ...] = ()
    codec: str = ""
    stored_size: int = 0

    @property
    def hex(self) -> str:
        """The digest without its prefix: the blob's name in a store."""
        return self.digest.partition(":")[2]


class Labels(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Words for people; never identity."""

    name: str = ""
    version: str = ""
    model: str = ""
    entry: str = ""


class Provenance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who made the entry, when, how long it took, and with what.

    Attributes:
        created: Unix time in seconds, by the builder's clock; for people, never compared between hosts.
        build_seconds: Time inside the builder.
        creator: This library and its version.
        host: A word for the machine class; never an address.
        library: Version that the loaded TensorRT library reported.
        target: All facts known of the target, also those outside the key.
        config: The effective builder configuration, read back before the build.
        warnings: What TensorRT warned about.
        plugins: Required plugin libraries: file name to content digest.
        model_bytes: Size of the model with its side files.
    """

    created: float = 0.0
    build_seconds: float = 0.0
    creator: str = ""
    host: str = ""
    library: str = ""
    target: dict[str, Any] = {}
    config: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()
    plugins: dict[str, str] = {}
    model_bytes: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The commit point of an entry.

    Attributes:
        format: :data:`FORMAT`.
        kind: Kind of entry, as the folder name.
        key: Digest of the key; equals the manifest's name in the store.
        schema: Key recipe the digest was made with.
        parts: The key's named parts.
        blobs: Payloads.
        provenance: See :class:`Provenance`.
        labels: See :class:`Labels`.
        extra: Facts of a kind of entry, such as a table's coverage.
        signature: Signatures over the manifest; empty when unsigned.
    """

    format: str
    kind: str
    key: str
    schema: int
    parts: dict[str, Any]
    blobs: tuple[BlobRef, ...]
    provenance: Provenance = Provenance()
    labels: Labels = Labels()
    extra: dict[str, Any] = {}
    signature: dict[str, str] = {}

    def blob(self, role: str) -> BlobRef:
        """The payload with this role.

        Raises:
            IntegrityError: There is none.
        """
        for blob in self.blobs:
            if blob.role == role:
                return blob
        raise IntegrityError(f"Entry {self.key[:12]} has no {role!r} payload.", name=self.key, reason="manifest")

    @property
    def size(self) -> int:
        """Bytes of all payloads, uncompressed."""
        return sum(blob.size for blob in self.blobs)

    def to_json(self) -> dict[str, Any]:
        """The manifest as plain JSON values."""
        plain = msgspec.to_builtins(self)
        assert isinstance(plain, dict)
        return plain


def blob_digest(data: Any) -> str:
    """``blake3:`` digest of a buffer, hashed on all cores where that pays."""
    view = memoryview(data).cast("B")
    return "blake3:" + blake3.blake3(view, max_threads=hash_threads(view.nbytes)).hexdigest()


def describe_blob(role: str, data: Any) -> BlobRef:
    """The reference of a payload that is about to be stored."""
    view = memoryview(data).cast("B")
    chunks: tuple[str, ...] = ()
    if view.nbytes > CHUNK_BYTES:
        chunks = tuple(
            blob_digest(view[start : start + CHUNK_BYTES]).partition(":")[2]
            for start in range(0, view.nbytes, CHUNK_BYTES)
        )
    return BlobRef(role=role, digest=blob_digest(view), size=view.nbytes, chunks=chunks)


def unpacked(ref: BlobRef) -> BlobRef:
    """The reference without any word on how a store packs the blob."""
    return msgspec.structs.replace(ref, codec="", stored_size=0) if ref.codec or ref.stored_size else ref


def plain(manifest: Manifest) -> Manifest:
    """The manifest as its maker sealed it, before a store packed its blobs. Compare and sign this form."""
    return msgspec.structs.replace(manifest, blobs=tuple(unpacked(ref) for ref in manifest.blobs))


def seal(
    key: Key,
    blobs: tuple[BlobRef, ...],
    *,
    provenance: Provenance,
    labels: Labels | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest of a finished entry."""
    return Manifest(
        format=FORMAT,
        kind=key.kind.value,
        key=key.digest,
        schema=KEY_SCHEMA,
        parts=dict(key.parts),
        blobs=blobs,
        provenance=provenance,
        labels=labels or Labels(),
        extra=dict(extra or {}),
    )


def encode(manifest: Manifest) -> bytes:
    """The manifest as it is stored: JSON with sorted keys, so that equal manifests are equal bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


_DECODER = msgspec.json.Decoder(Manifest)


def decode(data: bytes, *, kind: Kind, digest: str) -> Manifest:
    """Read a stored manifest and check that it is what its name says.

    Args:
        data: Bytes from the store.
        kind: Folder it was found in.
        digest: Name it was found under.

    Raises:
        IntegrityError: Damaged, oversized, of another key or kind, or of an unknown format. ``reason`` is
            ``manifest``, or ``format`` for a document of another major version, which is no damage.
    """
    name = f"{kind.value}/{digest}"

    def damaged(why: str, reason: str = "manifest") -> IntegrityError:
        return IntegrityError(f"Manifest {name} {why}.", name=name, reason=reason)

    if len(data) > MAX_MANIFEST_BYTES:
        raise damaged(f"is {len(data)} bytes long, more than the {MAX_MANIFEST_BYTES} any manifest needs")
    try:
        manifest = _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        other = _other_format(data)
        if other:
            raise damaged(f"has format {other!r}, this release reads {FORMAT!r}; it is left alone", "format") from error
        raise damaged("cannot be read: " + str(error)) from error
    if _PROVED.get((kind, digest)) == data:
        return manifest
    if manifest.format != FORMAT:
        raise damaged(f"has format {manifest.format!r}, this release reads {FORMAT!r}; it is left alone", "format")
    if manifest.kind != kind.value or manifest.key != digest:
        raise damaged(f"claims to be {manifest.kind}/{manifest.key}")
    if manifest.schema == KEY_SCHEMA and not _gives(kind, manifest.parts, digest):
        raise damaged("lists key parts that do not give its own key")
    for blob in manifest.blobs:
        expected = -(-blob.size // CHUNK_BYTES) if blob.size > CHUNK_BYTES else 0
        hexes = (blob.hex, *blob.chunks)
        sizes = 0 <= blob.size <= LARGEST_INT and len(blob.chunks) in {0, expected}
        if not sizes or not all(map(_HEX_DIGEST.fullmatch, hexes)):
            raise damaged(f"describes an impossible {blob.role!r} payload")
    if len(_PROVED) >= 256:
        _PROVED.clear()
    _PROVED[kind, digest] = data
    return manifest


_HEX_DIGEST = re.compile("[0-9a-f]{64}")

#: Manifests, as stored, that passed every check: a service reads the same few at every hit.
_PROVED: dict[tuple[Kind, str], bytes] = {}


def _gives(kind: Kind, parts: Mapping[str, Any], digest: str) -> bool:
    try:
        return digest_of(kind, parts) == digest
    except (ValueError, OverflowError, RecursionError):  # parts that no key can have
        return False


def _other_format(data: bytes) -> str | None:
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    claimed = document.get("format") if isinstance(document, dict) else None
    return claimed if isinstance(claimed, str) and claimed.startswith("trt_warmcache/") and claimed != FORMAT else None
