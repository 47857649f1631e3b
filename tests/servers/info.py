"""What a test needs to know about a running storage server."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fsspec import AbstractFileSystem

# Read once, when gcsfs is first imported: with it on, gcsfs asks the storage-control service about the layout of each
# bucket over gRPC, which no emulator answers, and stalls for 60 seconds per process.
GCSFS_SWITCH = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"

ACCESS_KEY = "warmcache"
SECRET_KEY = "warmcache-test-only"
# Account and key are fixed in Azurite and public in its documentation.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class ServerKind(Enum):
    """The servers the suite runs against."""

    MOTO = "moto"
    SEAWEEDFS = "seaweedfs"
    RCLONE = "rclone"
    FAKE_GCS = "fake-gcs"
    AZURITE = "azurite"


class Refusal(Enum):
    """How a lost create-if-absent reaches the caller through fsspec."""

    FILE_EXISTS = "FileExistsError"
    EINVAL = "OSError with errno 22"
    NEVER = "never: the condition is ignored"


_PROTOCOLS = {
    ServerKind.MOTO: "s3",
    ServerKind.SEAWEEDFS: "s3",
    ServerKind.RCLONE: "s3",
    ServerKind.FAKE_GCS: "gcs",
    ServerKind.AZURITE: "az",
}
_REFUSALS = {
    ServerKind.MOTO: Refusal.FILE_EXISTS,
    ServerKind.SEAWEEDFS: Refusal.EINVAL,
    ServerKind.RCLONE: Refusal.NEVER,
    ServerKind.FAKE_GCS: Refusal.FILE_EXISTS,
    ServerKind.AZURITE: Refusal.FILE_EXISTS,
}


@dataclass(frozen=True)
class ServerInfo:
    """A storage server on loopback, as its clients see it.

    Attributes:
        kind: Which server it is.
        host: Always a loopback address.
        port: TCP port of the storage API, or of a proxy in front of it.
        log: What the server wrote to stdout and stderr.
    """

    kind: ServerKind
    host: str
    port: int
    log: Path

    @property
    def protocol(self) -> str:
        """The fsspec protocol: ``s3``, ``gcs`` or ``az``."""
        return _PROTOCOLS[self.kind]

    @property
    def refusal(self) -> Refusal:
        """How the loser of a create-if-absent race on this server learns of it."""
        return _REFUSALS[self.kind]

    @property
    def endpoint(self) -> str:
        """Base URL of the storage API."""
        return f"http://{self.host}:{self.port}"

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that a process using this server must have before it imports its backend."""
        return MappingProxyType({GCSFS_SWITCH: "false"} if self.protocol == "gcs" else {})

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for ``fsspec.filesystem(protocol, ...)``; a fresh dictionary on every call."""
        if self.protocol == "gcs":
            return {"endpoint_url": self.endpoint, "token": "anon", "project": "warmcache"}
        if self.protocol == "az":
            return {
                "connection_string": (
                    f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};"
                    f"BlobEndpoint={self.endpoint}/{AZURE_ACCOUNT};"
                )
            }
        config: dict[str, Any] = {"s3": {"addressing_style": "path"}}
        if self.kind is ServerKind.RCLONE:
            # It sends the checksum of the whole object with a range, which botocore then takes for a damaged range.
            config["response_checksum_validation"] = "when_required"
        return {
            "key": ACCESS_KEY,
            "secret": SECRET_KEY,
            # Not us-east-1: s3fs sends the region as location constraint, which that one region refuses.
            "client_kwargs": {"endpoint_url": self.endpoint, "region_name": "eu-central-1"},
            # Without the fixed style, botocore would try the bucket as a host name.
            "config_kwargs": config,
        }

    def url_for(self, bucket: str, path: str = "") -> str:
        """Gives the fsspec URL of a bucket, or of an object in it."""
        return f"{self.protocol}://{bucket}/{path}" if path else f"{self.protocol}://{bucket}"

    def behind(self, port: int) -> ServerInfo:
        """Gives the same server as seen through a proxy that listens on ``port`` of the same host."""
        return replace(self, port=port)

    def filesystem(self, **options: Any) -> AbstractFileSystem:
        """Makes a new fsspec file system: not from fsspec's instance cache, and with no listing cache.

        Args:
            **options: Added to the storage options, over them where both have a key.
        """
        os.environ.update(self.environment)
        import fsspec

        merged = {**self.storage_options, "use_listings_cache": False, "skip_instance_cache": True, **options}
        filesystem: AbstractFileSystem = fsspec.filesystem(self.protocol, **merged)
        return filesystem

    def fresh_bucket(self) -> str:
        """Creates a bucket (a container on Azure) that no other test uses, and gives its name."""
        bucket = f"warm-{uuid.uuid4().hex[:16]}"
        self.filesystem().mkdir(bucket)
        return bucket
