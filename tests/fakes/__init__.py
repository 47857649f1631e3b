"""Fakes of things that do not run here; see `tensorrt_fake`."""

from tests.fakes._build import read_plan
from tests.fakes._pybind import LINES, Line
from tests.fakes._world import Gpu, NativeCrash, Record
from tests.fakes.tensorrt_fake import installed, make_tensorrt, record_of

__all__ = ["LINES", "Gpu", "Line", "NativeCrash", "Record", "installed", "make_tensorrt", "read_plan", "record_of"]
