"""Targets: spelled out, normalized, and asked from the driver."""

from __future__ import annotations

import ctypes
import pickle
import platform
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from trt_warmcache import _gpu
from trt_warmcache._gpu import LibCuda, gpu_present, query_gpu
from trt_warmcache.errors import ConfigError, UnknownFieldError
from trt_warmcache.target import Target, canonical_arch, canonical_os, compute_capability

# ---- spelled out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("8.9", "8.9"),
        ((8, 9), "8.9"),
        ([12, 0], "12.0"),
        (89, "8.9"),
        (120, "12.0"),
        ("SM89", "8.9"),
        ("sm_120", "12.0"),
        (" 8.6 ", "8.6"),
        (8.6, "8.6"),
        ("10.3", "10.3"),
    ],
)
def test_compute_capability(spelling: Any, canonical: str) -> None:
    """Every usual spelling of a compute capability means one."""
    assert compute_capability(spelling) == canonical
    assert Target(compute_capability=spelling) == Target(compute_capability=canonical)


@pytest.mark.parametrize("nonsense", ["", "8", "x.y", "8.9.1", (8,), (8, "x"), None, True, "sm", "-8.9", 1.25, "8.9a"])
def test_not_a_compute_capability(nonsense: Any) -> None:
    """Anything else is a ConfigError that says how to write it."""
    with pytest.raises(ConfigError, match=r"'8\.9'"):
        compute_capability(nonsense)


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("Linux", "linux"),
        ("linux2", "linux"),
        ("Windows", "windows"),
        ("win32", "windows"),
        ("WIN64", "windows"),
        ("win", "windows"),
        ("Darwin", "macos"),
        (" QNX ", "qnx"),
    ],
)
def test_operating_systems(spelling: str, canonical: str) -> None:
    """Case 80: one spelling per operating system; unknown ones stay, in lower case."""
    assert canonical_os(spelling) == canonical
    assert Target(os=spelling).os == canonical


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("AMD64", "x86_64"),
        ("x86_64", "x86_64"),
        ("x64", "x86_64"),
        ("x86-64", "x86_64"),
        ("arm64", "aarch64"),
        ("aarch64", "aarch64"),
        ("SBSA", "aarch64"),
        ("riscv64", "riscv64"),
    ],
)
def test_architectures(spelling: str, canonical: str) -> None:
    """Case 80: one spelling per CPU architecture."""
    assert canonical_arch(spelling) == canonical
    assert Target(arch=spelling).arch == canonical


def test_defaults_are_this_machine() -> None:
    """Without more, a target is this operating system and architecture, and no GPU."""
    target = Target()
    assert (target.os, target.arch) == (canonical_os(platform.system()), canonical_arch(platform.machine()))
    assert target.gpu is None
    assert target.gpu_type == "portable"


def test_sets_of_capabilities() -> None:
    """A set in any spelling and order, each once, in order of number."""
    expected = ("8.9", "10.0", "12.0")
    for spelling in (["12.0", "8.9", "10.0"], {(12, 0), (8, 9), (10, 0)}, ("sm_120", "SM89", 100, "8.9")):
        assert Target(compute_capabilities=spelling).compute_capabilities == expected
    assert Target(compute_capabilities="8.9").compute_capabilities == ("8.9",)
    assert Target(compute_capabilities=89).compute_capabilities == ("8.9",)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"sm_count": 0}, "sm_count"),
        ({"sm_count": True}, "sm_count"),
        ({"sm_count": "58"}, "sm_count"),
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"memory_bytes": 2.5e10}, "memory_bytes"),
        ({"memory_bytes": 2**63}, "memory_bytes"),
        ({"gpu": ""}, "gpu"),
        ({"gpu": 4090}, "gpu"),
        ({"gpu": "L4\udc00"}, "gpu"),
        ({"tensorrt": "latest"}, "tensorrt"),
        ({"cuda": ""}, "cuda"),
        ({"driver": "r580"}, "driver"),
        ({"compute_capabilities": ["8.9", "x"]}, "compute capability"),
        ({"compute_capabilities": None}, "compute capability"),
    ],
)
def test_mistakes(fields: dict[str, Any], word: str) -> None:
    """A value that cannot be meant is a ConfigError that names the field."""
    with pytest.raises(ConfigError, match=word):
        Target(**fields)


