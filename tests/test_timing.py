"""The timing cache in a store: one per device and version, never lost, never believed blindly."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.builders.support import A10, LineBuilder, build_inputs
from tests.fakes import Gpu, installed, make_tensorrt, record_of
from tests.support import PROFILE, tiny_model

import trt_warmcache as twc
from trt_warmcache import timing
from trt_warmcache.builders import TensorRTBuilder
from trt_warmcache.cli import main
from trt_warmcache.events import Event, EventKind, Events
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import Labels, Provenance
from trt_warmcache.timing import TimingSession


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.onnx"
    path.write_bytes(tiny_model())
    return path


def make(
    root: Path, locks: Path, *, line: Any = "10.16", gpu: Gpu | None = None, target: twc.Target = A10, **more: Any
) -> Any:
    module = make_tensorrt(line, gpu=gpu or Gpu())
    builder = TensorRTBuilder(module, lock_folder=locks)
    return twc.EngineManager(root, builder=builder, target=target, memo=twc.DigestMemo(None), **more), record_of(module)


def stored(root: Path) -> list[Any]:
    with twc.LocalStore(root) as store:
        return [
            manifest
            for entry in store.entries(Kind.TIMING)
            if (manifest := store.manifest(Kind.TIMING, entry.digest)) is not None
        ]


def entries_of(root: Path, manifest: Any) -> dict[str, Any]:
    with twc.LocalStore(root) as store:
        payload = store.fetch(manifest.blob("timing"))
        found: dict[str, Any] = json.loads(bytes(payload.view)[40:])["entries"]
        payload.close()
    return found


def test_second_model_times_only_what_is_new(tmp_path: Path, model: Path) -> None:
    """A model that shares layers with an earlier one times only its own; asserted by counts, not by the clock."""
    manager, record = make(tmp_path / "s", tmp_path)
    with manager:
        manager.get(model, profiles=PROFILE)
        assert record.tactics_timed == 2
        # other weights, same layers and shapes
        manager.get(tiny_model(weight=2.0), profiles=PROFILE)
        assert record.tactics_timed == 2
        manager.get(tiny_model(weight=2.0, width=5), profiles={"x": ("1x5", "2x5", "8x5")})
        assert record.tactics_timed == 4
    (manifest,) = stored(tmp_path / "s")
    assert len(entries_of(tmp_path / "s", manifest)) == 4
    assert manifest.extra["entries"] == 4
    assert manifest.parts["target.gpu"] == "NVIDIA A10"


def test_nothing_new_writes_nothing(tmp_path: Path, model: Path) -> None:
    """A build that learnt nothing leaves the stored cache as it is."""
    manager, _ = make(tmp_path / "s", tmp_path)
    with manager:
        manager.get(model, profiles=PROFILE)
        before = stored(tmp_path / "s")
        manager.get(tiny_model(weight=3.0), profiles=PROFILE)
        assert stored(tmp_path / "s") == before


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": "NVIDIA A10G"},
        {"compute_capability": "8.9"},
        {"sm_count": 70},
        {"mig_profile": "1g.6gb"},
        {"cuda": "12.9"},
        {"driver": "570.1"},
        {"os": "windows"},
    ],
    ids=str,
)
def test_one_cache_per_device_and_libraries(change: dict[str, Any]) -> None:
    """Timings of another GPU, slice, CUDA or driver are another cache, whatever the engine's compatibility level."""
    builder = LineBuilder()
    other = twc.Target(**{**A10.to_json(), **change})
    for options in (twc.BuildOptions(), twc.BuildOptions(hardware_compatibility="ampere_plus")):
        ours = timing.key_for(builder, A10, options, "m")
        theirs = timing.key_for(builder, other, options, "m")
        assert ours is not None
        assert theirs is not None
        assert ours.digest != theirs.digest


def test_what_does_not_split_the_cache() -> None:
    """Memory size and the card's own UUID do not matter, nor does the model unless it is asked for."""
    builder, options = LineBuilder(), twc.BuildOptions()
    same = twc.Target(**{**A10.to_json(), "uuid": "GPU-other", "memory_bytes": 1 << 34})
    ours = timing.key_for(builder, A10, options, "a")
    assert ours == timing.key_for(builder, same, options, "b")
    scoped = twc.BuildOptions(timing_scope="model")
    a, b = (timing.key_for(builder, A10, scoped, name) for name in "ab")
    assert a is not None
    assert b is not None
    assert len({ours.digest if ours else "", a.digest, b.digest}) == 3
    assert a.name.startswith("a_")
    assert timing.key_for(builder, A10, twc.BuildOptions(timing="off"), "a") is None
    # A target that does not name its GPU could be any; nothing measured is kept for it.
    assert timing.key_for(builder, twc.Target(compute_capability="8.6"), options, "a") is None


