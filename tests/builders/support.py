"""Inputs for driving an adapter directly, without a manager."""

from __future__ import annotations

from typing import Any

from tests.support import PROFILE, tiny_model

import trt_warmcache as twc
from trt_warmcache.builders import BuildInputs
from trt_warmcache.model import ModelSource
from trt_warmcache.profiles import normalize_profiles, validate_profiles

A10 = twc.Target(gpu="NVIDIA A10", compute_capability="8.6", sm_count=72, uuid="GPU-a10", driver="580.1", cuda="13.0")


def build_inputs(
    model: Any = None,
    *,
    profiles: Any = PROFILE,
    target: twc.Target = A10,
    options: twc.BuildOptions | None = None,
    **more: Any,
) -> BuildInputs:
    """What a manager would hand to a builder for a model."""
    source = ModelSource.open(tiny_model() if model is None else model, memo=twc.DigestMemo(None))
    validated = validate_profiles(normalize_profiles(profiles), source.summary)
    return BuildInputs(
        model=source,
        network_name="trtwc-test",
        profiles=validated,
        options=options or twc.BuildOptions(),
        target=target,
        **more,
    )
