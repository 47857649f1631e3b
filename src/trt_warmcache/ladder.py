"""The compatibility ladder: stored plans that run here although they were not built for exactly this.

Exact plan, plan for the same compute capability, plan for Ampere and newer, plan that later TensorRT versions load.
Each rung may cost speed, and the last one lets host code in, so each is taken only where the policy names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trt_warmcache.keys import Key, Kind
from trt_warmcache.manifest import Manifest
from trt_warmcache.policy import Rung
from trt_warmcache.target import Target

__all__ = ["Step", "exact_steps", "older_versions"]

_LEVEL = "options.hardware_compatibility"
_TARGET = ("target.gpu", "target.compute_capability", "target.sm_count", "target.mig_profile")


@dataclass(frozen=True)
class Step:
    """One way down.

    Attributes:
        parts: Key parts of the entry that would do.
        reason: Why it would, for people.
    """

    parts: Mapping[str, Any]
    reason: str

    @property
    def digest(self) -> str:
        """Digest of the key."""
        return Key(Kind.ENGINE, self.parts).digest


def exact_steps(parts: Mapping[str, Any], target: Target, allowed: Iterable[Rung]) -> Iterator[Step]:
    """The rungs whose keys can be told beforehand, nearest first.

    Args:
        parts: The request's key parts.
        target: What the engine is for.
        allowed: Rungs of the policy.
    """
    rungs = set(allowed)
    level, capability = parts.get(_LEVEL, "none"), target.compute_capability
    plain = {name: value for name, value in parts.items() if name not in _TARGET and name != _LEVEL}
    if capability is None or parts.get("builder.flavour") != "tensorrt":
        return
    if Rung.SAME_COMPUTE_CAPABILITY in rungs and level == "none":
        yield Step(
            {**plain, _LEVEL: "same_compute_capability", "target.compute_capability": capability},
            f"built for any GPU of compute capability {capability}",
        )
    ampere = tuple(map(int, capability.split("."))) >= (8, 0)
    if Rung.AMPERE_PLUS in rungs and level != "ampere_plus" and ampere:
        yield Step({**plain, _LEVEL: "ampere_plus", "target.gpu": "ampere_plus"}, "built for Ampere and newer GPUs")


def older_versions(
    parts: Mapping[str, Any], target: Target, allowed: Iterable[Rung], stored: Iterable[Manifest]
) -> list[tuple[Step, Manifest]]:
    """Version-compatible plans of earlier releases of the same major version, newest first."""
    rungs = tuple(allowed)
    if Rung.VERSION_COMPATIBLE not in rungs or parts.get("builder.flavour") != "tensorrt":
        return []
    ours = _numbers(parts["builder.version"])
    wanted: list[tuple[dict[str, Any], str]] = [(_versionless(parts), "")]
    wanted += [(_versionless(step.parts), f", {step.reason}") for step in exact_steps(parts, target, rungs)]
    found = []
    for manifest in stored:
        theirs = _numbers(manifest.parts.get("builder.version", ""))
        if not manifest.parts.get("options.version_compatible") or theirs[:1] != ours[:1] or theirs > ours:
            continue
        for level, (parts_wanted, more) in enumerate(wanted):
            if _versionless(manifest.parts) == parts_wanted:
                version = manifest.parts["builder.version"]
                reason = f"built by TensorRT {version} for later versions too{more}"
                found.append((level, tuple(-n for n in theirs), manifest.key, Step(manifest.parts, reason), manifest))
    return [(step, manifest) for *_, step, manifest in sorted(found, key=lambda item: item[:3])]


def _versionless(parts: Mapping[str, Any]) -> dict[str, Any]:
    leave_out = {"builder.version", "options.version_compatible", "options.exclude_lean_runtime", "target.cuda"}
    return {name: value for name, value in parts.items() if name not in leave_out}


def _numbers(version: Any) -> tuple[int, ...]:
    # An entry by another key recipe may hold anything there.
    return tuple(int(part) for part in str(version).split(".") if part.isdecimal())
