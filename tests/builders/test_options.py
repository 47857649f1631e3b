"""The table of build options against what the real bindings have, release by release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.builders.support import A10, build_inputs
from tests.fakes import LINES, Line, make_tensorrt
from tests.fakes._build import read_plan
from tests.fakes.test_fakes_matrix import read_matrix

import trt_warmcache as twc
from trt_warmcache.builders import TensorRTBuilder
from trt_warmcache.builders._config import APPLY, disagreements, effective_config
from trt_warmcache.keys import EngineKey, engine_key
from trt_warmcache.options import VALUE_RANGES, Preset, option_specs

RELEASES, MATRIX = read_matrix(Path(__file__).parent.parent / "data" / "trt_api_matrix.txt")
_, MORE = read_matrix(Path(__file__).parent.parent / "data" / "trt_api_matrix_more.txt")
CLASSIC = [release for release in RELEASES if not release.startswith("rtx")]

#: The member of the bindings that each option stands on.
MEMBER = {
    "fp16": "BuilderFlag.FP16",
    "bf16": "BuilderFlag.BF16",
    "int8": "BuilderFlag.INT8",
    "fp8": "BuilderFlag.FP8",
    "int4": "BuilderFlag.INT4",
    "fp4": "BuilderFlag.FP4",
    "precision_constraints": "BuilderFlag.OBEY_PRECISION_CONSTRAINTS",
    "calibrate_before_fusion": "QuantizationFlag.CALIBRATE_BEFORE_FUSION",
    "tf32": "BuilderFlag.TF32",
    "sparse_weights": "BuilderFlag.SPARSE_WEIGHTS",
    "strict_nans": "BuilderFlag.STRICT_NANS",
    "distributive_independence": "BuilderFlag.DISTRIBUTIVE_INDEPENDENCE",
    "debug": "BuilderFlag.DEBUG",
    "engine_capability": "IBuilderConfig.engine_capability",
    "optimization_level": "IBuilderConfig.builder_optimization_level",
    "avg_timing_iterations": "IBuilderConfig.avg_timing_iterations",
    "max_tactics": "IBuilderConfig.max_num_tactics",
    "tactic_sources": "IBuilderConfig.set_tactic_sources",
    "tactic_heuristic": "BuilderFlag.ENABLE_TACTIC_HEURISTIC",
    "tiling": "IBuilderConfig.tiling_optimization_level",
    "l2_limit_for_tiling": "IBuilderConfig.l2_limit_for_tiling",
    "max_aux_streams": "IBuilderConfig.max_aux_streams",
    "workspace": "MemoryPoolType.WORKSPACE",
    "memory_pools": "IBuilderConfig.set_memory_pool_limit",
    "profiling_verbosity": "IBuilderConfig.profiling_verbosity",
    "hardware_compatibility": "IBuilderConfig.hardware_compatibility_level",
    "version_compatible": "BuilderFlag.VERSION_COMPATIBLE",
    "exclude_lean_runtime": "BuilderFlag.EXCLUDE_LEAN_RUNTIME",
    "refit": "BuilderFlag.REFIT",
    "refittable_weights": "BuilderFlag.REFIT_INDIVIDUAL",
    "strip_plan": "BuilderFlag.STRIP_PLAN",
    "weight_streaming": "BuilderFlag.WEIGHT_STREAMING",
    "preview_features": "IBuilderConfig.set_preview_feature",
    "dla_core": "IBuilderConfig.DLA_core",
    "gpu_fallback": "BuilderFlag.GPU_FALLBACK",
    "direct_io": "BuilderFlag.DIRECT_IO",
    "runtime_platform": "IBuilderConfig.runtime_platform",
    "require_user_allocation": "BuilderFlag.REQUIRE_USER_ALLOCATION",
    "build_route": "IBuilderConfig.build_route",
    "native_instancenorm": "OnnxParserFlag.NATIVE_INSTANCENORM",
    "plugin_override": "OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE",
    "timing": "IBuilderConfig.set_timing_cache",
    "timing_scope": "IBuilderConfig.set_timing_cache",
    "compilation_cache": "BuilderFlag.DISABLE_COMPILATION_CACHE",
    "monitor_memory": "BuilderFlag.MONITOR_MEMORY",
    "builder_threads": "Builder.max_threads",
}
#: Members that exist where the option is refused on purpose, and why: (until, reason).
NARROWER = {
    "strongly_typed": "from 11.0 networks are always strongly typed; the flag is ignored",
    "layer_precisions": "listed for four releases only",
    "tactics": "two mechanisms, each with a range of its own",
    "record_tactics": "two mechanisms, each with a range of its own",
}
VALUE_MEMBER = {
    ("hardware_compatibility", "same_compute_capability"): "HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY",
    ("refit", "identical"): "BuilderFlag.REFIT_IDENTICAL",
    ("refit", "individual"): "BuilderFlag.REFIT_INDIVIDUAL",
    ("timing", "require"): "BuilderFlag.ERROR_ON_TIMING_CACHE_MISS",
    ("timing", "editable"): "BuilderFlag.EDITABLE_TIMING_CACHE",
    ("tactics", "layers"): "IBuilderConfig.algorithm_selector",
    ("tactics", "entries"): "ITimingCache.update",
    ("memory_pools", "dla_managed_sram"): "MemoryPoolType.DLA_MANAGED_SRAM",
    ("memory_pools", "dla_local_dram"): "MemoryPoolType.DLA_LOCAL_DRAM",
    ("memory_pools", "dla_global_dram"): "MemoryPoolType.DLA_GLOBAL_DRAM",
    ("memory_pools", "tactic_shared_memory"): "MemoryPoolType.TACTIC_SHARED_MEMORY",
    ("tactic_sources", "CUBLAS"): "TacticSource.CUBLAS",
    ("tactic_sources", "CUBLAS_LT"): "TacticSource.CUBLAS_LT",
    ("tactic_sources", "CUDNN"): "TacticSource.CUDNN",
    ("preview_features", "aliased_plugin_io"): "PreviewFeature.ALIASED_PLUGIN_IO_10_03",
    (
        "preview_features",
        "disable_external_tactic_sources_for_core",
    ): "PreviewFeature.DISABLE_EXTERNAL_TACTIC_SOURCES_FOR_CORE_0805",
    ("preview_features", "faster_dynamic_shapes"): "PreviewFeature.FASTER_DYNAMIC_SHAPES_0805",
    ("preview_features", "multidevice_runtime"): "PreviewFeature.MULTIDEVICE_RUNTIME_10_16",
    ("preview_features", "profile_sharing"): "PreviewFeature.PROFILE_SHARING_0806",
    ("preview_features", "runtime_activation_resize"): "PreviewFeature.RUNTIME_ACTIVATION_RESIZE_10_10",
}
#: A value of each option that is not TensorRT's default.
VALUES: dict[str, Any] = {
    "precision_constraints": "obey",
    "layer_precisions": {"mul": "float16"},
    "tf32": False,
    "engine_capability": "safety",
    "optimization_level": 5,
    "avg_timing_iterations": 3,
    "max_tactics": 2,
    "tactic_sources": ["EDGE_MASK_CONVOLUTIONS"],
    "tactics": {"layers": {"mul": (1, 2)}},
    "tiling": "full",
    "l2_limit_for_tiling": 1 << 20,
    "max_aux_streams": 2,
    "workspace": 1 << 25,
    "memory_pools": {"tactic_dram": 1 << 25},
    "profiling_verbosity": "detailed",
    "hardware_compatibility": "ampere_plus",
    "refit": "all",
    "refittable_weights": ["w"],
    "preview_features": {"profile_sharing": True},
    "dla_core": 0,
    "runtime_platform": "windows_amd64",
    "build_route": "x=1",
    "timing": "off",
    "timing_scope": "model",
    "compilation_cache": False,
    "builder_threads": 4,
}


def numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def sample(name: str) -> dict[str, Any]:
    """Arguments that set one option, with those that it needs beside it."""
    beside: dict[str, dict[str, Any]] = {
        "refittable_weights": {"refit": "individual"},
        "exclude_lean_runtime": {"version_compatible": True},
    }
    return {**beside.get(name, {}), name: VALUES.get(name, True)}


def key(**options: Any) -> EngineKey:
    """The key of one and the same engine but for its options."""
    return engine_key(
        model="blake3:0",
        profiles=(),
        options=twc.BuildOptions(**options),
        flavour="tensorrt",
        version="10.16.1.11",
        target=A10,
    )


def test_every_option_is_applied_and_accounted_for() -> None:
    """The table, what applies it, and this test know the same options."""
    specs = option_specs()
    assert set(specs) == set(APPLY) == set(MEMBER) | set(NARROWER)
    assert all(spec.doc.endswith(".") for spec in specs.values())
    assert all(spec.instead for spec in specs.values() if not spec.rtx)


@pytest.mark.parametrize("name", sorted(MEMBER))
def test_option_exists_exactly_where_its_member_does(name: str) -> None:
    """Each option's version range is the range of the member it stands on, in every classic release."""
    spec, member = option_specs()[name], MEMBER[name]
    for release in CLASSIC:
        here = member.startswith("EngineCapability") or release in MATRIX[member]
        assert spec.available("tensorrt", numbers(release)) is here, f"{name} in {release}"
    if spec.rtx:
        assert "rtx-1.7.1" in MATRIX[member]


