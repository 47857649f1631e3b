"""Classic TensorRT, 8.6 to 11.x: builds on and for the GPU of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trt_warmcache.builders._base import BuilderCapabilities, BuildInputs
from trt_warmcache.builders._config import Setup
from trt_warmcache.builders._nvinfer import NvInferBuilder, TrtLog, make_logger
from trt_warmcache.errors import BuildError, ConfigError
from trt_warmcache.options import BuildOptions, TimingMode
from trt_warmcache.target import Target

__all__ = ["TensorRTBuilder"]


class TensorRTBuilder(NvInferBuilder):
    """Builds with ``tensorrt``. What a version lacks is found by looking, never by comparing version numbers."""

    flavour = "tensorrt"
    capabilities = BuilderCapabilities(
        timing_cache=True, calibration_table=True, progress=True, needs_gpu=True, plugins=True
    )

    def check(self, options: BuildOptions, target: Target) -> None:
        super().check(options, target)
        if target.compute_capabilities:
            raise ConfigError(
                "Target(compute_capabilities=...) is for TensorRT-RTX; classic TensorRT builds for one GPU: Target.detect(), or Target(gpu=..., compute_capability=...)."
            )

    def _set_calibration(self, setup: Setup, inputs: BuildInputs) -> Any:
        if inputs.calibration is None:
            return None
        if not hasattr(setup.trt, "IInt8EntropyCalibrator2"):
            raise ConfigError(
                f"TensorRT {self.version()} has no calibrators: they ended with 10.x. Turn the table into Q/DQ nodes of the model instead."
            )
        calibrator = make_table_reader(setup.trt, inputs.calibration)
        setup.config.int8_calibrator = calibrator
        return calibrator

    def _set_timing(self, setup: Setup, inputs: BuildInputs, messages: TrtLog) -> Any:
        if inputs.options.timing is TimingMode.OFF:
            return None
        # A damaged blob gives an empty cache and no error; that it was ours and whole was checked by digest before.
        cache = setup.config.create_timing_cache(inputs.timing or b"")
        if not setup.config.set_timing_cache(cache, ignore_mismatch=False):
            # Measured on another device: start from nothing rather than from wrong timings.
            cache = setup.config.create_timing_cache(b"")
            setup.config.set_timing_cache(cache, ignore_mismatch=False)
            messages.add("WARNING", "The stored timing cache was measured on another device; it was not used.")
        return cache

    def _take_timing(self, setup: Setup) -> bytes:
        return bytes(setup.config.get_timing_cache().serialize())

    def merge_timing(self, newer: bytes, older: bytes) -> bytes:
        trt = self._trt()
        messages = TrtLog()
        logger = make_logger(trt, messages)
        builder = self._create_builder(trt, logger, messages)
        config = builder.create_builder_config()
        # combine() keeps the receiver's entries on conflict, so the newer cache receives.
        cache = config.create_timing_cache(newer)
        other = config.create_timing_cache(older)
        if not cache.combine(other, ignore_mismatch=False):
            raise BuildError(
                "TensorRT refused to combine two timing caches: "
                + messages.reason("they belong to different versions or devices.")
            )
        return bytes(cache.serialize())

    def _built_for(self) -> Mapping[str, Any]:
        return {}


def make_table_reader(trt: Any, table: bytes) -> Any:
    """A calibrator that only hands over a finished table; it is never asked for data unless TensorRT refuses the table."""

    class TableReader(trt.IInt8EntropyCalibrator2):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IInt8EntropyCalibrator2.__init__(self)

        def get_batch_size(self) -> int:
            return 1

        def get_batch(self, names: list[str]) -> None:
            return None

        def read_calibration_cache(self) -> bytes:
            return table

        def write_calibration_cache(self, cache: Any) -> None:
            return None

    return TableReader()
