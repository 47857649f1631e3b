"""`IHostMemory`: a buffer without a length."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, cast

from tests.fakes._pybind import PybindObject

if TYPE_CHECKING:
    from tests.fakes._pybind import PybindEnum
    from tests.fakes._world import World


class IHostMemory(PybindObject):
    """The class that callers see; instances come from :func:`host_memory`."""

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    @property
    def dtype(self) -> PybindEnum:
        raise NotImplementedError


def _refuse(*_: object) -> Any:
    raise TypeError("'tensorrt.IHostMemory' object has no length, items or iterator")


def host_memory(world: World, content: bytes) -> Any:
    """An `IHostMemory` with the given bytes.

    A class written in Python can offer the buffer protocol only from 3.12 on. A ctypes array offers it everywhere and
    has no public methods, so each block is an instance of an array class made for its size, with length, items and
    iteration taken away and `isinstance(block, IHostMemory)` made true. `bytes(block)`, hashlib, file writes and
    `numpy.frombuffer` work as on the real thing. Not copied: the real buffer calls its format "f".
    """
    base = cast("Any", ctypes.c_ubyte * len(content))
    body = {
        "_poses_as": world.classes["IHostMemory"],
        "__len__": _refuse,
        "__getitem__": _refuse,
        "__setitem__": _refuse,
        "__iter__": None,
        "__reduce__": _refuse,
        "nbytes": property(lambda _: len(content)),
        "dtype": property(lambda _: world.member("DataType", "INT8")),
    }
    block: Any = type("IHostMemory", (base,), body)
    return block.from_buffer_copy(content)
