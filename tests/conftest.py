"""Fixtures that several test modules share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from hypothesis import HealthCheck, settings

import trt_warmcache
from trt_warmcache.memo import DigestMemo

if TYPE_CHECKING:
    from collections.abc import Mapping

pytest_plugins = ["tests.servers.fixtures"]

# A shared two-core machine may stall for seconds; a deadline per example would only measure that.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("tests")


class RunPython(Protocol):
    """Runs Python source in a fresh interpreter and returns what it printed."""

    def __call__(self, code: str, *args: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Raises AssertionError with the interpreter's stderr where it fails."""


@pytest.fixture
def run_python() -> RunPython:
    """A fresh interpreter that finds the package under test (and these tests), with warnings as errors."""

    def run(code: str, *args: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        path = os.pathsep.join([str(Path(trt_warmcache.__file__).parent.parent), str(Path(__file__).parent)])
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, args)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
        )
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def memo() -> DigestMemo:
    """A memo that lives in this process only."""
    return DigestMemo(None)
