"""Names of a package that are imported when first asked for, so that nobody pays for what they do not use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy"]


def lazy(package: str, homes: Mapping[str, str], names: dict[str, Any]) -> Callable[[str], Any]:
    """A package's ``__getattr__``.

    Args:
        package: The package.
        homes: Module of each name.
        names: The package's ``globals()``, where a name stays once it was asked for.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        import importlib

        value = names[name] = getattr(importlib.import_module(home), name)
        return value

    return __getattr__
