"""The classic adapter over the real 11.4 bindings, which build for real over the TensorRT-RTX library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.shim11 import shim_environment
from tests.support import real_model


def test_classic_adapter_builds_a_real_model(tmp_path: Path) -> None:
    """PP-OCRv4 detection: profiles, timing-cache calls, progress, cancellation, errors; every call is a real one."""
    model = real_model("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx")
    environment = shim_environment(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-W", "error", "-m", "tests.builders.shim_adapter", str(model), str(tmp_path / "locks")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout)
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
