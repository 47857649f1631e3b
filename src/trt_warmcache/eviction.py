"""Housekeeping: look at a store, plan what may go, and only then delete.

    inventory = scan(store)
    plan = plan_eviction(inventory, EvictionRules(max_bytes=50 * 10**9))
    print(plan)
    plan.execute(store)

A scan is read-only and survives anything that lies around in a store. A plan is a value: printable, JSON, reproducible.
Executing it deletes manifests before blobs, so that an interruption leaves garbage and never an entry without its
bytes; and looks again before each deletion at what may have changed since the scan.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
from packaging.version import InvalidVersion, Version

from trt_warmcache._fields import strict_fields
from trt_warmcache.churn import CHURN_KEYS, Churn, changing_parts, tell_churn
from trt_warmcache.errors import ConfigError, IntegrityError, StoreError, UntrustedError
from trt_warmcache.events import Event, EventKind, Events
from trt_warmcache.keys import Kind
from trt_warmcache.lease import lease_name
from trt_warmcache.manifest import BlobRef, Manifest
from trt_warmcache.memo import default_memo_folder
from trt_warmcache.names import size_text
from trt_warmcache.stores import EntryInfo, ObjectInfo, Store
from trt_warmcache.stores._base import PACKED_SUFFIX, manifest_name
from trt_warmcache.uses import UseLog, is_pinned, merge_uses, pin_target, recorded_uses

__all__ = [
    "Eviction",
    "EvictionPlan",
    "EvictionReport",
    "EvictionRules",
    "Inventory",
    "Quota",
    "StoredEntry",
    "plan_eviction",
    "scan",
]

log = logging.getLogger("trt_warmcache")

_T = TypeVar("_T")

#: Unreferenced objects younger than this may belong to somebody at work.
DEFAULT_GRACE_SECONDS = 3600.0

#: A use is one only if it comes later than the entry's own birth.
_SETTLE_SECONDS = 5.0

#: Keeps a plain removal apart from a rule in reports.
_SELECTED = "selected"

#: Threads that read manifests of a store whose answers take time.
_REMOTE_READERS = 16


# ---- what is there ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredEntry:
    """One entry, as far as housekeeping is concerned.

    Attributes:
        kind: Kind of entry.
        digest: Its key.
        manifest: What it claims.
        written: When its manifest was written, by the store's clock; Unix seconds.
        used: When it was last used, as far as is known; at least `written`.
        pinned: Whether it must stay.
        leased: Whether somebody seems to be building under this key.
        served: Whether any use is on record.
        listed: Time stamp it was listed with, for noticing that it was replaced.
    """

    kind: Kind
    digest: str
    manifest: Manifest = field(repr=False)
    written: float
    used: float
    pinned: bool = False
    leased: bool = False
    served: bool = False
    listed: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of its payloads."""
        return self.manifest.size

    @property
    def model(self) -> str:
        """What people call the model."""
        return self.manifest.labels.name or self.manifest.labels.model

    @property
    def label(self) -> str:
        """What people call the entry."""
        return self.manifest.labels.entry or self.digest[:12]


@dataclass(frozen=True)
class Inventory:
    """What a store held when it was scanned.

    Attributes:
        store: Its URL.
        now: When, by the clock that the ages are judged with.
        entries: Readable entries.
        blobs: Every blob by file name: its digest, with an ending where it is packed.
        damaged: Names of manifests that cannot be read; they are left to ``verify``.
        foreign: Names of manifests that this release or these keys cannot judge; blobs without an entry are not swept
            while there are any, because they may belong to one of these.
        litter: Temporary files, leases and notes on damage, old or not.
        informed: Whether any use of any entry is on record.
    """

    store: str
    now: float
    entries: tuple[StoredEntry, ...]
    blobs: Mapping[str, ObjectInfo] = field(repr=False)
    damaged: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    litter: tuple[ObjectInfo, ...] = field(default=(), repr=False)
    informed: bool = False

    @property
    def size(self) -> int:
        """Bytes of all blobs."""
        return sum(info.size for info in self.blobs.values())


