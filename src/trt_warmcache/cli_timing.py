"""``trt-warmcache timing``: looking at timing caches, moving them, merging them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from trt_warmcache import timing as timings
from trt_warmcache.builders import EngineBuilder, TimingEntry, select_builder
from trt_warmcache.cli_common import date_text, find_entry, json_option, store_argument, store_option
from trt_warmcache.errors import BuildError, ConfigError
from trt_warmcache.events import Events
from trt_warmcache.explain import stored_manifests
from trt_warmcache.export import export_entry, file_names
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import Manifest
from trt_warmcache.names import size_text
from trt_warmcache.stores import open_store

__all__ = ["timing"]


@click.group()
def timing() -> None:
    """Timing ("algorithm") caches: what TensorRT measured, shared by the models of one GPU."""


@timing.command("ls")
@store_option
@json_option
def list_caches(*, stores: tuple[str, ...], as_json: bool) -> None:
    """List the stored timing caches."""
    with open_store(store_argument(stores)) as store:
        found = list(stored_manifests(store, Kind.TIMING))
    if as_json:
        click.echo(json.dumps([_summary(manifest) for manifest in found]))
        return
    for manifest in found:
        parts = manifest.parts
        click.echo(
            f"{manifest.key[:12]}  {size_text(manifest.size):>10}  {date_text(manifest.provenance.created)}  "
            f"TensorRT {parts.get('builder.version') or '-'}  {parts.get('target.gpu') or '-'}  driver {parts.get('target.driver') or '-'}  "
            f"{parts.get('scope') or 'all models'}"
        )
    click.echo(f"{len(found)} timing caches")


@timing.command()
@click.argument("key_or_name")
@store_option
@json_option
@click.option("--entries", is_flag=True, help="List keys, tactics and times: needs TensorRT 10.8 or later and the GPU.")
def show(*, key_or_name: str, stores: tuple[str, ...], as_json: bool, entries: bool) -> None:
    """Show one timing cache: its KEY (or the beginning of it) or its name."""
    with open_store(store_argument(stores)) as store:
        manifest = find_entry(store, key_or_name, (Kind.TIMING,))
        listed: tuple[TimingEntry, ...] = ()
        if entries:
            with_payload = store.fetch(manifest.blob("timing"), rehash=True)
            try:
                listed = timings.entries(_builder(manifest), bytes(with_payload.view))
            finally:
                with_payload.close()
    rows = [{"key": e.key, "tactic": str(e.tactic), "milliseconds": e.milliseconds} for e in listed]
    if as_json:
        click.echo(json.dumps({**_summary(manifest), **({"entries": rows} if entries else {})}))
        return
    for name, value in _summary(manifest).items():
        click.echo(f"{name:12} {value if isinstance(value, (str, int)) else json.dumps(value)}")
    for row in rows:
        click.echo(f"{row['key']}  {row['milliseconds']:10.4f} ms  tactic {row['tactic']}")


@timing.command()
@click.argument("key_or_name")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@store_option
@json_option
def merge(*, key_or_name: str, files: tuple[Path, ...], stores: tuple[str, ...], as_json: bool) -> None:
    """Merge FILES, timing caches of the same GPU model and versions, into a stored one."""
    events = Events()
    with open_store(store_argument(stores)) as store:
        manifest = find_entry(store, key_or_name, (Kind.TIMING,))
        before = manifest.size
        for file in files:
            try:
                manifest = timings.merge(store, manifest, _builder(manifest), file.read_bytes(), events=events)
            except BuildError as error:
                raise BuildError(f"{file}: {error.message}") from error
    if as_json:
        click.echo(json.dumps({**_summary(manifest), "before": before}))
    else:
        click.echo(f"{manifest.key[:12]}: {size_text(before)} before, {size_text(manifest.size)} now")


@timing.command()
@click.argument("key_or_name")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=Path())
@store_option
@json_option
def export(*, key_or_name: str, folder: Path, stores: tuple[str, ...], as_json: bool) -> None:
    """Write a timing cache to FOLDER as a .cache file, which trtexec --timingCacheFile reads too."""
    with open_store(store_argument(stores)) as store:
        manifest = find_entry(store, key_or_name, (Kind.TIMING,))
        path = export_entry(store, manifest, folder, Path(file_names([manifest])[manifest.key]).stem + ".cache")
    click.echo(json.dumps({"file": os.fspath(path)}) if as_json else f"wrote {path}")


def _builder(manifest: Manifest) -> EngineBuilder:
    """The builder that made a timing cache; only the very same version can read it.

    Raises:
        ConfigError: Another version is installed here.
    """
    builder = select_builder(manifest.parts.get("builder.flavour"))
    wanted = manifest.parts.get("builder.version")
    if builder.version() != wanted:
        raise ConfigError(
            f"This timing cache is of TensorRT {wanted}, and {builder.version()} is installed here; only the same version can read it."
        )
    return builder


def _summary(manifest: Manifest) -> dict[str, object]:
    return {
        "key": manifest.key,
        "name": manifest.labels.entry,
        "size": manifest.size,
        "entries": manifest.extra.get("entries", "-"),
        "created": manifest.provenance.created,
        "parts": manifest.parts,
    }
