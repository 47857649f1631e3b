"""The other side of :mod:`trt_warmcache.builders._process`: reads a job, builds, leaves the result in files."""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the job in ``job.json`` of the current folder; steps go to the pipe whose number is the argument."""
    job = json.loads(Path("job.json").read_text(encoding="utf-8"))
    _die_with(job["parent"])
    if job["memory_bytes"] is not None:
        _limit_memory(job["memory_bytes"])
    _log_to_stderr()
    try:
        result = _build(job, int(sys.argv[1]))
    except BaseException as error:  # noqa: BLE001  whatever it is, the other side must hear of it
        result = {"error": _describe(error)}
    # Renamed into place, so that a process killed while writing leaves no half result.
    Path("result.part").write_text(json.dumps(result), encoding="utf-8")
    Path("result.part").replace("result.json")


def _log_to_stderr() -> None:
    """Let TensorRT's lines go where the other side looks for this process's last words; but for the verbose ones."""
    logger = logging.getLogger("trt_warmcache.tensorrt")
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: not (record.args and record.args[0] == "VERBOSE"))  # type: ignore[index]
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)


def _limit_memory(size: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        size = min(size, most)  # a limit of the machine's own can only be lowered
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _build(job: dict[str, Any], pipe: int) -> dict[str, Any]:
    from trt_warmcache.builders._base import BuildInputs, Progress
    from trt_warmcache.errors import ModelError
    from trt_warmcache.memo import DigestMemo
    from trt_warmcache.model import ModelSource
    from trt_warmcache.options import BuildOptions
    from trt_warmcache.profiles import ShapeProfile
    from trt_warmcache.target import Target

    def on_progress(step: Progress) -> None:
        os.write(pipe, json.dumps([step.phase, step.parent, step.step, step.total]).encode() + b"\n")

    builder = _find(job["builder"]["factory"])(**job["builder"]["arguments"])
    model = ModelSource.open(job["model"], memo=DigestMemo(None))
    if model.digest != job["digest"]:
        raise ModelError(f"{job['model']} changed while it was in use. Ask again once it is complete.")
    output = builder.build(
        BuildInputs(
            model=model,
            network_name=job["network_name"],
            profiles=tuple(ShapeProfile.from_json(profile) for profile in job["profiles"]),
            options=BuildOptions.from_json(job["options"]),
            target=Target.from_json(job["target"]),
            timing=_read("timing"),
            calibration=_read("calibration"),
            plugins=tuple(map(Path, job["plugins"])),
            configure=None if job["configure"] is None else _find(job["configure"]),
            on_progress=on_progress,
        )
    )
    with Path("plan").open("wb") as file:
        file.write(memoryview(output.plan).cast("B"))
    if output.timing is not None:
        Path("timing.out").write_bytes(output.timing)
    return {
        "library": output.library,
        "config": dict(output.config),
        "warnings": list(output.warnings),
        "target": dict(output.target),
        "timing_entries": output.timing_entries,
        "timing_rejected": output.timing_rejected,
        "tactics": None if output.tactics is None else output.tactics.to_json(),
        "plugins": list(output.plugins),
        "has_timing": output.timing is not None,
    }


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _read(name: str) -> bytes | None:
    path = Path(name)
    return path.read_bytes() if path.exists() else None


def _describe(error: BaseException) -> dict[str, Any]:
    details = {}
    for name, value in vars(error).items():
        try:
            json.dumps(value)
        except TypeError:
            continue
        if name not in {"message", "key"} and not name.startswith("_"):
            details[name] = value
    return {"type": type(error).__name__, "message": getattr(error, "message", str(error)), "details": details}


def _die_with(parent: int) -> None:
    """End when the process that wants the result ends, so that no orphan keeps a GPU."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return  # not Linux
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
