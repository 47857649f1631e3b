"""Every error the library raises on purpose.

One root, few children. A child that matches a builtin derives from it too, so that code which knows nothing of this
library still catches it sensibly. All of them survive pickling with attributes and cause, because builds run in
worker processes and their errors must reach the caller whole.
"""

from __future__ import annotations

from typing import Any

from trt_warmcache._words import Word

__all__ = [
    "BuildError",
    "BuildTimeout",
    "ConfigError",
    "IncompatibleError",
    "IntegrityError",
    "MissError",
    "ModelError",
    "StoreError",
    "StoreReason",
    "UnknownFieldError",
    "UntrustedError",
    "WarmCacheError",
]


class WarmCacheError(Exception):
    """Root of all errors of this library.

    Args:
        message: One or two sentences: what happened and what to do next.
        **details: Facts for programs; each becomes an attribute of the error.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        for name, value in details.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # The default protocol calls cls(*args) and forgets __cause__; both matter across a process boundary.
        state = {name: value for name, value in self.__dict__.items() if name != "message"}
        return (_rebuild, (type(self), self.message, state, _portable(self.__cause__)))


def _rebuild(
    cls: type[WarmCacheError], message: str, state: dict[str, Any], cause: BaseException | None
) -> WarmCacheError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.message = message
    error.__dict__.update(state)
    error.__cause__ = cause
    return error


def _portable(cause: BaseException | None) -> BaseException | None:
    """The cause in a form that any process can rebuild: foreign classes may not exist or not survive there."""
    if cause is None or isinstance(cause, WarmCacheError):
        return cause
    plain = all(arg is None or isinstance(arg, (str, int, float, bytes)) for arg in cause.args)
    if type(cause).__module__ == "builtins" and plain and not isinstance(cause, UnicodeError):
        return cause
    return RuntimeError(f"{type(cause).__module__}.{type(cause).__qualname__}: {cause}")


class ConfigError(WarmCacheError, ValueError):
    """A request, option, target or policy that cannot be meant; nothing was built or stored."""


class UnknownFieldError(ConfigError, TypeError):
    """A field name that does not exist; also a TypeError, as for any unexpected keyword argument.

    Attributes:
        field: The name given.
        nearest: The closest known name, or None.
    """

    field: str
    nearest: str | None


class ModelError(WarmCacheError):
    """The model cannot be read, lacks a side file, or is refused by the parser.

    Attributes:
        node: Name of the node the parser stumbled over, where it tells.
        operator: Operator type of that node, where the parser tells.
    """

    node: str | None = None
    operator: str | None = None


class BuildError(WarmCacheError):
    """TensorRT did not produce an engine. The message carries the first error that it logged.

    Attributes:
        log: The last lines that TensorRT logged, oldest first.
    """

    log: tuple[str, ...] = ()


class BuildTimeout(BuildError, TimeoutError):
    """A build, or the wait for another process's build, took longer than the policy or the request allows."""


class StoreReason(Word):
    """Why a store failed. None of these is a miss."""

    DENIED = "denied"
    """The store refused us: credentials, permissions, read-only."""
    TIMEOUT = "timeout"
    """No answer within the deadline."""
    FULL = "full"
    """No space or quota left."""
    UNAVAILABLE = "unavailable"
    """Anything else: unreachable, missing bucket, throttled, I/O error."""


class StoreError(WarmCacheError):
    """A store could not do what was asked. Never raised for "no such entry".

    Attributes:
        reason: See :class:`StoreReason`; compares equal to its plain string.
        store: The store's URL or path, without credentials.
    """

    reason: StoreReason = StoreReason.UNAVAILABLE
    store: str = ""


class IntegrityError(WarmCacheError):
    """Bytes that do not match their digest, or a manifest that cannot be what it claims.

    Attributes:
        name: The object inside the store.
        reason: A short word for counters: ``truncated``, ``digest``, ``missing-blob``, ``manifest`` or ``header``.
    """

    name: str = ""
    reason: str = "digest"


class UntrustedError(WarmCacheError):
    """The policy asks for a signature that is missing, wrong, or made for another key.

    Attributes:
        name: The manifest inside the store.
        reason: ``unsigned``, ``wrong-signature``, ``unknown-key``, ``revoked`` or ``rebound``.
    """

    name: str = ""
    reason: str = "unsigned"


class IncompatibleError(WarmCacheError):
    """A whole and genuine plan that this machine cannot run: other GPU, other TensorRT, missing plugin, no driver.

    Attributes:
        about_plan: Whether the plan is to blame, so that building it anew may help; False where the machine is.
    """

    about_plan: bool = False


class MissError(WarmCacheError, LookupError):
    """Nothing stored for this request, and the policy forbids building it now.

    Attributes:
        key: Digest of the key that was looked for, or "".
        reason: ``missing``, or ``vetoed`` for a calibration table that is not to be used on the target.
        pending: With ``on_miss="fallback"``, the ``concurrent.futures.Future`` of the build under way; else None.
    """

    key: str = ""
    reason: str = "missing"
    pending: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A future belongs to its process; the other side learns of the miss, not of the future.
        state = {name: value for name, value in self.__dict__.items() if name not in {"message", "pending"}}
        return (_rebuild, (type(self), self.message, state, _portable(self.__cause__)))
