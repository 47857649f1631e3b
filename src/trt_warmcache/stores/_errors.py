"""Foreign exceptions as typed store errors, translated in one place."""

from __future__ import annotations

import errno

from trt_warmcache.errors import StoreError, StoreReason

__all__ = ["from_os_error"]

_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_ADVICE = {
    StoreReason.DENIED: "Check the owner and permissions of the folder, or whether it is mounted read-only",
    StoreReason.FULL: "Free some space (trt-warmcache gc) or point the store elsewhere",
    StoreReason.TIMEOUT: "Check the file server",
    StoreReason.UNAVAILABLE: "Check the device and the path",
}


def reason_of(error: OSError) -> StoreReason:
    """The kind of failure behind an operating-system error."""
    if error.errno in _DENIED or isinstance(error, PermissionError):
        return StoreReason.DENIED
    if error.errno in _FULL:
        return StoreReason.FULL
    if error.errno == errno.ETIMEDOUT or isinstance(error, TimeoutError):
        return StoreReason.TIMEOUT
    return StoreReason.UNAVAILABLE


def from_os_error(error: OSError, *, doing: str, store: str, facts: str = "") -> StoreError:
    """A store error for an operating-system error.

    Args:
        error: What the system said.
        doing: What was tried, for example ``"write blobs/ab/..."``.
        store: Where.
        facts: Further facts for the message, such as free space.
    """
    reason = reason_of(error)
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    text = f"Could not {doing} in {store}: {error.strerror or error} ({name}{'; ' + facts if facts else ''}). {_ADVICE[reason]}."
    return StoreError(text, reason=reason, store=store, errno=error.errno)
