"""Real models that travel inside PyPI packages. The packages are located, never imported.

Install them with ``pip install --no-deps rapidocr-onnxruntime rapidocr nudenet ddddocr``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DETECTION", "REAL_MODELS", "RealModel"]


@dataclass(frozen=True)
class RealModel:
    """A model inside an installed package.

    Attributes:
        name: For the table.
        package: Import name of the package.
        file: Path inside it.
        profiles: Optimization profiles: min, opt and max per dynamic input.
    """

    name: str
    package: str
    file: str
    profiles: Mapping[str, Any]

    @property
    def path(self) -> Path | None:
        """Where the model lies, or None where its package is not installed."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            return None
        found = Path(spec.submodule_search_locations[0]) / self.file
        return found if found.is_file() else None


DETECTION = RealModel(
    "PP-OCRv4 detection",
    "rapidocr_onnxruntime",
    "models/ch_PP-OCRv4_det_infer.onnx",
    {"x": ("1x3x320x320", "1x3x640x640", "1x3x960x960")},
)

REAL_MODELS = (
    DETECTION,
    RealModel(
        "PP-OCRv6 recognition",
        "rapidocr",
        "models/PP-OCRv6_rec_small.onnx",
        {"x": ("1x3x48x160", "4x3x48x320", "8x3x48x960")},
    ),
    RealModel("NudeNet YOLOv8n", "nudenet", "320n.onnx", {"images": ("1x3x320x320", "1x3x320x320", "4x3x320x320")}),
    RealModel("ddddocr common", "ddddocr", "common.onnx", {"input1": ("1x1x64x64", "1x1x64x256", "1x1x64x512")}),
)
