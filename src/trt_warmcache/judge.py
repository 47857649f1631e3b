"""What is worth telling about an entry although its bytes are right: drift, odd sizes, and what earlier builds cost."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from trt_warmcache.builders import disagreements
from trt_warmcache.errors import IncompatibleError, StoreError
from trt_warmcache.explain import stored_manifests
from trt_warmcache.keys import EngineKey, Kind
from trt_warmcache.manifest import Manifest
from trt_warmcache.options import BuildOptions
from trt_warmcache.stores import Store
from trt_warmcache.target import Target

__all__ = ["History", "drift", "fingerprint", "told_apart"]

#: A plan this many times larger or smaller than its relatives' is told.
_OUTLIER = 1.6
#: Seconds that looking at earlier builds may take; a build takes longer, a slow store must not make it much longer.
_SECONDS = 1.0


def fingerprint(function: Callable[..., Any]) -> str:
    """What can be told of a hook: its name, and a digest of its compiled code for this Python version."""
    name = f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    return f"{name} py{sys.version_info[0]}.{sys.version_info[1]} {_code_digest(code)}"


def _code_digest(code: Any) -> str:
    hasher = hashlib.sha256(code.co_code + repr((code.co_names, code.co_varnames)).encode())
    for constant in code.co_consts:
        inner = _code_digest(constant) if hasattr(constant, "co_code") else repr(constant)
        hasher.update(inner.encode())
    return hasher.hexdigest()[:16]


def drift(manifest: Manifest, options: BuildOptions, configure: Callable[..., Any] | None) -> tuple[str, ...]:
    """In what a stored engine's recorded configuration differs from what the same request would set today.

    Cheap, for every hit: the record is compared with this release's option table, and a hook with its recorded
    fingerprint. TensorRT is not asked, since a hit loads none; so a default that TensorRT itself changed shows only
    where its version, which is part of the key, did not change with it: never.

    Args:
        manifest: Of the stored engine.
        options: The request's.
        configure: The request's hook.
    """
    found = []
    recorded = manifest.provenance.config
    if configure is None:  # a hook may have changed anything
        found += [f"{name} was {was} and would be {now}" for name, was, now in disagreements(options, recorded)]
    before = manifest.extra.get("configure")
    if configure is not None and isinstance(before, str):
        now = fingerprint(configure)
        comparable = before.split(" ")[1:2] == now.split(" ")[1:2]
        if before != now and comparable:
            found.append(f"configure was {before} and is {now}, under the same recipe")
    return tuple(found)


#: Facts that a failed load is most often about, likeliest first.
_SUSPECTS = ("driver", "gpu", "compute_capability", "cuda", "mig_profile", "memory_bytes")


def told_apart(error: IncompatibleError, manifest: Manifest, target: Target) -> IncompatibleError:
    """An error about a machine, with what differs between the machine that built the plan and this one."""
    built, here = manifest.provenance.target, target.to_json()
    differing = [
        f"{fact} {built[fact]} there, {here[fact]} here"
        for fact in _SUSPECTS
        if fact in built and fact in here and built[fact] != here[fact]
    ]
    if not differing:
        return error
    return IncompatibleError(
        f"{error.message} It was built on another machine: {'; '.join(differing)}.", about_plan=error.about_plan
    )


@dataclass(frozen=True)
class History:
    """Earlier builds of the same model, the nearest relatives only.

    Attributes:
        seconds: How long a build took, by the median; None where there was none.
        size: How large the plan was, by the median of those with the same precisions; None where there was none.
        count: How many builds `size` rests on.
    """

    seconds: float | None = None
    size: float | None = None
    count: int = 0

    @classmethod
    def of(cls, store: Store, key: EngineKey) -> History:
        """Look through what is nearby of a store, for a second at most; trouble with it counts as no history."""
        found: dict[str, Manifest] = {}
        until = time.monotonic() + _SECONDS
        try:
            for manifest in chain.from_iterable(stored_manifests(part, Kind.ENGINE) for part in store.nearby()):
                # One of this very key too: it is being built anew.
                if all(manifest.parts.get(part) == key.parts.get(part) for part in ("model", "builder.flavour")):
                    found.setdefault(manifest.key, manifest)
                if time.monotonic() > until:
                    break
        except StoreError:
            return cls()
        relatives = [*found.values()]
        if not relatives:
            return cls()
        import statistics  # only a build needs it, and it is slow to import

        here = [manifest for manifest in relatives if manifest.parts.get("target.gpu") == key.parts.get("target.gpu")]
        seconds = statistics.median(manifest.provenance.build_seconds for manifest in here or relatives)
        family = [manifest.size for manifest in relatives if _family(manifest.parts) == _family(key.parts)]
        return cls(seconds, statistics.median(family) if family else None, len(family))

    def suspicion(self, size: int) -> str:
        """Why a plan of this size is odd beside its relatives, or ""."""
        if not self.size or not size:
            return ""
        ratio = size / self.size
        if 1 / _OUTLIER < ratio < _OUTLIER:
            return ""
        return (
            f"the plan has {size} bytes, {ratio:.1f} times the {self.size:.0f} bytes of {self.count} earlier "
            "build(s) of this model with the same precisions"
        )


#: Options that change a plan's size without anything being wrong.
_SIZES = (
    "fp16", "bf16", "int8", "fp8", "int4", "fp4", "strongly_typed", "layer_precisions", "strip_plan", "refit",
    "weight_streaming", "version_compatible", "exclude_lean_runtime", "profiling_verbosity",
)  # fmt: skip


def _family(parts: Mapping[str, Any]) -> tuple[Any, ...]:
    profiles = len(parts.get("profiles", ()))
    return (profiles, parts.get("calibration"), parts.get("qdq"), *(parts.get(f"options.{name}") for name in _SIZES))
