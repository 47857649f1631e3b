"""Classic TensorRT, 8.6 to 11.x: builds on and for the GPU of this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trt_warmcache.builders._base import BuilderCapabilities, BuildInputs, BuildOutput, CalibrationRun, Progress
from trt_warmcache.builders._config import Setup, without_deprecation
from trt_warmcache.builders._device_lock import device_turn
from trt_warmcache.builders._log import TrtLog, listening
from trt_warmcache.builders._nvinfer import NvInferBuilder
from trt_warmcache.builders._selector import make_selector
from trt_warmcache.builders._timing import (
    AttachedTiming,
    TimingEntry,
    adopt_entries,
    attach_timing,
    cache_entries,
    count_entries,
    load_timing,
    pin_entries,
    restore_entries,
)
from trt_warmcache.calibration_data import CalibrationAlgorithm
from trt_warmcache.calibration_table import CalibrationTable
from trt_warmcache.calibrators import CalibratorOutcome, DeviceBuffers, make_calibrator
from trt_warmcache.errors import BuildError, ConfigError
from trt_warmcache.memo import DigestMemo
from trt_warmcache.options import BuildOptions, TimingMode
from trt_warmcache.tactics import TacticReplay
from trt_warmcache.target import Target

__all__ = ["TensorRTBuilder"]

log = logging.getLogger("trt_warmcache")


class TensorRTBuilder(NvInferBuilder):
    """Builds with ``tensorrt``. What a version lacks is found by looking, never by comparing version numbers.

    Args:
        module: The bindings to drive, instead of importing ``tensorrt``.
        memo: Remembers the version of an unchanged library file.
        lock_folder: Where builds of other processes on the same GPU are waited for; a folder of this host.
        buffers: Device memory for calibration batches; cuda-python or torch when None.
    """

    flavour = "tensorrt"

    def __init__(
        self,
        module: Any = None,
        *,
        memo: DigestMemo | None = None,
        lock_folder: Path | None = None,
        buffers: DeviceBuffers | None = None,
    ) -> None:
        super().__init__(module, memo=memo)
        self._buffers = buffers
        self._lock_folder = None if lock_folder is None else Path(lock_folder)

    @property
    def capabilities(self) -> BuilderCapabilities:  # type: ignore[override]
        """What this version can do; told by its number, so that a hit imports nothing."""
        major = self._numbers[0]
        return BuilderCapabilities(
            timing_cache=True, calibration_table=major < 11, progress=major >= 10, needs_gpu=True, plugins=True
        )

    def spawn_spec(self) -> Mapping[str, Any] | None:
        spec = super().spawn_spec()
        if spec is None or self._lock_folder is None:
            return spec
        return {**spec, "arguments": {"lock_folder": str(self._lock_folder)}}

    def check(self, options: BuildOptions, target: Target) -> None:
        super().check(options, target)
        if target.compute_capabilities:
            raise ConfigError(
                "Target(compute_capabilities=...) is for TensorRT-RTX; classic TensorRT builds for one GPU: Target.detect(), or Target(gpu=..., compute_capability=...)."
            )
        # From 10.8 the timing cache records them; without one an algorithm selector can, up to 10.16.
        recordable = {TimingMode.OFF: self._numbers[0] < 11, TimingMode.REQUIRE: self._numbers[:2] < (10, 8)}
        if (
            options.record_tactics
            and isinstance(options.timing, TimingMode)
            and not recordable.get(options.timing, True)
        ):
            raise ConfigError(
                f"record_tactics measures every layer into a timing cache here, which timing={options.timing.value!r} forbids; leave timing out."
            )

    def _set_calibration(self, setup: Setup, inputs: BuildInputs) -> Any:
        if inputs.calibration is None:
            return None
        if isinstance(inputs.calibration, CalibrationRun):
            run = inputs.calibration
            calibrator = make_calibrator(
                setup.trt, run.algorithm, run.batches, lambda: None, run.write, buffers=self._buffers
            )
        else:
            table = CalibrationTable.parse(inputs.calibration)
            algorithm = CalibrationAlgorithm.of_header(table.algorithm)
            calibrator = make_calibrator(setup.trt, algorithm, None, lambda: table, lambda _: None)
        with without_deprecation():
            setup.config.int8_calibrator = calibrator
            if isinstance(inputs.calibration, CalibrationRun):
                self._set_calibration_profile(setup, inputs.calibration)
        return calibrator

    def _set_calibration_profile(self, setup: Setup, run: CalibrationRun) -> None:
        # Without one TensorRT calibrates with the optimum of the first profile, whatever the batches' shape.
        profile = setup.builder.create_optimization_profile()
        for name, shape in run.shapes.items():
            profile.set_shape(name, shape, shape, shape)
        if not setup.config.set_calibration_profile(profile):
            raise ConfigError(f"TensorRT refused the shapes of the calibration batches: {dict(run.shapes)}.")

    def _finish_calibration(self, calibrator: Any, inputs: BuildInputs, *, built: bool) -> None:
        if calibrator is None:
            return
        outcome = calibrator.finish()
        if built and outcome is not CalibratorOutcome.REUSED and not isinstance(inputs.calibration, CalibrationRun):
            raise BuildError(
                f"TensorRT {self.version()} built without asking for the calibration table, so nothing in this engine is calibrated. Set BuildOptions(int8=True), and leave out options that switch int8 off."
            )

    def calibrate(self, inputs: BuildInputs) -> CalibrationTable | None:
        """Calibrate with TensorRT's own calibrators, as part of a quick build whose plan is not kept.

        Args:
            inputs: As for a build, with a :class:`CalibrationRun` as calibration.

        Returns:
            The table; None where TensorRT wrote none.

        Raises:
            ConfigError: This version has no calibrators.
        """
        assert isinstance(inputs.calibration, CalibrationRun)
        tables: list[CalibrationTable] = []
        # kernels that are thrown away need no tuning, and no timing cache must learn of them
        quick = replace(
            inputs.options, int8=True, optimization_level=0, timing=TimingMode.OFF, tactics=None, record_tactics=None
        )
        self.build(replace(inputs, options=quick, calibration=replace(inputs.calibration, write=tables.append)))
        return tables[0] if tables else None

    def _set_extras(self, setup: Setup, inputs: BuildInputs, messages: TrtLog) -> _Extras:
        options = inputs.options
        replay = options.tactics if isinstance(options.tactics, TacticReplay) else None
        editable = hasattr(setup.trt, "TimingCacheKey")
        extras = _Extras()
        if options.timing is not TimingMode.OFF:
            # The shared cache has entries of every model; one that starts empty ends with those of this build alone.
            extras.records_cache = bool(options.record_tactics) and editable and not (replay and replay.layers)
            extras.timing = attach_timing(setup.config, None if extras.records_cache else inputs.timing)
            if extras.records_cache:
                extras.stored, extras.timing.rejected = load_timing(setup.config, inputs.timing)
            if extras.timing.rejected:
                messages.add("WARNING", f"{extras.timing.rejected}; layers are timed anew.")
        if extras.records_cache or (replay is not None and replay.entries):
            setup.flag("EDITABLE_TIMING_CACHE")
        if replay is not None and replay.entries and extras.timing is not None:
            extras.unpinned, extras.replaced = pin_entries(setup.trt, extras.timing.cache, replay.entries)
        if (replay is not None and replay.layers) or (options.record_tactics and not extras.records_cache):
            extras.selector = make_selector(setup.trt, replay)
            with without_deprecation():
                setup.config.algorithm_selector = extras.selector
            if replay is not None:
                setup.flag("REJECT_EMPTY_ALGORITHMS")
        return extras

    def _build_again(self, setup: Setup, inputs: BuildInputs, extras: _Extras) -> bool:
        # TensorRT can change entries of a timing cache but not add any. Where a key was unknown, the build just done has
        # measured it, so its tactic can be set now and counts in a second build.
        if extras.timing is None:
            return False
        cache, changed = extras.timing.cache, False
        if extras.stored is not None:
            changed = adopt_entries(cache, extras.stored)
        if extras.unpinned:
            assert isinstance(inputs.options.tactics, TacticReplay)
            extras.unpinned, replaced = pin_entries(setup.trt, cache, inputs.options.tactics.entries)
            extras.replaced |= replaced
            changed |= bool(replaced)
        return changed and not extras.unpinned

    def _check_extras(self, inputs: BuildInputs, extras: _Extras) -> None:
        if extras.selector is not None and extras.selector.missing:
            names = ", ".join(map(repr, extras.selector.missing[:5]))
            raise BuildError(
                f"The recorded tactics do not exist for layers {names}: another model, profile, GPU or TensorRT made the record. Record them again."
            )
        if extras.unpinned:
            raise BuildError(
                f"{len(extras.unpinned)} pinned timing-cache keys, such as {extras.unpinned[0]}, do not occur in this build: another model, profile, GPU or TensorRT made the record. Record them again."
            )

    def _add_extras(self, output: BuildOutput, extras: _Extras, inputs: BuildInputs) -> BuildOutput:
        output = self._with_records(output, extras, inputs)
        if inputs.options.record_tactics and output.tactics is None:
            told = "record_tactics found nothing to record: TensorRT timed nothing in this build."
            output = replace(output, warnings=(*output.warnings, told))
        return output

    def _with_records(self, output: BuildOutput, extras: _Extras, inputs: BuildInputs) -> BuildOutput:
        tactics = None
        if extras.selector is not None:
            strangers = extras.selector.not_asked()
            if strangers:
                names = ", ".join(map(repr, strangers[:5]))
                raise BuildError(
                    f"The recorded tactics name layers that do not occur in this build, such as {names}: another model, profile or TensorRT made the record. Record them again."
                )
            if extras.selector.taken:
                tactics = TacticReplay(layers=extras.selector.taken)
        if extras.timing is None:
            return replace(output, tactics=tactics)
        cache, rejected = extras.timing.cache, extras.timing.rejected
        if extras.records_cache:
            entries = {entry.key: entry.tactic for entry in cache_entries(cache)}
            tactics = TacticReplay(entries=entries) if entries else None
        # Pins are for this build; other models share the cache, and their keys say nothing of these tactics.
        restore_entries(cache, extras.replaced)
        if extras.stored is not None and not cache.combine(extras.stored, ignore_mismatch=False):
            rejected = "TensorRT refused to combine the stored timing cache with what was measured"
        return replace(
            output,
            timing=bytes(cache.serialize()),
            timing_entries=count_entries(cache),
            timing_rejected=rejected,
            tactics=tactics,
        )

    def _turn(self, inputs: BuildInputs) -> AbstractContextManager[None]:
        # A target that does not name its GPU is built for on this process's: the turn is that GPU's all the same.
        device = inputs.target.uuid or self.current_device() or "any GPU"

        def on_wait(done: int) -> None:
            inputs.on_progress(Progress("Waiting for the GPU", None, done, 1))

        return device_turn(device, inputs.checkpoint, folder=self._lock_folder, on_wait=on_wait)

    # ---- timing caches ------------------------------------------------------------------------------------------

    def merge_timing(self, newer: bytes, older: bytes) -> bytes:
        with self._timing_tools() as (_, config, messages):
            # combine() keeps the receiver's entries on conflict, so the newer cache receives.
            cache, other = (self._load_timing(config, blob, messages) for blob in (newer, older))
            if not cache.combine(other, ignore_mismatch=False):
                raise BuildError(
                    "TensorRT refused to combine two timing caches: "
                    + messages.reason("they belong to different versions or devices.")
                )
            return bytes(cache.serialize())

    def timing_entries(self, blob: bytes) -> tuple[TimingEntry, ...]:
        """The entries of an editable timing cache.

        Raises:
            ConfigError: This version cannot list them (10.8 and later can).
            BuildError: The blob belongs to another version or device.
        """
        with self._timing_tools(editable=True) as (_, config, messages):
            return cache_entries(self._load_timing(config, blob, messages))

    def pin_timing(self, blob: bytes, tactics: TacticReplay) -> bytes:
        """A timing cache with other tactics for some of its keys.

        Raises:
            ConfigError: This version cannot edit (10.8 and later can), or a key is unknown.
            BuildError: The blob belongs to another version or device.
        """
        with self._timing_tools(editable=True) as (trt, config, messages):
            cache = self._load_timing(config, blob, messages)
            missing, _ = pin_entries(trt, cache, tactics.entries)
            if missing:
                raise ConfigError(f"The timing cache has no entry for {', '.join(missing[:5])}; none was changed.")
            return bytes(cache.serialize())

    @contextmanager
    def _timing_tools(self, *, editable: bool = False) -> Iterator[tuple[Any, Any, TrtLog]]:
        trt = self._trt()
        if editable and not hasattr(trt, "TimingCacheKey"):
            raise ConfigError(
                f"TensorRT {self.version()} cannot list or edit a timing cache; that needs TensorRT 10.8 or later."
            )
        with listening(trt) as (logger, messages):
            builder = self._create_builder(trt, logger, messages)
            yield trt, builder.create_builder_config(), messages

    @staticmethod
    def _load_timing(config: Any, blob: bytes, messages: TrtLog) -> Any:
        cache, rejected = load_timing(config, blob)
        if rejected:
            why = next(reversed(messages.warnings), "it gave an empty cache")
            raise BuildError(f"This timing cache cannot be read here: {why}", log=tuple(messages.tail))
        return config.create_timing_cache(b"") if cache is None else cache

    def current_device(self) -> str | None:
        """UUID of the GPU that builds in this process run on, or None where nobody can tell."""
        uuid = self._built_for().get("uuid")
        return uuid if isinstance(uuid, str) else None

    def _built_for(self) -> Mapping[str, Any]:
        """The GPU that built it, asked from NVML where that is installed; nothing is assumed otherwise."""
        if self._module is not None:
            return {}
        try:
            return Target.detect().to_json()
        except ConfigError as error:
            log.debug("the building GPU could not be asked: %s", error)
            return {}


@dataclass
class _Extras:
    """What a classic build holds on to, and asks afterwards.

    Attributes:
        timing: The timing cache; None where the build has none.
        records_cache: Its entries are to become a record of tactics.
        stored: With `records_cache`, the cache that others share; its tactics hold for the layers that it knows.
        selector: The algorithm selector, where one pins or records.
        unpinned: Keys to be pinned that the timing cache does not have yet.
        replaced: What pinned entries were before.
    """

    timing: AttachedTiming | None = None
    records_cache: bool = False
    stored: Any = None
    selector: Any = None
    unpinned: tuple[str, ...] = ()
    replaced: dict[Any, Any] = field(default_factory=dict)
