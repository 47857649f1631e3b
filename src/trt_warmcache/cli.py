"""The command line: ``trt-warmcache``.

Exit codes: 0 done; 1 it failed (model, build or store); 2 the command or a setting cannot be meant; 3 not stored;
4 damaged.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from trt_warmcache import cli_fleet
from trt_warmcache._version import __version__
from trt_warmcache.builders import select_builder
from trt_warmcache.cli_calibration import calib, calibrate
from trt_warmcache.cli_calibration_options import request_calibration, request_options
from trt_warmcache.cli_common import (
    date_text,
    find_entry,
    json_option,
    progress_hook,
    store_argument,
    store_option,
)
from trt_warmcache.cli_timing import timing as timing_commands
from trt_warmcache.engine import Engine, Outcome
from trt_warmcache.errors import ConfigError, IntegrityError, MissError, UntrustedError, WarmCacheError
from trt_warmcache.explain import stored_manifests
from trt_warmcache.export import export_entry, file_names
from trt_warmcache.keys import Kind
from trt_warmcache.manager import EngineManager
from trt_warmcache.manifest import Manifest
from trt_warmcache.names import size_text
from trt_warmcache.options import BuildOptions, Preset
from trt_warmcache.policy import Cover, OnMiss, Policy
from trt_warmcache.profiles import parse_profile
from trt_warmcache.settings import Settings
from trt_warmcache.stores import Store, open_store
from trt_warmcache.target import Target
from trt_warmcache.trust import Signer

__all__ = ["EXIT_DAMAGED", "EXIT_FAILED", "EXIT_MISS", "EXIT_USAGE", "main"]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_MISS = 3
EXIT_DAMAGED = 4

_F = TypeVar("_F", bound=Callable[..., Any])


class _Group(click.Group):
    """Turns the library's errors into exit codes, and into JSON where ``--json`` was given."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except WarmCacheError as error:
            if "--json" in sys.argv or ctx.meta.get("json"):
                click.echo(json.dumps({"error": _name_of(error), "message": error.message}))
            else:
                click.echo(f"{_name_of(error)}: {error.message}", err=True)
            ctx.exit(_exit_code(error))
        except BrokenPipeError:
            # The reader of our output went away (`trt-warmcache ls | head`); nothing is left to tell anyone.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(EXIT_FAILED)


def _name_of(error: WarmCacheError) -> str:
    """The error's documented name; modules have subclasses of their own, which mean nothing to a user."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == WarmCacheError.__module__)


def _exit_code(error: WarmCacheError) -> int:
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    if isinstance(error, MissError):
        return EXIT_MISS
    return EXIT_DAMAGED if isinstance(error, (IntegrityError, UntrustedError)) else EXIT_FAILED


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trt-warmcache")
def main() -> None:
    """Build TensorRT engines once and get them from a cache ever after.

    Exit codes: 0 done; 1 failed (model, build or store); 2 wrong usage or setting; 3 not stored; 4 damaged.
    """


def _request_options(command: _F) -> _F:
    for option in reversed(
        (
            click.argument("model", type=click.Path()),
            click.option(
                "--profile",
                "profiles",
                multiple=True,
                metavar="INPUT=MIN:OPT:MAX",
                help="Shapes of one dynamic input, such as x=1x3x224x224:4x3x224x224:8x3x224x224; repeat it for further inputs.",
            ),
            click.option(
                "--next-profile",
                "boundaries",
                multiple=True,
                metavar="INPUT=MIN:OPT:MAX ...",
                help="A further optimization profile, complete, inputs separated by spaces.",
            ),
            click.option(
                "--preset",
                type=click.Choice([preset.value for preset in Preset]),
                default=None,
                help="How long to search for a fast engine, in terms of the installed version; --option goes on top.",
            ),
            click.option(
                "--option",
                "options",
                multiple=True,
                metavar="NAME=VALUE",
                help="A build option, such as optimization_level=5; VALUE is JSON or text.",
            ),
            click.option(
                "--builder",
                type=click.Choice(["auto", "tensorrt", "tensorrt_rtx"]),
                default=None,
                help="Which TensorRT builds. [default: $TRT_WARMCACHE_BUILDER or auto]",
            ),
            click.option(
                "--cc",
                "capabilities",
                multiple=True,
                metavar="8.9",
                help="TensorRT-RTX: a compute capability the plan must serve; repeat it. Portable if left out.",
            ),
            click.option("--name", help="A name for people; the model's file name if left out."),
            click.option("--model-version", help="A version for people."),
            click.option("--recipe", help="Your version of anything the cache cannot see."),
        )
    ):
        command = option(command)
    return request_options(command)


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request from the command line's options."""
    profiles = [parse_profile(" ".join(given["profiles"]))] if given["profiles"] else []
    profiles += [parse_profile(text) for text in given["boundaries"]]
    return {
        "profiles": profiles,
        "options": _build_options(given),
        "name": given["name"],
        "version": given["model_version"],
        "recipe": given["recipe"],
        "calibration": request_calibration(given),
    }


