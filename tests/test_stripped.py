"""Engines without weights: shared by models of one graph, and never handed out half filled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.builders.support import A10
from tests.fakes import LINES, Line, make_tensorrt, record_of
from tests.fakes._build import read_plan
from tests.support import PROFILE, tiny_model

import trt_warmcache as twc
from trt_warmcache.builders import LoadNeeds, TensorRTBuilder
from trt_warmcache.events import EventKind
from trt_warmcache.model import ModelSource
from trt_warmcache.onnx_structure import structure

STRIPPED = twc.BuildOptions(strip_plan=True, refit="all")


def make(tmp_path: Path, line: Line = "10.16", **more: Any) -> twc.EngineManager:
    builder = TensorRTBuilder(make_tensorrt(line), lock_folder=tmp_path / "locks")
    return twc.EngineManager(tmp_path / "store", builder=builder, target=A10, memo=twc.DigestMemo(None), **more)


def world(manager: twc.EngineManager) -> Any:
    return manager.builder._module._fake  # type: ignore[attr-defined]


@pytest.mark.parametrize("line", LINES[1:])
def test_one_engine_for_many_fine_tunes(tmp_path: Path, line: Line) -> None:
    """Models that differ in weights only share one stripped engine, and each loads with its own weights."""
    with make(tmp_path, line) as manager:
        full = {weight: manager.get(tiny_model(weight=weight), profiles=PROFILE) for weight in (1.0, 2.0, 3.0)}
        first = manager.get(tiny_model(weight=1.0), profiles=PROFILE, options=STRIPPED)
        assert first.outcome is twc.Outcome.BUILT
        assert first.stripped
        for weight in (2.0, 3.0):
            tuned = manager.get(tiny_model(weight=weight), profiles=PROFILE, options=STRIPPED)
            assert tuned.outcome is twc.Outcome.HIT
            assert tuned.key == first.key
            assert tuned.deserialize()._plan["weights"] == read_plan(full[weight].plan)["weights"]
        assert record_of(manager.builder._module).builds == 4  # type: ignore[attr-defined]


def test_never_served_as_a_full_plan(tmp_path: Path) -> None:
    """A request without strip_plan is another key, also with covers and fallbacks allowed."""
    with make(tmp_path) as manager:
        stripped = manager.get(tiny_model(), profiles=PROFILE, options=STRIPPED)
        wide = twc.Policy(cover="wider", ladder=["same_compute_capability", "ampere_plus", "version_compatible"])
        assert manager.lookup(tiny_model(), profiles=PROFILE, policy=wide) is None
        assert len(bytes(manager.get(tiny_model(), profiles=PROFILE).plan)) > len(bytes(stripped.plan))


@pytest.mark.parametrize(
    "options",
    [
        twc.BuildOptions(strip_plan=True),
        twc.BuildOptions(strip_plan=True, refit="identical"),
        twc.BuildOptions(strip_plan=True, refit="individual", refittable_weights=["w"]),
        twc.BuildOptions(refit="all"),
    ],
    ids=str,
)
def test_where_weights_still_count(tmp_path: Path, options: twc.BuildOptions) -> None:
    """Plans that keep weights, or fit only their own, are keyed by the whole model."""
    with make(tmp_path) as manager:
        a, b = (manager.key(tiny_model(weight=weight), profiles=PROFILE, options=options) for weight in (1.0, 2.0))
        assert a != b
        if options.strip_plan and options.refit is not twc.options.RefitMode.INDIVIDUAL:
            assert manager.get(
                tiny_model(), profiles=PROFILE, options=twc.BuildOptions(strip_plan=True, refit="identical")
            ).deserialize()


def test_forgotten_weights_are_noticed(tmp_path: Path) -> None:
    """TensorRT's list of missing weights is empty although one was skipped; asking each by name finds it."""
    with make(tmp_path) as manager:
        engine = manager.get(tiny_model(), profiles=PROFILE, options=STRIPPED)
        world(manager).forgotten_weights.add("mul")
        with pytest.raises(twc.IncompatibleError, match="left 1 weights of the engine unset: 'mul'"):
            engine.deserialize()
        assert manager.counters().get(EventKind.QUARANTINED.value, 0) == 0
        world(manager).forgotten_weights.clear()
        assert engine.deserialize().create_execution_context() is not None