def scan(
    store: Store,
    *,
    uses: UseLog | None = None,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
    clock: Callable[[], float] = time.time,
) -> Inventory:
    """Look at a whole store. Each manifest is read once; nothing is written.

    Args:
        store: The store.
        uses: This machine's memory of when entries were used; what other machines have left in the store counts too.
        workers: Threads that read manifests. None: one for a local store, 16 for others.
        progress: Called now and then with the number of entries read.
        clock: Unix seconds.
    """
    if not store.capabilities.listable:
        raise ConfigError(f"{store.url} cannot be listed, so there is nothing to plan.")
    now = clock()
    used = recorded_uses(store)
    if uses is not None:
        merge_uses(used, uses.all())
    pins = {pin_target(info.name) for info in store.list("pins/")}
    leases = {info.name: info for info in store.list("leases/")}
    living = {name for name, info in leases.items() if not _older(info, now, DEFAULT_GRACE_SECONDS)}
    found = [info for kind in Kind for info in store.entries(kind)]
    entries: list[StoredEntry] = []
    damaged: list[str] = []
    foreign: list[str] = []

    def read(info: EntryInfo) -> Manifest | IntegrityError | UntrustedError | None:
        try:
            return store.manifest(info.kind, info.digest)
        except (IntegrityError, UntrustedError) as error:
            return error

    readers = workers or (1 if store.local else _REMOTE_READERS)
    for count, (info, manifest) in enumerate(_read_all(read, found, readers), 1):
        name = manifest_name(info.kind, info.digest)
        if isinstance(manifest, Manifest):
            identity = f"{info.kind.value}/{info.digest}"
            written = info.modified or manifest.provenance.created
            entries.append(
                StoredEntry(
                    info.kind, info.digest, manifest, written, max(written, used.get(identity, 0.0)),
                    pinned=identity in pins, leased=lease_name(info.digest) in living,
                    served=used.get(identity, 0.0) > written + _SETTLE_SECONDS, listed=info.modified,
                )
            )  # fmt: skip
        elif isinstance(manifest, UntrustedError) or (manifest is not None and manifest.reason == "format"):
            foreign.append(name)
        elif manifest is not None:
            damaged.append(name)
        if progress is not None and count % 1000 == 0:
            progress(count)
    blobs = {info.name.rpartition("/")[2]: info for info in store.list("blobs/")}
    litter = [*store.temporaries(), *leases.values(), *store.list("quarantine/")]
    return Inventory(store.url, now, tuple(entries), blobs, tuple(damaged), tuple(foreign), tuple(litter), bool(used))


def _digest_of(file: str) -> str:
    """The digest that a blob's file is called by."""
    return file.removesuffix(PACKED_SUFFIX)


def _older(info: ObjectInfo, now: float, seconds: float) -> bool:
    """Whether an object is known to be older than this; what the store tells no time of is never old."""
    return info.modified > 0 and now - info.modified > seconds


def _read_all(
    read: Callable[[EntryInfo], _T], found: Sequence[EntryInfo], workers: int
) -> Iterator[tuple[EntryInfo, _T]]:
    if workers == 1 or len(found) < 2:
        for info in found:
            yield info, read(info)
        return
    with ThreadPoolExecutor(workers, "trt_warmcache-scan") as pool:
        yield from zip(found, pool.map(read, found), strict=True)


# ---- what may go ------------------------------------------------------------------------------------------------


