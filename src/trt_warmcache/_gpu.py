"""Asking the NVIDIA driver about the GPUs of this machine, without creating a CUDA context.

Two sources, each for what only it knows: the CUDA driver library maps the ordinals that the process sees (after
``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``) to device UUIDs and counts multiprocessors; NVML gives names,
driver versions and MIG profiles.
"""

from __future__ import annotations

import ctypes
import operator
import re
from collections.abc import Mapping
from typing import Any, Protocol

from trt_warmcache.errors import ConfigError

__all__ = ["CudaDriver", "gpu_present", "query_gpu"]

_INSTALL_NVML = "install the extra: pip install 'trt_warmcache[nvml]'"


class CudaDriver(Protocol):
    """The three facts that need the CUDA driver library."""

    def device_count(self) -> int:
        """How many devices this process sees."""

    def device_uuid(self, ordinal: int) -> str:
        """UUID of a visible device, without the ``GPU-`` or ``MIG-`` that NVML puts before it."""

    def sm_count(self, ordinal: int) -> int:
        """Streaming multiprocessors that the device offers to this process."""

    def version(self) -> str:
        """CUDA version that the driver supports, as ``"13.0"``."""


class LibCuda:
    """:class:`CudaDriver` over libcuda. None of its calls creates a context or allocates device memory.

    Raises:
        ConfigError: No driver on this machine, or it does not initialize.
    """

    _MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(
                "No NVIDIA driver here (libcuda.so.1 not found); spell the target out: Target(gpu=..., compute_capability=...)."
            ) from error
        self._call("cuInit", 0)

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._lib, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(code, ctypes.byref(text))
            why = (text.value or b"unknown error").decode(errors="replace")
            raise ConfigError(
                f"The NVIDIA driver refused {name}: {why} (CUDA error {code}). Spell the target out, or check the driver with nvidia-smi."
            )

    def device_count(self) -> int:
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def device_uuid(self, ordinal: int) -> str:
        raw = (ctypes.c_ubyte * 16)()
        # The _v2 call gives a MIG device's own UUID where the plain one gives its parent's.
        name = "cuDeviceGetUuid_v2" if hasattr(self._lib, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        self._call(name, raw, self._handle(ordinal))
        text = bytes(raw).hex()
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def sm_count(self, ordinal: int) -> int:
        count = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(count), self._MULTIPROCESSOR_COUNT, self._handle(ordinal))
        return count.value

    def version(self) -> str:
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def _handle(self, ordinal: int) -> ctypes.c_int:
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), ordinal)
        return handle


def gpu_present() -> bool:
    """Whether the driver shows this process at least one GPU."""
    try:
        return LibCuda().device_count() > 0
    except ConfigError:
        return False


def query_gpu(
    device: int | str, environ: Mapping[str, str], *, nvml: Any = None, cuda: CudaDriver | None = None
) -> dict[str, Any]:
    """The fields of a Target for one device.

    Args:
        device: CUDA ordinal among the visible devices, or a UUID (an unambiguous beginning of one will do).
        environ: Environment to mention in errors.
        nvml: The ``pynvml`` module or a stand-in for it.
        cuda: The CUDA driver or a stand-in for it.

    Raises:
        ConfigError: No driver, no such device, or NVML cannot be imported.
    """
    if cuda is None:
        cuda = LibCuda()
    if nvml is None:
        nvml = _import_nvml()
    ordinal, uuid = _find(device, cuda, environ)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ConfigError(
            f"NVML did not start: {error}. Check the driver with nvidia-smi, or spell the target out."
        ) from error
    try:
        handle, parent = _handle(nvml, uuid)
        name = _text(nvml.nvmlDeviceGetName(parent))
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(parent)
        return {
            "gpu": name,
            "compute_capability": f"{major}.{minor}",
            "sm_count": cuda.sm_count(ordinal),
            "memory_bytes": _memory(nvml, handle),
            "mig_profile": None if handle is parent else _mig_profile(_text(nvml.nvmlDeviceGetName(handle))),
            "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
            "cuda": cuda.version(),
            "driver": _text(nvml.nvmlSystemGetDriverVersion()),
        }
    except nvml.NVMLError as error:
        raise ConfigError(
            f"NVML could not describe device {device!r}: {error}. Spell the target out instead."
        ) from error
    finally:
        nvml.nvmlShutdown()


def _import_nvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise ConfigError(f"Detecting the GPU needs NVML's bindings; {_INSTALL_NVML}.") from error
    return pynvml


def _find(device: int | str, cuda: CudaDriver, environ: Mapping[str, str]) -> tuple[int, str]:
    count = cuda.device_count()
    visible = f" (CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']})" if "CUDA_VISIBLE_DEVICES" in environ else ""
    if not isinstance(device, str):
        try:
            ordinal = operator.index(device)
        except TypeError:
            raise ConfigError(f"A device is a CUDA ordinal or a UUID, not {device!r}.") from None
        if not 0 <= ordinal < count:
            raise ConfigError(f"No CUDA device {ordinal}: this process sees {count}{visible}.")
        return ordinal, cuda.device_uuid(ordinal)
    wanted = re.sub(r"^(gpu|mig)-", "", device.strip().lower())
    if not re.fullmatch(r"[0-9a-f-]{4,}", wanted):
        # A short text is more likely an ordinal in disguise than the beginning of a UUID.
        raise ConfigError(f"Device {device!r} is no UUID such as 'GPU-8932f937-...'; give an ordinal as a number.")
    found = [(number, uuid) for number in range(count) if (uuid := cuda.device_uuid(number)).lower().startswith(wanted)]
    if len(found) != 1:
        what = "matches several devices" if found else "is not among the visible devices"
        raise ConfigError(f"Device {device!r} {what}{visible}.")
    return found[0]


def _handle(nvml: Any, uuid: str) -> tuple[Any, Any]:
    """NVML's handle of the device, and that of the physical GPU it is (a slice of)."""
    for prefix in ("GPU-", "MIG-"):
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID((prefix + uuid).encode())
        except nvml.NVMLError:
            continue
        if prefix == "GPU-":
            return handle, handle
        return handle, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    raise ConfigError(f"NVML does not know the CUDA device with UUID {uuid}; driver and NVML library may differ.")


def _memory(nvml: Any, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        # GPUs that share the host's memory (GB10, Jetson) do not tell; it is only for people anyway.
        return None


def _mig_profile(name: str) -> str:
    # NVML names a slice after its GPU: "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    return name.rpartition("MIG ")[2].strip()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
