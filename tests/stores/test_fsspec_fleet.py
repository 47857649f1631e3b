"""A fleet on a real object-store server: processes on two machines, each with a folder of its own, one bucket."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.servers import ServerInfo

NODE = """
import json, os, sys, time
from tests.support import PROFILE, tiny_model
import trt_warmcache as twc
from trt_warmcache.stores import FsspecStore, LayeredStore, LocalStore
from trt_warmcache.testing import FakeBuilder
near, log, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
def on_build(inputs):
    with open(log, "a") as file:
        file.write(json.dumps({"at": time.monotonic(), "pid": os.getpid()}) + "\\n")
far = FsspecStore(options["url"], storage_options=options["storage_options"])
store = LayeredStore([LocalStore(near), far], lease_seconds=options["lease"])
builder = FakeBuilder(seconds=options["seconds"], steps=50, on_build=on_build)
with twc.EngineManager(store, builder=builder, memo=twc.DigestMemo(None)) as manager:
    engine = manager.get(tiny_model(), profiles=PROFILE)
    print(json.dumps([engine.outcome.value, engine.manifest.provenance.created]))
store.close()
"""


def start(root: Path, server: ServerInfo, bucket: str, machine: str, *, seconds: float, lease: float = 30.0) -> Any:
    """One process on a machine."""
    options = {
        "url": server.url_for(bucket, "fleet"), "storage_options": server.storage_options, "seconds": seconds, "lease": lease,
    }  # fmt: skip
    arguments = [str(root / machine), str(root / "log"), json.dumps(options)]
    return subprocess.Popen([sys.executable, "-c", NODE, *arguments], stdout=subprocess.PIPE, text=True)


def builds(root: Path) -> list[dict[str, Any]]:
    """Builds that have begun."""
    log = root / "log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_two_machines_one_bucket_one_build(tmp_path: Path, moto_server: ServerInfo) -> None:
    """Eight cold processes on two machines over an empty bucket: one build, one entry for all."""
    bucket = moto_server.fresh_bucket()
    children = [start(tmp_path, moto_server, bucket, "ab"[number % 2], seconds=1.0) for number in range(8)]
    results = []
    for child in children:
        output, _ = child.communicate(timeout=120)
        assert child.returncode == 0
        results.append(json.loads(output))
    assert len(builds(tmp_path)) == 1
    assert [outcome for outcome, _ in results].count("built") == 1
    assert len({created for _, created in results}) == 1


def test_dead_machine_is_replaced(tmp_path: Path, moto_server: ServerInfo) -> None:
    """A builder killed with its lease in the bucket: the other machine builds within the lease and a second."""
    bucket, lease = moto_server.fresh_bucket(), 4.0
    first = start(tmp_path, moto_server, bucket, "a", seconds=120, lease=lease)
    second = None
    try:
        until = time.monotonic() + 60
        while not builds(tmp_path):
            assert time.monotonic() < until
            time.sleep(0.02)
        second = start(tmp_path, moto_server, bucket, "b", seconds=0.1, lease=lease)
        while not (tmp_path / "b/trtwc-1/locks").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        time.sleep(1.5)  # the waiter has seen the lease
        first.send_signal(signal.SIGKILL)
        died = time.monotonic()
        output, _ = second.communicate(timeout=60)
        assert json.loads(output)[0] == "built"
        assert builds(tmp_path)[1]["at"] - died <= lease + 1
    finally:
        for child in (first, second):
            if child is not None:
                child.kill()
                child.wait()
                child.stdout.close()
