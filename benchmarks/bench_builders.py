"""What a timing cache saves the second model, and what a process of its own costs a build.

The timing cache is measured on the fake TensorRT 10.16 of the tests: its cache has the real one's rules (entries per
layer and shape, one cache for all models), and timing one tactic sleeps for 20 ms. So that table shows how many
measurements are saved, in a unit of time; it says nothing about a real GPU. The processes are measured on real
TensorRT-RTX builds.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the fakes live beside the tests

import itertools

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tests.fakes import make_tensorrt

import trt_warmcache as twc
from common import Table, arguments, machine, medians, packages_missing
from models import DETECTION
from transformer import TINY
from trt_warmcache.builders import TensorRTBuilder

SECONDS_PER_TACTIC = 0.02


def main() -> None:
    given = arguments(__doc__)
    if packages_missing("tensorrt_rtx"):
        sys.exit("Install the builder: pip install 'trt_warmcache[rtx]'")
    print(machine())
    timing_cache(given.work, layers=4 if given.quick else 24, repeats=given.repeats(5))
    isolation(given.work, quick=given.quick, repeats=given.repeats(7))


def timing_cache(work: Path, *, layers: int, repeats: int) -> None:
    """One table: building a second model after a first, with and without what the first has measured."""
    table = Table(
        f"A second model, {layers} layers, after a first (fake TensorRT 10.16, {SECONDS_PER_TACTIC * 1e3:.0f} ms per measurement)"
    )
    for share in (1.0, 0.75, 0.5, 0.0):
        shared = int(layers * share)
        first = chain([64 + number for number in range(layers + 1)])
        second = chain(
            [64 + number for number in range(shared + 1)] + [512 + number for number in range(layers - shared)],
            weight=2.0,
        )
        stores = iter(range(1000))

        def build(timing: str, first: bytes = first, second: bytes = second, stores: Any = stores) -> float:
            return second_build(work / f"timing-{next(stores)}", first, second, timing)

        used, off = (sorted(build(timing) for _ in range(repeats))[repeats // 2] for timing in ("use", "off"))
        table.add(f"{share:.0%} of the layers shared", used, "timing='off'", off)
    table.show()


def second_build(folder: Path, first: bytes, second: bytes, timing: Any) -> float:
    """Seconds inside the builder for the second of two models."""
    shutil.rmtree(folder, ignore_errors=True)
    builder = TensorRTBuilder(
        make_tensorrt("10.16", seconds_per_layer=SECONDS_PER_TACTIC), lock_folder=folder / "locks"
    )
    target = twc.Target(gpu="NVIDIA A10", compute_capability="8.6", sm_count=72)
    options = twc.BuildOptions(timing=timing)
    with twc.EngineManager(folder, builder=builder, target=target, memo=twc.DigestMemo(None)) as manager:
        manager.get(first, options=options)
        seconds = manager.get(second, options=options).manifest.provenance.build_seconds
    shutil.rmtree(folder, ignore_errors=True)
    return seconds


def chain(widths: Sequence[int], *, weight: float = 1.0) -> bytes:
    """A model of matrix products, one per pair of neighbouring widths, so that each has a timing of its own."""
    pairs = list(itertools.pairwise(widths))
    nodes = [helper.make_node("MatMul", [f"t{i}", f"w{i}"], [f"t{i + 1}"], name=f"m{i}") for i in range(len(pairs))]
    weights = [numpy_helper.from_array(np.full(pair, weight, np.float32), f"w{i}") for i, pair in enumerate(pairs)]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("t0", TensorProto.FLOAT, [1, widths[0]])],
        [helper.make_tensor_value_info(f"t{len(pairs)}", TensorProto.FLOAT, [1, widths[-1]])],
        weights,
    )
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def isolation(work: Path, *, quick: bool, repeats: int) -> None:
    """One table: real builds in a process of their own beside the same builds in this process."""
    table = Table("A build in a process of its own / in this process (real TensorRT-RTX)")
    cases: list[tuple[str, Path, Any]] = [(TINY.name, TINY.write(work), TINY.profiles)]
    if not quick and DETECTION.path is not None:
        cases.append((DETECTION.name, DETECTION.path, DETECTION.profiles))
    for name, path, profiles in cases:
        numbers = iter(range(10_000))

        def build(isolation: Any, path: Path = path, profiles: Any = profiles, numbers: Any = numbers) -> None:
            policy = twc.Policy(isolation=isolation)
            store = twc.MemoryStore()
            with twc.EngineManager(store, builder="tensorrt_rtx", policy=policy, memo=twc.DigestMemo(None)) as manager:
                manager.get(path, profiles=profiles, recipe=str(next(numbers)))

        there, here = medians(lambda: build("process"), lambda: build("none"), repeats=repeats)
        table.add(name, there, "in this process", here, note=f"{(there - here) * 1e3:.0f} ms more")
    table.show()


if __name__ == "__main__":
    main()
