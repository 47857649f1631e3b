"""What the benchmarks share: options, medians, the table, and facts about the machine.

Every figure is printed beside a floor or a peer that was measured in the same run, because times of two runs on one
machine differ by more than most changes do. The ratio is what to compare.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "Arguments",
    "Table",
    "arguments",
    "compiled",
    "duration",
    "machine",
    "medians",
    "packages_missing",
    "settle",
]

_PACKAGES = ("trt_warmcache", "tensorrt_rtx_cu13", "onnx", "numpy", "blake3", "msgspec")


@dataclass(frozen=True)
class Arguments:
    """Command line of a benchmark.

    Attributes:
        quick: Tiny sizes and few repeats: a test that the benchmark runs, not a measurement.
        work: Folder for generated models and stores; kept, so that the next run need not make them again.
    """

    quick: bool
    work: Path

    def repeats(self, full: int) -> int:
        """How often to measure something that a full run measures `full` times."""
        return min(full, 3) if self.quick else full


def arguments(description: str | None) -> Arguments:
    """Read the command line.

    Args:
        description: The script's docstring.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few repeats; a smoke test")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "trt_warmcache-benchmarks",
        help="folder for generated models and stores, kept between runs [default: %(default)s]",
    )
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    return Arguments(given.quick, given.work.absolute())


def medians(*functions: Callable[[], object], repeats: int) -> tuple[float, ...]:
    """Median seconds of each function. They take turns, so that a busy moment of the machine hits all alike.

    Args:
        functions: What to time. What they return is dropped outside the timed part, so that giving memory back is
            not counted.
        repeats: How often each runs; the first round is not counted.
    """
    samples: list[list[float]] = [[] for _ in functions]
    for turn in range(repeats + 1):
        for taken, function in zip(samples, functions, strict=True):
            started = time.perf_counter()
            result = function()
            seconds = time.perf_counter() - started
            del result
            if turn:
                taken.append(seconds)
    return tuple(statistics.median(taken) for taken in samples)


def compiled(work: Path) -> dict[str, str]:
    """An environment for child processes in which bytecode is cached, as it is for every installed package.

    Without it a checkout on a machine where Python may not write bytecode compiles every module at every start.

    Args:
        work: Where the bytecode is kept.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(work / "bytecode")
    once = "import trt_warmcache.manager, trt_warmcache.builders, numpy, onnx, tensorrt_rtx"
    subprocess.run([sys.executable, "-c", once], check=True, env=environment)
    return environment


def settle() -> None:
    """Wait until files just written are old enough for the digest memo to trust their time stamps."""
    time.sleep(0.05)


def duration(seconds: float) -> str:
    """Seconds with a unit and three significant digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds * 1e6)} us"


def _three(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


@dataclass
class Table:
    """Rows of two times and their ratio.

    Attributes:
        title: Printed above.
    """

    title: str
    _rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, what: str, ours: float, beside: str, other: float, *, target: str = "", note: str = "") -> None:
        """Add a row.

        Args:
            what: What was measured.
            ours: Its seconds.
            beside: What it is compared with.
            other: The seconds of that.
            target: What we aim at, if anything.
            note: A further remark.
        """
        ratio = f"{_three(ours / other)}x" if ours >= other else f"1/{_three(other / ours)}"
        self._rows.append((what, duration(ours), beside, duration(other), ratio, target, note))

    def show(self) -> None:
        """Print the table."""
        head = ("what", "ours", "beside", "time", "ratio", "target", "note")
        used = [index for index in range(len(head)) if any(row[index] for row in self._rows)]
        lines = [[row[index] for index in used] for row in (head, *self._rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(used))]
        lines.insert(1, ["-" * width for width in widths])
        print(f"\n{self.title}\n")
        for line in lines:
            print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


def machine() -> str:
    """One paragraph on where this runs: processor, cores, load, Python, packages."""
    load = os.getloadavg()[0]
    versions = ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version(name)))
    cores = len(os.sched_getaffinity(0))
    return (
        f"{_processor()}, {cores} cores (load {load:.1f} before the run), {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}; {versions}"
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def packages_missing(*names: str) -> list[str]:
    """Which of these modules are not installed; imports none of them."""
    return [name for name in names if importlib.util.find_spec(name) is None]
