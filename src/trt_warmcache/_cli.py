"""What commands of the command line share: where the store is, how to print, how to find an entry."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from trt_warmcache.errors import ConfigError, MissError
from trt_warmcache.explain import stored_manifests
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import Manifest
from trt_warmcache.settings import DEFAULT_STORE, Settings
from trt_warmcache.stores import Store

__all__ = ["find_entry", "json_option", "store_option", "store_places"]

_F = TypeVar("_F", bound=Callable[..., Any])


def store_option(command: _F) -> _F:
    return click.option(
        "--store", "stores", multiple=True, metavar="PATH|URL",
        help=f"Where engines are kept; repeat it for layers, nearest first. [default: $TRT_WARMCACHE_STORE or {DEFAULT_STORE}]",
    )(command)  # fmt: skip


def json_option(command: _F) -> _F:
    def remember(ctx: click.Context, _parameter: click.Parameter, value: bool) -> bool:
        ctx.meta["json"] = value
        return value

    return click.option(
        "--json", "as_json", is_flag=True, callback=remember, is_eager=True, help="Print JSON for programs."
    )(command)


def store_places(stores: tuple[str, ...]) -> Any:
    chosen = stores or Settings.from_env(os.environ).stores
    return chosen[0] if len(chosen) == 1 else list(chosen)


def find_entry(store: Store, key_or_name: str) -> Manifest:
    matches = [
        manifest
        for kind in Kind
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
