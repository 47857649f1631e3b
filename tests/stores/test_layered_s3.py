"""A folder in front of a real S3 server, under the public conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.servers import ServerKind
from tests.stores.test_fsspec_conformance import RemoteConformance

from trt_warmcache.stores import LayeredStore, LocalStore, Store


class TestFolderBeforeMoto(RemoteConformance):
    """Near a folder, far a bucket; the raw access damages and reads both."""

    kind = ServerKind.MOTO

    @pytest.fixture(autouse=True)
    def _near(self, tmp_path: Path) -> None:
        self.near = tmp_path / "near"

    def make_store(self) -> Store:
        return LayeredStore([LocalStore(self.near), super().make_store()], lease_seconds=5)

    def raw_get(self, name: str) -> bytes | None:
        path = self.near / "trtwc-1" / name
        found = super().raw_get(name)
        # Housekeeping of a layer stays in that layer, entries are everywhere.
        return found if found is not None else path.read_bytes() if path.is_file() else None

    def raw_put(self, name: str, data: bytes) -> None:
        super().raw_put(name, data)
        path = self.near / "trtwc-1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
