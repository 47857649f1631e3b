"""What a remote store does when the network or the service fails: healed, or a typed error, never a wrong result."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from tests.servers import Answer, CutBody, DropAnswer, FaultProxy, FlipBit, Request, ServerInfo, ServerKind, Stall
from tests.stores.test_fsspec_conformance import store_on

from trt_warmcache.errors import IntegrityError, StoreError, StoreReason
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import CHUNK_BYTES, describe_blob
from trt_warmcache.stores import Compression, FsspecStore, Transport
from trt_warmcache.stores._base import LAYOUT, blob_name
from trt_warmcache.testing._stores import race, sample_entry

PLAN = bytes(range(251)) * 4000
#: Not compressible, three chunks, the last one short.
LARGE = b"".join(n.to_bytes(4, "little") for n in range((2 * CHUNK_BYTES + 4000) // 4))

Proxied = Callable[[ServerInfo], FaultProxy]

WAYS = [
    pytest.param((ServerKind.MOTO, Transport.FSSPEC), id="moto-s3fs"),
    pytest.param((ServerKind.SEAWEEDFS, Transport.OBSTORE), id="seaweedfs-obstore"),
    pytest.param((ServerKind.FAKE_GCS, Transport.FSSPEC), id="gcs"),
    pytest.param((ServerKind.AZURITE, Transport.FSSPEC), id="azurite-adlfs"),
    pytest.param((ServerKind.AZURITE, Transport.OBSTORE), id="azurite-obstore"),
]


class Way:
    """One server behind a proxy, and a store that reaches it through the proxy and has been used already."""

    def __init__(self, info: ServerInfo, proxy: FaultProxy, transport: Transport) -> None:
        self.info, self.proxy, self.transport = info, proxy, transport
        self.bucket = info.fresh_bucket()
        self.store = self.open()
        assert self.store.capabilities.exclusive_create
        self.proxy.clear()

    def open(self, timeout: float = 15.0, bucket: str | None = None) -> FsspecStore:
        """Another store on the same bucket, through the proxy; with a shorter deadline it is connected already."""
        store = store_on(
            self.proxy.info, bucket or self.bucket, transport=self.transport, timeout=15.0, compression=Compression.NEVER
        )  # fmt: skip
        if timeout < 15.0:
            # Making a client takes a busy machine longer than these deadlines are.
            assert store.read("engines/ab/none.json", limit=10) is None
            store._requests._timeout = timeout
        return store

    def raw(self, name: str) -> bytes:
        """An object, past store and proxy."""
        data: bytes = self.info.filesystem().cat_file(f"{self.bucket}/some/prefix/{LAYOUT}/{name}")
        return data

    def writes(self, request: Request) -> bool:
        """Whether a request sends an object: services use different methods for it."""
        return request.method == ("POST" if self.info.protocol == "gcs" else "PUT")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, server_of: Callable[[ServerKind], ServerInfo], proxied: Proxied) -> Way:
    """Every kind of service, through every transport that reaches it."""
    kind, transport = request.param
    info = server_of(kind)
    return Way(info, proxied(info), transport)


def reads(request: Request) -> bool:
    """Whether a request asks for an object's bytes."""
    return request.method == "GET"


# ---- writing on condition -----------------------------------------------------------------------------------------


def test_create_answer_lost(way: Way) -> None:
    """The server stored it and the answer was lost: still our success, without a second object or a false loser."""
    lost = way.proxy.inject(DropAnswer(), where=way.writes)
    assert way.store.create("engines/ab/k.json", b"mine")
    assert lost.hits == 1
    assert way.raw("engines/ab/k.json") == b"mine"


def test_create_refused_after_own_success(way: Way) -> None:
    """A refusal that answers a repetition of our own write is our success."""
    refused = way.proxy.inject(Answer(412, forward=True), where=way.writes)
    assert way.store.create("engines/ab/k.json", b"mine")
    assert refused.hits == 1


def test_create_refused_by_another(way: Way) -> None:
    """A refusal because of somebody else's object is a loss, also when answers get lost on the way."""
    assert way.store.create("engines/ab/k.json", b"theirs")
    way.proxy.inject(DropAnswer(), where=way.writes)
    assert not way.store.create("engines/ab/k.json", b"mine")
    assert way.raw("engines/ab/k.json") == b"theirs"


