"""Build options: every knob of TensorRT that a build may turn, with the versions that have it.

The dataclass is also the table: each field carries, as metadata, where the option exists, whether it can change the
plan, and its documentation. Keys, adapters, error messages and the reference page all read the same table.
Version ranges come from introspecting the real bindings of every minor release from 8.6 to 11.4 and TensorRT-RTX 1.7.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from trt_warmcache import _checks as checks
from trt_warmcache._fields import strict_fields, to_enum
from trt_warmcache._words import Word
from trt_warmcache.errors import ConfigError
from trt_warmcache.tactics import TacticReplay

__all__ = [
    "BuildOptions",
    "EngineCapability",
    "HardwareCompatibility",
    "MemoryPool",
    "OptionSpec",
    "PrecisionConstraints",
    "Preset",
    "ProfilingVerbosity",
    "RefitMode",
    "TilingLevel",
    "TimingMode",
    "TimingScope",
    "option_specs",
]


class HardwareCompatibility(Word):
    """Which GPUs a classic plan runs on, and so how much of the target goes into the key."""

    NONE = "none"
    """The exact GPU."""
    SAME_COMPUTE_CAPABILITY = "same_compute_capability"
    AMPERE_PLUS = "ampere_plus"


class ProfilingVerbosity(Word):
    """How much of the network the plan remembers for profilers."""

    NONE = "none"
    LAYER_NAMES_ONLY = "layer_names_only"
    DETAILED = "detailed"


class TilingLevel(Word):
    """How hard TensorRT looks for on-chip tiling."""

    NONE = "none"
    FAST = "fast"
    MODERATE = "moderate"
    FULL = "full"


class RefitMode(Word):
    """Which weights may be exchanged in a finished engine."""

    ALL = "all"
    IDENTICAL = "identical"
    """Only with the very weights it was built from: what a stripped plan needs."""
    INDIVIDUAL = "individual"
    """Only the weights named in `refittable_weights`."""


class PrecisionConstraints(Word):
    """How strictly per-layer precisions bind TensorRT."""

    OBEY = "obey"
    PREFER = "prefer"


class TimingMode(Word):
    """What the build does with the timing cache."""

    USE = "use"
    """Load it, build, merge what was learnt."""
    OFF = "off"
    REQUIRE = "require"
    """Fail on a timing-cache miss instead of measuring."""
    EDITABLE = "editable"
    """Use it and make tactics listable and pinnable."""


class TimingScope(Word):
    """Who shares a timing cache."""

    DEVICE = "device"
    """All models built on one device with one TensorRT, CUDA and driver: layers of one model help the next."""
    MODEL = "model"
    """Only builds of the same model name; for caches that travel with a model."""


class EngineCapability(Word):
    """Which runtime the plan is restricted to."""

    STANDARD = "standard"
    SAFETY = "safety"
    DLA_STANDALONE = "dla_standalone"


class MemoryPool(Word):
    """Memory that a build may be given, in bytes."""

    WORKSPACE = "workspace"
    DLA_MANAGED_SRAM = "dla_managed_sram"
    DLA_LOCAL_DRAM = "dla_local_dram"
    DLA_GLOBAL_DRAM = "dla_global_dram"
    TACTIC_DRAM = "tactic_dram"
    TACTIC_SHARED_MEMORY = "tactic_shared_memory"


class Preset(Word):
    """Starting points for how long TensorRT may search."""

    FAST = "fast"
    """The first usable engine soonest."""
    BALANCED = "balanced"
    """TensorRT's own defaults."""
    MAX = "max"
    """The fastest engine, whatever the build costs."""


