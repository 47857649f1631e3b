"""Helpers for testing code that uses, or extends, this library. Nothing here is imported by the library itself."""

from __future__ import annotations

from trt_warmcache.testing._builder import FakeBuilder
from trt_warmcache.testing._stores import FlakyStore, StoreConformance

__all__ = ["FakeBuilder", "FlakyStore", "StoreConformance"]
