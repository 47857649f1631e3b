"""Calibrators of classic TensorRT, driven by a stand-in that behaves as TensorRT does: asks, swallows, writes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from trt_warmcache.calibration_batches import InputSpec
from trt_warmcache.calibration_data import Calibration
from trt_warmcache.calibration_table import CalibrationTable
from trt_warmcache.calibrators import CalibratorOutcome, CudaBuffers, TorchBuffers, make_calibrator
from trt_warmcache.errors import BuildError, ConfigError, IntegrityError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

WRITTEN = b"TRT-101401-EntropyCalibration2\nx: 3d000000\ny: 3c000000\n"


class CalibratorBase:
    """The binding's class: unusable unless its own __init__ ran, as the real one crashes then."""

    def __init__(self) -> None:
        self.initialized = True


def trt_module(version: str = "10.14.1.48") -> Any:
    return SimpleNamespace(
        __name__="tensorrt",
        __version__=version,
        IInt8EntropyCalibrator2=type("IInt8EntropyCalibrator2", (CalibratorBase,), {}),
        IInt8MinMaxCalibrator=type("IInt8MinMaxCalibrator", (CalibratorBase,), {}),
    )


def tensorrt_builds(calibrator: Any, names: tuple[str, ...] = ("x",), *, writes: bool = True) -> bytes | None:
    """What TensorRT does with a calibrator during a build; the table it went by, None where it was left without."""
    assert calibrator.initialized

    def ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except BaseException:  # noqa: BLE001 - the bindings print and forget
            return None

    ask(calibrator.get_batch_size)
    cache = ask(calibrator.read_calibration_cache)
    if cache is not None:
        return bytes(cache)
    while ask(lambda: calibrator.get_batch(list(names))) is not None:
        pass
    if writes:
        borrowed = bytearray(WRITTEN)
        ask(lambda: calibrator.write_calibration_cache(memoryview(borrowed)))
        borrowed[:] = bytes(len(borrowed))  # TensorRT frees its buffer
    return None


class FakeBuffers:
    """Device memory that remembers what was uploaded."""

    def __init__(self, fail: Exception | None = None) -> None:
        self.uploads: list[tuple[str, float]] = []
        self.fail = fail
        self.freed = 0

    def upload(self, name: str, array: Any) -> int:
        if self.fail is not None:
            raise self.fail
        self.uploads.append((name, float(array.flat[0])))
        return 1000 + len(self.uploads)

    def free(self) -> None:
        self.freed += 1


class Shelf:
    """A store of one table, counting."""

    def __init__(self, table: CalibrationTable | None = None) -> None:
        self.table = table
        self.writes = 0
        self.reads = 0

    def read(self) -> CalibrationTable | None:
        self.reads += 1
        return self.table

    def write(self, table: CalibrationTable) -> None:
        self.writes += 1
        self.table = table


def data(count: int = 3) -> list[dict[str, Any]]:
    return [{"x": np.full((4, 2), i, np.float32), "y": np.full((4, 1), -i, np.float32)} for i in range(1, count + 1)]


class Untouchable:
    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        pytest.fail("the data was touched")


def make(
    batches: Iterable[Mapping[str, Any]] | None, shelf: Shelf, *, algorithm: str = "entropy", **fields: Any
) -> tuple[Any, FakeBuffers]:
    buffers = fields.pop("buffers", None) or FakeBuffers()
    trt = fields.pop("trt", None) or trt_module()
    return make_calibrator(trt, algorithm, batches, shelf.read, shelf.write, buffers=buffers), buffers


class TestCalibrating:
    def test_feeds_every_batch_and_keeps_the_table(self) -> None:
        """Batches go to the device in the order of the names asked for; the table is stored once; memory is freed."""
        shelf = Shelf()
        calibrator, buffers = make(data(), shelf)
        tensorrt_builds(calibrator, ("y", "x"))
        assert calibrator.finish() is CalibratorOutcome.WRITTEN
        assert buffers.uploads == [("y", -1), ("x", 1), ("y", -2), ("x", 2), ("y", -3), ("x", 3)]
        assert shelf.table == CalibrationTable.parse(WRITTEN)  # although the buffer was zeroed afterwards
        assert shelf.writes == 1
        assert calibrator.batches_fed == 3
        assert buffers.freed == 1

    def test_batch_size_is_the_leading_dimension(self) -> None:
        """Asking for the size, however often, takes no batch away."""
        calibrator, _ = make(data(), Shelf())
        assert [calibrator.get_batch_size(), calibrator.get_batch_size()] == [4, 4]
        tensorrt_builds(calibrator)
        assert calibrator.batches_fed == 3

    @pytest.mark.parametrize(
        ("algorithm", "base"), [("entropy", "IInt8EntropyCalibrator2"), ("minmax", "IInt8MinMaxCalibrator")]
    )
    def test_subclasses_the_modules_own_class(self, algorithm: str, base: str) -> None:
        """TensorRT accepts only instances of its own classes, initialized by their own __init__."""
        trt = trt_module()
        calibrator, _ = make(data(), Shelf(), algorithm=algorithm, trt=trt)
        assert isinstance(calibrator, getattr(trt, base))
        assert calibrator.initialized

    def test_no_write_is_detected(self) -> None:
        """A build that calibrates but writes no table is told apart from one that does."""
        shelf = Shelf()
        calibrator, _ = make(data(), shelf)
        tensorrt_builds(calibrator, writes=False)
        assert calibrator.finish() is CalibratorOutcome.UNWRITTEN
        assert shelf.table is None


