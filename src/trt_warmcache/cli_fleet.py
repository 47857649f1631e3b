"""Commands for stores that are shared, moved, cleaned and signed."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from trt_warmcache.bundle import CopyReport, copy_store, export_bundle, import_bundle, verify_store
from trt_warmcache.cli_common import find_entry, json_option, store_argument, store_option
from trt_warmcache.errors import ConfigError, IntegrityError, StoreError
from trt_warmcache.eviction import EvictionRules, plan_eviction, scan
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import Manifest
from trt_warmcache.memo import default_memo_folder
from trt_warmcache.names import size_text
from trt_warmcache.stores import Store, open_store
from trt_warmcache.trust import Keyring, Signer, secured
from trt_warmcache.uses import UseLog, pin, unpin

__all__ = ["COMMANDS"]

_EXIT_FAILED = 1
_EXIT_DAMAGED = 4

_F = TypeVar("_F", bound=Callable[..., Any])


class _Measure(click.ParamType):  # type: ignore[type-arg]  # not generic at run time before click 8.4
    """A number with a unit."""

    def __init__(self, name: str, units: dict[str, float]) -> None:
        self.name = name
        self._units = units

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        unit = self._units.get(match[2].lower()) if match else None
        if match is None or unit is None:
            self.fail(
                f"{value!r} is not a {self.name}; write a number and one of {', '.join(filter(None, self._units))}."
            )
        return float(match[1]) * unit


_SIZE = _Measure(
    "size", {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
)
_TIME = _Measure("duration", {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400})

_KINDS = click.Choice([kind.value for kind in Kind])


def _choice_options(command: _F) -> _F:
    for option in reversed(
        (
            click.argument("keys", metavar="[KEY_OR_NAME]...", nargs=-1),
            click.option("--all", "everything", is_flag=True, help="Every entry."),
            click.option("--model", "models", multiple=True, help="Entries of this model; shell patterns work."),
        )
    ):
        command = option(command)
    return command


def _chosen(store: Store, keys: tuple[str, ...], models: tuple[str, ...], *, everything: bool) -> list[Manifest]:
    """The entries that a command is about."""
    if not (keys or models or everything):
        raise ConfigError("Say which entries: a key or name, --model, or --all.")
    found = [find_entry(store, key) for key in keys]
    if everything or models:
        rules = EvictionRules(models=models)
        found += [entry.manifest for entry in scan(store).entries if rules.covers(entry)]
    return found


# ---- housekeeping -----------------------------------------------------------------------------------------------


@click.command()
@store_option
@json_option
@click.option("--max-bytes", type=_SIZE, help="Evict the least recently used until so much is left: 50GB.")
@click.option("--max-age", type=_TIME, help="Evict what was written longer ago: 90d.")
@click.option("--max-idle", type=_TIME, help="Evict what was not used for longer: 30d.")
@click.option("--superseded", is_flag=True, help="Evict what is there for a newer library version too.")
@click.option("--model", "models", multiple=True, help="Only this model; shell patterns work.")
@click.option("--gpu", "targets", multiple=True, help="Only this GPU or compute capability; shell patterns work.")
@click.option("--kind", "kinds", multiple=True, type=_KINDS, help="Only this kind of entry.")
@click.option(
    "--grace", type=_TIME, default="1h", show_default=True, help="Leave unreferenced objects that are younger."
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def gc(*, stores: tuple[str, ...], as_json: bool, dry_run: bool, **rules: Any) -> None:
    """Evict entries and sweep leftovers. Without options only leftovers go.

    With --model, --gpu or --kind and no limit, everything chosen goes. Pinned entries, entries that are in use and
    entries being built stay.
    """
    uses = UseLog(default_memo_folder(os.environ) / "uses")
    max_bytes = rules["max_bytes"]
    made = EvictionRules(
        max_bytes=None if max_bytes is None else int(max_bytes),
        max_age=rules["max_age"],
        max_idle=rules["max_idle"],
        superseded=rules["superseded"],
        models=rules["models"],
        targets=rules["targets"],
        kinds=tuple(map(Kind, rules["kinds"])),
        grace_seconds=rules["grace"],
    )
    with open_store(store_argument(stores)) as store:
        _run_plan(store, made, uses, as_json=as_json, dry_run=dry_run)


@click.command()
@store_option
@json_option
@click.argument("keys", metavar="KEY_OR_NAME...", nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def rm(*, stores: tuple[str, ...], as_json: bool, keys: tuple[str, ...], dry_run: bool) -> None:
    """Remove entries, and the payloads that no other entry needs."""
    with open_store(store_argument(stores)) as store:
        digests = tuple(find_entry(store, key).key for key in keys)
        _run_plan(store, EvictionRules(keys=digests), None, as_json=as_json, dry_run=dry_run)


def _run_plan(store: Store, rules: EvictionRules, uses: UseLog | None, *, as_json: bool, dry_run: bool) -> None:
    plan = plan_eviction(scan(store, uses=uses), rules)
    report = None if dry_run else plan.execute(store)
    if as_json:
        done = None
        if report is not None:
            done = {
                "evicted": [item.entry.digest for item in report.evicted],
                "in_use": [item.entry.digest for item in report.in_use],
                "freed": report.freed,
                "failed": list(report.failed),
            }
        click.echo(json.dumps({"plan": plan.to_json(), "done": done}))
    else:
        click.echo(str(plan))
        click.echo("Nothing was deleted." if report is None else str(report))
    if report is not None and (report.failed or (rules.keys and report.in_use)):
        raise SystemExit(_EXIT_FAILED)


@click.command("pin")
@store_option
@click.argument("keys", metavar="KEY_OR_NAME...", nargs=-1, required=True)
@click.option("--note", default="", help="Why.")
def pin_command(*, stores: tuple[str, ...], keys: tuple[str, ...], note: str) -> None:
    """Keep entries from being evicted."""
    with open_store(store_argument(stores)) as store:
        for key in keys:
            found = find_entry(store, key)
            pin(store, Kind(found.kind), found.key, note=note)
            click.echo(f"pinned {found.labels.entry or found.key[:12]}")


@click.command("unpin")
@store_option
@click.argument("keys", metavar="KEY_OR_NAME...", nargs=-1, required=True)
def unpin_command(*, stores: tuple[str, ...], keys: tuple[str, ...]) -> None:
    """Let entries be evicted again."""
    with open_store(store_argument(stores)) as store:
        for key in keys:
            found = find_entry(store, key)
            was = unpin(store, Kind(found.kind), found.key)
            click.echo(f"{'unpinned' if was else 'was not pinned:'} {found.labels.entry or found.key[:12]}")


# ---- moving -----------------------------------------------------------------------------------------------------


@click.command("export")
@_choice_options
@store_option
@json_option
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), metavar="PATH",
    help="A .tar, a .tar.zst, or a folder that is new or empty.",
)  # fmt: skip
def export_command(
    *,
    stores: tuple[str, ...],
    as_json: bool,
    output: Path,
    keys: tuple[str, ...],
    models: tuple[str, ...],
    everything: bool,
) -> None:
    """Write entries to a bundle: readable names, checksums, the same bytes for the same entries."""
    with open_store(store_argument(stores)) as store:
        names = export_bundle(store, _chosen(store, keys, models, everything=everything), output)
    click.echo(json.dumps(names) if as_json else f"wrote {output} with {len(names)} files")


@click.command("import")
@store_option
@json_option
@click.argument("source", type=click.Path(path_type=Path))
def import_command(*, stores: tuple[str, ...], as_json: bool, source: Path) -> None:
    """Put a bundle's entries into the store. What is there already stays."""
    with open_store(store_argument(stores)) as store:
        _tell_moved(import_bundle(store, source), as_json=as_json)


