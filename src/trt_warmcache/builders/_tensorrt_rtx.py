"""TensorRT for RTX: builds ahead of time, also without a GPU, for a set of compute capabilities."""

from __future__ import annotations

from typing import Any

from trt_warmcache.builders._base import BuilderCapabilities, BuildInputs, BuildOutput
from trt_warmcache.builders._config import Setup
from trt_warmcache.builders._nvinfer import NvInferBuilder
from trt_warmcache.builders._plan import read_header
from trt_warmcache.errors import BuildError, ConfigError, IncompatibleError, IntegrityError
from trt_warmcache.options import BuildOptions
from trt_warmcache.target import Target

__all__ = ["TensorRTRTXBuilder"]

_MALFORMED = 32
_UNSUPPORTED_GPU = 2

_DIAGNOSTICS = {
    1: "it was built by another version",
    _UNSUPPORTED_GPU: "this GPU's compute capability is not among those it was built for",
    4: "the CUDA driver is too old",
    8: "the CUDA runtime is too old",
    16: "there is not enough GPU memory",
    64: "CUDA reported an error",
}


class TensorRTRTXBuilder(NvInferBuilder):
    """Builds with ``tensorrt_rtx``. Its timing-cache calls do nothing and may look for a GPU, so none is made."""

    flavour = "tensorrt_rtx"
    capabilities = BuilderCapabilities(progress=True, compute_capabilities=True)

    def check(self, options: BuildOptions, target: Target) -> None:
        super().check(options, target)
        if target.gpu or target.compute_capability:
            raise ConfigError(
                "A TensorRT-RTX target is a set of compute capabilities, not one GPU: Target(compute_capabilities=('8.6', '8.9')), or no target for the portable plan."
            )
        if target.compute_capabilities:
            trt = self._trt()
            known = {
                name: member for name, member in trt.ComputeCapability.__members__.items() if name.startswith("SM")
            }
            for wanted in target.compute_capabilities:
                if _member_name(wanted) not in known:
                    offered = ", ".join(f"{name[2:-1]}.{name[-1]}" for name in known)
                    raise ConfigError(
                        f"TensorRT-RTX {self.version()} cannot build for compute capability {wanted}; it offers {offered}, or the portable plan without a target."
                    )

    def _set_target(self, setup: Setup, target: Target) -> None:
        wanted = target.compute_capabilities
        if not wanted:
            return
        setup.config.num_compute_capabilities = len(wanted)
        for index, capability in enumerate(wanted):
            if not setup.config.set_compute_capability(
                setup.member("ComputeCapability", _member_name(capability)), index
            ):
                raise ConfigError(f"TensorRT-RTX refused compute capability {capability}.")

    def _add_extras(self, output: BuildOutput, extras: Any, inputs: BuildInputs) -> BuildOutput:
        header = read_header(memoryview(output.plan))
        wanted = inputs.target.compute_capabilities
        if header is not None and wanted and header.compute_capabilities != wanted:
            raise BuildError(
                f"The plan was asked for compute capabilities {', '.join(wanted)} and says that it serves {', '.join(header.compute_capabilities) or 'none'}."
            )
        return output

    def _check_runtime(self, trt: Any, runtime: Any, plan: memoryview) -> None:
        _, diagnostics = runtime.get_engine_validity(bytes(plan[: max(64, runtime.engine_header_size)]))
        diagnostics = int(diagnostics)
        if diagnostics & _MALFORMED:
            raise IntegrityError("TensorRT-RTX says that this plan is malformed.", reason="header")
        reasons = [text for bit, text in _DIAGNOSTICS.items() if diagnostics & bit]
        header = read_header(plan)
        if diagnostics & _UNSUPPORTED_GPU and header is not None:
            reasons.append(f"it serves {', '.join(header.compute_capabilities) or 'no known one'}")
        # "Invalid" with no reason at all means that there is no GPU to judge by; deserializing will say so.
        if reasons:
            raise IncompatibleError("This machine cannot run the plan: " + "; ".join(reasons) + ".")


def _member_name(capability: str) -> str:
    return "SM" + capability.replace(".", "")
