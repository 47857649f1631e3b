"""`IBuilderConfig`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.fakes._callbacks import IAlgorithmSelector, IInt8Calibrator, IProgressMonitor
from tests.fakes._network import IOptimizationProfile
from tests.fakes._pybind import PybindEnum, PybindObject, at_least, only
from tests.fakes._timing import ITimingCache, unpack
from tests.fakes._world import as_bytes

if TYPE_CHECKING:
    from tests.fakes._world import World

_NO_CALIBRATION = "Implicit quantization has been superseded by explicit quantization. Explicit quantization"


def _number(name: str, doc: str, first: str = "0", last: str = "99", warns: str = "") -> Any:
    """A plain integer or string property that lives in the config's table of settings."""

    @only(first, last)
    def get(self: IBuilderConfig) -> Any:
        if warns:
            self._world.deprecated(warns)
        return self._settings[name]

    def put(self: IBuilderConfig, value: Any) -> None:
        if warns:
            self._world.deprecated(warns)
        if isinstance(value, bool) or not isinstance(value, type(self._settings[name])):
            raise TypeError(f"(): incompatible function arguments for {name}. Invoked with: {value!r}")
        self._settings[name] = min(value, 5) if name == "builder_optimization_level" else value

    return property(get, put, doc=doc)


def _choice(name: str, enum: str, first: str = "0", last: str = "99") -> Any:
    """A property that takes members of one enum and nothing else."""

    @only(first, last)
    def get(self: IBuilderConfig) -> Any:
        return self._settings[name]

    def put(self: IBuilderConfig, value: Any) -> None:
        self._settings[name] = self._world.need_enum(value, enum, name)

    return property(get, put)


