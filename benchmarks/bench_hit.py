"""A hit against what nobody can do without: opening and mapping the plan's file; and against reading all of it.

Also: a repeated hit in one manager, a miss, and a hit that verifies every byte.
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import blake3

import trt_warmcache as twc
from common import Table, arguments, machine, medians, packages_missing, settle
from transformer import LARGE, TINY, Transformer


def main() -> None:
    given = arguments(__doc__)
    if packages_missing("tensorrt_rtx", "onnx", "numpy"):
        sys.exit("Install the builder and the generator's needs: pip install 'trt_warmcache[rtx]' onnx numpy")
    print(machine())
    for size in (TINY,) if given.quick else (TINY, LARGE):
        measure(size, given.work, given.repeats(200), given.repeats(9))


def measure(size: Transformer, work: Path, many: int, few: int) -> None:
    """One table: `many` repeats of what takes microseconds, `few` of what reads the whole plan."""
    model = size.write(work)
    store = work / "store"
    memo = work / "memo"
    fields: dict[str, Any] = {"profiles": size.profiles}

    def fresh() -> twc.EngineManager:
        return twc.EngineManager(store, builder="tensorrt_rtx", memo=twc.DigestMemo(memo))

    with fresh() as manager:
        manager.get(model, **fields).close()
        settle()
        engine = manager.get(model, **fields)
        name = engine.manifest.blob("plan").hex
        plan = store / "trtwc-1" / "blobs" / name[:2] / name
        bytes_in_plan = engine.plan.nbytes
        engine.close()

        table = Table(f"Hits on a plan of {bytes_in_plan / 1e6:.0f} MB")
        hit, mapped = medians(lambda: fresh().get(model, **fields), lambda: open_and_map(plan), repeats=many)
        table.add("hit, fresh manager, digest trusted", hit, "open + mmap", mapped, target="< 5 ms")
        repeat, mapped = medians(lambda: manager.get(model, **fields), lambda: open_and_map(plan), repeats=many)
        table.add("hit, same manager", repeat, "open + mmap", mapped, target="< 100 us")
        hit, read = medians(lambda: fresh().get(model, **fields), plan.read_bytes, repeats=few)
        table.add("hit, fresh manager, digest trusted", hit, "open().read()", read)

        # Every look is for another key, or it would be remembered.
        recipes = (f"miss {number}" for number in itertools.count())
        miss, absent = medians(
            lambda: manager.lookup(model, recipe=next(recipes), **fields),
            (store / "absent").exists,
            repeats=many,
        )
        table.add("miss", miss, "stat of a missing file", absent, target="< 1 ms")

        verify = twc.Policy(rehash=True)
        verified, hashed = medians(
            lambda: manager.get(model, policy=verify, **fields), lambda: map_and_hash(plan), repeats=few
        )
        rate = f"{bytes_in_plan / verified / 1e9:.1f} GB/s"
        table.add("hit, every byte verified", verified, "open + mmap + blake3", hashed, note=rate)
        table.show()


def open_and_map(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)


def map_and_hash(path: Path) -> str:
    with open_and_map(path) as mapped:
        return blake3.blake3(mapped, max_threads=blake3.blake3.AUTO).hexdigest()


if __name__ == "__main__":
    main()