def test_strongly_typed_range() -> None:
    """STRONGLY_TYPED means something in 10.x only; before it does not exist, after it is always on."""
    found = MATRIX["NetworkDefinitionCreationFlag.STRONGLY_TYPED"]
    for release in CLASSIC:
        wanted = release in found and numbers(release) < (11, 0)
        assert option_specs()["strongly_typed"].available("tensorrt", numbers(release)) is wanted
    assert {line for line in LINES if line in MORE["ILayer.precision"]} == {"8.6", "10.3", "10.16"}


@pytest.mark.parametrize("named", sorted(VALUE_RANGES), ids=str)
def test_values_exist_exactly_where_their_members_do(named: tuple[str, str]) -> None:
    """Values that came later, or went earlier, than their option have ranges of their own."""
    spec = VALUE_RANGES[named]
    if named == ("layer_precisions", "bfloat16"):
        assert {line for line in LINES if line in MORE["DataType.BF16"]} == {"10.3", "10.16", "11.4"}
        return
    found = MATRIX[VALUE_MEMBER[named]]
    for release in CLASSIC:
        assert spec.available("tensorrt", numbers(release)) is (release in found), release
    if option_specs()[named[0]].rtx and not named[1].startswith("dla_"):
        assert spec.rtx is ("rtx-1.7.1" in found)


