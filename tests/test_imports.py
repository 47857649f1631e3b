"""What importing the package costs, and that its public face is consistent."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pickle
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import tiny_model

import trt_warmcache as twc

if TYPE_CHECKING:
    from tests.conftest import RunPython

IMPORT = """
import json, os, sys
opened, environment = [], []
for name in ("warnings", "encodings.idna"):
    __import__(name)

def audit(event, args):
    if event == "open":
        opened.append(str(args[0]))
    elif event in {"socket.connect", "subprocess.Popen", "os.mkdir", "ctypes.dlopen"}:
        opened.append(event)

class Spy(dict):
    def __getitem__(self, name):
        environment.append(name)
        return super().__getitem__(name)
    def get(self, name, default=None):
        environment.append(name)
        return super().get(name, default)

os.environ = Spy(os.environ)
before = set(sys.modules)
sys.addaudithook(audit)
import trt_warmcache
loaded = sorted(set(sys.modules) - before)
loaded = [name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names]
print(json.dumps({"loaded": loaded, "opened": list(opened), "environment": list(environment)}))
"""


def test_import_is_quiet(run_python: RunPython) -> None:
    """Rule 17: importing opens nothing but its own code, reads no environment, and loads nothing heavy."""
    seen = json.loads(run_python(IMPORT))
    assert [name for name in seen["loaded"] if not name.startswith("trt_warmcache")] == []
    assert [name for name in seen["opened"] if not name.endswith((".py", ".pyc"))] == []
    assert seen["environment"] == []


HEAVY = """
import sys
import trt_warmcache as twc
for name in twc.__all__:
    getattr(twc, name)
import trt_warmcache.manager
heavy = {"numpy", "onnx", "tensorrt", "tensorrt_rtx", "tensorrt_bindings", "rich", "click", "pynvml", "onnxruntime",
         "google", "s3fs", "gcsfs", "adlfs", "aiohttp", "obstore", "cryptography", "asyncio"}
print(sorted(name for name in sys.modules if name.partition(".")[0] in heavy))
"""


def test_every_public_name_is_light(run_python: RunPython) -> None:
    """Using every public name still loads no TensorRT, onnx, numpy, or client of any cloud."""
    assert run_python(HEAVY).strip() == "[]"


HIT = """
import sys
import trt_warmcache as twc
manager = twc.EngineManager(sys.argv[1], builder="tensorrt_rtx")
assert manager.get(sys.argv[2], profiles={"x": "2x4"}).outcome is twc.Outcome.HIT
print(sorted(name.removeprefix("trt_warmcache.") for name in sys.modules if name.startswith("trt_warmcache.")))
"""


def test_a_hit_loads_little(run_python: RunPython, tmp_path: Path) -> None:
    """A hit in a folder loads no remote store, no other flavour's builder, and nothing that only a build needs."""
    (tmp_path / "tiny.onnx").write_bytes(tiny_model())
    with twc.EngineManager(tmp_path / "store", builder="tensorrt_rtx") as manager:
        manager.get(tmp_path / "tiny.onnx", profiles={"x": "2x4"})
    loaded = set(ast.literal_eval(run_python(HIT, tmp_path / "store", tmp_path / "tiny.onnx")))
    assert "builders._tensorrt_rtx" in loaded
    assert not loaded & {
        "build", "timing", "runtime_cache", "lease", "cli", "bundle", "eviction", "builders._tensorrt",
        "builders._timing", "builders._process", "stores._fsspec", "stores._layered", "stores._obstore", "stores._wire",
    }  # fmt: skip


EVERY_MODULE = """
import importlib, json, pathlib, sys
absent = ("numpy", "onnx", "onnxruntime", "tensorrt", "tensorrt_rtx", "tensorrt_bindings", "pynvml", "cryptography",
          "zstandard", "obstore", "s3fs", "gcsfs", "adlfs", "matplotlib", "torch", "pytest")
for name in absent:
    sys.modules[name] = None
import trt_warmcache
folder = pathlib.Path(trt_warmcache.__file__).parent
for path in sorted(folder.rglob("*.py")):
    name = ".".join((folder.name, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
    if not name.endswith(("__main__", "testing._stores")):  # tests for pytest
        importlib.import_module(name)
        print(name)
"""


def test_every_module_without_extras(run_python: RunPython) -> None:
    """Each module can be imported where none of the optional packages is installed."""
    imported = run_python(EVERY_MODULE).split()
    assert {"trt_warmcache.manager", "trt_warmcache.quantize", "trt_warmcache.cli", "trt_warmcache.testing"} <= set(
        imported
    )
    assert len(imported) > 60


def test_lazy_names_agree() -> None:
    """What type checkers see, what is imported on first use, and what is declared public are the same names."""
    tree = ast.parse(Path(inspect.getfile(twc)).read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared == twc._HOME
    assert set(twc.__all__) == set(declared) | {"__version__"}
    assert sorted(twc.__all__) == sorted(set(twc.__all__))
    assert dir(twc) == sorted(twc.__all__)
    for name, home in twc._HOME.items():
        module = importlib.import_module(home)
        assert getattr(twc, name) is getattr(module, name)
        assert name in module.__all__


def test_unknown_name() -> None:
    """A name that does not exist is the usual AttributeError."""
    assert not hasattr(twc, "EngineManger")


def test_public_names_are_documented() -> None:
    """Every public class, function and method says what it does."""
    missing = []
    for name in twc.__all__:
        value = getattr(twc, name)
        if not inspect.isclass(value) and not inspect.isfunction(value):
            continue
        if not inspect.getdoc(value):
            missing.append(name)
        if inspect.isclass(value):
            missing += [
                f"{name}.{member}"
                for member, item in vars(value).items()
                if not member.startswith("_")
                and (inspect.isfunction(item) or isinstance(item, (property, classmethod)))
                and getattr(item, "__name__", member) == member  # not a function that is a field's default
                and not inspect.getdoc(getattr(value, member))
            ]
    assert missing == []


def test_every_module_says_what_it_exports() -> None:
    """Every module has a docstring and an ``__all__`` of names that exist."""
    package = Path(inspect.getfile(twc)).parent
    for path in package.rglob("*.py"):
        if path.name in {"__main__.py", "_version.py"}:
            continue
        name = ".".join(("trt_warmcache", *path.relative_to(package).with_suffix("").parts)).removesuffix(".__init__")
        module = importlib.import_module(name)
        assert module.__doc__, name
        assert [public for public in getattr(module, "__all__", [None]) if not hasattr(module, str(public))] == [], name


def test_values_travel() -> None:
    """Requests and what they are made of survive the trip to a worker process."""
    request = twc.EngineRequest(
        "m.onnx",
        profiles={"x": ("1x3", "2x3", "4x3")},
        options=twc.BuildOptions(fp16=True, memory_pools={"workspace": 1 << 30}),
        policy=twc.Policy(cover="wider"),
        target=twc.Target(gpu="L4", compute_capability="8.9"),
        name="面",
    )
    again = pickle.loads(pickle.dumps(request))
    assert again == request
    assert hash(again) == hash(request)


def test_choices_read_as_their_words() -> None:
    """Every choice that is spelt as a word equals the word, prints it, and formats as it."""
    choices = {
        value
        for module in [sys.modules[name] for name in sorted(sys.modules) if name.startswith("trt_warmcache.")]
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Enum) and issubclass(value, str)
    }
    assert {twc.Outcome, twc.StoreReason, twc.EventKind} <= choices
    for choice in choices:
        for member in choice:
            assert str(member) == f"{member}" == member.value == member
