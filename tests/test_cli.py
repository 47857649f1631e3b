"""The command line, as a user runs it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.support import real_model, tiny_model

import trt_warmcache as twc
from trt_warmcache.builders import TensorRTRTXBuilder
from trt_warmcache.cli import EXIT_DAMAGED, EXIT_FAILED, EXIT_MISS, EXIT_USAGE, main
from trt_warmcache.keys import Kind
from trt_warmcache.stores._base import blob_name
from trt_warmcache.testing import FakeBuilder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model that TensorRT-RTX really builds."""
    path = tmp_path / "tiny.onnx"
    path.write_bytes(tiny_model())
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command with the store in this test's folder and the digest memo out of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRT_WARMCACHE_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: Any, code: int = 0) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == code, result.output + result.stderr
        return result

    return invoke


PROFILE = ("--profile", "x=1x4:2x4:8x4")


def test_preset(run: Any, model: Path) -> None:
    """--preset means what BuildOptions.preset means for the installed version, with --option on top."""
    plain = json.loads(run("key", model, *PROFILE, "--builder", "tensorrt_rtx", "--json").stdout)["parts"]
    fast = json.loads(run("key", model, *PROFILE, "--builder", "tensorrt_rtx", "--preset", "fast", "--json").stdout)[
        "parts"
    ]
    builder = TensorRTRTXBuilder()
    expected = twc.BuildOptions.preset("fast", version=builder.version(), flavour=builder.flavour)
    assert {name: fast[name] for name in fast if name not in plain} == {
        f"options.{spec.name}": value for spec, value in expected.chosen()
    }
    both = run("key", model, *PROFILE, "--preset", "fast", "--option", "optimization_level=4", "--json")
    assert json.loads(both.stdout)["parts"]["options.optimization_level"] == 4


def test_build_and_sign(run: Any, model: Path, tmp_path: Path) -> None:
    """build --sign publishes a signed entry; a key file that cannot be read stops it before anything is built."""
    run("build", model, *PROFILE, "--sign", tmp_path / "nothing", code=EXIT_USAGE)
    assert not (tmp_path / "store").exists()
    (tmp_path / "trusted").write_text(run("keygen", "release-1", "--output", tmp_path / "secret").stdout)
    run("build", model, *PROFILE, "--sign", tmp_path / "secret")
    assert json.loads(run("verify", "--signed", "--trusted", tmp_path / "trusted", "--json").stdout)["good"] == 1
    assert "has not signed" not in run("build", model, *PROFILE, "--sign", tmp_path / "secret").stderr


def test_build_does_not_sign_what_others_built(run: Any, model: Path, tmp_path: Path) -> None:
    """build --sign of an engine that is stored unsigned says so and how to go on; --refresh builds and signs."""
    (tmp_path / "trusted").write_text(run("keygen", "release-1", "--output", tmp_path / "secret").stdout)
    checked = ("verify", "--signed", "--trusted", tmp_path / "trusted")
    run("build", model, *PROFILE)
    assert "release-1 has not signed it" in run("build", model, *PROFILE, "--sign", tmp_path / "secret").stderr
    run(*checked, code=EXIT_DAMAGED)
    assert "has not signed" not in run("build", model, *PROFILE, "--sign", tmp_path / "secret", "--refresh").stderr
    run(*checked)


def test_build_then_hit_then_ls_show_verify(run: Any, model: Path, tmp_path: Path) -> None:
    """build builds once; ls, show and verify tell what is there, for people and for programs."""
    assert run("build", model, *PROFILE, "--name", "tiny", "--model-version", "7").stdout.startswith(
        "built: tiny_7_portable"
    )
    assert run("build", model, *PROFILE).stdout.startswith("hit: ")
    row = json.loads(run("build", model, *PROFILE, "--json").stdout)
    assert row["outcome"] == "hit"
    assert row["stored"]
    assert row["timings"].keys() == {"hash", "lookup", "verify"}
    listed = run("ls").stdout
    assert "tiny_7_portable_1x4-2x4-8x4" in listed
    assert "1 entries" in listed
    [entry] = json.loads(run("ls", "--json", "--kind", "engines").stdout)
    assert entry["key"] == row["key"]
    assert json.loads(run("ls", "--json", "--kind", "timing").stdout) == []
    for name in (row["key"], row["key"][:10], "tiny", entry["name"]):
        shown = run("show", name).stdout
        assert row["key"] in shown
        assert "effective configuration:" in shown
        assert "payload plan: blake3:" in shown
    assert json.loads(run("show", "tiny", "--json").stdout)["key"] == row["key"]
    assert run("verify").stdout == "1 good, 0 damaged\n"
    assert json.loads(run("verify", "--json").stdout) == {"good": 1, "damaged": []}


