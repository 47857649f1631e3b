"""Files that leave a store under names people can read."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trt_warmcache.errors import StoreError
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import Manifest
from trt_warmcache.names import safe_name, with_digest
from trt_warmcache.stores import Store
from trt_warmcache.stores._errors import from_os_error

__all__ = ["EXTENSIONS", "export_entry", "file_names", "write_whole"]

#: File-name extension per kind of entry.
EXTENSIONS = {Kind.ENGINE: ".engine", Kind.TIMING: ".cache", Kind.CALIBRATION: ".calib", Kind.RUNTIME: ".runtime"}


def file_names(manifests: Iterable[Manifest]) -> dict[str, str]:
    """File name per key: ``{model_name}_{version}_{gpu_type}_{input_shape}``, with a digest where two would collide."""
    found = list(manifests)
    short, long = {}, {}
    for manifest in found:
        # Labels are not part of the key: whoever can write to the store could have put any path there.
        stem, extension = safe_name(manifest.labels.entry or manifest.key[:12]), EXTENSIONS[Kind(manifest.kind)]
        short[manifest.key] = stem + extension
        long[manifest.key] = with_digest(stem, manifest.key) + extension
    # Compared without case: some file systems do not tell Model.engine from model.engine.
    taken = Counter(name.casefold() for name in (*short.values(), *long.values()))
    return {key: name if taken[name.casefold()] == 1 else long[key] for key, name in short.items()}


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
        with contextlib.suppress(OSError):
            temporary.unlink()
    return target


def _cannot_write(error: OSError, target: Path) -> StoreError:
    return from_os_error(error, doing=f"write {target.name}", store=str(target.parent))