def test_create_conflict_is_tried_again(way: Way) -> None:
    """409 means that two writers collided and nothing is known yet."""
    conflict = way.proxy.inject(Answer(409, code="ConditionalRequestConflict"), where=way.writes)
    assert way.store.create("engines/ab/k.json", b"mine")
    assert conflict.hits == 1
    assert way.raw("engines/ab/k.json") == b"mine"


def test_swap_answer_lost(way: Way) -> None:
    """A replacement whose answer was lost counts as done; and never twice."""
    way.store.write("timing/ab/t.json", b"old")
    way.proxy.inject(DropAnswer(), where=way.writes)
    assert way.store.swap("timing/ab/t.json", b"new", expected=b"old")
    assert not way.store.swap("timing/ab/t.json", b"newer", expected=b"old")
    assert way.raw("timing/ab/t.json") == b"new"


def test_swap_race(way: Way) -> None:
    """Of eight writers that saw the same version, one replaces it."""
    if way.info.kind is ServerKind.FAKE_GCS:
        assert not way.store._proven().replace, "the emulator learnt to honour generations; drop this exception"
        return
    way.store.write("timing/ab/t.json", b"old")
    wins = race(8, lambda n: way.store.swap("timing/ab/t.json", b"new %d" % n, expected=b"old"))
    assert wins.count(True) == 1
    assert way.raw("timing/ab/t.json") == b"new %d" % wins.index(True)


# ---- failures that pass -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_failures_are_healed(way: Way, status: int) -> None:
    """Throttling and server errors that pass are tried again, on reads and on writes."""
    written = way.proxy.inject(Answer(status), where=way.writes)
    way.store.write("engines/ab/k.json", b"data")
    read = way.proxy.inject(Answer(status), where=reads)
    assert way.store.read("engines/ab/k.json", limit=100) == b"data"
    assert written.hits == read.hits == 1


@pytest.mark.parametrize(("status", "words"), [(429, "throttled"), (500, "passing failure")])
def test_lasting_failures_end(way: Way, status: int, words: str) -> None:
    """What does not pass ends as unavailable, within the deadline; never as a miss; with the service's own code."""
    store = way.open(timeout=1.5)
    way.proxy.inject(Answer(status), where=reads, times=1000)
    started = time.monotonic()
    with pytest.raises(StoreError) as caught:
        store.read("engines/ab/none.json", limit=100)
    assert time.monotonic() - started < 6
    assert caught.value.reason is StoreReason.UNAVAILABLE
    assert words in caught.value.message
    assert str(status) in caught.value.message


def test_backend_does_not_repeat(way: Way) -> None:
    """The backend's own repetitions are off: what is sent is what we send, and does not multiply."""
    store = way.open(timeout=1.5)
    injected = way.proxy.inject(Answer(500), where=reads, times=1000)
    with pytest.raises(StoreError):
        store.read("engines/ab/none.json", limit=100)
    assert injected.hits < 8


# ---- failures that last -------------------------------------------------------------------------------------------


def test_denied(way: Way) -> None:
    """403 is denied, on each operation, at once, and never a miss."""
    way.proxy.inject(Answer(403), times=1000)
    started = time.monotonic()
    for act in (
        lambda: way.store.read("engines/ab/none.json", limit=10),
        lambda: way.store.manifest(Kind.ENGINE, "0" * 64),
        lambda: way.store.write("engines/ab/k.json", b"x"),
        lambda: way.store.create("engines/ab/k.json", b"x"),
        lambda: way.store.delete("engines/ab/k.json"),
        lambda: list(way.store.list("engines/")),
        lambda: way.store.fetch(describe_blob("plan", PLAN)),
    ):
        with pytest.raises(StoreError) as caught:
            act()
        assert caught.value.reason is StoreReason.DENIED
        assert "credentials" in caught.value.message
    assert time.monotonic() - started < 5