@strict_fields
@dataclass(frozen=True)
class EvictionRules:
    """Which entries may go.

    `models`, `targets` and `kinds` say which entries are looked at; the other rules say which of those go. With a
    choice but no rule, everything chosen goes; with neither, only what belongs to no entry is swept.

    Args:
        max_bytes: Evict the least recently used until so many bytes are left.
        max_age: Evict what was written longer ago, in seconds.
        max_idle: Evict what was not used for longer, in seconds.
        superseded: Evict what was built with an older library while the same is there for a newer one.
        models: Names of models, or beginnings of their content digests; shell patterns are understood.
        targets: Names of GPUs or compute capabilities; shell patterns are understood.
        kinds: Kinds of entries.
        keys: Keys, or beginnings of them.
        grace_seconds: Temporary files, leases and blobs without an entry stay at least so long.
        quarantine_seconds: Notes on damaged entries stay so long.

    Raises:
        ConfigError: An unknown field, or a negative number.
    """

    max_bytes: int | None = None
    max_age: float | None = None
    max_idle: float | None = None
    superseded: bool = False
    models: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ()
    keys: tuple[str, ...] = ()
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    quarantine_seconds: float = 7 * 86400.0

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_age", "max_idle", "grace_seconds", "quarantine_seconds"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"EvictionRules.{name} must not be negative, and is {value!r}.")

    @property
    def chooses(self) -> bool:
        """Whether only some entries are looked at."""
        return bool(self.models or self.targets or self.kinds or self.keys)

    @property
    def limits(self) -> bool:
        """Whether there is a rule beyond the choice."""
        return self.superseded or any(value is not None for value in (self.max_bytes, self.max_age, self.max_idle))

    def covers(self, entry: StoredEntry) -> bool:
        """Whether an entry is among those looked at."""
        labels, parts = entry.manifest.labels, entry.manifest.parts
        model = str(parts.get("model", "")).rpartition(":")[2]
        return (
            (not self.kinds or entry.kind in self.kinds)
            and (not self.keys or any(entry.digest.startswith(key.lower()) for key in self.keys))
            and (not self.models or _matches({labels.name, labels.model, labels.entry}, self.models)
                 or any(len(text) >= 6 and model.startswith(text) for text in self.models))
            and (not self.targets or _matches(_target_words(entry.manifest), self.targets))
        )  # fmt: skip


def _matches(words: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(word.lower(), text.lower()) for word in words if word for text in patterns)


def _target_words(manifest: Manifest) -> set[str]:
    """All names by which people would call what an entry was built for."""
    words: set[str] = set()
    for table, prefix in ((manifest.parts, "target."), (manifest.provenance.target, "")):
        for name in ("gpu", "compute_capability", "compute_capabilities"):
            value = table.get(prefix + name)
            words.update(map(str, value) if isinstance(value, (list, tuple)) else [str(value)] if value else [])
    return words


@dataclass(frozen=True)
class Eviction:
    """One entry that goes, and why.

    Attributes:
        entry: The entry.
        reason: ``selected``, ``age``, ``idle``, ``superseded`` or ``size``.
    """

    entry: StoredEntry
    reason: str


