"""What an engine is for: the GPU and libraries that will run it."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from trt_warmcache._fields import LARGEST_INT, printable, strict_fields
from trt_warmcache.errors import ConfigError

__all__ = ["Target", "canonical_arch", "canonical_os", "compute_capability"]

_OS = {
    "linux": "linux",
    "linux2": "linux",
    "windows": "windows",
    "win": "windows",
    "win32": "windows",
    "win64": "windows",
    "cygwin": "windows",
    "darwin": "macos",
    "macos": "macos",
}
_ARCH = {
    "x86_64": "x86_64",
    "amd64": "x86_64",
    "x64": "x86_64",
    "x86-64": "x86_64",
    "aarch64": "aarch64",
    "arm64": "aarch64",
    "armv8": "aarch64",
    "sbsa": "aarch64",
}


def canonical_os(name: str) -> str:
    """One spelling for an operating system: linux, windows or macos; unknown names in lower case."""
    return _OS.get(name.strip().lower(), name.strip().lower())


def canonical_arch(name: str) -> str:
    """One spelling for a CPU architecture: x86_64 or aarch64; unknown names in lower case."""
    return _ARCH.get(name.strip().lower(), name.strip().lower())


def compute_capability(value: Any) -> str:
    """A compute capability as ``"major.minor"``, from ``"8.9"``, ``(8, 9)``, ``89``, ``"SM89"`` or ``"sm_120"``.

    Raises:
        ConfigError: Anything else.
    """
    pair = isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(part, int) for part in value)
    text = ".".join(map(str, value)) if pair else str(value).strip().lower()
    match = re.fullmatch(r"([0-9]{1,2})\.([0-9])", text) or re.fullmatch(r"(?:sm_?)?([0-9]{1,2})([0-9])", text)
    if not match or isinstance(value, bool):
        raise ConfigError(f"Cannot read compute capability {value!r}; write it like '8.9'.")
    return f"{int(match[1])}.{match[2]}"


@strict_fields
@dataclass(frozen=True, kw_only=True)
class Target:
    """The machine an engine is built for; it need not be this one.

    Args:
        gpu: Product name of the GPU, as NVML gives it.
        compute_capability: ``"8.9"`` (also ``(8, 9)``, ``"SM89"``).
        sm_count: Number of streaming multiprocessors.
        memory_bytes: Device memory, in bytes. Recorded and explained, never part of the key: equal cards report
            slightly different values.
        mig_profile: MIG profile such as ``"1g.10gb"``; None for a whole GPU.
        uuid: Identity of the physical device. Never part of the key.
        os: Operating system; this machine's if not given. Spellings are normalized.
        arch: CPU architecture; this machine's if not given. Spellings are normalized.
        tensorrt: Version of the loaded TensorRT library, ``"10.13.3.9"``; the builder's own if not given.
        cuda: CUDA version, ``"13.0"``.
        driver: Driver version. Part of the key only with ``Policy(driver_in_key=True)``.
        compute_capabilities: For TensorRT-RTX: the set of compute capabilities the plan must serve; empty makes the
            portable plan.

    Raises:
        ConfigError: An unknown field or a value that cannot be read.
    """

    gpu: str | None = None
    compute_capability: Any = None
    sm_count: int | None = None
    memory_bytes: int | None = None
    mig_profile: str | None = None
    uuid: str | None = None
    os: str = ""
    arch: str = ""
    tensorrt: str | None = None
    cuda: str | None = None
    driver: str | None = None
    compute_capabilities: Any = ()

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("os", "arch", "gpu", "mig_profile", "uuid", "tensorrt", "cuda", "driver"):
            value = getattr(self, name)
            if value is None or (value == "" and name in {"os", "arch"}):
                continue
            if not isinstance(value, str) or not value.strip() or printable(value) != value:
                raise ConfigError(f"Target.{name} must be non-empty text, not {value!r}.")
            put(self, name, value.strip())
        put(self, "os", canonical_os(self.os or platform.system()))
        put(self, "arch", canonical_arch(self.arch or platform.machine()))
        if self.compute_capability is not None:
            put(self, "compute_capability", compute_capability(self.compute_capability))
        many = self.compute_capabilities
        if isinstance(many, (str, bytes, int, float)) or not isinstance(many, Iterable):
            many = (many,)
        normal = {compute_capability(one) for one in many}
        put(self, "compute_capabilities", tuple(sorted(normal, key=lambda cc: tuple(map(int, cc.split("."))))))
        for name in ("sm_count", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and 0 < value <= LARGEST_INT):
                raise ConfigError(f"Target.{name} must be a positive whole number, not {value!r}.")
        for name in ("tensorrt", "cuda", "driver"):
            value = getattr(self, name)
            if value is not None and not re.match("[0-9]", value):
                raise ConfigError(f"Target.{name} must be a version such as '10.13.3', not {value!r}.")

    @classmethod
    def detect(cls, device: int | str = 0) -> Target:
        """The GPU in this machine, asked from the driver and NVML; loads no TensorRT.

        Args:
            device: CUDA ordinal among the devices that ``CUDA_VISIBLE_DEVICES`` leaves visible, or a device UUID.

        Raises:
            ConfigError: No driver, no such device, or the ``nvml`` extra is missing.
        """
        from trt_warmcache._gpu import query_gpu

        return cls(**query_gpu(device, os.environ))

    def with_tensorrt(self, version: str) -> Target:
        """The same target for a given TensorRT version."""
        return replace(self, tensorrt=version)

    def to_json(self) -> dict[str, Any]:
        """All known facts as plain JSON values."""
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        facts["compute_capabilities"] = list(self.compute_capabilities)
        return {name: value for name, value in facts.items() if value not in (None, [])}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Target:
        """The inverse of :meth:`to_json`; facts recorded by a newer version are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})

    @property
    def gpu_type(self) -> str:
        """Short name for file names: the GPU's, or the compute capabilities of a TensorRT-RTX plan."""
        if self.compute_capabilities:
            return "+".join("sm" + cc.replace(".", "") for cc in self.compute_capabilities)
        if self.gpu:
            slice_ = f"-mig-{self.mig_profile}" if self.mig_profile else ""
            return self.gpu + slice_
        return "sm" + self.compute_capability.replace(".", "") if self.compute_capability else "portable"
