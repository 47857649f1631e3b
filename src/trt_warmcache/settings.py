"""Settings that applications read from the environment. The library itself never does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DEFAULT_STORE", "ENVIRONMENT", "Settings"]

#: Where the command line keeps engines unless told otherwise.
DEFAULT_STORE = "~/.cache/trt_warmcache"

#: Every environment variable the command line reads, and what it means.
ENVIRONMENT = {
    "TRT_WARMCACHE_STORE": "Where engines are kept: a folder or URL; several, nearest first, separated by commas.",
    "TRT_WARMCACHE_BUILDER": "auto, tensorrt or tensorrt_rtx.",
}


@dataclass(frozen=True)
class Settings:
    """Where engines are kept and what builds them.

    Attributes:
        stores: Folders or URLs, nearest first.
        builder: ``auto``, ``tensorrt`` or ``tensorrt_rtx``.
    """

    stores: tuple[str, ...] = (DEFAULT_STORE,)
    builder: str = "auto"

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Settings from a mapping of environment variables; see :data:`ENVIRONMENT`."""
        stores = tuple(part.strip() for part in environ.get("TRT_WARMCACHE_STORE", "").split(",") if part.strip())
        return cls(stores or (DEFAULT_STORE,), environ.get("TRT_WARMCACHE_BUILDER", "") or "auto")
