"""FsspecStore beside its servers: configuration, secrets, laziness, forks, packing, memory."""

from __future__ import annotations

import http.server
import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from tests.servers import Answer, FaultProxy, ServerInfo, ServerKind
from tests.stores.test_fsspec_conformance import store_on

from trt_warmcache.errors import ConfigError, IntegrityError, StoreError, StoreReason
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import CHUNK_BYTES, describe_blob
from trt_warmcache.stores import Compression, FsspecStore, LocalStore, MemoryStore, Transport, open_store
from trt_warmcache.stores import _packing as packing
from trt_warmcache.stores._base import LAYOUT, blob_name
from trt_warmcache.stores._faults import Fault, diagnose
from trt_warmcache.stores._urls import secrets_in
from trt_warmcache.testing._stores import sample_entry

ServerOf = Callable[[ServerKind], ServerInfo]
TRANSPORTS = [Transport.FSSPEC, Transport.OBSTORE]

#: Shrinks to a fraction; three chunks.
TEXT = b"".join(b"%08d some text\n" % number for number in range(2 * CHUNK_BYTES // 19 + 1000))


def memory_store(**options: Any) -> FsspecStore:
    """A store in a tree of its own in fsspec's process-wide memory."""
    return FsspecStore(f"memory://suite-{uuid4().hex}", **options)


# ---- configuration ------------------------------------------------------------------------------------------------


def test_open_store_takes_urls() -> None:
    """A URL is a store; file: and memory: stay the library's own, because fsspec's lose races."""
    store = open_store("s3://bucket/prefix/")
    assert isinstance(store, FsspecStore)
    assert store.url == "s3://bucket/prefix"
    assert isinstance(open_store("file:///tmp/x"), LocalStore)
    assert isinstance(open_store("memory://"), MemoryStore)


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("nosuch://bucket/x", {}, "nosuch"),
        ("s3://", {}, "form protocol"),
        ("simplecache::s3://bucket/x", {}, "chain"),
        ("filecache://bucket", {}, "chain"),
        ("s3://bucket", {"transport": "carrier pigeon"}, "obstore"),
        ("s3://bucket", {"compression": "lots"}, "never"),
        ("s3://bucket", {"timeout": 0}, "positive"),
        ("s3://bucket", {"concurrency": 0}, "positive"),
        ("s3://bucket", {"storage_options": {"asynchronous": True}}, "asynchronous"),
        ("gs://bucket", {"transport": "obstore"}, "native path"),
        ("s3://bucket", {"transport": "obstore", "storage_options": {"profile": "x"}}, "profile"),
    ],
)
def test_what_cannot_be_meant(url: str, options: dict[str, Any], words: str) -> None:
    """A mistake is told when the store is made, and names what to change."""
    with pytest.raises(ConfigError, match=words):
        FsspecStore(url, **options)


