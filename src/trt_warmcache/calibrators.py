"""Calibrator objects for TensorRT 8.6 to 10.16, whose tables come from and go to the cache.

TensorRT calls a calibrator from inside a build, swallows what it raises, and takes "no more batches" for success. So
everything that happens is kept here and told afterwards, by :meth:`Calibrator.finish`, and a run that failed half-way
can never write a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from trt_warmcache._fields import to_enum
from trt_warmcache._words import Word
from trt_warmcache.calibration_data import CalibrationAlgorithm
from trt_warmcache.calibration_table import CalibrationTable, version_number
from trt_warmcache.errors import BuildError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np

__all__ = ["Calibrator", "CalibratorOutcome", "CudaBuffers", "DeviceBuffers", "TorchBuffers", "make_calibrator"]


class CalibratorOutcome(Word):
    """What a build did with its calibrator."""

    REUSED = "reused"
    """A stored table was handed to TensorRT, which asked for no data."""
    WRITTEN = "written"
    """TensorRT calibrated and wrote a table."""
    UNWRITTEN = "unwritten"
    """No table came out, or the stored one was handed over and TensorRT asked for data all the same. An engine built
    so must not be published as calibrated."""


class DeviceBuffers(Protocol):
    """Device memory for one batch at a time."""

    def upload(self, name: str, array: np.ndarray[Any, Any]) -> int:
        """Copy an input's batch to the device, reusing its buffer; the address is valid until the next upload of it."""

    def free(self) -> None:
        """Release everything; may be called twice."""


class Calibrator(Protocol):
    """What :func:`make_calibrator` returns: an object for ``config.int8_calibrator`` that also reports to us."""

    batches_fed: int
    """Batches that TensorRT took."""

    def finish(self) -> CalibratorOutcome:
        """Call after the build, whether it succeeded or not: raise what was kept, release the device memory.

        Raises:
            BaseException: Whatever the data, `read`, `write` or the device raised during the build, unchanged.
        """


def make_calibrator(
    trt: Any,
    algorithm: CalibrationAlgorithm | str,
    batches: Iterable[Mapping[str, np.ndarray[Any, Any]]] | None,
    read: Callable[[], CalibrationTable | None],
    write: Callable[[CalibrationTable], None],
    *,
    buffers: DeviceBuffers | None = None,
) -> Calibrator:
    """A calibrator for one build. Keep a reference to it until the build has returned.

    Args:
        trt: The imported ``tensorrt`` module.
        algorithm: Which ranges TensorRT computes.
        batches: Batches of input name to array, walked at most once and only if `read` gives no table; None when
            there is no data.
        read: Returns the stored table or None. Tables of other versions are welcome: TensorRT would ignore them for
            their header, so they are handed over under the running version's.
        write: Takes the finished table; called at most once, and never after a failure.
        buffers: Device memory; cuda-python or torch when None.

    Raises:
        ConfigError: This TensorRT has no calibrators (11 and later, RTX), or the algorithm is not one of its own.
    """
    algorithm = to_enum(CalibrationAlgorithm, algorithm, "algorithm")
    name = "IInt8MinMaxCalibrator" if algorithm is CalibrationAlgorithm.MINMAX else "IInt8EntropyCalibrator2"
    base = getattr(trt, name, None)
    version = str(getattr(trt, "__version__", ""))
    if base is None:
        raise ConfigError(
            f"This TensorRT ({getattr(trt, '__name__', 'tensorrt')} {version}) has no INT8 calibrators: 11.0 removed "
            "them and RTX never had any. Calibrate with runner='onnxruntime' (extra 'int8'): EngineManager makes Q/DQ "
            "nodes of its table there."
        )
    if algorithm is CalibrationAlgorithm.PERCENTILE and batches is not None:
        raise ConfigError(
            "TensorRT's calibrators know no percentile. Use algorithm 'entropy' or 'minmax', or calibrate with "
            "runner='onnxruntime', whose table TensorRT reads."
        )
    state = _State(version_number(version), algorithm, batches, buffers=buffers, read=read, write=write)
    return _subclass(base)(base, state)  # type: ignore[no-any-return]


