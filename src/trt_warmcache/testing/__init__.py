"""Helpers for testing code that uses, or extends, this library. Nothing here is imported by the library itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trt_warmcache.testing._builder import FakeBuilder
from trt_warmcache.testing._flaky import FlakyStore

if TYPE_CHECKING:
    from trt_warmcache.testing._stores import StoreConformance

__all__ = ["FakeBuilder", "FlakyStore", "StoreConformance"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "StoreConformance":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Its tests are pytest's; the other helpers, which worker processes import too, need no pytest.
        from trt_warmcache.testing._stores import StoreConformance

        return StoreConformance
