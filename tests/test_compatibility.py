"""Which stored plan may serve which GPU and version, and how it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fakes import Gpu, Line, make_tensorrt, record_of
from tests.support import PROFILE, tiny_model

import trt_warmcache as twc
from trt_warmcache.builders import TensorRTBuilder
from trt_warmcache.builders._plan import check_header
from trt_warmcache.events import Event, EventKind
from trt_warmcache.testing import FakeBuilder, FlakyStore

A10 = Gpu("NVIDIA A10", (8, 6), 72)
A10G = Gpu("NVIDIA A10G", (8, 6), 80)
L4 = Gpu("NVIDIA L4", (8, 9), 58)
T4 = Gpu("Tesla T4", (7, 5), 40)
RTX2080 = Gpu("NVIDIA GeForce RTX 2080", (7, 5), 46)


def target(gpu: Gpu, **more: Any) -> twc.Target:
    facts: dict[str, Any] = {"sm_count": gpu.sm_count, "cuda": "13.0", "driver": "580.1", "uuid": f"GPU-{gpu.name}"}
    return twc.Target(gpu=gpu.name, compute_capability=gpu.cc, **{**facts, **more})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.onnx"
    path.write_bytes(tiny_model())
    return path


def make(tmp_path: Path, gpu: Gpu = A10, line: Line = "10.16", **more: Any) -> twc.EngineManager:
    builder = TensorRTBuilder(make_tensorrt(line, gpu=gpu), lock_folder=tmp_path / "locks")
    more = {"target": target(gpu), **more}
    return twc.EngineManager(tmp_path / "store", builder=builder, memo=twc.DigestMemo(None), **more)


SAME = twc.BuildOptions(hardware_compatibility="same_compute_capability")
AMPERE = twc.BuildOptions(hardware_compatibility="ampere_plus")
LATER = twc.BuildOptions(version_compatible=True)


@pytest.mark.parametrize(
    ("options", "gpu", "hit"),
    [
        (None, A10, True), (None, A10G, False), (None, L4, False),
        (SAME, A10, True), (SAME, A10G, True), (SAME, L4, False),
        (AMPERE, A10, True), (AMPERE, A10G, True), (AMPERE, L4, True),
    ],
)  # fmt: skip
def test_identity_levels(tmp_path: Path, model: Path, options: twc.BuildOptions | None, gpu: Gpu, hit: bool) -> None:
    """Exact GPU, compute capability, Ampere and newer: the level asked for decides who shares a plan."""
    with make(tmp_path) as built:
        built.get(model, profiles=PROFILE, options=options)
    with make(tmp_path, gpu) as asked:
        engine = asked.lookup(model, profiles=PROFILE, options=options)
        assert (engine is not None) is hit
        if engine is not None:
            assert engine.deserialize().num_layers == 2


def test_cards_of_one_capability_are_told_apart(tmp_path: Path, model: Path) -> None:
    """T4 and RTX 2080 are both 7.5, and yet two plans; the explanation names the difference."""
    with make(tmp_path, T4) as built:
        built.get(model, profiles=PROFILE)
    with make(tmp_path, RTX2080) as asked:
        found = asked.explain(model, profiles=PROFILE)
        assert not found.hit
        assert {difference.part for difference in found.differences} == {"target.gpu", "target.sm_count"}
    with make(tmp_path, L4) as asked:
        text = str(asked.explain(model, profiles=PROFILE))
        assert "target.compute_capability: wanted 8.9, stored 7.5" in text
        with pytest.raises(twc.MissError, match=r"stored 7\.5"):
            asked.get(model, profiles=PROFILE, policy=twc.Policy(on_miss="raise"))


@pytest.mark.parametrize(
    ("options", "gpu", "ladder", "served"),
    [
        (SAME, A10G, (), False),
        (SAME, A10G, ("ampere_plus",), False),
        (SAME, A10G, ("same_compute_capability",), True),
        (SAME, L4, ("same_compute_capability",), False),
        (AMPERE, L4, ("same_compute_capability",), False),
        (AMPERE, L4, ("same_compute_capability", "ampere_plus"), True),
        (AMPERE, T4, ("same_compute_capability", "ampere_plus"), False),
    ],
)
def test_hardware_rungs(
    tmp_path: Path, model: Path, options: twc.BuildOptions, gpu: Gpu, ladder: Any, served: bool
) -> None:
    """A wider plan serves an exact request only where the policy names its rung, and says that it does."""
    with make(tmp_path) as built:
        stored = built.get(model, profiles=PROFILE, options=options)
        plan = bytes(stored.plan)
    events: list[Event] = []
    with make(tmp_path, gpu, hooks=[events.append], policy=twc.Policy(ladder=ladder)) as asked:
        engine = asked.get(model, profiles=PROFILE)
        assert engine.outcome is (twc.Outcome.COVERED if served else twc.Outcome.BUILT)
        if served:
            assert bytes(engine.plan) == plan
            assert engine.reason
            assert engine.key.digest == stored.key.digest
            covered = [event for event in events if event.kind is EventKind.COVERED]
            assert covered[0].detail["text"] == engine.reason
            assert engine.deserialize().num_layers == 2
            assert record_of(asked.builder._module).builders == 0  # type: ignore[attr-defined]


def test_rungs_never_narrow(tmp_path: Path, model: Path) -> None:
    """A plan that is to run on any Ampere GPU is not replaced by one that runs on one compute capability only."""
    with make(tmp_path) as built:
        built.get(model, profiles=PROFILE, options=SAME)
        built.get(model, profiles=PROFILE)
        assert built.lookup(model, profiles=PROFILE, options=AMPERE, policy=twc.Policy(ladder=LADDER)) is None
        built.get(model, profiles=PROFILE, options=AMPERE)
        same = built.lookup(model, profiles=PROFILE, options=SAME, target=target(L4), policy=twc.Policy(ladder=LADDER))
        assert same is not None
        assert "Ampere" in same.reason


def test_nearest_rung_first(tmp_path: Path, model: Path) -> None:
    """With plans on several rungs the nearest one serves, and an exact plan before all."""
    every = twc.Policy(ladder=["version_compatible", "ampere_plus", "same_compute_capability"])
    with make(tmp_path) as built:
        built.get(model, profiles=PROFILE, options=AMPERE)
        with make(tmp_path, A10G, policy=every) as asked:
            assert "Ampere" in asked.get(model, profiles=PROFILE).reason
        built.get(model, profiles=PROFILE, options=SAME)
        with make(tmp_path, A10G, policy=every) as asked:
            assert "compute capability 8.6" in asked.get(model, profiles=PROFILE).reason
        built.get(model, profiles=PROFILE)
        with make(tmp_path, policy=every) as asked:
            assert asked.get(model, profiles=PROFILE).outcome is twc.Outcome.HIT


def test_version_rung(tmp_path: Path, model: Path) -> None:
    """A version-compatible plan of an earlier release serves a later one of the same major version, if named."""
    with make(tmp_path, line="10.3") as old:
        old.get(model, profiles=PROFILE, options=LATER)
    rung = twc.Policy(ladder=["version_compatible"], on_miss="raise")
    with make(tmp_path, line="10.16", policy=rung) as new:
        engine = new.get(model, profiles=PROFILE)
        assert engine.outcome is twc.Outcome.COVERED
        assert engine.reason == "built by TensorRT 10.3.0 for later versions too"
        assert engine.deserialize().num_layers == 2
    with make(tmp_path, line="11.4", policy=rung) as other_major:
        with pytest.raises(twc.MissError):
            other_major.get(model, profiles=PROFILE)
        assert "quarantined" not in other_major.counters()
    with make(tmp_path, line="10.16", policy=twc.Policy(on_miss="raise")) as strict, pytest.raises(twc.MissError):
        strict.get(model, profiles=PROFILE)


def test_later_plans_do_not_serve_earlier_versions(tmp_path: Path, model: Path) -> None:
    """Version compatibility looks forward only."""
    with make(tmp_path, line="10.16") as new:
        new.get(model, profiles=PROFILE, options=LATER)
    rung = twc.Policy(ladder=["version_compatible"], on_miss="raise")
    with make(tmp_path, line="10.3", policy=rung) as old:
        with pytest.raises(twc.MissError):
            old.get(model, profiles=PROFILE)
        assert "quarantined" not in old.counters()


def test_host_code_only_by_request(tmp_path: Path, model: Path) -> None:
    """Host code inside a plan is let in for plans that were asked for as version compatible, and for no others."""
    with make(tmp_path) as manager:
        assert manager.get(model, profiles=PROFILE, options=LATER).deserialize().num_layers == 2
        plan = manager.get(model, profiles=PROFILE, options=LATER).plan
        with pytest.raises(twc.IncompatibleError, match="host code"):
            manager.builder.deserialize(plan)


LADDER: Any = ("same_compute_capability", "ampere_plus", "version_compatible")


@pytest.mark.parametrize(
    ("policy", "call"),
    [({"ladder": LADDER}, "read"), ({"ladder": LADDER}, "fetch"), ({"ladder": LADDER[2:]}, "list"), ({"cover": "wider"}, "list")],
    ids=str,
)  # fmt: skip
def test_store_that_fails_below_the_exact_entry(tmp_path: Path, model: Path, policy: dict[str, Any], call: str) -> None:
    """A store that fails at a plan that would do raises by default; by policy it is counted and the engine is built."""
    with make(tmp_path) as built:
        built.get(model, profiles=PROFILE, options=SAME)

    def before(called: str, name: str) -> None:
        if called == call and exact not in name:
            raise twc.StoreError("the network is gone", reason=twc.StoreReason.TIMEOUT)

    builder = TensorRTBuilder(make_tensorrt("10.16", gpu=A10G), lock_folder=tmp_path / "locks")
    store = FlakyStore(twc.LocalStore(tmp_path / "store"), before)
    with twc.EngineManager(store, builder=builder, target=target(A10G), memo=twc.DigestMemo(None)) as manager:
        exact = manager.key(model, profiles=PROFILE).digest
        with pytest.raises(twc.StoreError, match="network is gone"):
            manager.lookup(model, profiles=PROFILE, policy=twc.Policy(**policy))
        assert manager.counters()["store_error.timeout"] == 1
        degraded = twc.Policy(store_errors="degrade", **policy)
        assert manager.lookup(model, profiles=PROFILE, policy=degraded) is None
        assert manager.counters()["store_error.timeout"] == 2
        assert manager.get(model, profiles=PROFILE, policy=degraded).outcome is twc.Outcome.BUILT


@pytest.mark.parametrize("damage", ["manifest", "plan"])
def test_damaged_rung_is_set_aside(tmp_path: Path, model: Path, damage: str) -> None:
    """A damaged entry on a rung is set aside and the next rung serves; it never fails the request."""
    with make(tmp_path) as built:
        built.get(model, profiles=PROFILE, options=AMPERE)
        near = built.get(model, profiles=PROFILE, options=SAME)
        digest, blob = near.key.digest, near.manifest.blob("plan").hex
    root = tmp_path / "store" / "trtwc-1"
    path = next(root.rglob(f"{digest}.json" if damage == "manifest" else blob))
    path.chmod(0o600)
    path.write_bytes(b"{" + bytes(path.stat().st_size - 1))
    with make(tmp_path, A10G, policy=twc.Policy(ladder=LADDER, on_miss="raise")) as asked:
        assert "Ampere" in asked.get(model, profiles=PROFILE).reason
        assert asked.counters()["quarantined"] == 1
        assert "Ampere" in asked.get(model, profiles=PROFILE).reason
        assert asked.counters()["quarantined"] == 1


def test_untrusted_rung_is_passed_over(tmp_path: Path, model: Path) -> None:
    """Under trust="signed" an unsigned plan on a rung is told and never served."""
    from trt_warmcache.trust import Keyring, Signer

    with make(tmp_path) as built:
        built.get(model, profiles=PROFILE, options=SAME)
    signer = Signer.generate("release-1")
    policy = twc.Policy(ladder=LADDER, trust="signed", on_miss="raise")
    with make(tmp_path, A10G, policy=policy, keyring=Keyring([signer.public])) as asked:
        with pytest.raises(twc.MissError):
            asked.get(model, profiles=PROFILE)
        assert asked.counters()["warning.unsigned"] == 1


@pytest.mark.parametrize(
    ("stored", "loaded", "older", "fits"),
    [
        ((10, 16, 1), (10, 16, 1), False, True),
        ((10, 3, 0), (10, 16, 1), False, False),
        ((10, 3, 0), (10, 16, 1), True, True),
        ((10, 16, 1), (10, 3, 0), True, False),
        ((8, 6, 1), (10, 3, 0), True, False),
    ],
)
def test_headers_before_tensorrt(stored: tuple[int, ...], loaded: tuple[int, ...], older: bool, fits: bool) -> None:
    """A plan's own header is checked before TensorRT sees a byte of it."""
    plan = memoryview(b"ftrt" + bytes(20) + bytes(stored) + bytes(60))
    if fits:
        check_header(plan, flavour="tensorrt", version=loaded, older=older)
    else:
        with pytest.raises(twc.IncompatibleError, match="was built by tensorrt"):
            check_header(plan, flavour="tensorrt", version=loaded, older=older)


