"""Write the reference pages that follow from the code: ``python docs/generate.py``.

With ``--check`` nothing is written; the exit code says whether the pages on disk are up to date.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click

import trt_warmcache as twc
from trt_warmcache import cli, events, policy
from trt_warmcache.options import option_specs
from trt_warmcache.settings import DEFAULT_STORE, ENVIRONMENT

_FOLDER = Path(__file__).parent / "reference"
_NOTICE = "<!-- Written by docs/generate.py from the code; edit the code and run it again. -->\n\n"

#: When each kind of event happens. A kind without a line here makes this script fail, and its test with it.
_EVENTS = {
    "hit": "A stored engine was found under the request's key.",
    "covered": "A stored engine with a wider profile, or of a lower rung of the ladder, serves the request. `detail`: `reason`, `text`.",
    "joined": "Another thread, process or host built the engine while this caller waited.",
    "miss": "Nothing usable is stored for the request.",
    "build_start": "A build begins. `detail`: `expected_seconds`, where the same model was built before.",
    "build_progress": "TensorRT finished a step. `detail`: `phase`, `parent`, `step`, `total`.",
    "build_slow": "A build passed `Policy.slow_build_seconds`; sent again at every multiple.",
    "build_end": "TensorRT returned a plan and it passed its checks.",
    "build_failed": "A build ended with an error, by its own or because it was cancelled.",
    "wait": "Still waiting for another builder. `detail`: `owner`.",
    "published": "The entry is stored.",
    "publish_failed": "The engine could not be stored; the caller has it all the same. `detail`: `reason`.",
    "publish_lost": "Another builder's entry was there first and stays; the caller got that one.",
    "quarantined": "A damaged entry was set aside. `detail`: `reason`.",
    "store_error": "A store failed while being read, or could not set an entry aside. `detail`: `reason`.",
    "lock_unavailable": "There is no lock to be had; building goes on without one, at the price of possible double work.",
    "ineffective": "A rebuilt plan was rejected like the one before it: building again does not help.",
    "suspect": "A plan is oddly large or small beside earlier builds of its model. `detail`: `reason`.",
    "timing_dropped": "A timing cache could not be used, merged or stored; builds measure again. `detail`: `reason`.",
    "runtime_dropped": "Kernels of TensorRT-RTX could not be used or stored; they are compiled again. `detail`: `reason`.",
    "calibration_hit": "A stored INT8 calibration table serves the request; nothing is calibrated.",
    "calibration_start": "A calibration begins. Its batches are told as `build_progress` of the phase `Calibrating`.",
    "calibration_end": "A calibration ran over all its batches.",
    "calibration_failed": "A calibration ended with an error; there is no table.",
    "calibration_incomplete": "Tensors without a usable scale stay in floating point. `detail`: `missing`, `missing_count`, `unusable`, `unusable_count`.",
    "calibration_conflict": "A second calibration gave other scales for the same key; the first table stays. `detail`: `stored`, `refused`.",
    "calibration_unwritten": "TensorRT calibrated and wrote no table.",
    "layer_down": "A layer of the store kept failing and is left alone for a while. `detail`: `layer`, `reason`, `seconds`.",
    "lease_lost": "A lease was taken over while its holder was still building; the work goes on and the first entry wins.",
    "version_conflict": "Bindings and loaded library differ in version. `detail`: `bindings`, `library`.",
    "churn": "A model keeps getting new keys and none is ever used again. `detail`: `keys`, `size`, `parts` (what changes).",
    "drift": "The recorded configuration of a hit differs from what the same request would set today.",
    "warning": "Anything else worth knowing. `detail`: `reason`.",
}

#: Versions whose presets are shown: the first of each set of options that presets can use.
_PRESET_LINES = ((8, 6), (10, 0), (10, 4), (10, 8), (11, 0))

#: The public names by subject. Names of ``trt_warmcache.__all__`` that are in none come last.
_API = {
    "Getting engines": ("EngineManager", "Engine", "Outcome", "EngineRequest", "ShapeProfile", "Target"),
    "Policy": ("Policy",),
    "Tactics": ("TacticReplay",),
    "INT8 calibration": (
        "Calibration",
        "CalibrationAlgorithm",
        "CalibrationRunner",
        "QdqOptions",
        "CalibrationTable",
        "read_table",
        "StoredTable",
        "CalibrationTables",
    ),
    "Reports": ("Explanation", "WarmReport", "WarmRow"),
    "Keys and manifests": ("EngineKey", "TimingKey", "CalibrationKey", "Manifest", "KEY_SCHEMA"),
    "Events": ("Event", "Hook"),
    "Stores": (
        "open_store",
        "LocalStore",
        "MemoryStore",
        "LayeredStore",
        "Layer",
        "Store",
        "StoreCapabilities",
        "DigestMemo",
    ),
    "Trust": ("Keyring", "Signer"),
    "Builders": ("EngineBuilder", "BuilderCapabilities", "BuildInputs", "BuildOutput", "Progress"),
}

#: Names that have a page of their own.
_ELSEWHERE = {
    "BuildOptions": "options.md",
    "EventKind": "events.md",
    "StoreReason": "errors.md",
    "__version__": "",
    **{
        name: "errors.md"
        for name in twc.__all__
        if isinstance(getattr(twc, name), type) and issubclass(getattr(twc, name), twc.WarmCacheError)
    },
}


#: Parents of every error, which say nothing about it.
_ROOTS = frozenset({object, BaseException, Exception})


#: Public names that are imported from a module of their own, because a server does not need them.
_MODULES = {
    "trt_warmcache.eviction": (
        "Housekeeping",
        (
            "scan",
            "plan_eviction",
            "EvictionRules",
            "Quota",
            "Inventory",
            "StoredEntry",
            "Eviction",
            "EvictionPlan",
            "EvictionReport",
        ),
    ),
    "trt_warmcache.uses": ("Pins and last uses", ("pin", "unpin", "is_pinned", "UseLog")),
    "trt_warmcache.bundle": (
        "Moving and checking entries",
        (
            "export_bundle",
            "import_bundle",
            "read_bundle",
            "copy_store",
            "CopyReport",
            "Moved",
            "verify_store",
            "VerifyReport",
        ),
    ),
}

# ---- docstrings -------------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """A docstring's markup as Markdown."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