@pytest.mark.parametrize("value", ["8.\u0669", (-1, 5), (8, 90), (8, True), b"89", -89, 1e9])
def test_numbers_that_only_look_right(value: Any) -> None:
    """Digits of other scripts, and numbers that no capability has, do not slip through."""
    with pytest.raises(ConfigError, match="compute capability"):
        Target(compute_capability=value)
    with pytest.raises(ConfigError, match="compute capability"):
        Target(compute_capabilities=[value])


@pytest.mark.parametrize("value", ["  ", 3, b"linux", ["linux"], "\udcff"])
@pytest.mark.parametrize("field", ["os", "arch", "gpu", "mig_profile", "uuid", "tensorrt", "cuda", "driver"])
def test_texts(field: str, value: Any) -> None:
    """Every textual fact is text with something in it, the platform's included."""
    with pytest.raises(ConfigError, match=rf"^Target\.{field} must be non-empty text"):
        Target(**{field: value})


def test_blanks_around_texts() -> None:
    """Blanks around a fact, as tools print them, do not make another GPU."""
    assert Target(gpu=" NVIDIA L4\n", driver="570.1 ", os=" linux") == Target(
        gpu="NVIDIA L4", driver="570.1", os="linux"
    )


def test_unknown_fields() -> None:
    """A misspelt field names the nearest."""
    with pytest.raises(UnknownFieldError, match="did you mean 'compute_capability'") as caught:
        Target(compute_capabilty="8.9")  # type: ignore[call-arg]
    assert (caught.value.field, caught.value.nearest) == ("compute_capabilty", "compute_capability")


def test_travels() -> None:
    """A target survives JSON and pickle, and later releases' facts are ignored."""
    target = Target(gpu="L4", compute_capability="8.9", sm_count=58, mig_profile="1g.6gb", driver="580.1", os="win32")
    assert Target.from_json(target.to_json()) == target
    assert Target.from_json({**target.to_json(), "later": 1}) == target
    assert pickle.loads(pickle.dumps(target)) == target
    assert hash(Target.from_json(target.to_json())) == hash(target)
    assert target.with_tensorrt("10.3.0").tensorrt == "10.3.0"


@pytest.mark.parametrize(
    ("fields", "short"),
    [
        ({"gpu": "NVIDIA L4", "compute_capability": "8.9"}, "NVIDIA L4"),
        ({"gpu": "NVIDIA A100", "mig_profile": "1g.10gb"}, "NVIDIA A100-mig-1g.10gb"),
        ({"compute_capability": "8.9"}, "sm89"),
        ({"compute_capabilities": ["12.0", "8.9"]}, "sm89+sm120"),
    ],
)
def test_gpu_type(fields: dict[str, Any], short: str) -> None:
    """The short name for file names."""
    assert Target(**fields).gpu_type == short


# ---- asked from the driver ------------------------------------------------------------------------------------------


class NVMLError(Exception):
    """As NVML's own."""


class FakeNvml:
    """NVML over a list of devices; slices have a parent."""

    NVMLError = NVMLError

    def __init__(self, devices: list[SimpleNamespace], *, fail: str = "") -> None:
        self.devices = devices
        self.fail = fail
        self.running = 0

    def nvmlInit(self) -> None:
        if self.fail == "init":
            raise NVMLError("Driver Not Loaded")
        self.running += 1

    def nvmlShutdown(self) -> None:
        self.running -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> SimpleNamespace:
        for device in self.devices:
            if device.uuid == uuid.decode():
                return device
        raise NVMLError("Not Found")

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: SimpleNamespace) -> Any:
        return handle.parent

    def nvmlDeviceGetName(self, handle: SimpleNamespace) -> Any:
        return handle.name

    def nvmlDeviceGetUUID(self, handle: SimpleNamespace) -> Any:
        return handle.uuid

    def nvmlDeviceGetCudaComputeCapability(self, handle: SimpleNamespace) -> Any:
        if self.fail == "query":
            raise NVMLError("Unknown Error")
        return handle.capability

    def nvmlDeviceGetMemoryInfo(self, handle: SimpleNamespace) -> Any:
        return SimpleNamespace(total=handle.memory)

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65.06"


class FakeCuda:
    """The CUDA driver as one process sees it: UUIDs by ordinal."""

    def __init__(self, uuids: list[str], multiprocessors: int = 58) -> None:
        self.uuids = uuids
        self.multiprocessors = multiprocessors

    def device_count(self) -> int:
        return len(self.uuids)

    def device_uuid(self, ordinal: int) -> str:
        return self.uuids[ordinal]

    def sm_count(self, ordinal: int) -> int:
        return self.multiprocessors + ordinal

    def version(self) -> str:
        return "13.0"


