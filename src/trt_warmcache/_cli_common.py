"""What the command line's parts share: options that many commands have, and how sizes and dates are shown."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, TypeVar

import click

from trt_warmcache.errors import ConfigError, MissError
from trt_warmcache.explain import stored_manifests
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import Manifest
from trt_warmcache.settings import DEFAULT_STORE, Settings
from trt_warmcache.stores import Store

__all__ = ["find_manifest", "human_bytes", "human_date", "json_option", "store_option", "stores_of"]

_F = TypeVar("_F", bound=Callable[..., Any])


def store_option(command: _F) -> _F:
    """``--store``, once or for several layers."""
    return click.option(
        "--store", "stores", multiple=True, metavar="PATH|URL",
        help=f"Where engines are kept; repeat it for layers, nearest first. [default: $TRT_WARMCACHE_STORE or {DEFAULT_STORE}]",
    )(command)  # fmt: skip


def json_option(command: _F) -> _F:
    """``--json``; also makes errors JSON."""

    def remember(ctx: click.Context, _parameter: click.Parameter, value: bool) -> bool:
        ctx.meta["json"] = value
        return value

    return click.option(
        "--json", "as_json", is_flag=True, callback=remember, is_eager=True, help="Print JSON for programs."
    )(command)


def stores_of(stores: tuple[str, ...]) -> Any:
    """The store argument that the options, else the environment, name."""
    chosen = stores or Settings.from_env(os.environ).stores
    return chosen[0] if len(chosen) == 1 else list(chosen)


def find_manifest(store: Store, key_or_name: str, kinds: tuple[Kind, ...] = tuple(Kind)) -> Manifest:
    """The one entry whose key begins so, or that has this name.

    Raises:
        MissError: There is none.
        ConfigError: There are several.
    """
    matches = [
        manifest
        for kind in kinds
        for manifest in stored_manifests(store, kind)
        if manifest.key.startswith(key_or_name.lower()) or key_or_name in {manifest.labels.entry, manifest.labels.name}
    ]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise MissError(
            f"Nothing stored in {store.url} is called {key_or_name!r} or has a key that begins so; see trt-warmcache ls."
        )
    raise ConfigError(
        f"{key_or_name!r} means several entries: {', '.join(manifest.key[:12] for manifest in matches[:5])}; give more of the key."
    )


def human_bytes(size: float) -> str:
    """A size for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError  # the loop always returns


def human_date(seconds: float) -> str:
    """A point in time for people, in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M") if seconds else "-"
