"""Checks of option values: each takes the field's name for the error and the value, and gives the normal form."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

from trt_warmcache._fields import LARGEST_INT, printable, to_enum
from trt_warmcache.errors import ConfigError

__all__ = [
    "Check",
    "choice",
    "flag",
    "layer_rules",
    "lower_text",
    "mapping",
    "names",
    "stable_name",
    "text",
    "upper_names",
    "whole",
]

Check = Callable[[str, Any], Any]

_LAYER_TYPES = ("bfloat16", "float16", "float32", "int8")


def flag(field: str, value: Any) -> bool:
    """True or False, nothing that merely counts as such."""
    if not isinstance(value, bool):
        raise ConfigError(f"{field} must be True or False, not {value!r}.")
    return value


def whole(low: int, high: int = LARGEST_INT) -> Check:
    """A whole number within limits, both included."""

    def check(field: str, value: Any) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            raise ConfigError(f"{field} must be a whole number, not {value!r}.") from None
        if isinstance(value, bool) or not low <= number <= high:
            limits = f"from {low} to {high}" if high < LARGEST_INT else f"{low} or more, within 64 bits"
            raise ConfigError(f"{field} must be {limits}, not {value!r}.")
        return number

    return check


def choice(kind: type[Enum]) -> Check:
    """A member of an enum, or its value."""
    return lambda field, value: to_enum(kind, value, field)


def text(field: str, value: Any) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value or printable(value) != value:
        raise ConfigError(f"{field} must be non-empty text, not {value!r}.")
    return value


def lower_text(field: str, value: Any) -> str:
    """Text without case: one spelling for a name that TensorRT writes in capitals."""
    return text(field, value).lower()


def names(field: str, value: Any) -> tuple[str, ...]:
    """A set of names, sorted."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"{field} must be a list of names, not {value!r}.")
    return tuple(sorted({text(field, name) for name in value}))


def upper_names(field: str, value: Any) -> tuple[str, ...]:
    """A set of names in TensorRT's own spelling, sorted."""
    return tuple(sorted({name.upper() for name in names(field, value)}))


def stable_name(field: str, value: Any) -> str:
    """A name without the version that introduced it: RUNTIME_ACTIVATION_RESIZE_10_10 is runtime_activation_resize."""
    words = text(field, value).lower().split("_")
    while len(words) > 1 and words[-1].isdigit():
        words.pop()
    return "_".join(words)


def mapping(key: Check, item: Check) -> Check:
    """A mapping whose keys and items pass checks of their own, sorted."""

    def check(field: str, value: Any) -> Mapping[Any, Any] | None:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{field} must be a mapping, not {value!r}.")
        pairs = sorted((key(field, name), item(f"{field}[{name!r}]", amount)) for name, amount in value.items())
        normal = dict(pairs)
        if len(normal) < len(pairs):
            raise ConfigError(f"{field} names one thing twice, in two spellings: {value!r}.")
        # Empty says as little as None, and must not give another key.
        return normal or None

    return check


def layer_rules(field: str, value: Any) -> tuple[tuple[str, str], ...] | None:
    """Pairs of layer-name pattern and precision, in their order."""
    rules = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(rules, (list, tuple)) or not all(
        isinstance(rule, (list, tuple)) and len(rule) == 2 for rule in rules
    ):
        raise ConfigError(f"{field} must map layer-name patterns to precisions, not {value!r}.")
    for pattern, kind in rules:
        text(field, pattern)
        if kind not in _LAYER_TYPES:
            raise ConfigError(f"{field}[{pattern!r}] must be one of {', '.join(_LAYER_TYPES)}, not {kind!r}.")
    return tuple((pattern, kind) for pattern, kind in rules) or None
