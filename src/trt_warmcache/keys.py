"""From facts to keys: pure functions, no I/O.

A key is a flat table of named parts and the SHA-256 of their canonical form. The parts travel in the manifest, so
two keys can be compared part by part when a user asks why something was rebuilt.

`KEY_SCHEMA` names the recipe. Change it whenever the same request would otherwise give another digest; golden vectors
in the tests pin the bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trt_warmcache._fields import LARGEST_INT, printable
from trt_warmcache._words import Word
from trt_warmcache.errors import ConfigError
from trt_warmcache.names import readable_name
from trt_warmcache.options import BuildOptions, HardwareCompatibility
from trt_warmcache.profiles import ShapeProfile
from trt_warmcache.target import Target

__all__ = [
    "KEY_SCHEMA",
    "CalibrationKey",
    "Difference",
    "EngineKey",
    "Key",
    "Kind",
    "RuntimeKey",
    "TimingKey",
    "calibration_key",
    "differences",
    "engine_key",
    "runtime_key",
    "timing_key",
]

#: Version of the recipe below. It is hashed too, so keys of two recipes can never be equal.
KEY_SCHEMA = 1


class Kind(Word):
    """What an entry holds. The value is the folder inside a store."""

    ENGINE = "engines"
    TIMING = "timing"
    CALIBRATION = "calibration"
    RUNTIME = "runtime"


@dataclass(frozen=True)
class Key:
    """Identity of one entry.

    Attributes:
        kind: What is stored under it.
        parts: Named parts, JSON values; equal parts give equal keys and nothing else does.
        name: Readable name for files outside a store. A label: it takes no part in equality, hash or digest.
        digest: 64 hex digits.
    """

    kind: Kind
    parts: Mapping[str, Any] = field(repr=False, hash=False, compare=False)
    name: str = field(default="", hash=False, compare=False)
    digest: str = field(default="", init=False)

    def __post_init__(self) -> None:
        _check_value(self.parts)
        object.__setattr__(self, "digest", digest_of(self.kind, self.parts))

    @property
    def file_name(self) -> str:
        """`name`, or the beginning of the digest where there is none."""
        return self.name or self.digest[:12]

    def __str__(self) -> str:
        return self.digest


class EngineKey(Key):
    """Identity of an engine: everything that can change the plan."""


class TimingKey(Key):
    """Identity of a timing cache: device and libraries; shared by all models."""


class RuntimeKey(Key):
    """Identity of a run-time kernel cache: GPU, driver and library."""


class CalibrationKey(Key):
    """Identity of a calibration table: model and calibration data; no GPU."""


def digest_of(kind: Kind, parts: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical form: JSON with sorted keys, ASCII only, no spaces, no floats."""
    document = {"kind": kind.value, "parts": parts, "schema": KEY_SCHEMA}
    return hashlib.sha256(canonical_json(document)).hexdigest()