def test_denied_writes_mean_read_only(way: Way) -> None:
    """Where reading is allowed and writing is not, the store says that it is not writable, and reads go on."""
    way.store.write("engines/ab/k.json", b"data")
    way.proxy.inject(Answer(403), where=way.writes, times=1000)
    store = way.open()
    assert not store.capabilities.writable
    assert store.read("engines/ab/k.json", limit=10) == b"data"


def test_missing_bucket_is_no_miss(way: Way) -> None:
    """A bucket that is not there is an error that says so: a typo must not look like a cold cache."""
    store = way.open(bucket="no-such-bucket-anywhere")
    for act in (
        lambda: store.read("engines/ab/none.json", limit=10),
        lambda: list(store.list("engines/")),
        lambda: store.fetch(describe_blob("plan", PLAN)),
    ):
        with pytest.raises(StoreError, match="bucket does not exist") as caught:
            act()
        assert caught.value.reason is StoreReason.UNAVAILABLE


def test_stalled_socket(way: Way) -> None:
    """A server that accepts and never answers costs the deadline, no more."""
    store = way.open(timeout=2.0)
    way.proxy.inject(Stall(60), where=reads, times=1000)
    started = time.monotonic()
    with pytest.raises(StoreError) as caught:
        store.read("engines/ab/none.json", limit=10)
    assert caught.value.reason is StoreReason.TIMEOUT
    assert time.monotonic() - started < 5


def test_one_stalled_request_is_healed(way: Way) -> None:
    """One stalled connection among others costs a part of the deadline, and the bytes come by another."""
    way.store.write("engines/ab/k.json", b"data")
    store = way.open(timeout=3.0)
    way.proxy.inject(Stall(60, after=2), where=reads)
    assert store.read("engines/ab/k.json", limit=10) == b"data"


def test_partition(way: Way) -> None:
    """With the network gone, everything is unavailable; with it back, everything works again."""
    store = way.open(timeout=1.0)
    store.write("engines/ab/k.json", b"data")
    way.proxy.partition()
    with pytest.raises(StoreError) as caught:
        store.read("engines/ab/k.json", limit=10)
    assert caught.value.reason in {StoreReason.UNAVAILABLE, StoreReason.TIMEOUT}
    way.proxy.partition(False)
    assert store.read("engines/ab/k.json", limit=10) == b"data"


# ---- bytes that are wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "effect",
    [CutBody(1000), CutBody(1000, fix_length=True), FlipBit(12345, 3), DropAnswer(), Stall(60, after=4096)],
    ids=["broken", "short", "flipped", "dropped", "stalled"],
)
def test_wrong_chunk_on_the_way_is_healed(way: Way, effect: CutBody | FlipBit | DropAnswer | Stall) -> None:
    """A chunk that arrives short, torn, flipped or not at all is fetched again; what is handed out is right."""
    ref = describe_blob("plan", LARGE)
    way.store.put_blob(ref, LARGE)
    store = way.open(timeout=12.0)
    injected = way.proxy.inject(effect, where=reads, path=ref.hex, nth=2)
    payload = store.fetch(ref)
    assert payload.view == LARGE
    assert injected.hits == 1
    payload.close()


def test_wrong_bytes_for_ever_are_never_served(way: Way) -> None:
    """A path that damages every answer ends as damage, not as bytes and not as a hang."""
    ref = describe_blob("plan", PLAN)
    way.store.put_blob(ref, PLAN)
    injected = way.proxy.inject(FlipBit(500), where=reads, path=ref.hex, times=1000)
    with pytest.raises(IntegrityError) as caught:
        way.store.fetch(ref)
    assert caught.value.reason == "digest"
    assert 2 <= injected.hits <= 3


def test_damaged_large_blob(way: Way) -> None:
    """A stored blob with one wrong bit, cut, or longer, found by the chunk concerned."""
    ref = describe_blob("plan", LARGE)
    wrong = bytearray(LARGE)
    wrong[CHUNK_BYTES + 77] ^= 4
    for data, reason in ((bytes(wrong), "digest"), (LARGE[:-5], "truncated"), (LARGE[: CHUNK_BYTES - 1], "truncated"), (LARGE + b"x", "truncated")):  # fmt: skip
        way.store.write(blob_name(ref), data)
        with pytest.raises(IntegrityError) as caught:
            way.store.fetch(ref)
        assert caught.value.reason == reason
        assert caught.value.name == blob_name(ref)