def test_two_gpus_never_share(tmp_path: Path, model: Path) -> None:
    """Builds on two GPUs leave two caches, and neither sees the other's entries."""
    l4 = twc.Target(gpu="NVIDIA L4", compute_capability="8.9", sm_count=58, uuid="GPU-l4", driver="580.1", cuda="13.0")
    first, _ = make(tmp_path / "s", tmp_path)
    second, record = make(tmp_path / "s", tmp_path, gpu=Gpu("NVIDIA L4", (8, 9), 58), target=l4)
    with first, second:
        first.get(model, profiles=PROFILE)
        second.get(model, profiles=PROFILE)
        assert record.tactics_timed == 2
        assert record.tactics_from_cache == 0
        assert second.counters().get("timing_dropped", 0) == 0
    assert len(stored(tmp_path / "s")) == 2


def test_mismatched_blob_is_set_aside(tmp_path: Path, model: Path) -> None:
    """A whole blob that TensorRT silently ignores is noticed by its entry count, told, set aside and replaced."""
    root = tmp_path / "s"
    seen: list[Event] = []
    foreign = TensorRTBuilder(make_tensorrt("10.16", gpu=Gpu("Other", (8, 0), 1)), lock_folder=tmp_path)
    blob = foreign.build(build_inputs()).timing
    assert blob is not None
    manager, record = make(root, tmp_path, hooks=[seen.append])
    key = timing.key_for(manager.builder, A10, twc.BuildOptions(), "tiny")
    assert key is not None
    timing.publish(
        manager.store, key, manager.builder, blob, None, provenance=Provenance(), labels=Labels(), events=Events()
    )
    with manager:
        manager.get(model, profiles=PROFILE)
        dropped = [event for event in seen if event.kind is EventKind.TIMING_DROPPED]
        assert [event.detail["reason"] for event in dropped] == ["mismatch"]
        assert record.tactics_timed == 2
        manager.get(tiny_model(weight=2.0), profiles=PROFILE)
        assert record.tactics_timed == 2
    assert list((root / "trtwc-1" / "quarantine").glob("timing-*.reason"))


@pytest.mark.parametrize("line", ["8.6", "10.3", "10.16", "11.4"])
@pytest.mark.parametrize("damage", ["prefix", "cut", "text mode", "empty"])
def test_damaged_blob(tmp_path: Path, model: Path, line: Any, damage: str) -> None:
    """A file damaged in the store is found by our digest before TensorRT sees it; the build goes on and heals it."""
    root = tmp_path / "s"
    manager, _ = make(root, tmp_path, line=line)
    with manager:
        manager.get(model, profiles=PROFILE)
    (manifest,) = stored(root)
    ref = manifest.blob("timing")
    path = root / "trtwc-1" / "blobs" / ref.hex[:2] / ref.hex
    data = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(
        {"prefix": b"x" + data, "cut": data[:-9], "text mode": data.replace(b"{", b"{\r\n"), "empty": b""}[damage]
    )
    manager, record = make(root, tmp_path, line=line)
    with manager:
        manager.get(tiny_model(weight=2.0), profiles=PROFILE)
        assert manager.counters()["timing_dropped.damaged"] == 1
        assert record.tactics_timed == 2
    manager, record = make(root, tmp_path, line=line)
    with manager:
        manager.get(tiny_model(weight=3.0), profiles=PROFILE)
        assert record.tactics_timed == 0


def test_require_needs_a_complete_cache(tmp_path: Path, model: Path) -> None:
    """With require, a build that would have to measure fails; after somebody measured, it works."""
    strict = twc.BuildOptions(timing="require", optimization_level=2)
    manager, _ = make(tmp_path / "s", tmp_path)
    with manager:
        with pytest.raises(twc.BuildError, match="timing cache miss for mul"):
            manager.get(model, profiles=PROFILE, options=strict)
        manager.get(model, profiles=PROFILE)
        assert manager.get(model, profiles=PROFILE, options=strict).outcome is twc.Outcome.BUILT


@pytest.mark.parametrize("trouble", ["file in the place of the folder", "read-only"])
def test_trouble_with_the_cache_never_fails_a_build(tmp_path: Path, model: Path, trouble: str) -> None:
    """Where the timing cache cannot be kept, the build succeeds and the reason is counted."""
    root = tmp_path / "s"
    (root / "trtwc-1").mkdir(parents=True)
    place = root / "trtwc-1" / "timing"
    if trouble == "read-only":
        place.mkdir()
        place.chmod(0o500)
        if os.getuid() == 0:
            place.rmdir()
            place.symlink_to("/proc/self/fdinfo")  # root may write anywhere but there
    else:
        place.write_text("in the way")
    manager, _ = make(root, tmp_path)
    with manager:
        engine = manager.get(model, profiles=PROFILE)
        assert engine.outcome is twc.Outcome.BUILT
        assert engine.stored
        assert manager.counters()["timing_dropped"] >= 1


def test_tensorrt_never_warns_of_a_missing_cache(tmp_path: Path, model: Path) -> None:
    """A cache is always attached, so the alarming warning about none never appears."""
    manager, record = make(tmp_path / "s", tmp_path)
    with manager:
        engine = manager.get(model, profiles=PROFILE)
    assert engine.manifest.provenance.warnings == ()
    assert not [text for severity, text in record.messages if severity in {"WARNING", "ERROR"}]


