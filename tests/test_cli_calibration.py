"""The command line for INT8 calibration tables."""

from __future__ import annotations

import builtins
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from tests.test_calibration import batch, conv_model

import trt_warmcache as twc
from trt_warmcache.calibration_files import read_table
from trt_warmcache.calibration_table import CalibrationTable
from trt_warmcache.cli import EXIT_DAMAGED, EXIT_FAILED, EXIT_MISS, EXIT_USAGE, main
from trt_warmcache.cli_calibration import _names

pytest.importorskip("onnxruntime")

PROFILE = ("--profile", "x=1x3x8x8:2x3x8x8:4x3x8x8", "--builder", "tensorrt_rtx")
LOADER = """
import numpy as np

def load(path):
    return np.full((1, 3, 8, 8), float(path.read_text()), np.float32)

def fails(path):
    raise OSError("torn picture")

not_a_function = 3
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command in an empty folder with a store, a model and calibration data."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRT_WARMCACHE_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    Path("conv.onnx").write_bytes(conv_model())
    Path("data").mkdir()
    for seed in range(3):
        np.save(f"data/{seed}.npy", batch(seed)["x"])

    def invoke(*arguments: Any, code: int = 0) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == code, result.output + result.stderr
        return result

    return invoke


def calibrate(run: Any, *arguments: Any) -> dict[str, Any]:
    return json.loads(run("calibrate", "conv.onnx", "--data", "data", *arguments, "--json").stdout)  # type: ignore[no-any-return]


def test_calibrate_then_hit(run: Any) -> None:
    """calibrate makes a table once and finds it ever after, for people and for programs, with progress for people."""
    first = run("calibrate", "conv.onnx", "--data", "data", "--name", "conv", "--model-version", "7")
    assert first.stdout.startswith("calibrated: conv_7_int8-entropy_any (")
    assert "calibration start" in first.stderr
    assert "calibration end" in first.stderr
    again = calibrate(run)
    assert again["outcome"] == "hit"
    assert again["stored"]
    assert again["tensors"] == 4
    assert again["extra"]["samples"] == 6
    assert calibrate(run, "--algorithm", "minmax")["outcome"] == "calibrated"
    assert calibrate(run, "--algorithm", "minmax", "--batches", "2")["extra"]["samples"] == 4
    assert len(json.loads(run("calib", "ls", "--json").stdout)) == 3
    assert run("calib", "ls").stdout.splitlines()[-1] == "3 tables"


def test_show_says_which_model_and_which_data(run: Any) -> None:
    """show prints model and data digests, the number of samples and the algorithm: whose table it is."""
    made = calibrate(run, "--algorithm", "percentile", "--preprocess", "v2")
    shown = run("calib", "show", made["key"][:12]).stdout
    assert "model         blake3:" in shown
    assert "(conv)" in shown
    assert "data          files:" in shown
    assert "samples       6 in 3 batches" in shown
    assert "algorithm     percentile:99.99" in shown
    assert "preprocessing v2" in shown
    assert "made by       onnxruntime " in shown
    assert "  x: " not in shown
    assert "  x: " in run("calib", "show", made["key"], "--scales").stdout
    document = json.loads(run("calib", "show", made["name"], "--scales", "--json").stdout)
    assert set(document["scales"]) == {"x", "a", "b", "y"}
    assert document["parts"]["algorithm"] == "percentile:99.99"
    assert made["key"] in run("show", made["key"]).stdout


def test_build_with_a_calibration(run: Any) -> None:
    """build takes the same data, calibrates or finds the table, and --gen-cache writes the table beside the engine."""
    pytest.importorskip("tensorrt_rtx")
    made = calibrate(run)
    asked = ("build", "conv.onnx", *PROFILE, "--calib-data", "data")
    built = json.loads(run(*asked, "--gen-cache", "--output", "out", "--json").stdout)
    assert built["outcome"] == "built"
    (table,) = Path("out").glob("*.calib")
    assert read_table(table).digest == made["table"]
    assert run(*asked).stdout.startswith("hit")
    assert f"calibration: {made['table']}" in run("key", *asked[1:]).stdout
    plain = run("explain", "conv.onnx", *PROFILE, code=EXIT_MISS).stdout
    assert "calibration: wanted nothing, stored" in plain
    assert run("build", "conv.onnx", *PROFILE, "--calib-table", table).stdout.startswith("hit")
    run("build", "conv.onnx", *PROFILE, "--calib-fingerprint", "unknown", code=EXIT_MISS)


def test_loader(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader named as module:function reads other files; a wrong name says what to write."""
    Path("loaders_for_this_test.py").write_text(LOADER)
    monkeypatch.syspath_prepend(".")
    Path("texts").mkdir()
    for number in (1, 2):
        Path(f"texts/{number}.txt").write_text(str(number))
    arguments = ("calibrate", "conv.onnx", "--data", "texts", "--loader")
    assert "calibrated" in run(*arguments, "loaders_for_this_test:load").stdout
    assert "preprocessing loader:load\n" in run("calib", "show", "conv").stdout
    for wrong in ("load", "loaders_for_this_test:lod", "no_such_module:load", "loaders_for_this_test:not_a_function"):
        run(*arguments, wrong, code=EXIT_USAGE)
    assert "holds no .npy" in run("calibrate", "conv.onnx", "--data", "texts", code=EXIT_USAGE).stderr


