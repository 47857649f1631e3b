"""A store behind any fsspec URL: object stores first, then whatever else fsspec can reach.

What it owes to the failures of others: a refused write is looked at before it is believed, because the answer to a
first attempt may have been lost; an error is never a miss, and a missing bucket is an error; whether a server honours
conditions is found out, not assumed; bytes are verified while they land and re-read before the store is blamed.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trt_warmcache._words import Word
from trt_warmcache.errors import ConfigError, IntegrityError, StoreError, StoreReason
from trt_warmcache.lease import DEFAULT_LEASE_SECONDS, Lease
from trt_warmcache.manifest import CHUNK_BYTES, BlobRef
from trt_warmcache.stores import _packing
from trt_warmcache.stores._base import (
    Lock,
    LockScope,
    ObjectInfo,
    Payload,
    Store,
    StoreCapabilities,
    WritePiece,
    blob_name,
    missing,
    verify_view,
)
from trt_warmcache.stores._download import Download
from trt_warmcache.stores._errors import from_os_error
from trt_warmcache.stores._faults import Fault, RequestError, diagnose
from trt_warmcache.stores._landing import Landing
from trt_warmcache.stores._probe import Proof, probe
from trt_warmcache.stores._requests import Requests, Transport
from trt_warmcache.stores._urls import READ_ONLY
from trt_warmcache.stores._wire import Wire, as_bytes, head_or_none, look, look_or_none

__all__ = ["Compression", "FsspecStore"]

log = logging.getLogger("trt_warmcache")

_T = TypeVar("_T")

_LARGE = 32 * 1024 * 1024  # above, an object is sent in parts


class Compression(Word):
    """Whether blobs are packed for the wire."""

    AUTO = "auto"
    """Where a sample of 4 MiB gains more than a tenth with zstd level 1, and for timing caches and calibration tables."""
    NEVER = "never"
    """Never; blobs that were packed by others are still read."""


class FsspecStore(Store):
    """Entries in an object store or on any other file system that fsspec knows.

    Nothing is imported, connected or read before the first use. Each process has connections of its own, so a store
    object survives a fork. Reading writes nothing.

    Args:
        url: Any fsspec URL: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``hf://``, ``sftp://``, ``https://`` (read
            only), ``memory://``. Buckets are never created.
        storage_options: Options of the backend, such as credentials and endpoint. They never appear in logs, errors
            or the store's representation.
        read_only: Never try to write or delete.
        cache_dir: Folder in which downloads land (as files without a name, gone when closed); None keeps them in
            memory.
        timeout: Seconds that one request may take with all its repetitions. A blob travels in pieces of 8 MiB, each
            a request of its own, so a large blob may take longer but never stalls for longer.
        concurrency: Requests under way at once while a blob is moved.
        transport: See :class:`Transport`.
        compression: See :class:`Compression`.
        lease_seconds: How long a builder that died on another machine can block this one.

    Raises:
        ConfigError: No such protocol, its package is not installed (the message names the extra), or an argument that
            cannot be meant.
    """

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        read_only: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        timeout: float = 60.0,
        concurrency: int = 8,
        transport: Transport | str = Transport.AUTO,
        compression: Compression | str = Compression.AUTO,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
    ) -> None:
        if timeout <= 0 or concurrency < 1:
            raise ConfigError(f"timeout and concurrency must be positive, not {timeout!r} and {concurrency!r}.")
        self._requests = Requests(
            url, storage_options or {}, transport=_choice(Transport, transport, "transport"), timeout=timeout
        )
        self.url = self._requests.url
        self._compression = _choice(Compression, compression, "compression")
        self._read_only = read_only or self._requests.protocol in READ_ONLY
        self._folder = None if cache_dir is None else Path(cache_dir).expanduser().absolute()
        self._timeout = timeout
        self._concurrency = concurrency
        self._lease_seconds = lease_seconds
        self._proof: Proof | None = None

    @property
    def wire(self) -> Wire:
        """The connections of this process; made when first asked for."""
        return self._requests.wire

    # ---- reading ----------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> StoreCapabilities:
        if self._read_only:
            return StoreCapabilities(writable=False, deletable=False, listable=self._requests.protocol not in READ_ONLY)
        try:
            proof = self._proven()
        except StoreError as error:
            log.debug("could not find out what %s can do: %s", self.url, error.message)
            return StoreCapabilities(known=False)
        return StoreCapabilities(
            writable=proof.writable,
            deletable=proof.writable,
            exclusive_create=proof.create,
            lock_scope=LockScope.FLEET if proof.create else LockScope.NONE,
        )

    def read(self, name: str, *, limit: int) -> bytes | None:
        return self._requests.call_or_none(f"read {name}", lambda wire, seconds: look(wire, name, limit, seconds))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        doing = f"list {prefix}"
        # All of it before the first is given: a caller that is slow, or that deletes what it is given, must not keep a
        # listing open or shift its pages.
        found = self._requests.call_or_none(doing, lambda wire, seconds: [*wire.list(prefix, seconds)])
        if not found:
            self._requests.confirm_bucket(doing)
        for name, head in found or ():
            if name.startswith(prefix) and not any(part.startswith(".") for part in name.split("/")):
                yield ObjectInfo(name, head.size, head.modified)

    def temporaries(self) -> Iterator[ObjectInfo]:
        if not self.wire.leaves_temporaries:
            return
        doing = "look for temporary files"
        for name, head in self._requests.call_or_none(doing, lambda wire, seconds: [*wire.list("", seconds)]) or ():
            if name.rpartition("/")[2].startswith(".tmp-"):
                yield ObjectInfo(name, head.size, head.modified)

    def fetch(self, ref: BlobRef, *, rehash: bool = False) -> Payload:
        try:
            landing = Landing.nameless(ref.size, self._folder)
        except OSError as error:
            where = "memory" if self._folder is None else str(self._folder)
            raise from_os_error(
                error, doing=f"make room for {ref.size} bytes of {blob_name(ref)}", store=where
            ) from error
        with landing:
            self.fetch_into(ref, landing.write)
            payload = landing.payload()
        if ref.size > CHUNK_BYTES and not ref.chunks:
            try:
                verify_view(ref, payload.view, self.url)
            except BaseException:
                payload.close()
                raise
        return payload

    def fetch_into(self, ref: BlobRef, write: WritePiece) -> None:
        # The digest is the blob's identity; how its bytes are packed is this store's affair, and a manifest that came
        # by way of another store may not know.
        plain = msgspec.structs.replace(ref, codec="", stored_size=0)
        packed = ref if ref.codec else msgspec.structs.replace(ref, codec=_packing.CODEC)
        if ref.codec not in {"", _packing.CODEC}:
            raise IntegrityError(
                f"{blob_name(plain)} in {self.url} is packed with {ref.codec!r}, which this release cannot read.",
                name=blob_name(plain),
                reason="format",
            )
        kinds = (packed, plain) if ref.codec else (plain, packed)
        for kind in kinds:
            download = Download(
                kind,
                write,
                call=self._requests.call,
                url=self.url,
                concurrency=self._concurrency,
                ranges_sure=self.wire.ranges_sure,
            )
            if download.run():
                self._requests.saw_bucket()
                return
        self._requests.confirm_bucket(f"read {blob_name(ref)}")
        raise missing(ref, self.url)

    # ---- writing ----------------------------------------------------------------------------------------------

    def write(self, name: str, data: Any) -> None:
        self._refuse_if_read_only(f"write {name}")
        view = memoryview(data).cast("B")

        def part(act: Callable[[float], _T]) -> _T:
            try:
                return self._requests.call(f"write a part of {name}", lambda _, seconds: act(seconds))
            except RequestError as error:
                error.final = True
                raise

        def send(wire: Wire, seconds: float) -> None:
            if view.nbytes > _LARGE:
                wire.upload(name, view, seconds, self._concurrency, part)
            else:
                wire.put(name, as_bytes(data), seconds)

        self._requests.call_write(f"write {name}", send, deadlines=1 + view.nbytes // _LARGE)

    def create(self, name: str, data: Any) -> bool:
        self._refuse_if_read_only(f"write {name}")
        if not self._proven().create:
            return super().create(name, data)
        content = as_bytes(data)

        def send(wire: Wire, seconds: float) -> bool:
            try:
                wire.create(name, content, seconds)
                return True
            except Exception as error:
                if not diagnose(error).fault.passes:
                    raise
                # Refused, or the answer was lost. Either way our write may be the one that is there: the object
                # itself tells.
                present = look_or_none(wire, name, len(content), seconds)
                if present is None:
                    raise
                return present == content

        return self._requests.call_write(f"create {name}", send)

    def swap(self, name: str, data: Any, *, expected: bytes) -> bool:
        self._refuse_if_read_only(f"write {name}")
        if not self._proven().replace:
            return super().swap(name, data, expected=expected)
        content = as_bytes(data)
        sent = False

        def send(wire: Wire, seconds: float) -> bool:
            nonlocal sent
            head = head_or_none(wire, name, seconds)
            # Version before content: if the content is another's by then, the version is stale and the write refused.
            present = None if head is None else look_or_none(wire, name, max(len(expected), len(content)), seconds)
            if head is None or present != expected:
                return sent and present == content
            sent = True
            wire.replace(name, content, head.tag, seconds)
            return True

        return self._requests.call_write(f"replace {name}", send)

    def delete(self, name: str) -> bool:
        self._refuse_if_read_only(f"delete {name}")
        sent = False

        def send(wire: Wire, seconds: float) -> bool:
            nonlocal sent
            if head_or_none(wire, name, seconds) is None:
                return sent
            sent = True
            wire.delete(name, seconds)
            return True

        if self._requests.call_or_none(f"delete {name}", send):
            return True
        self._requests.confirm_bucket(f"delete {name}")
        return sent

    def pack(self, ref: BlobRef, data: Any) -> tuple[BlobRef, Any]:
        ref, data = super().pack(ref, data)
        if self._compression is Compression.NEVER or not _packing.available():
            return ref, data
        return _packing.pack(ref, data)

    def lock(self, name: str) -> Lock | None:
        """A lease, where this server really refuses to create what exists."""
        return Lease(self, name, seconds=self._lease_seconds) if self.capabilities.exclusive_create else None

    def close(self) -> None:
        self._requests.close()

    def _refuse_if_read_only(self, doing: str) -> None:
        if self._read_only:
            raise StoreError(
                f"Could not {doing} in {self.url}: the store is read-only. Put a writable store before it, or open it for writing.",
                reason=StoreReason.DENIED,
                store=self.url,
            )

    # ---- what the server can do -------------------------------------------------------------------------------

    def _proven(self) -> Proof:
        """What this server really does with conditions; found out once."""
        self.wire  # noqa: B018  renews the locks after a fork
        with self._requests.probing:
            if self._proof is None:
                self._proof = self._probe()
                if self._proof.writable and not self._proof.create:
                    log.warning(
                        "%s does not create objects exclusively, so several nodes may build the same engine at once; "
                        "results stay right, and the last entry written stays",
                        self.url,
                    )
            return self._proof

    def _probe(self) -> Proof:
        if not self.wire.conditional:
            return Proof()
        try:
            return self._requests.call_write("try conditional writes", self._try_out)
        except RequestError as error:
            if error.fault is Fault.DENIED:
                return Proof(writable=False)
            if error.fault is Fault.FATAL:
                log.debug("%s refuses conditional writes: %s", self.url, error.message)
                return Proof()
            raise

    def _try_out(self, wire: Wire, seconds: float) -> Proof:
        name = f"leases/probe-{secrets.token_hex(16)}"  # should it stay, housekeeping takes it for an old lease
        try:
            return probe(wire, name, seconds)
        finally:
            self._tidy(name)

    def _tidy(self, name: str) -> None:
        try:
            self._requests.once(f"delete {name}", lambda wire, seconds: wire.delete(name, seconds), self._timeout / 3)
        except StoreError as error:
            log.debug("could not remove a probe: %s", error.message)


_E = TypeVar("_E", bound=Enum)


def _choice(kind: type[_E], value: Any, name: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(each.value) for each in kind)
        raise ConfigError(f"{name} must be one of {known}, not {value!r}.") from None