class _State:
    """Everything a calibrator does, apart from the class that TensorRT insists on."""

    def __init__(
        self,
        version: int,
        algorithm: CalibrationAlgorithm,
        batches: Iterable[Mapping[str, np.ndarray[Any, Any]]] | None,
        *,
        buffers: DeviceBuffers | None,
        read: Callable[[], CalibrationTable | None],
        write: Callable[[CalibrationTable], None],
    ) -> None:
        self._version = version
        self._algorithm = algorithm
        self._source = batches
        self._iterator: Iterator[Mapping[str, np.ndarray[Any, Any]]] | None = None
        self._peeked: Mapping[str, np.ndarray[Any, Any]] | None = None
        self._exhausted = False
        self._read = read
        self._write = write
        self._buffers = buffers
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._asked = False
        self._table: bytes | None = None
        self._written = False
        self.error: BaseException | None = None
        self.fed = 0

    def guard(self, step: Callable[[], Any]) -> Any:
        """Run a step for TensorRT; keep what it raises, and do nothing more once something was raised."""
        if self.error is not None:
            return None
        try:
            return step()
        except BaseException as error:  # noqa: BLE001 - nothing may cross into TensorRT, which would swallow it
            self.error = error
            return None

    def table(self) -> bytes | None:
        """The stored table, asked for once. The bytes stay referenced: TensorRT keeps no copy while it reads them."""
        if not self._asked:
            self._asked = True
            stored = self._read()
            if stored is not None:
                self._table = stored.with_header(self._version, self._algorithm.header).to_bytes()
        return self._table

    def batch_size(self) -> int:
        """Leading dimension of the first batch. With a stored table the data stays untouched."""
        if self.table() is not None or (first := self._peek()) is None:
            return 1
        shape = next(iter(first.values())).shape
        return int(shape[0]) if shape else 1

    def next_addresses(self, names: Sequence[str]) -> list[int] | None:
        """Device addresses of the next batch in the order of `names`; None after the last."""
        batch = self._peek()
        if batch is None:
            return None
        missing = [name for name in names if name not in batch]
        if missing:
            raise ConfigError(
                f"Calibration batch {self.fed + 1} lacks input {missing[0]!r}; it has {', '.join(map(repr, batch))}."
            )
        shapes = {name: tuple(batch[name].shape) for name in names}
        self._shapes = self._shapes or shapes
        for name, shape in shapes.items():
            if shape != self._shapes[name]:  # TensorRT reads as much as the first batch had, whatever is there
                raise ConfigError(
                    f"TensorRT's calibrators take batches of one shape, and batch {self.fed + 1} has {name!r} as {shape} "
                    f"after {self._shapes[name]}. Leave out a smaller last batch (drop_last=True of a DataLoader), or use "
                    "runner='onnxruntime'."
                )
        if self._buffers is None:
            self._buffers = _default_buffers()
        addresses = [self._buffers.upload(name, batch[name]) for name in names]
        self._peeked = None
        self.fed += 1
        return addresses

    def store(self, cache: Any) -> None:
        """Take TensorRT's table; the buffer is only borrowed, so it is copied before anything else."""
        data = bytes(cache)
        table = CalibrationTable.parse(data, source="The table that TensorRT wrote")
        if self._table is None:  # a table that was read may be written back; stored ones are never replaced
            # drain, so that the data's own end-of-pass checks run before anything is stored
            while self._peek() is not None:
                self._peeked = None
            self._write(table)
            self._written = True

    def finish(self) -> CalibratorOutcome:
        try:
            if self._buffers is not None:
                self._buffers.free()
        finally:
            if self.error is not None:
                raise self.error
        if self._table is not None and not self.fed:
            return CalibratorOutcome.REUSED
        return CalibratorOutcome.WRITTEN if self._written else CalibratorOutcome.UNWRITTEN

    def _peek(self) -> Mapping[str, np.ndarray[Any, Any]] | None:
        if self._peeked is None and not self._exhausted and self._source is not None:
            if self._iterator is None:
                self._iterator = iter(self._source)
            self._peeked = next(self._iterator, None)
            self._exhausted = self._peeked is None
        return self._peeked