def paragraph(text: str) -> str:
    """One line per paragraph."""
    return " ".join(plain(text).split())


def sections(documented: Any) -> tuple[str, dict[str, list[tuple[str, str]]]]:
    """A Google-style docstring: its text, and the items of its sections by title."""
    body: list[str] = []
    found: dict[str, list[tuple[str, str]]] = {}
    items: list[tuple[str, str]] | None = None
    for line in inspect.cleandoc(documented.__doc__ or "").splitlines():
        title = re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line)
        if title:
            items = found.setdefault(title[1], [])
        elif items is None or (line and not line.startswith(" ")):
            items = None
            body.append(line)
        elif line.strip():
            item = re.fullmatch(r"    (\*{0,2}\w+): (.*)", line)
            if item and "Returns" not in found:
                items.append((item[1], item[2]))
            elif items and line.startswith("     "):
                items[-1] = (items[-1][0], f"{items[-1][1]} {line.strip()}")
            else:
                items.append(("", line.strip()))
    return prose("\n".join(body)), found


def prose(text: str) -> str:
    """Paragraphs, with literal blocks (introduced by ``::`` or indented) as code."""
    parts = []
    for block in re.split(r"\n\s*\n", text.strip()):
        if block.startswith("    "):
            parts.append("```text\n" + inspect.cleandoc(block) + "\n```")
        else:
            parts.append(re.sub(r"::$", ":", paragraph(block)))
    return "\n\n".join(part for part in parts if part)


def described(documented: Any) -> Iterator[str]:
    """Markdown of a docstring."""
    text, found = sections(documented)
    yield text + "\n\n"
    for title, items in found.items():
        name = {"Args": "Parameters"}.get(title, title)
        yield f"*{name}*\n\n"
        if title in {"Returns", "Yields"}:
            yield " ".join(paragraph(" ".join(filter(None, item))) for item in items) + "\n\n"
            continue
        for item, meaning in items:
            yield f"- `{item}`: {paragraph(meaning)}\n" if item else f"- {paragraph(meaning)}\n"
        yield "\n"