class TestReuse:
    def test_stored_table_of_another_version_is_reheaded(self) -> None:
        """TensorRT ignores tables of other versions, so it gets the scales under its own header; no data is touched."""
        shelf = Shelf(CalibrationTable(0, "MinMaxCalibration", {"x": 0.03125}))
        calibrator, buffers = make(Untouchable(), shelf)
        assert tensorrt_builds(calibrator) == b"TRT-101401-EntropyCalibration2\nx: 3d000000\n"
        assert calibrator.finish() is CalibratorOutcome.REUSED
        assert (shelf.writes, shelf.reads, calibrator.batches_fed, buffers.uploads) == (0, 1, 0, [])

    def test_header_of_8(self) -> None:
        """TensorRT 8.6 has a version integer of its own kind."""
        shelf = Shelf(CalibrationTable(101401, "EntropyCalibration2", {"x": 1}))
        calibrator, _ = make(None, shelf, algorithm="minmax", trt=trt_module("8.6.1"))
        assert tensorrt_builds(calibrator) == b"TRT-8601-MinMaxCalibration\nx: 3f800000\n"

    def test_a_stored_table_is_never_replaced(self) -> None:
        """If TensorRT rejects the stored table and calibrates anew, the outcome says so and the table stays."""
        stored = CalibrationTable(0, "EntropyCalibration2", {"x": 1})
        shelf = Shelf(stored)
        calibrator, _ = make(data(), shelf)
        calibrator.read_calibration_cache()
        while calibrator.get_batch(["x"]) is not None:
            pass
        calibrator.write_calibration_cache(WRITTEN)
        assert calibrator.finish() is CalibratorOutcome.UNWRITTEN
        assert shelf.table is stored

    def test_percentile_needs_a_table(self) -> None:
        """TensorRT cannot compute percentiles, but it can use a table that was made with one."""
        with pytest.raises(ConfigError, match="no percentile"):
            make(data(), Shelf(), algorithm="percentile")
        shelf = Shelf(CalibrationTable(0, "EntropyCalibration2", {"x": 1}))
        calibrator, _ = make(None, shelf, algorithm="percentile")
        assert tensorrt_builds(calibrator)
        assert calibrator.finish() is CalibratorOutcome.REUSED


class TestFailures:
    def test_exception_in_the_data_is_raised_afterwards_and_nothing_is_stored(self) -> None:
        """TensorRT takes a failing loader for the end of the data and writes a table; it must not be kept."""

        def broken() -> Iterator[Mapping[str, Any]]:
            yield data(1)[0]
            raise OSError("disk gone")

        shelf = Shelf()
        calibrator, buffers = make(broken(), shelf)
        tensorrt_builds(calibrator)
        with pytest.raises(OSError, match="disk gone"):
            calibrator.finish()
        assert shelf.writes == 0
        assert buffers.freed == 1

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError()])
    def test_interrupts_are_kept_too(self, error: BaseException) -> None:
        """Ctrl-C during calibration interrupts the caller once TensorRT has returned."""

        def interrupted() -> Iterator[Mapping[str, Any]]:
            yield data(1)[0]
            raise error

        shelf = Shelf()
        calibrator, _ = make(interrupted(), shelf)
        tensorrt_builds(calibrator)
        with pytest.raises(type(error)) as caught:
            calibrator.finish()
        assert caught.value is error
        assert shelf.writes == 0

    def test_missing_input(self) -> None:
        """An input that TensorRT asks for and the data lacks is named."""
        calibrator, _ = make(data(), Shelf())
        tensorrt_builds(calibrator, ("x", "mask"))
        with pytest.raises(ConfigError, match="batch 1 lacks input 'mask'"):
            calibrator.finish()

    @pytest.mark.parametrize("rows", [1, 8])
    def test_batches_of_another_shape(self, rows: int) -> None:
        """TensorRT would read past a smaller batch, and leave out the rest of a larger one, without a word."""
        shelf = Shelf()
        odd = {"x": np.ones((rows, 2), np.float32), "y": np.ones((rows, 1), np.float32)}
        calibrator, buffers = make([*data(2), odd], shelf)
        tensorrt_builds(calibrator)
        with pytest.raises(ConfigError, match=r"one shape, and batch 3 has 'x' as \(\d, 2\) after \(4, 2\)"):
            calibrator.finish()
        assert len(buffers.uploads) == 2
        assert shelf.writes == 0

    def test_device_failure(self) -> None:
        """No device memory is an error of the build."""
        calibrator, _ = make(data(), Shelf(), buffers=FakeBuffers(BuildError("out of memory")))
        tensorrt_builds(calibrator)
        with pytest.raises(BuildError, match="out of memory"):
            calibrator.finish()

    def test_damaged_table_from_tensorrt(self) -> None:
        """What TensorRT writes is parsed before it is stored."""
        shelf = Shelf()
        calibrator, _ = make(data(), shelf)
        calibrator.write_calibration_cache(b"garbage")
        with pytest.raises(IntegrityError):
            calibrator.finish()
        assert shelf.writes == 0

    def test_failing_store(self) -> None:
        """What `read` and `write` raise is kept like everything else."""

        def fail(*_: Any) -> Any:
            raise ConnectionError("store")

        for read, write in ((fail, Shelf().write), (Shelf().read, fail)):
            calibrator: Any = make_calibrator(trt_module(), "entropy", data(), read, write, buffers=FakeBuffers())
            tensorrt_builds(calibrator)
            with pytest.raises(ConnectionError):
                calibrator.finish()

    def test_data_that_changed_gives_no_table(self) -> None:
        """The data's own check runs at its end, before the table is stored, even when TensorRT stops early."""
        source = Calibration(data=[{"x": np.ones((1, 2), np.float32)} for _ in range(3)])
        inputs = [InputSpec("x", "float32", None)]
        shelf = Shelf()
        calibrator, _ = make(source.feed(inputs, expected="batches:other"), shelf)
        calibrator.get_batch(["x"])
        calibrator.write_calibration_cache(WRITTEN)
        with pytest.raises(ConfigError, match="changed between two passes"):
            calibrator.finish()
        assert shelf.writes == 0