UUIDS = [f"{n}{n}{n}{n}aaaa-0000-0000-0000-00000000000{n}" for n in range(4)]


def card(number: int, capability: tuple[int, int], name: str = "NVIDIA Card") -> SimpleNamespace:
    """A whole GPU as NVML knows it."""
    return SimpleNamespace(
        uuid=f"GPU-{UUIDS[number]}", name=f"{name} {number}", capability=capability, memory=10**10 + number
    )


CARDS = [card(0, (8, 6)), card(1, (8, 9)), card(2, (9, 0)), card(3, (12, 0))]


def query(device: Any, uuids: list[str], nvml: FakeNvml | None = None, **environ: Any) -> dict[str, Any]:
    """Ask about a device of a process that sees the given UUIDs."""
    return query_gpu(device, environ, nvml=nvml or FakeNvml(CARDS), cuda=FakeCuda(uuids))


def test_facts() -> None:
    """All facts of a card, each from who knows it; they make a Target."""
    nvml = FakeNvml(CARDS)
    facts = query(1, UUIDS, nvml)
    assert facts == {
        "gpu": "NVIDIA Card 1",
        "compute_capability": "8.9",
        "sm_count": 59,
        "memory_bytes": 10**10 + 1,
        "mig_profile": None,
        "uuid": f"GPU-{UUIDS[1]}",
        "cuda": "13.0",
        "driver": "580.65.06",
    }
    assert Target(**facts).compute_capability == "8.9"
    assert nvml.running == 0


def test_visible_index_is_not_the_physical_one() -> None:
    """Cases 72, 73: the ordinal counts among visible devices, so each pinned worker finds its own card."""
    assert query(0, [UUIDS[1]])["compute_capability"] == "8.9"
    assert query(0, [UUIDS[3], UUIDS[0]])["compute_capability"] == "12.0"
    assert query(1, [UUIDS[3], UUIDS[0]])["compute_capability"] == "8.6"
    found = [query(0, [uuid], CUDA_VISIBLE_DEVICES=str(n))["uuid"] for n, uuid in enumerate(UUIDS)]
    assert found == [f"GPU-{uuid}" for uuid in UUIDS]


@pytest.mark.parametrize("spelling", [f"GPU-{UUIDS[2]}", UUIDS[2], f"gpu-{UUIDS[2].upper()}", "GPU-2222aaaa", " 2222 "])
def test_by_uuid(spelling: str) -> None:
    """A device can be named by its UUID, whole or by an unambiguous beginning."""
    assert query(spelling, UUIDS)["uuid"] == f"GPU-{UUIDS[2]}"


def test_numpy_ordinals() -> None:
    """An ordinal may be any whole number."""
    np = pytest.importorskip("numpy")
    assert query(np.int64(1), UUIDS)["compute_capability"] == "8.9"


@pytest.mark.parametrize(
    ("device", "uuids", "environ", "words"),
    [
        (4, UUIDS, {}, ["No CUDA device 4", "sees 4"]),
        (-1, UUIDS, {}, ["No CUDA device -1"]),
        (1, UUIDS[:1], {"CUDA_VISIBLE_DEVICES": "2"}, ["No CUDA device 1", "sees 1", "CUDA_VISIBLE_DEVICES=2"]),
        (0, [], {"CUDA_VISIBLE_DEVICES": ""}, ["sees 0", "CUDA_VISIBLE_DEVICES="]),
        ("GPU-9999", UUIDS, {}, ["GPU-9999", "not among the visible"]),
        (f"GPU-{UUIDS[1]}", UUIDS[:1], {}, ["not among the visible"]),
        ("GPU-aaaa", [f"aaaa{n}-x" for n in range(2)], {}, ["several devices"]),
        ("1", UUIDS, {}, ["'1'", "ordinal as a number"]),
        ("", UUIDS, {}, ["ordinal as a number"]),
        ("GPU-", UUIDS, {}, ["ordinal as a number"]),
        ("cuda:0", UUIDS, {}, ["cuda:0", "ordinal as a number"]),
        (None, UUIDS, {}, ["None"]),
        (1.0, UUIDS, {}, ["1.0"]),
    ],
)
def test_no_such_device(device: Any, uuids: list[str], environ: dict[str, Any], words: list[str]) -> None:
    """A device that the process does not see is a ConfigError that says what it sees; never device 0 instead."""
    with pytest.raises(ConfigError) as caught:
        query(device, uuids, **environ)
    for word in words:
        assert word in str(caught.value)


