"""Reading a plan's header without TensorRT.

Layout found by looking at plans of TensorRT 10 and 11 and of TensorRT-RTX 1.7: both begin with a four-byte magic and
carry the library version as four bytes at offset 24. TensorRT-RTX also stores the plan's total size at 16 and a mask
of compute capabilities at 32.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from trt_warmcache.errors import IncompatibleError, IntegrityError

__all__ = ["PlanHeader", "check_header", "read_header"]

_HEADER_BYTES = 64
_CLASSIC = b"ftrt"
_RTX = b"vtrt"

_CAPABILITY_BITS = {0x01: "7.5", 0x02: "8.0", 0x04: "8.6", 0x08: "8.9", 0x10: "12.0", 0x20: "12.1"}


@dataclass(frozen=True)
class PlanHeader:
    """What a plan's first bytes say.

    Attributes:
        flavour: ``tensorrt`` or ``tensorrt_rtx``.
        version: Library version as (major, minor, patch). The build number is one byte in the plan and may wrap, so
            it is left out.
        size: Total size in bytes; None where the format does not tell.
        compute_capability_mask: Bit mask of compute capabilities; None where the format does not tell.
    """

    flavour: str
    version: tuple[int, int, int]
    size: int | None = None
    compute_capability_mask: int | None = None

    @property
    def compute_capabilities(self) -> tuple[str, ...]:
        """The known compute capabilities in the mask."""
        mask = self.compute_capability_mask or 0
        return tuple(name for bit, name in _CAPABILITY_BITS.items() if mask & bit)


def read_header(plan: memoryview) -> PlanHeader | None:
    """The header of a plan, or None for a magic this module does not know (TensorRT 8's layout was not verified)."""
    head = bytes(plan[:_HEADER_BYTES])
    if len(head) < 28 or head[:4] not in {_CLASSIC, _RTX}:
        return None
    version = (head[24], head[25], head[26])
    if head[:4] == _CLASSIC:
        return PlanHeader("tensorrt", version)
    if len(head) < 36:
        return None
    (size,) = struct.unpack_from("<Q", head, 16)
    (mask,) = struct.unpack_from("<I", head, 32)
    return PlanHeader("tensorrt_rtx", version, size, mask)


def check_header(plan: memoryview, *, flavour: str, version: tuple[int, ...], older: bool = False) -> None:
    """Refuse bytes that cannot be a plan of this flavour and version.

    Args:
        plan: All of it.
        flavour: ``"tensorrt"`` or ``"tensorrt_rtx"``.
        version: Version of the library that will load it.
        older: A plan of an earlier release of the same major version will do.

    Raises:
        IntegrityError: Too short, or another size than the header says.
        IncompatibleError: Another flavour or version.
    """
    if plan.nbytes < _HEADER_BYTES:
        raise IntegrityError(f"A plan of {plan.nbytes} bytes is too short to be one.", reason="header")
    header = read_header(plan)
    if header is None:
        if flavour == "tensorrt_rtx":
            raise IntegrityError(f"Not a TensorRT-RTX plan: it begins with {bytes(plan[:4])!r}.", reason="header")
        return  # no information, not damage
    if header.flavour != flavour:
        raise IncompatibleError(
            f"This plan was built by {header.flavour}, not by {flavour}; the two do not load each other's plans."
        )
    if header.size is not None and header.size != plan.nbytes:
        raise IntegrityError(f"The plan's header says {header.size} bytes, there are {plan.nbytes}.", reason="header")
    if older and header.version[0] == version[0] and header.version <= tuple(version[:3]):
        return
    if header.version != tuple(version[:3]):
        built, here = (".".join(map(str, parts)) for parts in (header.version, version[:3]))
        raise IncompatibleError(
            f"This plan was built by {flavour} {built}; the library loaded here is {here}. Rebuild it, or install that version."
        )
