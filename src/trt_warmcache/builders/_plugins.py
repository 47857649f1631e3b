"""Plugin libraries: loaded before parsing or deserializing, and what they offer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trt_warmcache.errors import ConfigError

__all__ = ["PluginLoader", "creators"]


class PluginLoader:
    """Loads plugin libraries once. A library cannot be exchanged inside a running process, so that is refused."""

    def __init__(self) -> None:
        self._loaded: dict[Path, tuple[int, int, int]] = {}

    def load(self, registry: Any, paths: Iterable[Path]) -> tuple[str, ...]:
        """Load libraries into a registry.

        Returns:
            The plugins that they registered, as ``namespace::name:version``.

        Raises:
            ConfigError: TensorRT cannot load one, or the file changed after it was loaded.
        """
        before = set(creators(registry))
        for path in paths:
            status = path.stat()
            identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            known = self._loaded.get(path.resolve())
            if (known is not None and known != identity) or _replaced(path):
                raise ConfigError(
                    f"The plugin library {path} changed after this process loaded it; the old code still runs. Start a new process."
                )
            if known is None and registry.load_library(str(path)) is None:
                raise ConfigError(f"TensorRT could not load the plugin library {path}; is it built for this version?")
            self._loaded[path.resolve()] = identity
        return tuple(sorted(set(creators(registry)) - before))


def creators(registry: Any) -> tuple[str, ...]:
    """All registered plugins, as ``namespace::name:version``."""
    found = getattr(registry, "all_creators_recursive", None)
    if found is None:
        found = registry.plugin_creator_list
    return tuple(sorted(f"{creator.plugin_namespace}::{creator.name}:{creator.plugin_version}" for creator in found))


def _replaced(path: Path) -> bool:
    """Whether this process has mapped a library of this path that lies there no longer."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    inode = path.stat().st_ino
    resolved = os.fspath(path.resolve())
    for line in maps.splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5].removesuffix(" (deleted)") == resolved and int(parts[4]) != inode:
            return True
    return False