@pytest.mark.parametrize("named", sorted(VALUE_RANGES), ids=str)
def test_absent_values_are_refused_by_name(named: tuple[str, str]) -> None:
    """A value that the version lacks is an error that names it and the versions that have it."""
    option, value = named
    given: Any = {
        "memory_pools": {value: 1 << 20},
        "preview_features": {value: True},
        "tactic_sources": [value],
        "layer_precisions": {"mul": value},
        "tactics": {"layers": {"mul": (1, 2)}} if value == "layers" else {"entries": {"0x" + "1" * 32: 1}},
    }.get(option, value)
    options, spec, refused = twc.BuildOptions(**{option: given}), VALUE_RANGES[named], 0
    for flavour, version in [("tensorrt", numbers(r)) for r in CLASSIC] + [("tensorrt_rtx", (1, 7, 1))]:
        if spec.available(flavour, version) or not option_specs()[option].available(flavour, version):
            continue
        refused += 1
        with pytest.raises(twc.ConfigError) as error:
            options.require_available(flavour, version)
        assert f"{option}={value!r} does not exist in" in error.value.message
        assert spec.where() in error.value.message
    assert refused


@pytest.mark.parametrize("name", sorted(option_specs()))
def test_absent_options_are_refused_by_name(name: str) -> None:
    """An option that the version lacks is an error that names it, the versions that have it, and what to do."""
    spec = option_specs()[name]
    options = twc.BuildOptions(**sample(name))
    refused = 0
    for flavour, version in [("tensorrt", numbers(r)) for r in CLASSIC] + [("tensorrt_rtx", (1, 7, 1))]:
        if spec.available(flavour, version):
            continue
        refused += 1
        with pytest.raises(twc.ConfigError) as error:
            options.require_available(flavour, version)
        assert any(
            f"'{option}'" in error.value.message or f"{option}=" in error.value.message for option in sample(name)
        )
        assert "it needs " in error.value.message
    assert refused == 0 or spec.rtx is False or spec.since != (8, 6)


@pytest.mark.parametrize("name", sorted(option_specs()))
def test_options_change_the_key_as_declared(name: str) -> None:
    """An option that can change the plan changes the key, and one that cannot does not."""
    spec = option_specs()[name]

    beside = {other: value for other, value in sample(name).items() if other != name}
    assert (key(**sample(name)) != key(**beside)) is spec.affects_plan
    again = twc.BuildOptions.from_json(twc.BuildOptions(**sample(name)).to_json())
    assert again == twc.BuildOptions(**sample(name))
    assert hash(again) == hash(twc.BuildOptions(**sample(name)))