def test_lost_refit_is_noticed(tmp_path: Path) -> None:
    """An engine that is as small after the refit as before has no weights, whatever TensorRT returned."""
    with make(tmp_path, policy=twc.Policy(on_miss="raise")) as manager:
        engine = manager.get(tiny_model(), profiles=PROFILE, options=STRIPPED, policy=twc.Policy())
        world(manager).refit_is_lost = True
        with pytest.raises(twc.IntegrityError, match="the weights are not in it"):
            engine.deserialize()


@pytest.mark.parametrize(
    ("options", "weights", "text"),
    [
        ({"refit": "identical"}, tiny_model(weight=2.0), "Refitting the engine failed: REFIT_IDENTICAL was given"),
        (
            {"refit": "all"},
            tiny_model(name="t").replace(b"mul", b"mux"),
            "does not take this model's weights: The model's",
        ),
        ({}, tiny_model(weight=2.0), "takes no weights: The engine was not built with a refit flag"),
    ],
    ids=["other weights", "other graph", "not refittable"],
)
def test_weights_that_do_not_fit(tmp_path: Path, options: dict[str, Any], weights: bytes, text: str) -> None:
    """An engine that cannot take a model's weights says why, with TensorRT's or the parser's first error."""
    with make(tmp_path) as manager:
        engine = manager.get(
            tiny_model(), profiles=PROFILE, options=twc.BuildOptions(strip_plan=bool(options) or None, **options)
        )
        source = ModelSource.open(weights, memo=twc.DigestMemo(None))
        with pytest.raises(twc.IncompatibleError, match=text):
            manager.builder.deserialize(engine.plan, LoadNeeds(weights=source))


def test_old_versions_say_so(tmp_path: Path) -> None:
    """8.6 cannot strip."""
    with (
        make(tmp_path, "8.6") as manager,
        pytest.raises(twc.ConfigError, match=r"'strip_plan' does not exist in TensorRT 8\.6"),
    ):
        manager.get(tiny_model(), profiles=PROFILE, options=STRIPPED)


# ---- the graph without weights ------------------------------------------------------------------------------------


def digest(model: Any) -> str:
    return structure(model if isinstance(model, bytes) else model.SerializeToString()).digest


def graph_model(nodes: Any, initializers: dict[str, Any], *, outputs: str = "y") -> bytes:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info(outputs, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def test_weights_do_not_count_and_all_else_does() -> None:
    """Other weights, same structure; other shape, name, operator or attribute, another one."""
    base = tiny_model(weight=1.0)
    assert digest(base) == digest(tiny_model(weight=2.0))
    assert structure(base).weights == ("w",)
    assert digest(base) != digest(tiny_model(weight=1.0, width=5))
    for change in ("op", "name", "input"):
        model = onnx.load_model_from_string(base)
        if change == "op":
            model.graph.node[1].op_type = "Sigmoid"
        elif change == "name":
            model.graph.node[0].name = "other"
        else:
            model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4
            model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
        assert digest(model) != digest(base)


@pytest.mark.parametrize(
    "what", ["resize scales", "reshape target", "clip limit", "also read by Shape", "an output", "in a sub-graph"]
)
def test_values_that_shape_the_graph_count(what: str) -> None:
    """Floats and integers that decide what TensorRT builds stay in the digest, since no refit reaches them."""

    def model(value: float) -> bytes:
        weights = np.full((4, 3, 1, 1), value, np.float32)
        conv = helper.make_node("Conv", ["x", "w"], ["h"], kernel_shape=[1, 1])
        if what == "resize scales":
            scales = np.array([1, 1, value, value], np.float32)
            return graph_model([helper.make_node("Resize", ["x", "", "s"], ["y"])], {"s": scales})
        if what == "reshape target":
            return graph_model(
                [helper.make_node("Reshape", ["x", "s"], ["y"])], {"s": np.array([int(value), -1], np.int64)}
            )
        if what == "clip limit":
            return graph_model([helper.make_node("Clip", ["x", "m"], ["y"])], {"m": np.array(value, np.float32)})
        if what == "also read by Shape":
            nodes = [conv, helper.make_node("Shape", ["w"], ["q"]), helper.make_node("Relu", ["h"], ["y"])]
            return graph_model(nodes, {"w": weights})
        if what == "an output":
            return graph_model([conv], {"w": weights}, outputs="w")
        branch = helper.make_graph(
            [helper.make_node("Identity", ["w"], ["b"])],
            "b",
            [],
            [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)],
        )
        nodes = [conv, helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)]
        return graph_model(nodes, {"w": weights, "c": np.array(True)})

    assert digest(model(2.0)) != digest(model(4.0))


