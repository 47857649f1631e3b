"""Optimization profiles: which input shapes an engine must accept, and which it is tuned for."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from trt_warmcache._fields import LARGEST_INT, nearest_name, strict_fields
from trt_warmcache.errors import ConfigError

if TYPE_CHECKING:
    from trt_warmcache.onnx_graph import ModelSummary, TensorInfo

__all__ = [
    "ShapeProfile",
    "ShapeRange",
    "cover_size",
    "covers_all",
    "normalize_profiles",
    "parse_profile",
    "profile_gaps",
    "validate_profiles",
]

Dims: TypeAlias = tuple[int, ...]
"""Sizes per dimension, or the values of a shape tensor."""


@dataclass(frozen=True)
class ShapeRange:
    """What one input may be: smallest, tuned-for and largest.

    Attributes:
        min: Smallest dimensions (or, for a shape tensor, smallest values).
        opt: The ones TensorRT tunes for.
        max: Largest.
    """

    min: Dims
    opt: Dims
    max: Dims

    def covers(self, other: ShapeRange) -> bool:
        """Whether every shape inside `other` lies inside this range."""
        return (
            len(self.min) == len(other.min)
            and all(mine <= theirs for mine, theirs in zip(self.min, other.min, strict=True))
            and all(mine >= theirs for mine, theirs in zip(self.max, other.max, strict=True))
        )

    def __str__(self) -> str:
        return ":".join("x".join(map(str, dims)) or "scalar" for dims in (self.min, self.opt, self.max))


@strict_fields
@dataclass(frozen=True)
class ShapeProfile:
    """One optimization profile.

    Args:
        shapes: Per input: one shape for a fixed size, or ``(min, opt, max)``. A shape is a sequence of ints (numpy
            ints too) or text such as ``"1x3x224x224"``; ``"1x3:2x3:4x3"`` gives all three at once.
        values: The same for inputs that are shape tensors: their values rather than their dimensions.

    Raises:
        ConfigError: A shape that cannot be read, differing ranks, or not min <= opt <= max.

    Equal profiles are equal and hash alike however they were written.
    """

    shapes: Mapping[str, Any]
    values: Mapping[str, Any] = ()  # type: ignore[assignment]

    def __post_init__(self) -> None:
        shapes = {name: _range(name, spec) for name, spec in sorted(_items(self.shapes, "shapes"))}
        values = {name: _range(name, spec, smallest=None) for name, spec in sorted(_items(self.values, "values"))}
        twice = shapes.keys() & values.keys()
        if twice:
            raise ConfigError(f"Input {min(twice)!r} is given both as shape and as shape-tensor value; keep one.")
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "values", values)

    def __hash__(self) -> int:
        return hash((tuple(self.shapes.items()), tuple(self.values.items())))

    def covers(self, other: ShapeProfile) -> bool:
        """Whether an engine with this profile accepts every shape that `other` promises."""
        return (
            self.shapes.keys() == other.shapes.keys()
            and self.values == other.values
            and all(mine.covers(other.shapes[name]) for name, mine in self.shapes.items())
        )

    def to_json(self) -> dict[str, Any]:
        """The canonical form used in keys and manifests."""
        return {
            kind: {name: [list(r.min), list(r.opt), list(r.max)] for name, r in ranges.items()}
            for kind, ranges in (("shapes", self.shapes), ("values", self.values))
            if ranges
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShapeProfile:
        """The inverse of :meth:`to_json`."""
        return cls(data.get("shapes", {}), data.get("values", {}))

    def __str__(self) -> str:
        parts = [f"{name}={r}" for name, r in self.shapes.items()]
        parts += [f"{name}=values:{r}" for name, r in self.values.items()]
        return " ".join(parts)


def normalize_profiles(profiles: Any) -> tuple[ShapeProfile, ...]:
    """Any accepted spelling of a request's ``profiles`` as a tuple of profiles, in the order given.

    Accepts None, one mapping or :class:`ShapeProfile`, one text (``"x=1x3:2x3:4x3 y=8"``), or a sequence of those.

    Raises:
        ConfigError: Anything else, or an invalid profile.
    """
    if profiles is None:
        return ()
    if isinstance(profiles, (ShapeProfile, Mapping, str)):
        profiles = (profiles,)
    if not isinstance(profiles, Iterable):
        raise ConfigError(f"profiles must be a mapping of input names to shapes or a list of those, not {profiles!r}.")
    normal = tuple(_one_profile(profile) for profile in profiles)
    return tuple(profile for profile in normal if profile.shapes or profile.values)


def parse_profile(text: str) -> ShapeProfile:
    """A profile from text such as ``"x=1x3x224x224:4x3x224x224:8x3x224x224 mask=1x77"``.

    The name ends at the last ``=``, so names may contain one. ``name=values:1,1:2,2:4,4`` gives shape-tensor values.

    Raises:
        ConfigError: Text that is not of that form.
    """
    shapes: dict[str, str] = {}
    values: dict[str, str] = {}
    for word in text.split():
        name, equals, spec = word.rpartition("=")
        if not equals or not name or not spec:
            raise ConfigError(
                f"Cannot read profile {word!r}; write INPUT=MIN:OPT:MAX, such as x=1x3x224x224:4x3x224x224:8x3x224x224."
            )
        into = values if spec.startswith("values:") else shapes
        if name in shapes or name in values:
            raise ConfigError(f"Input {name!r} occurs twice in one profile; give further profiles separately.")
        into[name] = spec.removeprefix("values:")
    return ShapeProfile(shapes, values)


def validate_profiles(profiles: tuple[ShapeProfile, ...], summary: ModelSummary) -> tuple[ShapeProfile, ...]:
    """Check profiles against the model's inputs and bring them to the form that goes into the key.

    Inputs without dynamic dimensions are dropped after the check: naming them changes nothing in the engine, so it
    must not change the key.

    Raises:
        ConfigError: An unknown input, a wrong rank, a static dimension given another size, dimensions of one symbolic
            name that could never be equal, or a dynamic input that a profile does not mention. The message names
            input and dimension.
    """
    inputs = {tensor.name: tensor for tensor in summary.inputs}
    dynamic = [name for name, tensor in inputs.items() if tensor.is_dynamic]
    if dynamic and not profiles:
        raise ConfigError(
            "This model has dynamic inputs, so profiles must say their shapes: "
            + "; ".join(str(inputs[name]) for name in dynamic)
            + ". Pass profiles={name: (min, opt, max)}."
        )
    reduced = []
    for number, profile in enumerate(profiles):
        where = f" in profile {number}" if len(profiles) > 1 else ""
        for name in (*profile.shapes, *profile.values):
            if name not in inputs:
                nearest = nearest_name(name, inputs)
                hint = f"; did you mean {nearest!r}" if nearest else ""
                raise ConfigError(
                    f"The model has no input {name!r}{where}{hint}. Its inputs: {'; '.join(map(str, summary.inputs))}."
                )
        for name, limits in profile.shapes.items():
            _check_dims(name, limits, inputs[name].dims, where)
        _check_symbols(profile, inputs, where)
        missing = [name for name in dynamic if name not in profile.shapes]
        if missing:
            raise ConfigError(
                f"No shape{where} for dynamic input "
                + "; ".join(str(inputs[name]) for name in missing)
                + ". Every profile must give (min, opt, max) for each."
            )
        for name, limits in profile.values.items():
            _check_values(name, limits, inputs[name].dims, where)
        kept = {name: limits for name, limits in profile.shapes.items() if name in dynamic}
        if kept or profile.values:
            reduced.append(ShapeProfile(kept, profile.values))
    return tuple(reduced)


def covers_all(stored: Sequence[ShapeProfile], wanted: Sequence[ShapeProfile]) -> bool:
    """Whether an engine with the `stored` profiles accepts every shape of every `wanted` profile."""
    return all(any(have.covers(profile) for have in stored) for profile in wanted)


def cover_size(profiles: Sequence[ShapeProfile]) -> int:
    """How much a set of profiles covers: elements of the largest shapes plus width of the ranges; smaller is tighter."""
    total = 0
    for profile in profiles:
        for limits in profile.shapes.values():
            volume = 1
            for size in limits.max:
                volume *= max(size, 1)
            total += volume + sum(high - low for low, high in zip(limits.min, limits.max, strict=True))
    return total


def profile_gaps(wanted: Sequence[ShapeProfile], stored: Sequence[ShapeProfile]) -> tuple[str, ...]:
    """Where stored profiles fall short: one sentence per input and dimension, by the stored profile that comes closest."""
    gaps: list[str] = []
    for profile in wanted:
        if not any(have.covers(profile) for have in stored):
            shortfalls = sorted((_shortfalls(profile, have) for have in stored), key=len)
            gaps += shortfalls[0] if shortfalls else ["it has no profile"]
    return tuple(gaps)


def _shortfalls(wanted: ShapeProfile, stored: ShapeProfile) -> list[str]:
    gaps = []
    for name, asked in wanted.shapes.items():
        have = stored.shapes.get(name)
        if have is None:
            gaps.append(f"input {name!r}: not in the stored profile")
        elif len(have.min) != len(asked.min):
            gaps.append(f"input {name!r}: {len(asked.min)} dimensions asked, {len(have.min)} stored")
        else:
            for axis, (low, high) in enumerate(zip(have.min, have.max, strict=True)):
                outside = [size for size in (asked.min[axis], asked.max[axis]) if not low <= size <= high]
                if outside:
                    gaps.append(f"input {name!r} dimension {axis}: {outside[-1]} not in {low}..{high}")
    gaps += [
        f"shape-tensor input {name!r}: other values"
        for name in wanted.values
        if stored.values.get(name) != wanted.values[name]
    ]
    return gaps


def _check_dims(name: str, limits: ShapeRange, dims: tuple[int | str | None, ...] | None, where: str) -> None:
    if dims is None:
        return  # the model does not say the rank; TensorRT will judge
    if len(limits.min) != len(dims):
        raise ConfigError(
            f"Input {name!r}{where} has {len(dims)} dimensions ({_show(dims)}), the profile gives {len(limits.min)} ({limits})."
        )
    for axis, size in enumerate(dims):
        if not isinstance(size, int) or size < 0:
            continue
        for word in ("min", "opt", "max"):
            asked = getattr(limits, word)[axis]
            if asked != size:
                raise ConfigError(
                    f"Input {name!r}{where}: dimension {axis} is fixed at {size} in the model, the profile's {word} says {asked}."
                )


def _check_symbols(profile: ShapeProfile, inputs: Mapping[str, TensorInfo], where: str) -> None:
    """Dimensions that share a symbolic name are equal at run time, so one size must suit them all."""
    seen: dict[str, list[tuple[str, int]]] = {}
    for name in profile.shapes:
        for axis, symbol in enumerate(inputs[name].dims or ()):
            if isinstance(symbol, str):
                seen.setdefault(symbol, []).append((name, axis))
    for symbol, places in seen.items():
        low = max(profile.shapes[name].min[axis] for name, axis in places)
        high = min(profile.shapes[name].max[axis] for name, axis in places)
        tuned = {profile.shapes[name].opt[axis] for name, axis in places}
        # TensorRT tunes for one size; where only one is possible it takes that one, whatever opt says.
        if low <= high and (len(tuned) == 1 or low == high):
            continue
        given = "; ".join(
            f"input {name!r} dimension {axis} is "
            + ":".join(str(dims[axis]) for dims in (limits.min, limits.opt, limits.max))
            for name, axis in places
            for limits in (profile.shapes[name],)
        )
        problem = "no size suits them all" if low > high else "their opt differs"
        raise ConfigError(
            f"The model calls these dimensions {symbol!r}, so they are always equal, but {problem}{where}: {given}. "
            "Give them the same min, opt and max."
        )


def _check_values(name: str, limits: ShapeRange, dims: tuple[int | str | None, ...] | None, where: str) -> None:
    """A shape tensor has no dimension, and then one value, or one dimension that says how many."""
    if dims is None:
        return
    if len(dims) > 1:
        raise ConfigError(
            f"Input {name!r}{where} has {len(dims)} dimensions, so it is no shape tensor; give its shape instead."
        )
    count = dims[0] if dims else 1
    if isinstance(count, int) and count >= 0 and len(limits.min) != count:
        raise ConfigError(
            f"Input {name!r}{where} holds {count} value(s), the profile gives {len(limits.min)} ({limits})."
        )


def _show(dims: Sequence[int | str | None]) -> str:
    return "x".join("?" if size is None else str(size) for size in dims)


def _one_profile(profile: Any) -> ShapeProfile:
    if isinstance(profile, ShapeProfile):
        return profile
    if isinstance(profile, str):
        return parse_profile(profile)
    if isinstance(profile, Mapping):
        return ShapeProfile(profile)
    raise ConfigError(f"A profile is a mapping of input names to shapes, not {profile!r}.")


def _items(mapping: Any, field: str) -> list[tuple[str, Any]]:
    if not mapping:
        return []
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{field} must map input names to shapes, not {mapping!r}.")
    for name in mapping:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{field}: an input name must be non-empty text, not {name!r}.")
    return list(mapping.items())


def _range(name: str, spec: Any, *, smallest: int | None = 0) -> ShapeRange:
    if isinstance(spec, ShapeRange):
        spec = (spec.min, spec.opt, spec.max)
    spelled = _exactly(spec)
    return _read_range(name, spec, smallest) if spelled is None else _range_of(name, spelled, smallest)


def _exactly(spec: Any) -> Any:
    """The spec as a key of a memo: text, numbers, and tuples of them; None where a key could stand for two meanings."""
    kind = type(spec)
    if kind is tuple or kind is list:
        for part in spec:
            inner = type(part)
            if inner is tuple or inner is list:
                for size in part:
                    if type(size) is not int:  # 1.0 and True equal 1, and are no sizes
                        return None
            elif inner is not int and inner is not str:
                return None
        return tuple([tuple(part) if type(part) is list else part for part in spec])
    return spec if kind is str else None


@functools.lru_cache(maxsize=1024)
def _range_of(name: str, spec: Any, smallest: int | None) -> ShapeRange:
    """A service spells the same shapes at every request, and reading them costs more than the rest of a hit's request."""
    return _read_range(name, spec, smallest)


