"""What the classic and the RTX adapter share: one Python API, driven carefully.

TensorRT fails quietly. A build returns None, a profile index is -1, a timing cache made from garbage is empty, and
the reason is in the log only. So a logger is always attached, every result is checked, and the *first* logged error
is the one reported: a second one about the CUDA driver often follows and misleads.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from trt_warmcache.builders._base import BuilderCapabilities, BuildInputs, BuildOutput, LoadNeeds, Progress
from trt_warmcache.builders._config import Setup, apply_options, effective_config, network_flags
from trt_warmcache.builders._folder import working_folder
from trt_warmcache.builders._library import LIBRARIES, find_library, loaded_library, module_available, version_of
from trt_warmcache.builders._log import TrtLog, listening
from trt_warmcache.builders._plan import check_header
from trt_warmcache.builders._plugins import PluginLoader, creators
from trt_warmcache.builders._refit import check_refitted, refit
from trt_warmcache.errors import BuildError, ConfigError, IncompatibleError, IntegrityError, ModelError
from trt_warmcache.memo import DigestMemo
from trt_warmcache.options import BuildOptions
from trt_warmcache.profiles import ShapeProfile
from trt_warmcache.target import Target

__all__ = ["NvInferBuilder"]


class NvInferBuilder:
    """Common base of the two adapters; see :class:`~trt_warmcache.builders.EngineBuilder` for the methods.

    Args:
        module: The bindings to drive, instead of importing this flavour's own; for tests and unusual installs.
        memo: Remembers the version of an unchanged library file.
    """

    flavour: str
    capabilities: BuilderCapabilities

    def __init__(self, module: Any = None, *, memo: DigestMemo | None = None) -> None:
        self._module = module
        self._memo = memo if memo is not None else DigestMemo(None)
        self._version: str | None = None
        self._plugins = PluginLoader()

    # ---- identity ---------------------------------------------------------------------------------------------

    @classmethod
    def available(cls) -> bool:
        """Whether this flavour's bindings are installed; imports nothing."""
        return module_available(LIBRARIES[cls.flavour].module)

    def version(self) -> str:
        if self._version is None:
            self._version = self._ask_version()
        return self._version

    def _ask_version(self) -> str:
        if self._module is not None:
            return str(self._module.__version__)
        names = LIBRARIES[self.flavour]
        if not self.available():
            raise ConfigError(
                f"{names.module} is not installed; install the extra: pip install 'trt_warmcache[{self._extra}]'."
            )
        library = find_library(names)
        if library is None:
            return str(self._trt().__version__)
        try:
            return version_of(library, self._memo)
        except OSError as error:
            raise ConfigError(
                f"Cannot load {library}: {error}. Reinstall {names.module}, or check its CUDA libraries."
            ) from error

    def version_conflict(self) -> tuple[str, str] | None:
        """Versions of bindings and loaded library where they differ: another copy was loaded first."""
        if self._module is not None:
            return None
        loaded = loaded_library(LIBRARIES[self.flavour].soname)
        bindings = str(getattr(self._trt(), "__version__", ""))
        if loaded is None or not bindings:
            return None
        library = version_of(loaded, self._memo)
        return None if library.split(".")[:3] == bindings.split(".")[:3] else (bindings, library)

    @property
    def _extra(self) -> str:
        return "rtx" if self.flavour == "tensorrt_rtx" else "tensorrt"

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.version().split(".") if part.isdigit())

    def _trt(self) -> Any:
        if self._module is None:
            name = LIBRARIES[self.flavour].module
            try:
                module = importlib.import_module(name)
            except ImportError as error:
                raise ConfigError(
                    f"Cannot import {name}: {error}. Install the extra: pip install 'trt_warmcache[{self._extra}]'."
                ) from error
            if not hasattr(module, "Builder"):
                raise ConfigError(
                    f"The installed {name} has no Builder (a stub package, or a lean or dispatch runtime); install the full one: pip install 'trt_warmcache[{self._extra}]'."
                )
            return module
        return self._module

    def spawn_spec(self) -> Mapping[str, Any] | None:
        """How a fresh process makes this builder; None where it was given bindings of its own."""
        if self._module is not None:
            return None
        return {"factory": f"{type(self).__module__}:{type(self).__qualname__}", "arguments": {}}

    # ---- checks -----------------------------------------------------------------------------------------------

    def check(self, options: BuildOptions, target: Target) -> None:
        options.require_available(self.flavour, self._numbers)
        if target.tensorrt is not None and target.tensorrt.split(".")[:3] != self.version().split(".")[:3]:
            raise ConfigError(
                f"The target asks for {self.flavour} {target.tensorrt}; {self.version()} is loaded here. Build on a machine that has it, or leave Target.tensorrt out."
            )

    def check_plan(self, plan: memoryview, *, older: bool = False) -> None:
        check_header(plan, flavour=self.flavour, version=self._numbers, older=older)

    # ---- building ---------------------------------------------------------------------------------------------

    def build(self, inputs: BuildInputs) -> BuildOutput:
        self.check(inputs.options, inputs.target)
        trt = self._trt()
        with listening(trt) as (logger, messages):
            return self._build(trt, logger, messages, inputs)

    def _build(self, trt: Any, logger: Any, messages: TrtLog, inputs: BuildInputs) -> BuildOutput:
        # Everything below stays referenced by locals until the plan exists: the bindings keep only some of it alive,
        # and a parser does not keep its network.
        builder = self._create_builder(trt, logger, messages)
        plugins = self._load_plugins(trt, logger, builder, inputs)
        inputs.checkpoint()
        with _parser_path(inputs) as path:
            network, parser = self._parse(trt, builder, logger, inputs, path, messages)
            config = builder.create_builder_config()
            setup = Setup(trt, builder, network, config)
            self._add_profiles(setup, inputs, messages)
            self._set_target(setup, inputs.target)
            apply_options(setup, inputs.options, messages)
            calibrator = self._set_calibration(setup, inputs)
            extras = self._set_extras(setup, inputs, messages)
            if inputs.configure is not None:
                _configure(inputs, network, config)
            with messages.aside():
                effective = effective_config(setup, inputs.options)
            monitor = self._set_progress(setup, inputs)
            with self._turn(inputs):
                inputs.checkpoint()
                serialized = builder.build_serialized_network(network, config)
                if serialized is not None and self._build_again(setup, inputs, extras):
                    inputs.checkpoint()
                    serialized = builder.build_serialized_network(network, config)
            del parser
        self._finish_calibration(calibrator, inputs, built=serialized is not None)
        if monitor is not None and monitor.stopped is not None:
            raise monitor.stopped
        self._check_extras(inputs, extras)
        if serialized is None:
            raise BuildError(
                f"{self.flavour} {self.version()} built no engine: "
                + messages.reason("it gave no reason; enable debug logging of trt_warmcache.tensorrt and build again."),
                log=tuple(messages.tail),
            )
        # The bindings claim item format 'f' with size 1 for this buffer on every version; as bytes it is right.
        plan = memoryview(serialized).cast("B")
        self._check_built(plan)
        output = BuildOutput(
            plan=plan,
            library=self.version(),
            config=effective,
            warnings=tuple(messages.warnings),
            target=self._built_for(),
            plugins=plugins,
        )
        return self._add_extras(output, extras, inputs)

    def _create_builder(self, trt: Any, logger: Any, messages: TrtLog) -> Any:
        try:
            builder = trt.Builder(logger)
        except TypeError as error:
            # pybind's "factory function returned nullptr": the classic library wants a CUDA device here.
            raise BuildError(
                f"{self.flavour} cannot make a builder on this machine: "
                + messages.reason("it gave no reason; is there an NVIDIA GPU and driver?"),
                log=tuple(messages.tail),
            ) from error
        return builder

    def _load_plugins(self, trt: Any, logger: Any, owner: Any, inputs: BuildInputs) -> tuple[str, ...]:
        if not inputs.plugins:
            return ()
        if not self.capabilities.plugins:
            raise ConfigError(f"{self.flavour} takes no plugin libraries.")
        trt.init_libnvinfer_plugins(logger, "")
        return self._plugins.load(owner.get_plugin_registry(), inputs.plugins)

    def _parse(
        self, trt: Any, builder: Any, logger: Any, inputs: BuildInputs, path: Path | None, messages: TrtLog
    ) -> tuple[Any, Any]:
        network = builder.create_network(network_flags(trt, inputs.options))
        network.name = inputs.network_name
        parser = trt.OnnxParser(network, logger)
        if inputs.options.native_instancenorm is not None:
            change = parser.set_flag if inputs.options.native_instancenorm else parser.clear_flag
            change(trt.OnnxParserFlag.NATIVE_INSTANCENORM)
        if inputs.options.plugin_override is not None:
            change = parser.set_flag if inputs.options.plugin_override else parser.clear_flag
            change(trt.OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE)
        data = inputs.model.read()
        parsed = parser.parse(data) if path is None else parser.parse(data, str(path))
        if not parsed:
            raise _parse_error(parser, messages)
        if network.num_layers == 0 and network.num_outputs == 0:
            raise ModelError("The parser made an empty network of this model; it has no graph.")
        return network, parser

    def _add_profiles(self, setup: Setup, inputs: BuildInputs, messages: TrtLog) -> None:
        tensors = [setup.network.get_input(index) for index in range(setup.network.num_inputs)]
        shape_tensors = [tensor.name for tensor in tensors if tensor.is_shape_tensor]
        for profile in inputs.profiles:
            _require_values(profile, shape_tensors)
            made = setup.builder.create_optimization_profile()
            for name, limits in profile.shapes.items():
                made.set_shape(name, limits.min, limits.opt, limits.max)
            for name, limits in profile.values.items():
                try:
                    made.set_shape_input(name, limits.min, limits.opt, limits.max)
                except ValueError as error:
                    raise ConfigError(
                        f"Input {name!r}: TensorRT refused the shape-tensor values {limits}: {error}"
                    ) from error
            if not made or setup.config.add_optimization_profile(made) < 0:
                raise ConfigError(
                    f"TensorRT refused the profile {profile}: "
                    + messages.reason("it gave no reason; are all inputs named, with min <= opt <= max?")
                )
        if shape_tensors and not inputs.profiles:
            _require_values(ShapeProfile({}), shape_tensors)

    def _set_target(self, setup: Setup, target: Target) -> None:
        """Tell the configuration what the engine is for."""

    def _set_calibration(self, setup: Setup, inputs: BuildInputs) -> Any:
        if inputs.calibration is not None:
            raise ConfigError(f"{self.flavour} {self.version()} takes no calibration table.")
        return None

    def _finish_calibration(self, calibrator: Any, inputs: BuildInputs, *, built: bool) -> None:
        """Release what :meth:`_set_calibration` attached, and make sure that the build used it."""

    def _set_extras(self, setup: Setup, inputs: BuildInputs, messages: TrtLog) -> Any:
        """Attach what only one flavour has, such as a timing cache; what is returned stays alive with the build."""
        return None

    def _build_again(self, setup: Setup, inputs: BuildInputs, extras: Any) -> bool:
        """Whether the first build only taught what the second needs."""
        return False

    def _check_extras(self, inputs: BuildInputs, extras: Any) -> None:
        """Raise what the flavour's own callbacks kept."""

    def _add_extras(self, output: BuildOutput, extras: Any, inputs: BuildInputs) -> BuildOutput:
        """The output with what only one flavour has."""
        return output

    def _turn(self, inputs: BuildInputs) -> AbstractContextManager[None]:
        """Held while TensorRT builds."""
        return nullcontext()

    def merge_timing(self, newer: bytes, older: bytes) -> bytes:
        raise ConfigError(f"{self.flavour} has no timing cache.")

    def _set_progress(self, setup: Setup, inputs: BuildInputs) -> Any:
        if not hasattr(setup.trt, "IProgressMonitor"):
            return None
        monitor = make_monitor(setup.trt, inputs)
        setup.config.progress_monitor = monitor
        return monitor

    def _check_built(self, plan: memoryview) -> None:
        try:
            self.check_plan(plan)
        except (IntegrityError, IncompatibleError) as error:
            raise BuildError(f"{self.flavour} returned something that is no plan of its own: {error}") from error

    def _built_for(self) -> Mapping[str, Any]:
        return {}

    # ---- running ----------------------------------------------------------------------------------------------

    def deserialize(self, plan: memoryview, needs: LoadNeeds | None = None) -> Any:
        needs = needs or LoadNeeds()
        self.check_plan(plan, older=needs.host_code)
        trt = self._trt()
        with listening(trt) as (logger, messages):
            return self._load(trt, logger, messages, plan, needs)

    def _load(self, trt: Any, logger: Any, messages: TrtLog, plan: memoryview, needs: LoadNeeds) -> Any:
        try:
            runtime = trt.Runtime(logger)
        except TypeError as error:
            raise IncompatibleError(
                f"{self.flavour} cannot start here: " + messages.reason("is there an NVIDIA GPU and driver?")
            ) from error
        if needs.host_code:
            runtime.engine_host_code_allowed = True
        self._require_plugins(trt, logger, runtime, needs)
        self._check_runtime(trt, runtime, plan)
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            reason = messages.reason("it gave no reason.")
            raise IncompatibleError(
                f"{self.flavour} {self.version()} cannot load this plan here: {reason}", about_plan=_blames_plan(reason)
            )
        if needs.weights is not None:
            refit(trt, engine, logger, needs.weights, messages.reason)
            check_refitted(trt, engine, plan.nbytes)
        return engine

    def _require_plugins(self, trt: Any, logger: Any, runtime: Any, needs: LoadNeeds) -> None:
        """Load libraries and make sure that what the plan names is registered; TensorRT itself only says "null"."""
        if not needs.plugins and not needs.creators:
            return
        trt.init_libnvinfer_plugins(logger, "")
        registry = runtime.get_plugin_registry()
        self._plugins.load(registry, needs.plugins)
        missing = sorted(set(needs.creators) - set(creators(registry)))
        if missing:
            raise IncompatibleError(
                f"This engine needs plugins that are not registered here: {', '.join(missing)}. Pass their libraries in the request: plugins=[...]."
            )

    def _check_runtime(self, trt: Any, runtime: Any, plan: memoryview) -> None:
        """What can be asked about a plan before TensorRT reads all of it."""


