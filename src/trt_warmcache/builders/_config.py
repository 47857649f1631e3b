"""Build options applied to an ``IBuilderConfig``: one function per option, shared by both flavours.

Members are reached by name and only when their option was asked for, so one table serves every version; enum numbers
move between releases and are never used.
"""

from __future__ import annotations

import fnmatch
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trt_warmcache._checks import stable_name
from trt_warmcache.builders._log import TrtLog
from trt_warmcache.errors import ConfigError
from trt_warmcache.options import (
    BuildOptions,
    HardwareCompatibility,
    MemoryPool,
    PrecisionConstraints,
    RefitMode,
    TimingMode,
)

__all__ = [
    "APPLY",
    "Setup",
    "apply_options",
    "canonical_name",
    "disagreements",
    "effective_config",
    "network_flags",
    "without_deprecation",
]

#: Second names of one number. Which of the two ``.name`` answers depends on the release, so records use one of them.
_ALIASES = {
    "BuilderFlag": {"WEIGHTLESS": "STRIP_PLAN"},
    "EngineCapability": {"DEFAULT": "STANDARD", "SAFE_GPU": "SAFETY", "SAFE_DLA": "DLA_STANDALONE"},
}

_FILTERS = threading.Lock()


@contextmanager
def without_deprecation() -> Iterator[None]:
    """Let a deprecated but needed call of the bindings pass; with warnings as errors they raise SystemError."""
    # Python keeps warning filters per process, so the change is kept short and to one thread at a time.
    with _FILTERS, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def canonical_name(enum: str, name: str) -> str:
    """One name for an enum member that has two."""
    return _ALIASES.get(enum, {}).get(name, name)


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


_REFIT_FLAGS = {
    RefitMode.ALL: "REFIT",
    RefitMode.IDENTICAL: "REFIT_IDENTICAL",
    RefitMode.INDIVIDUAL: "REFIT_INDIVIDUAL",
}


def _refit(setup: Setup, mode: RefitMode) -> None:
    setup.flag(_REFIT_FLAGS[mode])


def _refittable(setup: Setup, names: tuple[str, ...]) -> None:
    for name in names:
        if not setup.network.mark_weights_refittable(name):
            raise ConfigError(f"The network has no weights {name!r} to mark as refittable.")


def _preview(setup: Setup, features: Mapping[str, bool]) -> None:
    members = dict(getattr(setup.trt.PreviewFeature, "__members__", {}))
    stable = {stable_name("PreviewFeature", name): member for name, member in members.items()}
    for name, on in features.items():
        member = stable.get(name)
        if member is None:
            raise ConfigError(
                f"Preview feature {name!r} does not exist in the installed version; it has: {', '.join(sorted(stable)) or 'none'}."
            )
        setup.config.set_preview_feature(member, on)


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
            # TensorRT's own names have brackets in them, which mean something else in a pattern.
            if layer.name == pattern or fnmatch.fnmatchcase(layer.name, pattern):
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


def _compilation_cache(setup: Setup, on: bool) -> None:
    setup.flag("DISABLE_COMPILATION_CACHE", not on)


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
    "debug": _flag("DEBUG"),
    "engine_capability": _enum_property("engine_capability", "EngineCapability"),
    "optimization_level": _property("builder_optimization_level"),
    "avg_timing_iterations": _property("avg_timing_iterations"),
    "max_tactics": _property("max_num_tactics"),
    "tactic_sources": _tactic_sources,
    "tactic_heuristic": _flag("ENABLE_TACTIC_HEURISTIC"),
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
    "plugin_override": _elsewhere,
    "tactics": _elsewhere,
    "record_tactics": _elsewhere,
    "timing": _timing,
    "timing_scope": _elsewhere,
    "compilation_cache": _compilation_cache,
    "monitor_memory": _flag("MONITOR_MEMORY"),
    "builder_threads": _threads,
}


def apply_options(setup: Setup, options: BuildOptions, messages: TrtLog) -> None:
    """Turn every option that was set, and make sure that TensorRT took it.

    Raises:
        ConfigError: The installed version refuses one.
    """
    plain = options.to_json()
    for spec, value in options.chosen():
        try:
            # A setter that refuses raises nothing; it logs an error and leaves things as they were.
            with messages.aside() as told:
                APPLY[spec.name](setup, value)
        except (AttributeError, TypeError, RuntimeError) as error:
            raise _refused(setup, f"{spec.name}={plain[spec.name]!r}: {error}") from error
        if told:
            raise _refused(setup, f"{spec.name}={plain[spec.name]!r}: {told[0]}")
    with messages.aside():
        effective = effective_config(setup, options)
    for name, found, value in disagreements(options, effective):
        raise _refused(setup, f"a setting in silence: {name} was to be {value} and stayed {found}.")


def _refused(setup: Setup, what: str) -> ConfigError:
    return ConfigError(f"The installed {setup.trt.__name__} {setup.trt.__version__} refused {what}")


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
_RECORDED = {
    "builder_optimization_level": "",
    "avg_timing_iterations": "",
    "max_num_tactics": "",
    "max_aux_streams": "",
    "l2_limit_for_tiling": "",
    "build_route": "",
    "DLA_core": "",
    "tiling_optimization_level": "TilingOptimizationLevel",
    "profiling_verbosity": "ProfilingVerbosity",
    "runtime_platform": "RuntimePlatform",
    "default_device_type": "DeviceType",
    "engine_capability": "EngineCapability",
    "hardware_compatibility_level": "HardwareCompatibilityLevel",
}


