"""The range of one tensor, from statistics of fixed size: the largest magnitude, or a histogram of magnitudes.

ONNX Runtime's own calibrators are not used: they keep every activation of every batch, or let histograms grow with the
data, and their default entropy search has a single candidate.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Protocol

from trt_warmcache._onnxruntime import import_extra
from trt_warmcache.calibration_data import CalibrationAlgorithm

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from trt_warmcache.calibration_data import Calibration

__all__ = ["Statistic", "statistics_for"]

BINS: Final = 4096
"""Bins of a histogram; at least half of them are in use once ranges have grown."""
QUANTIZED_BINS: Final = 128
"""Magnitudes that int8 can tell apart."""
SEARCH_BINS: Final = 1024
"""At most this many for the entropy search: with more of them, sparse tails look like noise and are clipped."""
_SMALLEST_LIMIT: Final = 2.0**-100  # below it, float32 cannot hold the reciprocal of a bin's width
_CANDIDATES: Final = 256
"""Thresholds that the search compares: steps of at most 0.8 % of the range, finer than int8 itself."""


class Statistic(Protocol):
    """What is kept of one tensor while batches go by."""

    def add(self, values: np.ndarray[Any, Any]) -> None:
        """Take one batch's values into account."""

    def threshold(self) -> float:
        """The magnitude to clip at; 0 for a tensor of zeros, NaN where anything was not finite."""


def statistics_for(calibration: Calibration) -> Callable[[], Statistic]:
    """What to make for each tensor, by the algorithm of a calibration."""
    if calibration.algorithm is CalibrationAlgorithm.MINMAX:
        return _Largest
    if calibration.algorithm is CalibrationAlgorithm.PERCENTILE:
        return lambda: _Percentile(calibration.percentile)
    return _Entropy


class _Largest:
    """The largest magnitude; NaN once anything was not finite."""

    def __init__(self) -> None:
        self._largest = 0.0

    def add(self, values: np.ndarray[Any, Any]) -> None:
        if values.size:
            # both reductions hand on NaN and infinity, and spare a copy of magnitudes
            largest = max(abs(float(values.max())), abs(float(values.min())))
            finite = math.isfinite(largest) and math.isfinite(self._largest)
            self._largest = max(self._largest, largest) if finite else math.nan

    def threshold(self) -> float:
        return self._largest


class _Histogram:
    """Counts of magnitudes in a fixed number of bins over [0, limit).

    When a value exceeds the limit, the limit doubles and neighbouring bins are added up. So the size stays the same,
    and the result depends on the values alone, not on the order of batches.
    """

    def __init__(self) -> None:
        self.counts = import_extra("numpy").zeros(BINS, dtype="int64")
        self.limit = 0.0
        self.largest = 0.0  # NaN once anything was not finite
        self.zeros = 0

    def add(self, values: np.ndarray[Any, Any]) -> None:
        np = import_extra("numpy")
        if not values.size:
            return
        magnitudes = np.abs(values, dtype=np.float32).reshape(-1)
        largest = float(magnitudes.max())
        if not (math.isfinite(largest) and math.isfinite(self.largest)):
            self.largest = math.nan
            return
        self.largest = max(self.largest, largest)
        if largest == 0:
            self.zeros += magnitudes.size
            return
        # the power of two above, so that bins of early and late batches coincide
        limit = max(2.0 ** math.frexp(largest)[1], _SMALLEST_LIMIT)
        self.limit = self.limit or limit
        while self.limit < limit:
            self.limit *= 2
            folded = self.counts[0::2] + self.counts[1::2]
            self.counts = np.concatenate([folded, np.zeros(BINS - folded.size, folded.dtype)])
        places = (magnitudes * np.float32(BINS / self.limit)).astype(np.int32)  # exact, being a power of two
        self.counts += np.bincount(places, minlength=BINS)

    def used(self) -> np.ndarray[Any, Any]:
        """Counts up to the largest magnitude, zeros included."""
        counts = self.counts.copy()
        counts[0] += self.zeros
        used: np.ndarray[Any, Any] = counts[: int(counts.nonzero()[0][-1]) + 1]
        return used


class _Percentile(_Histogram):
    """The magnitude below which a share of the values lies."""

    def __init__(self, percentile: float) -> None:
        super().__init__()
        self._share = percentile / 100

    def threshold(self) -> float:
        np = import_extra("numpy")
        if not self.largest > 0:
            return self.largest
        cumulated = np.cumsum(self.used())
        place = int(np.searchsorted(cumulated, self._share * cumulated[-1]))
        return min((place + 1) * self.limit / BINS, self.largest)


class _Entropy(_Histogram):
    """The clipping whose 128 int8 magnitudes tell most about the distribution (least Kullback-Leibler divergence)."""

    def threshold(self) -> float:
        np = import_extra("numpy")
        if not self.largest > 0:
            return self.largest
        counts, width = self.used().astype(np.float64), self.limit / BINS
        while counts.size > SEARCH_BINS:
            counts, width = np.add.reduceat(counts, np.arange(0, counts.size, 2)), width * 2
        # The first bin collects what ReLU cut off; its size says nothing about where to clip (TensorRT does the same).
        counts[0] = counts[1] if counts.size > 1 else counts[0]
        if counts.size <= QUANTIZED_BINS or not counts.any():
            return self.largest
        ends = np.unique(np.linspace(QUANTIZED_BINS, counts.size, _CANDIDATES).astype(int))
        best = min(ends[::-1], key=lambda end: _divergence(counts, int(end)))
        return min(float(best) * width, self.largest)


def _divergence(counts: np.ndarray[Any, Any], end: int) -> float:
    """Kullback-Leibler divergence between the distribution clipped at bin `end` and its int8 image."""
    np = import_extra("numpy")
    clipped = counts[:end]
    reference = clipped.copy()
    reference[-1] += counts[end:].sum()
    occupied = reference > 0
    level = np.arange(end) * QUANTIZED_BINS // end
    sums = np.bincount(level, weights=clipped, minlength=QUANTIZED_BINS)
    shares = np.bincount(level, weights=occupied, minlength=QUANTIZED_BINS)
    image = np.where(occupied, (sums / np.maximum(shares, 1))[level], 0)
    total = image.sum()
    if not total:
        return math.inf
    p = reference[occupied] / reference.sum()
    q = np.maximum(image[occupied] / total, 1e-12)  # the last bin may hold nothing but what was clipped
    return float((p * np.log(p / q)).sum())