def canonical_json(document: Any) -> bytes:
    """One byte string per JSON value, whatever the order of its mappings."""
    return json.dumps(document, sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode(
        "ascii"
    )


def _check_value(value: Any) -> None:
    """Refuse what a manifest could not give back unchanged to any reader."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"Names inside a key part must be text, not {name!r}.")
            _check_value(name)
            _check_value(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_value(item)
    elif isinstance(value, str):
        if printable(value) != value:
            raise ConfigError(f"A key part must be text that UTF-8 can hold, not {value!r}.")
    elif isinstance(value, float):
        # Floats print differently across languages and versions; identity must not depend on that.
        raise ConfigError(f"A key part cannot be a float ({value!r}); give it as text or as a whole number.")
    elif isinstance(value, int):
        if not -LARGEST_INT <= value <= LARGEST_INT:
            raise ConfigError(f"A key part must fit 64 bits, not {value}; give it as text.")
    elif value is not None:
        raise ConfigError(f"A key part must be a JSON value, not {value!r}.")


def engine_key(
    *,
    model: str,
    profiles: Sequence[ShapeProfile],
    options: BuildOptions,
    flavour: str,
    version: str,
    target: Target,
    plugins: Iterable[str] = (),
    calibration: str | None = None,
    qdq: Mapping[str, Any] | None = None,
    recipe: str | None = None,
    driver_in_key: bool = False,
    name: str = "",
) -> EngineKey:
    """The key of an engine.

    Args:
        model: Content digest of the model with all side files.
        profiles: Validated optimization profiles, in order.
        options: All that the build is told; options that cannot change the plan are left out.
        flavour: ``"tensorrt"`` or ``"tensorrt_rtx"``.
        version: Version of the loaded library.
        target: What the engine is for. How much of it counts follows `options.hardware_compatibility`.
        plugins: Digests of the plugin libraries' bytes.
        calibration: Digest of the calibration table.
        qdq: How the table becomes Q/DQ nodes of the model, where it does.
        recipe: The caller's own version of anything the library cannot see.
        driver_in_key: Let the driver version count too.
        name: Readable name; not part of the identity.
    """
    parts: dict[str, Any] = {
        "model": model,
        "profiles": [profile.to_json() for profile in profiles],
        "builder.flavour": flavour,
        "builder.version": version,
    }
    for option, value in options.to_json(plan_only=True).items():
        parts[f"options.{option}"] = value
    parts.update(_target_parts(flavour, target, options.hardware_level))
    if driver_in_key:
        parts["target.driver"] = target.driver
    # Absent parts stay absent, so that a part added later leaves the keys of requests without it unchanged.
    libraries = sorted(set(plugins))
    if libraries:
        parts["plugins"] = libraries
    if calibration is not None:
        parts["calibration"] = calibration
    if qdq is not None:
        parts["qdq"] = dict(qdq)
    if recipe is not None:
        parts["recipe"] = recipe
    return EngineKey(Kind.ENGINE, parts, name)


def _target_parts(flavour: str, target: Target, level: HardwareCompatibility | None) -> dict[str, Any]:
    parts: dict[str, Any] = {"target.os": target.os, "target.arch": target.arch}
    if flavour == "tensorrt_rtx":
        parts["target.compute_capabilities"] = list(target.compute_capabilities) or "portable"
        return parts
    parts["target.cuda"] = target.cuda
    if level is HardwareCompatibility.AMPERE_PLUS:
        parts["target.gpu"] = "ampere_plus"
    elif level is HardwareCompatibility.SAME_COMPUTE_CAPABILITY:
        parts["target.compute_capability"] = target.compute_capability
    else:
        parts["target.gpu"] = target.gpu
        parts["target.compute_capability"] = target.compute_capability
        parts["target.sm_count"] = target.sm_count
        parts["target.mig_profile"] = target.mig_profile
    return parts


def timing_key(*, flavour: str, version: str, target: Target, scope: str = "", name: str = "") -> TimingKey:
    """The key of a timing cache: one per device, TensorRT version, CUDA and driver, or narrower with a `scope`.

    Timings of one GPU are wrong on another, so the exact device always counts, whatever the engine's
    hardware-compatibility option says.

    Args:
        flavour: ``"tensorrt"``; TensorRT-RTX has no timing cache.
        version: Version of the loaded library.
        target: The device that measures.
        scope: Empty for the cache that all models share; a model's name for one of its own.
        name: Readable name; not part of the identity.
    """
    parts: dict[str, Any] = {
        "builder.flavour": flavour,
        "builder.version": version,
        **_target_parts(flavour, target, None),
        "target.driver": target.driver,
    }
    if scope:
        parts["scope"] = scope
    return TimingKey(Kind.TIMING, parts, name)


def runtime_key(*, flavour: str, version: str, target: Target, name: str = "") -> RuntimeKey:
    """The key of a run-time kernel cache: GPU, driver and library, shared by all engines.

    Args:
        flavour: ``"tensorrt_rtx"``; no other has one.
        version: Version of the loaded library.
        target: The GPU that runs, not the plan's set of compute capabilities.
        name: Readable name; not part of the identity.
    """
    parts: dict[str, Any] = {
        "builder.flavour": flavour,
        "builder.version": version,
        **{part: value for part, value in _target_parts("tensorrt", target, None).items() if part != "target.cuda"},
        "target.driver": target.driver,
    }
    return RuntimeKey(Kind.RUNTIME, parts, name)


def calibration_key(
    *,
    model: str,
    data: str,
    algorithm: str,
    batches: int | None,
    preprocess: str | None,
    runner: str | None = None,
    name: str = "",
) -> CalibrationKey:
    """The key of a calibration table.

    Args:
        model: Content digest of the model with all side files.
        data: Fingerprint of the calibration data.
        algorithm: Calibration algorithm.
        batches: How many batches are used; None for all.
        preprocess: The caller's tag for how samples are prepared.
        runner: What runs the model, where it is not ONNX Runtime.
        name: Readable name; not part of the identity.
    """
    parts: dict[str, Any] = {
        "model": model,
        "data": data,
        "algorithm": algorithm,
        "batches": batches,
        "preprocess": preprocess,
    }
    if runner is not None:
        parts["runner"] = runner
    return CalibrationKey(Kind.CALIBRATION, parts, name)


@dataclass(frozen=True)
class Difference:
    """One part in which two keys differ.

    Attributes:
        part: Name of the part, for example ``options.optimization_level``.
        wanted: Value in the request; None where it is not known or there is no such part.
        stored: Value in the stored entry; None likewise.
    """

    part: str
    wanted: Any
    stored: Any

    def __str__(self) -> str:
        return f"{self.part}: wanted {_brief(self.wanted)}, stored {_brief(self.stored)}"


def differences(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[Difference, ...]:
    """All parts in which two tables of key parts differ, in alphabetical order; none where the keys are equal."""
    return tuple(
        Difference(part, wanted.get(part), stored.get(part))
        for part in sorted(wanted.keys() | stored.keys())
        if part not in wanted or part not in stored or canonical_json(wanted[part]) != canonical_json(stored[part])
    )


def _brief(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, str) and value.startswith("blake3:"):
        return value[:19]
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value


def label_for(
    *,
    model_name: str,
    version: str | None,
    model: str,
    target: Target,
    profiles: Sequence[ShapeProfile],
    shapes: Sequence[Sequence[Any]] = (),
) -> str:
    """The readable name of an entry: ``{model_name}_{version}_{gpu_type}_{input_shape}``.

    Args:
        model_name: The caller's name for the model, or its file stem.
        version: The caller's version; the beginning of the model's digest where there is none.
        model: Content digest of the model.
        target: What the engine is for.
        profiles: Validated profiles.
        shapes: Static input shapes, used where there are no profiles.
    """
    if profiles:
        texts = ["+".join(_range_text(r) for r in profile.shapes.values()) for profile in profiles]
    else:
        texts = ["+".join("x".join(str(size) for size in dims) or "scalar" for dims in shapes)]
    return readable_name(
        model_name, version or model.rpartition(":")[2][:8], target.gpu_type, "_".join(filter(None, texts)) or "any"
    )


def _range_text(limits: Any) -> str:
    texts = ["x".join(map(str, dims)) or "scalar" for dims in (limits.min, limits.opt, limits.max)]
    return texts[0] if texts[0] == texts[2] else "-".join(texts)