def _build_options(given: dict[str, Any]) -> BuildOptions:
    chosen = dict(_assignment(text) for text in given["options"])
    if given["preset"] is None:
        return BuildOptions(**chosen)
    builder = select_builder(_builder(given))
    return BuildOptions.preset(given["preset"], version=builder.version(), flavour=builder.flavour, **chosen)


def _builder(given: dict[str, Any]) -> str:
    return given["builder"] or Settings.from_env(os.environ).builder


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"Cannot read option {text!r}; write NAME=VALUE.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _manager(given: dict[str, Any], **more: Any) -> EngineManager:
    return EngineManager(
        store_argument(given["stores"]),
        builder=_builder(given),
        target=Target(compute_capabilities=given["capabilities"]) if given["capabilities"] else None,
        **more,
    )


main.add_command(calibrate)
main.add_command(calib)


# ---- commands ---------------------------------------------------------------------------------------------------


@main.command()
@_request_options
@store_option
@json_option
@click.option("--gen-cache", is_flag=True, help="Also write the .engine, .cache and .calib files under readable names.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Folder for --gen-cache. [default: .]",
)
@click.option("--timeout", type=float, default=None, help="Most seconds to spend, waiting and building.")
@click.option("--refresh", is_flag=True, help="Build anew even if it is stored, and replace it.")
@click.option("--no-build", is_flag=True, help="Only fetch; exit with code 3 if it is not stored.")
@click.option(
    "--sign",
    "key_file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    metavar="FILE",
    help="Sign what is built with this secret key, made by keygen.",
)
def build(
    *,
    as_json: bool,
    gen_cache: bool,
    output: Path,
    timeout: float | None,
    refresh: bool,
    no_build: bool,
    key_file: Path | None,
    **given: Any,
) -> None:
    """Build the engine of MODEL, or fetch it if it is stored already."""
    policy = Policy(on_miss=OnMiss.RAISE if no_build else OnMiss.BUILD, refresh=refresh)
    signer = None if key_file is None else Signer.load(key_file)
    started = time.perf_counter()
    with progress_hook(quiet=as_json) as hook, _manager(given, policy=policy, hooks=[hook], signer=signer) as manager:
        engine = manager.get(given["model"], timeout=timeout, **_fields(given))
        seconds = time.perf_counter() - started
        files = _write_files(manager.store, engine, output) if gen_cache else []
        if as_json:
            click.echo(json.dumps({**_engine_json(engine), "seconds": seconds, "files": [str(path) for path in files]}))
        else:
            click.echo(
                f"{engine.outcome.value}: {engine.key.name} ({engine.key.digest[:12]}), {size_text(engine.plan.nbytes)} in {seconds:.3f} s"
            )
            if engine.publish_error is not None:
                click.echo(f"Not stored: {engine.publish_error.message}", err=True)
            for path in files:
                click.echo(f"wrote {path}")
        if (
            signer is not None
            and engine.outcome is not Outcome.BUILT
            and signer.key_id not in engine.manifest.signature
        ):
            # What somebody else has built is not signed in passing: a signature says who made it.
            click.echo(
                f"warning: this engine was stored before, and {signer.key_id} has not signed it. Build it anew (--refresh), "
                f"or sign it as it is (trt-warmcache sign {engine.key.digest[:12]} --key {key_file}).",
                err=True,
            )