def make_monitor(trt: Any, inputs: BuildInputs) -> Any:
    """An ``IProgressMonitor`` that reports steps and lets the caller stop the build.

    TensorRT only prints an exception raised in a callback, so it is kept here and raised by the adapter afterwards.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        stopped: BaseException | None = None

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._phases: dict[str, tuple[str | None, int]] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._phases[phase_name] = (parent_phase or None, num_steps)
            self._report(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return self._report(phase_name, step + 1)

        def phase_finish(self, phase_name: str) -> None:
            _, total = self._phases.get(phase_name, (None, 0))
            self._report(phase_name, total)
            self._phases.pop(phase_name, None)

        def _report(self, phase: str, step: int) -> bool:
            if self.stopped is not None:
                return False
            parent, total = self._phases.get(phase, (None, 0))
            try:
                inputs.checkpoint()
                inputs.on_progress(Progress(phase, parent, min(step, total), total))
            except BaseException as error:  # noqa: BLE001  KeyboardInterrupt too: it must stop the build and reach the caller
                self.stopped = error
                return False
            return True

    return Monitor()


#: Beginnings of what TensorRT logs about a plan it will never load, on any machine.
_PLAN_FAULTS = ("version tag does not match", "expecting library version", "magictag", "plan.header", "serialization")


def _blames_plan(reason: str) -> bool:
    # The library has no code for this; texts as logged by 8.6 to 11 and RTX 1.7. Unknown texts blame the machine,
    # so that a good entry is never thrown away because of a missing driver or too little memory.
    text = reason.lower()
    return any(fault in text for fault in _PLAN_FAULTS) and "memory" not in text


def _parse_error(parser: Any, messages: TrtLog) -> ModelError:
    if not parser.num_errors:
        return ModelError(
            "The parser refused this model: " + messages.reason("it gave no reason; check it with onnx.checker.")
        )
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    first = errors[0]
    node, operator = _node_of(first)
    where = f" at node {node!r}" if node else ""
    where += f" (operator {operator})" if operator else ""
    # The description alone may be no more than the failed assertion, "false"; the code and the check say what it means.
    kind = str(first.code()).rpartition(".")[2].lower().replace("_", " ")
    others = sorted({found for _, found in map(_node_of, errors[1:]) if found and found != operator})
    more = f" {len(errors) - 1} more errors follow" if len(errors) > 1 else ""
    more += f", also at operators {', '.join(others[:8])}." if others else "." if more else ""
    return ModelError(
        f"The parser refused this model{where}: {kind}, {first.func()}: {first.desc()}.{more}",
        node=node or None,
        operator=operator or None,
    )


def _configure(inputs: BuildInputs, network: Any, config: Any) -> None:
    assert inputs.configure is not None
    try:
        inputs.configure(network, config)
    except Exception as error:
        raise ConfigError(f"configure(network, config) failed with {type(error).__name__}: {error}") from error


def _node_of(error: Any) -> tuple[str, str]:
    """Name and operator of the node that an error is about; the accessors came with 10.0."""
    if not hasattr(error, "node_name"):
        return "", ""
    return str(error.node_name()), str(error.node_operator())


def _require_values(profile: ShapeProfile, shape_tensors: list[str]) -> None:
    missing = [name for name in shape_tensors if name not in profile.values]
    if missing:
        raise ConfigError(
            f"Inputs {', '.join(map(repr, missing))} are shape tensors: give their values, ShapeProfile(shapes=..., values={{{missing[0]!r}: (min, opt, max)}})."
        )


@contextmanager
def _parser_path(inputs: BuildInputs) -> Iterator[Path | None]:
    """Where the parser finds side files: the model's own path, or a copy staged for it; None if it needs none."""
    model = inputs.model
    if not model.summary.external:
        yield None
    elif model.local_path is not None and str(model.local_path).isascii():
        yield model.local_path
    else:
        # Remote models need their side files here; and parsers were reported to fail under non-ASCII folders.
        with working_folder() as folder:
            yield model.stage(folder)
