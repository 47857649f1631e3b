"""The report of warming many engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trt_warmcache.errors import WarmCacheError
from trt_warmcache.request import EngineRequest

if TYPE_CHECKING:
    from trt_warmcache.engine import Engine

__all__ = ["WarmReport", "WarmRow"]


@dataclass(frozen=True)
class WarmRow:
    """What became of one request.

    Attributes:
        label: Readable name of the engine, or of the model where it did not come that far.
        key: Digest of the key, or "".
        outcome: ``hit``, ``joined``, ``built`` or ``covered``; ``failed`` with `error` set.
        seconds: Time for this request.
        size: Bytes of the plan.
        error: What went wrong, or None.
    """

    label: str
    key: str
    outcome: str
    seconds: float = 0.0
    size: int = 0
    error: BaseException | None = None

    @classmethod
    def done(cls, request: EngineRequest, engine: Engine, seconds: float) -> WarmRow:
        """The row of a request that got its engine."""
        return cls(
            engine.key.name or _label(request), engine.key.digest, engine.outcome.value, seconds, engine.plan.nbytes
        )

    @classmethod
    def failed(cls, request: EngineRequest, error: BaseException) -> WarmRow:
        """The row of a request that did not."""
        return cls(_label(request), str(getattr(error, "key", "")), "failed", error=error)


@dataclass(frozen=True)
class WarmReport:
    """One row per request, in the order asked."""

    rows: tuple[WarmRow, ...]

    @property
    def ok(self) -> bool:
        """Whether every request got its engine."""
        return not self.failures

    @property
    def failures(self) -> tuple[WarmRow, ...]:
        """The rows that failed."""
        return tuple(row for row in self.rows if row.error is not None)

    def __iter__(self) -> Iterator[WarmRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(str(self))  # how IPython and notebooks show a cell's result

    def to_json(self) -> list[dict[str, Any]]:
        """The report as plain JSON values."""
        return [
            {
                "name": row.label,
                "key": row.key,
                "outcome": row.outcome,
                "seconds": row.seconds,
                "size": row.size,
                "error": None if row.error is None else _reason(row.error),
            }
            for row in self.rows
        ]

    def __str__(self) -> str:
        return "\n".join(
            f"{row.outcome:8} {row.seconds:8.2f} s  {row.label}" + (f"  {_reason(row.error)}" if row.error else "")
            for row in self.rows
        )


def _reason(error: BaseException) -> str:
    return error.message if isinstance(error, WarmCacheError) else f"{type(error).__name__}: {error}"


def _label(request: EngineRequest) -> str:
    if request.name:
        return request.name
    return (
        str(request.model)
        if isinstance(request.model, (str,)) or hasattr(request.model, "__fspath__")
        else type(request.model).__name__
    )
