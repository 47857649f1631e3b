"""Which kernel implementation each layer got: recorded from one build, so that every replica is built alike.

TensorRT picks tactics by timing them, and timing is noisy. Two ways of pinning them exist, and a record holds either:
an algorithm selector names a tactic per layer (TensorRT 8.6 to 10.16), an editable timing cache holds one per timing
key (10.8 and later).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trt_warmcache._fields import strict_fields
from trt_warmcache.errors import ConfigError

__all__ = ["TacticDifference", "TacticReplay"]

_TIMING_KEY = re.compile("0x[0-9a-f]{32}")

#: Timing caches answer this for a key that they do not have.
_NO_TACTIC = 2**64 - 1

_LEAST_INT = -(2**63)


@dataclass(frozen=True)
class TacticDifference:
    """A layer or timing key for which two records disagree; None where one of them has nothing."""

    name: str
    ours: tuple[int, ...] | None
    theirs: tuple[int, ...] | None


@strict_fields
@dataclass(frozen=True)
class TacticReplay:
    """Tactics of one build.

    Args:
        layers: Layer name to ``(implementation, tactic)``, as an algorithm selector sees them.
        entries: Timing-cache key (``0x`` and 32 hex digits) to tactic hash.

    Raises:
        ConfigError: Something that is no such table, or a record of nothing.
    """

    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    entries: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        put = object.__setattr__
        try:
            layers = {str(name): (int(pair[0]), int(pair[1])) for name, pair in sorted(dict(self.layers).items())}
            entries = {str(key).lower(): int(tactic) for key, tactic in sorted(dict(self.entries).items())}
        except (TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"Not a record of tactics: {error}") from error
        for key, tactic in entries.items():
            if not _TIMING_KEY.fullmatch(key):
                raise ConfigError(f"{key!r} is no timing-cache key; those are 0x and 32 hex digits.")
            if not 0 <= tactic < _NO_TACTIC:
                raise ConfigError(f"Timing-cache entry {key}: {tactic} is no tactic hash, which has 64 bits.")
        for name, numbers in layers.items():
            if not all(_LEAST_INT <= number < _NO_TACTIC for number in numbers):
                raise ConfigError(f"Layer {name!r}: implementation and tactic have 64 bits, not {numbers}.")
        if not layers and not entries:
            raise ConfigError("A record of tactics needs at least one layer or timing-cache entry.")
        put(self, "layers", layers)
        put(self, "entries", entries)

    def __hash__(self) -> int:
        return hash((tuple(self.layers.items()), tuple(self.entries.items())))

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values; numbers of 64 bits as text, which every JSON reader keeps whole."""
        document: dict[str, Any] = {}
        if self.layers:
            document["layers"] = {name: [str(number) for number in pair] for name, pair in self.layers.items()}
        if self.entries:
            document["entries"] = {key: str(tactic) for key, tactic in self.entries.items()}
        return document

    @classmethod
    def from_json(cls, data: Any) -> TacticReplay:
        """The inverse of :meth:`to_json`; a record itself is passed through.

        Raises:
            ConfigError: It is no such record.
        """
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            raise ConfigError(f"A record of tactics is a mapping with 'layers' or 'entries', not {data!r}.")
        return cls(**{str(name): value for name, value in data.items()})

    def save(self, path: Path | str) -> None:
        """Write the record to a file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> TacticReplay:
        """Read a record that :meth:`save` wrote.

        Raises:
            ConfigError: The file cannot be read or holds something else.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} holds no record of tactics: {error}") from error

    def compare(self, other: TacticReplay) -> tuple[TacticDifference, ...]:
        """Layers and keys for which another record has another tactic, or none."""
        ours: dict[str, tuple[int, ...]] = {**self.layers, **{key: (value,) for key, value in self.entries.items()}}
        theirs: dict[str, tuple[int, ...]] = {
            **other.layers,
            **{key: (value,) for key, value in other.entries.items()},
        }
        return tuple(
            TacticDifference(name, ours.get(name), theirs.get(name))
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        )