# ---- two builders -----------------------------------------------------------------------------------------------

ROUNDS = 50


def build_rounds(root: str, number: int, barrier: Any, results: Any) -> None:
    """One of two processes: in each round both read, wait for each other, and publish together."""
    builder = LineBuilder("10.16", os.path.join(root, f"locks{number}"))
    seen: set[str] = set()
    events = Events()
    with twc.LocalStore(Path(root) / "s") as store:
        for round_number in range(ROUNDS):
            session = TimingSession.begin(store, builder, A10, twc.BuildOptions(), model_name="m", events=events)
            width = 10 + 2 * round_number + number
            shape = f"1x{width}"
            output = builder.build(
                build_inputs(tiny_model(width=width), profiles={"x": (shape, shape, shape)}, timing=session.blob)
            )
            seen |= set(json.loads((output.timing or b"")[40:])["entries"])
            barrier.wait(60)
            session.finish(output, Provenance())
            barrier.wait(60)
    results.put((sorted(seen), events.counts()))


def test_two_processes_keep_the_union(tmp_path: Path) -> None:
    """Fifty rounds of two builders finishing together: not one measured entry is lost."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [
        context.Process(target=build_rounds, args=(str(tmp_path), number, barrier, results)) for number in (0, 1)
    ]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=200) for _ in workers]
    for worker in workers:
        worker.join(30)
    (manifest,) = stored(tmp_path / "s")
    union = set(found[0][0]) | set(found[1][0])
    assert set(entries_of(tmp_path / "s", manifest)) == union
    assert manifest.extra["entries"] == len(union)
    assert len(union) >= 2 * ROUNDS
    assert all("timing_dropped" not in counts for _, counts in found)


# ---- by hand ----------------------------------------------------------------------------------------------------


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("line", ["10.3", "11.4"])
def test_command_line(tmp_path: Path, model: Path, line: Any) -> None:
    """timing ls, show, export and merge, on caches of two hosts with the same GPU."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    with installed(make_tensorrt(line)):
        for root, width in ((ours, 4), (theirs, 6)):
            with twc.EngineManager(root, builder="tensorrt", target=A10, memo=twc.DigestMemo(None)) as manager:
                shape = f"1x{width}"
                manager.get(
                    tiny_model(width=width),
                    profiles={"x": (shape, shape, shape)},
                    options=twc.BuildOptions(timing="editable") if line == "11.4" else None,
                )
        listed = json.loads(run("timing", "ls", "--store", ours, "--json").stdout)
        assert [row["parts"]["target.gpu"] for row in listed] == ["NVIDIA A10"]
        key = listed[0]["key"]
        assert "NVIDIA A10" in run("timing", "ls", "--store", ours).stdout
        exported = json.loads(run("timing", "export", key[:10], tmp_path / "out", "--store", theirs, "--json").stdout)
        assert exported["file"].endswith(".cache")
        merged = run("timing", "merge", key[:10], exported["file"], "--store", ours, "--json")
        assert json.loads(merged.stdout)["size"] > listed[0]["size"]
        (manifest,) = stored(ours)
        assert len(entries_of(ours, manifest)) == 4
        assert manifest.extra.get("entries") == (None if line == "10.3" else 4)
        shown = run("timing", "show", key[:10], "--entries", "--store", ours, "--json")
        if line == "10.3":
            assert shown.exit_code == 2
            assert "10.8 or later" in shown.stdout
        else:
            assert len(json.loads(shown.stdout)["entries"]) == 4
            assert "tactic" in run("timing", "show", key[:10], "--entries", "--store", ours).stdout
        garbage = tmp_path / "garbage.cache"
        garbage.write_bytes(b"not a timing cache")
        refused = run("timing", "merge", key[:10], garbage, "--store", ours)
        assert refused.exit_code == 1
        assert "garbage.cache" in refused.stderr
        assert run("timing", "show", "feed", "--store", ours).exit_code == 3
    with installed(make_tensorrt("10.16")):
        other = run("timing", "merge", key[:10], garbage, "--store", ours)
        assert other.exit_code == 2
        assert "only the same version can read it" in other.stderr


def test_pinned_cache_decides_the_tactics(tmp_path: Path, model: Path) -> None:
    """Tactics pinned in the stored cache are what the next builds use."""
    manager, _ = make(tmp_path / "s", tmp_path)
    with manager:
        manager.get(model, profiles=PROFILE, options=twc.BuildOptions(timing="editable"))
        (before,) = stored(tmp_path / "s")
        key = next(iter(entries_of(tmp_path / "s", before)))
        timing.pin(manager.store, before, manager.builder, twc.TacticReplay(entries={key: 4711}), events=Events())
        (after,) = stored(tmp_path / "s")
        assert entries_of(tmp_path / "s", after)[key][0] == 4711
        engine = manager.get(
            tiny_model(weight=2.0), profiles=PROFILE, options=twc.BuildOptions(timing="editable", record_tactics=True)
        )
        assert engine.manifest.extra["tactics"]["entries"][key] == "4711"
        assert engine.manifest.extra["timing_key"] == after.key
