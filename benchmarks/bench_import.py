"""What a process pays for importing this library, and for importing it and taking a hit.

Each figure is the wall time of a whole process, beside ``python -c pass`` measured in turns with it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping

import trt_warmcache as twc
from common import Table, arguments, compiled, machine, medians, packages_missing, settle
from transformer import TINY

_HIT = """
import sys
from pathlib import Path
import trt_warmcache as twc
manager = twc.EngineManager({store!r}, builder="tensorrt_rtx", memo=twc.DigestMemo(Path({memo!r})))
engine = manager.get({model!r}, profiles={profiles!r})
assert engine.outcome is twc.Outcome.HIT
assert not {{"tensorrt_rtx", "tensorrt", "onnx", "numpy"}} & sys.modules.keys()
"""


def main() -> None:
    given = arguments(__doc__)
    if packages_missing("tensorrt_rtx", "onnx", "numpy"):
        sys.exit("Install the builder and the generator's needs: pip install 'trt_warmcache[rtx]' onnx numpy")
    print(machine())
    where = {
        "store": str(given.work / "store"),
        "memo": str(given.work / "memo"),
        "model": str(TINY.write(given.work)),
        "profiles": TINY.profiles,
    }
    hit = _HIT.format(**where)
    with twc.EngineManager(where["store"], builder="tensorrt_rtx", memo=twc.DigestMemo(given.work / "memo")) as manager:
        manager.get(where["model"], profiles=TINY.profiles).close()
        settle()
        manager.get(where["model"], profiles=TINY.profiles).close()

    environment = compiled(given.work)
    table = Table("Whole processes")
    for name, code, target in (
        ("import trt_warmcache", "import trt_warmcache", "60 ms more than pass"),
        ("import + EngineManager", "from trt_warmcache import EngineManager", ""),
        ("import + warm hit", hit, ""),
        ("peer: import numpy", "import numpy", ""),
        ("peer: import onnx", "import onnx", ""),
        ("peer: import tensorrt_rtx", "import tensorrt_rtx", ""),
    ):
        ours, empty = medians(process(code, environment), process("pass", environment), repeats=given.repeats(15))
        table.add(name, ours, "python -c pass", empty, target=target, note=f"{(ours - empty) * 1e3:+.0f} ms")
    table.show()


def process(code: str, environment: Mapping[str, str]) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, "-c", code], check=True, env=environment)


if __name__ == "__main__":
    main()