@pytest.mark.parametrize(("scheme", "module", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs"), ("abfs", "adlfs", "azure")])  # fmt: skip
def test_missing_backend_names_the_extra(monkeypatch: pytest.MonkeyPatch, scheme: str, module: str, extra: str) -> None:
    """Without the backend the store says at once what to install."""
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == module else real(name, *rest))
    with pytest.raises(ConfigError, match=rf"trt_warmcache\[{extra}\]"):
        FsspecStore(f"{scheme}://bucket", transport=Transport.FSSPEC)


def test_opening_imports_nothing() -> None:
    """A store that is never asked costs no import of any backend, nor of fsspec."""
    code = """
import sys, trt_warmcache as twc
for url in ("s3://b/p", "gs://b", "az://c/p", "hf://x/y") if %r else ("s3://b/p", "gs://b", "az://c/p"):
    twc.open_store(url)
twc.FsspecStore("s3://b", storage_options={"key": "k", "secret": "s", "client_kwargs": {"region_name": "x"}})
heavy = {"fsspec", "s3fs", "gcsfs", "adlfs", "obstore", "aiohttp", "botocore", "azure", "google", "stamina", "zstandard"}
print(sorted(heavy & set(sys.modules)))
"""
    import importlib.util

    with_hf = importlib.util.find_spec("huggingface_hub") is not None
    done = subprocess.run([sys.executable, "-c", code % with_hf], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- secrets ------------------------------------------------------------------------------------------------------

SECRET = "Tr0ub4dor-and-3-more"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_secrets_stay_secret(
    transport: Transport,
    moto_server: ServerInfo,
    proxied: Callable[[ServerInfo], FaultProxy],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No credential shows in the representation, URL, logs at any level of ours, errors, causes or pickles."""
    proxy = proxied(moto_server)
    info = proxy.info
    options = {**info.storage_options, "key": "AKIA" + SECRET, "secret": SECRET, "token": SECRET + "-session"}
    url = info.url_for(moto_server.fresh_bucket(), "p")
    store = FsspecStore(url, storage_options=options, transport=transport, timeout=1.0)
    with caplog.at_level(logging.DEBUG, "trt_warmcache"), caplog.at_level(logging.DEBUG, "stamina"):
        for status in (403, 404, 429, 500):
            proxy.clear()
            proxy.inject(Answer(status, code=f"Odd{SECRET.replace('-', '')}"), times=100)
            with pytest.raises(StoreError) as caught:
                store.write("engines/ab/x.json", b"x")
            error: BaseException | None = caught.value
            while error is not None:
                assert SECRET not in f"{error}{error!r}{error.args}"
                error = error.__cause__
            assert SECRET.encode() not in pickle.dumps(caught.value)
    assert SECRET not in f"{store!r}{store.url}{caplog.text}"
    assert not any(SECRET in str(vars(record)) for record in caplog.records)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"s3://AKIA:{SECRET}@bucket/p", "s3://bucket/p"),
        (f"https://me:{SECRET}@host.example/p?sig={SECRET}#{SECRET}", "https://host.example/p"),
        ("abfs://container@account.dfs.core.windows.net/p", "abfs://container@account.dfs.core.windows.net/p"),
    ],
)
def test_credentials_in_urls(url: str, shown: str) -> None:
    """What a URL carries beside the address is not part of the store's name."""
    store = FsspecStore(url)
    assert store.url == shown
    assert SECRET not in repr(store)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_short_passwords_are_passwords_too(transport: Transport) -> None:
    """What an option's name calls a password is not shown however short it is; words that contain it are."""
    options = {
        "key": "me1",
        "secret": "pass",
        "endpoint_url": "http://127.0.0.1:1/pass",
        "client_kwargs": {"region_name": "x"},
    }
    store = FsspecStore("s3://bucket/compass", storage_options=options, transport=transport, timeout=1.5)
    with pytest.raises(StoreError, match=r"in s3://bucket/compass: ") as caught:
        store.read("engines/x", limit=1)
    assert "1/pass" not in f"{caught.value.__cause__} {caught.value.__cause__!r}"
    shown = secrets_in("s3://bucket/compass", options).sub(
        "***", "http://127.0.0.1:1/pass/bucket/compass for me1, not me12"
    )
    assert shown == "http://127.0.0.1:1/***/bucket/compass for ***, not me12"


def test_refused_options_are_not_shown() -> None:
    """A backend that refuses an option must not repeat its value."""
    store = FsspecStore("s3://bucket", storage_options={"secret": SECRET, "no_such": SECRET}, transport="fsspec")
    with pytest.raises((ConfigError, StoreError)) as caught:
        store.read("x", limit=1)
    assert SECRET not in str(caught.value)


# ---- processes ----------------------------------------------------------------------------------------------------


def _read_in_child(store: FsspecStore, ref: Any, expected: int, results: Any) -> None:
    payload = store.fetch(ref)
    results.put((payload.view.nbytes == expected, store.create(f"engines/ab/{os.getpid()}.json", b"x")))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("transport", [Transport.FSSPEC, Transport.AUTO])
def test_survives_fork(transport: Transport, moto_server: ServerInfo) -> None:
    """A store in use in the parent works in forked children: no shared sockets, loops or held locks, and no hang."""
    store = store_on(moto_server, moto_server.fresh_bucket(), transport=transport)
    ref = describe_blob("plan", TEXT)
    store.put_blob(ref, TEXT)
    assert store.fetch(ref).view == TEXT
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=_read_in_child, args=(store, ref, len(TEXT), results)) for _ in range(2)]
    for child in children:
        child.start()
    try:
        assert [results.get(timeout=60) for _ in children] == [(True, True)] * 2
    finally:
        for child in children:
            child.join(timeout=20)
            if child.is_alive():
                child.kill()
    assert store.fetch(ref).view == TEXT


ENDS_AT_ONCE = """
import sys, json
from trt_warmcache.stores import FsspecStore
url, options, transport = json.loads(sys.argv[1])
assert FsspecStore(url, storage_options=options, transport=transport).read("engines/00/x.json", limit=9) is None
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_processes_may_end_at_once(transport: Transport, moto_server: ServerInfo) -> None:
    """A process whose last act is a request ends with its own exit code, not killed by a client's threads."""
    url = f"s3://{moto_server.fresh_bucket()}/some/prefix"
    told = json.dumps([url, dict(moto_server.storage_options), str(transport)])
    for _ in range(10 if transport is Transport.OBSTORE else 2):
        done = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE, told], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_file_systems_are_our_own(moto_server: ServerInfo) -> None:
    """The user's cached fsspec instances are neither used nor changed."""
    import fsspec

    options = moto_server.storage_options
    theirs = fsspec.filesystem("s3", **options)
    store = store_on(moto_server, moto_server.fresh_bucket(), transport=Transport.FSSPEC)
    store.read("engines/00/none.json", limit=1)
    assert store.wire.fs is not theirs  # type: ignore[attr-defined]
    assert theirs.retries == 5
    assert fsspec.filesystem("s3", **options) is theirs


