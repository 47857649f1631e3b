"""Build options applied to an ``IBuilderConfig``: one function per option, shared by both flavours.

Members are reached by name and only when their option was asked for, so one table serves every version; enum numbers
move between releases and are never used.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trt_warmcache.errors import ConfigError
from trt_warmcache.options import BuildOptions, HardwareCompatibility, PrecisionConstraints, RefitMode, TimingMode

__all__ = ["APPLY", "Setup", "apply_options", "effective_config", "network_flags"]


@dataclass(frozen=True)
class Setup:
    """What an option may touch.

    Attributes:
        trt: The bindings' module.
        builder: ``Builder``.
        network: ``INetworkDefinition``, already parsed.
        config: ``IBuilderConfig``.
    """

    trt: Any
    builder: Any
    network: Any
    config: Any

    def flag(self, name: str, on: bool = True) -> None:
        """Set or clear a builder flag by name."""
        flag = self.member("BuilderFlag", name)
        if on:
            self.config.set_flag(flag)
        else:
            self.config.clear_flag(flag)

    def member(self, enum: str, name: str) -> Any:
        """A member of one of the bindings' enums.

        Raises:
            ConfigError: This version lacks it.
        """
        kind = getattr(self.trt, enum, None)
        member = getattr(kind, name, None)
        if member is None:
            known = ", ".join(sorted(getattr(kind, "__members__", {})))
            raise ConfigError(
                f"{enum}.{name} does not exist in the installed {self.trt.__name__} {self.trt.__version__}; it has: {known}."
            )
        return member


def _flag(name: str) -> Callable[[Setup, bool], None]:
    return lambda setup, on: setup.flag(name, on)


def _property(name: str) -> Callable[[Setup, Any], None]:
    return lambda setup, value: setattr(setup.config, name, value)


def _enum_property(name: str, enum: str) -> Callable[[Setup, Any], None]:
    return lambda setup, value: setattr(
        setup.config, name, setup.member(enum, str(getattr(value, "value", value)).upper())
    )


def _tactic_sources(setup: Setup, names: tuple[str, ...]) -> None:
    mask = 0
    for name in names:
        mask |= 1 << int(setup.member("TacticSource", name.upper()))
    if not setup.config.set_tactic_sources(mask):
        raise ConfigError(f"TensorRT refused the tactic sources {', '.join(names) or '(none)'}.")


def _workspace(setup: Setup, size: int) -> None:
    setup.config.set_memory_pool_limit(setup.member("MemoryPoolType", "WORKSPACE"), size)


def _memory_pools(setup: Setup, pools: Mapping[Any, int]) -> None:
    for pool, size in pools.items():
        setup.config.set_memory_pool_limit(setup.member("MemoryPoolType", pool.value.upper()), size)


def _refit(setup: Setup, mode: RefitMode) -> None:
    setup.flag(
        {RefitMode.ALL: "REFIT", RefitMode.IDENTICAL: "REFIT_IDENTICAL", RefitMode.INDIVIDUAL: "REFIT_INDIVIDUAL"}[mode]
    )


def _refittable(setup: Setup, names: tuple[str, ...]) -> None:
    for name in names:
        if not setup.network.mark_weights_refittable(name):
            raise ConfigError(f"The network has no weights {name!r} to mark as refittable.")


def _preview(setup: Setup, features: Mapping[str, bool]) -> None:
    members = dict(getattr(setup.trt.PreviewFeature, "__members__", {}))
    # Names end in the version that introduced them (RUNTIME_ACTIVATION_RESIZE_10_10); the stable part is before it.
    stable = {_without_version(name): member for name, member in members.items()}
    for name, on in features.items():
        member = stable.get(_without_version(name.upper()))
        if member is None:
            raise ConfigError(
                f"Preview feature {name!r} does not exist in the installed version; it has: {', '.join(sorted(stable)).lower() or 'none'}."
            )
        setup.config.set_preview_feature(member, on)


def _without_version(name: str) -> str:
    words = name.split("_")
    while words and words[-1].isdigit():
        words.pop()
    return "_".join(words)


def _dla(setup: Setup, core: int) -> None:
    if core >= setup.builder.num_DLA_cores:
        raise ConfigError(f"dla_core={core}: this machine has {setup.builder.num_DLA_cores} DLA cores.")
    setup.config.default_device_type = setup.member("DeviceType", "DLA")
    setup.config.DLA_core = core


def _calibrate_before_fusion(setup: Setup, on: bool) -> None:
    flag = setup.member("QuantizationFlag", "CALIBRATE_BEFORE_FUSION")
    if on:
        setup.config.set_quantization_flag(flag)
    else:
        setup.config.clear_quantization_flag(flag)


def _precision_constraints(setup: Setup, how: PrecisionConstraints) -> None:
    setup.flag(f"{how.value.upper()}_PRECISION_CONSTRAINTS")


_LAYER_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int8": "INT8"}


def _layer_precisions(setup: Setup, rules: tuple[tuple[str, str], ...]) -> None:
    unused = {pattern for pattern, _ in rules}
    for index in range(setup.network.num_layers):
        layer = setup.network.get_layer(index)
        for pattern, kind in rules:
            if fnmatch.fnmatchcase(layer.name, pattern):
                layer.precision = setup.member("DataType", _LAYER_TYPES[kind])
                unused.discard(pattern)
    if unused:
        raise ConfigError(f"layer_precisions: no layer matches {', '.join(sorted(map(repr, unused)))}.")


def _timing(setup: Setup, mode: TimingMode) -> None:
    flag = {
        TimingMode.OFF: "DISABLE_TIMING_CACHE",
        TimingMode.REQUIRE: "ERROR_ON_TIMING_CACHE_MISS",
        TimingMode.EDITABLE: "EDITABLE_TIMING_CACHE",
    }
    if mode in flag:
        setup.flag(flag[mode])


def _hardware(setup: Setup, level: HardwareCompatibility) -> None:
    setup.config.hardware_compatibility_level = setup.member("HardwareCompatibilityLevel", level.value.upper())


def _threads(setup: Setup, count: int) -> None:
    setup.builder.max_threads = count


def _elsewhere(_setup: Setup, _value: Any) -> None:
    """The option takes effect when the network is created or parsed; see `network_flags` and the adapter."""


#: What each option does. A test holds this table and the options against each other.
APPLY: Mapping[str, Callable[[Setup, Any], None]] = {
    "fp16": _flag("FP16"),
    "bf16": _flag("BF16"),
    "int8": _flag("INT8"),
    "fp8": _flag("FP8"),
    "int4": _flag("INT4"),
    "fp4": _flag("FP4"),
    "strongly_typed": _elsewhere,
    "precision_constraints": _precision_constraints,
    "layer_precisions": _layer_precisions,
    "calibrate_before_fusion": _calibrate_before_fusion,
    "tf32": _flag("TF32"),
    "sparse_weights": _flag("SPARSE_WEIGHTS"),
    "strict_nans": _flag("STRICT_NANS"),
    "distributive_independence": _flag("DISTRIBUTIVE_INDEPENDENCE"),
    "optimization_level": _property("builder_optimization_level"),
    "avg_timing_iterations": _property("avg_timing_iterations"),
    "max_tactics": _property("max_num_tactics"),
    "tactic_sources": _tactic_sources,
    "tiling": _enum_property("tiling_optimization_level", "TilingOptimizationLevel"),
    "l2_limit_for_tiling": _property("l2_limit_for_tiling"),
    "max_aux_streams": _property("max_aux_streams"),
    "workspace": _workspace,
    "memory_pools": _memory_pools,
    "profiling_verbosity": _enum_property("profiling_verbosity", "ProfilingVerbosity"),
    "hardware_compatibility": _hardware,
    "version_compatible": _flag("VERSION_COMPATIBLE"),
    "exclude_lean_runtime": _flag("EXCLUDE_LEAN_RUNTIME"),
    "refit": _refit,
    "refittable_weights": _refittable,
    "strip_plan": _flag("STRIP_PLAN"),
    "weight_streaming": _flag("WEIGHT_STREAMING"),
    "preview_features": _preview,
    "dla_core": _dla,
    "gpu_fallback": _flag("GPU_FALLBACK"),
    "direct_io": _flag("DIRECT_IO"),
    "runtime_platform": _enum_property("runtime_platform", "RuntimePlatform"),
    "require_user_allocation": _flag("REQUIRE_USER_ALLOCATION"),
    "build_route": _property("build_route"),
    "native_instancenorm": _elsewhere,
    "timing": _timing,
    "builder_threads": _threads,
}


def apply_options(setup: Setup, options: BuildOptions) -> None:
    """Turn every option that was set.

    Raises:
        ConfigError: The installed version refuses one.
    """
    for spec, value in options.chosen():
        try:
            APPLY[spec.name](setup, value)
        except (AttributeError, TypeError, RuntimeError) as error:
            raise ConfigError(
                f"The installed {setup.trt.__name__} {setup.trt.__version__} refused option {spec.name}={value!r}: {error}"
            ) from error


def network_flags(trt: Any, options: BuildOptions) -> int:
    """The flags of ``Builder.create_network``. Bit numbers changed meaning between majors, so each is asked for by name."""
    kinds = trt.NetworkDefinitionCreationFlag
    flags = 0
    # Up to 8.x networks have an implicit batch unless told otherwise, and ONNX needs it explicit; later releases
    # ignore or lack the flag.
    names = ["EXPLICIT_BATCH"] if trt.__version__.startswith("8.") else []
    if options.strongly_typed:
        names.append("STRONGLY_TYPED")
    for name in names:
        flags |= 1 << int(getattr(kinds, name))
    return flags


#: Properties worth recording, where a version has them. Device-dependent defaults (workspace) are left out.
_RECORDED = (
    "builder_optimization_level",
    "avg_timing_iterations",
    "max_num_tactics",
    "max_aux_streams",
    "tiling_optimization_level",
    "l2_limit_for_tiling",
    "profiling_verbosity",
    "runtime_platform",
    "default_device_type",
    "engine_capability",
)


def effective_config(setup: Setup) -> dict[str, Any]:
    """The configuration as TensorRT holds it, with names instead of enum numbers."""
    config = setup.config
    found: dict[str, Any] = {
        "flags": sorted(name for name, flag in setup.trt.BuilderFlag.__members__.items() if config.get_flag(flag)),
        "profiles": config.num_optimization_profiles,
    }
    for name in _RECORDED:
        value = getattr(config, name, None)
        if value is not None:
            found[name] = value if isinstance(value, (bool, int, str)) and not hasattr(value, "name") else value.name
    return found
