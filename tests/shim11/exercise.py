"""Run in a subprocess with the environment of `shim_environment`: uses the raw 11.4 API and prints JSON.

Usage: exercise.py api | exercise.py build MODEL
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tensorrt_bindings as trt  # type: ignore[import-not-found, unused-ignore]


class Log(trt.ILogger):  # type: ignore[misc, unused-ignore]
    """Keeps warnings and errors."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.lines: list[str] = []

    def log(self, severity: Any, msg: str) -> None:
        if severity.name in {"ERROR", "INTERNAL_ERROR", "WARNING"}:
            self.lines.append(f"{severity.name}: {msg}")


class Monitor(trt.IProgressMonitor):  # type: ignore[misc, unused-ignore]
    """Counts events; cancels after a number of steps."""

    def __init__(self, steps_allowed: int) -> None:
        trt.IProgressMonitor.__init__(self)
        self.left, self.events, self.roots = steps_allowed, 0, []  # type: int, int, list[str]

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        self.events += 1
        if parent_phase is None:
            self.roots.append(phase_name)

    def phase_finish(self, phase_name: str) -> None:
        self.events += 1

    def step_complete(self, phase_name: str, step: int) -> bool:
        self.events += 1
        self.left -= 1
        return self.left >= 0


class Writer(trt.IStreamWriter):  # type: ignore[misc, unused-ignore]
    """Collects a streamed plan."""

    def __init__(self) -> None:
        trt.IStreamWriter.__init__(self)
        self.data = bytearray()

    def write(self, data: bytes) -> int:
        self.data += data
        return len(data)


def api() -> dict[str, Any]:
    """Public classes with their members, and the numbers of enums."""
    classes = {name: value for name, value in vars(trt).items() if isinstance(value, type)}
    return {
        "version": trt.__version__,
        "members": {name: [m for m in dir(cls) if not m.startswith("_")] for name, cls in classes.items()},
        "enums": {
            name: {member: int(value) for member, value in cls.__members__.items()}
            for name, cls in classes.items()
            if hasattr(cls, "__members__")
        },
    }


def build(path: str) -> dict[str, Any]:
    """Parses, fails without a profile, builds, builds to a stream, is cancelled, and fails to load the plan."""
    logger = Log()
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    network.name = "detection"
    parser = trt.OnnxParser(network, logger)
    facts: dict[str, Any] = {"parsed": parser.parse(Path(path).read_bytes(), path=path)}
    facts["layers"] = network.num_layers
    facts["input"] = [network.get_input(0).name, list(network.get_input(0).shape)]
    facts["output"] = network.get_output(0).name

    bare = builder.create_builder_config()
    facts["without_profile"] = builder.build_serialized_network(network, bare)
    facts["first_error"] = next(line for line in logger.lines if line.startswith("ERROR"))

    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 1 << 30)
    config.builder_optimization_level = 2
    profile = builder.create_optimization_profile()
    profile.set_shape(facts["input"][0], (1, 3, 32, 32), (1, 3, 64, 64), (1, 3, 96, 96))
    facts["profile_index"] = config.add_optimization_profile(profile)
    facts["cache_before"] = config.get_timing_cache() is None
    cache = config.create_timing_cache(b"")
    facts["cache_set"] = config.set_timing_cache(cache, False)
    monitor = Monitor(1_000_000)
    config.progress_monitor = monitor
    plan = builder.build_serialized_network(network, config)
    facts["plan"] = [bytes(plan)[:4].decode(), plan.nbytes]
    facts["events"], facts["roots"] = monitor.events, list(monitor.roots)
    facts["cache_bytes"] = len(bytes(config.get_timing_cache().serialize()))

    writer = Writer()
    facts["streamed"] = builder.build_serialized_network_to_stream(network, config, writer)
    # Not compared byte by byte: for this model TensorRT-RTX itself fills some two hundred bytes differently each time.
    facts["stream_like_plan"] = bytes(writer.data[:64]) == bytes(plan)[:64] and len(writer.data) == plan.nbytes

    config.progress_monitor = Monitor(3)
    logger.lines.clear()
    facts["cancelled"] = builder.build_serialized_network(network, config)
    facts["cancel_errors"] = logger.lines
    facts["engine"] = trt.Runtime(logger).deserialize_cuda_engine(plan) is not None
    return facts


if __name__ == "__main__":
    sys.stdout.write(json.dumps(api() if sys.argv[1] == "api" else build(sys.argv[2])))
