"""What went wrong, told from the exceptions that remote backends raise.

Backends wrap the service's answer in builtin exceptions whose class says little: s3fs turns a refused condition into
``OSError(EINVAL)``, gcsfs a 403 into a bare ``OSError``, and a missing bucket looks like a missing object. The code
and status of the service are somewhere in the chain of causes, so that is where this module looks.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from trt_warmcache.errors import StoreError, StoreReason

__all__ = ["Diagnosis", "Fault", "RequestError", "chain", "diagnose"]


class Fault(Enum):
    """What a failed request means for whoever sent it."""

    MISSING = "no such object"
    NO_BUCKET = "no such bucket"
    EXISTS = "the condition was refused"
    CONFLICT = "another writer was at the same object"
    RANGE = "the object ends before the range"
    DENIED = "denied"
    TIMEOUT = "no answer in time"
    FULL = "no space or quota left"
    THROTTLED = "throttled"
    TRANSIENT = "a passing failure"
    NO_RANGES = "ranges are not marked as such"
    FATAL = "failed"

    @property
    def reason(self) -> StoreReason:
        """The kind of :class:`~trt_warmcache.StoreError` that it becomes."""
        return _REASONS.get(self, StoreReason.UNAVAILABLE)

    @property
    def passes(self) -> bool:
        """Whether the same request may well succeed a little later."""
        return self in _PASSING

    @property
    def advice(self) -> str:
        """What to do about it."""
        return _ADVICE.get(self, "Check the URL, the storage options and the service")


_REASONS = {
    Fault.DENIED: StoreReason.DENIED,
    Fault.TIMEOUT: StoreReason.TIMEOUT,
    Fault.FULL: StoreReason.FULL,
}
_PASSING = frozenset({Fault.CONFLICT, Fault.EXISTS, Fault.THROTTLED, Fault.TRANSIENT, Fault.TIMEOUT})
_ADVICE = {
    Fault.NO_BUCKET: "Create the bucket or container, or correct its name; this library never creates one",
    Fault.DENIED: "Check the credentials and what they may do on this bucket and prefix",
    Fault.TIMEOUT: "Check the network and the service, or give the store a longer timeout",
    Fault.FULL: "Free some space (trt-warmcache gc) or raise the quota",
    Fault.THROTTLED: "Ask less often or ask the service for a higher request rate; a nearer layer absorbs repeated reads",
    Fault.CONFLICT: "Several writers keep colliding on this object; try again",
    Fault.TRANSIENT: "Check the network and the health of the service",
}

_NO_BUCKET = frozenset({"nosuchbucket", "containernotfound", "containerbeingdeleted", "filesystemnotfound"})
_MISSING = frozenset({"nosuchkey", "blobnotfound", "pathnotfound", "nosuchversion"})
_EXISTS = frozenset({"preconditionfailed", "blobalreadyexists", "conditionnotmet", "targetconditionnotmet"})
_THROTTLED = frozenset(
    {"slowdown", "toomanyrequests", "serverbusy", "ratelimitexceeded", "requestlimitexceeded", "throttling"}
)
_DENIED = frozenset(
    {"accessdenied", "invalidaccesskeyid", "signaturedoesnotmatch", "expiredtoken", "authorizationfailure"}
    | {"authenticationfailed", "insufficientaccountpermissions", "requesttimetooskewed", "invalidtoken"}
)
_FULL = frozenset({"quotaexceeded", "insufficientstorage", "xminiostoragefull", "accountstoragelimitexceeded"})
_TIMEOUT = frozenset({"requesttimeout", "operationtimedout"})

# Classes are named, not imported: an error of a backend exists only where its module is loaded, and most are not.
_BY_CLASS = {
    "AlreadyExistsError": Fault.EXISTS,
    "PreconditionError": Fault.EXISTS,
    "PermissionDeniedError": Fault.DENIED,
    "UnauthenticatedError": Fault.DENIED,
    "NoCredentialsError": Fault.DENIED,
    "PartialCredentialsError": Fault.DENIED,
    "ClientAuthenticationError": Fault.DENIED,
    "AuthenticationException": Fault.DENIED,
    "GoogleAuthError": Fault.DENIED,
    "RefreshError": Fault.DENIED,
    "DefaultCredentialsError": Fault.DENIED,
    "ReadTimeoutError": Fault.TIMEOUT,
    "ConnectTimeoutError": Fault.TIMEOUT,
    "FSTimeoutError": Fault.TIMEOUT,
    "ServiceRequestTimeoutError": Fault.TIMEOUT,
    "ServiceResponseTimeoutError": Fault.TIMEOUT,
    "EndpointConnectionError": Fault.TRANSIENT,
    "ConnectionClosedError": Fault.TRANSIENT,
    "HTTPClientError": Fault.TRANSIENT,
    "ResponseStreamingError": Fault.TRANSIENT,
    "ResponseParserError": Fault.TRANSIENT,
    "ClientConnectionError": Fault.TRANSIENT,
    "ClientPayloadError": Fault.TRANSIENT,
    "ContentLengthError": Fault.TRANSIENT,
    "IncompleteReadError": Fault.TRANSIENT,
    "ServiceRequestError": Fault.TRANSIENT,
    "ServiceResponseError": Fault.TRANSIENT,
    "IncompleteRead": Fault.TRANSIENT,
    "RequestException": Fault.TRANSIENT,
    "TransportError": Fault.TRANSIENT,
    "SSHException": Fault.TRANSIENT,
}

_BY_ERRNO = {
    errno.ENOENT: Fault.MISSING,
    errno.EEXIST: Fault.EXISTS,
    errno.EACCES: Fault.DENIED,
    errno.EPERM: Fault.DENIED,
    errno.EROFS: Fault.DENIED,
    errno.ENOSPC: Fault.FULL,
    errno.EDQUOT: Fault.FULL,
    errno.EFBIG: Fault.FULL,
    errno.ETIMEDOUT: Fault.TIMEOUT,
    errno.EBUSY: Fault.TRANSIENT,
    errno.EIO: Fault.TRANSIENT,
    errno.ECONNREFUSED: Fault.TRANSIENT,
    errno.EHOSTUNREACH: Fault.TRANSIENT,
    errno.ENETUNREACH: Fault.TRANSIENT,
}

#: Where neither code nor status tells, these words of the exceptions' texts do, better than the name of a class.
_TROUBLE = (
    (re.compile(r"connection ?refused|connect call failed", re.IGNORECASE), "connection refused"),
    (re.compile(r"connection ?reset", re.IGNORECASE), "connection reset"),
    (
        re.compile(r"name or service not known|name resolution|failed to lookup|dns error", re.IGNORECASE),
        "host not found",
    ),
    (re.compile(r"wrong_version_number|InvalidContentType", re.IGNORECASE), "the server does not speak TLS there"),
    (re.compile(r"certificate", re.IGNORECASE), "its certificate was not accepted"),
)

_XML_CODE = re.compile(r"<Code>\s*([A-Za-z]+)\s*</Code>")
_TEXT_STATUS = re.compile(r"\bstatus code: (\d{3})\b")


class RequestError(StoreError):
    """A store error that remembers what it meant; outside of this package it is a plain StoreError."""

    fault: Fault = Fault.FATAL
    final: bool = False  # was tried again already, for as long as allowed

    def __reduce__(self) -> tuple[Any, ...]:
        made, (_, *rest) = super().__reduce__()
        rest[1] = {name: value for name, value in rest[1].items() if name not in {"fault", "final"}}
        return (made, (StoreError, *rest))


@dataclass(frozen=True)
class Diagnosis:
    """What a failed request means, and what the service called it, for people."""

    fault: Fault
    words: str


def diagnose(error: BaseException) -> Diagnosis:
    """Tell what a backend's exception means.

    The service's own code counts most, then its status, then the class of the exception.
    """
    links = list(chain(error))
    codes = [code for link in links for code in _codes(link)]
    statuses = [status for link in links if (status := _status(link))]
    words = next(iter(codes), "") or ("" if statuses else _trouble(links)) or type(error).__name__
    if statuses:
        words += f", HTTP status {statuses[0]}"
    fault = _by_code(codes) or _by_status(statuses) or _by_class(links)
    return Diagnosis(fault or Fault.FATAL, words)


def _trouble(links: list[BaseException]) -> str:
    texts = [str(link) for link in links]
    return next((words for sign, words in _TROUBLE if any(map(sign.search, texts))), "")


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, its causes and contexts, and exceptions among its arguments, each once."""
    seen: set[int] = set()
    queue: list[Any] = [error]
    while queue:
        link = queue.pop(0)
        if not isinstance(link, BaseException) or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        queue += [link.__cause__, None if link.__suppress_context__ else link.__context__, *link.args]