@click.command("copy")
@json_option
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--model", "models", multiple=True, help="Only this model; shell patterns work.")
@click.option("--workers", type=click.IntRange(1, 256), default=4, show_default=True, help="Entries under way at once.")
def copy_command(*, as_json: bool, source: str, target: str, models: tuple[str, ...], workers: int) -> None:
    """Copy entries from store SRC to store DST: what is missing there, verified. Run it again to resume."""
    with open_store(source) as old, open_store(target) as new:
        wanted = None
        if models:
            rules = EvictionRules(models=models)
            wanted = {entry.digest for entry in scan(old).entries if rules.covers(entry)}
        with _counter("copied", quiet=as_json) as count:
            report = copy_store(
                old, new, workers=workers, progress=lambda row: count(row.size),
                choose=lambda manifest: wanted is None or manifest.key in wanted,
            )  # fmt: skip
    _tell_moved(report, as_json=as_json)


def _tell_moved(report: CopyReport, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        for row in report.rows:
            if row.error is not None:
                click.echo(f"failed: {row.label}: {row.error.message}", err=True)
        counts = ", ".join(f"{report.count(word)} {word}" for word in ("copied", "present", "differs", "failed"))
        click.echo(f"{counts}; {size_text(report.size)}")
    if not report.ok:
        damaged = any(isinstance(row.error, IntegrityError) for row in report.rows)
        raise SystemExit(_EXIT_DAMAGED if damaged else _EXIT_FAILED)


# ---- checking and signing ---------------------------------------------------------------------------------------


def _trusted_option(command: _F) -> _F:
    return click.option(
        "--trusted", multiple=True, type=click.Path(path_type=Path), metavar="FILE",
        help="File of public keys to trust, one a line; repeat it for more.",
    )(command)  # fmt: skip


@click.command()
@store_option
@json_option
@_trusted_option
@click.option("--quarantine", is_flag=True, help="Set damaged entries aside.")
@click.option("--signed", is_flag=True, help="Check signatures too; needs --trusted.")
@click.option(
    "--workers", type=click.IntRange(1, 256), default=None, help="Entries checked at once. [default: by CPUs]"
)
def verify(
    *,
    stores: tuple[str, ...],
    as_json: bool,
    quarantine: bool,
    signed: bool,
    trusted: tuple[Path, ...],
    workers: int | None,
) -> None:
    """Read every entry and check its bytes; exit with code 4 if any is damaged or, with --signed, not trusted.

    Entries that cannot be read are told too; if there is nothing worse, the exit code is 1.
    """
    if signed != bool(trusted):
        raise ConfigError("--signed and --trusted belong together: say which keys to trust.")
    with open_store(store_argument(stores)) as opened:
        store = secured(opened, keyring=Keyring.load(*trusted)) if signed else opened
        with _counter("checked", quiet=as_json) as count:
            last = 0

            def told(_done: int, _total: int, size: int) -> None:
                nonlocal last
                count(size - last)
                last = size

            report = verify_store(store, workers=workers, quarantine=quarantine, progress=told)
    bad = [
        {"kind": kind.value, "key": digest, "reason": str(error.reason), "message": error.message}
        for kind, digest, error in report.bad
    ]
    unread = {digest for _, digest, error in report.bad if isinstance(error, StoreError)}
    if as_json:
        click.echo(json.dumps({"good": report.good, "damaged": bad}))
    else:
        for row in bad:
            click.echo(
                f"{'unreadable' if row['key'] in unread else 'damaged'}: {row['kind']}/{row['key'][:12]}: {row['message']}"
            )
        damaged = len(bad) - len(unread)
        click.echo(f"{report.good} good, {damaged} damaged" + (f", {len(unread)} unreadable" if unread else ""))
    if bad:
        raise SystemExit(_EXIT_FAILED if len(unread) == len(bad) else _EXIT_DAMAGED)


@click.command()
@click.argument("key_id", metavar="NAME-NUMBER")
@click.option(
    "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Where the secret key goes; a new file that only you can read.",
)  # fmt: skip
def keygen(*, key_id: str, output: Path) -> None:
    """Make a key for signing entries, such as release-1, and print its public half for --trusted files."""
    signer = Signer.generate(key_id)
    signer.save(output)
    click.echo(str(signer.public))


@click.command()
@_choice_options
@store_option
@json_option
@click.option(
    "--key",
    "key_file",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Secret key, made by keygen.",
)
def sign(
    *,
    stores: tuple[str, ...],
    as_json: bool,
    key_file: Path,
    keys: tuple[str, ...],
    models: tuple[str, ...],
    everything: bool,
) -> None:
    """Sign entries that are stored already, after checking their bytes. Signatures by other keys stay."""
    signer = Signer.load(key_file)
    done = []
    with open_store(store_argument(stores)) as store:
        for manifest in _chosen(store, keys, models, everything=everything):
            for ref in manifest.blobs:
                store.fetch(ref, rehash=True).close()
            signed = signer.sign(manifest)
            if signed != manifest and store.publish(signed, {}, replacing=manifest) != signed:
                raise ConfigError(f"{manifest.key[:12]} changed while it was being signed; run the command again.")
            done.append(manifest.key)
    click.echo(json.dumps(done) if as_json else f"{signer.key_id} signed {len(done)} entries")


@contextmanager
def _counter(verb: str, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Shows entries and bytes done so far on a terminal, and nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda _size: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(verb)
        entries = size = 0

        def count(more: int) -> None:
            nonlocal entries, size
            entries, size = entries + 1, size + more
            bars.update(task, description=f"{verb} {entries} entries, {size_text(size)}")

        yield count


COMMANDS: tuple[click.Command, ...] = (
    gc,
    rm,
    pin_command,
    unpin_command,
    export_command,
    import_command,
    copy_command,
    verify,
    keygen,
    sign,
)
