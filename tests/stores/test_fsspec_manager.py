"""Engines from a remote store, seen by whoever asks for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.servers import Answer, FaultProxy, ServerInfo
from tests.servers.info import ACCESS_KEY, SECRET_KEY
from tests.stores.test_fsspec_conformance import store_on
from tests.support import tiny_model

from trt_warmcache import EngineManager, Event, EventKind, Outcome
from trt_warmcache.errors import StoreError
from trt_warmcache.memo import DigestMemo
from trt_warmcache.stores import Transport
from trt_warmcache.testing import FakeBuilder


@pytest.mark.parametrize("transport", [Transport.FSSPEC, Transport.OBSTORE])
def test_built_once_then_hit(transport: Transport, moto_server: ServerInfo, memo: DigestMemo) -> None:
    """One node builds, another finds it; a packed plan is published, not mistaken for somebody else's."""
    bucket = moto_server.fresh_bucket()
    events: list[Event] = []
    builder = FakeBuilder(size=1 << 20)  # blanks, so it is packed on its way
    with EngineManager(
        store_on(moto_server, bucket, transport=transport), builder=builder, hooks=[events.append], memo=memo
    ) as here:
        engine = here.get(tiny_model(batch=1))
        assert engine.outcome is Outcome.BUILT
        plan = bytes(engine.plan)
    assert EventKind.PUBLISHED in {event.kind for event in events}
    assert EventKind.PUBLISH_LOST not in {event.kind for event in events}
    with EngineManager(store_on(moto_server, bucket, transport=transport), builder=builder, memo=memo) as there:
        found = there.get(tiny_model(batch=1))
        assert found.outcome is Outcome.HIT
        assert bytes(found.plan) == plan
        assert found.manifest.blob("plan").codec == "zstd"
    assert builder.builds == 1


def test_hit_writes_nothing(
    moto_server: ServerInfo, proxied: Callable[[ServerInfo], FaultProxy], memo: DigestMemo
) -> None:
    """A hit on a writable bucket sends reads only: not even the probe of conditional writes."""
    bucket = moto_server.fresh_bucket()
    builder = FakeBuilder()
    with EngineManager(store_on(moto_server, bucket), builder=builder, memo=memo) as manager:
        manager.get(tiny_model(batch=1))
    proxy = proxied(moto_server)
    with EngineManager(store_on(proxy.info, bucket), builder=builder, memo=memo) as manager:
        assert manager.get(tiny_model(batch=1)).outcome is Outcome.HIT
    assert {request.method for request in proxy.requests} <= {"GET", "HEAD"}
    assert len(proxy.requests) <= 3


def test_denied_is_no_reason_to_build(
    moto_server: ServerInfo, proxied: Callable[[ServerInfo], FaultProxy], memo: DigestMemo
) -> None:
    """A store that refuses reading is an error, not a cold cache."""
    proxy = proxied(moto_server)
    proxy.inject(Answer(403), times=1000)
    builder = FakeBuilder()
    with EngineManager(store_on(proxy.info, "some-bucket"), builder=builder, memo=memo) as manager:
        with pytest.raises(StoreError) as caught:
            manager.get(tiny_model(batch=1))
        assert caught.value.reason == "denied"
    assert builder.builds == 0


def test_command_line_calls_errors_by_their_names(moto_server: ServerInfo) -> None:
    """The command line shows the documented class of an error, for people and for programs."""
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ENDPOINT_URL": moto_server.endpoint,
        "AWS_REGION": "us-east-1",
    }
    command = [sys.executable, "-m", "trt_warmcache", "ls", "--store", "s3://no-such-bucket/x", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["error"] == "StoreError"
    assert "bucket does not exist" in told["message"]
