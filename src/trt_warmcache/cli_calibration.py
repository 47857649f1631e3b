"""Commands for INT8 calibration tables: ``calibrate`` and the group ``calib``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from trt_warmcache.calibration import StoredTable
from trt_warmcache.calibration_data import Calibration, CalibrationAlgorithm
from trt_warmcache.calibration_files import read_table
from trt_warmcache.calibration_table import CalibrationTable, TableDiff, diff, usable
from trt_warmcache.cli_calibration_options import asked_for, data_options, load_function
from trt_warmcache.cli_common import (
    date_text,
    find_entry,
    json_option,
    progress_hook,
    store_argument,
    store_option,
)
from trt_warmcache.errors import ConfigError, MissError
from trt_warmcache.explain import stored_manifests
from trt_warmcache.export import file_names, write_whole
from trt_warmcache.keys import Kind
from trt_warmcache.manager import EngineManager
from trt_warmcache.manifest import Manifest
from trt_warmcache.names import size_text

__all__ = ["calib", "calibrate"]

_KINDS = (Kind.CALIBRATION,)
_EXIT_FAILED = 1


@contextmanager
def _manager(given: dict[str, Any], *, quiet: bool) -> Iterator[EngineManager]:
    with (
        progress_hook(quiet=quiet) as hook,
        EngineManager(store_argument(given["stores"]), hooks=[hook]) as manager,
    ):
        yield manager


@click.command()
@click.argument("model", type=click.Path())
@click.option(
    "--data", type=click.Path(), required=True, help="Folder of .npy or .npz files, or of what --loader reads."
)
@click.option("--loader", metavar="MODULE:FUNCTION", default=None, help="Makes a batch of one file of the folder.")
@click.option(
    "--data-version", metavar="TEXT", default=None, help="Your version of the files; they are not hashed then."
)
@click.option(
    "--provider",
    "providers",
    metavar="NAME",
    multiple=True,
    help="What ONNX Runtime runs on, preferred first, such as CUDAExecutionProvider; repeat it. CPU if left out.",
)
@data_options
@store_option
@json_option
def calibrate(*, as_json: bool, **given: Any) -> None:
    """Measure the INT8 ranges of MODEL over calibration data, or find them stored; needs no GPU and no TensorRT."""
    where = {"providers": given["providers"]} if given["providers"] else {}
    calibration = asked_for(
        given, data=given["data"], loader=load_function(given["loader"]), version=given["data_version"], **where
    )
    with _manager(given, quiet=as_json) as manager:
        found = manager.calibrate(given["model"], calibration, name=given["name"], version=given["model_version"])
        made = manager.counters().get("calibration_end", 0) > 0
    _tell("calibrated" if made else "hit", found, as_json=as_json)


def _tell(outcome: str, found: StoredTable, *, as_json: bool) -> None:
    assert found.table is not None
    extra = {} if found.manifest is None else found.manifest.extra
    if as_json:
        facts = {"key": found.key.digest, "name": found.key.name, "table": found.digest, "tensors": len(found.table)}
        click.echo(json.dumps({"outcome": outcome, **facts, "stored": found.manifest is not None, "extra": extra}))
    else:
        _tell_people(outcome, found, extra)
    if found.manifest is None:
        raise SystemExit(_EXIT_FAILED)


def _tell_people(outcome: str, found: StoredTable, extra: dict[str, Any]) -> None:
    assert found.table is not None
    click.echo(f"{outcome}: {found.key.name} ({found.key.digest[:12]}), {len(found.table)} tensors")
    coverage = extra.get("coverage", {})
    for word in ("missing", "unusable", "unknown"):
        if coverage.get(word):
            named = _names(extra[word], coverage[word]) if word in extra else "see calib show --scales"
            click.echo(f"{coverage[word]} tensors {word}: {named}")
    if found.manifest is None:
        click.echo("Not stored, so the work is lost: the store takes no new entries.", err=True)


@click.group()
def calib() -> None:
    """Look at calibration tables, compare, import and export them."""


@calib.command("ls")
@store_option
@json_option
def list_tables(*, stores: tuple[str, ...], as_json: bool) -> None:
    """List the calibration tables of a store."""
    from trt_warmcache.stores import open_store

    with open_store(store_argument(stores)) as store:
        found = list(stored_manifests(store, Kind.CALIBRATION))
    if as_json:
        click.echo(json.dumps([manifest.to_json() for manifest in found]))
        return
    for manifest in found:
        samples = manifest.extra.get("samples")
        click.echo(
            f"{manifest.key[:12]}  {manifest.parts['algorithm']:17}  {manifest.extra.get('tensors', 0):6} tensors  "
            f"{'imported' if samples is None else f'{samples} samples':14}  {date_text(manifest.provenance.created)}  "
            f"{manifest.labels.entry or '-'}"
        )
    click.echo(f"{len(found)} tables")


@calib.command()
@click.argument("key_or_name")
@click.option("--scales", is_flag=True, help="Also every tensor and its scale.")
@store_option
@json_option
def show(*, key_or_name: str, scales: bool, as_json: bool, **given: Any) -> None:
    """Show one table: what model and what data it was made of, and how well it covers the model."""
    with _manager(given, quiet=True) as manager:
        manifest = find_entry(manager.store, key_or_name, _KINDS)
        vetoes = manager.tables.vetoes(manifest.key)
        table = manager.tables.read(manifest) if scales else None
    if as_json:
        more = {} if table is None else {"scales": dict(table.scales)}
        click.echo(json.dumps({**manifest.to_json(), "vetoes": vetoes, **more}))
        return
    for name, value in _rows(manifest).items():
        click.echo(f"{name:13} {value}")
    for gpu, note in vetoes.items():
        click.echo(f"vetoed for    {gpu}: {note}")
    for name, scale in () if table is None else table.scales.items():
        click.echo(f"  {name}: {scale:.6g}{'' if usable(scale) else '  (not usable)'}")


def _rows(manifest: Manifest) -> dict[str, str]:
    """What people want to know of a table first: to which model and to which data does it belong?"""
    parts, extra = manifest.parts, manifest.extra
    coverage = ", ".join(f"{count} {word}" for word, count in extra.get("coverage", {}).items() if count)
    return {
        "key": manifest.key,
        "name": manifest.labels.entry or "-",
        "model": f"{parts['model']} ({manifest.labels.model or '-'})",
        "data": parts["data"],
        "samples": f"{extra['samples']} in {extra['batches']} batches"
        if "samples" in extra
        else "not known (imported)",
        "algorithm": parts["algorithm"],
        "batches": "all" if parts["batches"] is None else str(parts["batches"]),
        "preprocessing": parts["preprocess"] or "-",
        "tensors": coverage or str(extra.get("tensors", "-")),
        **{
            word: _names(extra[word], extra.get("coverage", {}).get(word, 0))
            for word in ("missing", "unusable")
            if extra.get(word)
        },
        "table": str(extra.get("table", "-")),
        "made by": str(extra.get("calibrator", "imported")),
        "made": date_text(manifest.provenance.created),
        "size": size_text(manifest.size),
    }


def _names(names: Iterable[str], count: int) -> str:
    """Names that a manifest lists, and how many more there are."""
    listed = sorted(names)
    return ", ".join(listed) + (f" and {count - len(listed)} more" if count > len(listed) else "")


@calib.command("diff")
@click.argument("before")
@click.argument("after")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Also draw histograms of the scales (PNG, PDF or SVG).",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Name so many tensors of each kind, those changed most first; 0 for all.",
)
@store_option
@json_option
def diff_tables(*, before: str, after: str, plot: Path | None, limit: int, as_json: bool, **given: Any) -> None:
    """Compare two tables, stored (key or name) or files: tensors changed most, added, and removed."""
    with _manager(given, quiet=True) as manager:
        tables = [_table(manager, which) for which in (before, after)]
    first, second = tables
    changes = diff(first, second)
    if plot is not None:
        from trt_warmcache.calibration_plot import plot_scales

        plot_scales(first, second, plot, names=(before, after))
    if as_json:
        click.echo(json.dumps(_diff_json(changes)))
        return
    click.echo(changes.to_text(limit or None))
    common = len(first.scales.keys() & second.scales.keys())
    click.echo(
        f"{len(changes.changed)} changed, {len(changes.added)} added, {len(changes.removed)} removed, "
        f"{common - len(changes.changed)} the same"
    )
    if not common:
        click.echo("No tensor is in both: these are tables of different models.")
    if plot is not None:
        click.echo(f"wrote {plot}")


def _diff_json(changes: TableDiff) -> dict[str, Any]:
    return {
        "added": list(changes.added),
        "removed": list(changes.removed),
        # as text where JSON has no number for it
        "changed": [
            {"tensor": change.name, "before": _number(change.before), "after": _number(change.after), "ratio": _number(change.ratio)}
            for change in changes.changed
        ],
    }  # fmt: skip


def _number(value: float) -> float | str:
    return value if value - value == 0 else repr(value)


def _table(manager: EngineManager, which: str) -> CalibrationTable:
    if Path(which).is_file():
        return read_table(which)
    try:
        return manager.tables.read(find_entry(manager.store, which, _KINDS))
    except MissError as error:
        raise MissError(f"There is no file {which}. {error.message}") from error


@calib.command("import")
@click.argument("file", type=click.Path())
@click.argument("model", type=click.Path())
@data_options
@store_option
@json_option
def import_table(*, file: str, as_json: bool, **given: Any) -> None:
    """Store the table in FILE (of TensorRT, trtexec, Polygraphy or ONNX Runtime), made for MODEL.

    With --fingerprint, requests that name the same fingerprint, algorithm, batches and preprocessing find it. If another
    table is stored for them already, that one stays and the exit code is 1.
    """
    if given["fingerprint"] is None and any(
        given[name] is not None for name in ("batches", "preprocess", "percentile")
    ):
        raise ConfigError(
            "--batches, --preprocess and --percentile say which requests find the table: give --fingerprint too."
        )
    with _manager(given, quiet=as_json) as manager:
        table = read_table(file, algorithm=CalibrationAlgorithm(given["algorithm"] or "entropy").header)
        given["algorithm"] = given["algorithm"] or CalibrationAlgorithm.of_header(table.algorithm).value
        calibration = Calibration(table=table) if given["fingerprint"] is None else asked_for(given)
        found = manager.import_table(
            given["model"], table, calibration, name=given["name"], version=given["model_version"]
        )
    taken = found.digest == table.digest
    _tell("imported" if taken else "kept another", found, as_json=as_json)
    if not taken:
        raise SystemExit(_EXIT_FAILED)


@calib.command("export")
@click.argument("key_or_name")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path(),
    help="File, or folder for the entry's own name. [default: .]",
)
@click.option(
    "--tensorrt",
    metavar="VERSION",
    default=None,
    help="Write the header of this TensorRT version, which other versions ignore the table for.",
)
@store_option
@json_option
def export_table(*, key_or_name: str, output: Path, tensorrt: str | None, as_json: bool, **given: Any) -> None:
    """Write a table to a file in TensorRT's text format, for trtexec and others."""
    with _manager(given, quiet=True) as manager:
        manifest = find_entry(manager.store, key_or_name, _KINDS)
        table = manager.tables.read(manifest)
    if tensorrt is not None:
        table = table.with_header(tensorrt)
    path = output / file_names([manifest])[manifest.key] if output.is_dir() else output
    write_whole(path, table.to_bytes())
    click.echo(json.dumps({"file": str(path), "key": manifest.key}) if as_json else f"wrote {path}")


@calib.command()
@click.argument("key_or_name")
@click.argument("gpu")
@click.option("--note", default=None, help="Why, such as 'mAP drops by 7 points'.")
@click.option("--lift", is_flag=True, help="Allow it again.")
@store_option
@json_option
def veto(*, key_or_name: str, gpu: str, note: str | None, lift: bool, as_json: bool, **given: Any) -> None:
    """Note that a table is not to be used on GPU (a name or a compute capability), because accuracy is poor there."""
    if lift == (note is not None):
        raise ConfigError("Say why with --note TEXT, or allow the table again with --lift.")
    with _manager(given, quiet=True) as manager:
        manifest = find_entry(manager.store, key_or_name, _KINDS)
        vetoes = manager.tables.veto(manifest.key, gpu, note)
    if as_json:
        click.echo(json.dumps({"key": manifest.key, "vetoes": vetoes}))
        return
    for name, why in vetoes.items():
        click.echo(f"vetoed for {name}: {why}")
    if not vetoes:
        click.echo("no vetoes")
