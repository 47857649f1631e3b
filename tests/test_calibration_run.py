"""Ranges measured with ONNX Runtime: what a table holds, and how a run behaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.support import run_python
from tests.test_quantize import activations, calibration, nodes_in, small_batch, small_model

from trt_warmcache import calibration_run, quantize
from trt_warmcache.calibration_data import Calibration
from trt_warmcache.calibration_ranges import statistics_for
from trt_warmcache.errors import ConfigError, ModelError

pytest.importorskip("onnxruntime")


class TestCalibrate:
    def test_minmax_is_the_largest_magnitude_of_every_tensor(self) -> None:
        """Min-max scales equal the largest magnitude over all batches, divided by 127, inputs and outputs included."""
        model = small_model()
        table = calibration_run.calibrate(model, calibration(3))
        seen = [activations(model, small_batch(seed)) for seed in range(3)]
        assert set(table.scales) == {"x", "conv1", "mid", "conv2", "out"}
        for name, scale in table.scales.items():
            expected = max(float(np.abs(values[name]).max()) for values in seen) / 127
            assert scale == pytest.approx(expected, rel=1e-6), name

    def test_agrees_with_onnxruntimes_own_minmax_calibrator(self, tmp_path: Path) -> None:
        """ONNX Runtime's own calibrator, where it is exact, gives the same ranges."""
        from onnxruntime.quantization.calibrate import MinMaxCalibrater

        model = small_model()
        onnx.save(model, tmp_path / "model.onnx")
        theirs = MinMaxCalibrater(
            tmp_path / "model.onnx", augmented_model_path=str(tmp_path / "a.onnx"), symmetric=True
        )
        theirs.augment_graph()
        theirs.create_inference_session()
        batches = iter([small_batch(seed) for seed in range(3)])

        class Reader:
            def get_next(self) -> Any:
                return next(batches, None)

        theirs.collect_data(Reader())
        table = calibration_run.calibrate(model, calibration(3))
        for name, data in theirs.compute_data().items():
            assert table.scales[name] * 127 == pytest.approx(float(np.max(data.range_value[1])), rel=1e-5), name

    @pytest.mark.parametrize("algorithm", ["entropy", "minmax", "percentile"])
    def test_order_of_batches_does_not_matter(self, algorithm: str) -> None:
        """A first batch of tiny values must neither fix the range nor blow up the histogram; the table is the same."""
        model = small_model()
        batches = [small_batch(seed) for seed in range(4)]
        tiny = {"x": batches[0]["x"] * np.float32(1e-30)}
        first = calibration_run.calibrate(model, Calibration(data=[tiny, *batches], algorithm=algorithm))
        last = calibration_run.calibrate(model, Calibration(data=[*batches, tiny], algorithm=algorithm))
        assert first == last

    def test_percentile_clips_what_it_says(self) -> None:
        """The percentile threshold agrees with numpy's percentile of all magnitudes."""
        model = small_model()
        table = calibration_run.calibrate(model, calibration(4, "percentile", percentile=99.0))
        magnitudes = np.abs(np.concatenate([small_batch(seed)["x"].ravel() for seed in range(4)]))
        assert table.scales["x"] * 127 == pytest.approx(float(np.percentile(magnitudes, 99)), rel=0.01)

    def test_entropy_clips_a_lone_outlier(self) -> None:
        """One absurd value among many must not set the entropy range, as it sets the min-max one."""
        batch = small_batch(1, size=64)
        batch["x"][0, 0, 0, 0] = 100
        entropy = calibration_run.calibrate(small_model(), Calibration(data=[batch], algorithm="entropy")).scales["x"]
        minmax = calibration_run.calibrate(small_model(), Calibration(data=[batch], algorithm="minmax")).scales["x"]
        assert minmax * 127 == pytest.approx(100)
        assert 2 < entropy * 127 < 20

    @pytest.mark.parametrize("algorithm", ["entropy", "minmax", "percentile"])
    def test_dead_and_infinite_tensors(self, algorithm: str) -> None:
        """A tensor of zeros has scale 0; one that was ever infinite or NaN has none; both show up in the coverage."""
        graph = helper.make_graph(
            [
                helper.make_node("Mul", ["x", "zero"], ["dead"]),
                helper.make_node("Div", ["x", "zero"], ["infinite"]),
            ],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 16, 16])],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("dead", "infinite")],
            [numpy_helper.from_array(np.array(0, np.float32), "zero")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        batch = {"x": np.where(np.arange(768).reshape(1, 3, 16, 16) % 2, 1, 0).astype(np.float32)}
        table = calibration_run.calibrate(model, Calibration(data=[batch, batch], algorithm=algorithm))
        coverage = table.coverage(calibration_run.float_tensors(model))
        assert coverage.unusable == {"dead": 0.0}
        assert coverage.missing == ("infinite",)
        assert coverage.matched == ("x",)

    @pytest.mark.parametrize("algorithm", ["entropy", "minmax", "percentile"])
    def test_no_range_at_all(self, algorithm: str) -> None:
        """Zeros through a model without biases leave nothing to calibrate by: an error, not a table."""
        model = small_model()
        bias = next(tensor for tensor in model.graph.initializer if tensor.name == "b1")
        bias.CopyFrom(numpy_helper.from_array(np.zeros(32, np.float32), "b1"))
        source = Calibration(data=[{"x": np.zeros((1, 3, 16, 16), np.float32)}], algorithm=algorithm)
        with pytest.raises(ModelError, match="over 1 batches each was zero throughout"):
            calibration_run.calibrate(model, source)

    def test_side_files_and_path(self, tmp_path: Path) -> None:
        """Weights in a side file are found beside the path, and give the same table as the whole model."""
        model = small_model()
        expected = calibration_run.calibrate(model, calibration())
        onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
        assert calibration_run.calibrate(tmp_path / "m.onnx", calibration()) == expected
        assert nodes_in(quantize.insert_qdq(str(tmp_path / "m.onnx"), expected, min_channels=1))
        (tmp_path / "m.data").unlink()
        with pytest.raises(ModelError):
            calibration_run.calibrate(tmp_path / "m.onnx", calibration())

    def test_inputs(self) -> None:
        """Dimensions without a size, with a name or with -1 may vary; initializers among the inputs are none."""
        model = small_model()
        dims = model.graph.input[0].type.tensor_type.shape.dim
        dims[2].dim_value = -1
        dims[3].ClearField("dim_value")
        model.graph.input.append(helper.make_tensor_value_info("w1", TensorProto.FLOAT, [32, 3, 3, 3]))
        (spec,) = calibration_run.model_inputs(model)
        assert (spec.name, spec.dtype, spec.dims) == ("x", "float32", ("n", 3, None, None))

    def test_errors_are_ours(self, tmp_path: Path) -> None:
        """Missing and unreadable models, and data that does not fit, are typed errors."""
        with pytest.raises(ModelError, match="does not exist"):
            calibration_run.calibrate(tmp_path / "none.onnx", calibration())
        (tmp_path / "junk.onnx").write_bytes(b"no model at all")
        with pytest.raises(ModelError):
            calibration_run.calibrate(tmp_path / "junk.onnx", calibration())
        with pytest.raises(ConfigError, match="did you mean 'x'"):
            calibration_run.calibrate(small_model(), Calibration(data=[{"xx": small_batch(0)["x"]}]))

    def test_exception_in_the_data_passes_through(self) -> None:
        """What the caller's data raises reaches the caller; there is no table."""

        def data() -> Any:
            yield small_batch(0)
            raise KeyError("lost")

        with pytest.raises(KeyError, match="lost"):
            calibration_run.calibrate(small_model(), Calibration(data=data))

    def test_progress_and_batches(self) -> None:
        """Progress is told after each batch, and only as many batches as asked for are run."""
        told: list[tuple[int, int | None]] = []
        calibration_run.calibrate(small_model(), calibration(9, batches=3), progress=lambda *step: told.append(step))
        assert told == [(1, 3), (2, 3), (3, 3)]

    def test_changed_data_gives_no_table(self) -> None:
        """Data that is no longer what was fingerprinted is refused at the end of the run."""
        source = calibration(2)
        inputs = calibration_run.model_inputs(small_model())
        fingerprint = source.find_fingerprint(inputs)
        source.data[1]["x"][0, 0, 0, 0] += 1
        with pytest.raises(ConfigError, match="changed between two passes"):
            calibration_run.calibrate(small_model(), source, fingerprint=fingerprint)

    @pytest.mark.parametrize("algorithm", ["entropy", "minmax", "percentile"])
    def test_split_into_batches_does_not_matter(self, algorithm: str) -> None:
        """A range comes from the values alone: batches of nothing but zeros count like zeros among others."""
        values = np.abs(np.random.default_rng(0).normal(0, 1, 5000)).astype(np.float32)
        parts = [np.zeros(20_000, np.float32), values[:10], values[10:], np.zeros(20_000, np.float32)]
        make = statistics_for(Calibration(data=[], algorithm=algorithm, percentile=95))
        split, whole = make(), make()
        for part in parts:
            split.add(part)
        whole.add(np.concatenate(parts))
        assert split.threshold() == whole.threshold() > 0

    def test_entropy_ignores_what_relu_cut_off(self) -> None:
        """However many exact zeros there are, the entropy range is that of the other values."""
        values = np.abs(np.random.default_rng(0).standard_t(3, 20_000)).astype(np.float32)
        make = statistics_for(Calibration(data=[], algorithm="entropy"))
        plain, cut = make(), make()
        plain.add(values)
        cut.add(np.concatenate([values, np.zeros(10_000_000, np.float32)]))
        assert cut.threshold() == plain.threshold() < values.max()

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("algorithm", ["entropy", "minmax", "percentile"])
    @pytest.mark.parametrize("size", [1e-44, 1e-38, 3e38])
    def test_smallest_and_largest_values(self, algorithm: str, size: float) -> None:
        """Magnitudes at both ends of float32 have ranges, without overflow on the way."""
        statistic = statistics_for(Calibration(data=[], algorithm=algorithm))()
        statistic.add(np.array([0, size, -size], np.float32))
        assert statistic.threshold() == pytest.approx(size, rel=0.2)

    @pytest.mark.parametrize("algorithm", ["entropy", "minmax", "percentile"])
    def test_memory_stays_flat_over_a_thousand_batches(self, algorithm: str, tmp_path: Path) -> None:
        """A thousand batches, 64 MB of activations per tensor, cost hardly more memory than fifty.

        In a process of its own: here, the peak of some earlier test would hide any growth.
        """
        onnx.save(small_model(), tmp_path / "m.onnx")
        code = """
import resource, sys
import numpy as np
from trt_warmcache import Calibration, calibration_run

def batches():
    for seed in range(1000):
        yield {"x": np.random.default_rng(seed).normal(0, 1, (2, 3, 16, 16)).astype(np.float32)}

def progress(done, total):
    if done in {50, 1000}:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

calibration_run.calibrate(sys.argv[1], Calibration(data=batches, algorithm=sys.argv[2]), progress=progress)
"""
        early, late = map(int, run_python(code, tmp_path / "m.onnx", algorithm).split())
        assert late - early < 20 << 10  # KiB
