"""Churn: a model whose every request makes a new key fills a store and is never served from it."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from trt_warmcache.events import EventKind, Events
from trt_warmcache.manifest import Manifest
from trt_warmcache.names import size_text

__all__ = ["CHURN_KEYS", "Churn", "ChurnWatch", "changing_parts", "tell_churn"]

#: So many different keys of one model, none ever used again, are taken for a mistake.
CHURN_KEYS = 16


@dataclass(frozen=True)
class Churn:
    """A model that makes ever-new keys, none of which is ever used again.

    Attributes:
        model: Its name.
        keys: How many.
        size: Their bytes.
        parts: The key parts that differ among them.
    """

    model: str
    keys: int
    size: int
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.model or 'a model without a name'} has {self.keys} entries ({size_text(self.size)}) that nothing has "
            f"used since; what changes from one to the next: {', '.join(self.parts) or 'nothing'}"
        )


class ChurnWatch:
    """Notices a model whose every request makes a new key, and says which part of the key changes.

    Args:
        events: Where to tell.
        limit: Different keys, built one after the other without a single hit, that make an alarm; it is repeated
            whenever their number has doubled.
    """

    def __init__(self, events: Events, *, limit: int = CHURN_KEYS) -> None:
        self._events = events
        self._limit = limit
        self._guard = threading.Lock()
        self._built: dict[str, list[Manifest]] = defaultdict(list)
        self._count: Counter[str] = Counter()
        self._size: Counter[str] = Counter()

    def hit(self, manifest: Manifest) -> None:
        """A stored engine was used: its model does not churn."""
        name = _model_name(manifest)
        if name in self._count:
            with self._guard:
                self._built.pop(name, None)
                del self._count[name], self._size[name]

    def built(self, manifest: Manifest) -> None:
        """An engine was built and stored."""
        name = _model_name(manifest)
        with self._guard:
            recent = self._built[name]
            recent.append(manifest)
            del recent[: -self._limit]
            self._count[name] += 1
            self._size[name] += manifest.size
            count, size = self._count[name], self._size[name]
            quotient, rest = divmod(count, self._limit)
            told = rest == 0 and quotient & (quotient - 1) == 0
            churn = Churn(name, count, size, changing_parts(recent)) if told else None
        if churn is not None:
            tell_churn(self._events, churn)


def _model_name(manifest: Manifest) -> str:
    return manifest.labels.name or manifest.labels.model


def changing_parts(manifests: Sequence[Manifest]) -> tuple[str, ...]:
    """Key parts that take several values."""
    names = {name for manifest in manifests for name in manifest.parts}
    return tuple(
        sorted(name for name in names if any(m.parts.get(name) != manifests[0].parts.get(name) for m in manifests))
    )


def tell_churn(events: Events, churn: Churn) -> None:
    """Emit the event."""
    events.emit(
        EventKind.CHURN, label=churn.model, text=str(churn), keys=churn.keys, size=churn.size, parts=list(churn.parts)
    )
