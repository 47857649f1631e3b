"""What the frozen, validated dataclasses of the public API share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trt_warmcache.errors import ConfigError, UnknownFieldError

if TYPE_CHECKING:
    import os

_T = TypeVar("_T")
_E = TypeVar("_E", bound=Enum)

__all__ = ["LARGEST_INT", "nearest_name", "printable", "strict_fields", "to_enum", "user_path"]

#: Largest whole number that every reader of a manifest, and TensorRT, can hold.
LARGEST_INT = 2**63 - 1


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is most likely a slip of, or None."""
    import difflib  # only errors need it, and it is not free to import

    folded = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.5)
    return folded[close[0]] if close else None


def unknown_field(owner: str, name: str, known: Iterable[str]) -> UnknownFieldError:
    """The error for a field name that does not exist."""
    names = list(known)
    nearest = nearest_name(name, names)
    hint = f"did you mean {nearest!r}?" if nearest else f"known fields: {', '.join(names)}."
    return UnknownFieldError(f"{owner} has no field {name!r}; {hint}", field=name, nearest=nearest)


def strict_fields(cls: type[_T]) -> type[_T]:
    """Make a dataclass refuse unknown keyword arguments by naming the nearest known one."""
    original = cls.__init__
    known = [name for name in inspect.signature(original).parameters if name != "self"]

    @functools.wraps(original)
    def init(self: _T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise unknown_field(cls.__name__, name, known)
        original(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[method-assign, assignment]
    return cls


def printable(text: str) -> str:
    """The text with lone surrogates, which stand for bytes of file names that are not UTF-8, escaped: JSON has none."""
    return text.encode("utf-8", "backslashreplace").decode()


def user_path(path: str | os.PathLike[str]) -> Path:
    """A path with ``~`` expanded where it stands for a home folder; a file may also just be called ``~x``."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def to_enum(kind: type[_E], value: object, field: str) -> _E:
    """The member of `kind` that `value` is or names.

    Raises:
        ConfigError: No such member; the message lists all.
    """
    if isinstance(value, kind):
        return value
    for member in kind:
        if value == member.value:
            return member
    choices = ", ".join(repr(member.value) for member in kind)
    raise ConfigError(f"{field} must be one of {choices}, not {value!r}.")
