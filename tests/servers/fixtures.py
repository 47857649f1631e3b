"""Pytest fixtures: one server of each kind per test process, started when first asked for.

Load them with ``pytest_plugins = ["tests.servers.fixtures"]`` in ``tests/conftest.py``. A server that is not
installed fails the test with the command that installs it, so that no CI run passes by testing less. To work without
the servers, set ``TRTWC_SKIP_SERVERS=1``: those tests are then skipped by name.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest
from tests.servers.info import GCSFS_SWITCH, ServerInfo, ServerKind
from tests.servers.launch import MissingServerError, running
from tests.servers.proxy import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

SKIP_SWITCH = "TRTWC_SKIP_SERVERS"
_LOG_TAIL = 8192

# At load time, before any test can import gcsfs, because gcsfs looks only once.
os.environ[GCSFS_SWITCH] = "false"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the end of the server's log to the report of a failed test."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, ServerInfo):
                tail = value.log.read_bytes()[-_LOG_TAIL:].decode(errors="replace")
                report.sections.append((f"{value.kind.value} log, whole file in {value.log}", tail))
    return report


@contextmanager
def serve(kind: ServerKind, factory: pytest.TempPathFactory) -> Iterator[ServerInfo]:
    """Runs a server; not installed, it fails the test or, by the switch, skips it."""
    try:
        with running(kind, factory.mktemp(kind.value)) as info:
            yield info
    except MissingServerError as missing:
        if os.environ.get(SKIP_SWITCH) == "1":
            pytest.skip(f"{kind.value} is left out because {SKIP_SWITCH}=1: {missing}")
        pytest.fail(f"{kind.value}: {missing} (or set {SKIP_SWITCH}=1 to leave such tests out)", pytrace=False)


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerInfo]:
    """S3 in memory: quick, and strict about conditions."""
    with serve(ServerKind.MOTO, tmp_path_factory) as info:
        yield info


@pytest.fixture(scope="session")
def seaweedfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerInfo]:
    """S3 on a real distributed store: checks signatures, stores on disk, words refusals differently."""
    with serve(ServerKind.SEAWEEDFS, tmp_path_factory) as info:
        yield info


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerInfo]:
    """S3 that ignores every condition: the negative example."""
    with serve(ServerKind.RCLONE, tmp_path_factory) as info:
        yield info


@pytest.fixture(scope="session")
def fake_gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerInfo]:
    """Google Cloud Storage's JSON API in memory."""
    with serve(ServerKind.FAKE_GCS, tmp_path_factory) as info:
        yield info


@pytest.fixture(scope="session")
def azurite_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerInfo]:
    """Azure Blob Storage, by Microsoft's own emulator."""
    with serve(ServerKind.AZURITE, tmp_path_factory) as info:
        yield info


_FIXTURES = {
    ServerKind.MOTO: "moto_server",
    ServerKind.SEAWEEDFS: "seaweedfs_server",
    ServerKind.RCLONE: "rclone_server",
    ServerKind.FAKE_GCS: "fake_gcs_server",
    ServerKind.AZURITE: "azurite_server",
}


@pytest.fixture
def server_of(request: pytest.FixtureRequest) -> Callable[[ServerKind], ServerInfo]:
    """Gives the running server of a kind, for tests parametrized by kind."""

    def find(kind: ServerKind) -> ServerInfo:
        info = request.getfixturevalue(_FIXTURES[kind])
        assert isinstance(info, ServerInfo)
        return info

    return find


@pytest.fixture(params=list(ServerKind), ids=lambda kind: kind.value)
def storage_server(request: pytest.FixtureRequest, server_of: Callable[[ServerKind], ServerInfo]) -> ServerInfo:
    """Every server in turn."""
    kind = request.param
    assert isinstance(kind, ServerKind)
    return server_of(kind)


@pytest.fixture
def proxied() -> Iterator[Callable[[ServerInfo], FaultProxy]]:
    """Puts fault proxies in front of servers and takes them down after the test."""
    with ExitStack() as stack:
        yield lambda info: stack.enter_context(FaultProxy(info))
