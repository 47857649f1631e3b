"""The classic adapter over the real 11.4 bindings, which build for real over the TensorRT-RTX library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.shim11 import shim_environment
from tests.support import real_model

from trt_warmcache.options import option_specs

#: Settings that the TensorRT-RTX library under the bindings refuses, and what is said of them.
REFUSED = {
    "tactics": "tactics='layers' does not exist in TensorRT 11.4.0",
    "preview_features": "preview_features='profile_sharing' does not exist in TensorRT 11.4.0",
    "dla_core": "this machine has 0 DLA cores",
    "hardware_compatibility": "hardware_compatibility_level was to be AMPERE_PLUS and stayed NONE",
    "runtime_platform": "refused runtime_platform='windows_amd64': IBuilderConfig::setRuntimePlatform",
    "build_route": "refused build_route='x=1'",
    "engine_capability": "Could not find any implementation",
    "version_compatible": "Unable to load library: libnvinfer_lean",
    "refit": "graph_jit.cpp",
    "refittable_weights": "graph_jit.cpp",
    "strip_plan": "graph_jit.cpp",
}
#: Settings of something else than the configuration that is read back.
ELSEWHERE = {"native_instancenorm", "plugin_override", "timing_scope", "builder_threads"}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process over the stand-in libraries found."""
    tmp_path = tmp_path_factory.mktemp("shim")
    model = real_model("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx")
    environment = shim_environment(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-W", "error", "-m", "tests.builders.shim_adapter", str(model), str(tmp_path / "locks")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_option_reaches_the_real_configuration(facts: dict[str, Any]) -> None:
    """Each option that 11.4 has changes what the real bindings hold, or its refusal is told; all others are refused by name."""
    for name, spec in option_specs().items():
        told = facts["options"][name]
        if not spec.available("tensorrt", (11, 4)):
            assert f"Option {name!r} does not exist in TensorRT 11.4.0" in told
        elif name in REFUSED:
            assert REFUSED[name] in told
        else:
            assert told.startswith("changed "), name
            assert (told == "changed ") is (name in ELSEWHERE), name


def test_classic_adapter_builds_a_real_model(facts: dict[str, Any]) -> None:
    """PP-OCRv4 detection: profiles, timing-cache calls, progress, cancellation, errors; every call is a real one."""
    assert facts["version"] == "11.4.0.106"
    assert facts["plan"][0] == "vtrt"
    assert facts["plan"][1] > 1_000_000
    assert facts["config"]["builder_optimization_level"] == 2
    assert facts["config"]["memory_pools"] == {"workspace": 1 << 30}
    assert facts["config"]["engine_capability"] == "STANDARD"
    assert facts["config"]["flags"] == ["EDITABLE_TIMING_CACHE", "TF32"]
    assert facts["config"]["profiles"] == 1
    assert facts["steps"] > 20
    assert facts["roots"] == ["Building engine"]
    assert facts["timing"] > 0
    assert facts["timing_entries"] == facts["listed"] == 0  # TensorRT-RTX underneath never fills it
    assert facts["rejected"] == ""
    assert facts["second"][0] > 1_000_000
    assert facts["merged"] > 0
    assert facts["cancelled"] == "BuildTimeout: cancelled by the test"
    assert facts["no profile"].startswith("BuildError")
    assert "optimization profile" in facts["no profile"]
    assert facts["broken"].startswith("ModelError")
    assert "NoSuchOperator" in facts["broken"]
    assert "Option 'fp16' does not exist in TensorRT 11.4.0" in facts["fp16"]
    assert facts["configured"]["max_aux_streams"] == 1
    assert facts["load"].startswith("IncompatibleError")
