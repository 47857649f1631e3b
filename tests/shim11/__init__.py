"""The real Python bindings of TensorRT 11.4 over the TensorRT-RTX library, for tests only.

The bindings are on the package index, the library they need is not. Three small stand-in libraries forward to
TensorRT-RTX, so that the classic 11.x Python API parses and builds for real, without a GPU. What this shows: our calls
are calls that the real bindings accept. What it does not show: anything about classic plans, timings or numbers.

The libraries must be found by the dynamic linker, so everything runs in a subprocess. Both versions are pinned,
because the virtual tables of exactly these two releases were compared.
"""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from pathlib import Path

import pytest
from tests.shim11.build import build

BINDINGS = ("tensorrt-cu13-bindings", "11.4.0.106")
LIBRARY = ("tensorrt-rtx-cu13-libs", "1.7.1.116")


def missing() -> str | None:
    """Why the shim cannot be used here, or None."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return "the jump thunks are x86-64 assembly for Linux"
    if shutil.which("g++") is None:
        return "no g++ to compile the stand-in libraries"
    for name, version in (BINDINGS, LIBRARY):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"{name}=={version} is not installed (install it with --no-deps)"
        if found != version:
            return f"{name} is {found}, and the shim was made for {version}"
    return None


def shim_environment(tmp: Path) -> dict[str, str]:
    """Builds the stand-ins and gives the environment for a subprocess that imports `tensorrt_bindings`.

    Args:
        tmp: A folder to compile into; libraries that are already there are used again.

    Returns:
        A copy of this process's environment with the loader path and the paths of the RTX libraries.
    """
    reason = missing()
    if reason:
        pytest.skip(reason)
    folder = tmp / "shim11"
    if not (folder / "libnvinfer_plugin.so.11").exists():  # the last one that build() makes
        build(folder)
    libraries = Path(str(metadata.distribution(LIBRARY[0]).locate_file("tensorrt_rtx_libs")))
    paths = [str(folder), str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
        "SHIM11_RTX_LIBRARY": str(libraries / "libtensorrt_rtx.so.1"),
        "SHIM11_RTX_PARSER": str(libraries / "libtensorrt_onnxparser_rtx.so.1"),
    }