def test_listings_are_never_stale(moto_server: ServerInfo) -> None:
    """What another node writes, replaces and deletes shows in the next listing."""
    bucket = moto_server.fresh_bucket()
    one, two = (store_on(moto_server, bucket, transport=Transport.FSSPEC) for _ in range(2))
    assert list(one.list("engines/")) == []
    two.write("engines/ab/1.json", b"1")
    assert [(found.name, found.size) for found in one.list("engines/")] == [("engines/ab/1.json", 1)]
    two.write("engines/ab/1.json", b"longer")
    assert [found.size for found in one.list("engines/")] == [6]
    two.delete("engines/ab/1.json")
    assert list(one.list("engines/")) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_listing_has_pages(transport: Transport, moto_server: ServerInfo) -> None:
    """A listing longer than one page of the service is whole; temporary objects are not in it."""
    bucket = moto_server.fresh_bucket()
    raw = moto_server.filesystem()
    names = [f"engines/{number % 7:02x}/{number:064x}.json" for number in range(1100)]
    raw.pipe(
        {f"{bucket}/some/prefix/{LAYOUT}/{name}": b"x" for name in [*names, "engines/aa/.tmp-x", "engines/.tmp/x"]}
    )
    store = store_on(moto_server, bucket, transport=transport)
    assert sorted(found.name for found in store.list("engines/")) == sorted(names)
    assert all(found.modified > 1e9 for found in store.list("engines/00/"))


# ---- read-only ----------------------------------------------------------------------------------------------------


