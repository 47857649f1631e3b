"""Many processes that want one engine at the same moment, against one process that wants it alone.

All are started and ready before the clock runs. The build is real, the store empty each time.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from typing import Any

from children import Job, Result, run_together
from common import Arguments, Table, arguments, compiled, duration, machine, packages_missing
from models import DETECTION
from transformer import TINY


def main() -> None:
    given = arguments(__doc__)
    if packages_missing("tensorrt_rtx", "onnx", "numpy"):
        sys.exit("Install the builder and the generator's needs: pip install 'trt_warmcache[rtx]' onnx numpy")
    print(machine())
    if DETECTION.path is None or given.quick:
        name, model, profiles = TINY.name, TINY.write(given.work), TINY.profiles
    else:
        name, model, profiles = DETECTION.name, DETECTION.path, DETECTION.profiles
    environment = compiled(given.work)
    table = Table(f"Processes on one key ({name}), until the last has its plan")
    for count in (4,) if given.quick else (4, 16, 64):
        alone, _ = fastest_of(given, 1, str(model), profiles, environment)
        together, results = fastest_of(given, count, str(model), profiles, environment)
        outcomes = Counter(result.outcome for result in results)
        if outcomes["built"] != 1 or len({result.digest for result in results}) != 1:
            sys.exit(f"{count} processes made {outcomes['built']} builds; one key must be built once.")
        told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
        note = f"{told}; after the build {duration(last(results) - built(results))}"
        table.add(f"{count} processes", together, "1 process", alone, note=note)
    table.show()


def fastest_of(
    given: Arguments, count: int, model: str, profiles: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[float, list[Result]]:
    """The fastest of a few runs: a build takes the whole machine, so anything slower had company."""
    runs = []
    for _ in range(1 if given.quick else 3):
        with tempfile.TemporaryDirectory(dir=given.work) as folder:
            runs.append(run_together(Job(f"{folder}/store", f"{folder}/memo", model, profiles), count, environment))
    best = min(runs, key=last)
    return last(best), best


def last(results: list[Result]) -> float:
    return max(result.seconds for result in results)


def built(results: list[Result]) -> float:
    return next(result.seconds for result in results if result.outcome == "built")


if __name__ == "__main__":
    main()
