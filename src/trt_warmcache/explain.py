"""Why a request hits or misses: the nearest stored entries, and the parts in which they differ."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trt_warmcache.errors import IntegrityError, UntrustedError
from trt_warmcache.keys import KEY_SCHEMA, Difference, EngineKey, Kind, differences
from trt_warmcache.manifest import Manifest
from trt_warmcache.profiles import ShapeProfile, profile_gaps
from trt_warmcache.stores import EntryInfo, Store

__all__ = ["Explanation", "Neighbour", "explain"]

#: Manifests that are read at once from a store whose answers take time.
_READERS = 16

#: The parts that make two requests unrelated when they differ, most telling first; used to rank neighbours.
_WEIGHT = {"model": 4, "builder.flavour": 3}


@dataclass(frozen=True)
class Neighbour:
    """A stored entry that is not the one asked for.

    Attributes:
        digest: Its key.
        label: Its readable name.
        differences: Parts in which it differs from the request.
        gaps: Where its profiles fall short of the request: input, dimension, asked value and covered range.
    """

    digest: str
    label: str
    differences: tuple[Difference, ...]
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """What the store knows about a request.

    Attributes:
        hit: Whether an entry is stored under exactly this key.
        key: The request's key.
        store: Where was looked.
        nearest: The entries that come closest, closest first.
        examined: How many entries were compared.
        damaged: Why the entry under this key cannot be used, or "".
        complete: Whether all stored entries were compared; False where there was no time to ask far stores or to read
            everything.
    """

    hit: bool
    key: EngineKey
    store: str
    nearest: tuple[Neighbour, ...] = ()
    examined: int = 0
    damaged: str = ""
    complete: bool = True

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The parts in which the nearest entry differs; empty for a hit or an empty store."""
        return self.nearest[0].differences if self.nearest and not self.hit else ()

    def __str__(self) -> str:
        what = f"{self.key.name or 'request'} ({self.key.digest[:12]})"
        if self.hit:
            return f"Hit: {what} is stored in {self.store}."
        lines = [
            f"Miss: {what} is not stored in {self.store}."
            if not self.damaged
            else f"Miss: the entry of {what} is damaged: {self.damaged}"
        ]
        if not self.examined and self.complete:
            lines.append("No engine is stored there at all.")
        for neighbour in self.nearest:
            lines.append(
                f"Nearest: {neighbour.label or 'entry'} ({neighbour.digest[:12]}) differs in {len(neighbour.differences)} part(s):"
            )
            lines += [f"  {difference}" for difference in neighbour.differences]
            lines += [f"  {gap}" for gap in neighbour.gaps]
        if not self.complete:
            lines.append(f"Compared with {self.examined} entries nearby; trt-warmcache explain compares with all.")
        return "\n".join(filter(None, lines))

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(str(self))  # how IPython and notebooks show a cell's result

    def to_json(self) -> dict[str, Any]:
        """The explanation as plain JSON values."""
        return {
            "hit": self.hit,
            "key": self.key.digest,
            "name": self.key.name,
            "store": self.store,
            "examined": self.examined,
            "damaged": self.damaged,
            "complete": self.complete,
            "nearest": [
                {
                    "key": neighbour.digest,
                    "name": neighbour.label,
                    "differences": [
                        {"part": d.part, "wanted": d.wanted, "stored": d.stored} for d in neighbour.differences
                    ],
                    "gaps": list(neighbour.gaps),
                }
                for neighbour in self.nearest
            ],
        }


def explain(store: Store, key: EngineKey, *, limit: int = 3, seconds: float | None = None) -> Explanation:
    """Compare a key with everything stored.

    Args:
        store: Where to look.
        key: The request's key.
        limit: How many neighbours to name.
        seconds: Compare with what can be read in that time from the parts of the store that answer at once; for
            errors, which must not keep anybody waiting.
    """
    damaged = ""
    try:
        if store.manifest(key.kind, key.digest) is not None:
            return Explanation(hit=True, key=key, store=store.url)
    except (IntegrityError, UntrustedError) as error:
        damaged = error.message
    complete = seconds is None or store.local
    found: dict[str, Manifest] = {}
    until = None if seconds is None else time.monotonic() + seconds
    for part in [store] if until is None else store.nearby():
        for manifest in stored_manifests(part, key.kind):
            found.setdefault(manifest.key, manifest)
            if until is not None and time.monotonic() > until:
                complete = False
                break
    best = heapq.nsmallest(limit, found.values(), key=lambda manifest: (_distance(key, manifest), manifest.key))
    nearest = tuple(_neighbour(key, manifest) for manifest in best)
    return Explanation(
        hit=False, key=key, store=store.url, nearest=nearest, examined=len(found), damaged=damaged, complete=complete
    )


def stored_manifests(store: Store, kind: Kind) -> Iterator[Manifest]:
    """All readable manifests of a kind; damaged and untrusted ones, and those that vanish meanwhile, are passed over."""

    def read(entry: EntryInfo) -> Manifest | None:
        try:
            return store.manifest(kind, entry.digest)
        except (IntegrityError, UntrustedError):
            return None

    for manifest in map(read, store.entries(kind)) if store.local else _side_by_side(read, store.entries(kind)):
        if manifest is not None:
            yield manifest


def _side_by_side(
    read: Callable[[EntryInfo], Manifest | None], entries: Iterable[EntryInfo]
) -> Iterator[Manifest | None]:
    """Several reads at once, for stores whose answers take time; results in order."""
    from concurrent.futures import ThreadPoolExecutor  # not needed for a hit, and slow to import

    pool = ThreadPoolExecutor(_READERS, "trt_warmcache-read")
    try:
        yield from pool.map(read, entries)
    finally:
        pool.shutdown(cancel_futures=True)


def _distance(key: EngineKey, manifest: Manifest) -> int:
    return sum(_WEIGHT.get(difference.part, 1) for difference in _differences(key, manifest))


def _differences(key: EngineKey, manifest: Manifest) -> tuple[Difference, ...]:
    recipes = () if manifest.schema == KEY_SCHEMA else (Difference("schema", KEY_SCHEMA, manifest.schema),)
    return recipes + differences(key.parts, manifest.parts)


def _neighbour(key: EngineKey, manifest: Manifest) -> Neighbour:
    found = _differences(key, manifest)
    gaps: tuple[str, ...] = ()
    # Another release may spell profiles in another way.
    if manifest.schema == KEY_SCHEMA and any(difference.part == "profiles" for difference in found):
        wanted, stored = (
            tuple(ShapeProfile.from_json(item) for item in parts.get("profiles", ()))
            for parts in (key.parts, manifest.parts)
        )
        gaps = profile_gaps(wanted, stored)
    return Neighbour(manifest.key, manifest.labels.entry, found, gaps)
