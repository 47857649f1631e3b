"""A blob on its way from a remote store, verified while it arrives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

import blake3
import msgspec

from trt_warmcache.errors import IntegrityError
from trt_warmcache.manifest import CHUNK_BYTES, BlobRef
from trt_warmcache.stores import _packing
from trt_warmcache.stores._base import WritePiece, blob_name, missing, truncated, verify_view
from trt_warmcache.stores._faults import Fault, RequestError
from trt_warmcache.stores._wire import Wire

__all__ = ["Call", "Download"]

_T = TypeVar("_T")

_READS_OF_BAD_CHUNK = 3


class Call(Protocol):
    """Sends a request, again where that may help."""

    def __call__(self, doing: str, act: Callable[[Wire, float], _T], /) -> _T:
        """The answer.

        Raises:
            RequestError: There is none.
        """


class Download:
    """One blob on its way: ranges fetched side by side, each verified before it is handed over.

    Args:
        ref: The blob, packed as its reference says.
        write: Takes bytes and their offset.
        call: Sends a request until it is answered, refused, or out of time.
        url: Where from, for messages.
        concurrency: Requests under way at once.
        ranges_sure: The server is known to honour ranges.
    """

    def __init__(
        self, ref: BlobRef, write: WritePiece, *, call: Call, url: str, concurrency: int, ranges_sure: bool
    ) -> None:
        self._ref = ref
        self._write = write
        self._call = call
        self._url = url
        self._concurrency = concurrency
        self._ranges_sure = ranges_sure
        self._name = blob_name(ref)
        self._sizes = [min(CHUNK_BYTES, ref.size - at) for at in range(0, ref.size, CHUNK_BYTES)]
        self._frames: list[_packing.Frame] = []
        self._tail = b""
        self._whole: Any = None
        self._stop = threading.Event()

    def run(self) -> bool:
        """Do it; False if there is no such object."""
        try:
            if self._ref.codec:
                self._read_table()
            if not self._sizes:
                self._land_empty()
            elif len(self._sizes) == 1:
                self._land(0)
            else:
                self._land_all()
        except RequestError as error:
            if error.fault is Fault.MISSING:
                return False
            if error.fault is Fault.RANGE:
                raise self._wrong_size() from error
            raise
        return True

    def _land_all(self) -> None:
        numbers = range(len(self._sizes))
        if not self._ranges_sure:
            # A server that ignores ranges sends everything each time; find out before asking eight times.
            self._land(0)
            numbers = numbers[1:]
        workers = min(self._concurrency, len(numbers))
        pool = ThreadPoolExecutor(workers, "trt_warmcache-download")
        try:
            done, waiting = wait([pool.submit(self._land, number) for number in numbers], return_when=FIRST_EXCEPTION)
            self._stop.set()
            for future in waiting:
                future.cancel()
            for future in done:
                future.result()
        finally:
            self._stop.set()
            pool.shutdown(cancel_futures=True)

    def _land(self, number: int) -> None:
        """Fetch, check and hand over one chunk. A wrong one is read again: the wire may be to blame, not the store."""
        previous: bytes | None = None
        problem = ""
        for _ in range(_READS_OF_BAD_CHUNK):
            if self._stop.is_set():
                return
            data, problem = self._read(number)
            if not problem:
                self._write(data, number * CHUNK_BYTES)
                return
            seen = blake3.blake3(data).digest()
            if seen == previous:
                break  # twice the same: so it is stored
            previous = seen
        raise self._wrong_size() if problem == "truncated" else self._wrong_digest(number)

    def _read(self, number: int) -> tuple[Any, str]:
        """A chunk's bytes, and what is wrong with them."""
        size = self._sizes[number]
        if self._ref.codec:
            frame = self._frames[number]
            data = self._range(frame.start, frame.stop)
            if len(data) != frame.stop - frame.start:
                return data, "truncated"
            try:
                unpacked = _packing.unpack_frame(data, size)
            except _packing.PackedError:
                return data, "digest"
            return unpacked, self._check(number, unpacked)
        start = number * CHUNK_BYTES
        last = number == len(self._sizes) - 1
        # One byte more than there should be: an object that is longer must not pass for a whole one.
        data = self._range(start, start + size + last)
        return data, "truncated" if len(data) != size else self._check(number, data)

    def _check(self, number: int, data: Any) -> str:
        if len(self._sizes) > 1 and not self._ref.chunks:
            return ""
        expected = self._ref.chunks[number] if self._ref.chunks else self._ref.hex
        return "" if blake3.blake3(data).hexdigest() == expected else "digest"

    def _range(self, start: int, stop: int) -> Any:
        if self._whole is not None:
            return memoryview(self._whole)[start:stop]
        at = self._ref.stored_size - len(self._tail)
        if self._ref.codec and self._tail and start >= at:
            return memoryview(self._tail)[start - at : stop - at]
        data = self._call(f"read {self._name}", lambda wire, seconds: wire.get(self._name, start, stop, seconds))
        view = memoryview(data).cast("B")
        if view.nbytes > stop - start:
            self._whole = view  # the server ignored the range
            return view[start:stop]
        return view

    def _read_table(self) -> None:
        """Read the end of a packed blob, and where its frames lie."""
        ref = self._ref
        if not ref.stored_size:
            head = self._call(f"look at {self._name}", lambda wire, seconds: wire.head(self._name, seconds))
            ref = self._ref = msgspec.structs.replace(ref, stored_size=head.size)
        room = 17 + 8 * len(self._sizes)
        start = max(0, ref.stored_size - max(room, _packing.TABLE_BYTES // 16))
        tail = bytes(self._range(start, ref.stored_size + 1))
        if self._whole is not None:
            tail = bytes(memoryview(self._whole)[start:])
        if len(tail) != ref.stored_size - start:
            raise self._wrong_size()
        try:
            self._frames = _packing.frames_of(tail, ref.stored_size, ref.size)
        except _packing.PackedError as error:
            raise IntegrityError(f"{self._name} in {self._url} {error}.", name=self._name, reason="digest") from error
        self._tail = tail

    def _land_empty(self) -> None:
        head = self._call(f"look at {self._name}", lambda wire, seconds: wire.head(self._name, seconds))
        if head.size:
            raise truncated(self._ref, head.size, self._url)
        verify_view(self._ref, memoryview(b""), self._url)

    def _wrong_size(self) -> IntegrityError:
        try:
            head = self._call(f"look at {self._name}", lambda wire, seconds: wire.head(self._name, seconds))
        except RequestError as error:
            if error.fault is Fault.MISSING:
                return missing(self._ref, self._url)
            raise
        expected = self._ref.stored_size or self._ref.size
        if head.size == expected:
            return IntegrityError(
                f"{self._name} in {self._url} has the right size, {expected} bytes, and answers with fewer.",
                name=self._name,
                reason="truncated",
            )
        return IntegrityError(
            f"{self._name} in {self._url} has {head.size} bytes, its manifest says {expected}.",
            name=self._name,
            reason="truncated",
        )

    def _wrong_digest(self, number: int) -> IntegrityError:
        return IntegrityError(
            f"{self._name} in {self._url} is damaged: chunk {number} of {len(self._sizes)} has another digest than "
            "its manifest says.",
            name=self._name,
            reason="digest",
        )
