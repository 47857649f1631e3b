"""The benchmarks run. Their times are not judged here: a shared machine has no opinion worth failing over."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("tensorrt_rtx", "onnx", "numpy")),
    reason="needs the rtx extra, onnx and numpy",
)

TIME = re.compile(r"\d+(\.\d+)? (s|ms|us)")
RATIO = re.compile(r"\d+(\.\d+)?x|1/\d+(\.\d+)?")


def tables(output: str) -> list[list[dict[str, str]]]:
    """The Markdown tables of a text, as rows by column."""
    found: list[list[dict[str, str]]] = []
    head: list[str] = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells
            found.append([])
        elif set(line) - set("|- "):
            found[-1].append(dict(zip(head, cells, strict=True)))
    return found


def test_there_is_a_script_for_each_subject() -> None:
    """Renaming or losing a benchmark does not go unnoticed."""
    assert SCRIPTS == [
        "bench_builders",
        "bench_coldwarm",
        "bench_contention",
        "bench_hit",
        "bench_import",
        "bench_keys",
        "bench_remote",
        "bench_stores",
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_quick_run_prints_figures_beside_what_they_are_compared_with(script: str, tmp_path: Path) -> None:
    """Every row of every table has our time, a floor or peer measured in the same run, and their ratio."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{script}.py"), "--quick", "--work", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = tables(done.stdout)
    assert found
    assert all(found)
    for row in (row for table in found for row in table):
        assert TIME.fullmatch(row["ours"]), row
        assert TIME.fullmatch(row["time"]), row
        assert RATIO.fullmatch(row["ratio"]), row
        assert row["what"], row
        assert row["beside"], row


def test_the_generated_transformer_is_the_same_every_time(tmp_path: Path) -> None:
    """Two generations give the same bytes, so figures of two runs are about one model; the graph is valid ONNX."""
    onnx = pytest.importorskip("onnx")
    code = "import sys; from pathlib import Path; from transformer import TINY; TINY.write(Path(sys.argv[1]))"
    for folder in ("a", "b"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / folder)], check=True, cwd=BENCHMARKS)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / folder).rglob("*") if path.is_file()}
        for folder in ("a", "b")
    )
    assert set(first) == {"model.onnx", "model.data"}
    assert first == second
    onnx.checker.check_model(str(next((tmp_path / "a").rglob("model.onnx"))), full_check=True)
