"""Inputs for driving an adapter directly, without a manager."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fakes import Line, make_tensorrt
from tests.support import PROFILE, tiny_model

import trt_warmcache as twc
from trt_warmcache.builders import BuildInputs, TensorRTBuilder
from trt_warmcache.model import ModelSource
from trt_warmcache.profiles import normalize_profiles, validate_profiles

A10 = twc.Target(gpu="NVIDIA A10", compute_capability="8.6", sm_count=72, uuid="GPU-a10", driver="580.1", cuda="13.0")


def build_inputs(
    model: Any = None,
    *,
    profiles: Any = PROFILE,
    target: twc.Target = A10,
    options: twc.BuildOptions | None = None,
    **more: Any,
) -> BuildInputs:
    """What a manager would hand to a builder for a model."""
    source = ModelSource.open(tiny_model() if model is None else model, memo=twc.DigestMemo(None))
    validated = validate_profiles(normalize_profiles(profiles), source.summary)
    return BuildInputs(
        model=source,
        network_name="trtwc-test",
        profiles=validated,
        options=options or twc.BuildOptions(),
        target=target,
        **more,
    )


class LineBuilder(TensorRTBuilder):
    """The classic adapter over a fake release line; a fresh process can make it too."""

    def __init__(self, line: Line = "10.16", lock_folder: str | None = None, seconds_per_layer: float = 0.0) -> None:
        super().__init__(
            make_tensorrt(line, seconds_per_layer=seconds_per_layer),
            lock_folder=None if lock_folder is None else Path(lock_folder),
        )
        self._arguments = {"line": line, "lock_folder": lock_folder, "seconds_per_layer": seconds_per_layer}

    def spawn_spec(self) -> Mapping[str, Any]:
        return {"factory": "tests.builders.support:LineBuilder", "arguments": self._arguments}


def seven_iterations(network: Any, config: Any) -> None:
    """A configure hook that can travel."""
    config.avg_timing_iterations = 7


def start_and_hang(network: Any, config: Any) -> None:
    """A configure hook that starts a process, tells its number, and never returns."""
    child = subprocess.Popen(["sleep", "600"])
    part = Path(os.environ["TEST_PID_FILE"]).with_suffix(".part")
    part.write_text(str(child.pid))
    part.replace(os.environ["TEST_PID_FILE"])
    time.sleep(600)