def test_mig() -> None:
    """Case 76: a slice has its own UUID, memory, multiprocessors and profile, and its card's name and capability."""
    parent = card(0, (8, 0), "NVIDIA A100")
    slice_ = SimpleNamespace(
        uuid=f"MIG-{UUIDS[1]}", name=b"NVIDIA A100 0 MIG 1g.10gb", memory=10**10, parent=parent, capability=None
    )
    facts = query(0, [UUIDS[1]], FakeNvml([parent, slice_]))
    assert (facts["gpu"], facts["mig_profile"], facts["compute_capability"]) == ("NVIDIA A100 0", "1g.10gb", "8.0")
    assert (facts["uuid"], facts["memory_bytes"]) == (f"MIG-{UUIDS[1]}", 10**10)
    assert query(f"MIG-{UUIDS[1]}", [UUIDS[1]], FakeNvml([parent, slice_])) == facts


def test_nvml_troubles() -> None:
    """NVML that does not start, does not know the device or fails is a ConfigError; it is shut down again."""
    with pytest.raises(ConfigError, match="NVML did not start: Driver Not Loaded"):
        query(0, UUIDS, FakeNvml(CARDS, fail="init"))
    for nvml, words in (
        (FakeNvml([]), "does not know the CUDA device"),
        (FakeNvml(CARDS, fail="query"), "Unknown Error"),
    ):
        with pytest.raises(ConfigError, match=words):
            query(0, UUIDS, nvml)
        assert nvml.running == 0


def test_memory_that_nvml_does_not_tell() -> None:
    """GPUs that share the host's memory do not say how much they have; everything else is found all the same."""

    class Shared(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, handle: SimpleNamespace) -> Any:
            raise NVMLError("Not Supported")

    facts = query(1, UUIDS, Shared(CARDS))
    assert (facts["gpu"], facts["memory_bytes"]) == ("NVIDIA Card 1", None)
    assert Target(**facts).compute_capability == "8.9"


def test_nvml_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVML's bindings the error names the extra to install."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match=r"trt_warmcache\[nvml\]"):
        query_gpu(0, {}, cuda=FakeCuda(UUIDS))


class FakeLibrary:
    """libcuda with one device, answering through pointers as the real one does."""

    def __init__(self, *, fail: str = "") -> None:
        self.fail = fail

    def _answer(self, name: str, pointer: Any, value: int) -> int:
        if self.fail == name:
            return 999
        pointer._obj.value = value
        return 0

    def cuInit(self, flags: int) -> int:
        return 100 if self.fail == "cuInit" else flags

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"no CUDA-capable device is detected" if code == 100 else None
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        return self._answer("cuDeviceGetCount", count, 1)

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:
        return self._answer("cuDeviceGet", handle, ordinal + 7)

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:
        return self._answer("cuDeviceGetAttribute", value, attribute * 100 + handle.value)

    def cuDriverGetVersion(self, number: Any) -> int:
        return self._answer("cuDriverGetVersion", number, 12090)

    def cuDeviceGetUuid(self, raw: Any, handle: Any) -> int:
        raw[:] = [handle.value] * 16
        return 0


def test_libcuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver library's answers become plain values."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeLibrary())
    cuda = LibCuda()
    assert cuda.device_count() == 1
    assert cuda.device_uuid(0) == "07070707-0707-0707-0707-070707070707"
    assert cuda.sm_count(0) == 1607
    assert cuda.version() == "12.9"
    assert gpu_present()


@pytest.mark.parametrize("call", ["cuDeviceGetCount", "cuDeviceGet", "cuDriverGetVersion"])
def test_libcuda_failures(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver call that fails is a ConfigError with its code."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeLibrary(fail=call))
    cuda = LibCuda()
    with pytest.raises(ConfigError, match=rf"{call}: unknown error \(CUDA error 999\)"):
        cuda.device_count(), cuda.device_uuid(0), cuda.version()


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver, or without a device, there is no GPU, and detection says what to do."""

    def missing(_: str) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not gpu_present()
    with pytest.raises(ConfigError, match="spell the target out"):
        Target.detect()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeLibrary(fail="cuInit"))
    assert not gpu_present()
    with pytest.raises(ConfigError, match="no CUDA-capable device is detected"):
        Target.detect()
    assert _gpu.gpu_present() is False