DEFAULTS = {name: spec.default for name, spec in option_specs().items() if spec.default is not None}


def test_defaults_spelled_out_are_the_same_request() -> None:
    """An option set to what TensorRT does anyway is no other engine: same key, and the parts do not mention it."""

    assert {"fp16", "hardware_compatibility", "tiling", "version_compatible"} <= set(DEFAULTS)
    for name, value in DEFAULTS.items():
        assert key(**{name: value}) == key(), name
    assert dict(key(**DEFAULTS).parts) == dict(key().parts)
    assert twc.BuildOptions(fp16=False).to_json() == {"fp16": False}
    with pytest.raises(twc.ConfigError, match=r"'fp16' does not exist in TensorRT 11\.4"):
        twc.BuildOptions(fp16=False).require_available("tensorrt", (11, 4))


@pytest.mark.parametrize("line", LINES)
def test_defaults_are_tensorrts_own(line: Line, tmp_path: Path) -> None:
    """Each default of the table is what the line's configuration holds by itself."""
    builder = TensorRTBuilder(make_tensorrt(line), lock_folder=tmp_path)
    plain = builder.build(build_inputs())
    for name, value in DEFAULTS.items():
        if not option_specs()[name].available("tensorrt", numbers(line)):
            continue
        told = builder.build(build_inputs(options=twc.BuildOptions(**{name: value})))
        assert told.config == plain.config, name
        assert bytes(told.plan) == bytes(plain.plan), name


@pytest.mark.parametrize("line", LINES)
def test_options_reach_the_fake_of_their_line(line: Line, tmp_path: Path) -> None:
    """Each option that a line has changes what that line was told, read back from the plan it built."""
    builder = TensorRTBuilder(make_tensorrt(line), lock_folder=tmp_path)
    release = line
    plain = read_plan(builder.build(build_inputs()).plan)
    silent = {"timing", "timing_scope", "record_tactics", "native_instancenorm", "plugin_override", "dla_core"}
    for name, spec in option_specs().items():
        if not spec.available("tensorrt", numbers(release)) or name in silent | {"strongly_typed", "tactics"}:
            continue
        options = twc.BuildOptions(**sample(name))
        try:
            options.require_available("tensorrt", numbers(release))
        except twc.ConfigError:
            continue  # this value came later; covered above
        assert read_plan(builder.build(build_inputs(options=options)).plan) != plain, name
    with pytest.raises(twc.ConfigError, match="this machine has 0 DLA cores"):
        builder.build(build_inputs(options=twc.BuildOptions(dla_core=0)))


@pytest.mark.parametrize("line", LINES)
def test_disagreements_are_told_of_every_setting(line: Line, tmp_path: Path) -> None:
    """What TensorRT says of itself agrees with the options that were set, and what it said without them does not."""
    builder = TensorRTBuilder(make_tensorrt(line), lock_folder=tmp_path)
    plain = builder.build(build_inputs()).config
    for name, spec in option_specs().items():
        if not spec.available("tensorrt", numbers(line)):
            continue
        options = twc.BuildOptions(**sample(name))
        try:
            config = builder.build(build_inputs(options=options)).config
        except (twc.ConfigError, twc.BuildError):
            continue
        assert list(disagreements(options, config)) == [], name
        shown = config != plain and name not in {
            "timing",
            "compilation_cache",
            "record_tactics",
            "workspace",
            "memory_pools",
        }
        assert bool(list(disagreements(options, plain))) is shown, name
    assert list(disagreements(twc.BuildOptions(workspace=5), {"memory_pools": {"workspace": 7}})) == [
        ("memory pool workspace", 7, 5)
    ]
    sram = twc.BuildOptions(memory_pools={"dla_managed_sram": 3 << 20})
    assert list(disagreements(sram, {"memory_pools": {"dla_managed_sram": 2 << 20}})) == []
    assert list(disagreements(sram, {"memory_pools": {"dla_managed_sram": 0}})) == [
        ("memory pool dla_managed_sram", 0, 3 << 20)
    ]