def _write_files(store: Store, engine: Engine, folder: Path) -> list[Path]:
    """The engine, its timing cache and its calibration table, as far as there are any."""
    wanted = [engine.manifest]
    for kind, digest in (
        (Kind.TIMING, engine.manifest.extra.get("timing_key", "")),
        (Kind.CALIBRATION, engine.manifest.extra.get("calibration_key", "")),
    ):
        found = store.manifest(kind, digest) if digest else None
        if found is not None:
            wanted.append(found)
    stem = Path(file_names([engine.manifest])[engine.manifest.key]).stem
    suffixes = {Kind.ENGINE: ".engine", Kind.TIMING: ".cache", Kind.CALIBRATION: ".calib"}
    return [export_entry(store, manifest, folder, stem + suffixes[Kind(manifest.kind)]) for manifest in wanted]


@main.command()
@_request_options
@json_option
def key(*, as_json: bool, **given: Any) -> None:
    """Print the key of MODEL's engine; the store is not touched, but for the table of a calibration."""
    fields = _fields(given)
    with _manager({**given, "stores": () if fields["calibration"] else ("memory://",)}) as manager:
        found = manager.key(given["model"], **fields)
    if as_json:
        click.echo(json.dumps({"digest": found.digest, "name": found.name, "parts": dict(found.parts)}))
    else:
        click.echo(f"{found.digest}  {found.name}")
        for part, value in sorted(found.parts.items()):
            click.echo(f"  {part}: {json.dumps(value) if not isinstance(value, str) else value}")


@main.command()
@_request_options
@store_option
@json_option
@click.option("--nearest", type=int, default=3, show_default=True, help="How many stored entries to compare with.")
def explain(*, as_json: bool, nearest: int, **given: Any) -> None:
    """Say whether MODEL's engine is stored, and if not, which entry comes nearest and why it does not fit."""
    with _manager(given) as manager:
        found = manager.explain(given["model"], nearest=nearest, **_fields(given))
    click.echo(json.dumps(found.to_json()) if as_json else str(found))
    if not found.hit:
        raise SystemExit(EXIT_MISS)


@main.command("ls")
@store_option
@json_option
@click.option("--kind", type=click.Choice([kind.value for kind in Kind]), default=None, help="Only this kind of entry.")
def list_entries(*, stores: tuple[str, ...], as_json: bool, kind: str | None) -> None:
    """List what is stored."""
    kinds = [Kind(kind)] if kind else list(Kind)
    with open_store(store_argument(stores)) as store:
        found = [manifest for one in kinds for manifest in stored_manifests(store, one)]
    if as_json:
        click.echo(json.dumps([_summary(manifest) for manifest in found]))
        return
    for manifest in found:
        made = manifest.provenance
        click.echo(
            f"{manifest.key[:12]}  {manifest.kind:11}  {size_text(manifest.size):>10}  {date_text(made.created)}  "
            f"{made.build_seconds:7.1f} s  {made.library or '-':12}  {manifest.labels.entry or '-'}"
        )
    click.echo(f"{len(found)} entries, {size_text(sum(manifest.size for manifest in found))}")


