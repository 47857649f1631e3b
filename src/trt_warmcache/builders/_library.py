"""Which TensorRT is there, and which version it is, without importing its Python module.

A cache hit needs the version for its key but nothing else of TensorRT, and the module is slow to import. So the
shared library is found, and asked, directly. Asking the library rather than package metadata also gives the right
answer when another copy was loaded first.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from trt_warmcache.memo import DigestMemo

__all__ = ["LIBRARIES", "LibraryNames", "find_library", "loaded_library", "module_available", "version_of"]


class LibraryNames:
    """Where a flavour's library is looked for.

    Attributes:
        module: Python module of the bindings.
        soname: Beginning of the shared library's file name.
        packages: Packages whose folder holds the library.
    """

    def __init__(self, module: str, soname: str, packages: tuple[str, ...]) -> None:
        self.module = module
        self.soname = soname
        self.packages = packages


LIBRARIES = {
    "tensorrt": LibraryNames("tensorrt", "libnvinfer.so", ("tensorrt_libs",)),
    "tensorrt_rtx": LibraryNames("tensorrt_rtx", "libtensorrt_rtx.so", ("tensorrt_rtx_libs",)),
}


def module_available(module: str) -> bool:
    """Whether the bindings can be imported, judged without importing them.

    A folder with type stubs only makes ``import tensorrt`` succeed as an empty namespace package; such a module has
    no file of its own and does not count.
    """
    if module in sys.modules:
        return sys.modules[module] is not None and hasattr(sys.modules[module], "Builder")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def loaded_library(soname: str) -> Path | None:
    """The copy of a library that this process has loaded already, or None."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    # Searched as one text: a process maps hundreds of files, and this runs on every hit of a fresh manager.
    at = maps.find("/" + soname)
    if at < 0:
        return None
    start, end = maps.rfind("\n", 0, at) + 1, maps.find("\n", at)
    return Path("/" + maps[start:end].partition("/")[2])


def find_library(names: LibraryNames) -> Path | None:
    """The library that importing the bindings would load."""
    loaded = loaded_library(names.soname)
    if loaded is not None:
        return loaded
    return next(_candidates(names), None)


def _candidates(names: LibraryNames) -> Iterator[Path]:
    for package in names.packages:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            continue
        for folder in (spec.submodule_search_locations if spec else None) or ():
            yield from sorted(Path(folder).glob(names.soname + "*"))
    import ctypes.util  # it brings in subprocess, and is only needed where no package holds the library

    system = ctypes.util.find_library(names.soname.removeprefix("lib").partition(".so")[0])
    if system:
        yield Path(system)


def version_of(library: Path, memo: DigestMemo) -> str:
    """The version that a library reports: ``"1.7.1.116"``, or without the build number before TensorRT 10.

    Loading a library of a gigabyte takes a while, so the answer for an unchanged file is remembered.

    Raises:
        OSError: The library cannot be loaded.
    """
    try:
        status = library.stat()
    except FileNotFoundError:
        return _ask(library)  # a bare soname, left to the loader to find
    known = memo.get(library, status)
    if isinstance(known, dict) and isinstance(known.get("library_version"), str):
        return str(known["library_version"])
    started = memo.clock()
    version = _ask(library)
    memo.put(library, status, {"library_version": version}, started)
    return version


def _ask(library: Path) -> str:
    handle = ctypes.CDLL(str(library))
    parts = []
    for part in ("Major", "Minor", "Patch", "Build"):
        call = getattr(handle, f"getInferLib{part}Version", None)
        if call is None:
            break
        parts.append(int(call()))
    if len(parts) >= 3:
        return ".".join(map(str, parts))
    # One number only: major*1000 + minor*100 + patch up to 8.x, major*10000 + minor*100 + patch from 10.0.
    number = int(handle.getInferLibVersion())
    major = 1000 if number < 10000 else 10000
    return f"{number // major}.{number % major // 100}.{number % 100}"