@pytest.mark.parametrize("preset", list(Preset))
@pytest.mark.parametrize("release", [*CLASSIC, "rtx"])
def test_presets_hold_only_what_the_version_has(preset: Preset, release: str) -> None:
    """A preset never asks for something that its version refuses, and `max` asks for more search than `fast`."""
    flavour = "tensorrt_rtx" if release == "rtx" else "tensorrt"
    version = (1, 7, 1) if release == "rtx" else numbers(release)
    options = twc.BuildOptions.preset(preset, version=version, flavour=flavour, max_aux_streams=1)
    options.require_available(flavour, version)
    assert options.max_aux_streams == 1
    level = {Preset.FAST: 1, Preset.BALANCED: None, Preset.MAX: 5}[preset]
    assert options.optimization_level == level


def test_presets_take_versions_as_people_write_them() -> None:
    """A version is a tuple or a text; what is neither, and an unknown flavour, is refused and not taken for classic."""
    texts = twc.BuildOptions.preset("fast", version="10.13.3.9")
    assert texts == twc.BuildOptions.preset(Preset.FAST, version=(10, 13))
    assert texts.max_tactics == 1
    assert twc.BuildOptions.preset("fast", version="8.6.1").tactic_heuristic is True
    for wrong in ({"version": "ten"}, {"version": 10}, {"version": "10"}, {"version": "10.13", "flavour": "rtx"}):
        with pytest.raises(twc.ConfigError):
            twc.BuildOptions.preset("fast", **wrong)
    with pytest.raises(twc.ConfigError, match="must be one of 'fast', 'balanced', 'max'"):
        twc.BuildOptions.preset("faster", version="10.13")  # type: ignore[arg-type]


def test_options_show_what_was_set() -> None:
    """The text of options, in errors and logs, is what was given and no more."""
    options = twc.BuildOptions(refit="individual", refittable_weights=["w"], tf32=False)
    assert repr(options) == "BuildOptions(tf32=False, refit='individual', refittable_weights=['w'])"


def test_spellings_are_one_option() -> None:
    """Enums or their words, any order, names with or without their version suffix: one value, one key."""
    a = twc.BuildOptions(
        tactic_sources=["jit_convolutions", "EDGE_MASK_CONVOLUTIONS"],
        preview_features={"RUNTIME_ACTIVATION_RESIZE_10_10": True},
        timing="editable",
        runtime_platform="WINDOWS_AMD64",
    )
    b = twc.BuildOptions(
        tactic_sources=["EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS"],
        preview_features={"runtime_activation_resize": True},
        timing=twc.options.TimingMode.EDITABLE,
        runtime_platform="windows_amd64",
    )
    assert a == b
    assert a.to_json() == b.to_json()


@pytest.mark.parametrize(
    "options",
    [
        {"optimization_level": 6},
        {"optimization_level": True},
        {"tiling": "most"},
        {"memory_pools": {"nowhere": 1}},
        {"workspace": 1, "memory_pools": {"workspace": 1}},
        {"refittable_weights": ["w"]},
        {"exclude_lean_runtime": True},
        {"tactics": {}},
        {"tactics": {"entries": {"0x12": 1}}},
        {"tactics": {"entries": {"0x" + "0" * 32: 1}}, "timing": "off"},
        {"tactics": {"entries": {"0x" + "0" * 32: 1}}, "optimization_level": 0},
        {"tactics": {"entries": {"0x" + "0" * 32: -1}}},
        {"tactics": {"entries": {"0x" + "0" * 32: 2**64 - 1}}},
        {"tactics": {"layers": {"mul": (1, 2**64)}}},
        {"strongly_typed": True, "fp16": True},
        {"layer_precisions": {"a": "float64"}},
        {"preview_features": {"PROFILE_SHARING_0806": True, "profile_sharing": False}},
        {"tactic_sources": "CUBLAS"},
        {"fp16": 1},
    ],
    ids=str,
)
def test_impossible_values(options: dict[str, Any]) -> None:
    """Values that cannot be meant are refused when the options are made, not when a build begins."""
    with pytest.raises(twc.ConfigError):
        twc.BuildOptions(**options)


def test_effective_config_needs_no_gpu_defaults() -> None:
    """Pool sizes that nobody asked for follow the GPU and stay out of the record."""
    assert effective_config.__doc__ is not None
    configs = []
    for memory in (8 << 30, 24 << 30):
        from tests.fakes import Gpu

        builder = TensorRTBuilder(make_tensorrt("10.16", gpu=Gpu(memory_bytes=memory)))
        configs.append(builder.build(build_inputs()).config)
    assert configs[0] == configs[1]