def member_docs(kind: type[enum.Enum]) -> dict[str, str]:
    """The string under each member of an enumeration, which Python itself does not keep."""
    source = inspect.getsource(kind)
    found = re.findall(r'^    (\w+) = [^\n]+\n    """(.*?)"""', source, re.MULTILINE | re.DOTALL)
    return {name: paragraph(text) for name, text in found}


def choices(kind: type[enum.Enum]) -> Iterator[str]:
    """The values of an enumeration, with what is said about them."""
    docs = member_docs(kind)
    for member in kind:
        said = docs.get(member.name)
        yield f"- `{member.value!r}`" + (f": {said}" if said else "") + "\n"
    yield "\n"


@dataclasses.dataclass(frozen=True)
class _Default:
    """A default value as it is shown: choices by their value, and anything long as three dots."""

    value: Any

    def __repr__(self) -> str:
        if isinstance(self.value, enum.Enum):
            return repr(self.value.value)
        text = repr(self.value)
        return text if text == "()" or not re.search(r"[<(]", text) else "..."


def signature(name: str, found: Any) -> str:
    """A call as one writes it, without annotations."""
    none = inspect.Parameter.empty
    parameters = [
        parameter.replace(annotation=none, default=none if parameter.default is none else _Default(parameter.default))
        for parameter in inspect.signature(found).parameters.values()
        if parameter.name != "self" and not parameter.name.startswith("_")
    ]
    return name + str(inspect.Signature(parameters))


# ---- pages ------------------------------------------------------------------------------------------------------


def api_page() -> Iterator[str]:
    """Every public class and function."""
    listed = {name for names in _API.values() for name in names} | _ELSEWHERE.keys()
    unplaced = tuple(name for name in twc.__all__ if name not in listed)
    yield "# Python API\n\n"
    yield "Everything here is imported from `trt_warmcache`, unless a section names a module. Build options have [a page of their own](options.md), "
    yield "and so have [errors](errors.md) and [kinds of events](events.md).\n\n"
    for subject, names in (*_API.items(), *([("More", unplaced)] if unplaced else [])):
        yield f"## {subject}\n\n"
        for name in names:
            yield from api_entry(name, getattr(twc, name))
        if subject == "Policy":
            for kind in (getattr(policy, one) for one in policy.__all__):
                if isinstance(kind, type) and issubclass(kind, enum.Enum):
                    yield f"### {kind.__name__}\n\n"
                    yield from described(kind)
                    yield from choices(kind)
    for module, (subject, names) in _MODULES.items():
        yield f"## {subject}\n\nImported from `{module}`.\n\n"
        for name in names:
            yield from api_entry(name, getattr(import_module(module), name))


def api_entry(name: str, found: Any) -> Iterator[str]:
    """One public name, with its methods where it is a class."""
    yield f"### {name}\n\n"
    if not callable(found):
        yield f"`{name} = {found!r}`\n\n"
        return
    if isinstance(found, type) and issubclass(found, enum.Enum):
        yield from described(found)
        yield from choices(found)
        return
    protocol = getattr(found, "_is_protocol", False)
    if not protocol and not inspect.isabstract(found):
        yield f"```text\n{signature(name, found)}\n```\n\n"
    yield from described(found)
    if isinstance(found, type):
        for method in methods(found):
            yield from method


def methods(found: type) -> Iterator[Iterator[str]]:
    """The documented public methods and properties of a class, in the order they are written."""
    fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
    own = [base for base in found.__mro__ if base.__module__.startswith("trt_warmcache")]
    members = {name: member for base in reversed(own) for name, member in vars(base).items()}
    for name, member in members.items():
        if name.startswith("_") or name in fields:
            continue
        if isinstance(member, property):
            yield method_entry(f"{found.__name__}.{name}", member.fget, call=False)
        elif isinstance(member, (classmethod, staticmethod)):
            yield method_entry(f"{found.__name__}.{name}", getattr(found, name), call=True)
        elif inspect.isfunction(member):
            yield method_entry(f"{found.__name__}.{name}", member, call=True)


