"""Finding TensorRT's library and asking it for its version, without importing the bindings."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from tests.support import run_python, tiny_model

import trt_warmcache as twc
from trt_warmcache.builders import TensorRTBuilder, TensorRTRTXBuilder
from trt_warmcache.builders._library import LIBRARIES, find_library, module_available, version_of


def compile_library(folder: Path, source: str, name: str) -> Path:
    """A shared library from C source."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "these tests compile a few lines of C; install gcc"
    path = folder / name
    (folder / "source.c").write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(folder / "source.c")], check=True)
    return path


def ask(library: Path, memo: Path) -> list[str]:
    """The library's version, and whether it had to be loaded; in a process of its own, where it stays loaded."""
    code = """
import sys
from pathlib import Path
from trt_warmcache.builders._library import version_of
import trt_warmcache as twc
version = version_of(Path(sys.argv[1]), twc.DigestMemo(Path(sys.argv[2])))
print(version, sys.argv[1] in Path("/proc/self/maps").read_text())
"""
    return run_python(code, library, memo).split()


def parts_source(major: int, minor: int, patch: int, build: int) -> str:
    """The four version functions that TensorRT 10 and later export."""
    numbers = {"Major": major, "Minor": minor, "Patch": patch, "Build": build}
    return "".join(f"int getInferLib{part}Version(void) {{ return {number}; }}\n" for part, number in numbers.items())


def test_real_library_tells_its_version() -> None:
    """The installed TensorRT-RTX library is found and reports all four numbers, as its bindings do."""
    import tensorrt_rtx

    library = find_library(LIBRARIES["tensorrt_rtx"])
    assert library is not None
    assert version_of(library, twc.DigestMemo(None)) == tensorrt_rtx.__version__
    assert TensorRTRTXBuilder().version() == tensorrt_rtx.__version__


@pytest.mark.parametrize(
    ("source", "version"),
    [
        (parts_source(10, 13, 3, 9), "10.13.3.9"),
        ("int getInferLibVersion(void) { return 8601; }", "8.6.1"),
        ("int getInferLibVersion(void) { return 101401; }", "10.14.1"),
    ],
)
def test_version_numbers(tmp_path: Path, source: str, version: str) -> None:
    """Both ways of reporting a version are read: four functions, or one number with two radixes."""
    library = compile_library(tmp_path, source, "libnvinfer.so.99")
    assert ask(library, tmp_path / "memo") == [version, "True"]


def test_version_is_remembered_for_an_unchanged_file(tmp_path: Path) -> None:
    """A library is loaded once per file; a hit in a fresh process need not load it at all."""
    library = compile_library(tmp_path, parts_source(10, 1, 0, 1), "libnvinfer.so.99")
    time.sleep(0.05)
    assert ask(library, tmp_path / "memo") == ["10.1.0.1", "True"]
    assert ask(library, tmp_path / "memo") == ["10.1.0.1", "False"]


def test_loaded_library_counts_not_metadata(tmp_path: Path) -> None:
    """Bindings that say 10.12 over a loaded library that says 10.11: keys use 10.11, and a warning names both."""
    library = compile_library(tmp_path, parts_source(10, 11, 0, 33), "libnvinfer.so.10")
    (tmp_path / "m.onnx").write_bytes(tiny_model())
    code = """
import ctypes, sys, types
import trt_warmcache as twc
from trt_warmcache.builders import BuildOutput, TensorRTBuilder
ctypes.CDLL(sys.argv[1])
stub = types.ModuleType("tensorrt")
stub.__version__, stub.Builder = "10.12.0", object
sys.modules["tensorrt"] = stub
class Builder(TensorRTBuilder):
    def build(self, inputs):
        return BuildOutput(plan=b"ftrt" + bytes(20) + bytes([10, 11, 0, 33]) + bytes(100))
events = []
manager = twc.EngineManager(twc.MemoryStore(), builder=Builder(), hooks=[events.append], memo=twc.DigestMemo(None),
                            target=twc.Target(gpu="g", compute_capability="8.9"))
engine = manager.get(sys.argv[2], profiles={"x": "2x4"})
print(engine.key.parts["builder.version"])
print([event.detail for event in events if event.kind is twc.EventKind.VERSION_CONFLICT][0])
"""
    version, conflict = run_python(code, library, tmp_path / "m.onnx").splitlines()
    assert version == "10.11.0.33"
    assert "10.12.0" in conflict
    assert "10.11.0.33" in conflict


def test_stub_package_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of type stubs makes `import tensorrt` succeed; it is not taken for TensorRT."""
    (tmp_path / "tensorrt").mkdir()
    (tmp_path / "tensorrt" / "tensorrt.pyi").write_text("class Builder: ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not module_available("tensorrt")
    assert not TensorRTBuilder.available()
    monkeypatch.setitem(sys.modules, "tensorrt", types.ModuleType("tensorrt"))
    assert not module_available("tensorrt")


def test_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any TensorRT the error names both extras; a stub or lean module is refused by name."""
    for user in ("_select", "_nvinfer"):
        monkeypatch.setattr(f"trt_warmcache.builders.{user}.module_available", lambda _: False)
    manager = twc.EngineManager(twc.MemoryStore())
    with pytest.raises(twc.ConfigError, match=r"trt_warmcache\[rtx\].*trt_warmcache\[tensorrt\]"):
        manager.get(tiny_model(), profiles={"x": "2x4"})
    with pytest.raises(twc.ConfigError, match=r"trt_warmcache\[tensorrt\]"):
        TensorRTBuilder().version()


def test_auto_takes_rtx_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classic TensorRT installed but no GPU: auto takes TensorRT-RTX; with a GPU it takes the classic one."""
    from trt_warmcache.builders import select_builder

    monkeypatch.setattr("trt_warmcache.builders._select.module_available", lambda _: True)
    monkeypatch.setattr("trt_warmcache.builders._select.gpu_present", lambda: False)
    assert select_builder("auto").flavour == "tensorrt_rtx"
    monkeypatch.setattr("trt_warmcache.builders._select.gpu_present", lambda: True)
    assert select_builder("auto").flavour == "tensorrt"