def test_gen_cache(run: Any, model: Path, tmp_path: Path) -> None:
    """--gen-cache writes the engine under its readable name, byte for byte."""
    result = json.loads(
        run(
            "build",
            model,
            *PROFILE,
            "--name",
            "face/beauty",
            "--model-version",
            "7",
            "--gen-cache",
            "--output",
            tmp_path / "out",
            "--json",
        ).stdout
    )
    [path] = result["files"]
    assert Path(path).name == "face-beauty_7_portable_1x4-2x4-8x4.engine"
    with twc.EngineManager(tmp_path / "store", builder="tensorrt_rtx", memo=twc.DigestMemo(None)) as manager:
        engine = manager.get(model, profiles={"x": ("1x4", "2x4", "8x4")})
        assert engine.outcome is twc.Outcome.HIT
        assert Path(path).read_bytes() == engine.plan
    assert [found.name for found in (tmp_path / "out").iterdir()] == [Path(path).name]


def test_gen_cache_with_timing(tmp_path: Path, model: Path) -> None:
    """Where the builder keeps a timing cache, --gen-cache writes it beside the engine as .cache."""
    from trt_warmcache.builders import BuilderCapabilities
    from trt_warmcache.cli import _write_files

    builder = FakeBuilder(capabilities=BuilderCapabilities(timing_cache=True))
    with twc.EngineManager(tmp_path / "store", builder=builder, memo=twc.DigestMemo(None)) as manager:
        engine = manager.get(model, profiles={"x": "2x4"}, name="m", version="1")
        files = _write_files(manager.store, engine, tmp_path / "out")
    assert [path.name for path in files] == ["m_1_portable_2x4.engine", "m_1_portable_2x4.cache"]
    assert files[1].read_bytes().endswith(b"\n")


def test_key_and_explain(run: Any, model: Path) -> None:
    """key prints the parts and touches no store; explain names the part that differs and exits with the miss code."""
    found = json.loads(run("key", model, *PROFILE, "--json").stdout)
    assert len(found["digest"]) == 64
    assert found["parts"]["profiles"] == [{"shapes": {"x": [[1, 4], [2, 4], [8, 4]]}}]
    assert found["digest"] in run("key", model, *PROFILE).stdout
    assert "No engine is stored" in run("explain", model, *PROFILE, code=EXIT_MISS).stdout
    run("build", model, *PROFILE)
    assert run("explain", model, *PROFILE).stdout.startswith("Hit")
    text = run("explain", model, "--profile", "x=1x4:2x4:16x4", code=EXIT_MISS).stdout
    assert "input 'x' dimension 0: 16 not in 1..8" in text
    told = json.loads(run("explain", model, *PROFILE, "--option", "tf32=false", "--json", code=EXIT_MISS).stdout)
    assert told["nearest"][0]["differences"] == [{"part": "options.tf32", "wanted": False, "stored": None}]