@dataclass(frozen=True)
class OptionSpec:
    """What is known about one option.

    Attributes:
        name: Field name in :class:`BuildOptions`.
        doc: One or two sentences for the reference page.
        since: First classic release line that has it, as ``(major, minor)``; None if no classic release has.
        until: Last classic release line that has it; None if still there.
        rtx: Whether TensorRT-RTX has it and honours it.
        affects_plan: Whether it can change the plan; only these go into the engine key.
        instead: What to do where the option does not exist.
        default: The value that TensorRT has by itself in every version with the option, so that giving it is the same
            request as leaving the option out; None where there is no such value, or it may move.
    """

    name: str
    doc: str
    since: tuple[int, int] | None = (8, 6)
    until: tuple[int, int] | None = None
    rtx: bool = True
    affects_plan: bool = True
    instead: str = ""
    default: Any = None

    def available(self, flavour: str, version: tuple[int, ...]) -> bool:
        """Whether this flavour and version of TensorRT honour the option."""
        if flavour == "tensorrt_rtx":
            return self.rtx
        line = tuple(version[:2])
        return self.since is not None and self.since <= line and (self.until is None or line <= self.until)

    def where(self) -> str:
        """The versions that have it, for people."""
        places = []
        if self.since is not None:
            first = ".".join(map(str, self.since))
            last = f" to {'.'.join(map(str, self.until))}" if self.until else " and later"
            if self.until == self.since:
                last = " only"
            places.append(f"TensorRT {first}{last}")
        if self.rtx:
            places.append("TensorRT-RTX")
        return " and ".join(places)


_FROM_MODEL = "There precision comes from the model: convert its weights, or insert Q/DQ nodes, before building."


def _option(
    doc: str,
    *,
    since: tuple[int, int] | None = (8, 6),
    until: tuple[int, int] | None = None,
    rtx: bool = True,
    affects_plan: bool = True,
    instead: str = "",
    default: Any = None,
) -> Any:
    spec = OptionSpec("", doc, since, until, rtx, affects_plan, instead, default)
    return dataclasses.field(default=None, metadata={"spec": spec})


def _switch(doc: str, **where: Any) -> Any:
    """An option that is off unless it is turned on."""
    return _option(doc, default=False, **where)


