"""Deriving a key against hashing the same bytes with nothing around it.

First: nothing is remembered, every byte is read and hashed. New process: a digest memo from an earlier process is
there. Repeated: the same manager is asked again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import blake3

import trt_warmcache as twc
from common import Table, arguments, machine, medians, packages_missing, settle
from models import DETECTION, RealModel
from transformer import LARGE, TINY, Transformer
from trt_warmcache.builders import TensorRTRTXBuilder


def main() -> None:
    given = arguments(__doc__)
    if packages_missing("tensorrt_rtx", "onnx", "numpy"):
        sys.exit("Install the builder and the generator's needs: pip install 'trt_warmcache[rtx]' onnx numpy")
    print(machine())
    builder = TensorRTRTXBuilder()
    builder.version()  # asking the library for its version loads it, once per process; that is not what is timed here
    table = Table("Key derivation")
    for size in (TINY,) if given.quick else (TINY, LARGE):
        few = given.repeats(9 if size is LARGE else 100)
        measure(table, size.name, size.write(given.work), size, builder, given.work / "keys-memo", few)
    if DETECTION.path is not None and not given.quick:
        measure(table, DETECTION.name, DETECTION.path, DETECTION, builder, given.work / "keys-memo", 100)
    table.show()


def measure(
    table: Table,
    name: str,
    model: Path,
    asked: Transformer | RealModel,
    builder: TensorRTRTXBuilder,
    memo: Path,
    few: int,
) -> None:
    """Three rows of one model."""
    files = [*sorted(path for path in model.parent.iterdir() if path.suffix == ".data"), model]

    def key(remembered: twc.DigestMemo) -> str:
        manager = twc.EngineManager("memory://", builder=builder, memo=remembered)
        return manager.key(model, profiles=asked.profiles).digest

    def bare() -> list[str]:
        return [hash_file(path) for path in files]

    settle()
    key(twc.DigestMemo(memo))
    same = twc.EngineManager("memory://", builder=builder, memo=twc.DigestMemo(None))
    first, hashed = medians(lambda: key(twc.DigestMemo(None)), bare, repeats=few)
    size = f"{sum(path.stat().st_size for path in files) / 1e6:.1f} MB"
    table.add(f"{name}, first", first, "blake3 over mmap", hashed, note=size)
    again, stats = medians(
        lambda: key(twc.DigestMemo(memo)), lambda: [path.stat() for path in files], repeats=few if few <= 3 else 100
    )
    table.add(f"{name}, new process", again, "stat of the files", stats, note=size)
    repeated, stats = medians(
        lambda: same.key(model, profiles=asked.profiles),
        lambda: [path.stat() for path in files],
        repeats=few if few <= 3 else 100,
    )
    table.add(f"{name}, repeated", repeated, "stat of the files", stats, note=size)


def hash_file(path: Path) -> str:
    return blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).hexdigest()


if __name__ == "__main__":
    main()
