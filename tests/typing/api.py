"""User code that must type-check: the public face as editors and mypy see it. Never run; ``nox -s typing`` reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trt_warmcache as twc
from trt_warmcache.builders import LoadNeeds

if TYPE_CHECKING:
    from typing_extensions import assert_type


class MyBuilder:
    """A builder of one's own: the protocol is matched by shape, nothing is inherited."""

    flavour = "mine"
    capabilities = twc.BuilderCapabilities(progress=True)

    def version(self) -> str:
        return "1"

    def check(self, options: twc.BuildOptions, target: twc.Target) -> None: ...

    def build(self, inputs: twc.BuildInputs) -> twc.BuildOutput:
        assert_type(inputs.profiles, tuple[twc.ShapeProfile, ...])
        inputs.on_progress(twc.Progress("phase", None, 1, 2))
        inputs.checkpoint()
        return twc.BuildOutput(plan=b"plan", library="1")

    def check_plan(self, plan: memoryview, *, older: bool = False) -> None: ...

    def deserialize(self, plan: memoryview, needs: LoadNeeds | None = None) -> Any:
        return plan

    def merge_timing(self, newer: bytes, older: bytes) -> bytes:
        return newer + older


def hook(event: twc.Event) -> None:
    """A hook is any function of an event."""
    assert_type(event.kind, twc.EventKind)
    assert_type(event.detail, Mapping[str, Any])
    assert_type(event.seconds, float | None)


def managers(store: twc.Store, folder: Path) -> None:
    """Every kind of store, builder, target, policy and hook."""
    builder: twc.EngineBuilder = MyBuilder()
    a_hook: twc.Hook = hook
    twc.EngineManager("~/.cache/trt_warmcache")
    twc.EngineManager(folder, builder="tensorrt_rtx", target=None, policy=None, hooks=())
    twc.EngineManager(["/var/cache/trt", "s3://bucket/trt"], builder=builder, hooks=[a_hook, hook])
    twc.EngineManager(store, target=twc.Target.detect(1), policy=twc.Policy(on_miss="raise", cover="wider"))
    twc.EngineManager(twc.open_store([folder, twc.MemoryStore()]), memo=twc.DigestMemo(None))
    twc.EngineManager("~/no/such", polcy=None)  # type: ignore[call-arg]


def engines(manager: twc.EngineManager, model: os.PathLike[str]) -> None:
    """What calls take and give."""
    request = twc.EngineRequest(
        model,
        profiles={"x": ("1x3x224x224", (4, 3, 224, 224), [8, 3, 224, 224])},
        options=twc.BuildOptions(optimization_level=3, hardware_compatibility="ampere_plus"),
        calibration=twc.Calibration(fingerprint="images of May"),
        plugins=["libplugin.so", model],
        recipe="1",
        name="face_beauty",
        version="7",
        policy=twc.Policy(trust="signed", build_seconds=None),
        timeout=60,
        target=twc.Target(compute_capability=(8, 9), gpu="NVIDIA L4"),
    )
    engine = assert_type(manager.get(request), twc.Engine)
    assert_type(manager.get(b"bytes", profiles=None, name="n"), twc.Engine)
    assert_type(manager.lookup(request), twc.Engine | None)
    assert_type(engine.outcome, twc.Outcome)
    assert_type(engine.plan, memoryview)
    assert_type(engine.key, twc.EngineKey)
    assert_type(engine.key.digest, str)
    assert_type(engine.key.parts, Mapping[str, Any])
    assert_type(engine.key.name, str)
    assert_type(engine.manifest, twc.Manifest)
    assert_type(engine.timings, Mapping[str, float])
    assert_type(engine.publish_error, twc.StoreError | None)
    assert_type(manager.key(model), twc.EngineKey)
    assert_type(manager.counters(), dict[str, int])
    explanation = assert_type(manager.explain(model, nearest=1), twc.Explanation)
    assert_type(explanation.hit, bool)
    for difference in explanation.differences:
        assert_type(difference.part, str)
    with manager as same, same.get(model) as closing:
        assert_type(same, twc.EngineManager)
        assert_type(closing, twc.Engine)
    engine.outcome = "hit"  # type: ignore[assignment]


def warming(manager: twc.EngineManager, requests: Sequence[twc.EngineRequest]) -> None:
    """Reports and executors."""

    def told(row: twc.WarmRow) -> None:
        assert_type(row.error, BaseException | None)
        assert_type(row.seconds, float)

    report = assert_type(manager.warm(requests, max_workers=2, progress=told), twc.WarmReport)
    assert_type(report.ok, bool)
    assert_type(report.rows, tuple[twc.WarmRow, ...])
    with ProcessPoolExecutor() as executor:
        manager.warm(["a.onnx", b"bytes", *requests], executor=executor)


async def asynchronous(manager: twc.EngineManager) -> None:
    """The same for asyncio."""
    assert_type(await manager.aget("m.onnx", timeout=3), twc.Engine)
    assert_type(await manager.awarm(["m.onnx"], max_workers=1), twc.WarmReport)


def errors(manager: twc.EngineManager) -> None:
    """Facts that errors carry."""
    try:
        manager.get("m.onnx")
    except twc.UnknownFieldError as error:
        assert_type(error.nearest, str | None)
    except twc.ConfigError as error:
        value_error: ValueError = error
        assert_type(value_error.args, tuple[Any, ...])
    except twc.ModelError as error:
        assert_type(error.operator, str | None)
    except twc.BuildTimeout as error:
        timeout: TimeoutError = error
        assert_type(timeout.errno, int | None)
    except twc.BuildError as error:
        assert_type(error.log, tuple[str, ...])
    except twc.StoreError as error:
        assert_type(error.reason, twc.StoreReason)
    except (twc.IntegrityError, twc.UntrustedError) as error:
        assert_type(error.reason, str)
    except twc.IncompatibleError as error:
        assert_type(error.about_plan, bool)
    except twc.MissError as error:
        assert_type(error.key, str)
    except twc.WarmCacheError as error:
        assert_type(error.message, str)


def mistakes() -> None:
    """What a type checker refuses before it is run."""
    twc.Policy(on_miss="explode")  # type: ignore[arg-type]
    twc.Policy(onmiss="raise")  # type: ignore[call-arg]
    twc.BuildOptions(optimisation_level=3)  # type: ignore[call-arg]
    twc.BuildOptions(tiling="most")  # type: ignore[arg-type]
    twc.Target("NVIDIA L4")  # type: ignore[call-arg]
    twc.EngineRequest("m", timeout="3")  # type: ignore[arg-type]
    twc.Policy().on_miss = "raise"  # type: ignore[misc]
    twc.EngineManger  # type: ignore[attr-defined]  # noqa: B018