class IBuilderConfig(PybindObject):
    _builder: Any
    _settings: dict[str, Any]
    _flags: int
    _quantization_flags: int
    _profiles: list[IOptimizationProfile]
    _pools: dict[int, int]
    _tactic_sources: int
    _preview: int
    _cache: ITimingCache | None
    _monitor: IProgressMonitor | None
    _selector: IAlgorithmSelector | None
    _calibrator: IInt8Calibrator | None
    _calibration_profile: IOptimizationProfile | None
    _plugins: list[str]

    builder_optimization_level = _number("builder_optimization_level", "0 to 5; larger values are clamped.")
    avg_timing_iterations = _number("avg_timing_iterations", "Averaged timing runs.")
    max_aux_streams = _number("max_aux_streams", "-1 leaves it to a heuristic.")
    DLA_core = _number("DLA_core", "DLA core.")
    profile_stream = _number("profile_stream", "CUDA stream handle.")
    max_num_tactics = _number("max_num_tactics", "-1 lets TensorRT choose.", "10.4")
    l2_limit_for_tiling = _number("l2_limit_for_tiling", "Bytes of L2 cache.", "10.8")
    remote_auto_tuning_config = _number("remote_auto_tuning_config", "Safety only.", "10.13", "11.4")
    build_route = _number("build_route", "Compiler knobs.", "11.1")
    min_timing_iterations = _number("min_timing_iterations", "Gone in 10.0.", last="8.6", warns="avg_timing_iterations")
    max_workspace_size = _number(
        "max_workspace_size", "Gone in 10.0.", last="8.6", warns="set_memory_pool_limit(MemoryPoolType.WORKSPACE)"
    )
    profiling_verbosity = _choice("profiling_verbosity", "ProfilingVerbosity")
    engine_capability = _choice("engine_capability", "EngineCapability")
    default_device_type = _choice("default_device_type", "DeviceType")
    hardware_compatibility_level = _choice("hardware_compatibility_level", "HardwareCompatibilityLevel")
    runtime_platform = _choice("runtime_platform", "RuntimePlatform", "10.2")
    tiling_optimization_level = _choice("tiling_optimization_level", "TilingOptimizationLevel", "10.8")

    @property
    @only("11.1")
    def all_build_routes(self) -> list[str]:
        return []

    @property
    def flags(self) -> int:
        return self._flags

    @flags.setter
    def flags(self, value: int) -> None:
        self._flags = int(value)

    def set_flag(self, flag: PybindEnum) -> None:
        self._flags |= 1 << int(self._world.need_enum(flag, "BuilderFlag", "set_flag"))

    def clear_flag(self, flag: PybindEnum) -> None:
        self._flags &= ~(1 << int(self._world.need_enum(flag, "BuilderFlag", "clear_flag")))

    def get_flag(self, flag: PybindEnum) -> bool:
        return bool(self._flags >> int(self._world.need_enum(flag, "BuilderFlag", "get_flag")) & 1)

    def _has(self, name: str) -> bool:
        flag = getattr(self._world.enums["BuilderFlag"], name, None)
        return flag is not None and self.get_flag(flag)

    def _flag_names(self) -> list[str]:
        # Two names for one number on 10.x: the plan tells the current one, not the one that `.name` answers.
        flags = self._world.enums["BuilderFlag"].__members__
        return sorted(name for name, flag in flags.items() if name != "WEIGHTLESS" and self.get_flag(flag))

    @property
    @only(last="10.16")
    def quantization_flags(self) -> int:
        return self._quantization_flags

    @quantization_flags.setter
    def quantization_flags(self, value: int) -> None:
        self._quantization_flags = int(value)

    @only(last="10.16")
    def set_quantization_flag(self, flag: PybindEnum) -> None:
        self._quantization_flags |= 1 << int(self._world.need_enum(flag, "QuantizationFlag", "set_quantization_flag"))

    @only(last="10.16")
    def clear_quantization_flag(self, flag: PybindEnum) -> None:
        self._quantization_flags &= ~(1 << int(self._world.need_enum(flag, "QuantizationFlag", "clear")))

    @only(last="10.16")
    def get_quantization_flag(self, flag: PybindEnum) -> bool:
        return bool(self._quantization_flags >> int(self._world.need_enum(flag, "QuantizationFlag", "get")) & 1)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._world.need(profile, IOptimizationProfile, "add_optimization_profile")
        if not profile:
            self._log("ERROR", "IBuilderConfig::addOptimizationProfile: API Usage Error (profile is not valid)")
            return -1
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def set_memory_pool_limit(self, pool: PybindEnum, pool_size: int) -> None:
        if type(pool_size) is not int or pool_size < 0:
            raise TypeError(f"set_memory_pool_limit(): incompatible function arguments. Invoked with: {pool_size!r}")
        number = int(self._world.need_enum(pool, "MemoryPoolType", "set_memory_pool_limit"))
        if pool.name.startswith("DLA_"):  # as seen where there is no DLA: told in the log, and nothing changes
            self._log("ERROR", "IBuilderConfig::setMemoryPoolLimit: API Usage Error (no DLA is present)")
            return
        self._pools[number] = pool_size

    def get_memory_pool_limit(self, pool: PybindEnum) -> int:
        number = int(self._world.need_enum(pool, "MemoryPoolType", "get_memory_pool_limit"))
        memory = self._world.gpu.memory_bytes if self._world.gpu else 64 << 30
        return self._pools.get(number, memory)

    def set_tactic_sources(self, tactic_sources: int) -> bool:
        self._tactic_sources = int(tactic_sources)
        return True

    def get_tactic_sources(self) -> int:
        return self._tactic_sources

    def set_preview_feature(self, feature: PybindEnum, enable: bool) -> None:
        bit = 1 << int(self._world.need_enum(feature, "PreviewFeature", "set_preview_feature"))
        self._preview = self._preview | bit if enable else self._preview & ~bit

    def get_preview_feature(self, feature: PybindEnum) -> bool:
        return bool(self._preview >> int(self._world.need_enum(feature, "PreviewFeature", "get_preview_feature")) & 1)

    @property
    def plugins_to_serialize(self) -> list[str]:
        return list(self._plugins)

    @plugins_to_serialize.setter
    def plugins_to_serialize(self, value: list[str]) -> None:
        self._plugins = list(value)

    def create_timing_cache(self, serialized_timing_cache: Any) -> ITimingCache:
        blob = as_bytes(serialized_timing_cache, "create_timing_cache")
        return unpack(self._world, self._builder._origin(), blob, self._log)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self._world.need(cache, ITimingCache, "set_timing_cache")
        self._cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self._cache

    @property
    @only("10.0")
    def progress_monitor(self) -> IProgressMonitor | None:
        return self._monitor

    @progress_monitor.setter
    def progress_monitor(self, value: IProgressMonitor | None) -> None:
        if value is not None:
            self._world.need(value, IProgressMonitor, "progress_monitor")
        self._monitor = value

    @property
    @only(last="10.16")
    def algorithm_selector(self) -> IAlgorithmSelector | None:
        self._warn_from("10.8", "editable timing cache")
        return self._selector

    @algorithm_selector.setter
    def algorithm_selector(self, value: IAlgorithmSelector | None) -> None:
        self._warn_from("10.8", "editable timing cache")
        if value is not None:
            self._world.need(value, IAlgorithmSelector, "algorithm_selector")
        self._selector = value

    @property
    @only(last="10.16")
    def int8_calibrator(self) -> IInt8Calibrator | None:
        self._warn_from("10.1", _NO_CALIBRATION)
        return self._calibrator

    @int8_calibrator.setter
    def int8_calibrator(self, value: IInt8Calibrator | None) -> None:
        self._warn_from("10.1", _NO_CALIBRATION)
        if value is not None:
            self._world.need(value, IInt8Calibrator, "int8_calibrator")
        self._calibrator = value

    @only(last="10.16")
    def set_calibration_profile(self, profile: IOptimizationProfile) -> bool:
        self._warn_from("10.1", _NO_CALIBRATION)
        self._world.need(profile, IOptimizationProfile, "set_calibration_profile")
        self._calibration_profile = profile
        return bool(profile)

    @only(last="10.16")
    def get_calibration_profile(self) -> IOptimizationProfile | None:
        self._warn_from("10.1", _NO_CALIBRATION)
        return self._calibration_profile

    def reset(self) -> None:
        fill(self, self._builder)

    def _warn_from(self, release: str, instead: str) -> None:
        if at_least(self._world.line, release):
            self._world.deprecated(instead)

    def _log(self, severity: str, message: str) -> None:
        self._world.log(self._builder._logger, severity, message, self._builder._recorder)