def effective_config(setup: Setup, options: BuildOptions) -> dict[str, Any]:
    """The configuration as TensorRT holds it, with names instead of enum numbers and one name per member.

    Args:
        setup: Configured and not yet built.
        options: Tell which memory pools were limited; a pool that nobody limited has the size of some GPU.
    """
    trt, config = setup.trt, setup.config
    flags = {
        canonical_name("BuilderFlag", name)
        for name, flag in trt.BuilderFlag.__members__.items()
        if config.get_flag(flag)
    }
    found: dict[str, Any] = {"flags": sorted(flags), "profiles": config.num_optimization_profiles}
    for name, enum in _RECORDED.items():
        if enum == "HardwareCompatibilityLevel" and hasattr(trt, "ComputeCapability"):
            continue  # TensorRT-RTX warns when this is even read
        try:
            value = getattr(config, name, None)
        except RuntimeError:
            continue  # a text that the library never set
        if value is not None:
            found[name] = canonical_name(enum, value.name) if enum else value
    sources = config.get_tactic_sources()
    found["tactic_sources"] = sorted(
        name for name, source in trt.TacticSource.__members__.items() if sources >> int(source) & 1
    )
    found["preview_features"] = sorted(
        stable_name("PreviewFeature", name)
        for name, feature in trt.PreviewFeature.__members__.items()
        if config.get_preview_feature(feature)
    )
    pools = {MemoryPool(pool).value for pool in options.memory_pools or ()}
    if options.workspace is not None:
        pools.add("workspace")
    if pools:
        found["memory_pools"] = {
            name: config.get_memory_pool_limit(setup.member("MemoryPoolType", name.upper())) for name in sorted(pools)
        }
    if hasattr(config, "num_compute_capabilities"):
        count = config.num_compute_capabilities
        found["compute_capabilities"] = [config.get_compute_capability(index).name for index in range(count)]
    if hasattr(config, "get_quantization_flag"):
        found["quantization_flags"] = sorted(
            name for name, flag in trt.QuantizationFlag.__members__.items() if config.get_quantization_flag(flag)
        )
    return found


#: Parts of an effective configuration that list what is on, what to call their members, and the options that turn them.
_SWITCHES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "flags": ("builder flag", {
        "fp16": "FP16", "bf16": "BF16", "int8": "INT8", "fp8": "FP8", "int4": "INT4", "fp4": "FP4", "tf32": "TF32",
        "sparse_weights": "SPARSE_WEIGHTS", "strict_nans": "STRICT_NANS", "debug": "DEBUG",
        "distributive_independence": "DISTRIBUTIVE_INDEPENDENCE", "version_compatible": "VERSION_COMPATIBLE",
        "exclude_lean_runtime": "EXCLUDE_LEAN_RUNTIME", "strip_plan": "STRIP_PLAN", "weight_streaming": "WEIGHT_STREAMING",
        "gpu_fallback": "GPU_FALLBACK", "direct_io": "DIRECT_IO", "require_user_allocation": "REQUIRE_USER_ALLOCATION",
        "tactic_heuristic": "ENABLE_TACTIC_HEURISTIC", "monitor_memory": "MONITOR_MEMORY",
    }),
    "quantization_flags": ("quantization flag", {"calibrate_before_fusion": "CALIBRATE_BEFORE_FUSION"}),
}  # fmt: skip

#: Options that show up as one value.
_VALUES = {
    "optimization_level": "builder_optimization_level",
    "avg_timing_iterations": "avg_timing_iterations",
    "max_tactics": "max_num_tactics",
    "max_aux_streams": "max_aux_streams",
    "l2_limit_for_tiling": "l2_limit_for_tiling",
    "build_route": "build_route",
    "tiling": "tiling_optimization_level",
    "profiling_verbosity": "profiling_verbosity",
    "hardware_compatibility": "hardware_compatibility_level",
    "runtime_platform": "runtime_platform",
    "engine_capability": "engine_capability",
    "tactic_sources": "tactic_sources",
    "dla_core": "DLA_core",
}


def disagreements(options: BuildOptions, config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """In what an effective configuration is not what these options ask for, told without TensorRT.

    Args:
        options: What is asked for.
        config: An effective configuration, also one recorded by an earlier release.

    Yields:
        The setting's name, what it is, and what it is to be.
    """
    for part, (kind, switches) in _SWITCHES.items():
        wanted = {name: getattr(options, option) for option, name in switches.items()}
        if part == "flags":
            if options.refit is not None:
                wanted[_REFIT_FLAGS[RefitMode(options.refit)]] = True
            if options.precision_constraints is not None:
                constraints = PrecisionConstraints(options.precision_constraints)
                wanted[f"{constraints.value.upper()}_PRECISION_CONSTRAINTS"] = True
        yield from _switched(kind, wanted, config.get(part))
    yield from _switched("preview feature", dict(options.preview_features or {}), config.get("preview_features"))
    plain = options.to_json()
    for option, name in _VALUES.items():
        value = plain.get(option)
        if isinstance(value, str) and option != "build_route":
            value = value.upper()
        if value is not None and name in config and config[name] != value:
            yield name, config[name], value
    pools = {MemoryPool(pool).value: size for pool, size in (options.memory_pools or {}).items()}
    if options.workspace is not None:
        pools["workspace"] = options.workspace
    for pool, size in pools.items():
        found = config.get("memory_pools", {}).get(pool, size)
        # Sizes of the DLA's pools are rounded down to powers of two.
        if found != size and not (pool.startswith("dla_") and size // 2 < found <= size):
            yield f"memory pool {pool}", found, size


def _switched(kind: str, wanted: Mapping[str, bool | None], on: Any) -> Iterator[tuple[str, str, str]]:
    words = {True: "on", False: "off"}
    for name, value in wanted.items():
        if value is not None and on is not None and (name in on) is not value:
            yield f"{kind} {name}", words[not value], words[value]