def test_upload_interrupted(way: Way) -> None:
    """An upload in parts that fails leaves nothing under the name, and the error is typed."""
    data = LARGE * 3
    ref = describe_blob("plan", data)
    # Resumable uploads to the fake GCS send their parts past the proxy, so there the first request is refused.
    way.proxy.inject(Answer(403), where=way.writes, nth=1 if way.info.protocol == "gcs" else 3, times=1000)
    with pytest.raises(StoreError) as caught:
        way.store.put_blob(ref, data)
    assert caught.value.reason is StoreReason.DENIED
    way.proxy.clear()
    with pytest.raises(IntegrityError, match="missing"):
        way.store.fetch(ref)
    way.store.put_blob(ref, data)
    assert way.store.fetch(ref).view == data


def test_upload_part_is_healed(way: Way) -> None:
    """A part that fails once does not fail the upload."""
    data = LARGE * 3
    ref = describe_blob("plan", data)
    injected = way.proxy.inject(Answer(503), where=way.writes, nth=1 if way.info.protocol == "gcs" else 2)
    way.store.put_blob(ref, data)
    assert injected.hits == 1
    assert way.store.fetch(ref).view == data


def test_streams_add_up(server_of: Callable[[ServerKind], ServerInfo], proxied: Proxied) -> None:
    """Where each connection is slow, eight of them are not: a large plan comes several times faster than by one."""
    info = server_of(ServerKind.MOTO)
    way = Way(info, proxied(info), Transport.FSSPEC)
    entry, payloads = sample_entry(1, os.urandom(8 * CHUNK_BYTES))
    way.store.publish(entry, payloads)
    way.proxy.slow_down(bandwidth=20e6)
    seconds = {}
    for streams in (1, 8):
        store = store_on(way.proxy.info, way.bucket, transport=Transport.FSSPEC, concurrency=streams)
        assert store.manifest(Kind.ENGINE, entry.key) == entry
        started = time.monotonic()
        payload = store.fetch(entry.blob("plan"))
        seconds[streams] = time.monotonic() - started
        assert payload.view == payloads["plan"]
        payload.close()
    assert seconds[1] > 3 * seconds[8], seconds


# ---- what is told -------------------------------------------------------------------------------------------------

NOBODY_THERE = """
import sys
from trt_warmcache.errors import StoreError
from trt_warmcache.stores import FsspecStore
options = {"key": "key", "secret": "secret", "endpoint_url": "http://127.0.0.1:1", "client_kwargs": {"region_name": "x"}}
try:
    FsspecStore("s3://bucket/x", storage_options=options, transport=sys.argv[1], timeout=1).read("engines/x", limit=1)
except StoreError as error:
    print(error)
"""


@pytest.mark.parametrize("transport", [Transport.FSSPEC, Transport.OBSTORE])
def test_nobody_there(transport: Transport) -> None:
    """A dead endpoint is called what it is, and repetitions print nothing where logging was not set up."""
    done = subprocess.run(
        [sys.executable, "-c", NOBODY_THERE, str(transport)], capture_output=True, text=True, check=False, timeout=60
    )
    assert "connection refused" in done.stdout
    assert done.stderr == ""
    assert done.returncode == 0


def test_long_trying_is_logged(
    moto_server: ServerInfo,
    proxied: Callable[[ServerInfo], FaultProxy],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waits for a store that fails again and again finds one line in the log that says why."""
    monkeypatch.setattr("trt_warmcache.stores._requests._PATIENCE", 0.3)
    proxy = proxied(moto_server)
    proxy.inject(Answer(503), times=1000)
    store = store_on(proxy.info, "some-bucket", timeout=2)
    with pytest.raises(StoreError):
        store.read("engines/x", limit=1)
    told = [record.message for record in caplog.records if "tried again" in record.message]
    assert len(told) == 1
    assert "engines/x" in told[0]
