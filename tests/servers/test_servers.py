"""The servers and the fault proxy do what the store tests rely on."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TYPE_CHECKING

import pytest
from tests.servers import Answer, CutBody, DropAnswer, FaultProxy, FlipBit, Refusal, ServerKind, Stall, running

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fsspec import AbstractFileSystem
    from tests.servers import ServerInfo

RACERS = 8
PAYLOAD = bytes(range(256)) * 1024

by_wire_protocol = pytest.mark.parametrize(
    "kind",
    [ServerKind.MOTO, ServerKind.SEAWEEDFS, ServerKind.FAKE_GCS, ServerKind.AZURITE],
    ids=lambda kind: kind.value,
)


def client_of(info: ServerInfo) -> AbstractFileSystem:
    """A file system that does not repeat failed requests, so that an injected fault is seen once."""
    filesystem = info.filesystem()
    if info.protocol == "s3":
        filesystem.retries = 1
        filesystem.config_kwargs["retries"] = {"total_max_attempts": 1}
    return filesystem


def write_method(info: ServerInfo) -> str:
    return "POST" if info.protocol == "gcs" else "PUT"


def test_round_trip(storage_server: ServerInfo, tmp_path: Path) -> None:
    """Every server stores a file through fsspec, lists it with its size, serves it and a range of it, deletes it."""
    filesystem = storage_server.filesystem()
    bucket = storage_server.fresh_bucket()
    content = secrets.token_bytes(3 << 20)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(content)
    filesystem.put_file(str(source), f"{bucket}/folder/plan.bin")
    assert [entry["size"] for entry in filesystem.ls(f"{bucket}/folder", detail=True)] == [len(content)]
    filesystem.get_file(f"{bucket}/folder/plan.bin", str(target))
    assert target.read_bytes() == content
    assert filesystem.cat_file(f"{bucket}/folder/plan.bin", start=70_000, end=140_000) == content[70_000:140_000]
    filesystem.rm_file(f"{bucket}/folder/plan.bin")
    assert not filesystem.exists(f"{bucket}/folder/plan.bin")


def test_url_opens_with_storage_options(storage_server: ServerInfo) -> None:
    """URL and options alone are enough for fsspec to reach the server, as in a user's configuration."""
    import fsspec

    bucket = storage_server.fresh_bucket()
    filesystem, path = fsspec.url_to_fs(storage_server.url_for(bucket, "a/b"), **storage_server.storage_options)
    filesystem.pipe_file(path, b"reached")
    assert storage_server.filesystem().cat_file(f"{bucket}/a/b") == b"reached"


def test_fresh_buckets_are_empty_and_different(storage_server: ServerInfo) -> None:
    """Two tests never share a bucket."""
    first, second = storage_server.fresh_bucket(), storage_server.fresh_bucket()
    assert first != second
    assert storage_server.filesystem().ls(first) == []


@pytest.mark.parametrize("attempt", range(3))
def test_create_race_has_the_winners_that_the_server_promises(storage_server: ServerInfo, attempt: int) -> None:
    """Of 8 threads that create one object, one wins; many do on the server that ignores conditions."""
    filesystem = storage_server.filesystem()
    path = f"{storage_server.fresh_bucket()}/claim-{attempt}"
    barrier = Barrier(RACERS)

    def race(racer: int) -> OSError | None:
        barrier.wait(timeout=30)
        try:
            filesystem.pipe_file(path, f"racer {racer}".encode(), mode="create")
        except OSError as error:
            return error
        return None

    with ThreadPoolExecutor(RACERS) as pool:
        outcomes = list(pool.map(race, range(RACERS)))
    winners = [racer for racer, error in enumerate(outcomes) if error is None]
    losers = [error for error in outcomes if error is not None]
    if storage_server.refusal is Refusal.NEVER:
        assert len(winners) > 1, outcomes
        return
    assert len(winners) == 1, outcomes
    assert filesystem.cat_file(path) == f"racer {winners[0]}".encode()
    if storage_server.refusal is Refusal.FILE_EXISTS:
        assert all(isinstance(error, FileExistsError) for error in losers), losers
    else:
        assert {(type(error), error.errno) for error in losers} == {(OSError, errno.EINVAL)}


def test_server_group_is_dead_afterwards(tmp_path: Path) -> None:
    """Leaving the block ends the server, frees its port and deletes its data, but keeps its log."""
    with running(ServerKind.RCLONE, tmp_path) as info:
        bucket = info.fresh_bucket()
        info.filesystem().pipe_file(f"{bucket}/x", b"x")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(info.endpoint, timeout=5)
    assert [path.name for path in tmp_path.iterdir()] == ["server.log"]