@strict_fields
@dataclass(frozen=True, kw_only=True, repr=False)
class BuildOptions:
    """Everything a build can be told. None, the default of every field, leaves TensorRT's own default in force.

    Each field's documentation and availability is in the table of :func:`option_specs` and on the reference page.

    Raises:
        ConfigError: An unknown field (naming the nearest known one) or a value out of range.
    """

    fp16: bool | None = _switch("Allow FP16 layers.", until=(10, 16), rtx=False, instead=_FROM_MODEL)
    bf16: bool | None = _switch("Allow BF16 layers.", since=(10, 0), until=(10, 16), rtx=False, instead=_FROM_MODEL)
    int8: bool | None = _switch(
        "Allow INT8 layers; needs calibration or a Q/DQ model.", until=(10, 16), rtx=False, instead=_FROM_MODEL
    )
    fp8: bool | None = _switch("Allow FP8 layers.", until=(10, 16), rtx=False, instead=_FROM_MODEL)
    int4: bool | None = _switch("Allow INT4 weights.", since=(10, 1), until=(10, 16), rtx=False, instead=_FROM_MODEL)
    fp4: bool | None = _switch("Allow FP4 weights.", since=(10, 8), until=(10, 16), rtx=False, instead=_FROM_MODEL)
    strongly_typed: bool | None = _switch(
        "Take every tensor's type from the model and never choose another.",
        since=(10, 0),
        until=(10, 16),
        rtx=False,
        instead="Networks are always strongly typed there; leave the option out.",
    )
    precision_constraints: PrecisionConstraints | Literal["obey", "prefer"] | None = _option(
        "How strictly `layer_precisions` bind.", until=(10, 16), rtx=False, instead=_FROM_MODEL
    )
    layer_precisions: Mapping[str, str] | Sequence[tuple[str, str]] | None = _option(
        "Precision by layer name or pattern (shell wildcards): float32, float16, bfloat16 or int8; a mapping or a list "
        "of pairs. Later patterns win, so their order counts. Only a hint unless `precision_constraints` says otherwise.",
        until=(10, 16),
        rtx=False,
        instead=_FROM_MODEL,
    )
    calibrate_before_fusion: bool | None = _switch(
        "Calibrate before layers are fused, so that the table fits every GPU.",
        until=(10, 16),
        rtx=False,
        instead=_FROM_MODEL,
    )
    tf32: bool | None = _option("Allow TF32 for float32 layers; on by default.")
    sparse_weights: bool | None = _switch("Look for 2:4 structured sparsity in the weights.")
    strict_nans: bool | None = _switch("Keep NaN semantics exact.", since=(10, 6))
    distributive_independence: bool | None = _switch("Compute distributive axes independently.", since=(10, 12))
    debug: bool | None = _switch("Synchronize after every layer, for debugging.")
    engine_capability: EngineCapability | Literal["standard", "safety", "dla_standalone"] | None = _option(
        "The runtime that the plan is restricted to.",
        rtx=False,
        instead="TensorRT-RTX has one runtime.",
        default=EngineCapability.STANDARD,
    )
    optimization_level: int | None = _option(
        "How hard TensorRT optimizes, 0 (first tactic found) to 5; its default is 3."
    )
    avg_timing_iterations: int | None = _option(
        "How many runs a kernel's timing is averaged over.",
        rtx=False,
        instead="TensorRT-RTX does not time kernels when it builds.",
    )
    max_tactics: int | None = _option(
        "At most this many tactics are timed per layer.",
        since=(10, 4),
        rtx=False,
        instead="TensorRT-RTX has the setting and ignores it.",
    )
    tactic_sources: Sequence[str] | None = _option(
        "Names of the kernel libraries to choose from, for example EDGE_MASK_CONVOLUTIONS; an empty tuple turns all off.",
        rtx=False,
        instead="TensorRT-RTX chooses kernels on the user's machine.",
    )
    tactic_heuristic: bool | None = _switch(
        "Choose tactics by a heuristic before timing them.",
        until=(8, 6),
        rtx=False,
        instead="From 10.0 the optimization level decides that.",
    )
    tactics: TacticReplay | Mapping[str, Any] | None = _option(
        "Build with these tactics: layers pin through an algorithm selector (8.6 to 10.16), timing-cache entries "
        "through an editable timing cache (10.8 and later).",
        rtx=False,
        instead="TensorRT-RTX chooses kernels on the user's machine.",
    )
    record_tactics: bool | None = _option(
        "Record the tactics of this build in its entry, for `tactics` of other builds.",
        rtx=False,
        affects_plan=False,
        instead="TensorRT-RTX chooses kernels on the user's machine.",
    )
    tiling: TilingLevel | Literal["none", "fast", "moderate", "full"] | None = _option(
        "Effort spent on on-chip tiling.",
        since=(10, 8),
        rtx=False,
        instead="TensorRT-RTX has the setting and ignores it.",
        default=TilingLevel.NONE,
    )
    l2_limit_for_tiling: int | None = _option(
        "L2 cache that tiling may count on, in bytes.",
        since=(10, 8),
        rtx=False,
        instead="TensorRT-RTX has the setting and ignores it.",
    )
    max_aux_streams: int | None = _option("At most this many auxiliary CUDA streams.")
    workspace: int | None = _option("Scratch memory for layers, in bytes; short for memory_pools={'workspace': ...}.")
    memory_pools: Mapping[MemoryPool, int] | Mapping[str, int] | None = _option(
        "Limits of further memory pools, in bytes."
    )
    profiling_verbosity: ProfilingVerbosity | Literal["none", "layer_names_only", "detailed"] | None = _option(
        "What the plan remembers of the network for profilers."
    )
    hardware_compatibility: HardwareCompatibility | Literal["none", "same_compute_capability", "ampere_plus"] | None = (
        _option(
            "Which other GPUs may run the plan (same_compute_capability from 10.9).",
            rtx=False,
            instead="TensorRT-RTX plans name compute capabilities: Target(compute_capabilities=...).",
            default=HardwareCompatibility.NONE,
        )
    )
    version_compatible: bool | None = _switch(
        "Make a plan that later TensorRT versions load. It then carries host code: load it from trusted stores only.",
        rtx=False,
        instead="TensorRT-RTX plans are tied to their release.",
    )
    exclude_lean_runtime: bool | None = _switch(
        "Leave the lean runtime out of a version-compatible plan.",
        rtx=False,
        instead="TensorRT-RTX plans are tied to their release.",
    )
    refit: RefitMode | Literal["all", "identical", "individual"] | None = _option(
        "Which weights may be exchanged later (identical from 10.0, individual from 10.2)."
    )
    refittable_weights: Sequence[str] | None = _option(
        "Names of the weights that refit='individual' marks.", since=(10, 2)
    )
    strip_plan: bool | None = _switch("Leave refittable weights out of the plan.", since=(10, 0))
    weight_streaming: bool | None = _switch("Let weights stay in host memory and stream in.", since=(10, 0))
    preview_features: Mapping[str, bool] | None = _option(
        "Preview features by stable name (without the version suffix), for example runtime_activation_resize."
    )
    dla_core: int | None = _option(
        "Run on this deep-learning accelerator core.", rtx=False, instead="TensorRT-RTX has no DLA."
    )
    gpu_fallback: bool | None = _switch(
        "Let layers that the DLA cannot run fall back to the GPU.", rtx=False, instead="TensorRT-RTX has no DLA."
    )
    direct_io: bool | None = _switch("Forbid reformatting at the network's inputs and outputs.")
    runtime_platform: str | None = _option(
        "Platform that will run the plan, for example windows_amd64.",
        since=(10, 2),
        rtx=False,
        instead="TensorRT-RTX rejects it; build on the platform itself.",
        default="same_as_build",
    )
    require_user_allocation: bool | None = _switch(
        "The application allocates all device memory.", since=None, instead="Only TensorRT-RTX has it."
    )
    build_route: str | None = _option(
        "Compiler knobs as one string.", since=(11, 1), rtx=False, instead="There is nothing to route there."
    )
    native_instancenorm: bool | None = _option("Parse InstanceNormalization with TensorRT's own layer.")
    plugin_override: bool | None = _switch(
        "Let plugins take the place of operators that TensorRT has itself.",
        since=(10, 15),
        rtx=False,
        instead="Rename the plugin's operator in the model.",
    )
    timing: TimingMode | Literal["use", "off", "require", "editable"] | None = _option(
        "What to do with the timing cache (require from 10.0, editable from 10.8).",
        rtx=False,
        affects_plan=False,
        instead="TensorRT-RTX has no timing cache; its calls do nothing.",
    )
    timing_scope: TimingScope | Literal["device", "model"] | None = _option(
        "Who shares the timing cache: all models of the device, which is the default, or one model.",
        rtx=False,
        affects_plan=False,
        instead="TensorRT-RTX has no timing cache.",
    )
    compilation_cache: bool | None = _option(
        "Keep compiled kernels inside the timing cache; on by default.",
        since=(10, 0),
        rtx=False,
        affects_plan=False,
        instead="TensorRT-RTX has no timing cache.",
    )
    monitor_memory: bool | None = _option(
        "Log the memory that the build takes; see the logger trt_warmcache.tensorrt.", since=(10, 6), affects_plan=False
    )
    builder_threads: int | None = _option("Threads that the builder may use.", affects_plan=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                check: checks.Check = _CHECKS.get(field.name, checks.flag)
                object.__setattr__(self, field.name, check(f"BuildOptions.{field.name}", value))
        pools = dict(self.memory_pools or {})
        if MemoryPool.WORKSPACE in pools:
            # Two spellings of one limit must be one key.
            if self.workspace is not None:
                raise ConfigError("The workspace is given twice, as workspace and in memory_pools; keep one.")
            size = _CHECKS["workspace"]("BuildOptions.memory_pools['workspace']", pools.pop(MemoryPool.WORKSPACE))
            object.__setattr__(self, "workspace", size)
            object.__setattr__(self, "memory_pools", pools or None)
        if self.refittable_weights is not None and self.refit is not RefitMode.INDIVIDUAL:
            raise ConfigError("refittable_weights only means something with refit='individual'.")
        if self.exclude_lean_runtime and not self.version_compatible:
            raise ConfigError("exclude_lean_runtime only means something with version_compatible=True.")
        if isinstance(self.tactics, TacticReplay) and self.tactics.entries:
            if self.timing is TimingMode.OFF:
                raise ConfigError("tactics of a timing cache cannot be pinned with timing='off'.")
            if self.optimization_level == 0:
                raise ConfigError(
                    "optimization_level=0 takes no notice of a timing cache, so no tactics can be pinned."
                )
        precisions = [name for name in _PRECISIONS if getattr(self, name)]
        if self.strongly_typed and precisions:
            raise ConfigError(
                f"A strongly typed network takes its precisions from the model; leave {', '.join(precisions)} out, or strongly_typed."
            )

    def __hash__(self) -> int:
        # Of the options set, the names only: forty values would be frozen at every request, and equality decides
        # anyway. Requests of one process rarely differ in anything but values.
        return hash(tuple([name for name, value in self.__dict__.items() if value is not None]))

    def __repr__(self) -> str:
        return f"BuildOptions({', '.join(f'{spec.name}={_plain(value)!r}' for spec, value in self.chosen())})"

    @classmethod
    def preset(
        cls,
        preset: Preset | Literal["fast", "balanced", "max"],
        *,
        version: tuple[int, ...] | str,
        flavour: str = "tensorrt",
        **overrides: Any,
    ) -> BuildOptions:
        """Options that narrow or widen TensorRT's search, mapped to what a version offers.

        Args:
            preset: See :class:`Preset`.
            version: TensorRT's version, for example ``(10, 13)`` or ``"10.13.3"``.
            flavour: ``"tensorrt"`` or ``"tensorrt_rtx"``, as ``EngineBuilder.flavour`` has it.
            **overrides: Fields to set on top.

        Raises:
            ConfigError: An unknown preset or flavour, or something that is no version.
        """
        if flavour not in {"tensorrt", "tensorrt_rtx"}:
            raise ConfigError(f"flavour must be 'tensorrt' or 'tensorrt_rtx', not {flavour!r}.")
        numbers = _version_numbers(version)
        wanted: dict[Preset, dict[str, Any]] = {
            Preset.FAST: {
                "optimization_level": 1,
                "max_tactics": 1,
                "avg_timing_iterations": 1,
                "tactic_heuristic": True,
            },
            Preset.BALANCED: {},
            Preset.MAX: {"optimization_level": 5, "avg_timing_iterations": 8, "tiling": TilingLevel.FULL},
        }
        specs = option_specs()
        chosen = {
            name: value
            for name, value in wanted[to_enum(Preset, preset, "preset")].items()
            if specs[name].available(flavour, numbers)
        }
        return cls(**{**chosen, **overrides})

    @property
    def hardware_level(self) -> HardwareCompatibility:
        """`hardware_compatibility`, with the default spelled out."""
        return HardwareCompatibility(self.hardware_compatibility or HardwareCompatibility.NONE)

    def chosen(self) -> Iterator[tuple[OptionSpec, Any]]:
        """The options that were set, with what is known about them."""
        for name, spec in option_specs().items():
            value = getattr(self, name)
            if value is not None:
                yield spec, value

    def to_json(self, *, plan_only: bool = False) -> dict[str, Any]:
        """The options that were set as plain JSON values; with `plan_only` just those that can change the plan.

        An option set to what TensorRT does anyway cannot change it, and must not give another key.
        """
        return {
            spec.name: _plain(value)
            for spec, value in self.chosen()
            if not plan_only or (spec.affects_plan and value != spec.default)
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BuildOptions:
        """The inverse of :meth:`to_json`."""
        return cls(**data)

    def require_available(self, flavour: str, version: tuple[int, ...]) -> None:
        """Refuse options, and values of options, that a flavour and version lack.

        Raises:
            ConfigError: Naming the option, the versions that have it, and what to do instead.
        """
        here = f"{'TensorRT-RTX' if flavour == 'tensorrt_rtx' else 'TensorRT'} {'.'.join(map(str, version[:3]))}"
        for spec, value in self.chosen():
            if not spec.available(flavour, version):
                raise ConfigError(
                    f"Option {spec.name!r} does not exist in {here}; it needs {spec.where()}. {spec.instead}".rstrip()
                )
            for part in _parts(value):
                found = VALUE_RANGES.get((spec.name, part), spec)
                if not found.available(flavour, version):
                    raise ConfigError(f"{spec.name}={part!r} does not exist in {here}; it needs {found.where()}.")


#: Precisions that TensorRT may choose by itself where it is allowed to.
_PRECISIONS = ("fp16", "bf16", "int8", "fp8", "int4", "fp4")


def _value(
    since: tuple[int, int] | None = (8, 6), until: tuple[int, int] | None = None, *, rtx: bool = True
) -> OptionSpec:
    return OptionSpec("", "", since, until, rtx)


#: Values that not every version with their option has.
VALUE_RANGES: Mapping[tuple[str, str], OptionSpec] = {
    ("hardware_compatibility", "same_compute_capability"): _value((10, 9), rtx=False),
    ("refit", "identical"): _value((10, 0)),
    ("refit", "individual"): _value((10, 2)),
    ("timing", "require"): _value((10, 0), rtx=False),
    ("timing", "editable"): _value((10, 8), rtx=False),
    ("tactics", "layers"): _value(until=(10, 16), rtx=False),
    ("tactics", "entries"): _value((10, 8), rtx=False),
    ("memory_pools", "dla_managed_sram"): _value(rtx=False),
    ("memory_pools", "dla_local_dram"): _value(rtx=False),
    ("memory_pools", "dla_global_dram"): _value(rtx=False),
    ("memory_pools", "tactic_shared_memory"): _value((10, 0)),
    ("layer_precisions", "bfloat16"): _value((10, 0), rtx=False),
    ("tactic_sources", "CUBLAS"): _value(until=(10, 16), rtx=False),
    ("tactic_sources", "CUBLAS_LT"): _value(until=(10, 16), rtx=False),
    ("tactic_sources", "CUDNN"): _value(until=(10, 16), rtx=False),
    ("preview_features", "aliased_plugin_io"): _value((10, 3)),
    ("preview_features", "disable_external_tactic_sources_for_core"): _value(until=(8, 6), rtx=False),
    ("preview_features", "faster_dynamic_shapes"): _value(until=(8, 6), rtx=False),
    ("preview_features", "multidevice_runtime"): _value((10, 16), (10, 16), rtx=False),
    ("preview_features", "profile_sharing"): _value(until=(10, 16), rtx=False),
    ("preview_features", "runtime_activation_resize"): _value((10, 10)),
}


def _parts(value: Any) -> Iterator[str]:
    """The names inside a value that may exist in some versions only."""
    plain = _plain(value)
    if isinstance(plain, str):
        yield plain
    elif isinstance(plain, Mapping):
        yield from plain
    elif isinstance(plain, list):
        for item in plain:
            yield item[1] if isinstance(item, list) else item


def _version_numbers(version: object) -> tuple[int, ...]:
    parts = version.split(".") if isinstance(version, str) else version
    try:
        numbers = tuple(int(part) for part in parts)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) < 2:
        raise ConfigError(f"version must be a version of TensorRT such as (10, 13) or '10.13.3', not {version!r}.")
    return numbers


@functools.cache
def option_specs() -> Mapping[str, OptionSpec]:
    """The table of all options, by name, in declaration order."""
    return {
        field.name: dataclasses.replace(field.metadata["spec"], name=field.name)
        for field in dataclasses.fields(BuildOptions)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, TacticReplay):
        return value.to_json()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


_CHECKS: dict[str, checks.Check] = {
    "precision_constraints": checks.choice(PrecisionConstraints),
    "layer_precisions": checks.layer_rules,
    "engine_capability": checks.choice(EngineCapability),
    "optimization_level": checks.whole(0, 5),
    "avg_timing_iterations": checks.whole(1),
    "max_tactics": checks.whole(1),
    "tactic_sources": checks.upper_names,
    "tactics": lambda _field, value: TacticReplay.from_json(value),
    "tiling": checks.choice(TilingLevel),
    "l2_limit_for_tiling": checks.whole(0),
    "max_aux_streams": checks.whole(0),
    "workspace": checks.whole(1),
    "memory_pools": checks.mapping(checks.choice(MemoryPool), checks.whole(0)),
    "profiling_verbosity": checks.choice(ProfilingVerbosity),
    "hardware_compatibility": checks.choice(HardwareCompatibility),
    "refit": checks.choice(RefitMode),
    # None at all is what an absent list says too.
    "refittable_weights": lambda field, value: checks.names(field, value) or None,
    "preview_features": checks.mapping(checks.stable_name, checks.flag),
    "dla_core": checks.whole(0),
    "runtime_platform": checks.lower_text,
    "build_route": checks.text,
    "timing": checks.choice(TimingMode),
    "timing_scope": checks.choice(TimingScope),
    "builder_threads": checks.whole(1),
}