def test_one_manager_several_devices(tmp_path: Path, model: Path) -> None:
    """Requests for two GPUs, interleaved, each get their own plan: identity belongs to the request's target."""
    with make(tmp_path) as a, make(tmp_path, L4) as b:
        mine, theirs = a.get(model, profiles=PROFILE), b.get(model, profiles=PROFILE)
        for _ in range(3):
            assert a.get(model, profiles=PROFILE).key == mine.key
            assert a.get(model, profiles=PROFILE, target=target(L4)).key == theirs.key
            assert bytes(a.get(model, profiles=PROFILE, target=target(L4)).plan) == bytes(theirs.plan)
    assert mine.key != theirs.key


def test_mig_slices(tmp_path: Path, model: Path) -> None:
    """Seven equal slices share one plan, a bigger one has its own; the slice's UUID is no part of it."""
    slices = [target(A10, mig_profile="1g.6gb", sm_count=14, uuid=f"MIG-{n}") for n in range(7)]
    slices = [twc.Target(**{**t.to_json(), "uuid": f"MIG-{n}"}) for n, t in enumerate(slices)]
    bigger = twc.Target(**{**target(A10).to_json(), "mig_profile": "2g.12gb", "sm_count": 28})
    with make(tmp_path) as manager:
        outcomes = [manager.get(model, profiles=PROFILE, target=one).outcome for one in [*slices, bigger]]
    assert [outcome is twc.Outcome.BUILT for outcome in outcomes] == [True, *[False] * 6, True]


