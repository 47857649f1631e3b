"""Work done in processes of their own, so that start-up is part of what is measured.

Run as a script it is the child; the functions below are the parent's side. Clocks: ``time.perf_counter`` counts from
the same moment in every process of a Linux machine, so a parent can subtract its own reading from a child's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Job", "Result", "run_alone", "run_together"]


@dataclass(frozen=True)
class Job:
    """One request that a child makes.

    Attributes:
        store: Folder of the store.
        memo: Folder of the digest memo.
        model: Path of the model.
        profiles: Its profiles.
    """

    store: str
    memo: str
    model: str
    profiles: Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """What a child reports.

    Attributes:
        outcome: ``hit``, ``joined`` or ``built``.
        digest: Content digest of the plan.
        seconds: From the parent's start of the clock to the plan in the child's hands.
    """

    outcome: str
    digest: str
    seconds: float


def run_alone(job: Job, environment: Mapping[str, str]) -> Result:
    """One child, timed from before it exists until it has its plan."""
    started = time.perf_counter()
    done = subprocess.run(
        [*_COMMAND, json.dumps(asdict(job))], check=True, capture_output=True, text=True, env=environment
    )
    return _result(done.stdout, started)


def run_together(job: Job, count: int, environment: Mapping[str, str]) -> list[Result]:
    """Many children that are ready before the clock starts, and then ask at the same moment."""
    children = [
        subprocess.Popen(
            [*_COMMAND, json.dumps(asdict(job)), "wait"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(count)
    ]
    for child in children:
        assert child.stdout is not None
        if child.stdout.readline() != "ready\n":
            raise RuntimeError("A child process did not start; its error is above.")
    started = time.perf_counter()
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    outputs = [child.communicate()[0] for child in children]
    return [_result(output, started) for output in outputs]


_COMMAND = (sys.executable, str(Path(__file__)))


def _result(output: str, started: float) -> Result:
    report = json.loads(output)
    return Result(report["outcome"], report["digest"], report["at"] - started)


def _child(job: Job, *, wait: bool) -> None:
    import trt_warmcache as twc

    memo = twc.DigestMemo(Path(job.memo))
    with twc.EngineManager(job.store, builder="tensorrt_rtx", memo=memo) as manager:
        if wait:
            print("ready", flush=True)
            sys.stdin.readline()
        engine = manager.get(job.model, profiles=job.profiles)
        at = time.perf_counter()
        print(json.dumps({"outcome": engine.outcome.value, "digest": engine.manifest.blobs[0].digest, "at": at}))


if __name__ == "__main__":
    _child(Job(**json.loads(sys.argv[1])), wait="wait" in sys.argv[2:])