def test_read_only_never_writes(moto_server: ServerInfo, proxied: Callable[[ServerInfo], FaultProxy]) -> None:
    """A read-only store sends no write at all, not even a probe, and says why it refuses."""
    bucket = moto_server.fresh_bucket()
    manifest, payloads = sample_entry(1)
    store_on(moto_server, bucket).publish(manifest, payloads)
    proxy = proxied(moto_server)
    store = store_on(proxy.info, bucket, read_only=True)
    assert not store.capabilities.writable
    found = store.manifest(Kind.ENGINE, manifest.key)
    assert found == manifest
    assert bytes(store.fetch(found.blob("plan")).view) == payloads["plan"]
    for act in (lambda: store.write("a", b""), lambda: store.create("a", b""), lambda: store.delete("a"), lambda: store.swap("a", b"", expected=b"")):  # fmt: skip
        with pytest.raises(StoreError, match="read-only") as caught:
            act()
        assert caught.value.reason is StoreReason.DENIED
    assert {request.method for request in proxy.requests} <= {"GET", "HEAD"}


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """Python's own web server over a folder; it ignores ranges."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_web_server_as_store(web: str, tmp_path: Path) -> None:
    """A folder copied to a web server is a read-only store, also where the server ignores ranges."""
    source = LocalStore(tmp_path)
    manifest, payloads = sample_entry(1, TEXT)
    source.publish(manifest, payloads)
    store = FsspecStore(web)
    assert not store.capabilities.writable
    assert not store.capabilities.listable
    found = store.manifest(Kind.ENGINE, manifest.key)
    assert found == manifest
    assert store.fetch(found.blob("plan")).view == TEXT
    assert store.manifest(Kind.ENGINE, "0" * 64) is None
    with pytest.raises(StoreError, match="read-only"):
        store.publish(manifest, payloads)


# ---- packing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_packs_where_it_pays(transport: Transport, moto_server: ServerInfo) -> None:
    """A blob that shrinks travels packed and says so; the digests are those of the plain bytes."""
    bucket = moto_server.fresh_bucket()
    store = store_on(moto_server, bucket, transport=transport)
    manifest, payloads = sample_entry(1, TEXT)
    assert store.publish(manifest, payloads) == manifest
    found = store.manifest(Kind.ENGINE, manifest.key)
    assert found is not None
    ref = found.blob("plan")
    assert (ref.codec, ref.digest, ref.chunks) == ("zstd", manifest.blob("plan").digest, manifest.blob("plan").chunks)
    assert 0 < ref.stored_size < len(TEXT) // 2
    assert [info.size for info in store.list("blobs/")] == [ref.stored_size]
    assert store.fetch(ref).view == TEXT
    # A manifest that came by another layer does not know how this store packs.
    assert store.fetch(manifest.blob("plan")).view == TEXT


def test_packed_blob_is_plain_zstd(tmp_path: Path) -> None:
    """What is stored is what the zstd tool unpacks."""
    import zstandard

    ref, packed = packing.pack(describe_blob("plan", TEXT), TEXT)
    assert ref.codec == "zstd"
    reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
    assert reader.read() == TEXT


def test_does_not_pack_noise_or_crumbs() -> None:
    """What would not shrink by a tenth, and what is small, stays as it is; calibration text is packed always."""
    noise = os.urandom(1 << 20)
    for data in (noise, b"x" * 1000):
        ref = describe_blob("plan", data)
        assert packing.pack(ref, data) == (ref, data)
    barely = noise + bytes(50_000)  # gains five percent
    assert packing.pack(describe_blob("plan", barely), barely)[0].codec == ""
    assert packing.pack(describe_blob("calibration", barely), barely)[0].codec == "zstd"


def test_never_means_never() -> None:
    """Packing can be forbidden; packed blobs are read all the same."""
    url = f"memory://suite-{uuid4().hex}"
    manifest, payloads = sample_entry(1, TEXT)
    plain = FsspecStore(url, compression=Compression.NEVER)
    plain.publish(manifest, payloads)
    assert plain.manifest(Kind.ENGINE, manifest.key) == manifest
    other, more = sample_entry(2, TEXT[::-1])
    FsspecStore(url).publish(other, more)
    found = plain.manifest(Kind.ENGINE, other.key)
    assert found is not None
    assert found.blob("plan").codec == "zstd"
    assert plain.fetch(found.blob("plan")).view == TEXT[::-1]


def test_damaged_packed_blob() -> None:
    """Every byte of a packed blob counts: cut, longer, flipped in a frame or in the table is damage."""
    store = memory_store()
    ref, packed = packing.pack(describe_blob("plan", TEXT), TEXT)
    for wrong, reason in (
        (packed[:-1], "truncated"),
        (packed + b"x", "truncated"),
        (b"", "truncated"),
        (packed[:1000] + bytes([packed[1000] ^ 1]) + packed[1001:], "digest"),
        (packed[:-20] + bytes([packed[-20] ^ 1]) + packed[-19:], "digest"),
        (packed[:-1] + b"\0", "digest"),
    ):
        store.write(blob_name(ref), wrong)
        with pytest.raises(IntegrityError) as caught:
            store.fetch(ref)
        assert caught.value.reason == reason
        assert caught.value.name == blob_name(ref)
    store.delete(blob_name(ref))
    with pytest.raises(IntegrityError, match="missing"):
        store.fetch(ref)


def test_frame_that_claims_too_much() -> None:
    """A frame cannot make the reader use more memory than its chunk: a bomb is damage."""
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    with pytest.raises(packing.PackedError):
        packing.unpack_frame(bomb, 1000)


def test_copied_tree_of_packed_blobs_is_a_local_store(tmp_path: Path) -> None:
    """A tree copied out of a store that packs works as a local store."""
    import fsspec

    store = memory_store()
    manifest, payloads = sample_entry(1, TEXT)
    store.publish(manifest, payloads)
    memory = fsspec.filesystem("memory")
    memory.get(store.wire.root, str(tmp_path / LAYOUT), recursive=True)  # type: ignore[attr-defined]
    local = LocalStore(tmp_path)
    found = local.manifest(Kind.ENGINE, manifest.key)
    assert found is not None
    assert local.fetch(found.blob("plan")).view == TEXT
    blob = tmp_path / LAYOUT / blob_name(found.blob("plan"))
    blob.write_bytes(blob.read_bytes()[:-3])
    with pytest.raises(IntegrityError):
        local.fetch(found.blob("plan"))


def test_growing_entry_that_is_packed() -> None:
    """A packed entry is replaced by whoever holds its plain manifest, as another layer gave it, and by nobody else."""
    store = memory_store()
    first, payloads = sample_entry(1, TEXT, created=1.0)
    second, more = sample_entry(1, TEXT + TEXT, created=2.0)
    third, stale = sample_entry(1, TEXT[::-1], created=3.0)
    store.publish(first, payloads)
    assert store.publish(second, more, replacing=first) == second
    lost = store.publish(third, stale, replacing=first)
    assert lost.provenance.created == 2.0
    assert store.publish(second, more) == second  # the same again is no loss


def test_unknown_codec_is_left_alone() -> None:
    """A packing of the future is no damage, and the error says what is the matter."""
    ref = msgspec.structs.replace(describe_blob("plan", TEXT), codec="brotli", stored_size=5)
    with pytest.raises(IntegrityError, match="brotli") as caught:
        memory_store().fetch(ref)
    assert caught.value.reason == "format"


# ---- downloads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES])
@pytest.mark.parametrize("folder", [False, True])
def test_sizes_around_a_chunk(size: int, folder: bool, tmp_path: Path) -> None:
    """Every size comes back whole and read-only, in memory and in a folder that stays empty."""
    cache = tmp_path / "landing" if folder else None
    store = memory_store(cache_dir=cache, compression=Compression.NEVER)
    data = os.urandom(size)
    ref = describe_blob("plan", data)
    store.put_blob(ref, data)
    payload = store.fetch(ref)
    assert payload.view == data
    assert payload.view.readonly
    if cache is not None:
        assert list(cache.iterdir()) == []
    held = payload.view[:1]
    payload.close()
    payload.close()
    del held


def test_blob_without_chunk_digests() -> None:
    """A manifest may leave chunk digests out; the blob is then verified whole."""
    store = memory_store(compression=Compression.NEVER)
    data = os.urandom(CHUNK_BYTES + 5)
    ref = msgspec.structs.replace(describe_blob("plan", data), chunks=())
    store.put_blob(ref, data)
    assert store.fetch(ref).view == data
    store.write(blob_name(ref), data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(IntegrityError) as caught:
        store.fetch(ref)
    assert caught.value.reason == "digest"


def test_no_room_to_land(tmp_path: Path) -> None:
    """A landing folder that cannot be used is a typed error before the first byte is asked for."""
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    store = memory_store(cache_dir=blocked)
    with pytest.raises(StoreError):
        store.fetch(describe_blob("plan", b"x"))


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_download_memory(transport: Transport, seaweedfs_server: ServerInfo, tmp_path: Path) -> None:
    """A blob of 256 MiB that lands in a folder costs little more than the pieces on their way."""
    bucket = seaweedfs_server.fresh_bucket()
    data = os.urandom(256 << 20)
    ref = describe_blob("plan", data)
    store_on(seaweedfs_server, bucket).put_blob(ref, data)
    code = f"""