def _subclass(base: Any) -> Any:
    class WarmCacheCalibrator(base):  # type: ignore[misc]
        """Forwards TensorRT's questions; see the module's docstring."""

        def __init__(self, base: Any, state: _State) -> None:
            # Without this call the process crashes: the binding's C++ half is made here, and super() may skip it.
            base.__init__(self)
            self._state = state

        def get_batch_size(self) -> int:
            """See TensorRT's IInt8Calibrator."""
            return self._state.guard(self._state.batch_size) or 1

        def get_batch(self, names: Sequence[str], *_: Any) -> list[int] | None:
            """See TensorRT's IInt8Calibrator."""
            return self._state.guard(lambda: self._state.next_addresses(names))  # type: ignore[no-any-return]

        def read_calibration_cache(self) -> bytes | None:
            """See TensorRT's IInt8Calibrator."""
            return self._state.guard(self._state.table)  # type: ignore[no-any-return]

        def write_calibration_cache(self, cache: Any) -> None:
            """See TensorRT's IInt8Calibrator."""
            self._state.guard(lambda: self._state.store(cache))

        @property
        def batches_fed(self) -> int:
            """Batches that TensorRT took."""
            return self._state.fed

        def finish(self) -> CalibratorOutcome:
            """See :meth:`Calibrator.finish`."""
            return self._state.finish()

    return WarmCacheCalibrator


def _default_buffers() -> DeviceBuffers:
    import importlib.util

    # find_spec on a dotted name raises when the parent is missing
    if importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None:
        return CudaBuffers()
    if importlib.util.find_spec("torch") is not None:
        return TorchBuffers()
    raise ConfigError(
        "INT8 calibration copies batches to the GPU through cuda-python or torch: pip install cuda-python."
    )


class CudaBuffers:
    """Device memory through cuda-python's runtime API."""

    def __init__(self) -> None:
        from cuda.bindings import runtime

        self._runtime = runtime
        self._buffers: dict[str, tuple[int, int]] = {}

    def upload(self, name: str, array: np.ndarray[Any, Any]) -> int:
        """Copy an input's batch to the device and return its address."""
        import numpy as np

        host = np.ascontiguousarray(array)
        address, size = self._buffers.get(name, (0, 0))
        if size < host.nbytes:
            if address:
                self._call(self._runtime.cudaFree(address))
                del self._buffers[name]
            (address,) = self._call(self._runtime.cudaMalloc(host.nbytes))
            self._buffers[name] = (address, host.nbytes)
        # A copy from pageable memory returns only when the source may be reused, so `host` can go.
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call(self._runtime.cudaMemcpy(address, host.ctypes.data, host.nbytes, kind))
        return int(address)

    def free(self) -> None:
        """Release everything."""
        while self._buffers:
            _, (address, _) = self._buffers.popitem()
            self._call(self._runtime.cudaFree(address))

    def _call(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        status, *values = result
        if int(status):
            raise BuildError(f"CUDA refused memory for calibration: {status!s}. Use smaller batches or free the GPU.")
        return tuple(values)


class TorchBuffers:
    """Device memory through torch."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._tensors: dict[str, Any] = {}

    def upload(self, name: str, array: np.ndarray[Any, Any]) -> int:
        """Copy an input's batch to the device and return its address."""
        import numpy as np

        tensor = self._torch.from_numpy(np.ascontiguousarray(array)).cuda()
        self._torch.cuda.synchronize()
        self._tensors[name] = tensor  # replaces the batch before, which TensorRT has used by now
        return int(tensor.data_ptr())

    def free(self) -> None:
        """Release everything."""
        self._tensors.clear()
