"""What a caller asks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from trt_warmcache._fields import printable, strict_fields, unknown_field, user_path
from trt_warmcache.calibration_data import Calibration
from trt_warmcache.errors import ConfigError
from trt_warmcache.options import BuildOptions
from trt_warmcache.policy import Policy, check_seconds
from trt_warmcache.profiles import normalize_profiles
from trt_warmcache.target import Target

__all__ = ["EngineRequest", "as_request"]


@strict_fields
@dataclass(frozen=True)
class EngineRequest:
    """One engine, described completely.

    Args:
        model: The ONNX model: a path or fsspec URL, its bytes, or an ``onnx.ModelProto``.
        profiles: Optimization profiles: a mapping of input names to ``(min, opt, max)``, a
            :class:`~trt_warmcache.ShapeProfile`, or a list of those. Needed where the model has dynamic inputs.
        options: What the build is told; None for TensorRT's defaults.
        calibration: INT8 calibration (:class:`~trt_warmcache.Calibration`), or None.
        plugins: Plugin libraries the model needs. Their bytes go into the key.
        recipe: Your own version of anything the library cannot see, such as a graph edit done before export. Part
            of the key.
        name: A name for people; never identity. The model's file stem if not given.
        version: A version for people; never identity.
        policy: Overrides the manager's policy for this request.
        timeout: Most seconds that the whole call may take, waiting and building included; None sets no limit.
        target: Overrides the manager's target for this request.
        configure: Called as ``configure(network, config)`` with TensorRT's own objects after everything else was set,
            for whatever the options do not offer. Its effect cannot be seen from outside, so a `recipe` must name it,
            and change with it.
        probe: Called as ``probe(engine)`` with the finished, not yet stored :class:`~trt_warmcache.Engine`; an engine
            for which it returns something false is refused. Its ``deserialize`` works there.

    Raises:
        ConfigError: An unknown field (naming the nearest), or a value that cannot be meant.
    """

    model: Any
    profiles: Any = None
    options: BuildOptions | None = None
    calibration: Calibration | None = None
    plugins: Any = ()
    recipe: str | None = None
    name: str | None = None
    version: str | None = None
    policy: Policy | None = None
    timeout: float | None = None
    target: Target | None = None
    configure: Callable[[Any, Any], Any] | None = None
    probe: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "profiles", normalize_profiles(self.profiles))
        plugins = self.plugins
        if isinstance(plugins, (str, os.PathLike)) or not isinstance(plugins, Iterable):
            plugins = (plugins,)
        try:
            put(self, "plugins", tuple(user_path(plugin) for plugin in plugins))
        except TypeError:
            raise ConfigError(f"plugins must be paths of libraries, not {self.plugins!r}.") from None
        for name, kind in (
            ("options", BuildOptions),
            ("calibration", Calibration),
            ("policy", Policy),
            ("target", Target),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{name} must be a {kind.__name__}, not {value!r}.")
        for name in ("recipe", "name", "version"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or printable(value) != value):
                raise ConfigError(f"{name} must be text that UTF-8 can hold, not {value!r}.")
        if self.probe is not None and not callable(self.probe):
            raise ConfigError(f"probe must be a function of an engine, not {self.probe!r}.")
        if self.configure is not None:
            if not callable(self.configure):
                raise ConfigError(f"configure must be a function of network and config, not {self.configure!r}.")
            if not self.recipe:
                raise ConfigError(
                    "configure needs a recipe: a version of your own for what the function does, since the key cannot see inside it."
                )
        check_seconds(self.timeout, "timeout", optional=True)


_FIELDS = tuple(field.name for field in fields(EngineRequest) if field.name != "model")


def as_request(model: Any, overrides: dict[str, Any]) -> EngineRequest:
    """A request from the arguments of `get`: a request itself, or a model and fields.

    Raises:
        ConfigError: An unknown field, or fields beside a complete request.
    """
    for name in overrides:
        if name not in _FIELDS:
            raise unknown_field("A request", name, _FIELDS)
    if isinstance(model, EngineRequest):
        if overrides:
            raise ConfigError(
                f"Pass either an EngineRequest or a model with fields, not both (got {', '.join(overrides)})."
            )
        return model
    return EngineRequest(model, **overrides)
