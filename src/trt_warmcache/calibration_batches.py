"""One batch of calibration data: read from a file, checked against the model, hashed."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from trt_warmcache._fields import nearest_name
from trt_warmcache.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Batch", "BatchHasher", "InputSpec", "check_batch", "framed", "load_arrays"]

Batch: TypeAlias = "dict[str, np.ndarray[Any, Any]]"
"""Input name to array, the whole batch."""


@dataclass(frozen=True)
class InputSpec:
    """One input of a model, as far as data can be checked against it.

    Attributes:
        name: The input.
        dtype: numpy's name of its type, such as ``"float32"``.
        dims: Size per dimension, anything but an int for one that may vary; None when the rank is unknown.
    """

    name: str
    dtype: str
    dims: tuple[int | str | None, ...] | None

    def __str__(self) -> str:
        shape = "any shape" if self.dims is None else "x".join(str(d) if isinstance(d, int) else "?" for d in self.dims)
        return f"{self.name} ({self.dtype}, {shape or 'scalar'})"


class BatchHasher:
    """Order-sensitive hash of names, types, shapes and bytes of a stream of batches."""

    def __init__(self) -> None:
        from blake3 import blake3

        self._hasher = blake3()

    def update(self, batch: Batch) -> None:
        """Take the next batch in."""
        import numpy as np

        self._hasher.update(struct.pack("<I", len(batch)))
        for name, array in sorted(batch.items()):
            little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            shape = "x".join(map(str, array.shape))
            for part in (name, little.dtype.name, shape):
                self._hasher.update(framed(part.encode()))
            self._hasher.update(little.reshape(-1).view(np.uint8).data)

    @property
    def fingerprint(self) -> str:
        """What stands for all batches so far."""
        return f"batches:{self._hasher.hexdigest()}"


def framed(part: bytes) -> bytes:
    """A part of something hashed, so that no two lists of parts give the same bytes."""
    return struct.pack("<I", len(part)) + part


def load_arrays(path: Path) -> Any:
    """The batch in a ``.npy`` or ``.npz`` file.

    Raises:
        ConfigError: It cannot be read.
    """
    import zlib
    from zipfile import BadZipFile

    import numpy as np

    try:
        with path.open("rb") as file:  # numpy does not close what it opened and could not read
            # Pickled arrays stay refused: calibration data often comes from elsewhere.
            content = np.load(file, allow_pickle=False)
            return content if isinstance(content, np.ndarray) else dict(content.items())
    except (ValueError, OSError, EOFError, BadZipFile, zlib.error) as error:
        raise ConfigError(f"Calibration file {path} cannot be read as numpy data: {error}.") from error


def check_batch(raw: Any, inputs: Sequence[InputSpec], number: int) -> Batch:
    """A batch as the model takes it.

    Args:
        raw: What the data gave: arrays or tensors by name or by position.
        inputs: The model's inputs.
        number: Which batch it is, counted from 1, for messages.

    Raises:
        ConfigError: It does not fit, or holds NaN or infinity.
    """
    batch = {name: _to_array(value, name, number) for name, value in _by_name(raw, inputs, number).items()}
    specs = {spec.name: spec for spec in inputs}
    for name in batch:
        if name not in specs:
            nearest = nearest_name(str(name), specs)
            hint = f"; did you mean {nearest!r}" if nearest else ""
            raise ConfigError(f"Calibration batch {number}: the model has no input {name!r}{hint}. {_inputs(inputs)}")
    for spec in inputs:
        if spec.name not in batch:
            raise ConfigError(f"Calibration batch {number} lacks input {spec.name!r}. {_inputs(inputs)}")
        _check_array(batch[spec.name], spec, number)
    return batch


def _by_name(raw: Any, inputs: Sequence[InputSpec], number: int) -> Mapping[str, Any]:
    if isinstance(raw, Mapping):
        return raw
    values = raw if isinstance(raw, (tuple, list)) else (raw,)
    if len(values) != len(inputs):
        raise ConfigError(
            f"Calibration batch {number} has {len(values)} parts for {len(inputs)} inputs, so which is which is "
            f"unclear (labels, perhaps). Yield dicts of input name to array. {_inputs(inputs)}"
        )
    return {spec.name: value for spec, value in zip(inputs, values, strict=True)}


def _to_array(value: Any, name: str, number: int) -> np.ndarray[Any, Any]:
    import numpy as np

    if hasattr(value, "detach"):  # a torch tensor, possibly on a GPU or inside a graph
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.kind not in "biufc":
        raise ConfigError(f"Calibration batch {number}: {name!r} holds {array.dtype}, not numbers.")
    return array


def _check_array(array: np.ndarray[Any, Any], spec: InputSpec, number: int) -> None:
    import numpy as np

    where = f"Calibration batch {number}, input {spec.name!r}"
    if array.dtype.name != spec.dtype:
        raise ConfigError(
            f"{where}: the model takes {spec.dtype}, the data is {array.dtype.name}. "
            f"Convert it, e.g. with .astype('{spec.dtype}')."
        )
    dims = spec.dims
    if dims is not None and (
        array.ndim != len(dims)
        or any(isinstance(d, int) and d != size for d, size in zip(dims, array.shape, strict=True))
    ):
        hint = " A batch needs its leading dimension: array[None]." if array.ndim == len(dims) - 1 else ""
        raise ConfigError(
            f"{where}: the model takes {spec}, the data has shape {'x'.join(map(str, array.shape))}.{hint}"
        )
    if not array.size:
        raise ConfigError(f"{where} is empty (shape {array.shape}).")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ConfigError(f"{where} holds NaN or infinity, which would spoil every range. Check the preprocessing.")


def _inputs(inputs: Sequence[InputSpec]) -> str:
    return f"Its inputs: {'; '.join(map(str, inputs))}."
