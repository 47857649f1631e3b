"""Requests to a remote store: sent again where that may help, and their failures told in this library's terms."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from trt_warmcache._words import Word
from trt_warmcache.errors import ConfigError, IntegrityError, StoreError, StoreReason
from trt_warmcache.stores import _obstore
from trt_warmcache.stores._base import LAYOUT
from trt_warmcache.stores._faults import Fault, RequestError, chain, diagnose
from trt_warmcache.stores._urls import extra, protocol_of, public, require, secrets_in
from trt_warmcache.stores._wire import Wire, fsspec_wire

__all__ = ["Requests", "Transport"]

log = logging.getLogger("trt_warmcache")

_T = TypeVar("_T")

_ATTEMPTS_PER_DEADLINE = 3  # a stalled connection costs a third of the deadline, not all of it
_PATIENCE = 5.0  # seconds of trying after which that is told


class Transport(Word):
    """Who carries the bytes."""

    AUTO = "auto"
    """obstore's native client for S3 and Azure where it is installed and understands the storage options, else fsspec."""
    FSSPEC = "fsspec"
    """The fsspec backend of the protocol."""
    OBSTORE = "obstore"
    """obstore's native client; an error where it cannot be used."""


class Requests:
    """Sends requests to one bucket or folder. Nothing is imported or connected before the first.

    Args:
        address: Any fsspec URL.
        options: Options of the backend.
        transport: See :class:`Transport`.
        timeout: Seconds that one request may take with all its repetitions.

    Attributes:
        url: The address, for people; without credentials.
        protocol: Its scheme.
        probing: Held by whoever finds out what the server can do; new after a fork, as everything here.

    Raises:
        ConfigError: No such protocol, or its package is not installed.
    """

    def __init__(self, address: str, options: Mapping[str, Any], *, transport: Transport, timeout: float) -> None:
        self.url = public(address)
        self.protocol = protocol_of(address, self.url)
        self._address = address
        self._options = dict(options)
        for name in ("asynchronous", "loop"):
            if name in self._options:
                raise ConfigError(f"storage_options[{name!r}] is not for a store: it runs its own requests.")
        self._transport = transport
        self._timeout = timeout
        self._secrets = secrets_in(address, self._options)
        self._native = self._native_config()
        if self._native is None:
            require(self.protocol)
        if importlib.util.find_spec("stamina") is None:
            raise ConfigError(f"Stores behind URLs need the stamina package: pip install {extra(self.protocol)}.")
        self._reset()

    def _native_config(self) -> dict[str, str] | None:
        """Configuration for obstore, or None to go through fsspec."""
        if self._transport is Transport.FSSPEC:
            return None
        config = _obstore.obstore_config(self.protocol, self._options)
        if importlib.util.find_spec("obstore") is None:
            config = "obstore is not installed (pip install trt_warmcache[obstore])"
        if isinstance(config, dict):
            return config
        if self._transport is Transport.OBSTORE:
            raise ConfigError(f"transport='obstore' is not possible for {self.url}: {config}. Use 'auto' or 'fsspec'.")
        return None

    # ---- connections ------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._wire: Wire | None = None
        self._bucket_seen = False
        self.probing = threading.Lock()

    @property
    def wire(self) -> Wire:
        """The connections of this process; made when first asked for."""
        if self._pid != os.getpid():
            self._reset()  # after a fork: sockets, loops and locks of the parent are not ours
        with self._guard:
            if self._wire is None:
                self._wire = self._open()
            return self._wire

    def _open(self) -> Wire:
        if self._native is not None and not (_obstore.forked() and self._transport is Transport.AUTO):
            bucket, _, prefix = urlsplit(self._address).path.lstrip("/").partition("/")
            host = urlsplit(self._address).netloc.rpartition("@")[2]
            bucket, prefix = (host, urlsplit(self._address).path.strip("/")) if host else (bucket, prefix)
            return _obstore.ObstoreWire(self.protocol, bucket, f"{prefix}/{LAYOUT}", self._native, self._timeout)
        try:
            return fsspec_wire(self._address, self._options, LAYOUT)
        except ImportError as error:
            raise ConfigError(
                f"{self.url} needs a package that is not installed: pip install {extra(self.protocol)}."
            ) from error
        except (TypeError, ValueError) as error:
            words = self._scrubbed(str(error))
            raise ConfigError(f"{self.url} cannot be opened with these storage options: {words}") from None
        except Exception as error:  # noqa: BLE001  whatever a backend raises becomes a typed error
            # Some backends connect at once, and raise whatever their protocol raises.
            raise self._error(error, "connect", "to") from self._cause(error)

    def close(self) -> None:
        """Let go of the connections; the next request makes new ones."""
        self._wire = None

    # ---- sending ----------------------------------------------------------------------------------------------

    def call(self, doing: str, act: Callable[[Wire, float], _T], *, deadlines: int = 1) -> _T:
        """Send a request until it is answered, refused, or out of time.

        Args:
            doing: For messages.
            act: Sends it once, within the seconds given.
            deadlines: How many times the deadline it may take: for work that is many requests.

        Raises:
            RequestError: Any failure, told apart by its ``fault``.
        """
        import stamina

        _keep_quiet()
        limit = self._timeout * deadlines
        started = time.monotonic()
        deadline, told = started + limit, False

        def again(error: Exception) -> bool:
            nonlocal told
            if not isinstance(error, RequestError) or not error.fault.passes or error.final:
                return False
            now = time.monotonic()
            if now - started > _PATIENCE and now < deadline and not told:
                told = True
                log.warning("%s It is tried again for another %.0f s.", error.message, deadline - now)
            return now < deadline

        for attempt in stamina.retry_context(
            on=again, attempts=None, timeout=limit, wait_initial=0.1, wait_max=5.0, wait_jitter=0.5
        ):
            with attempt:
                left = max(0.05, deadline - time.monotonic())
                return self.once(doing, act, min(left, self._timeout / _ATTEMPTS_PER_DEADLINE))
        raise AssertionError("stamina ends with a result or an error")

    def call_or_none(self, doing: str, act: Callable[[Wire, float], _T]) -> _T | None:
        """Like :meth:`call`, and None where there is no such object.

        Raises:
            RequestError: Any other failure; also that the bucket is missing.
        """
        try:
            result = self.call(doing, act)
        except RequestError as error:
            if error.fault is not Fault.MISSING:
                raise
            self.confirm_bucket(doing)
            return None
        # An empty answer proves nothing: some services list a bucket that is not there as an empty one.
        self._bucket_seen = self._bucket_seen or bool(result)
        return result

    def call_write(self, doing: str, act: Callable[[Wire, float], _T], *, deadlines: int = 1) -> _T:
        """Like :meth:`call`, for a request that writes."""
        try:
            result = self.call(doing, act, deadlines=deadlines)
        except RequestError as error:
            if error.fault is Fault.MISSING:
                raise self._no_bucket(doing) from error  # nothing else can be missing for a write
            raise
        self._bucket_seen = True
        return result

    def once(self, doing: str, act: Callable[[Wire, float], _T], seconds: float) -> _T:
        """Send a request a single time.

        Raises:
            RequestError: Any failure.
        """
        wire = self.wire
        try:
            return act(wire, seconds)
        except (StoreError, ConfigError, IntegrityError):
            raise
        except Exception as error:  # noqa: BLE001  whatever a backend raises becomes a typed error
            found = self._error(error, doing)
            if found.fault is Fault.NO_RANGES and self._transport is Transport.AUTO:
                # This server's ranged answers are not marked as such, which obstore refuses. The digests tell whether
                # they are right.
                self._native = None
                with self._guard:
                    self._wire = None
                require(self.protocol)
                return self.once(doing, act, seconds)
            raise found from self._cause(error)

    # ---- what went wrong --------------------------------------------------------------------------------------

    def _error(self, error: BaseException, doing: str, where: str = "in") -> RequestError:
        diagnosis = diagnose(error)
        fault = diagnosis.fault
        meaning = {Fault.NO_BUCKET: "the bucket does not exist", Fault.MISSING: "there is no such object"}
        told = meaning.get(fault, fault.value)
        words = self._scrubbed(diagnosis.words)
        return RequestError(
            f"Could not {doing} {where} {self.url}: {told} ({words}). {fault.advice}.",
            reason=fault.reason,
            store=self.url,
            fault=fault,
        )

    def _cause(self, error: BaseException) -> BaseException:
        """The backend's exception, unless its text gives a secret away."""
        texts = [f"{link} {link.args!r}" for link in chain(error)]
        if any(map(self._secrets.search, texts)):
            return RuntimeError(f"{type(error).__name__}: {self._scrubbed(str(error))}")
        return error

    def _scrubbed(self, text: str) -> str:
        return self._secrets.sub("***", text)

    def confirm_bucket(self, doing: str) -> None:
        """Tell a missing object from a missing bucket, where the service's answer did not.

        Raises:
            RequestError: The bucket is missing, or the service could not say.
        """
        if self._bucket_seen:
            return

        def look(wire: Wire, seconds: float) -> bool:
            return wire.bucket_exists(seconds)

        try:
            there = self.call(doing, look)
        except RequestError as error:
            if error.fault not in {Fault.DENIED, Fault.MISSING}:
                raise
            there = error.fault is Fault.DENIED  # whoever may read objects need not be allowed to ask for the bucket
        if not there:
            raise self._no_bucket(doing)
        self._bucket_seen = True

    def saw_bucket(self) -> None:
        """Note that the bucket is there."""
        self._bucket_seen = True

    def _no_bucket(self, doing: str) -> RequestError:
        return RequestError(
            f"Could not {doing} in {self.url}: the bucket does not exist. {Fault.NO_BUCKET.advice}.",
            reason=StoreReason.UNAVAILABLE,
            store=self.url,
            fault=Fault.NO_BUCKET,
        )


def _keep_quiet() -> None:
    """Let stamina's log lines go to whoever has set up logging, and not to the terminal where nobody has."""
    logger = logging.getLogger("stamina")
    if not any(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        logger.addHandler(logging.NullHandler())
