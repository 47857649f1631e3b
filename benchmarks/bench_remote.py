"""A remote hit, verified, against clients that verify nothing: one object, one loopback server, one run.

Every client starts with its connections open and ends with the object's bytes in one buffer or file. The server shares
the machine's cores with the client, so only the ratios of one run mean anything. S3 is served by SeaweedFS, GCS by
fake-gcs-server and Azure by Azurite; a server that is not installed is named and left out.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import Table, arguments, machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the servers are those of the tests

from tests.servers import ServerInfo, ServerKind, running
from tests.servers.launch import MissingServerError

from trt_warmcache.manifest import describe_blob
from trt_warmcache.stores import FsspecStore, Transport
from trt_warmcache.stores._base import LAYOUT, blob_name

PIECE = 16 * 1024 * 1024
WORKERS = 8


@contextmanager
def file_of(size: int, folder: Path) -> Iterator[int]:
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        yield file.fileno()


def s3fs_get_file(fs: Any, path: str, size: int, folder: Path) -> None:
    target = folder / "got"
    fs.get_file(path, str(target))
    assert target.stat().st_size == size
    target.unlink()


def s3fs_cat_ranges(fs: Any, path: str, size: int, folder: Path) -> None:
    with file_of(size, folder) as fd:
        step = PIECE * WORKERS
        for base in range(0, size, step):
            starts = list(range(base, min(base + step, size), PIECE))
            ends = [min(start + PIECE, size) for start in starts]
            for start, data in zip(starts, fs.cat_ranges([path] * len(starts), starts, ends), strict=True):
                os.pwrite(fd, data, start)


def obstore_ranges(store: Any, key: str, size: int, folder: Path) -> None:
    import obstore

    with file_of(size, folder) as fd, ThreadPoolExecutor(WORKERS) as pool:

        def get(start: int) -> None:
            os.pwrite(fd, obstore.get_range(store, key, start=start, end=min(start + PIECE, size)), start)

        list(pool.map(get, range(0, size, PIECE)))


def obstore_of(info: ServerInfo, bucket: str) -> Any:
    from obstore.store import S3Store

    options = info.storage_options
    return S3Store(
        bucket,
        config={
            "aws_access_key_id": options["key"],
            "aws_secret_access_key": options["secret"],
            "aws_region": options["client_kwargs"]["region_name"],
            "aws_endpoint": info.endpoint,
        },
        client_options={"allow_http": True},
    )


def measure(clients: dict[str, Callable[[], None]], rounds: int) -> dict[str, tuple[float, float, float]]:
    """Best and median seconds, and best CPU seconds of this process. Clients take turns, so that noise hits all alike."""
    walls: dict[str, list[float]] = {name: [] for name in clients}
    cpus: dict[str, list[float]] = {name: [] for name in clients}
    for number in range(rounds + 1):
        for name, run in clients.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if number:  # the first round opens connections
                walls[name].append(time.perf_counter() - wall)
                cpus[name].append(time.process_time() - cpu)
    return {name: (min(walls[name]), statistics.median(walls[name]), min(cpus[name])) for name in clients}


def main() -> None:
    given = arguments(__doc__)
    print(machine())
    for kind in (
        (ServerKind.SEAWEEDFS,) if given.quick else (ServerKind.SEAWEEDFS, ServerKind.FAKE_GCS, ServerKind.AZURITE)
    ):
        with tempfile.TemporaryDirectory(dir=given.work) as scratch:
            folder = Path(scratch)
            (folder / "server").mkdir()
            try:
                with running(kind, folder / "server") as info:
                    report(info, folder, (16 if given.quick else 512) * 1024 * 1024, given.repeats(5))
            except MissingServerError as error:
                print(f"\n{kind.value}: left out: {error}")


def report(info: ServerInfo, folder: Path, size: int, rounds: int) -> None:
    bucket = info.fresh_bucket()
    data = os.urandom(size)
    ref = describe_blob("plan", data)
    key = f"{LAYOUT}/{blob_name(ref)}"

    def store(transport: Transport, cache_dir: Path | None) -> FsspecStore:
        return FsspecStore(
            f"{info.protocol}://{bucket}",
            storage_options=info.storage_options,
            transport=transport,
            cache_dir=cache_dir,
        )

    started = time.perf_counter()
    store(Transport.AUTO, None).put_blob(ref, data)
    print(f"upload of {size >> 20} MiB: {size / 1e6 / (time.perf_counter() - started):.0f} MB/s")
    del data

    def hit(transport: Transport, cache_dir: Path | None) -> Callable[[], None]:
        opened = store(transport, cache_dir)

        def run() -> None:
            payload = opened.fetch(ref)
            assert payload.view.nbytes == size
            payload.close()

        return run

    fs = info.filesystem()
    path = f"{bucket}/{key}"
    clients: dict[str, Callable[[], None]] = {
        f"{info.protocol} fsspec get_file": lambda: s3fs_get_file(fs, path, size, folder),
        f"{info.protocol} fsspec cat_ranges": lambda: s3fs_cat_ranges(fs, path, size, folder),
        "ours, verified, fsspec, file": hit(Transport.FSSPEC, folder),
        "ours, verified, fsspec, memory": hit(Transport.FSSPEC, None),
    }
    if info.protocol == "s3":
        native = obstore_of(info, bucket)
        clients["obstore get_range"] = lambda: obstore_ranges(native, key, size, folder)
    if info.protocol in {"s3", "az"}:
        clients["ours, verified, obstore, file"] = hit(Transport.OBSTORE, folder)
        clients["ours, verified, obstore, memory"] = hit(Transport.OBSTORE, None)
    rows = measure(clients, rounds)
    peers = {name: median for name, (_, median, _) in rows.items() if not name.startswith("ours")}
    table = Table(f"{size >> 20} MiB from {info.kind.value}, median of {rounds}")
    for name, (best, median, cpu) in rows.items():
        if name in peers:
            continue
        note = f"{size / 1e6 / median:.0f} MB/s, best {size / 1e6 / best:.0f}, CPU {cpu:.2f} s"
        for peer, seconds in peers.items():
            fastest = seconds == min(peers.values())
            target = "within 10 %" if fastest else "not slower"
            table.add(name, median, f"{peer}, unverified", seconds, target=target, note=note)
    table.show()


if __name__ == "__main__":
    main()