@pytest.mark.parametrize(("switch", "outcome"), [("0", "failed"), ("1", "skipped")])
def test_missing_server_fails_unless_told_to_skip(
    switch: str, outcome: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A server that is not installed fails the test with its install command; only the switch turns that to a skip."""
    from tests.servers import fixtures

    monkeypatch.setenv("TRTWC_AZURITE_HOME", str(tmp_path))
    monkeypatch.setenv(fixtures.SKIP_SWITCH, switch)
    expected = pytest.fail.Exception if outcome == "failed" else pytest.skip.Exception
    serving = fixtures.serve(ServerKind.AZURITE, tmp_path_factory)
    with pytest.raises(expected, match=r"npm install --prefix .*azurite@\d"):
        serving.__enter__()


def test_proxy_is_transparent(storage_server: ServerInfo, proxied: Callable[[ServerInfo], FaultProxy]) -> None:
    """Without an effect, signatures hold and bytes pass unchanged, in one piece and in parallel."""
    proxy = proxied(storage_server)
    filesystem = client_of(proxy.info)
    bucket = proxy.info.fresh_bucket()
    content = secrets.token_bytes(1 << 20)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda index: filesystem.pipe_file(f"{bucket}/{index}", content), range(4)))
        assert set(pool.map(lambda index: filesystem.cat_file(f"{bucket}/{index}"), range(4))) == {content}
    assert len([request for request in proxy.requests if request.method in {"PUT", "POST"}]) >= 4


def test_seaweedfs_does_check_signatures(seaweedfs_server: ServerInfo) -> None:
    """A wrong secret is refused, so the transparency test proves that the proxy leaves signatures valid."""
    with pytest.raises(PermissionError):
        seaweedfs_server.filesystem(secret="wrong").ls("")


@by_wire_protocol
def test_dropped_answer_of_a_write_leaves_the_object(
    kind: ServerKind, server_of: Callable[[ServerKind], ServerInfo], proxied: Callable[[ServerInfo], FaultProxy]
) -> None:
    """The n-th write reaches the server although its answer is lost; the others are untouched."""
    info = server_of(kind)
    proxy = proxied(info)
    bucket = info.fresh_bucket()
    lost = proxy.inject(DropAnswer(), method=write_method(info), nth=2)
    filesystem = client_of(proxy.info)
    filesystem.pipe_file(f"{bucket}/first", PAYLOAD)
    # Some clients repeat the write by themselves; others raise, each an error of its own.
    with contextlib.suppress(Exception):
        filesystem.pipe_file(f"{bucket}/victim", PAYLOAD)
    assert lost.hits == 1
    assert info.filesystem().cat_file(f"{bucket}/victim") == PAYLOAD


def test_lost_answer_of_a_create_looks_like_a_lost_race(
    moto_server: ServerInfo, proxied: Callable[[ServerInfo], FaultProxy]
) -> None:
    """s3fs repeats the create whose answer was lost and is told that the object exists, though it is its own."""
    proxy = proxied(moto_server)
    bucket = moto_server.fresh_bucket()
    lost = proxy.inject(DropAnswer(), method="PUT", path="lease", where=lambda each: "if-none-match" in each.headers)
    with pytest.raises(FileExistsError):
        proxy.info.filesystem().pipe_file(f"{bucket}/lease", b"my own token", mode="create")
    assert lost.hits == 1
    assert moto_server.filesystem().cat_file(f"{bucket}/lease") == b"my own token"


@by_wire_protocol
@pytest.mark.parametrize("status", [403, 404, 409, 412])
def test_refusals_reach_the_client_without_the_work_being_done(
    kind: ServerKind,
    status: int,
    server_of: Callable[[ServerKind], ServerInfo],
    proxied: Callable[[ServerInfo], FaultProxy],
) -> None:
    """An answered write fails at the client, in words it can parse, and the server never sees it."""
    info = server_of(kind)
    proxy = proxied(info)
    bucket = info.fresh_bucket()
    refused = proxy.inject(Answer(status), method=write_method(info), times=1000)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each client has its own classes
        client_of(proxy.info).pipe_file(f"{bucket}/victim", b"x")
    assert refused.hits >= 1
    assert not info.filesystem().exists(f"{bucket}/victim")
    if status == 403 and info.protocol == "s3":
        assert isinstance(caught.value, PermissionError)


@pytest.mark.parametrize("kind", [ServerKind.MOTO, ServerKind.FAKE_GCS], ids=lambda kind: kind.value)
@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_trouble_is_repeated_by_the_client(
    kind: ServerKind,
    status: int,
    server_of: Callable[[ServerKind], ServerInfo],
    proxied: Callable[[ServerInfo], FaultProxy],
) -> None:
    """One answer that asks for patience is understood as such: the client repeats the write, and it arrives."""
    info = server_of(kind)
    proxy = proxied(info)
    bucket = info.fresh_bucket()
    busy = proxy.inject(Answer(status), method=write_method(info))
    proxy.info.filesystem().pipe_file(f"{bucket}/victim", b"x")
    assert busy.hits == 1
    assert [request.effect for request in proxy.requests if request.method == write_method(info)] == [busy.effect, None]
    assert info.filesystem().cat_file(f"{bucket}/victim") == b"x"


def get(url: str) -> bytes:
    """Reads over plain HTTP: no client library stands between the proxy and the test."""
    with urllib.request.urlopen(url, timeout=20) as response:
        content = response.read()
        assert isinstance(content, bytes)
        return content


@pytest.fixture
def behind(rclone_server: ServerInfo, proxied: Callable[[ServerInfo], FaultProxy]) -> tuple[FaultProxy, str]:
    """A proxy, and the URL through it of an object with ``PAYLOAD`` that plain HTTP can read."""
    proxy = proxied(rclone_server)
    bucket = rclone_server.fresh_bucket()
    filesystem = proxy.info.filesystem()
    filesystem.pipe_file(f"{bucket}/victim", PAYLOAD)
    return proxy, filesystem.sign(f"{bucket}/victim", expiration=600)


def test_flipped_bit(behind: tuple[FaultProxy, str]) -> None:
    """Exactly the named bit of the n-th body is wrong, and only there."""
    proxy, url = behind
    proxy.inject(FlipBit(byte=70_000, bit=3), method="GET", path="victim", nth=2)
    wrong = bytearray(PAYLOAD)
    wrong[70_000] ^= 8
    assert [get(url), get(url), get(url)] == [PAYLOAD, bytes(wrong), PAYLOAD]


def test_cut_body_breaks_the_connection(behind: tuple[FaultProxy, str]) -> None:
    """A body cut short is noticed by any client that counts; with a fixed length it is a silent truncation."""
    from http.client import IncompleteRead

    proxy, url = behind
    proxy.inject(CutBody(100_000), method="GET", path="victim")
    with pytest.raises((IncompleteRead, ConnectionError)):
        get(url)
    proxy.inject(CutBody(100_000, fix_length=True), method="GET", path="victim")
    assert get(url) == PAYLOAD[:100_000]


@pytest.mark.parametrize("after", [None, 0, 1000])
def test_stalled_answer(behind: tuple[FaultProxy, str], after: int | None) -> None:
    """A stall lasts its time, or until it is cleared, and then the answer arrives whole."""
    proxy, url = behind
    proxy.inject(Stall(0.4, after=after), method="GET", path="victim")
    started = time.monotonic()
    assert get(url) == PAYLOAD
    assert 0.4 <= time.monotonic() - started < 10
    stalled = proxy.inject(Stall(60, after=after), method="GET", path="victim")
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(get, url)
        assert stalled.wait()
        time.sleep(0.2)
        assert not future.done()
        proxy.clear()
        assert future.result(timeout=10) == PAYLOAD


def test_latency_and_bandwidth(behind: tuple[FaultProxy, str]) -> None:
    """Latency and bandwidth hold for each request until cleared."""
    proxy, url = behind
    proxy.slow_down(latency=0.3)
    started = time.monotonic()
    get(url)
    assert time.monotonic() - started >= 0.3
    proxy.slow_down(bandwidth=len(PAYLOAD) * 2)
    started = time.monotonic()
    assert get(url) == PAYLOAD
    assert 0.45 <= time.monotonic() - started < 5
    proxy.clear()

    def seconds() -> float:
        started = time.monotonic()
        get(url)
        return time.monotonic() - started

    assert min(seconds() for _ in range(10)) < 0.3


def test_partition(behind: tuple[FaultProxy, str]) -> None:
    """During a partition nothing passes, not even a request under way; afterwards everything does."""
    proxy, url = behind
    stalled = proxy.inject(Stall(60), method="GET", path="victim")
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(get, url)
        assert stalled.wait()
        proxy.partition()
        with pytest.raises(OSError):  # noqa: PT011 - reset, refused or cut
            under_way.result(timeout=10)
    with pytest.raises(OSError):  # noqa: PT011 - reset, refused or cut
        get(url)
    proxy.partition(active=False)
    assert get(url) == PAYLOAD


def test_forwarded_answer_hides_a_success(moto_server: ServerInfo, proxied: Callable[[ServerInfo], FaultProxy]) -> None:
    """With ``forward`` the client is told 412 although its write was carried out."""
    proxy = proxied(moto_server)
    bucket = moto_server.fresh_bucket()
    proxy.inject(Answer(412, forward=True), method="PUT", path="lease")
    with pytest.raises(FileExistsError):
        client_of(proxy.info).pipe_file(f"{bucket}/lease", b"mine", mode="create")
    assert moto_server.filesystem().cat_file(f"{bucket}/lease") == b"mine"


def test_proxies_leave_no_threads_or_descriptors(rclone_server: ServerInfo) -> None:
    """A proxy that was used and closed, even with a stall under way, gives everything back."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(5):
        with FaultProxy(rclone_server) as proxy, ThreadPoolExecutor(1) as pool:
            stalled = proxy.inject(Stall(60))
            future = pool.submit(get, proxy.info.endpoint)
            assert stalled.wait()
            proxy.partition()
            assert isinstance(future.exception(timeout=10), OSError)
    assert descriptors() <= before + 1