class TestModules:
    def test_eleven_and_rtx_have_none(self) -> None:
        """Where the classes are gone the error names Q/DQ; this includes the real TensorRT-RTX module."""
        gone = SimpleNamespace(__name__="tensorrt", __version__="11.4.0")
        with pytest.raises(ConfigError, match=r"tensorrt 11\.4\.0.*Q/DQ"):
            make(data(), Shelf(), trt=gone)
        rtx = pytest.importorskip("tensorrt_rtx")
        with pytest.raises(ConfigError, match=r"tensorrt_rtx.*Q/DQ"):
            make(data(), Shelf(), trt=rtx)

    def test_no_way_to_the_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without cuda-python and torch the first batch fails with the command that helps."""
        monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
        shelf = Shelf()
        calibrator: Any = make_calibrator(trt_module(), "entropy", data(), shelf.read, shelf.write)
        tensorrt_builds(calibrator)
        with pytest.raises(ConfigError, match="pip install cuda-python"):
            calibrator.finish()


class FakeRuntime:
    """cuda.bindings.runtime in small: status first, then results; device memory is a dict."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1)  # noqa: N815

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.copied: list[tuple[int, int]] = []
        self.status = 0

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        address = 4096 * (1 + len(self.live) + len(self.copied))
        self.live[address] = size
        return (self.status, address)

    def cudaFree(self, address: int) -> tuple[Any, ...]:
        del self.live[address]
        return (0,)

    def cudaMemcpy(self, target: int, _source: int, size: int, kind: int) -> tuple[Any, ...]:
        assert kind == 1
        assert self.live[target] >= size
        self.copied.append((target, size))
        return (0,)


class TestBuffers:
    def test_cuda_python(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A buffer is reused while it is large enough, replaced when not, and freed at the end, twice if asked."""
        runtime = FakeRuntime()
        monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(runtime=runtime))
        buffers = CudaBuffers()
        first = buffers.upload("x", np.zeros((4, 4), np.float32)[:, ::2])
        assert runtime.copied == [(first, 32)]
        assert buffers.upload("x", np.zeros(4, np.float32)) == first
        second = buffers.upload("x", np.zeros(100, np.float32))
        assert list(runtime.live.items()) == [(second, 400)]
        buffers.free()
        buffers.free()
        assert not runtime.live

    def test_cuda_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A status other than success is a build error, not an address."""
        runtime = FakeRuntime()
        runtime.status = 2
        monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(runtime=runtime))
        with pytest.raises(BuildError, match="2"):
            CudaBuffers().upload("x", np.zeros(1))

    def test_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The tensor stays referenced while TensorRT may read it, and goes with free()."""
        live: list[str] = []

        class Tensor:
            def __init__(self, array: Any) -> None:
                assert array.flags.c_contiguous
                live.append("tensor")

            def cuda(self) -> Tensor:
                return self

            def data_ptr(self) -> int:
                return 77

            def __del__(self) -> None:
                live.pop()

        torch = SimpleNamespace(from_numpy=Tensor, cuda=SimpleNamespace(synchronize=lambda: None))
        monkeypatch.setitem(sys.modules, "torch", torch)
        buffers = TorchBuffers()
        assert buffers.upload("x", np.zeros((4, 4))[:, ::2]) == 77
        assert live
        buffers.free()
        assert not live