@main.command()
@click.argument("key_or_name")
@store_option
@json_option
def show(*, key_or_name: str, stores: tuple[str, ...], as_json: bool) -> None:
    """Show one entry: its KEY (or the beginning of it) or its name."""
    with open_store(store_argument(stores)) as store:
        manifest = find_entry(store, key_or_name)
    if as_json:
        click.echo(json.dumps(manifest.to_json()))
        return
    made = manifest.provenance
    rows = {
        "key": manifest.key, "kind": manifest.kind, "name": manifest.labels.entry, "model": manifest.labels.model,
        "version": manifest.labels.version, "size": size_text(manifest.size), "built": date_text(made.created),
        "build time": f"{made.build_seconds:.2f} s", "library": made.library, "built on": made.host, "built by": made.creator,
    }  # fmt: skip
    for name, value in rows.items():
        click.echo(f"{name:12} {value or '-'}")
    for title, table in (
        ("key parts", manifest.parts),
        ("target", made.target),
        ("effective configuration", made.config),
        ("more", manifest.extra),
    ):
        if table:
            click.echo(f"{title}:")
            for part, value in sorted(table.items()):
                click.echo(f"  {part}: {value if isinstance(value, str) else json.dumps(value)}")
    for blob in manifest.blobs:
        click.echo(f"payload {blob.role}: {blob.digest}, {size_text(blob.size)}")
    for warning in made.warnings:
        click.echo(f"warning: {warning}")


@main.command()
@_request_options
@store_option
@json_option
def check(*, as_json: bool, **given: Any) -> None:
    """Say whether stored engines of MODEL cover every profile given; exit with code 3 naming what is not covered.

    Meant for deployments, before a server takes traffic: each --profile and --next-profile is looked for on its own,
    and a stored engine with a wider profile covers it.
    """
    fields = _fields(given)
    wanted = fields.pop("profiles") or [None]
    rows = []
    with _manager(given, policy=Policy(cover=Cover.WIDER)) as manager:
        for profile in wanted:
            engine = manager.lookup(given["model"], profiles=profile, **fields)
            found = manager.explain(given["model"], profiles=profile, **fields) if engine is None else None
            rows.append(
                {
                    "profile": str(profile or "static shapes"),
                    "covered_by": None if engine is None else engine.key.digest,
                    "nearest": None if found is None else found.to_json()["nearest"],
                    "text": "" if found is None else str(found),
                }
            )
    if as_json:
        click.echo(json.dumps(rows))
    else:
        for row in rows:
            click.echo(
                f"covered: {row['profile']} by {row['covered_by'][:12]}"
                if row["covered_by"]
                else f"NOT COVERED: {row['profile']}\n{row['text']}"
            )
    if any(row["covered_by"] is None for row in rows):
        raise SystemExit(EXIT_MISS)


@main.command()
@store_option
@json_option
def doctor(*, stores: tuple[str, ...], as_json: bool) -> None:
    """Show what is installed and loaded and which settings are in force; exit with code 1 if something looks wrong."""
    from trt_warmcache.doctor import diagnose

    found = diagnose(os.environ, stores)
    click.echo(json.dumps(found.to_json()) if as_json else str(found))
    if found.problems:
        raise SystemExit(EXIT_FAILED)


# ---- showing ----------------------------------------------------------------------------------------------------


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "key": manifest.key,
        "kind": manifest.kind,
        "name": manifest.labels.entry,
        "model": manifest.labels.model,
        "version": manifest.labels.version,
        "size": manifest.size,
        "created": manifest.provenance.created,
        "build_seconds": manifest.provenance.build_seconds,
        "library": manifest.provenance.library,
        "parts": manifest.parts,
    }


def _engine_json(engine: Engine) -> dict[str, Any]:
    return {
        "outcome": engine.outcome.value,
        "key": engine.key.digest,
        "name": engine.key.name,
        "size": engine.plan.nbytes,
        "stored": engine.stored,
        "publish_error": None if engine.publish_error is None else engine.publish_error.message,
        "timings": dict(engine.timings),
    }


for _command in (*cli_fleet.COMMANDS, timing_commands):
    main.add_command(_command)
