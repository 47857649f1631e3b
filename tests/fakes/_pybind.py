"""How pybind11 classes behave, as far as a caller can trip over it.

The fakes are written once, every member marked with the releases that have it (:func:`only`). :func:`specialise`
copies a class for one release and leaves out what that release lacks, so `hasattr`, `dir` and calls answer as the
real binding of that release does. Because classes are copied, no fake may use zero-argument `super()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.fakes._world import World

Line = Literal["8.6", "10.3", "10.16", "11.4"]
LINES: tuple[Line, ...] = ("8.6", "10.3", "10.16", "11.4")

F = TypeVar("F", bound="Callable[..., Any]")
C = TypeVar("C", bound=type)


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def only(first: str = "0", last: str = "99") -> Callable[[F], F]:
    """Marks a method or property getter as existing from one minor release to another, both included."""

    def mark(function: F) -> F:
        function.releases = (first, last)  # type: ignore[attr-defined]
        return function

    return mark


def only_class(first: str = "0", last: str = "99") -> Callable[[C], C]:
    """Marks a class like :func:`only` marks a method."""

    def mark(cls: C) -> C:
        cls._releases = (first, last)  # type: ignore[attr-defined]
        return cls

    return mark


def at_least(line: str, release: str) -> bool:
    """Whether a line is the given minor release or newer."""
    return _number(line) >= _number(release)


def exists(member: object, line: Line) -> bool:
    """Whether a marked member or class belongs to a release line."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, staticmethod):
        member = member.__func__
    first, last = getattr(member, "_releases" if isinstance(member, type) else "releases", ("0", "99"))
    return _number(first) <= _number(line) <= _number(last)


class PybindType(type):
    """Checks what pybind11's metaclass checks: a Python subclass must call the base `__init__`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        instance = super().__call__(*args, **kwargs)
        if not getattr(instance, "_constructed", True):
            base = next(c for c in cls.__mro__ if c.__dict__.get("_sealed"))
            raise TypeError(f"tensorrt.{base.__name__}.__init__() must be called when overriding __init__")
        return instance

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or getattr(type(instance), "_poses_as", None) is cls


class PybindObject(metaclass=PybindType):
    """Base of every fake class: not constructible unless a subclass says so, and closed to unknown attributes."""

    _world: ClassVar[World]
    _constructed = False

    def __init__(self) -> None:
        raise TypeError(f"tensorrt.{type(self).__name__}: No constructor defined!")

    def __setattr__(self, name: str, value: Any) -> None:
        # Instances of a bound class have no __dict__: a misspelt option is an AttributeError, not a silent no-op.
        # A subclass written in Python has one and takes anything.
        closed = type(self).__dict__.get("_sealed", False)
        if closed and not name.startswith("_") and not isinstance(getattr(type(self), name, None), property):
            raise AttributeError(f"'tensorrt.{type(self).__name__}' object has no attribute '{name}'")
        object.__setattr__(self, name, value)

    def __reduce__(self) -> Any:
        raise TypeError(f"cannot pickle 'tensorrt.{type(self).__name__}' object")


def specialise(cls: type, world: World, done: Mapping[type, type]) -> type:
    """Copies a class for the release of a world, without the members that this release lacks."""
    namespace = {
        name: member
        for name, member in vars(cls).items()
        if name not in {"__dict__", "__weakref__", "_releases"} and exists(member, world.line)
    }
    namespace.update(_world=world, _sealed=True, __module__="tensorrt", __qualname__=cls.__name__)
    return PybindType(cls.__name__, tuple(done.get(base, base) for base in cls.__bases__), namespace)


class PybindEnumType(type):
    """Gives enum classes their `__members__`; like the real ones they cannot be iterated or subscripted."""

    _by_name: dict[str, Any]

    @property
    def __members__(cls) -> dict[str, Any]:
        return dict(cls._by_name)


class PybindEnum(metaclass=PybindEnumType):
    """A bound enum: no `enum.Enum`, never equal to an int, and with the first name for a number that has two.

    On 10.x that makes `STRIP_PLAN.name` read "WEIGHTLESS". Any integer is accepted and then has the name "???".
    """

    def __init__(self, value: int) -> None:
        if not isinstance(value, int):
            raise TypeError(f"__init__(): incompatible constructor arguments. Invoked with: {value!r}")
        self._value = value

    @property
    def name(self) -> str:
        return next((n for n, m in type(self)._by_name.items() if m._value == self._value), "???")

    @property
    def value(self) -> int:
        return self._value

    def __int__(self) -> int:
        return self._value

    __index__ = __int__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PybindEnum) and type(other) is type(self) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __repr__(self) -> str:
        return f"<{self}: {self._value}>"

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_value":
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        object.__setattr__(self, name, value)


def make_enum(name: str, numbers: Mapping[str, int]) -> type[PybindEnum]:
    """An enum class with the given members, in the given order."""
    cls = PybindEnumType(name, (PybindEnum,), {"__module__": "tensorrt"})
    members = {member: cls(number) for member, number in numbers.items()}
    cls._by_name = members
    for member, value in members.items():
        setattr(cls, member, value)
    return cls  # type: ignore[return-value]