import msgspec, resource, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from trt_warmcache.manifest import BlobRef
from trt_warmcache.stores import FsspecStore
ref = msgspec.json.decode({msgspec.json.encode(ref)!r}, type=BlobRef)
store = FsspecStore({seaweedfs_server.url_for(bucket, "some/prefix")!r}, storage_options={seaweedfs_server.storage_options!r},
                    transport={transport.value!r}, cache_dir={str(tmp_path)!r})
store.read("engines/00/none", limit=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store.fetch(ref)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 1.2 * ref.size


# ---- telling failures apart ---------------------------------------------------------------------------------------


class _Wrapped(Exception):
    """Like botocore's: the service's words in `response`."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (_Wrapped("NoSuchBucket", 404), Fault.NO_BUCKET),
        (_Wrapped("NoSuchKey", 404), Fault.MISSING),
        (_Wrapped("PreconditionFailed", 412), Fault.EXISTS),
        (_Wrapped("ConditionalRequestConflict", 409), Fault.CONFLICT),
        (_Wrapped("SlowDown", 503), Fault.THROTTLED),
        (_Wrapped("Unheard", 503), Fault.TRANSIENT),
        (_Wrapped("AccessDenied", 403), Fault.DENIED),
        (_Wrapped("XMinioStorageFull", 507), Fault.FULL),
        (OSError("Forbidden: b/x\nno"), Fault.DENIED),
        (FileExistsError("x"), Fault.EXISTS),
        (FileNotFoundError("x"), Fault.MISSING),
        (TimeoutError(), Fault.TIMEOUT),
        (ConnectionResetError(), Fault.TRANSIENT),
        (OSError(28, "no space"), Fault.FULL),
        (KeyError("what"), Fault.FATAL),
    ],
)
@pytest.mark.parametrize("wrapped", ["bare", "cause", "argument"])
def test_diagnosis(error: Exception, fault: Fault, wrapped: str) -> None:
    """The service's own code decides, however the backend wraps it."""
    if wrapped == "cause" and isinstance(error, _Wrapped):
        outer: Exception = OSError(22, "Invalid argument")
        outer.__cause__ = error
    elif wrapped == "argument" and isinstance(error, _Wrapped):
        outer = RuntimeError(error)
    else:
        outer = error
    assert diagnose(outer).fault is fault
