"""A cold start, and a warm one in a fresh process, of a real text-detection model.

The model (PP-OCRv4) comes inside the PyPI package ``rapidocr-onnxruntime``; TensorRT-RTX builds it on any machine,
with or without a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = "models/ch_PP-OCRv4_det_infer.onnx"
PROFILES = {"x": ("1x3x320x320", "1x3x640x640", "1x3x960x960")}


def find_model() -> Path:
    """The model file inside the installed package, which is not imported."""
    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("Install the package that carries the model: pip install --no-deps rapidocr-onnxruntime")
    return Path(spec.submodule_search_locations[0]) / MODEL


def start(store: str, model: str) -> None:
    """What an application does when it starts: get the engine. Prints one JSON line."""
    began = time.perf_counter()
    import trt_warmcache as twc

    with twc.EngineManager(store, builder="tensorrt_rtx") as manager:
        engine = manager.get(model, profiles=PROFILES, name="ppocr_det", version="4")
        seconds = time.perf_counter() - began
        loaded = sorted({"tensorrt_rtx", "onnx", "numpy"} & sys.modules.keys())
        print(
            json.dumps(
                {
                    "outcome": engine.outcome.value,
                    "seconds": seconds,
                    "bytes": engine.plan.nbytes,
                    "loaded": loaded,
                    "name": engine.key.name,
                }
            )
        )


def main() -> None:
    """Start twice, each time in a process of its own, and compare."""
    model = str(find_model())
    with tempfile.TemporaryDirectory() as store:
        rows = []
        for _ in ("cold", "warm"):
            done = subprocess.run([sys.executable, __file__, store, model], check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"model   {Path(model).name} ({Path(model).stat().st_size / 1e6:.1f} MB)")
    print(f"engine  {rows[0]['name']} ({rows[0]['bytes'] / 1e6:.1f} MB)\n")
    print("start  outcome  import + get  loaded on the way")
    for word, row in zip(("cold", "warm"), rows, strict=True):
        print(
            f"{word:5}  {row['outcome']:7}  {row['seconds'] * 1e3:9.1f} ms  {', '.join(row['loaded']) or 'nothing of TensorRT, onnx or numpy'}"
        )
    print(f"\nThe warm start is {rows[0]['seconds'] / rows[1]['seconds']:.0f} times faster.")


if __name__ == "__main__":
    start(*sys.argv[1:]) if len(sys.argv) == 3 else main()