def test_several_profiles_and_targets(run: Any, model: Path) -> None:
    """Several inputs, several profiles and compute capabilities reach the key."""
    parts = json.loads(
        run(
            "key",
            model,
            *PROFILE,
            "--next-profile",
            "x=16x4:16x4:32x4",
            "--cc",
            "8.9",
            "--cc",
            "8.6",
            "--recipe",
            "r",
            "--json",
        ).stdout
    )["parts"]
    assert len(parts["profiles"]) == 2
    assert parts["target.compute_capabilities"] == ["8.6", "8.9"]
    assert parts["recipe"] == "r"


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("build", "MODEL"), EXIT_USAGE, "dynamic inputs"),
        (("build", "MODEL", "--profile", "y=1x4"), EXIT_USAGE, "no input 'y'"),
        (("build", "MODEL", "--profile", "nonsense"), EXIT_USAGE, "Cannot read profile"),
        (("build", "MODEL", *PROFILE, "--option", "fp16=true"), EXIT_USAGE, "does not exist in TensorRT-RTX"),
        (("build", "MODEL", *PROFILE, "--option", "opt_level=3"), EXIT_USAGE, "did you mean 'optimization_level'"),
        (("build", "MODEL", *PROFILE, "--option", "3"), EXIT_USAGE, "NAME=VALUE"),
        (("build", "missing.onnx"), EXIT_FAILED, "no model at"),
        (("build", "MODEL", *PROFILE, "--no-build"), EXIT_MISS, "forbids building"),
        (("show", "nothing"), EXIT_MISS, "Nothing stored"),
        (("build", "MODEL", *PROFILE, "--store", "nowhere://x"), EXIT_USAGE, "nowhere"),
    ],
)
def test_exit_codes(run: Any, model: Path, arguments: tuple[str, ...], code: int, word: str) -> None:
    """Each kind of failure has its exit code and one line on standard error; with --json an object on standard output."""
    given = [str(model) if word_ == "MODEL" else word_ for word_ in arguments]
    result = run(*given, code=code)
    assert word in result.stderr
    assert "Traceback" not in result.stderr
    told = json.loads(run(*given, "--json", code=code).stdout)
    assert word in told["message"]


def test_verify_finds_and_sets_aside(run: Any, model: Path, tmp_path: Path) -> None:
    """verify finds a flipped bit, exits with the damage code, and with --quarantine takes the entry out of service."""
    key = json.loads(run("build", model, *PROFILE, "--json").stdout)["key"]
    store = twc.LocalStore(tmp_path / "store")
    manifest = store.manifest(Kind.ENGINE, key)
    assert manifest is not None
    path = tmp_path / "store" / "trtwc-1" / blob_name(manifest.blob("plan"))
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    assert "0 good, 1 damaged" in run("verify", code=EXIT_DAMAGED).stdout
    assert run("build", model, *PROFILE, "--no-build", code=EXIT_DAMAGED)
    run("verify", "--quarantine")
    assert run("build", model, *PROFILE).stdout.startswith("built")


def test_ambiguous_name(run: Any, model: Path) -> None:
    """A name that several entries share is refused, listing their keys."""
    run("build", model, *PROFILE, "--name", "same")
    run("build", model, "--profile", "x=4x4", "--name", "same")
    assert "several entries" in run("show", "same", code=EXIT_USAGE).stderr


def test_read_only_store_is_said(model: Path, tmp_path: Path) -> None:
    """Where the engine cannot be stored, it is built and exported all the same, and the user is told."""
    file = tmp_path / "a file"
    file.write_text("in the way")
    done = subprocess.run(
        [sys.executable, "-m", "trt_warmcache", "build", str(model), *PROFILE, "--store", str(file)],
        capture_output=True, text=True, check=False, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "c")},
    )  # fmt: skip
    assert done.returncode == EXIT_FAILED
    assert "StoreError" in done.stderr


def test_plain_lines_without_a_terminal(model: Path, tmp_path: Path) -> None:
    """Away from a terminal the progress is a few plain lines on standard error; standard output has the result only."""
    done = subprocess.run(
        [sys.executable, "-m", "trt_warmcache", "build", str(model), *PROFILE, "--store", str(tmp_path / "s")],
        capture_output=True, text=True, check=True, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "c")},
    )  # fmt: skip
    assert done.stdout.startswith("built: ")
    assert "build start: tiny" in done.stderr
    assert "build end: tiny" in done.stderr
    assert "\x1b" not in done.stderr


def test_bar_on_a_terminal(tmp_path: Path) -> None:
    """On a terminal a progress bar is drawn, with TensorRT's own phases."""
    model = real_model("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "trt_warmcache", "build", str(model), "--profile", "x=1x3x320x320:1x3x640x640:1x3x960x960", "--store", str(tmp_path / "s")],
        stdout=subprocess.DEVNULL, stderr=theirs, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "c"), "TERM": "xterm", "COLUMNS": "120"},
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        assert process.wait(60) == 0
    os.close(ours)
    assert b"Building" in shown
    assert "━".encode() in shown


def test_pipe_closed_early(run: Any, model: Path, tmp_path: Path) -> None:
    """`trt-warmcache ls | head -0` ends quietly."""
    run("build", model, *PROFILE)
    done = subprocess.run(
        f"{sys.executable} -m trt_warmcache ls --json | head -c 0", shell=True, capture_output=True, text=True, check=False,
        env={**os.environ, "TRT_WARMCACHE_STORE": str(tmp_path / "store")},
    )  # fmt: skip
    assert "Traceback" not in done.stderr


