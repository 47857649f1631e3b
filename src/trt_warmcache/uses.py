"""When entries were last used, and which must stay: what housekeeping knows beyond the entries themselves."""

from __future__ import annotations

import json
import logging
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import blake3
import msgspec

from trt_warmcache.events import Event, EventKind
from trt_warmcache.keys import Kind
from trt_warmcache.stores import Store

__all__ = ["UseLog", "is_pinned", "merge_uses", "pin", "pin_target", "recorded_uses", "unpin"]

log = logging.getLogger("trt_warmcache")

# ---- pins -------------------------------------------------------------------------------------------------------


def pin(store: Store, kind: Kind, digest: str, *, note: str = "") -> None:
    """Keep an entry from being evicted, on every machine that shares the store.

    Raises:
        StoreError: The store cannot be written.
    """
    store.write(_pin_name(kind, digest), json.dumps({"note": note}).encode())


def unpin(store: Store, kind: Kind, digest: str) -> bool:
    """Let an entry be evicted again; False if it was not pinned."""
    return store.delete(_pin_name(kind, digest))


def is_pinned(store: Store, kind: Kind, digest: str) -> bool:
    """Whether an entry is pinned."""
    return store.read(_pin_name(kind, digest), limit=0) is not None


def _pin_name(kind: Kind, digest: str) -> str:
    return f"pins/{kind.value}-{digest}.json"


def pin_target(name: str) -> str:
    """What a pin in a store is about, as ``kind/key``."""
    kind, _, digest = name.removeprefix("pins/").removesuffix(".json").partition("-")
    return f"{kind}/{digest}"


# ---- last use ---------------------------------------------------------------------------------------------------

_USE_FORMAT = "trtwc-use-1"
_MAX_USE_BYTES = 64 * 1024 * 1024

#: Seconds between two writes of what a long-lived process has used.
_FLUSH_SECONDS = 60.0

#: Records of entries that were not used for so long are dropped.
_FORGET_SECONDS = 400 * 86400.0


class _Uses(msgspec.Struct, frozen=True):
    format: str
    used: dict[str, float]


#: Being built counts too: what this machine made and nobody ever took up is worth knowing.
_SERVED = frozenset({EventKind.HIT, EventKind.JOINED, EventKind.COVERED, EventKind.PUBLISHED})


class UseLog:
    """When entries were last used on this machine.

    A hook for every manager. A hit costs one entry in a dictionary; the dictionary is merged into a small file of this
    machine now and then, never into the store, so that hits work from read-only stores and cost a shared one nothing.
    Best effort throughout: what is lost only makes an entry look older. :meth:`share` puts a copy into the store, for
    housekeeping that runs on another machine.

    Args:
        folder: Where the file is; made when first needed. None: this process only.
        clock: Unix seconds.
    """

    def __init__(self, folder: Path | None, *, clock: Callable[[], float] = time.time) -> None:
        self._path = None if folder is None else folder / "uses.json"
        self._clock = clock
        self._guard = threading.Lock()
        self._fresh: dict[str, float] = {}
        self._flushed = time.monotonic()

    def __call__(self, event: Event) -> None:
        """Note a use, if that is what happened."""
        if event.kind in _SERVED and event.key:
            self.note(Kind.ENGINE, event.key)

    def note(self, kind: Kind, digest: str) -> None:
        """Remember that an entry was used now."""
        with self._guard:
            self._fresh[f"{kind.value}/{digest}"] = self._clock()
            due = time.monotonic() - self._flushed > _FLUSH_SECONDS
            if due:
                self._flushed = time.monotonic()
        if due:
            threading.Thread(target=self.flush, name="trt_warmcache-uses", daemon=True).start()

    def flush(self) -> None:
        """Merge what was noted into this machine's file."""
        with self._guard:
            fresh, self._fresh = self._fresh, {}
        if not fresh:
            return
        if self._path is None:
            with self._guard:
                merge_uses(self._fresh, fresh)
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            used = merge_uses(_read_uses(self._path), fresh)
            cut = self._clock() - _FORGET_SECONDS
            data = _encode_uses({name: at for name, at in used.items() if at > cut})
            # Two processes that flush at once may lose one another's latest notes, which the next flush repairs.
            with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=".tmp-", delete=False) as file:
                file.write(data)
            Path(file.name).replace(self._path)
        except OSError as error:
            log.debug("last uses not written to %s: %s", self._path, error)

    def all(self) -> dict[str, float]:
        """Unix time of last use by ``kind/key``, whatever store the entry was served from."""
        with self._guard:
            fresh = dict(self._fresh)
        return merge_uses({} if self._path is None else _read_uses(self._path), fresh)

    def share(self, store: Store) -> None:
        """Put what this machine knows into the store as one object.

        Raises:
            StoreError: The store cannot be written.
        """
        self.flush()
        host = blake3.blake3(socket.gethostname().encode()).hexdigest()[:16]
        store.write(f"use/{host}.json", _encode_uses(self.all()))


def recorded_uses(store: Store) -> dict[str, float]:
    """What machines have left in the store about last uses; whatever else lies there is passed over."""
    used: dict[str, float] = {}
    for info in store.list("use/"):
        data = store.read(info.name, limit=_MAX_USE_BYTES)
        merge_uses(used, _decode_uses(data or b""))
    return used


def _read_uses(path: Path) -> dict[str, float]:
    try:
        if path.stat().st_size > _MAX_USE_BYTES:
            return {}
        return _decode_uses(path.read_bytes())
    except OSError:
        return {}


def _decode_uses(data: bytes) -> dict[str, float]:
    try:
        found = msgspec.json.decode(data, type=_Uses)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found.used if found.format == _USE_FORMAT else {}


def _encode_uses(used: dict[str, float]) -> bytes:
    return msgspec.json.encode(_Uses(_USE_FORMAT, used), order="sorted")


def merge_uses(into: dict[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Keep the later time of each entry, in place."""
    for name, at in more.items():
        if at > into.get(name, 0.0):
            into[name] = at
    return into