def method_entry(name: str, function: Any, *, call: bool) -> Iterator[str]:
    """One method or property."""
    if not function.__doc__:
        return
    yield f"#### {name}\n\n"
    if call:
        yield f"```text\n{signature(name, function)}\n```\n\n"
    yield from described(function)


def options_page() -> Iterator[str]:
    """Every build option, and which versions of TensorRT have it."""
    yield "# Build options\n\n"
    yield "Fields of `trt_warmcache.BuildOptions`, all keyword-only, all `None` by default: `None` leaves TensorRT's own "
    yield "default in force. On the command line: `--option NAME=VALUE`.\n\n"
    yield "An option that the installed flavour or version lacks is refused with a `ConfigError` before anything is "
    yield "built; it is never dropped in silence. The column *key* says whether the option is part of the engine key; "
    yield "options that cannot change the plan are not. An option set to the *default* of this table counts as left out: "
    yield "it is TensorRT's own in every version, so both are one key.\n\n"
    yield "| option | meaning | classic TensorRT | RTX | key | default |\n| --- | --- | --- | --- | --- | --- |\n"
    for spec in option_specs().values():
        if spec.since is None:
            classic = "no"
        else:
            last = " to {}.{}".format(*spec.until) if spec.until else " and later"
            classic = "{}.{}".format(*spec.since) + (" only" if spec.until == spec.since else last)
        yes = {True: "yes", False: "no"}
        default = "" if spec.default is None else f"`{getattr(spec.default, 'value', spec.default)!r}`"
        key = yes[spec.affects_plan]
        yield f"| `{spec.name}` | {paragraph(spec.doc)} | {classic} | {yes[spec.rtx]} | {key} | {default} |\n"
    yield "\n## Where an option does not exist\n\n"
    for spec in option_specs().values():
        if spec.instead:
            yield f"- `{spec.name}`: {paragraph(spec.instead)}\n"
    yield "\n## Choices\n\n"
    from trt_warmcache import options

    for kind in (getattr(options, name) for name in options.__all__):
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            yield f"### {kind.__name__}\n\n"
            yield from described(kind)
            yield from choices(kind)
    yield "## Presets\n\n"
    yield from described(twc.BuildOptions.preset)
    yield "\nWhat each preset sets, by version. `balanced` sets nothing: TensorRT's own defaults.\n\n"
    yield "| preset | version | options |\n| --- | --- | --- |\n"
    for preset in options.Preset:
        for flavour, version in (*(("tensorrt", line) for line in _PRESET_LINES), ("tensorrt_rtx", (1, 7))):
            chosen = twc.BuildOptions.preset(preset, version=version, flavour=flavour).to_json()
            words = ", ".join(f"`{name}={value}`" for name, value in chosen.items()) or "nothing"
            where = "TensorRT-RTX" if flavour == "tensorrt_rtx" else "TensorRT {}.{}".format(*version)
            yield f"| `{preset.value}` | {where} | {words} |\n"


def errors_page() -> Iterator[str]:
    """Every error, with its parents and attributes."""
    yield "# Errors\n\n"
    yield "All are imported from `trt_warmcache`, derive from `WarmCacheError`, survive pickling with their attributes "
    yield "and cause, and carry a `message` that says what to do next. A missing entry is not an error unless the policy "
    yield "makes it one, and a store that fails is never taken for a miss.\n\n"
    yield "| error | also a | exit code of the command line |\n| --- | --- | --- |\n"
    kinds = [
        getattr(twc, name) for name in twc.__all__ if _ELSEWHERE.get(name) == "errors.md" and name != "StoreReason"
    ]
    kinds.sort(key=lambda kind: (len(kind.__mro__), kind.__name__))
    for kind in kinds:
        parents = ", ".join(f"`{base.__name__}`" for base in kind.__mro__[1:] if base not in _ROOTS)
        yield f"| [`{kind.__name__}`](#{kind.__name__.lower()}) | {parents} | {cli._exit_code(kind('example'))} |\n"
    yield "\n"
    for kind in kinds:
        yield f"## {kind.__name__}\n\n"
        yield from described(kind)
    yield "## StoreReason\n\n"
    yield from described(twc.StoreReason)
    yield from choices(twc.StoreReason)