@dataclass(frozen=True)
class EvictionPlan:
    """What would be deleted. Nothing is, until :meth:`execute`.

    Attributes:
        store: The store that was scanned.
        evictions: Entries that go, least recently used first.
        orphans: Blobs that belong to no entry, or to none that stays.
        litter: Temporary files, leases and notes that go.
        kept: Why entries stay that the rules alone would evict: ``pinned`` or ``leased``; number of each.
        size_before: Bytes of all blobs.
        size_after: Bytes of all blobs afterwards.
        churn: Models that fill the store without ever being served from it.
    """

    store: str
    evictions: tuple[Eviction, ...]
    orphans: tuple[ObjectInfo, ...]
    litter: tuple[ObjectInfo, ...]
    kept: Mapping[str, int]
    size_before: int
    size_after: int
    churn: tuple[Churn, ...] = ()
    _known: Mapping[tuple[Kind, str], float] = field(default_factory=dict, repr=False)

    @property
    def freed(self) -> int:
        """Bytes that come free."""
        return self.size_before - self.size_after + sum(info.size for info in self.litter)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return {
            "store": self.store,
            "size_before": self.size_before,
            "size_after": self.size_after,
            "freed": self.freed,
            "evict": [
                {
                    "kind": item.entry.kind.value, "key": item.entry.digest, "name": item.entry.label,
                    "size": item.entry.size, "used": item.entry.used, "reason": item.reason,
                }
                for item in self.evictions
            ],
            "orphans": [info.name for info in self.orphans],
            "litter": [info.name for info in self.litter],
            "kept": dict(self.kept),
            "churn": [
                {"model": item.model, "keys": item.keys, "size": item.size, "parts": list(item.parts)}
                for item in self.churn
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"{self.store}: {size_text(self.size_before)} now, {size_text(self.size_after)} afterwards"]
        lines += [f"evict  {size_text(i.entry.size):>10}  {i.reason:10}  {i.entry.label}" for i in self.evictions]
        if self.orphans:
            lines.append(
                f"sweep  {size_text(sum(info.size for info in self.orphans)):>10}  {len(self.orphans)} blobs without an entry"
            )
        if self.litter:
            lines.append(
                f"sweep  {size_text(sum(info.size for info in self.litter)):>10}  {len(self.litter)} leftovers of dead writers"
            )
        lines += [f"keep   {count} {why}" for why, count in sorted(self.kept.items())]
        lines += [f"churn  {item}" for item in self.churn]
        return "\n".join(lines)

    def execute(self, store: Store, *, events: Events | None = None) -> EvictionReport:
        """Delete what the plan says, and nothing that has come into use, been pinned or been rewritten since.

        Args:
            store: The store that was scanned.
            events: Told about churn.

        Raises:
            StoreError: The store forbids deleting altogether. Trouble with single objects is reported instead.
        """
        if not store.capabilities.deletable:
            raise StoreError(f"Nothing can be deleted in {store.url}.", store=store.url)
        if events is not None:
            for item in self.churn:
                tell_churn(events, item)
        return _Execution(self, store).run()


@dataclass(frozen=True)
class EvictionReport:
    """What was deleted.

    Attributes:
        evicted: Entries.
        freed: Bytes.
        in_use: Entries that were left because somebody has them mapped or is building them.
        failed: Messages about objects that could not be deleted.
    """

    evicted: tuple[Eviction, ...]
    freed: int
    in_use: tuple[Eviction, ...] = ()
    failed: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"evicted {len(self.evicted)} entries, freed {size_text(self.freed)}"
        if self.in_use:
            text += f", left {len(self.in_use)} in use"
        return text + (f", {len(self.failed)} failures: {self.failed[0]}" if self.failed else "")


def plan_eviction(inventory: Inventory, rules: EvictionRules, *, keep: Iterable[str] = ()) -> EvictionPlan:
    """Decide what goes.

    Args:
        inventory: What there is.
        rules: What may go.
        keep: Keys that stay whatever the rules say.
    """
    kept: Counter[str] = Counter()
    protected = set(keep)
    chosen = [entry for entry in inventory.entries if rules.covers(entry)]
    reasons = _reasons(inventory, rules, chosen)

    def allowed(entry: StoredEntry) -> bool:
        why = "pinned" if entry.pinned else "leased" if entry.leased else "kept" if entry.digest in protected else ""
        if why:
            kept[why] += 1
        return not why

    going = {
        (entry.kind, entry.digest): Eviction(entry, reason)
        for entry, reason in ((entry, reasons.get((entry.kind, entry.digest), "")) for entry in chosen)
        if reason and allowed(entry)
    }
    holders: Counter[str] = Counter()
    for entry in inventory.entries:
        if (entry.kind, entry.digest) not in going:
            holders.update({ref.hex for ref in entry.manifest.blobs})
    if rules.max_bytes is not None:
        _shrink(inventory, rules, chosen, allowed, going, holders)
    referenced = {name for name, count in holders.items() if count > 0}
    lost = {ref.hex for item in going.values() for ref in item.entry.manifest.blobs} - referenced
    orphans = [
        info
        for name, info in sorted(inventory.blobs.items())
        if _digest_of(name) not in referenced
        and (_digest_of(name) in lost or (not inventory.foreign and _older(info, inventory.now, rules.grace_seconds)))
    ]
    litter = [
        info
        for info in inventory.litter
        if _older(
            info,
            inventory.now,
            rules.quarantine_seconds if info.name.startswith("quarantine/") else rules.grace_seconds,
        )
    ]
    size = inventory.size
    return EvictionPlan(
        inventory.store,
        tuple(sorted(going.values(), key=lambda item: (item.entry.used, item.entry.digest))),
        tuple(orphans),
        tuple(litter),
        dict(kept),
        size,
        size - sum(info.size for info in orphans),
        _find_churn(inventory),
        {(entry.kind, entry.digest): entry.listed for entry in inventory.entries},
    )


def _reasons(inventory: Inventory, rules: EvictionRules, chosen: list[StoredEntry]) -> dict[tuple[Kind, str], str]:
    """Why entries go, size apart."""
    reasons: dict[tuple[Kind, str], str] = {}
    superseded = _superseded(inventory.entries) if rules.superseded else frozenset()
    for entry in chosen:
        identity = (entry.kind, entry.digest)
        if rules.chooses and not rules.limits:
            reasons[identity] = _SELECTED
        elif identity in superseded:
            reasons[identity] = "superseded"
        elif rules.max_age is not None and inventory.now - entry.written > rules.max_age:
            reasons[identity] = "age"
        elif rules.max_idle is not None and inventory.now - entry.used > rules.max_idle:
            reasons[identity] = "idle"
    return reasons


def _shrink(
    inventory: Inventory,
    rules: EvictionRules,
    chosen: list[StoredEntry],
    allowed: Callable[[StoredEntry], bool],
    going: dict[tuple[Kind, str], Eviction],
    holders: Counter[str],
) -> None:
    """Add the least recently used entries until the rest fits. A blob shared by several entries counts once."""

    def stored(name: str, ref: BlobRef) -> int:
        found = [inventory.blobs[file].size for file in (name, name + PACKED_SUFFIX) if file in inventory.blobs]
        return sum(found) if found else ref.size

    staying = [entry for entry in chosen if (entry.kind, entry.digest) not in going]
    sizes = {ref.hex: stored(ref.hex, ref) for entry in staying for ref in entry.manifest.blobs}
    total = sum(sizes.values())
    for entry in sorted(staying, key=lambda entry: (entry.used, entry.digest)):
        if total <= (rules.max_bytes or 0):
            return
        if not allowed(entry):
            continue
        going[entry.kind, entry.digest] = Eviction(entry, "size")
        for name in {ref.hex for ref in entry.manifest.blobs}:
            holders[name] -= 1
            if holders[name] == 0:
                total -= sizes[name]


def _superseded(entries: Iterable[StoredEntry]) -> frozenset[tuple[Kind, str]]:
    """Entries that differ from another only by an older library version."""
    families: dict[tuple[Kind, bytes], list[tuple[Version, StoredEntry]]] = defaultdict(list)
    for entry in entries:
        parts = dict(entry.manifest.parts)
        try:
            version = Version(str(parts.pop("builder.version", "")))
        except InvalidVersion:
            continue
        families[entry.kind, msgspec.json.encode(parts, order="deterministic")].append((version, entry))
    old: set[tuple[Kind, str]] = set()
    for family in families.values():
        newest = max(version for version, _ in family)
        old.update((entry.kind, entry.digest) for version, entry in family if version < newest)
    return frozenset(old)


class _Execution:
    """One run of a plan against a store."""

    def __init__(self, plan: EvictionPlan, store: Store) -> None:
        self._plan = plan
        self._store = store
        self._failed: list[str] = []

    def run(self) -> EvictionReport:
        evicted, in_use, freed = [], [], 0
        spared: set[str] = set()
        for item in self._plan.evictions:
            outcome = self._evict(item)
            if outcome:
                evicted.append(item)
            else:
                if outcome is False:
                    in_use.append(item)
                spared |= {ref.hex for ref in item.entry.manifest.blobs}
        # Entries published since the scan may name a blob that was nobody's then.
        if self._plan.orphans:
            spared |= self._named_since()
            current = self._current_blobs()
            for info in self._plan.orphans:
                if _digest_of(info.name.rpartition("/")[2]) not in spared and current.get(info.name) == info:
                    freed += info.size if self._delete(info.name) else 0
        for info in self._plan.litter:
            freed += info.size if self._delete(info.name) else 0
        return EvictionReport(tuple(evicted), freed, tuple(in_use), tuple(self._failed))

    def _evict(self, item: Eviction) -> bool | None:
        """Whether the entry went; None if that failed."""
        entry = item.entry
        try:
            lock = self._store.lock(entry.digest) if self._store.local else None
            if lock is not None and not lock.try_acquire():
                return False
            try:
                if is_pinned(self._store, entry.kind, entry.digest):
                    return False
                if any(self._store.in_use(ref) for ref in entry.manifest.blobs):
                    return False
                self._store.remove(entry.kind, entry.digest)
            finally:
                if lock is not None:
                    lock.release()
        except StoreError as error:
            self._failed.append(error.message)
            return None
        return True

    def _named_since(self) -> set[str]:
        """Blobs named by entries that came, or changed, after the scan."""
        return {
            ref.hex
            for kind in Kind
            for info in self._store.entries(kind)
            if self._plan._known.get((kind, info.digest)) != info.modified
            for ref in self._blobs_of(info)
        }

    def _blobs_of(self, info: EntryInfo) -> tuple[BlobRef, ...]:
        try:
            manifest = self._store.manifest(info.kind, info.digest)
        except (IntegrityError, UntrustedError, StoreError):
            return ()
        return manifest.blobs if manifest is not None else ()

    def _current_blobs(self) -> dict[str, ObjectInfo]:
        return {info.name: info for info in self._store.list("blobs/")}

    def _delete(self, name: str) -> bool:
        try:
            return self._store.delete(name)
        except StoreError as error:
            self._failed.append(error.message)
            return False


def _find_churn(inventory: Inventory) -> tuple[Churn, ...]:
    """Models of which a store holds many engines, none of them with a use on record."""
    if not inventory.informed:
        return ()  # nothing is known of any use, so nothing follows from its absence
    models: dict[str, list[StoredEntry]] = defaultdict(list)
    for entry in inventory.entries:
        if entry.kind is Kind.ENGINE:
            models[entry.model].append(entry)
    return tuple(
        Churn(name, len(found), sum(entry.size for entry in found), changing_parts([entry.manifest for entry in found]))
        for name, found in sorted(models.items())
        if len(found) >= CHURN_KEYS and not any(entry.served for entry in found)
    )


# ---- quota ------------------------------------------------------------------------------------------------------


class Quota:
    """Keeps a store under a size: a hook for a manager, which makes room after each publication.

    Sizes are those of what lies in the store, and recency is what managers of this machine have noted, so that a quota
    holds across restarts and for any number of writers.

    Args:
        store: The store.
        max_bytes: Most bytes of payloads.
        uses: This machine's memory of last uses, so that what is used stays; None: the one that managers keep, beside
            the digest memo.
        rules: Further rules; ``max_bytes`` is put in.
    """

    def __init__(
        self, store: Store, max_bytes: int, *, uses: UseLog | None = None, rules: EvictionRules | None = None
    ) -> None:
        self._store = store
        self._rules = replace(rules or EvictionRules(), max_bytes=max_bytes)
        self._max_bytes = max_bytes
        self._uses = uses if uses is not None else UseLog(default_memo_folder(os.environ) / "uses")
        self._guard = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Make room if something was published. The entry just published is not what goes."""
        self._uses(event)
        if event.kind is EventKind.PUBLISHED:
            try:
                self.enforce(keep=[event.key])
            except StoreError as error:
                log.warning("the quota of %s could not be enforced: %s", self._store.url, error.message)

    def enforce(self, *, keep: Iterable[str] = ()) -> EvictionReport | None:
        """Evict until the store is under its quota; None if it was.

        Args:
            keep: Keys that stay.
        """
        with self._guard:
            # Listing is much cheaper than reading every manifest, and mostly enough.
            if sum(info.size for info in self._store.list("blobs/")) <= self._max_bytes:
                return None
            plan = plan_eviction(scan(self._store, uses=self._uses), self._rules, keep=keep)
            return plan.execute(self._store)
