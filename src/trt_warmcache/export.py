"""Files that leave a store under names people can read."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trt_warmcache.errors import StoreError
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import Manifest
from trt_warmcache.names import with_digest
from trt_warmcache.stores import Store
from trt_warmcache.stores._errors import from_os_error

__all__ = ["EXTENSIONS", "export_entry", "file_names", "write_whole"]

#: File-name extension per kind of entry.
EXTENSIONS = {Kind.ENGINE: ".engine", Kind.TIMING: ".cache", Kind.CALIBRATION: ".calib", Kind.RUNTIME: ".runtime"}


def file_names(manifests: Iterable[Manifest]) -> dict[str, str]:
    """File name per key: ``{model_name}_{version}_{gpu_type}_{input_shape}``, with a digest where two would collide."""
    found = list(manifests)
    plain = {manifest.key: _stem(manifest) + EXTENSIONS[Kind(manifest.kind)] for manifest in found}
    # Compared without case: some file systems do not tell Model.engine from model.engine.
    taken: dict[str, int] = {}
    for name in plain.values():
        taken[name.casefold()] = taken.get(name.casefold(), 0) + 1
    return {
        manifest.key: plain[manifest.key]
        if taken[plain[manifest.key].casefold()] == 1
        else with_digest(_stem(manifest), manifest.key) + EXTENSIONS[Kind(manifest.kind)]
        for manifest in found
    }


def _stem(manifest: Manifest) -> str:
    return manifest.labels.entry or manifest.key[:12]


def export_entry(store: Store, manifest: Manifest, folder: Path, name: str) -> Path:
    """Write an entry's payload to a file, whole or not at all.

    Args:
        store: Where the entry is.
        manifest: Its manifest.
        folder: Where the file goes; created if needed.
        name: The file's name.

    Raises:
        IntegrityError: The payload is damaged.
        StoreError: It cannot be read, or the file cannot be written.
    """
    payload = store.fetch(manifest.blobs[0])
    try:
        return write_whole(folder / name, payload.view)
    finally:
        payload.close()


def write_whole(target: Path, data: Any) -> Path:
    """Write a file, whole or not at all; its folder is created if needed.

    Raises:
        StoreError: It cannot be written.
    """
    temporary = target.parent / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(target)
    except OSError as error:
        raise _cannot_write(error, target) from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _cannot_write(error: OSError, target: Path) -> StoreError:
    return from_os_error(error, doing=f"write {target.name}", store=str(target.parent))
