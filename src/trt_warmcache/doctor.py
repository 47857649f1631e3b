"""What is installed, what is loaded, which settings are in force, and what about it looks wrong."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from trt_warmcache._gpu import gpu_present
from trt_warmcache.builders._library import LIBRARIES, loaded_library, module_available
from trt_warmcache.errors import ConfigError, StoreError
from trt_warmcache.keys import Kind
from trt_warmcache.memo import default_memo_folder
from trt_warmcache.settings import DEFAULT_STORE, Settings
from trt_warmcache.stores import open_store
from trt_warmcache.stores._urls import public
from trt_warmcache.target import Target

__all__ = ["Diagnosis", "diagnose"]

#: Distributions that bring a TensorRT library or its bindings, per flavour.
_DISTRIBUTIONS = {
    "tensorrt": (
        "tensorrt",
        "tensorrt-cu11",
        "tensorrt-cu12",
        "tensorrt-cu13",
        "tensorrt-cu12-libs",
        "tensorrt-cu13-libs",
    ),
    "tensorrt_rtx": (
        "tensorrt-rtx",
        "tensorrt-rtx-cu12",
        "tensorrt-rtx-cu13",
        "tensorrt-rtx-cu12-libs",
        "tensorrt-rtx-cu13-libs",
    ),
}


@dataclass
class Diagnosis:
    """Facts by topic, and the problems among them.

    Attributes:
        facts: Topic to lines.
        problems: Sentences that each name a problem and what to do about it.
    """

    facts: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{topic}:\n" + "\n".join(f"  {line}" for line in found) for topic, found in self.facts.items()]
        return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in self.problems)])

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as plain JSON values."""
        return {"facts": self.facts, "problems": self.problems}


def diagnose(environ: Mapping[str, str], stores: tuple[str, ...] = ()) -> Diagnosis:
    """Look at this machine and this process.

    Args:
        environ: Environment variables.
        stores: Stores given on the command line; empty if none.
    """
    found = Diagnosis()
    _tensorrt(found)
    _gpu(found)
    _settings(found, environ, stores)
    for url in stores or Settings.from_env(environ).stores:
        _store(found, url)
    found.facts["digest memo"] = [str(default_memo_folder(environ))]
    return found


def _tensorrt(found: Diagnosis) -> None:
    for flavour, names in _DISTRIBUTIONS.items():
        lines = []
        versions: dict[str, set[str]] = {}
        for distribution in metadata.distributions():
            name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
            if name in names:
                lines.append(f"{name} {distribution.version} in {distribution.locate_file('')}")
                versions.setdefault(name, set()).add(distribution.version)
        loaded = loaded_library(LIBRARIES[flavour].soname)
        lines.append(f"loaded in this process: {loaded or 'none'}")
        lines.append(
            f"import {LIBRARIES[flavour].module}: {'possible' if module_available(LIBRARIES[flavour].module) else 'not installed'}"
        )
        found.facts[flavour] = lines
        for name, several in versions.items():
            if len(several) > 1:
                found.problems.append(
                    f"{name} is on sys.path in versions {', '.join(sorted(several))}; which one is loaded depends on the "
                    "order of the path. Keep one, for example with a virtual environment."
                )
    found.facts["sys.path"] = list(sys.path)


def _gpu(found: Diagnosis) -> None:
    if not gpu_present():
        found.facts["gpu"] = ["none visible to this process"]
        return
    try:
        facts = Target.detect().to_json()
    except ConfigError as error:
        found.facts["gpu"] = [error.message]
        return
    found.facts["gpu"] = [f"{name}: {value}" for name, value in facts.items()]


def _settings(found: Diagnosis, environ: Mapping[str, str], stores: tuple[str, ...]) -> None:
    settings = Settings.from_env(environ)
    if stores:
        source, chosen = "from --store", stores
        if "TRT_WARMCACHE_STORE" in environ:
            source += f", which overrides TRT_WARMCACHE_STORE={', '.join(map(_shown, settings.stores))}"
    elif environ.get("TRT_WARMCACHE_STORE"):
        source, chosen = "from TRT_WARMCACHE_STORE", settings.stores
    else:
        source, chosen = "the default", (DEFAULT_STORE,)
    builder = "from TRT_WARMCACHE_BUILDER" if environ.get("TRT_WARMCACHE_BUILDER") else "the default"
    found.facts["settings"] = [
        f"store: {', '.join(map(_shown, chosen))} ({source})",
        f"builder: {settings.builder} ({builder})",
    ]


def _shown(store: str) -> str:
    """A store as it may be shown: a URL may hold a password."""
    return public(store) if "://" in store else store


def _store(found: Diagnosis, url: str) -> None:
    try:
        with open_store(url) as store:
            can = store.capabilities
            counts = {kind.value: sum(1 for _ in store.entries(kind)) for kind in Kind} if can.listable else {}
    except (ConfigError, StoreError) as error:
        found.facts[f"store {_shown(url)}"] = ["not usable"]
        found.problems.append(error.message)
        return
    found.facts[f"store {_shown(url)}"] = [
        f"at {store.url}",
        f"{'writable' if can.writable else 'read-only'}, locks reach: {can.lock_scope.name.lower()}",
        ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "cannot be listed",
    ]