def test_environment_is_documented() -> None:
    """Every variable that the settings read is in the documented table."""
    from trt_warmcache.settings import ENVIRONMENT, Settings

    asked: set[str] = set()

    class Spy(dict[str, str]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return default

    assert Settings.from_env(Spy()) == Settings()
    assert asked == set(ENVIRONMENT)
    assert Settings.from_env({"TRT_WARMCACHE_STORE": "/a, s3://b/c"}).stores == ("/a", "s3://b/c")


def test_check_names_what_is_not_covered(run: Any, model: Path) -> None:
    """check passes where stored engines cover every shape, wider ones too, and names the shape that none covers."""
    run("build", model, *PROFILE)
    assert run("check", model, *PROFILE, "--next-profile", "x=2x4:2x4:4x4").stdout.count("covered:") == 2
    text = run("check", model, *PROFILE, "--next-profile", "x=1x4:2x4:64x4", code=EXIT_MISS).stdout
    assert "NOT COVERED: x=1x4:2x4:64x4" in text
    assert "input 'x' dimension 0: 64 not in 1..8" in text
    rows = json.loads(run("check", model, "--profile", "x=64x4", "--json", code=EXIT_MISS).stdout)
    assert rows[0]["covered_by"] is None


def test_refresh(run: Any, model: Path) -> None:
    """--refresh builds although the engine is stored."""
    run("build", model, *PROFILE)
    assert run("build", model, *PROFILE, "--refresh").stdout.startswith("built")
    assert run("build", model, *PROFILE).stdout.startswith("hit")


def test_doctor_tells_sources(run: Any, tmp_path: Path) -> None:
    """doctor shows the setting in force and where it came from."""
    text = run("doctor").stdout
    assert f"store: {tmp_path / 'store'} (from TRT_WARMCACHE_STORE)" in text
    assert "import tensorrt_rtx: possible" in text
    text = run("doctor", "--store", tmp_path / "other").stdout
    assert f"store: {tmp_path / 'other'} (from --store, which overrides TRT_WARMCACHE_STORE=" in text
    assert json.loads(run("doctor", "--json").stdout)["problems"] == []


def test_doctor_finds_two_installations(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions of TensorRT on the path are listed, both, and are a problem."""
    for version in ("10.11.0", "10.12.0"):
        folder = tmp_path / version / f"tensorrt-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path / version))
    text = run("doctor", code=EXIT_FAILED).stdout
    assert "tensorrt 10.11.0" in text
    assert "tensorrt 10.12.0" in text
    assert "PROBLEM: tensorrt is on sys.path in versions 10.11.0, 10.12.0" in text


def test_doctor_reports_an_unusable_store(run: Any, tmp_path: Path) -> None:
    """A store that cannot be listed is a problem, with the reason."""
    (tmp_path / "file").write_text("x")
    assert "PROBLEM: Could not" in run("doctor", "--store", tmp_path / "file", code=EXIT_FAILED).stdout


def test_doctor_keeps_passwords(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A password in a store's URL is not shown, wherever the URL comes from."""
    url = "s3://user:hunter-12345@bucket/prefix"
    monkeypatch.setenv("TRT_WARMCACHE_STORE", url)
    monkeypatch.setattr("trt_warmcache.doctor._store", lambda found, store: found.facts.update({"seen": [len(store)]}))
    told = run("doctor", "--json").stdout + run("doctor", "--store", "near").stdout
    assert "s3://bucket/prefix" in told
    assert "hunter" not in told


def test_default_folder_is_private(run: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default folder is made for its user alone; one that others may write to is refused unless it is named."""
    monkeypatch.delenv("TRT_WARMCACHE_STORE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / ".cache" / "trt_warmcache"
    run("build", model, *PROFILE)
    assert folder.stat().st_mode & 0o777 == 0o700
    for mode in (0o720, 0o702):
        folder.chmod(mode)
        for command in (("build", model, *PROFILE), ("ls",), ("gc",)):
            assert "chmod go-w" in run(*command, code=EXIT_USAGE).stderr
        assert "1 entries" in run("ls", "--store", folder).stdout
    folder.chmod(0o755)
    assert "1 entries" in run("ls").stdout
