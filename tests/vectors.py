"""Golden vectors of keys: requests written as JSON, with the digests they must always have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trt_warmcache.keys import Key, Kind, calibration_key, engine_key, timing_key
from trt_warmcache.options import BuildOptions
from trt_warmcache.profiles import normalize_profiles
from trt_warmcache.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

_MAKE: dict[Kind, Callable[..., Key]] = {
    Kind.ENGINE: engine_key,
    Kind.TIMING: timing_key,
    Kind.CALIBRATION: calibration_key,
}


def from_vector(vector: dict[str, Any]) -> Key:
    """The key that a golden vector's request gives."""
    fields = dict(vector["request"])
    if "target" in fields:
        fields["target"] = Target(**fields["target"])
    if "options" in fields:
        fields["options"] = BuildOptions(**fields["options"])
    if "profiles" in fields:
        fields["profiles"] = normalize_profiles(fields["profiles"])
    return _MAKE[Kind(vector["kind"])](**fields)
