"""Run in a subprocess over the stand-in libraries: the classic adapter drives the real 11.4 bindings. Prints JSON.

Usage: shim_adapter.py MODEL LOCKS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tensorrt_bindings as trt  # type: ignore[import-not-found, unused-ignore]
from tests.builders.support import build_inputs
from tests.builders.test_options import sample
from tests.support import tiny_model

import trt_warmcache as twc
from trt_warmcache.builders import Progress, TensorRTBuilder
from trt_warmcache.builders._plan import check_header
from trt_warmcache.options import option_specs

PROFILE = {"x": ("1x3x32x32", "1x3x64x64", "1x3x96x96")}


class Adapter(TensorRTBuilder):
    """The classic adapter, but for the plans: those are TensorRT-RTX's own here."""

    def check_plan(self, plan: memoryview, *, older: bool = False) -> None:
        check_header(plan, flavour="tensorrt_rtx", version=(1, 7, 1))


def attempt(work: Any) -> str:
    try:
        work()
    except twc.WarmCacheError as error:
        return f"{type(error).__name__}: {error.message}"
    return "no error"


def every_option(builder: Adapter) -> dict[str, str]:
    """What becomes of each option, given alone: an error, or what it changed in TensorRT's own configuration."""
    model, profiles = tiny_model(width=64), {"x": ("2x64", "2x64", "2x64")}
    plain = builder.build(build_inputs(model, profiles=profiles)).config
    found = {}
    for name in option_specs():
        try:
            options = twc.BuildOptions(**sample(name))
            config = builder.build(build_inputs(model, profiles=profiles, options=options)).config
            found[name] = "changed " + ", ".join(part for part in config if config[part] != plain.get(part))
        except twc.WarmCacheError as error:
            found[name] = f"{type(error).__name__}: {error.message}"
    return found


def main(path: str, locks: str) -> dict[str, Any]:
    builder = Adapter(trt, lock_folder=Path(locks))
    steps: list[Progress] = []
    options = twc.BuildOptions(optimization_level=2, workspace=1 << 30, avg_timing_iterations=2, timing="editable")
    output = builder.build(build_inputs(path, profiles=PROFILE, options=options, on_progress=steps.append))
    facts: dict[str, Any] = {
        "version": builder.version(),
        "plan": [bytes(output.plan[:4]).decode(), output.plan.nbytes],
        "config": output.config,
        "steps": len(steps),
        "roots": sorted({step.phase for step in steps if step.parent is None}),
        "timing": len(output.timing or b""),
        "timing_entries": output.timing_entries,
        "rejected": output.timing_rejected,
    }
    second = builder.build(build_inputs(path, profiles=PROFILE, timing=output.timing))
    facts["second"] = [second.plan.nbytes, second.timing_rejected]
    facts["merged"] = len(builder.merge_timing(output.timing or b"", output.timing or b""))
    facts["listed"] = len(builder.timing_entries(output.timing or b""))

    calls = iter(range(10_000))

    def checkpoint() -> None:
        if next(calls) == 20:
            raise twc.BuildTimeout("cancelled by the test")

    facts["cancelled"] = attempt(lambda: builder.build(build_inputs(path, profiles=PROFILE, checkpoint=checkpoint)))
    facts["no profile"] = attempt(
        lambda: builder.build(
            type(build_inputs(path, profiles=PROFILE))(**{**vars(build_inputs(path, profiles=PROFILE)), "profiles": ()})
        )
    )
    import onnx

    broken = onnx.load(path)
    broken.graph.node[5].op_type = "NoSuchOperator"
    broken.graph.node[5].name = "culprit"
    facts["broken"] = attempt(lambda: builder.build(build_inputs(broken.SerializeToString(), profiles=PROFILE)))
    facts["fp16"] = attempt(
        lambda: builder.build(build_inputs(path, profiles=PROFILE, options=twc.BuildOptions(fp16=True)))
    )

    def configure(network: Any, config: Any) -> None:
        config.max_aux_streams = 1

    facts["configured"] = builder.build(build_inputs(path, profiles=PROFILE, configure=configure)).config
    facts["load"] = attempt(lambda: builder.deserialize(memoryview(output.plan)))
    facts["options"] = every_option(builder)
    return facts


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], sys.argv[2])))
