"""The packages of the ``int8`` extra: loaded when needed, their errors in our terms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from trt_warmcache.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import onnx

__all__ = ["ModelLike", "first_line", "import_extra", "load_model", "open_session", "runtime_errors", "runtime_version"]

ModelLike: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto"

CPU: Final = ("CPUExecutionProvider",)
_SIDE_FILES: Final = "session.model_external_initializers_file_folder_path"


def import_extra(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"INT8 calibration and Q/DQ need the package {error.name}: pip install 'trt_warmcache[int8]'."
        ) from error


def runtime_version() -> str:
    """Which ONNX Runtime is installed; several packages bring it."""
    return str(import_extra("onnxruntime").__version__)


def load_model(model: ModelLike, *, side_files: bool = False) -> tuple[onnx.ModelProto, str | None]:
    """The model as a proto of our own, and the folder of its side files where they were not read in."""
    onnx = import_extra("onnx")
    if isinstance(model, onnx.ModelProto):
        proto = onnx.ModelProto()
        proto.CopyFrom(model)
        return proto, None
    try:
        if isinstance(model, bytes):
            return onnx.load_model_from_string(model), None
        path = Path(model).expanduser()
        return onnx.load(path, load_external_data=side_files), None if side_files else str(path.absolute().parent)
    except FileNotFoundError as error:
        raise ModelError(
            f"{error.filename or error} does not exist; it is the model or one of its side files."
        ) from error
    except (import_extra("google.protobuf.message").DecodeError, onnx.checker.ValidationError, OSError) as error:
        raise ModelError(f"The model cannot be read as ONNX: {error}. Export it again.") from error


def open_session(proto: onnx.ModelProto, folder: str | None, providers: Sequence[str] = CPU) -> Any:
    """A session that returns every tensor of the main graph under the name it has in the model."""
    onnx, runtime = import_extra("onnx"), import_extra("onnxruntime")
    available = runtime.get_available_providers()
    missing = [name for name in providers if name not in available]
    if missing:  # a session would only warn, and run on the CPU
        raise ConfigError(
            f"This ONNX Runtime has no {', '.join(missing)}; it has {', '.join(available)}. GPUs need another package, "
            "such as onnxruntime-gpu in place of onnxruntime."
        )
    seen = {output.name for output in proto.graph.output}
    for node in proto.graph.node:
        if node.op_type == "Constant":
            continue
        for name in node.output:
            if name and name not in seen:
                # no type given: ONNX Runtime infers more than onnx does, and tells
                proto.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
                seen.add(name)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL  # fused tensors have no range
    options.log_severity_level = 3
    # an arena keeps the largest batch of every shape for good
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    if folder is not None:
        options.add_session_config_entry(_SIDE_FILES, folder)
    try:
        return runtime.InferenceSession(proto.SerializeToString(), options, providers=list(providers))
    except runtime_errors() as error:
        raise ModelError(f"ONNX Runtime cannot load the model: {first_line(error)}.") from error


def runtime_errors() -> tuple[type[Exception], ...]:
    """What ONNX Runtime raises: one class per status code, with no base of its own."""
    state = import_extra("onnxruntime.capi.onnxruntime_pybind11_state")
    return tuple(
        getattr(state, name)
        for name in (
            "Fail",
            "InvalidArgument",
            "InvalidGraph",
            "InvalidProtobuf",
            "NoSuchFile",
            "NotImplemented",
            "RuntimeException",
        )
        if hasattr(state, name)
    )


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