def _codes(link: BaseException) -> Iterator[str]:
    response = getattr(link, "response", None)
    if isinstance(response, dict):  # botocore
        yield str(response.get("Error", {}).get("Code", ""))
    code = getattr(link, "error_code", None)  # azure: a str, or an enum with the word as its value
    if code:
        yield str(getattr(code, "value", code))
    if type(link).__module__.startswith("gcsfs"):
        details = getattr(link, "_error_response", None)
        if isinstance(details, dict):
            yield from (str(each.get("reason", "")) for each in details.get("errors", ()))
    if _speaks_rust(link):
        yield from _XML_CODE.findall(str(link))


def _status(link: BaseException) -> int:
    if type(link).__module__ == "aiohttp.http_exceptions":
        return 0  # the client's own finding in a broken answer, worded as a status
    response = getattr(link, "response", None)
    if isinstance(response, dict):
        return _number(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    for holder, name in ((link, "status_code"), (link, "status"), (response, "status_code"), (link, "code")):
        status = _number(getattr(holder, name, None))
        if status:
            return status
    if _speaks_rust(link):
        return next(map(int, _TEXT_STATUS.findall(str(link))), 0)
    # gcsfs words a 403 as a bare OSError.
    return 403 if type(link) is OSError and str(link).startswith("Forbidden: ") else 0


def _speaks_rust(link: BaseException) -> bool:
    return type(link).__module__.startswith("obstore") or "\nDebug source:" in str(link)


def _number(value: Any) -> int:
    text = str(value)
    return int(text) if len(text) == 3 and text.isdecimal() else 0


def _by_code(codes: list[str]) -> Fault | None:
    for code in codes:
        word = code.replace("_", "").lower()
        for words, fault in (
            (_NO_BUCKET, Fault.NO_BUCKET),
            (_MISSING, Fault.MISSING),
            (_EXISTS, Fault.EXISTS),
            (_THROTTLED, Fault.THROTTLED),
            (_DENIED, Fault.DENIED),
            (_FULL, Fault.FULL),
            (_TIMEOUT, Fault.TRANSIENT),
        ):
            if word in words:
                return fault
    return None


def _by_status(statuses: list[int]) -> Fault | None:
    known = {
        401: Fault.DENIED, 403: Fault.DENIED, 404: Fault.MISSING, 408: Fault.TRANSIENT, 409: Fault.CONFLICT,
        410: Fault.MISSING, 412: Fault.EXISTS, 416: Fault.RANGE, 429: Fault.THROTTLED, 507: Fault.FULL,
    }  # fmt: skip
    for status in statuses:
        if status in known:
            return known[status]
        if status >= 500:
            return Fault.TRANSIENT
        if status >= 400:
            return Fault.FATAL
    return None


def _by_class(links: list[BaseException]) -> Fault | None:
    for link in links:
        if _speaks_rust(link):
            text = str(link)
            if "NotPartial" in text:
                return Fault.NO_RANGES
            if "timed out" in text or "TimedOut" in text:
                return Fault.TIMEOUT
            if isinstance(link, FileNotFoundError):
                return Fault.MISSING
            if any(sign in text for sign in ("HttpError", "Reqwest", "RetryError", "error sending request")):
                return Fault.TRANSIENT
        if isinstance(link, FileExistsError):
            return Fault.EXISTS
        if isinstance(link, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            return Fault.MISSING
        if isinstance(link, PermissionError):
            return Fault.DENIED
        # By name too: before Python 3.11 asyncio has a class of its own, and importing asyncio takes longer than a hit.
        if isinstance(link, TimeoutError) or type(link).__name__ == "TimeoutError":
            return Fault.TIMEOUT
        for base in type(link).__mro__:
            if base.__name__ in _BY_CLASS:
                return _BY_CLASS[base.__name__]
        if isinstance(link, (ConnectionError, EOFError)):
            return Fault.TRANSIENT
        if isinstance(link, OSError) and link.errno in _BY_ERRNO:
            return _BY_ERRNO[link.errno]
    return None
