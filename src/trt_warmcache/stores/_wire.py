"""Single requests to a remote file system: no retries, no caches, a time limit on each.

A wire moves bytes and raises whatever the backend raises; :mod:`._requests` decides what that means. Each wire belongs
to one process.
"""

from __future__ import annotations

import datetime as dt
import posixpath
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trt_warmcache.stores._faults import Fault, diagnose

__all__ = ["FsspecWire", "Head", "Part", "Wire", "as_bytes", "fsspec_wire", "head_or_none", "look", "look_or_none"]

#: Calls what it is given with the seconds allowed, again where that fails and may pass.
Part = Callable[[Callable[[float], Any]], Any]

#: Part of a multipart upload. S3 allows 10,000 parts, so this reaches objects of 160 GiB.
PART_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Head:
    """What a store tells of an object without its bytes.

    Attributes:
        size: Bytes.
        tag: Changes with each version of the object; "" where the store has no such thing.
        modified: Unix time in seconds; 0 where unknown.
    """

    size: int
    tag: str = ""
    modified: float = 0.0


class Wire(ABC):
    """Requests to one bucket or folder. All names are relative to it; all methods raise the backend's own errors.

    Attributes:
        conditional: There are requests with conditions. Whether the server honours them is for a probe to find out.
        ranges_sure: A ranged request cannot come back as the whole object.
        leaves_temporaries: A writer that dies may leave a temporary file behind.
    """

    conditional = False
    ranges_sure = True
    leaves_temporaries = False

    @abstractmethod
    def get(self, name: str, start: int, stop: int, seconds: float) -> Any:
        """Bytes of a range; fewer where the object ends before."""

    @abstractmethod
    def head(self, name: str, seconds: float) -> Head:
        """Size and version of an object."""

    @abstractmethod
    def put(self, name: str, data: Any, seconds: float) -> None:
        """Write an object whole: readers see the old or the new one."""

    @abstractmethod
    def delete(self, name: str, seconds: float) -> None:
        """Delete an object."""

    @abstractmethod
    def list(self, prefix: str, seconds: float) -> Iterator[tuple[str, Head]]:
        """All objects below a folder, with names relative to the wire's root; `seconds` for each page."""

    @abstractmethod
    def bucket_exists(self, seconds: float) -> bool:
        """Whether the bucket or container is there; True where the notion has no meaning."""

    def create(self, name: str, data: bytes, seconds: float) -> None:
        """Write an object on condition that there is none."""
        raise NotImplementedError

    def replace(self, name: str, data: bytes, tag: str, seconds: float) -> None:
        """Write an object on condition that it still is the version `tag`."""
        raise NotImplementedError

    def upload(self, name: str, data: memoryview, seconds: float, workers: int, part: Part) -> None:
        """Write a large object. Readers see nothing of it before it is whole.

        Args:
            name: Object.
            data: Bytes.
            seconds: Limit for each part.
            workers: Parts under way at once.
            part: Sends one part, again where that fails and may pass.
        """
        self.put(name, data, seconds * (1 + data.nbytes // (2 * PART_BYTES)))


class FsspecWire(Wire):
    """Any fsspec file system. Coroutines run on fsspec's own loop, anything else in threads of its own.

    Args:
        filesystem: An instance that nobody else uses.
        root: Path of the layout folder in it.
        atomic: Writing a file shows it only when it is whole; else a temporary file is renamed.
    """

    def __init__(self, filesystem: Any, root: str, *, atomic: bool) -> None:
        self.fs = filesystem
        self.root = root
        self._atomic = atomic
        self.leaves_temporaries = not atomic

    def path(self, name: str) -> str:
        """Where an object lies in the file system."""
        return f"{self.root}/{name}"

    @property
    def bucket(self) -> str:
        """First part of the path."""
        return self.root.lstrip("/").partition("/")[0]

    def run(self, seconds: float, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the file system, for no longer than this."""
        if self.fs.async_impl and hasattr(self.fs, f"_{method}"):
            from fsspec.asyn import sync

            return sync(self.fs.loop, getattr(self.fs, f"_{method}"), *args, timeout=seconds, **kwargs)
        return within(seconds, lambda: getattr(self.fs, method)(*args, **kwargs))

    def get(self, name: str, start: int, stop: int, seconds: float) -> Any:
        return self.run(seconds, "cat_file", self.path(name), start=start, end=stop)

    def head(self, name: str, seconds: float) -> Head:
        return head_of(self.run(seconds, "info", self.path(name)))

    def put(self, name: str, data: Any, seconds: float) -> None:
        path = self.path(name)
        if self._atomic:
            self.run(seconds, "pipe_file", path, as_bytes(data))
            return
        folder, last = posixpath.split(path)
        temporary = f"{folder}/.tmp-{secrets.token_hex(16)}-{last}"
        self.run(seconds, "makedirs", folder, exist_ok=True)
        try:
            self.run(seconds, "pipe_file", temporary, as_bytes(data))
            self.run(seconds, "mv", temporary, path)
        except BaseException:
            with suppress(Exception):  # the failure under way matters; housekeeping sweeps temporary files
                self.run(seconds, "rm_file", temporary)
            raise

    def delete(self, name: str, seconds: float) -> None:
        self.run(seconds, "rm_file", self.path(name))

    def list(self, prefix: str, seconds: float) -> Iterator[tuple[str, Head]]:
        self.fs.invalidate_cache()
        # find() gets all pages in one call, so it gets the time of many.
        found = self.run(10 * seconds, "find", self.path(prefix.rstrip("/")), detail=True, withdirs=False)
        for path, info in sorted(found.items()):
            at = path.find(self.root.lstrip("/"))
            if info.get("type") == "file" and at >= 0:
                yield path[at + len(self.root.lstrip("/")) :].lstrip("/"), head_of(info)

    def bucket_exists(self, seconds: float) -> bool:
        return True


class _CloudWire(FsspecWire):
    """An object store: buckets, and writes with conditions."""

    conditional = True

    def __init__(self, filesystem: Any, root: str) -> None:
        super().__init__(filesystem, root, atomic=True)

    def bucket_exists(self, seconds: float) -> bool:
        return bool(self.run(seconds, "exists", self.bucket))

    def create(self, name: str, data: bytes, seconds: float) -> None:
        self.run(seconds, "pipe_file", self.path(name), data, mode="create")


class _S3Wire(_CloudWire):
    def __init__(self, filesystem: Any, root: str) -> None:
        super().__init__(filesystem, root)
        filesystem.retries = 1  # s3fs counts attempts, not repetitions

    def head(self, name: str, seconds: float) -> Head:
        bucket, key, _ = self.fs.split_path(self.path(name))
        # Not info(): it takes a missing object for a folder and lists.
        found = self.run(seconds, "call_s3", "head_object", Bucket=bucket, Key=key)
        return Head(int(found["ContentLength"]), str(found.get("ETag", "")), _seconds(found.get("LastModified")))

    def replace(self, name: str, data: bytes, tag: str, seconds: float) -> None:
        self.run(seconds, "pipe_file", self.path(name), data, IfMatch=tag)

    def upload(self, name: str, data: memoryview, seconds: float, workers: int, part: Part) -> None:
        from concurrent.futures import ThreadPoolExecutor

        bucket, key, _ = self.fs.split_path(self.path(name))
        where = {"Bucket": bucket, "Key": key}
        started = self.run(seconds, "call_s3", "create_multipart_upload", **where)
        where["UploadId"] = started["UploadId"]

        def send(number: int) -> dict[str, Any]:
            body = bytes(data[(number - 1) * PART_BYTES : number * PART_BYTES])
            sent = part(lambda left: self.run(left, "call_s3", "upload_part", **where, PartNumber=number, Body=body))
            return {"PartNumber": number, "ETag": sent["ETag"]}

        try:
            with ThreadPoolExecutor(workers, "trt_warmcache-upload") as pool:
                parts = list(pool.map(send, range(1, -(-data.nbytes // PART_BYTES) + 1)))
            self.run(seconds, "call_s3", "complete_multipart_upload", **where, MultipartUpload={"Parts": parts})
        except BaseException:
            # Parts of an upload that was given up are invisible and cost money.
            with suppress(Exception):  # the failure under way matters
                self.run(seconds, "call_s3", "abort_multipart_upload", **where)
            raise


class _GcsWire(_CloudWire):
    def __init__(self, filesystem: Any, root: str) -> None:
        super().__init__(filesystem, root)
        # gcsfs repeats a request up to six times behind its caller's back; the request itself lies under that.
        once = getattr(type(filesystem)._request, "__wrapped__", None)
        if once is not None:
            filesystem._request = once.__get__(filesystem)

    def head(self, name: str, seconds: float) -> Head:
        bucket, key, _ = self.fs.split_path(self.path(name))
        # Not info(): it takes a missing object for a folder and lists.
        found = self.run(seconds, "call", "GET", "b/{}/o/{}", bucket, key, json_out=True)
        return Head(int(found["size"]), str(found.get("generation", "")), _seconds(found.get("updated")))

    def replace(self, name: str, data: bytes, tag: str, seconds: float) -> None:
        bucket, key, _ = self.fs.split_path(self.path(name))
        self.run(
            seconds, "call", "POST", f"{self.fs._location}/upload/storage/v1/b/{{}}/o", bucket,
            uploadType="media", name=key, ifGenerationMatch=tag, data=data,
            headers={"Content-Type": "application/octet-stream"},
        )  # fmt: skip


class _AzureWire(_CloudWire):
    def __init__(self, filesystem: Any, root: str) -> None:
        super().__init__(filesystem, root)
        config = getattr(filesystem.service_client, "_config", None)
        if config is not None:
            config.retry_policy.total_retries = 0
            # By default everything up to 64 MiB goes in one request, and larger blobs in pieces of 4 MiB.
            config.max_single_put_size = 2 * PART_BYTES
            config.max_block_size = PART_BYTES

    def head(self, name: str, seconds: float) -> Head:
        from fsspec.asyn import sync

        container, blob, _ = self.fs.split_path(self.path(name))

        async def look() -> Head:
            # Not info(): it takes a missing object for a folder and lists.
            async with self.fs.service_client.get_blob_client(container=container, blob=blob) as client:
                found = await client.get_blob_properties()
            return Head(int(found.size), str(found.etag), _seconds(found.last_modified))

        head: Head = sync(self.fs.loop, look, timeout=seconds)
        return head

    def replace(self, name: str, data: bytes, tag: str, seconds: float) -> None:
        from azure.core import MatchConditions

        self.run(seconds, "pipe_file", self.path(name), data, etag=tag, match_condition=MatchConditions.IfNotModified)


class _MemoryWire(FsspecWire):
    """fsspec's in-process file system; its exclusive create holds between threads."""

    conditional = True
    _guard = threading.Lock()

    def create(self, name: str, data: bytes, seconds: float) -> None:
        with self._guard:
            self.fs.pipe_file(self.path(name), data, mode="create")


class _HttpWire(FsspecWire):
    """A web server: readable, and not to be trusted to understand ranges."""

    ranges_sure = False


#: Protocols whose writes show an object only when it is whole.
_ATOMIC = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory", "hf", "oss", "oci", "swift"})

_WIRES: Mapping[str, Any] = {
    "s3": _S3Wire,
    "s3a": _S3Wire,
    "gs": _GcsWire,
    "gcs": _GcsWire,
    "az": _AzureWire,
    "abfs": _AzureWire,
    "abfss": _AzureWire,
}

#: Backends that take these options; others would hand them on to something that does not.
_NO_LISTING_CACHE = frozenset(_WIRES) | {"http", "https"}


def fsspec_wire(url: str, storage_options: Mapping[str, Any], layout: str) -> FsspecWire:
    """The wire for a URL, with a file system of its own.

    Raises:
        ImportError: The backend is not installed.
        ValueError: There is no such protocol, or the backend refuses the options.
    """
    import fsspec

    protocol, _, _ = url.partition("://")
    cls = fsspec.get_filesystem_class(protocol)
    options = {**cls._get_kwargs_from_urls(url), **storage_options}
    if protocol in _NO_LISTING_CACHE:
        options["use_listings_cache"] = False
    if protocol in {"s3", "s3a"}:
        options["config_kwargs"] = _s3_config(options.get("config_kwargs"))
    filesystem = cls(**options, skip_instance_cache=True)
    root = posixpath.join(str(cls._strip_protocol(url)).rstrip("/"), layout)
    if protocol in _WIRES:
        wire: FsspecWire = _WIRES[protocol](filesystem, root)
        return wire
    if protocol == "memory":
        return _MemoryWire(filesystem, root, atomic=True)
    if protocol in {"http", "https"}:
        return _HttpWire(filesystem, root, atomic=True)
    return FsspecWire(filesystem, root, atomic=protocol in _ATOMIC)


def _s3_config(given: Mapping[str, Any] | None) -> dict[str, Any]:
    # botocore's own repetitions would multiply with ours; ten connections, its default, starve eight transfers and a
    # listing; and checksums beyond Content-MD5 double the client's work on a blob that is verified by its digest.
    return {
        "max_pool_connections": 32,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **(given or {}),
        "retries": {"total_max_attempts": 1},
    }


def head_of(info: Mapping[str, Any]) -> Head:
    """Size, version and time from what a backend's ``info`` gives."""
    tag = next((info[name] for name in ("generation", "ETag", "etag", "e_tag") if info.get(name)), "")
    when = next((info[name] for name in ("LastModified", "last_modified", "mtime", "updated", "created", "modified") if info.get(name)), 0)  # fmt: skip
    return Head(int(info.get("size") or 0), str(tag), _seconds(when))


def _seconds(when: Any) -> float:
    if isinstance(when, dt.datetime):
        return when.timestamp()
    if isinstance(when, (int, float)):
        return float(when)
    try:
        # Python 3.10 does not know the Z.
        return dt.datetime.fromisoformat(str(when).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def as_bytes(data: Any) -> bytes:
    """The same bytes in the one form that every backend takes."""
    return data if isinstance(data, bytes) else bytes(data)


def within(seconds: float, act: Callable[[], Any]) -> Any:
    """Run a call that may block for ever, and wait no longer than this for it.

    Raises:
        TimeoutError: It is not done; it goes on in a daemon thread whose result nobody sees.
    """
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, act()))
        except BaseException as error:  # noqa: BLE001  carried to the caller's thread
            outcome.append((False, error))

    thread = threading.Thread(target=run, name="trt_warmcache-request", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    done, value = outcome[0]
    if done:
        return value
    raise value


def look(wire: Wire, name: str, limit: int, seconds: float) -> bytes:
    """An object's bytes, cut to ``limit + 1``."""
    try:
        return as_bytes(wire.get(name, 0, limit + 1, seconds))[: limit + 1]
    except Exception as error:
        # An empty object has no first byte to give.
        if diagnose(error).fault is Fault.RANGE:
            return b""
        raise


def look_or_none(wire: Wire, name: str, limit: int, seconds: float) -> bytes | None:
    """The same, or None if there is no such object."""
    try:
        return look(wire, name, limit, seconds)
    except Exception as error:
        if diagnose(error).fault is Fault.MISSING:
            return None
        raise


def head_or_none(wire: Wire, name: str, seconds: float) -> Head | None:
    """What the store tells of an object, or None if there is no such object."""
    try:
        return wire.head(name, seconds)
    except Exception as error:
        if diagnose(error).fault is Fault.MISSING:
            return None
        raise