def test_failing_loader_names_the_file(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loader raises is told in one line, with the file that it could not read; so is a module that breaks."""
    Path("failing_loaders_for_this_test.py").write_text(LOADER)
    Path("broken_module_for_this_test.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    asked = ("calibrate", "conv.onnx", "--data", "data", "--loader")
    failed = run(*asked, "failing_loaders_for_this_test:fails", code=EXIT_USAGE)
    assert "fails cannot read data/0.npy: OSError: torn picture." in failed.stderr
    assert "ZeroDivisionError" in run(*asked, "broken_module_for_this_test:load", code=EXIT_USAGE).stderr
    assert json.loads(run("calib", "ls", "--json").stdout) == []


def test_build_takes_what_calibrate_takes(run: Any) -> None:
    """Percentile and version of the data name the same table in `build` as in `calibrate`; Q/DQ filters reach the key."""
    pytest.importorskip("tensorrt_rtx")
    made = calibrate(run, "--algorithm", "percentile", "--percentile", "99", "--data-version", "1")
    asked = ["--calib-data", "data", "--calib-algorithm", "percentile", "--calib-percentile", "99"]
    asked += ["--calib-data-version", "1"]
    plain = json.loads(run("key", "conv.onnx", *PROFILE, *asked, "--json").stdout)
    assert plain["parts"]["calibration"] == made["table"]
    how = ("--qdq-min-channels", "1", "--qdq-exclude", "second")
    filtered = json.loads(run("key", "conv.onnx", *PROFILE, *asked, *how, "--json").stdout)
    assert (filtered["parts"]["qdq"]["min_channels"], filtered["parts"]["qdq"]["nodes_exclude"]) == (1, ["second"])
    asked[3] = "entropy"
    assert "belongs to --calib-algorithm" in run("key", "conv.onnx", *PROFILE, *asked, code=EXIT_USAGE).stderr


def test_provider(run: Any) -> None:
    """A provider that this ONNX Runtime lacks is refused by name rather than replaced by the CPU; the CPU may be named."""
    asked = ("calibrate", "conv.onnx", "--data", "data", "--provider")
    refused = run(*asked, "NoSuchExecutionProvider", code=EXIT_USAGE)
    assert "has no NoSuchExecutionProvider; it has " in refused.stderr
    assert run(*asked, "CPUExecutionProvider").stdout.startswith("calibrated")


def test_diff(run: Any, tmp_path: Path) -> None:
    """diff compares entries and files: the largest change first, and the counts."""
    a, b = calibrate(run, "--algorithm", "minmax"), calibrate(run, "--algorithm", "percentile", "--percentile", "90")
    text = run("calib", "diff", a["key"], b["key"]).stdout
    assert text.startswith("~ ")
    assert text.splitlines()[-1] == "4 changed, 0 added, 0 removed, 0 the same"
    Path("other.calib").write_bytes(
        CalibrationTable(0, "MinMaxCalibration", {"x": 0.5, "new": float("inf")}).to_bytes()
    )
    Path("more.calib").write_bytes(CalibrationTable(0, "MinMaxCalibration", {"x": 0.5, "new": 1.0}).to_bytes())
    document = json.loads(run("calib", "diff", a["key"], "other.calib", "--json").stdout)
    assert document["added"] == ["new"]
    assert sorted(document["removed"]) == ["a", "b", "y"]
    [change] = json.loads(run("calib", "diff", "other.calib", "more.calib", "--json").stdout)["changed"]
    assert (change["tensor"], change["before"], change["ratio"]) == ("new", "inf", "nan")
    assert run("calib", "diff", "other.calib", "other.calib").stdout.startswith("no differences\n0 changed")
    assert len(run("calib", "diff", a["key"], b["key"], "--limit", "1").stdout.splitlines()) == 3
    assert len(run("calib", "diff", a["key"], b["key"], "--limit", "0").stdout.splitlines()) == 5
    Path("foreign.calib").write_bytes(CalibrationTable(0, "MinMaxCalibration", {"p": 0.5}).to_bytes())
    assert "tables of different models" in run("calib", "diff", a["key"], "foreign.calib").stdout
    assert "There is no file typo.calib" in run("calib", "diff", a["key"], "typo.calib", code=EXIT_MISS).stderr


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the plot extra")
def test_plot(run: Any) -> None:
    """--plot writes a picture by its extension; equal tables and single scales are no special case."""
    a, b = calibrate(run, "--algorithm", "minmax"), calibrate(run, "--algorithm", "percentile", "--percentile", "90")
    run("calib", "diff", a["key"], b["key"], "--plot", "out.png")
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")
    run("calib", "diff", a["key"], a["key"], "--plot", "out.svg")
    assert b"<svg" in Path("out.svg").read_bytes()
    run("calib", "diff", a["key"], b["key"], "--plot", "no/such/folder.png", code=EXIT_USAGE)
    Path("dead.calib").write_bytes(CalibrationTable(0, "MinMaxCalibration", {"x": 0.0}).to_bytes())
    run("calib", "diff", "dead.calib", "dead.calib", "--plot", "out.png", code=EXIT_USAGE)
    run("calib", "diff", "dead.calib", a["key"], "--plot", "out.png")


def test_plot_names_its_extra(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib, --plot names the extra to install."""
    real = builtins.__import__

    def refuse(name: str, *arguments: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *arguments)

    made = calibrate(run)
    monkeypatch.setattr(builtins, "__import__", refuse)
    result = run("calib", "diff", made["key"], made["key"], "--plot", "out.png", code=EXIT_USAGE)
    assert "trt_warmcache[plot]" in result.stderr


def test_import_export(run: Any) -> None:
    """A hand-written 8.6 table imports under a fingerprint, is found by it, and goes out under another version."""
    pytest.importorskip("tensorrt_rtx")
    Path("old.cache").write_text("TRT-8601-MinMaxCalibration\nx: 3caa54fc\na: 3d000000\nb: 3d100000\ny: 3d200000\n")
    imported = json.loads(run("calib", "import", "old.cache", "conv.onnx", "--fingerprint", "set-1", "--json").stdout)
    assert imported["outcome"] == "imported"
    assert imported["extra"]["coverage"]["matched"] == 4
    asked = ("--calib-fingerprint", "set-1", "--calib-algorithm", "minmax")
    assert run("build", "conv.onnx", *PROFILE, *asked).stdout.startswith("built")
    run("calib", "export", imported["key"], "--output", "new.cache", "--tensorrt", "10.3.0")
    assert Path("new.cache").read_text().startswith("TRT-100300-MinMaxCalibration\nx: 3caa54fc\n")
    wrote = json.loads(run("calib", "export", imported["key"], "--json").stdout)["file"]
    assert Path(wrote).suffix == ".calib"
    assert read_table(wrote) == read_table("old.cache")
    Path("other.cache").write_text("TRT-8601-MinMaxCalibration\nx: 3f800000\na: 3d000000\n")
    again = ("calib", "import", "other.cache", "conv.onnx", "--fingerprint", "set-1")
    assert json.loads(run(*again, "--json", code=EXIT_FAILED).stdout)["outcome"] == "kept another"
    told = run(*again, code=EXIT_FAILED)
    assert told.stdout.startswith("kept another: ")
    assert (
        told.stderr.count("is stored with other scales already; those stay") == 1
    )  # as an event, not from the log too
    shown = run("calib", "show", imported["key"]).stdout
    assert "samples       not known (imported)" in shown


def test_nothing_is_stored(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that takes no entry makes the command fail: what it was asked for is not there afterwards."""

    def refuse(*_: Any) -> None:
        raise twc.StoreError("full", reason=twc.StoreReason.FULL)

    monkeypatch.setattr("trt_warmcache.stores._local.LocalStore.put_blob", refuse)
    failed = run("calibrate", "conv.onnx", "--data", "data", code=EXIT_FAILED)
    assert failed.stdout.startswith("calibrated: ")
    assert "Not stored, so the work is lost" in failed.stderr
    run("calibrate", "conv.onnx", "--data", "data", "--json", code=EXIT_FAILED)


def test_tables_that_lost_ranges(run: Any) -> None:
    """A table of ONNX Runtime without the negative ranges is imported with a warning, each time and once each."""
    Path("calibration.cache").write_text("x 1.5\na -0.5\nb 2.0\ny 3.0\n")
    for _ in range(2):
        told = run("calib", "import", "calibration.cache", "conv.onnx")
        assert told.stderr.count("warning: Calibration table calibration.cache holds only the larger") == 1
        assert "1 tensors unusable: a\n" in told.stdout
    assert "warning" not in run("calib", "import", "calibration.cache", "conv.onnx", "--json").stderr


def test_gaps_are_named(run: Any) -> None:
    """Import and show name the tensors without a usable scale; where more are lacking than are listed, they say so."""
    Path("gaps.cache").write_text("TRT-8601-MinMaxCalibration\nx: 3caa54fc\na: 0\nb: 7f800000\n")
    imported = run("calib", "import", "gaps.cache", "conv.onnx", "--name", "gaps").stdout
    assert "1 tensors missing: y\n" in imported
    assert "2 tensors unusable: a, b\n" in imported
    shown = run("calib", "show", "gaps").stdout
    assert "tensors       1 matched, 1 missing, 2 unusable\nmissing       y\nunusable      a, b\n" in shown
    assert _names(["b", "a"], 5) == "a, b and 3 more"


def test_import_refuses(run: Any) -> None:
    """A missing file, a damaged one and a table of another model are told apart by exit code and message."""
    run("calib", "import", "none.cache", "conv.onnx", code=EXIT_USAGE)
    unused = run("calib", "import", "none.cache", "conv.onnx", "--batches", "2", code=EXIT_USAGE)
    assert "give --fingerprint too" in unused.stderr
    Path("bad.cache").write_text("TRT-8601-EntropyCalibration2\nx: zz\n")
    run("calib", "import", "bad.cache", "conv.onnx", code=EXIT_DAMAGED)
    Path("foreign.cache").write_text("TRT-8601-EntropyCalibration2\nx: 3d000000\np: 3d000000\nq: 3d000000\n")
    assert "2 of its 3 tensors" in run("calib", "import", "foreign.cache", "conv.onnx", code=EXIT_FAILED).stderr
    assert json.loads(run("calib", "ls", "--json").stdout) == []


def test_veto(run: Any) -> None:
    """A veto is noted with its reason, shown, and lifted; one without a reason is refused."""
    made = calibrate(run)
    run("calib", "veto", made["key"], "Orin", code=EXIT_USAGE)
    noted = run("calib", "veto", made["key"], "Orin", "--note", "mAP drops by 7.")
    assert noted.stdout == "vetoed for Orin: mAP drops by 7.\n"
    assert "vetoed for    Orin: mAP drops by 7." in run("calib", "show", made["key"]).stdout
    lifted = json.loads(run("calib", "veto", made["key"], "Orin", "--lift", "--json").stdout)
    assert lifted["vetoes"] == {}
    run("calib", "show", "nothing", code=EXIT_MISS)
