"""`Builder`: checks, calibration, tactic timing, and the plan.

A plan starts like a real one: `ftrt` at 0, serialization version 0 at 4, total size (u64) at 16, and major, minor,
patch and build at 24 to 27. The size field is a guess for classic plans, and for 8.6 the whole layout is one. JSON
follows from byte 32 and tells what the builder was given, so that tests can look: see :func:`read_plan`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
from typing import Any

from tests.fakes._callbacks import (
    IAlgorithm,
    IAlgorithmContext,
    IAlgorithmVariant,
    IErrorRecorder,
    ILogger,
    IStreamWriter,
)
from tests.fakes._config import IBuilderConfig, fill
from tests.fakes._memory import host_memory
from tests.fakes._network import INetworkDefinition, IOptimizationProfile, explicit_batch, new_network
from tests.fakes._pybind import PybindObject, at_least, only
from tests.fakes._timing import ITimingCache, unpack
from tests.fakes._world import guarded

MAGIC = b"ftrt"
_HEADER = struct.Struct("<4sIIIQ4B4s")
_PRECISIONS = ("FP16", "BF16", "INT8", "FP8", "INT4", "FP4")


class _Stop(Exception):
    """Ends a build; the reason is what gets logged."""


def read_plan(plan: Any) -> dict[str, Any]:
    """What a fake plan says about its own build."""
    return json.loads(bytes(plan)[_HEADER.size :])  # type: ignore[no-any-return]


def write_plan(numbers: tuple[int, int, int, int], content: dict[str, Any]) -> bytes:
    """The bytes of a plan: equal contents give equal bytes."""
    body = json.dumps(content, sort_keys=True).encode()
    if content["weights"] is not None:
        body += b" " * 1000  # weights take room, which a stripped plan saves
    return _HEADER.pack(MAGIC, 0, 2, 0, _HEADER.size + len(body), *numbers, b"\0" * 4) + body


class Builder(PybindObject):
    def __init__(self, logger: ILogger) -> None:
        self._world.need(logger, ILogger, "__init__()")
        if self._world.gpu is None:
            self._world.log(
                logger, "WARNING", "Unable to determine GPU memory usage: no CUDA-capable device is detected"
            )
            self._world.log(logger, "ERROR", "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._constructed = True
        self._logger = logger
        self._recorder: IErrorRecorder | None = None
        self._networks = 0
        self._settings = {"max_threads": 1, "max_batch_size": 1}
        self._world.record.builders += 1

    def _origin(self) -> str:
        """Names what a timing cache is valid for."""
        gpu = self._world.gpu
        assert gpu is not None
        device = {"gpu": gpu.name, "cc": gpu.cc, "sms": gpu.sm_count}
        return json.dumps({"tensorrt": self._world.version, **device}, sort_keys=True)

    @property
    def logger(self) -> ILogger:
        return self._logger

    @property
    def error_recorder(self) -> IErrorRecorder | None:
        return self._recorder

    @error_recorder.setter
    def error_recorder(self, value: IErrorRecorder | None) -> None:
        if value is not None:
            self._world.need(value, IErrorRecorder, "error_recorder")
        self._recorder = value

    @property
    def max_threads(self) -> int:
        return self._settings["max_threads"]

    @max_threads.setter
    def max_threads(self, value: int) -> None:
        self._settings["max_threads"] = int(value)

    @property
    @only(last="8.6")
    def max_batch_size(self) -> int:
        self._world.deprecated("network created with NetworkDefinitionCreationFlag::EXPLICIT_BATCH flag")
        return self._settings["max_batch_size"]

    @max_batch_size.setter
    def max_batch_size(self, value: int) -> None:
        self._world.deprecated("network created with NetworkDefinitionCreationFlag::EXPLICIT_BATCH flag")
        self._settings["max_batch_size"] = int(value)

    @property
    @only(last="10.16")
    def platform_has_fast_fp16(self) -> bool:
        return True

    @property
    @only(last="10.16")
    def platform_has_fast_int8(self) -> bool:
        return True

    @property
    @only(last="10.16")
    def platform_has_tf32(self) -> bool:
        return self._world.gpu is not None and self._world.gpu.compute_capability >= (8, 0)

    def get_plugin_registry(self) -> Any:
        return self._world.registry

    @property
    def num_DLA_cores(self) -> int:
        return 0

    @property
    def max_DLA_batch_size(self) -> int:
        return 0

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        if isinstance(flags, bool) or not isinstance(flags, int):
            raise TypeError(f"create_network(): incompatible function arguments. Invoked with: {flags!r}")
        self._networks += 1
        return new_network(self._world, self, flags, f"Unnamed Network {self._networks - 1}")

    def create_builder_config(self) -> IBuilderConfig:
        config: IBuilderConfig = self._world.new(IBuilderConfig)
        return fill(config, self)

    def create_optimization_profile(self) -> IOptimizationProfile:
        profile: IOptimizationProfile = self._world.new(IOptimizationProfile)
        profile._shapes, profile._values, profile._extra = {}, {}, 1.0
        return profile

    def reset(self) -> None:
        self._networks = 0

    def is_network_supported(self, network: INetworkDefinition, config: IBuilderConfig) -> bool:
        self._world.need(network, INetworkDefinition, "is_network_supported")
        self._world.need(config, IBuilderConfig, "is_network_supported")
        return explicit_batch(network)

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> Any:
        plan = self._build(network, config, "build_serialized_network")
        return None if plan is None else host_memory(self._world, plan)

    @only("10.13")
    def build_serialized_network_to_stream(
        self, network: INetworkDefinition, config: IBuilderConfig, writer: IStreamWriter
    ) -> bool:
        self._world.need(writer, IStreamWriter, "build_serialized_network_to_stream")
        plan = self._build(network, config, "build_serialized_network_to_stream")
        if plan is None:
            return False
        guarded("write", writer.write, plan)  # what the writer returns or raises does not change the answer
        return True

    @only(last="8.6")
    def build_engine(self, network: INetworkDefinition, config: IBuilderConfig) -> Any:
        self._world.deprecated("build_serialized_network")
        return self._engine(network, config)

    @only("10.6")
    def build_engine_with_config(self, network: INetworkDefinition, config: IBuilderConfig) -> Any:
        return self._engine(network, config)

    def _engine(self, network: INetworkDefinition, config: IBuilderConfig) -> Any:
        plan = self._build(network, config, "build_engine_with_config")
        return None if plan is None else self._world.classes["Runtime"](self._logger).deserialize_cuda_engine(plan)

    def _build(self, network: INetworkDefinition, config: IBuilderConfig, where: str) -> bytes | None:
        self._world.need(network, INetworkDefinition, where)
        self._world.need(config, IBuilderConfig, where)
        self._world.record.builds += 1
        progress = _Progress(config._monitor)
        try:
            _check(self, network, config)
            calibration = _calibrate(self, network, config)
            tactics = _choose_tactics(self, network, config, progress)
        except _Stop as stop:
            config._log("ERROR", f"IBuilder::buildSerializedNetwork: {stop}")
            return None
        finally:
            progress.close()
        return write_plan(self._world.numbers, _describe(self, network, config, tactics, calibration))


class _Progress:
    """Feeds a monitor; False or an exception from it cancels."""

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor
        self._open: list[str] = []

    def start(self, phase: str, steps: int) -> None:
        if self._monitor is not None:
            parent = self._open[-1] if self._open else None
            self._open.append(phase)
            sentinel = object()
            if guarded("phase_start", self._monitor.phase_start, phase, parent, steps, failed=sentinel) is sentinel:
                raise _Stop("Error Code 10: BuildCanceled (the progress monitor failed)")

    def step(self, index: int) -> None:
        if self._monitor is not None and not guarded(
            "step_complete", self._monitor.step_complete, self._open[-1], index, failed=False
        ):
            raise _Stop("Error Code 10: BuildCanceled (the build was cancelled by the progress monitor)")

    def close(self) -> None:
        while self._open:
            guarded("phase_finish", self._monitor.phase_finish, self._open.pop())


def _check(builder: Builder, network: INetworkDefinition, config: IBuilderConfig) -> None:
    world = builder._world
    if world.fail_build:
        raise _Stop(world.fail_build)
    if not network.num_outputs:
        raise _Stop("Error Code 4: Internal Error (Network must have at least one output)")
    typed = network._has_flag("STRONGLY_TYPED") if world.line != "11.4" else True
    precisions = [name for name in _PRECISIONS if config._has(name)]
    if typed and precisions:
        raise _Stop(
            f"Error Code 4: API Usage Error (a strongly typed network refuses the flags {', '.join(precisions)})"
        )
    if config._has("EXCLUDE_LEAN_RUNTIME") and not config._has("VERSION_COMPATIBLE"):
        config._log("ERROR", "EXCLUDE_LEAN_RUNTIME requires VERSION_COMPATIBLE and is ignored.")
    dynamic = [t.name for t in network._inputs if -1 in t.shape]
    if dynamic and not config._profiles:
        raise _Stop(
            "Error Code 4: Internal Error (Network has dynamic or shape inputs, "
            "but no optimization profile has been defined.)"
        )
    names = {tensor.name for tensor in network._inputs}
    for index, profile in enumerate(config._profiles):
        for tensor in network._inputs:
            shapes = profile._shapes.get(tensor.name)
            if shapes is None and tensor.name in dynamic:
                raise _Stop(
                    f"Error Code 4: Internal Error ({tensor.name}: profile {index} has no shapes for this input)"
                )
            if shapes is not None and any(
                len(shape) != len(tensor.shape)
                or any(have not in {-1, want} for have, want in zip(tensor.shape, shape, strict=True))
                for shape in shapes
            ):
                raise _Stop(
                    f"Error Code 4: Internal Error ({tensor.name}: profile {index} contradicts the network's shape)"
                )
        for name in set(profile._shapes) - names:
            config._log("WARNING", f"Profile {index} names {name}, which is not an input of the network.")


def _calibrate(builder: Builder, network: INetworkDefinition, config: IBuilderConfig) -> str | None:
    """Runs the calibrator; returns the table, or None when none is needed."""
    world, calibrator = builder._world, config._calibrator
    if not config._has("INT8"):
        return None
    if calibrator is None:
        config._log("WARNING", "Calibrator is not being used. Users must provide dynamic range for all tensors.")
        return None
    header = f"TRT-{world.version_int}-{calibrator._header}"
    cached = guarded("read_calibration_cache", calibrator.read_calibration_cache)
    if cached is not None:
        text = bytes(cached).decode("ascii", errors="replace")
        if text.split("\n", 1)[0].strip() == header:
            return text
        config._log("WARNING", f"The calibration cache was not made by {header}; calibrating again.")
    guarded("get_batch_size", calibrator.get_batch_size)
    names = [tensor.name for tensor in network._inputs]
    batches = 0
    while guarded("get_batch", calibrator.get_batch, names):
        batches += 1
        world.record.calibration_batches += 1
    if not batches:
        raise _Stop("Error Code 2: Internal Error (Calibration failure occurred with no scaling factors detected.)")
    lines = [header]
    for name in [*names, *(layer.name + "_output" for layer in network._layers)]:
        scale = 0.01 + hashlib.sha256(f"{name} {batches}".encode()).digest()[0] / 1000
        lines.append(f"{name}: {struct.pack('>f', scale).hex().lstrip('0') or '0'}")
    table = "\n".join(lines) + "\n"
    guarded("write_calibration_cache", calibrator.write_calibration_cache, memoryview(table.encode()))
    return table


def _choose_tactics(
    builder: Builder, network: INetworkDefinition, config: IBuilderConfig, progress: _Progress
) -> dict[str, int]:
    world, record = builder._world, builder._world.record
    use_cache = not config._has("DISABLE_TIMING_CACHE") and config.builder_optimization_level > 0
    # Without an attached cache the library keeps one for the duration of the build.
    cache: ITimingCache = (config._cache if use_cache else None) or unpack(world, builder._origin(), b"", config._log)
    # Only settings that change implementations belong to a key; one cache serves many models.
    flags = [name for name in config._flag_names() if name in {*_PRECISIONS, "TF32", "SPARSE_WEIGHTS", "REFIT"}]
    shapes = [sorted(profile._shapes.items()) for profile in config._profiles]
    tactics: dict[str, int] = {}
    contexts: list[IAlgorithmContext] = []
    chosen: list[IAlgorithm] = []
    progress.start("Building engine", 2)
    progress.start("Timing tactics", len(network._layers))
    for index, layer in enumerate(network._layers):
        digest = hashlib.sha256(f"{layer._signature} {shapes} {flags}".encode()).hexdigest()
        key = "0x" + digest[:32]
        entry = cache._entries.get(key)
        if entry is None:
            if use_cache and config._has("ERROR_ON_TIMING_CACHE_MISS"):
                raise _Stop(f"Error Code 10: Internal Error (timing cache miss for {layer.name}, key {key})")
            if config.builder_optimization_level > 0:
                world.spend()
            tactic = secrets.randbits(63) if world.nondeterministic else int(digest[32:47], 16)
            entry = (tactic, 0.001 * (1 + tactic % 997))
            cache._entries[key] = entry
        else:
            record.tactics_from_cache += 1
        if config._has("EDITABLE_TIMING_CACHE"):
            config._log("VERBOSE", f"Timing cache key of {layer.name}: {key}")
        if config._selector is not None:
            context, algorithm = _select(builder, config, layer, entry)
            contexts.append(context)
            chosen.append(algorithm)
            entry = (algorithm._variant._tactic, algorithm._timing)
        tactics[layer.name] = entry[0]
        progress.step(index)
    if config._selector is not None:
        guarded("report_algorithms", config._selector.report_algorithms, contexts, chosen)
    return tactics


def _select(
    builder: Builder, config: IBuilderConfig, layer: Any, best: tuple[int, float]
) -> tuple[IAlgorithmContext, IAlgorithm]:
    world = builder._world
    context: IAlgorithmContext = world.new(IAlgorithmContext)
    context._name, context._inputs, context._outputs = layer.name, layer.num_inputs, layer.num_outputs
    choices: list[IAlgorithm] = []
    for offset in range(3):
        choice: IAlgorithm = world.new(IAlgorithm)
        variant: IAlgorithmVariant = world.new(IAlgorithmVariant)
        variant._implementation, variant._tactic = 0x8000 + offset, best[0] ^ offset
        choice._variant, choice._timing = variant, best[1] + offset
        choices.append(choice)
    selector: Any = config._selector
    picked = guarded("select_algorithms", selector.select_algorithms, context, choices, failed=[])
    world.record.algorithm_selections += 1
    if not picked:
        if config._has("REJECT_EMPTY_ALGORITHMS"):
            raise _Stop(f"Error Code 4: Internal Error (the algorithm selector chose nothing for {layer.name})")
        picked = [0]
    return context, min((choices[i] for i in picked), key=lambda choice: choice._timing)


def _describe(
    builder: Builder,
    network: INetworkDefinition,
    config: IBuilderConfig,
    tactics: dict[str, int],
    calibration: str | None,
) -> dict[str, Any]:
    world = builder._world
    assert world.gpu is not None
    stripped = config._has("STRIP_PLAN")
    content: dict[str, Any] = {
        "tensorrt": world.version,
        "compute_capability": world.gpu.cc,
        "gpu": world.gpu.name,
        "network": network.name,
        "network_flags": [
            name for name in world.enums["NetworkDefinitionCreationFlag"].__members__ if network._has_flag(name)
        ],
        "inputs": {tensor.name: list(tensor.shape) for tensor in network._inputs},
        "outputs": [tensor.name for tensor in network._outputs],
        "layers": [layer.name for layer in network._layers],
        "weights": None if stripped else network._weights,
        "stripped_weights": network._weights if stripped else None,
        "flags": config._flag_names(),
        "profiles": [
            {name: [list(dims) for dims in shapes] for name, shapes in p._shapes.items()} for p in config._profiles
        ],
        "settings": {
            name: value if isinstance(value, (int, str)) else value.name for name, value in config._settings.items()
        },
        "pools": {world.enums["MemoryPoolType"](pool).name: size for pool, size in config._pools.items()},
        "tactic_sources": [
            name
            for name, source in world.enums["TacticSource"].__members__.items()
            if config._tactic_sources >> int(source) & 1
        ],
        "preview_features": [
            name
            for name, feature in world.enums["PreviewFeature"].__members__.items()
            if config._preview >> int(feature) & 1
        ],
        "quantization_flags": config._quantization_flags,
        "plugins": config._plugins,
        "calibration": calibration,
        "max_threads": builder.max_threads,
        "tactics": tactics,
        "precisions": {layer.name: layer._precision.name for layer in network._layers if layer._precision is not None},
    }
    if at_least(world.line, "10.0"):
        content["refittable_weights"] = sorted(network._refittable)
    return content