def _read_range(name: str, spec: Any, smallest: int | None) -> ShapeRange:
    if isinstance(spec, str) and ":" in spec:
        spec = spec.split(":")
    if (
        not isinstance(spec, str)
        and _is_sequence(spec)
        and any(isinstance(part, str) or _is_sequence(part) for part in spec)
    ):
        if len(spec) != 3:
            raise ConfigError(f"Input {name!r}: give one shape, or three as (min, opt, max); got {len(spec)}.")
        low, opt, high = (_dims(name, part, smallest) for part in spec)
    else:
        low = opt = high = _dims(name, spec, smallest)
    if not len(low) == len(opt) == len(high):
        raise ConfigError(
            f"Input {name!r}: min, opt and max have {len(low)}, {len(opt)} and {len(high)} dimensions; they must agree."
        )
    for axis, (a, b, c) in enumerate(zip(low, opt, high, strict=True)):
        if not a <= b <= c:
            raise ConfigError(f"Input {name!r}: dimension {axis} must have min <= opt <= max, got {a}, {b}, {c}.")
    return ShapeRange(low, opt, high)


def _is_sequence(value: Any) -> bool:
    # numpy arrays are no Sequence, but list their items all the same (those of no dimension have none)
    if not hasattr(value, "__len__") or not hasattr(value, "__getitem__") or isinstance(value, Mapping):
        return False
    return getattr(value, "ndim", 1) > 0


def _dims(name: str, spec: Any, smallest: int | None) -> Dims:
    if isinstance(spec, str):
        text = spec.strip().lower()
        words = [] if text in {"", "scalar"} else text.replace(",", "x").split("x")
        try:
            dims = tuple(int(word) for word in words)
        except ValueError:
            raise ConfigError(f"Input {name!r}: cannot read the shape {spec!r}; write it like 1x3x224x224.") from None
    else:
        try:
            # operator.index takes ints of every make (numpy's too) and refuses floats and text
            dims = tuple(operator.index(size) for size in (spec if _is_sequence(spec) else (spec,)))
        except TypeError:
            raise ConfigError(f"Input {name!r}: a shape is a sequence of whole numbers, not {spec!r}.") from None
    for axis, size in enumerate(dims):
        if smallest is not None and size < smallest:
            raise ConfigError(
                f"Input {name!r}: dimension {axis} is {size}; sizes cannot be negative. Give the real (min, opt, max) "
                "instead of -1."
            )
        if abs(size) > LARGEST_INT:
            raise ConfigError(f"Input {name!r}: dimension {axis} is {size}, which does not fit 64 bits.")
    return dims
