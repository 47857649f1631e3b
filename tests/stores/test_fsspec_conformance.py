"""The public conformance suite over every kind of remote store, through each transport."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from tests.servers import ServerInfo, ServerKind

from trt_warmcache.stores import FsspecStore, Store, Transport
from trt_warmcache.stores._base import LAYOUT
from trt_warmcache.testing import StoreConformance

ServerOf = Callable[[ServerKind], ServerInfo]


def store_on(info: ServerInfo, bucket: str, **options: Any) -> FsspecStore:
    """A store on a server, under a prefix, as a user would open it."""
    options.setdefault("timeout", 20.0)
    return FsspecStore(info.url_for(bucket, "some/prefix"), storage_options=info.storage_options, **options)


class RemoteConformance(StoreConformance):
    """The suite over a server; the raw access is a plain fsspec file system of its own."""

    kind: ServerKind
    transport = Transport.FSSPEC
    exclusive = True

    @pytest.fixture(autouse=True)
    def medium(self, server_of: ServerOf) -> None:
        """One bucket for each test."""
        self.info = server_of(self.kind)
        self.bucket = self.info.fresh_bucket()
        self.raw = self.info.filesystem()

    def make_store(self) -> Store:
        return store_on(self.info, self.bucket, transport=self.transport)

    def raw_get(self, name: str) -> bytes | None:
        try:
            data: bytes = self.raw.cat_file(f"{self.bucket}/some/prefix/{LAYOUT}/{name}")
        except FileNotFoundError:
            return None
        return data

    def raw_put(self, name: str, data: bytes) -> None:
        self.raw.pipe_file(f"{self.bucket}/some/prefix/{LAYOUT}/{name}", data)

    def test_claims(self, store: Store) -> None:
        """Exclusive creation is claimed exactly where the server keeps to it, and the probe leaves nothing behind."""
        assert store.capabilities.exclusive_create is self.exclusive
        left = self.raw.find(f"{self.bucket}/")
        # A server without conditions may also bring back what was deleted while it was still writing it; that lies
        # among the leases, where housekeeping finds it.
        assert left == [] or (not self.exclusive and all(f"{LAYOUT}/leases/probe-" in name for name in left))


class TestMoto(RemoteConformance):
    """S3 in memory, through s3fs."""

    kind = ServerKind.MOTO


class TestMotoNative(RemoteConformance):
    """S3 in memory, through obstore."""

    kind = ServerKind.MOTO
    transport = Transport.OBSTORE


class TestSeaweedFS(RemoteConformance):
    """S3 on a real store, through s3fs: refusals arrive as plain OSError."""

    kind = ServerKind.SEAWEEDFS


class TestSeaweedFSNative(RemoteConformance):
    """S3 on a real store, through obstore."""

    kind = ServerKind.SEAWEEDFS
    transport = Transport.OBSTORE


class TestFakeGcs(RemoteConformance):
    """Google Cloud Storage, through gcsfs."""

    kind = ServerKind.FAKE_GCS


class TestAzurite(RemoteConformance):
    """Azure Blob Storage, through adlfs."""

    kind = ServerKind.AZURITE


class TestAzuriteNative(RemoteConformance):
    """Azure Blob Storage, through obstore."""

    kind = ServerKind.AZURITE
    transport = Transport.OBSTORE


class TestRclone(RemoteConformance):
    """S3 that ignores conditions; whatever transport is chosen must find that out."""

    kind = ServerKind.RCLONE
    transport = Transport.AUTO
    exclusive = False

    def test_warns_once(self, caplog: pytest.LogCaptureFixture) -> None:
        """A server without exclusive creation is told of once, however often the store is used."""
        with caplog.at_level(logging.WARNING, "trt_warmcache"), self.make_store() as store:
            assert store.create("engines/ab/1.json", b"one")
            assert not store.create("engines/ab/1.json", b"two")
            assert store.create("engines/ab/2.json", b"one")
            assert not store.capabilities.exclusive_create
        assert len([record for record in caplog.records if "exclusively" in record.message]) == 1


class TestFsspecMemory(StoreConformance):
    """fsspec's own in-process file system."""

    @pytest.fixture(autouse=True)
    def medium(self) -> None:
        """A folder for each test: all instances share one tree."""
        import fsspec

        self.fs = fsspec.filesystem("memory")
        self.root = f"/suite-{uuid4().hex}"

    def make_store(self) -> Store:
        return FsspecStore(f"memory:/{self.root}")

    def raw_get(self, name: str) -> bytes | None:
        path = f"{self.root}/{LAYOUT}/{name}"
        return self.fs.cat_file(path) if self.fs.exists(path) else None

    def raw_put(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{LAYOUT}/{name}", data)


class TestFsspecLocal(StoreConformance):
    """fsspec's local file system, asked for by hand: no claim of exclusive creation, and no half-written object."""

    @pytest.fixture(autouse=True)
    def medium(self, tmp_path: Any) -> None:
        """A folder for each test."""
        self.root = tmp_path

    def make_store(self) -> Store:
        return FsspecStore(f"file://{self.root}")

    def raw_get(self, name: str) -> bytes | None:
        path = self.root / LAYOUT / name
        return path.read_bytes() if path.exists() else None

    def raw_put(self, name: str, data: bytes) -> None:
        path = self.root / LAYOUT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def test_no_claim(self, store: Store) -> None:
        """fsspec's local mode="create" looks first and writes then, and wins races by luck only."""
        assert not store.capabilities.exclusive_create