def test_driver_by_policy(tmp_path: Path, model: Path) -> None:
    """Another driver hits by default and misses where the policy says so; memory and clocks never matter."""
    with make(tmp_path, target=target(A10, driver="535.171")) as built:
        built.get(model, profiles=PROFILE)
        built.get(model, profiles=PROFILE, policy=twc.Policy(driver_in_key=True))
    moved = target(A10, driver="535.161", memory_bytes=1 << 34)
    with make(tmp_path, target=moved) as asked:
        assert asked.lookup(model, profiles=PROFILE) is not None
        assert asked.lookup(model, profiles=PROFILE, policy=twc.Policy(driver_in_key=True)) is None


def test_failed_load_names_the_driver_first(tmp_path: Path, model: Path) -> None:
    """When a machine refuses a plan, the message says in what it differs from the one that built it."""

    def refuse(plan: memoryview) -> Any:
        raise twc.IncompatibleError("cross-device use is refused.")

    builder = FakeBuilder(loader=refuse)
    fields: dict[str, Any] = {"builder": builder, "memo": twc.DigestMemo(None)}
    with twc.EngineManager(tmp_path / "s", target=target(A10, driver="535.171"), **fields) as built:
        built.get(model, profiles=PROFILE)
    moved = target(A10, driver="535.161", memory_bytes=1 << 34)
    with twc.EngineManager(tmp_path / "s", target=moved, **fields) as asked:
        with pytest.raises(twc.IncompatibleError, match=r"refused\. .*: driver 535\.171 there, 535\.161 here"):
            asked.get(model, profiles=PROFILE).deserialize()
        assert asked.counters().get("quarantined", 0) == 0
    assert builder.builds == 1


def test_ladder_is_checked() -> None:
    """Rungs are words of a list; their order does not matter, and a misspelt one is refused."""
    a = twc.Policy(ladder=["ampere_plus", "same_compute_capability"])
    assert a == twc.Policy(ladder=("same_compute_capability", "ampere_plus"))
    for wrong in ("ampere_plus", ["ampere"], 3):
        with pytest.raises(twc.ConfigError):
            twc.Policy(ladder=wrong)  # type: ignore[arg-type]
