"""A store behind any fsspec URL: object stores first, then whatever else fsspec can reach.

What it owes to the failures of others: a refused write is looked at before it is believed, because the answer to a
first attempt may have been lost; an error is never a miss, and a missing bucket is an error; whether a server honours
conditions is found out, not assumed; bytes are verified while they land and re-read before the store is blamed.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import blake3
import msgspec

from trt_warmcache.errors import ConfigError, IntegrityError, StoreError, StoreReason
from trt_warmcache.lease import DEFAULT_LEASE_SECONDS, Lease
from trt_warmcache.manifest import CHUNK_BYTES, BlobRef
from trt_warmcache.stores import _obstore, _packing
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
from trt_warmcache.stores._faults import Fault, chain, diagnose
from trt_warmcache.stores._landing import Landing
from trt_warmcache.stores._wire import Head, Wire, as_bytes, fsspec_wire

__all__ = ["Compression", "FsspecStore", "Transport"]

log = logging.getLogger("trt_warmcache")

_T = TypeVar("_T")

#: Module that must be installed, and what installs it.
_BACKENDS = {
    "s3": ("s3fs", "trt_warmcache[s3]"),
    "s3a": ("s3fs", "trt_warmcache[s3]"),
    "gs": ("gcsfs", "trt_warmcache[gcs]"),
    "gcs": ("gcsfs", "trt_warmcache[gcs]"),
    "az": ("adlfs", "trt_warmcache[azure]"),
    "abfs": ("adlfs", "trt_warmcache[azure]"),
    "abfss": ("adlfs", "trt_warmcache[azure]"),
    "hf": ("huggingface_hub", "huggingface_hub"),
    "http": ("aiohttp", "aiohttp"),
    "https": ("aiohttp", "aiohttp"),
    "sftp": ("paramiko", "paramiko"),
    "ssh": ("paramiko", "paramiko"),
    "memory": ("fsspec", "fsspec"),
    "file": ("fsspec", "fsspec"),
    "local": ("fsspec", "fsspec"),
}

#: fsspec's own caches hand out torn files when several processes read one uncached URL.
_CACHES = frozenset({"simplecache", "filecache", "blockcache", "cached"})

_READ_ONLY = frozenset({"http", "https"})

_LARGE = 32 * 1024 * 1024  # above, an object is sent in parts
_ATTEMPTS_PER_DEADLINE = 3  # a stalled connection costs a third of the deadline, not all of it
_RACERS = 8
_READS_OF_BAD_CHUNK = 3


class Transport(str, Enum):
    """Who carries the bytes."""

    AUTO = "auto"
    """obstore's native client for S3 and Azure where it is installed and understands the storage options, else fsspec."""
    FSSPEC = "fsspec"
    """The fsspec backend of the protocol."""
    OBSTORE = "obstore"
    """obstore's native client; an error where it cannot be used."""

    __str__ = str.__str__


class Compression(str, Enum):
    """Whether blobs are packed for the wire."""

    AUTO = "auto"
    """Where a sample of 4 MiB gains more than a tenth with zstd level 1, and for timing caches and calibration tables."""
    NEVER = "never"
    """Never; blobs that were packed by others are still read."""

    __str__ = str.__str__


@dataclass(frozen=True)
class _Proof:
    """What a probe found out about a server.

    Attributes:
        create: Create-if-absent lets one of many racing writers win.
        replace: A write on condition of a stale version is refused.
        writable: We may write here.
    """

    create: bool = False
    replace: bool = False
    writable: bool = True


