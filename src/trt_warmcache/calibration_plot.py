"""Histograms of the scales of two calibration tables; needs the ``plot`` extra (matplotlib)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from trt_warmcache.calibration_table import CalibrationTable, usable
from trt_warmcache.errors import ConfigError

__all__ = ["plot_scales"]

_BINS = 40
_SMALL = 1e-6


def plot_scales(
    before: CalibrationTable, after: CalibrationTable, path: Path, *, names: tuple[str, str] = ("before", "after")
) -> None:
    """Draw how the scales are distributed in both tables, and how much each tensor's changed.

    Args:
        before: One table.
        after: The other.
        path: Where to write; the extension decides on the format (PNG, PDF, SVG).
        names: What to call the tables.

    Raises:
        ConfigError: matplotlib is not installed, there is nothing to draw, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Plots need the package {error.name}: pip install 'trt_warmcache[plot]'. The text output needs nothing."
        ) from error
    scales = [[scale for scale in table.scales.values() if usable(scale)] for table in (before, after)]
    common = [name for name, scale in before.scales.items() if usable(scale) and usable(after.scales.get(name, 0.0))]
    ratios = [after.scales[name] / before.scales[name] for name in common]
    if not scales[0] and not scales[1]:
        raise ConfigError("Neither table has a usable scale, so there is nothing to draw.")
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _histogram(left, scales, list(names))
    left.set(xscale="log", xlabel="scale (range / 127)", ylabel="tensors", title="Scales")
    left.legend(reverse=True)  # matplotlib draws, and lists, the last series first
    if ratios:
        _histogram(right, [ratios], None)
        right.axvline(1.0, color="black", linewidth=1)
    right.set(xlabel=f"{names[1]} / {names[0]}", ylabel="tensors", title=f"Change of {len(ratios)} common tensors")
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter("x{x:g}")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Cannot write the plot {path}: {error}. Use .png, .pdf or .svg in a writable folder."
        ) from error


def _histogram(axes: Any, series: list[list[float]], labels: list[str] | None) -> None:
    """Histograms over bins of equal width on a logarithmic axis."""
    low, high = min(map(min, filter(None, series))), max(map(max, filter(None, series)))
    # equal values would make bins of no width
    low, high = math.log10(low) - _SMALL, math.log10(high) + _SMALL
    edges = [10 ** (low + (high - low) * step / _BINS) for step in range(_BINS + 1)]
    axes.hist(series, bins=edges, label=labels, histtype="stepfilled", alpha=0.6)
