"""A loopback HTTP proxy that breaks chosen requests on the way to a storage server.

Clients talk to the proxy's address and sign for it; the proxy forwards every byte unchanged, ``Host`` included, so
signatures hold as long as the server checks them against the ``Host`` it received, which all servers here do. (Only
fake-gcs-server names its own address in the ``Location`` of a resumable upload, so the parts of such an upload go
past the proxy.)

    with FaultProxy(info) as proxy:
        lost = proxy.inject(DropAnswer(), method="PUT", nth=2)
        filesystem = proxy.info.filesystem()
        ...
        assert lost.hits == 1
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, final

from tests.servers.process import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from tests.servers.info import ServerInfo

_BLOCK = 64 * 1024
_HEAD_LIMIT = 256 * 1024
# Nothing in the proxy waits longer than this, so that a broken test ends.
_LIMIT = 120.0


@dataclass(frozen=True)
class DropAnswer:
    """The server does the work; the client's connection is cut before the first byte of the answer."""


@dataclass(frozen=True)
class Stall:
    """The answer stops for a while, then goes on.

    Attributes:
        seconds: How long; ``FaultProxy.clear`` ends it early.
        after: Bytes of the body that are sent before; ``None`` stops before the status line.
    """

    seconds: float
    after: int | None = None


@dataclass(frozen=True)
class Answer:
    """The client gets an error in the dialect of the service.

    Attributes:
        status: HTTP status.
        code: The service's error code, such as ``NoSuchBucket``; by default the usual one for the status.
        forward: Whether the server does the work all the same and its own answer is thrown away.
        retry_after: Seconds for the ``Retry-After`` header, if any.
    """

    status: int
    code: str | None = None
    forward: bool = False
    retry_after: int | None = None


@dataclass(frozen=True)
class CutBody:
    """The body of the answer ends early.

    Attributes:
        keep: Bytes of the body that arrive.
        fix_length: With false, the connection breaks in the middle, which clients notice. With true, the answer
            claims to be complete at that length, as from a torn object; only answers that state a length can lie so.
    """

    keep: int
    fix_length: bool = False


@dataclass(frozen=True)
class FlipBit:
    """One bit of the body of the answer is wrong.

    Attributes:
        byte: Index into the body.
        bit: 0 for the lowest bit to 7 for the highest.
    """

    byte: int = 0
    bit: int = 0


Effect: TypeAlias = DropAnswer | Stall | Answer | CutBody | FlipBit


@dataclass(frozen=True)
class Request:
    """The head of a request.

    Attributes:
        method: ``GET``, ``PUT`` and so on.
        target: Path and query, as sent.
        headers: Values by lower-case name.
        effect: What was done to its answer, if anything.
    """

    method: str
    target: str
    headers: dict[str, str]
    effect: Effect | None = None


@dataclass
class Injection:
    """An effect that waits for its requests.

    Attributes:
        effect: What happens to them.
        hits: How many requests it has changed so far.
    """

    effect: Effect
    matches: Callable[[Request], bool]
    first: int
    last: int
    seen: int = 0
    hits: int = 0
    _fired: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout: float = 30.0) -> bool:
        """Waits until the first hit; gives whether it came within ``timeout`` seconds."""
        return self._fired.wait(timeout)

    def take(self, request: Request) -> bool:
        """Counts a request and gives whether the effect applies to it."""
        if not self.matches(request):
            return False
        self.seen += 1
        if not self.first <= self.seen <= self.last:
            return False
        self.hits += 1
        self._fired.set()
        return True