def test_side_files(tmp_path: Path) -> None:
    """Weights in side files do not count; a side file that holds anything else does, as a whole."""
    digests = set()
    for number in (1.0, 2.0):
        folder = tmp_path / str(number)
        folder.mkdir()
        model = onnx.load_model_from_string(tiny_model(weight=number))
        onnx.save_model(model, str(folder / "m.onnx"), save_as_external_data=True, location="w.bin", size_threshold=0)
        source = ModelSource.open(folder / "m.onnx", memo=twc.DigestMemo(None))
        digests.add(source.graph_digest)
        assert source.graph_digest.startswith("graph:")
    assert len(digests) == 1
    for number in (1, 2):
        folder = tmp_path / f"shape{number}"
        folder.mkdir()
        data = graph_model([helper.make_node("Reshape", ["x", "s"], ["y"])], {"s": np.array([number, -1], np.int64)})
        onnx.save_model(
            onnx.load_model_from_string(data),
            str(folder / "m.onnx"),
            save_as_external_data=True,
            location="w.bin",
            size_threshold=0,
        )
        digests.add(ModelSource.open(folder / "m.onnx", memo=twc.DigestMemo(None)).graph_digest)
    assert len(digests) == 3


# ---- plugins -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", LINES)
def test_required_plugins_are_checked_before_loading(tmp_path: Path, line: Line) -> None:
    """An entry knows the plugins it needs; where they are missing the error names them, and nothing is rebuilt."""
    library = tmp_path / "libmine.so"
    library.write_text("example Shout 1\n")
    with make(tmp_path, line) as manager:
        built = manager.get(tiny_model(), profiles=PROFILE, plugins=[library])
        assert built.manifest.extra["plugins"] == ["example::Shout:1"]
        assert list(built.manifest.provenance.plugins) == ["libmine.so"]
    with make(tmp_path, line) as manager:
        hit = manager.get(tiny_model(), profiles=PROFILE, plugins=[library])
        assert hit.outcome is twc.Outcome.HIT
        assert hit.deserialize().num_layers == 2  # loads the library by itself
        assert world(manager).registry.loads == 1
    with make(tmp_path, line) as manager:
        hit = manager.get(tiny_model(), profiles=PROFILE, plugins=[library])
        library.write_text("example Other 1\n")
        with pytest.raises(twc.IncompatibleError, match="not registered here: example::Shout:1"):
            hit.deserialize()
        assert manager.counters().get(EventKind.QUARANTINED.value, 0) == 0
        assert record_of(manager.builder._module).builds == 0  # type: ignore[attr-defined]


def test_library_bytes_are_in_the_key(tmp_path: Path) -> None:
    """Two libraries of one name are two keys."""
    library = tmp_path / "libmine.so"
    keys = set()
    for version in (1, 2):
        library.write_text(f"example Shout {version}\n")
        with make(tmp_path) as manager:
            keys.add(manager.key(tiny_model(), profiles=PROFILE, plugins=[library]).digest)
    assert len(keys) == 2