def events_page() -> Iterator[str]:
    """Every kind of event."""
    known = {kind.value for kind in twc.EventKind}
    if known != _EVENTS.keys():
        raise SystemExit(f"docs/generate.py must describe these events: {sorted(known ^ _EVENTS.keys())}")
    yield "# Events\n\n"
    yield "A manager calls each of its `hooks` with one `trt_warmcache.Event` per thing that happens, on the thread "
    yield "where it happens. It counts them too: `EngineManager.counters()` gives the number of each kind, and of each "
    yield "kind and reason as `kind.reason`. The same events go to the logger `trt_warmcache`; the library prints nothing. "
    yield "A hook that raises is logged and otherwise ignored.\n\n"
    yield "| kind | when | log level |\n| --- | --- | --- |\n"
    for kind in twc.EventKind:
        level = logging.getLevelName(events._LEVELS.get(kind, logging.DEBUG))
        yield f"| `{kind.value}` | {_EVENTS[kind.value]} | {level} |\n"
    yield "\n## Event\n\n"
    yield from described(twc.Event)


def environment_page() -> Iterator[str]:
    """Every environment variable."""
    yield "# Environment\n\n"
    yield "The library reads no settings from the environment; pass them to `EngineManager`. The command line reads:\n\n"
    yield "| variable | meaning |\n| --- | --- |\n"
    for name, meaning in ENVIRONMENT.items():
        yield f"| `{name}` | {paragraph(meaning)} |\n"
    yield f"\nWithout `TRT_WARMCACHE_STORE` and without `--store` engines are kept in `{DEFAULT_STORE}`.\n\n"
    yield "Two conventions of the system are followed by library and command line alike:\n\n"
    yield "- `XDG_CACHE_HOME`, or else `HOME`, says where digests of unchanged files are remembered "
    yield "(`trt_warmcache/digests` below it) unless `EngineManager(memo=...)` says otherwise.\n"
    yield "- `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` decide, inside the NVIDIA driver, which device "
    yield "`Target.detect(0)` means.\n"


def commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """All commands of a group, and those of the groups in it."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def cli_page() -> Iterator[str]:
    """Every command and option."""
    yield "# Command line\n\n"
    yield "`trt-warmcache COMMAND`, or `python -m trt_warmcache COMMAND`. Results go to standard output, progress and "
    yield "errors to standard error; on a terminal progress is a bar, elsewhere a few plain lines. With `--json` the "
    yield "result, or the error, is one JSON document on standard output.\n\n"
    yield "| exit code | meaning |\n| --- | --- |\n"
    for code, meaning in (
        (0, "done"),
        (cli.EXIT_FAILED, "failed: model, build or store"),
        (cli.EXIT_USAGE, "the command or a setting cannot be meant"),
        (cli.EXIT_MISS, "not stored"),
        (cli.EXIT_DAMAGED, "damaged, or not trusted"),
    ):
        yield f"| {code} | {meaning} |\n"
    yield "\n"
    for name, command in commands(cli.main):
        context = click.Context(command, info_name=f"trt-warmcache {name}")
        yield f"## {name}\n\n```text\n{' '.join(command.get_usage(context).split()[1:])}\n```\n\n"
        yield paragraph(command.help or "") + "\n\n"
        yield "| option | meaning |\n| --- | --- |\n"
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None:
                spelling, meaning = (text.replace("|", "\\|") for text in record)
                yield f"| `{spelling}` | {meaning} |\n"
        yield "\n"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "api.md": api_page,
    "cli.md": cli_page,
    "environment.md": environment_page,
    "errors.md": errors_page,
    "events.md": events_page,
    "options.md": options_page,
}


def main() -> int:
    """Write or check all pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    check = parser.parse_args().check
    stale = []
    for name, page in PAGES.items():
        text = _NOTICE + "".join(page()).rstrip() + "\n"
        path = _FOLDER / name
        if not path.is_file() or path.read_text("utf-8") != text:
            stale.append(name)
            if not check:
                path.write_text(text, "utf-8")
    if check and stale:
        sys.stderr.write(f"Out of date: {', '.join(stale)}. Run python docs/generate.py.\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
