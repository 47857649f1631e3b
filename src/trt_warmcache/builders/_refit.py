"""Giving a stripped engine its weights back, and making sure that it got all of them.

TensorRT's own list of missing weights was seen to be empty while some weights kept their old values. So completeness
is judged by a list of our own: every weight that the engine has must have been set, asked one by one.
"""

from __future__ import annotations

from typing import Any

from trt_warmcache.builders._folder import working_folder
from trt_warmcache.errors import ConfigError, IncompatibleError, IntegrityError
from trt_warmcache.model import ModelSource

__all__ = ["check_refitted", "refit"]

#: Names in an error message.
_SHOWN = 5


def refit(trt: Any, engine: Any, logger: Any, model: ModelSource, reason: Any) -> None:
    """Set all weights of an engine from a model.

    Args:
        trt: The bindings.
        engine: ``ICudaEngine`` of a plan without weights.
        logger: ``ILogger``; must outlive the refit.
        model: The model whose weights are wanted; its graph is that of the engine.
        reason: Gives the first error that TensorRT logged, or the text it is given.

    Raises:
        ConfigError: This version cannot refit from a model.
        IncompatibleError: The engine cannot take the model's weights, or did not take all of them.
    """
    if not hasattr(trt, "OnnxParserRefitter"):
        raise ConfigError(f"TensorRT {trt.__version__} cannot refit from a model; that needs TensorRT 10.0 or later.")
    try:
        refitter = trt.Refitter(engine, logger)
    except TypeError as error:
        raise IncompatibleError(
            f"This engine takes no weights: {reason('it was built without a refit option.')}", about_plan=True
        ) from error
    parser = trt.OnnxParserRefitter(refitter, logger)
    with working_folder() as folder:
        path = model.local_path
        if model.summary.external and (path is None or not str(path).isascii()):
            path = model.stage(folder)
        data = model.read()
        done = parser.refit_from_bytes(data) if path is None else parser.refit_from_bytes(data, str(path))
        if not done:
            told = parser.get_error(0).desc() if parser.num_errors else reason("it gave no reason.")
            raise IncompatibleError(f"The engine does not take this model's weights: {told}")
        _require_all(refitter)
        if not refitter.refit_cuda_engine():
            raise IncompatibleError(f"Refitting the engine failed: {reason('it gave no reason.')}")


def _require_all(refitter: Any) -> None:
    missing = set(refitter.get_missing_weights())
    for name in refitter.get_all_weights():
        weights = refitter.get_named_weights(name)
        if weights is None or int(getattr(weights, "size", 1)) == 0:
            missing.add(name)
    if missing:
        names = sorted(missing)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise IncompatibleError(
            f"The refit left {len(names)} weights of the engine unset: {', '.join(map(repr, names[:_SHOWN]))}{more}. It would compute with other values; build a full engine instead."
        )


def check_refitted(trt: Any, engine: Any, stripped_bytes: int) -> None:
    """Make sure that an engine which was refitted really carries weights now.

    Args:
        trt: The bindings.
        engine: ``ICudaEngine`` after the refit.
        stripped_bytes: Size of the plan it came from.

    Raises:
        IntegrityError: Serialized, it is no larger than before.
    """
    # An engine that came without weights may leave them out by default, although it has them now.
    config = engine.create_serialization_config()
    config.clear_flag(trt.SerializationFlag.EXCLUDE_WEIGHTS)
    serialized = engine.serialize_with_config(config)
    size = 0 if serialized is None else memoryview(serialized).nbytes
    if size <= stripped_bytes:
        raise IntegrityError(
            f"The refitted engine serializes to {size} bytes and was {stripped_bytes} bytes without its weights; the weights are not in it.",
            reason="refit",
        )