@final
class FaultProxy:
    """Proxy in front of one server, running in a thread of its own; use it as a context manager.

    Args:
        server: The server, or another proxy's ``info``.
    """

    def __init__(self, server: ServerInfo) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._injections: list[Injection] = []
        self._requests: list[Request] = []
        self._latency = 0.0
        self._bandwidth: float | None = None
        self._partitioned = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._released = asyncio.Event()
        self._listener: asyncio.Server | None = None

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._listener = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, LOOPBACK, 0, limit=_HEAD_LIMIT), self._loop
        ).result(timeout=10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._shutdown(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    @property
    def port(self) -> int:
        """TCP port on which the proxy listens."""
        assert self._listener is not None, "use the proxy in a with block"
        return int(self._listener.sockets[0].getsockname()[1])

    @property
    def info(self) -> ServerInfo:
        """The server as seen through the proxy."""
        return self._server.behind(self.port)

    @property
    def requests(self) -> list[Request]:
        """All requests so far, oldest first."""
        with self._lock:
            return list(self._requests)

    def inject(
        self,
        effect: Effect,
        *,
        method: str | None = None,
        path: str = "",
        where: Callable[[Request], bool] | None = None,
        nth: int = 1,
        times: int = 1,
    ) -> Injection:
        """Arms an effect. Of several that apply to one request, the one armed first acts.

        Args:
            effect: What to do.
            method: HTTP method of the requests meant; any by default.
            path: Regular expression searched for in path and query of the request.
            where: Further condition on the request.
            nth: The first matching request from now on that is changed, counted from 1.
            times: How many matching requests in a row are changed.
        """
        pattern = re.compile(path)

        def matches(request: Request) -> bool:
            return (
                (method is None or request.method == method)
                and pattern.search(request.target) is not None
                and (where is None or where(request))
            )

        injection = Injection(effect, matches, nth, nth + times - 1)
        with self._lock:
            self._injections.append(injection)
        return injection

    def slow_down(self, *, latency: float = 0.0, bandwidth: float | None = None) -> None:
        """Makes everything slow from now on.

        Args:
            latency: Seconds added before each request reaches the server.
            bandwidth: Bytes per second of each connection, in each direction; unlimited by default.
        """
        with self._lock:
            self._latency, self._bandwidth = latency, bandwidth

    def partition(self, active: bool = True) -> None:
        """Cuts all connections and refuses new ones, or lets them through again."""
        with self._lock:
            self._partitioned = active
        if active:
            asyncio.run_coroutine_threadsafe(self._cut_connections(), self._loop).result(timeout=10)

    def clear(self) -> None:
        """Disarms every effect, ends stalls, slowness and partition, and forgets the requests seen."""
        with self._lock:
            self._injections.clear()
            self._requests.clear()
            self._latency, self._bandwidth, self._partitioned = 0.0, None, False
        self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        self._released.set()
        self._released = asyncio.Event()

    async def _cut_connections(self) -> None:
        for writer in self._connections.values():
            writer.transport.abort()

    async def _shutdown(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._release()
        await self._cut_connections()
        # Before Python 3.12, wait_for swallows a cancellation that meets its result: ask again until all have ended.
        while tasks := list(self._connections):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=0.1)
        # Transports close in the loop's next turns; without them their sockets would leak.
        await asyncio.sleep(0.02)
        await self._loop.shutdown_asyncgens()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            # Cancellation is how the proxy shuts down, and broken connections are what it is for.
            with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
                while not self._partitioned and await self._exchange(reader, writer):
                    pass
        finally:
            del self._connections[task]
            writer.transport.abort()

    def _admit(self, head: _Head) -> tuple[Request, float]:
        method, target, _ = head.first_line.split(" ", 2)
        request = Request(method, target, head.headers)
        with self._lock:
            chosen = next((each for each in self._injections if each.take(request)), None)
            request = Request(method, target, head.headers, chosen.effect if chosen else None)
            self._requests.append(request)
            return request, self._latency

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Carries one request and its answer; gives whether the connection stays open."""
        head = await _Head.read(reader)
        request, latency = self._admit(head)
        effect = request.effect
        if latency:
            await asyncio.sleep(latency)
        if head.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if isinstance(effect, Answer) and not effect.forward:
            async for _, _ in _body(reader, head.headers, to_close=False):
                pass
            return await self._refuse(writer, request, effect)
        # A connection of its own for each request: one kept open could be closed by the server while idle, and the
        # client would see a fault that nobody injected.
        server_reader, server_writer = await asyncio.open_connection(LOOPBACK, self._server.port, limit=_HEAD_LIMIT)
        try:
            server_writer.write(head.raw)
            # A server may refuse before it has read the whole body; its answer still counts.
            with contextlib.suppress(ConnectionError):
                await self._copy(_body(reader, head.headers, to_close=False), server_writer)
            answer = await _Head.read(server_reader)
            while answer.status < 200:
                answer = await _Head.read(server_reader)
            return await self._answer(request, answer, server_reader, writer)
        finally:
            server_writer.transport.abort()

    async def _answer(
        self, request: Request, answer: _Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        effect = request.effect
        empty = request.method == "HEAD" or answer.status in {204, 304}
        body = _nothing() if empty else _body(reader, answer.headers, to_close=True)
        if isinstance(effect, DropAnswer | Answer):
            async for _, _ in body:  # the server has finished its work when it has sent everything
                pass
            return isinstance(effect, Answer) and await self._refuse(writer, request, effect)
        if isinstance(effect, Stall) and effect.after is None:
            await self._pause(effect.seconds)
        raw = answer.raw
        if isinstance(effect, CutBody) and effect.fix_length and "content-length" in answer.headers:
            length = min(effect.keep, int(answer.headers["content-length"]))
            raw = re.sub(rb"(?i)(\r\ncontent-length:)[^\r]*", rb"\1 %d" % length, raw)
        writer.write(raw)
        await self._copy(body, writer, effect)
        if isinstance(effect, CutBody) and not effect.fix_length:
            return False
        framed = empty or "content-length" in answer.headers or "transfer-encoding" in answer.headers
        return framed and answer.keeps_open

    async def _copy(
        self, body: AsyncIterator[tuple[bytes, bool]], writer: asyncio.StreamWriter, effect: Effect | None = None
    ) -> None:
        position = 0
        async for block, payload in body:
            piece = block
            if payload:
                if isinstance(effect, FlipBit) and position <= effect.byte < position + len(piece):
                    wrong = bytearray(piece)
                    wrong[effect.byte - position] ^= 1 << effect.bit
                    piece = bytes(wrong)
                elif isinstance(effect, CutBody):
                    piece = piece[: max(0, effect.keep - position)]
                elif isinstance(effect, Stall) and effect.after is not None:
                    ahead = effect.after - position
                    if 0 <= ahead < len(piece):
                        await self._send(writer, piece[:ahead])
                        await self._pause(effect.seconds)
                        piece = piece[ahead:]
                position += len(block)
            await self._send(writer, piece)
            if isinstance(effect, CutBody) and position >= effect.keep:
                break
        await asyncio.wait_for(writer.drain(), _LIMIT)

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        with self._lock:
            bandwidth = self._bandwidth
        # Slices of a twentieth of a second keep the flow even.
        step = len(data) if bandwidth is None else max(1, int(bandwidth / 20))
        for start in range(0, len(data), max(1, step)):
            piece = data[start : start + step]
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), _LIMIT)
            if bandwidth is not None:
                await asyncio.sleep(len(piece) / bandwidth)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._released.wait(), min(seconds, _LIMIT))

    async def _refuse(self, writer: asyncio.StreamWriter, request: Request, effect: Answer) -> bool:
        lines, body = error_answer(self._server.protocol, effect, request)
        writer.write("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode())
        if request.method != "HEAD":
            writer.write(body)
        await asyncio.wait_for(writer.drain(), _LIMIT)
        return True


_S3_CODES = {
    400: "InvalidRequest",
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    429: "TooManyRequests",
    500: "InternalError",
    503: "SlowDown",
}
_AZURE_CODES = {
    400: "InvalidInput",
    403: "AuthorizationFailure",
    404: "BlobNotFound",
    409: "BlobAlreadyExists",
    412: "ConditionNotMet",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServerBusy",
}
_GCS_CODES = {
    400: "invalid",
    403: "forbidden",
    404: "notFound",
    409: "conflict",
    412: "conditionNotMet",
    429: "rateLimitExceeded",
    500: "internalError",
    503: "backendError",
}


def error_answer(protocol: str, answer: Answer, request: Request) -> tuple[list[str], bytes]:
    """Gives status line with headers, and body, of an error as the service of ``protocol`` words it."""
    codes = {"s3": _S3_CODES, "az": _AZURE_CODES, "gcs": _GCS_CODES}[protocol]
    code = answer.code or codes[answer.status]
    lines = [f"HTTP/1.1 {answer.status} Injected"]
    if answer.retry_after is not None:
        lines.append(f"Retry-After: {answer.retry_after}")
    if protocol == "gcs":
        reason = {"domain": "global", "reason": code, "message": "injected"}
        content = {"error": {"code": answer.status, "message": "injected", "errors": [reason]}}
        return [*lines, "Content-Type: application/json"], json.dumps(content).encode()
    if protocol == "az":
        lines.append(f"x-ms-error-code: {code}")
    # S3 names the condition that failed, and s3fs goes by it.
    failed = [name for name in ("If-None-Match", "If-Match") if name.lower() in request.headers]
    condition = f"<Condition>{failed[0]}</Condition>" if answer.status == 412 and failed else ""
    error = f"<Error><Code>{code}</Code><Message>injected</Message>{condition}</Error>"
    return [*lines, "Content-Type: application/xml"], f'<?xml version="1.0" encoding="utf-8"?>{error}'.encode()


@dataclass(frozen=True)
class _Head:
    """First line and headers of a request or an answer, with the bytes they came in."""

    raw: bytes
    first_line: str
    headers: dict[str, str]

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> _Head:
        raw = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _LIMIT)
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return cls(raw, first, {name.strip().lower(): value.strip() for name, _, value in pairs})

    @property
    def status(self) -> int:
        return int(self.first_line.split(" ", 2)[1])

    @property
    def keeps_open(self) -> bool:
        connection = self.headers.get("connection", "").lower()
        return connection == "keep-alive" if self.first_line.startswith("HTTP/1.0") else connection != "close"


async def _nothing() -> AsyncIterator[tuple[bytes, bool]]:
    nothing: tuple[tuple[bytes, bool], ...] = ()
    for pair in nothing:
        yield pair


async def _body(
    reader: asyncio.StreamReader, headers: dict[str, str], *, to_close: bool
) -> AsyncIterator[tuple[bytes, bool]]:
    """Reads a body as it is on the wire: pairs of bytes and whether they are payload, not framing."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        async for pair in _chunked(reader):
            yield pair
    elif "content-length" in headers:
        async for block in _exactly(reader, int(headers["content-length"])):
            yield block, True
    elif to_close:
        while block := await asyncio.wait_for(reader.read(_BLOCK), _LIMIT):
            yield block, True


async def _chunked(reader: asyncio.StreamReader) -> AsyncIterator[tuple[bytes, bool]]:
    while True:
        line = await asyncio.wait_for(reader.readuntil(b"\r\n"), _LIMIT)
        yield line, False
        size = int(line.split(b";")[0], 16)
        if size == 0:
            break
        async for block in _exactly(reader, size):
            yield block, True
        yield await asyncio.wait_for(reader.readexactly(2), _LIMIT), False
    # Trailers, up to an empty line.
    while True:
        line = await asyncio.wait_for(reader.readuntil(b"\r\n"), _LIMIT)
        yield line, False
        if line == b"\r\n":
            return


async def _exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    left = size
    while left:
        block = await asyncio.wait_for(reader.read(min(_BLOCK, left)), _LIMIT)
        if not block:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(block)
        yield block