class _RequestError(StoreError):
    """A store error that remembers what it meant; never leaves this module as a type of its own."""

    fault: Fault = Fault.FATAL
    final: bool = False  # was tried again already, for as long as allowed

    def __reduce__(self) -> tuple[Any, ...]:
        made, (_, *rest) = super().__reduce__()
        rest[1] = {name: value for name, value in rest[1].items() if name not in {"fault", "final"}}
        return (made, (StoreError, *rest))


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
        self.url = _public(url)
        self._protocol = _protocol_of(url, self.url)
        self._address = url
        self._options = dict(storage_options or {})
        for name in ("asynchronous", "loop"):
            if name in self._options:
                raise ConfigError(f"storage_options[{name!r}] is not for a store: it runs its own requests.")
        if timeout <= 0 or concurrency < 1:
            raise ConfigError(f"timeout and concurrency must be positive, not {timeout!r} and {concurrency!r}.")
        self._transport = _choice(Transport, transport, "transport")
        self._compression = _choice(Compression, compression, "compression")
        self._read_only = read_only or self._protocol in _READ_ONLY
        self._folder = None if cache_dir is None else Path(cache_dir).expanduser().absolute()
        self._timeout = timeout
        self._concurrency = concurrency
        self._secrets = _secrets(url, self._options)
        self._native = self._native_config()
        if self._native is None:
            _require(self._protocol)
        if importlib.util.find_spec("stamina") is None:
            raise ConfigError(f"Stores behind URLs need the stamina package: pip install {_extra(self._protocol)}.")
        self._lease_seconds = lease_seconds
        self._proof: _Proof | None = None
        self._reset()

    def _native_config(self) -> dict[str, str] | None:
        """Configuration for obstore, or None to go through fsspec."""
        if self._transport is Transport.FSSPEC:
            return None
        config = _obstore.obstore_config(self._protocol, self._options)
        if importlib.util.find_spec("obstore") is None:
            config = "obstore is not installed (pip install trt_warmcache[obstore])"
        if isinstance(config, dict):
            return config
        if self._transport is Transport.OBSTORE:
            raise ConfigError(f"transport='obstore' is not possible for {self.url}: {config}. Use 'auto' or 'fsspec'.")
        return None

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._probing = threading.Lock()
        self._wire: Wire | None = None
        self._bucket_seen = False

    # ---- requests ---------------------------------------------------------------------------------------------

    @property
    def wire(self) -> Wire:
        """The connections of this process; made when first asked for."""
        if self._pid != os.getpid():
            self._reset()  # after a fork: sockets, loops and locks of the parent are not ours
        with self._guard:
            if self._wire is None:
                self._wire = self._open()
            return self._wire

    def _open(self) -> Wire:
        if self._native is not None and not (_obstore.forked() and self._transport is Transport.AUTO):
            bucket, _, prefix = urlsplit(self._address).path.lstrip("/").partition("/")
            host = urlsplit(self._address).netloc.rpartition("@")[2]
            bucket, prefix = (host, urlsplit(self._address).path.strip("/")) if host else (bucket, prefix)
            return _obstore.ObstoreWire(self._protocol, bucket, f"{prefix}/{LAYOUT}", self._native, self._timeout)
        try:
            return fsspec_wire(self._address, self._options, LAYOUT)
        except ImportError as error:
            raise ConfigError(
                f"{self.url} needs a package that is not installed: pip install {_extra(self._protocol)}."
            ) from error
        except (TypeError, ValueError) as error:
            words = self._scrubbed(str(error))
            raise ConfigError(f"{self.url} cannot be opened with these storage options: {words}") from None
        except Exception as error:  # noqa: BLE001  whatever a backend raises becomes a typed error
            # Some backends connect at once, and raise whatever their protocol raises.
            raise self._error(error, "connect") from self._cause(error)

    def _call(self, doing: str, act: Callable[[Wire, float], _T], *, deadlines: int = 1) -> _T:
        """Send a request until it is answered, refused, or out of time.

        Args:
            doing: For messages.
            act: Sends it once, within the seconds given.
            deadlines: How many times the deadline it may take: for work that is many requests.

        Raises:
            _RequestError: Any failure, told apart by its ``fault``.
        """
        import stamina

        limit = self._timeout * deadlines
        deadline = time.monotonic() + limit

        def again(error: Exception) -> bool:
            passes = isinstance(error, _RequestError) and error.fault.passes and not error.final
            return passes and time.monotonic() < deadline

        for attempt in stamina.retry_context(
            on=again, attempts=None, timeout=limit, wait_initial=0.1, wait_max=5.0, wait_jitter=0.5
        ):
            with attempt:
                left = max(0.05, deadline - time.monotonic())
                return self._once(doing, act, min(left, self._timeout / _ATTEMPTS_PER_DEADLINE))
        raise AssertionError("stamina ends with a result or an error")

    def _once(self, doing: str, act: Callable[[Wire, float], _T], seconds: float) -> _T:
        wire = self.wire
        try:
            return act(wire, seconds)
        except (StoreError, ConfigError, IntegrityError):
            raise
        except Exception as error:  # noqa: BLE001  whatever a backend raises becomes a typed error
            found = self._error(error, doing)
            if found.fault is Fault.NO_RANGES and self._transport is Transport.AUTO:
                # This server's ranged answers are not marked as such, which obstore refuses. The digests tell whether
                # they are right.
                self._native = None
                with self._guard:
                    self._wire = None
                _require(self._protocol)
                return self._once(doing, act, seconds)
            raise found from self._cause(error)

    def _error(self, error: BaseException, doing: str) -> _RequestError:
        diagnosis = diagnose(error)
        fault = diagnosis.fault
        meaning = {Fault.NO_BUCKET: "the bucket does not exist", Fault.MISSING: "there is no such object"}
        told = meaning.get(fault, fault.value)
        words = self._scrubbed(diagnosis.words)
        return _RequestError(
            f"Could not {doing} in {self.url}: {told} ({words}). {fault.advice}.",
            reason=fault.reason,
            store=self.url,
            fault=fault,
        )

    def _cause(self, error: BaseException) -> BaseException:
        """The backend's exception, unless its text gives a secret away."""
        texts = [f"{link} {link.args!r}" for link in chain(error)]
        if any(secret in text for text in texts for secret in self._secrets):
            return RuntimeError(f"{type(error).__name__}: {self._scrubbed(str(error))}")
        return error

    def _scrubbed(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _confirm_bucket(self, doing: str) -> None:
        """Tell a missing object from a missing bucket, where the service's answer did not."""
        if self._bucket_seen:
            return

        def look(wire: Wire, seconds: float) -> bool:
            return wire.bucket_exists(seconds)

        try:
            there = self._call(doing, look)
        except _RequestError as error:
            if error.fault is Fault.NO_BUCKET:
                raise
            if error.fault not in {Fault.DENIED, Fault.MISSING}:
                raise
            there = error.fault is Fault.DENIED  # whoever may read objects need not be allowed to ask for the bucket
        if not there:
            raise self._no_bucket(doing)
        self._bucket_seen = True

    def _no_bucket(self, doing: str) -> StoreError:
        return StoreError(
            f"Could not {doing} in {self.url}: the bucket does not exist. {Fault.NO_BUCKET.advice}.",
            reason=StoreReason.UNAVAILABLE,
            store=self.url,
        )

    # ---- reading ----------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> StoreCapabilities:
        if self._read_only:
            return StoreCapabilities(writable=False, deletable=False, listable=self._protocol not in _READ_ONLY)
        try:
            proof = self._proven()
        except StoreError as error:
            log.debug("could not find out what %s can do: %s", self.url, error.message)
            proof = _Proof()
        return StoreCapabilities(
            writable=proof.writable,
            deletable=proof.writable,
            exclusive_create=proof.create,
            lock_scope=LockScope.FLEET if proof.create else LockScope.NONE,
        )

    def read(self, name: str, *, limit: int) -> bytes | None:
        return self._call_or_none(f"read {name}", lambda wire, seconds: self._look(wire, name, limit, seconds))

    def _look(self, wire: Wire, name: str, limit: int, seconds: float) -> bytes:
        try:
            return as_bytes(wire.get(name, 0, limit + 1, seconds))[: limit + 1]
        except Exception as error:
            # An empty object has no first byte to give.
            if diagnose(error).fault is Fault.RANGE:
                return b""
            raise

    def _call_or_none(self, doing: str, act: Callable[[Wire, float], _T]) -> _T | None:
        try:
            result = self._call(doing, act)
        except _RequestError as error:
            if error.fault is not Fault.MISSING:
                raise
            self._confirm_bucket(doing)
            return None
        # An empty answer proves nothing: some services list a bucket that is not there as an empty one.
        self._bucket_seen = self._bucket_seen or bool(result)
        return result

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        doing = f"list {prefix}"
        # All of it before the first is given: a caller that is slow, or that deletes what it is given, must not keep a
        # listing open or shift its pages.
        found = self._call_or_none(doing, lambda wire, seconds: [*wire.list(prefix, seconds)])
        if not found:
            self._confirm_bucket(doing)
        for name, head in found or ():
            if name.startswith(prefix) and not any(part.startswith(".") for part in name.split("/")):
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
            if _Download(self, kind, write).run():
                self._bucket_seen = True
                return
        self._confirm_bucket(f"read {blob_name(ref)}")
        raise missing(ref, self.url)

    # ---- writing ----------------------------------------------------------------------------------------------

    def write(self, name: str, data: Any) -> None:
        self._refuse_if_read_only(f"write {name}")
        view = memoryview(data).cast("B")

        def part(act: Callable[[float], _T]) -> _T:
            try:
                return self._call(f"write a part of {name}", lambda _, seconds: act(seconds))
            except _RequestError as error:
                error.final = True
                raise

        def send(wire: Wire, seconds: float) -> None:
            if view.nbytes > _LARGE:
                wire.upload(name, view, seconds, self._concurrency, part)
            else:
                wire.put(name, as_bytes(data), seconds)

        self._call_write(f"write {name}", send, deadlines=1 + view.nbytes // _LARGE)

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
                present = self._present(wire, name, len(content), seconds)
                if present is None:
                    raise
                return present == content

        return self._call_write(f"create {name}", send)

    def swap(self, name: str, data: Any, *, expected: bytes) -> bool:
        self._refuse_if_read_only(f"write {name}")
        if not self._proven().replace:
            return super().swap(name, data, expected=expected)
        content = as_bytes(data)
        sent = False

        def send(wire: Wire, seconds: float) -> bool:
            nonlocal sent
            head = self._head(wire, name, seconds)
            # Version before content: if the content is another's by then, the version is stale and the write refused.
            present = None if head is None else self._present(wire, name, max(len(expected), len(content)), seconds)
            if head is None or present != expected:
                return sent and present == content
            sent = True
            wire.replace(name, content, head.tag, seconds)
            return True

        return self._call_write(f"replace {name}", send)

    def delete(self, name: str) -> bool:
        self._refuse_if_read_only(f"delete {name}")
        sent = False

        def send(wire: Wire, seconds: float) -> bool:
            nonlocal sent
            if self._head(wire, name, seconds) is None:
                return sent
            sent = True
            wire.delete(name, seconds)
            return True

        if self._call_or_none(f"delete {name}", send):
            return True
        self._confirm_bucket(f"delete {name}")
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
        self._wire = None

    def _present(self, wire: Wire, name: str, limit: int, seconds: float) -> bytes | None:
        try:
            return self._look(wire, name, limit, seconds)
        except Exception as error:
            if diagnose(error).fault is Fault.MISSING:
                return None
            raise

    def _head(self, wire: Wire, name: str, seconds: float) -> Head | None:
        try:
            return wire.head(name, seconds)
        except Exception as error:
            if diagnose(error).fault is Fault.MISSING:
                return None
            raise

    def _call_write(self, doing: str, act: Callable[[Wire, float], _T], *, deadlines: int = 1) -> _T:
        try:
            result = self._call(doing, act, deadlines=deadlines)
        except _RequestError as error:
            if error.fault is Fault.MISSING:
                raise self._no_bucket(doing) from error  # nothing else can be missing for a write
            raise
        self._bucket_seen = True
        return result

    def _refuse_if_read_only(self, doing: str) -> None:
        if self._read_only:
            raise StoreError(
                f"Could not {doing} in {self.url}: the store is read-only. Put a writable store before it, or open it for writing.",
                reason=StoreReason.DENIED,
                store=self.url,
            )

    # ---- what the server can do -------------------------------------------------------------------------------

    def _proven(self) -> _Proof:
        """What this server really does with conditions; found out once."""
        self.wire  # noqa: B018  renews the locks after a fork
        with self._probing:
            if self._proof is None:
                self._proof = self._probe()
                if self._proof.writable and not self._proof.create:
                    log.warning(
                        "%s does not create objects exclusively, so several nodes may build the same engine at once; "
                        "results stay right, and the last entry written stays",
                        self.url,
                    )
            return self._proof

    def _probe(self) -> _Proof:
        if not self.wire.conditional:
            return _Proof()
        try:
            return self._call_write("try conditional writes", self._try_out)
        except _RequestError as error:
            if error.fault is Fault.DENIED:
                return _Proof(writable=False)
            if error.fault is Fault.FATAL:
                log.debug("%s refuses conditional writes: %s", self.url, error.message)
                return _Proof()
            raise

    def _try_out(self, wire: Wire, seconds: float) -> _Proof:
        """Race some writers for one object, then try what must be refused."""
        name = f"leases/probe-{secrets.token_hex(16)}"  # should it stay, housekeeping takes it for an old lease
        barrier = threading.Barrier(_RACERS)

        def compete(number: int) -> bool:
            barrier.wait(seconds)
            return self._accepted(lambda: wire.create(name, b"racer %d" % number, seconds))

        try:
            with ThreadPoolExecutor(_RACERS, "trt_warmcache-probe") as pool:
                wins = list(pool.map(compete, range(_RACERS)))
            if not any(wins):
                # Every racer was told of a collision: nothing is known yet.
                raise FileExistsError(name)
            if wins.count(True) > 1 or self._look(wire, name, 100, seconds) != b"racer %d" % wins.index(True):
                return _Proof()
            if self._accepted(lambda: wire.create(name, b"late", seconds)):
                return _Proof()
            return _Proof(create=True, replace=self._replaces(wire, name, seconds))
        finally:
            self._tidy(name)

    def _replaces(self, wire: Wire, name: str, seconds: float) -> bool:
        tag = wire.head(name, seconds).tag
        if not tag:
            return False
        try:
            fresh = self._accepted(lambda: wire.replace(name, b"second", tag, seconds))
            stale = self._accepted(lambda: wire.replace(name, b"third", tag, seconds))
        except NotImplementedError:
            return False
        return fresh and not stale and self._look(wire, name, 100, seconds) == b"second"

    def _accepted(self, send: Callable[[], None]) -> bool:
        try:
            send()
            return True
        except Exception as error:
            if diagnose(error).fault in {Fault.EXISTS, Fault.CONFLICT}:
                return False
            raise

    def _tidy(self, name: str) -> None:
        try:
            self._once(f"delete {name}", lambda wire, seconds: wire.delete(name, seconds), self._timeout / 3)
        except StoreError as error:
            log.debug("could not remove a probe: %s", error.message)


class _Download:
    """One blob on its way: ranges fetched side by side, each verified before it is handed over.

    Args:
        store: Where from.
        ref: The blob, packed as its reference says.
        write: Takes bytes and their offset.
    """

    def __init__(self, store: FsspecStore, ref: BlobRef, write: WritePiece) -> None:
        self._store = store
        self._ref = ref
        self._write = write
        self._name = blob_name(ref)
        self._sizes = [min(CHUNK_BYTES, ref.size - at) for at in range(0, ref.size, CHUNK_BYTES)]
        self._frames: list[_packing.Frame] = []
        self._tail = b""
        self._whole: Any = None
        self._stop = threading.Event()

    def run(self) -> bool:
        """Do it; False if there is no such object."""
        try:
            if self._ref.codec:
                self._read_table()
            if not self._sizes:
                self._land_empty()
            elif len(self._sizes) == 1:
                self._land(0)
            else:
                self._land_all()
        except _RequestError as error:
            if error.fault is Fault.MISSING:
                return False
            if error.fault is Fault.RANGE:
                raise self._wrong_size() from error
            raise
        return True

    def _land_all(self) -> None:
        numbers = range(len(self._sizes))
        if not self._store.wire.ranges_sure:
            # A server that ignores ranges sends everything each time; find out before asking eight times.
            self._land(0)
            numbers = numbers[1:]
        workers = min(self._store._concurrency, len(numbers))
        pool = ThreadPoolExecutor(workers, "trt_warmcache-download")
        try:
            done, waiting = wait([pool.submit(self._land, number) for number in numbers], return_when=FIRST_EXCEPTION)
            self._stop.set()
            for future in waiting:
                future.cancel()
            for future in done:
                future.result()
        finally:
            self._stop.set()
            pool.shutdown(cancel_futures=True)

    def _land(self, number: int) -> None:
        """Fetch, check and hand over one chunk. A wrong one is read again: the wire may be to blame, not the store."""
        previous: bytes | None = None
        problem = ""
        for _ in range(_READS_OF_BAD_CHUNK):
            if self._stop.is_set():
                return
            data, problem = self._read(number)
            if not problem:
                self._write(data, number * CHUNK_BYTES)
                return
            seen = blake3.blake3(data).digest()
            if seen == previous:
                break  # twice the same: so it is stored
            previous = seen
        raise self._wrong_size() if problem == "truncated" else self._wrong_digest(number)

    def _read(self, number: int) -> tuple[Any, str]:
        """A chunk's bytes, and what is wrong with them."""
        size = self._sizes[number]
        if self._ref.codec:
            frame = self._frames[number]
            data = self._range(frame.start, frame.stop)
            if len(data) != frame.stop - frame.start:
                return data, "truncated"
            try:
                unpacked = _packing.unpack_frame(data, size)
            except _packing.PackedError:
                return data, "digest"
            return unpacked, self._check(number, unpacked)
        start = number * CHUNK_BYTES
        last = number == len(self._sizes) - 1
        # One byte more than there should be: an object that is longer must not pass for a whole one.
        data = self._range(start, start + size + last)
        return data, "truncated" if len(data) != size else self._check(number, data)

    def _check(self, number: int, data: Any) -> str:
        if len(self._sizes) > 1 and not self._ref.chunks:
            return ""
        expected = self._ref.chunks[number] if self._ref.chunks else self._ref.hex
        return "" if blake3.blake3(data).hexdigest() == expected else "digest"

    def _range(self, start: int, stop: int) -> Any:
        if self._whole is not None:
            return memoryview(self._whole)[start:stop]
        at = self._ref.stored_size - len(self._tail)
        if self._ref.codec and self._tail and start >= at:
            return memoryview(self._tail)[start - at : stop - at]
        data = self._store._call(f"read {self._name}", lambda wire, seconds: wire.get(self._name, start, stop, seconds))
        view = memoryview(data).cast("B")
        if view.nbytes > stop - start:
            self._whole = view  # the server ignored the range
            return view[start:stop]
        return view

    def _read_table(self) -> None:
        """Read the end of a packed blob, and where its frames lie."""
        ref = self._ref
        if not ref.stored_size:
            head = self._store._call(f"look at {self._name}", lambda wire, seconds: wire.head(self._name, seconds))
            ref = self._ref = msgspec.structs.replace(ref, stored_size=head.size)
        room = 17 + 8 * len(self._sizes)
        start = max(0, ref.stored_size - max(room, _packing.TABLE_BYTES // 16))
        tail = bytes(self._range(start, ref.stored_size + 1))
        if self._whole is not None:
            tail = bytes(memoryview(self._whole)[start:])
        if len(tail) != ref.stored_size - start:
            raise self._wrong_size()
        try:
            self._frames = _packing.frames_of(tail, ref.stored_size, ref.size)
        except _packing.PackedError as error:
            raise IntegrityError(
                f"{self._name} in {self._store.url} {error}.", name=self._name, reason="digest"
            ) from error
        self._tail = tail

    def _land_empty(self) -> None:
        head = self._store._call(f"look at {self._name}", lambda wire, seconds: wire.head(self._name, seconds))
        if head.size:
            raise truncated(self._ref, head.size, self._store.url)
        verify_view(self._ref, memoryview(b""), self._store.url)

    def _wrong_size(self) -> IntegrityError:
        try:
            head = self._store._call(f"look at {self._name}", lambda wire, seconds: wire.head(self._name, seconds))
        except _RequestError as error:
            if error.fault is Fault.MISSING:
                return missing(self._ref, self._store.url)
            raise
        expected = self._ref.stored_size or self._ref.size
        if head.size == expected:
            return IntegrityError(
                f"{self._name} in {self._store.url} has the right size, {expected} bytes, and answers with fewer.",
                name=self._name,
                reason="truncated",
            )
        return IntegrityError(
            f"{self._name} in {self._store.url} has {head.size} bytes, its manifest says {expected}.",
            name=self._name,
            reason="truncated",
        )

    def _wrong_digest(self, number: int) -> IntegrityError:
        return IntegrityError(
            f"{self._name} in {self._store.url} is damaged: chunk {number} of {len(self._sizes)} has another digest than "
            "its manifest says.",
            name=self._name,
            reason="digest",
        )


def _protocol_of(url: str, public: str) -> str:
    protocol, separator, rest = url.partition("://")
    if "::" in url or protocol in _CACHES:
        raise ConfigError(
            f"{public} is a chain of file systems. Give the plain URL: fsspec's caches can hand out torn files, and "
            "a local folder as the nearest layer does their work."
        )
    if not separator or not protocol or (protocol != "memory" and not rest.strip("/")):
        raise ConfigError(f"{public!r} is not a URL of the form protocol://bucket/prefix.")
    return protocol


def _public(url: str) -> str:
    """The URL without credentials: no user information, no query."""
    if not isinstance(url, str):
        raise ConfigError(f"A store's URL is text, not {type(url).__name__}.")
    protocol, separator, rest = url.partition("://")
    rest = rest.partition("?")[0].partition("#")[0]
    authority, slash, path = rest.partition("/")
    if protocol not in {"abfs", "abfss"}:  # there the part before the @ is the container
        authority = authority.rpartition("@")[2]
    return f"{protocol}{separator}{authority}{slash}{path}".rstrip("/")


def _secrets(url: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Every text that must not be shown: what the options hold, and what the URL carries beside the address."""
    found: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, Mapping):
            for name, item in value.items():
                if name not in {"endpoint_url", "region_name", "addressing_style", "project"}:
                    collect(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                collect(item)
        elif isinstance(value, (str, bytes)):
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            found.add(text)
            found.update(part.partition("=")[2] for part in text.split(";") if part.partition("=")[0].lower().endswith(("key", "signature")))  # fmt: skip

    collect(options)
    parts = urlsplit(url)
    if parts.query:
        found.add(parts.query)
    if parts.scheme not in {"abfs", "abfss"} and "@" in parts.netloc:
        found.update(part for part in parts.netloc.rpartition("@")[0].split(":") if part)
    # Short words ("anon", "cloud") would only turn messages into riddles.
    return tuple(sorted((text for text in found if len(text) >= 8), key=len, reverse=True))


def _require(protocol: str) -> None:
    known = _BACKENDS.get(protocol)
    if known is not None:
        if importlib.util.find_spec(known[0]) is None:
            raise ConfigError(f"{protocol}:// needs {known[0]}, which is not installed: pip install {known[1]}.")
        return
    import fsspec

    if protocol not in fsspec.available_protocols():
        raise ConfigError(f"No store for URL scheme {protocol!r}: neither this library nor fsspec knows it.")


def _extra(protocol: str) -> str:
    wanted = _BACKENDS.get(protocol, ("", ""))[1]
    return wanted if wanted.startswith("trt_warmcache") else f"trt_warmcache[remote] {wanted}".rstrip()


_E = TypeVar("_E", bound=Enum)


def _choice(kind: type[_E], value: Any, name: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(each.value) for each in kind)
        raise ConfigError(f"{name} must be one of {known}, not {value!r}.") from None