def fill(config: IBuilderConfig, builder: Any) -> IBuilderConfig:
    """Gives a config the defaults of its release."""
    world: World = config._world
    config._builder = builder
    config._flags = 1 << int(world.member("BuilderFlag", "TF32"))  # TF32 is on unless switched off
    config._quantization_flags = config._preview = 0
    config._profiles, config._pools, config._plugins = [], {}, []
    sources = {"EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS"}
    if world.line == "8.6":
        sources |= {"CUBLAS", "CUDNN"}
    config._tactic_sources = sum(1 << int(world.member("TacticSource", name)) for name in sources)
    config._cache = config._monitor = config._selector = config._calibrator = config._calibration_profile = None
    settings: dict[str, Any] = {
        "builder_optimization_level": 3,
        "avg_timing_iterations": 1,
        "min_timing_iterations": 1,
        "max_aux_streams": -1,
        "max_num_tactics": -1,
        "max_workspace_size": 0,
        "l2_limit_for_tiling": 0,
        "DLA_core": -1,
        "profile_stream": 0,
        "remote_auto_tuning_config": "",
        "build_route": "",
        "profiling_verbosity": ("ProfilingVerbosity", "LAYER_NAMES_ONLY"),
        "engine_capability": ("EngineCapability", "STANDARD"),
        "default_device_type": ("DeviceType", "GPU"),
        "hardware_compatibility_level": ("HardwareCompatibilityLevel", "NONE"),
        "runtime_platform": ("RuntimePlatform", "SAME_AS_BUILD"),
        "tiling_optimization_level": ("TilingOptimizationLevel", "NONE"),
    }
    config._settings = {
        name: world.member(*value) if isinstance(value, tuple) else value
        for name, value in settings.items()
        if hasattr(type(config), name)
    }
    return config
