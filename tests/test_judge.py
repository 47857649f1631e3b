"""Entries whose bytes are right and that are still worth a word: drift, odd sizes, refused and ineffective ones."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.builders.support import A10, seven_iterations
from tests.fakes import make_tensorrt
from tests.support import PROFILE, tiny_model

import trt_warmcache as twc
from trt_warmcache.builders import BuildInputs, BuildOutput, TensorRTBuilder
from trt_warmcache.events import Event, EventKind
from trt_warmcache.judge import History, drift, fingerprint
from trt_warmcache.keys import Kind
from trt_warmcache.testing import FakeBuilder


def make(root: Path, builder: Any = None, **more: Any) -> twc.EngineManager:
    return twc.EngineManager(root, builder=builder or FakeBuilder(), memo=twc.DigestMemo(None), **more)


def classic(root: Path, **more: Any) -> twc.EngineManager:
    return make(root, TensorRTBuilder(make_tensorrt("10.16"), lock_folder=root.parent), target=A10, **more)


def of_kind(events: list[Event], kind: EventKind) -> list[str]:
    return [event.detail["text"] for event in events if event.kind is kind]


# ---- drift ----------------------------------------------------------------------------------------------------------

OPTIONS = twc.BuildOptions(
    optimization_level=4,
    fp16=True,
    tiling="fast",
    refit="all",
    tactic_sources=["JIT_CONVOLUTIONS"],
    preview_features={"profile_sharing": True},
    calibrate_before_fusion=True,
    workspace=1 << 25,
)


def test_no_drift_without_a_change(tmp_path: Path) -> None:
    """A hit on an entry made by this very release reports nothing."""
    with classic(tmp_path / "s") as manager:
        manager.get(tiny_model(), profiles=PROFILE, options=OPTIONS)
        assert manager.get(tiny_model(), profiles=PROFILE, options=OPTIONS).outcome is twc.Outcome.HIT
        assert "drift" not in manager.counters()


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"flags": ["REFIT", "TF32"]}, "builder flag FP16 was off and would be on"),
        ({"builder_optimization_level": 3}, "builder_optimization_level was 3 and would be 4"),
        ({"tiling_optimization_level": "NONE"}, "tiling_optimization_level was NONE and would be FAST"),
        ({"tactic_sources": []}, "tactic_sources was [] and would be ['JIT_CONVOLUTIONS']"),
        ({"preview_features": []}, "preview feature profile_sharing was off and would be on"),
        ({"quantization_flags": []}, "quantization flag CALIBRATE_BEFORE_FUSION was off and would be on"),
        ({"memory_pools": {"workspace": 1}}, "memory pool workspace was 1 and would be 33554432"),
    ],
)
def test_recorded_configuration_that_would_differ_today(tmp_path: Path, record: dict[str, Any], text: str) -> None:
    """A key that agrees and a recorded configuration that does not is reported as drift; the hit stays a hit."""
    events: list[Event] = []
    with classic(tmp_path / "s", hooks=[events.append]) as manager:
        engine = manager.get(tiny_model(), profiles=PROFILE, options=OPTIONS)
        provenance = engine.manifest.provenance
        changed = msgspec.structs.replace(
            engine.manifest,
            provenance=msgspec.structs.replace(provenance, config={**provenance.config, **record}),
        )
        manager.store.remove(Kind.ENGINE, changed.key)
        manager.store.publish(changed, {"plan": engine.plan})
        assert manager.get(tiny_model(), profiles=PROFILE, options=OPTIONS).outcome is twc.Outcome.HIT
        assert any(text in told for told in of_kind(events, EventKind.DRIFT))


def test_changed_hook_under_one_recipe(tmp_path: Path) -> None:
    """A configure hook whose code changed while its recipe did not is drift."""
    events: list[Event] = []

    def same_name_other_code(network: Any, config: Any) -> None:
        config.avg_timing_iterations = 9

    same_name_other_code.__module__ = seven_iterations.__module__
    same_name_other_code.__qualname__ = seven_iterations.__qualname__
    with classic(tmp_path / "s", hooks=[events.append]) as manager:
        for hook in (seven_iterations, seven_iterations, same_name_other_code):
            manager.get(tiny_model(), profiles=PROFILE, recipe="1", configure=hook)
        (told,) = of_kind(events, EventKind.DRIFT)
        assert "under the same recipe" in told
        assert (
            manager.get(tiny_model(), profiles=PROFILE, recipe="2", configure=seven_iterations).outcome
            is twc.Outcome.BUILT
        )
        with pytest.raises(twc.ConfigError, match="needs a recipe"):
            manager.get(tiny_model(), profiles=PROFILE, configure=seven_iterations)
    assert fingerprint(seven_iterations) == fingerprint(seven_iterations)
    assert fingerprint(seven_iterations) != fingerprint(same_name_other_code)
    assert ":" in fingerprint(os.getcwd)


def test_hooks_of_other_python_versions_are_not_compared() -> None:
    """Compiled code differs between Python versions without anybody having changed the hook."""
    manifest = twc.Manifest(format="f", kind="engines", key="0", schema=1, parts={}, blobs=())
    name, python, code = fingerprint(seven_iterations).split(" ")
    for recorded, drifts in (
        (f"{name} py2.7 0123", False),
        (f"{name} {python} 0123", True),
        (f"{name} {python} {code}", False),
    ):
        old = msgspec.structs.replace(manifest, extra={"configure": recorded})
        assert bool(drift(old, OPTIONS, seven_iterations)) is drifts


def test_entries_without_a_record_do_not_drift() -> None:
    """Entries of builders that record no flags are left alone."""
    manifest = twc.Manifest(format="f", kind="engines", key="0", schema=1, parts={}, blobs=())
    assert drift(manifest, OPTIONS, None) == ()


# ---- odd sizes ------------------------------------------------------------------------------------------------------


def test_outlier_is_marked(tmp_path: Path) -> None:
    """A plan twice the size of its relatives is stored with the suspicion, told and counted."""
    builder, events = FakeBuilder(size=10_000), list[Event]()
    with make(tmp_path / "s", builder, hooks=[events.append]) as manager:
        for recipe in "abc":
            manager.get(tiny_model(), profiles=PROFILE, recipe=recipe)
        assert "suspect" not in manager.counters()
        builder.size = 20_000
        engine = manager.get(tiny_model(), profiles=PROFILE, recipe="d")
        assert engine.stored
        assert "2.0 times the 10000 bytes of 3 earlier" in engine.manifest.extra["suspect"]
        assert len(of_kind(events, EventKind.SUSPECT)) == 1
        builder.size = 12_000
        assert "suspect" not in manager.get(tiny_model(), profiles=PROFILE, recipe="e").manifest.extra


def test_rebuilding_is_judged_by_what_is_there(tmp_path: Path) -> None:
    """An engine built anew is compared with the one that it replaces, in size and in time."""
    builder, events = FakeBuilder(size=10_000, seconds=0.1), list[Event]()
    with make(tmp_path / "s", builder, hooks=[events.append]) as manager:
        manager.get(tiny_model(), profiles=PROFILE)
        builder.size = 20_000
        again = manager.get(tiny_model(), profiles=PROFILE, policy=twc.Policy(refresh=True))
        assert "2.0 times the 10000 bytes of 1 earlier" in again.manifest.extra["suspect"]
        starts = [event.detail for event in events if event.kind is EventKind.BUILD_START]
        assert starts[1]["expected_seconds"] >= 0.1


def test_outlier_is_refused_by_policy(tmp_path: Path) -> None:
    """With on_suspect="refuse" it is not stored, and the next build is free to do better."""
    builder = FakeBuilder(size=10_000)
    policy = twc.Policy(on_suspect="refuse")
    with make(tmp_path / "s", builder, policy=policy) as manager:
        manager.get(tiny_model(), profiles=PROFILE, recipe="a")
        builder.size = 4_000
        with pytest.raises(twc.BuildError, match=r"is not stored: the plan has 4000 bytes, 0\.4 times"):
            manager.get(tiny_model(), profiles=PROFILE, recipe="b")
        builder.size = 10_000
        assert manager.get(tiny_model(), profiles=PROFILE, recipe="b").outcome is twc.Outcome.BUILT


def test_other_precisions_are_no_relatives(tmp_path: Path) -> None:
    """An engine of half the size is right where other precisions were asked for."""
    builder = FakeBuilder(size=10_000)
    with make(tmp_path / "s", builder) as manager:
        manager.get(tiny_model(), profiles=PROFILE)
        builder.size = 5_000
        engine = manager.get(tiny_model(), profiles=PROFILE, options=twc.BuildOptions(fp16=True))
        assert "suspect" not in engine.manifest.extra


# ---- what really built it ---


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ({"target": {"compute_capability": "8.9"}}, r"compute_capability 8\.6 and built on 8\.9"),
        ({"target": {"gpu": "NVIDIA L4"}}, "gpu NVIDIA A10 and built on NVIDIA L4"),
        ({"library": "2.0.0"}, r"asked of fake 1\.0\.0 and built by 2\.0\.0"),
        ({"library": "1.0.0.7", "target": {"gpu": "NVIDIA A10"}}, ""),
        ({"library": "", "target": {}}, ""),
    ],
    ids=str,
)
def test_the_builder_has_the_last_word_on_what_was_built(tmp_path: Path, output: dict[str, Any], text: str) -> None:
    """An engine built on another GPU or by another library than its key says is not stored, and the error names both."""

    class Elsewhere(FakeBuilder):
        def build(self, inputs: BuildInputs) -> BuildOutput:
            return dataclasses.replace(super().build(inputs), **output)

    with make(tmp_path / "s", Elsewhere(), target=A10) as manager:
        if not text:
            assert manager.get(tiny_model(), profiles=PROFILE).stored
            return
        with pytest.raises(twc.BuildError, match=text):
            manager.get(tiny_model(), profiles=PROFILE)
        assert manager.lookup(tiny_model(), profiles=PROFILE) is None


# ---- expected time --------------------------------------------------------------------------------------------------


def test_expected_seconds_from_earlier_builds(tmp_path: Path) -> None:
    """The start of a build says how long builds of the same model took; unknown models say nothing."""
    events: list[Event] = []
    with make(tmp_path / "s", FakeBuilder(seconds=0.2), hooks=[events.append]) as manager:
        manager.get(tiny_model(), profiles=PROFILE)
        manager.get(tiny_model(), profiles=PROFILE, recipe="b")
        manager.get(tiny_model(weight=2.0), profiles=PROFILE)
        starts = [event.detail for event in events if event.kind is EventKind.BUILD_START]
    assert "expected_seconds" not in starts[0]
    assert starts[1]["expected_seconds"] >= 0.2
    assert "expected_seconds" not in starts[2]
    assert History().suspicion(5) == ""


# ---- probes ---------------------------------------------------------------------------------------------------------


def test_probe(tmp_path: Path) -> None:
    """A probe sees the finished engine; what it refuses is not stored, and nobody else gets it."""
    seen: list[Any] = []

    def good(engine: twc.Engine) -> bool:
        seen.append(engine.deserialize())
        assert not engine.stored
        return True

    with make(tmp_path / "s") as manager:
        with pytest.raises(twc.BuildError, match="probe refused the engine"):
            manager.get(tiny_model(), profiles=PROFILE, probe=lambda engine: False)
        with pytest.raises(twc.BuildError, match=r"probe of .* failed with ZeroDivisionError"):
            manager.get(tiny_model(), profiles=PROFILE, probe=lambda engine: 1 / 0)
        assert manager.lookup(tiny_model(), profiles=PROFILE) is None
        assert manager.get(tiny_model(), profiles=PROFILE, probe=good).outcome is twc.Outcome.BUILT
        assert len(seen) == 1
        assert manager.get(tiny_model(), profiles=PROFILE, probe=lambda engine: False).outcome is twc.Outcome.HIT


# ---- ineffective ----------------------------------------------------------------------------------------------------


def test_no_third_build(tmp_path: Path) -> None:
    """An engine that is rejected, rebuilt and rejected again is told as ineffective and not built a third time."""

    def reject(plan: memoryview) -> Any:
        raise twc.IncompatibleError("not this one", about_plan=True)

    events: list[Event] = []
    builder = FakeBuilder(loader=reject)
    with make(tmp_path / "s", builder, hooks=[events.append]) as manager:
        manager.get(tiny_model(), profiles=PROFILE)
    with make(tmp_path / "s", builder, hooks=[events.append]) as manager:
        for _ in range(3):
            with pytest.raises(twc.IncompatibleError):
                manager.get(tiny_model(), profiles=PROFILE).deserialize()
        assert builder.builds == 2
        assert len(of_kind(events, EventKind.INEFFECTIVE)) == 3
    fresh = FakeBuilder(loader=reject)
    with make(tmp_path / "t", fresh) as manager:
        for _ in range(3):
            with pytest.raises(twc.IncompatibleError):
                manager.get(tiny_model(), profiles=PROFILE).deserialize()
        assert fresh.builds == 1
