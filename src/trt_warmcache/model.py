"""A model and its identity: content, wherever it lies and whatever it is called."""

from __future__ import annotations

import errno
import functools
import os
import posixpath
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import blake3

from trt_warmcache._fields import printable, user_path
from trt_warmcache._hashing import hash_threads
from trt_warmcache.errors import ConfigError, ModelError
from trt_warmcache.memo import DigestMemo
from trt_warmcache.onnx_graph import FileView, ModelSummary, TensorInfo, summarize, summary_from_json, summary_to_json
from trt_warmcache.onnx_structure import structure

__all__ = ["ModelSource", "ModelSummary", "TensorInfo", "file_digest"]

#: Separates model digests from any other use of blake3, and names the recipe below.
_DOMAIN = b"trt_warmcache model 1\0"

#: Bytes read at a time: enough for every core to hash a share, little enough to stay in a processor's cache.
_READ_BYTES = 4 * 1024 * 1024

#: A protocol buffer cannot be larger; a graph file that is, is no model.
_LARGEST_GRAPH = 2**31 - 1


@dataclass(frozen=True)
class _File:
    """A file that belongs to the model, and how it was found at hash time."""

    path: str
    size: int
    digest: str
    status: os.stat_result | None = None


@dataclass(frozen=True)
class _SideFile:
    """A file of external data that a graph names.

    Attributes:
        location: Where it lies, from the graph's folder.
        needed: Bytes it must have.
        tensor: The tensor that needs them.
    """

    location: str
    needed: int
    tensor: str

    def check_length(self, size: int) -> None:
        if size < self.needed:
            raise ModelError(
                f"Tensor {self.tensor!r} needs {self.needed} bytes of the side file {self.location!r}, which has {size}; the copy is not complete."
            )


@dataclass(frozen=True)
class _Facts:
    """What a graph file's bytes say; it holds for as long as they do not change."""

    digest: str
    summary: ModelSummary
    sides: tuple[_SideFile, ...]


class ModelSource:
    """A model, hashed. Make one with :meth:`open`.

    Attributes:
        digest: ``blake3:`` and 64 hex digits over the graph file and every side file it names. Folder, file name and
            time stamps do not count.
        summary: What the graph says of itself.
        stem: File name without extension; ``"model"`` where there is none.
        local_path: Where the graph file lies on this machine, as requested; None for bytes and remote models.
        total_bytes: Size of the graph with all side files.
    """

    def __init__(
        self,
        *,
        stem: str,
        summary: ModelSummary,
        graph: _File,
        sides: dict[str, _File],
        read: Callable[[], bytes],
        local_path: Path | None = None,
        fetch: Callable[[str, Path], None] | None = None,
    ) -> None:
        self.stem = printable(stem)
        self.summary = summary
        self.local_path = local_path
        self.digest = _combine(graph, sides)
        self.total_bytes = graph.size + sum(side.size for side in sides.values())
        self._graph = graph
        self._sides = sides
        self._read = read
        self._fetch = fetch

    @classmethod
    def open(cls, model: Any, *, memo: DigestMemo) -> ModelSource:
        """Read what is needed of a model and take its digest.

        Args:
            model: A path, an fsspec URL, the bytes of an ONNX file, or a ``ModelProto``.
            memo: Remembers digests of unchanged files.

        Raises:
            ModelError: It cannot be read, is no ONNX model, or a side file is missing, too short, or outside the
                model's folder.
            ConfigError: `model` is none of the above.
        """
        if isinstance(model, (bytes, bytearray, memoryview)):
            return _from_bytes(bytes(model))
        if hasattr(model, "SerializeToString"):
            return _from_proto(model)
        if isinstance(model, str) and "://" in model and not model.startswith("file://"):
            return _from_url(model)
        if isinstance(model, (str, os.PathLike)):
            text = os.fspath(model)
            if isinstance(text, str) and text:
                return _from_path(_absolute_path(text) if text.startswith("/") else _relative_path(text), memo)
        raise ConfigError(f"model must be a path, a URL, bytes or an onnx.ModelProto, not {type(model).__name__}.")

    def read(self) -> bytes:
        """The graph file's bytes: the very ones that were hashed.

        Raises:
            ModelError: The file changed since.
        """
        data = self._read()
        if blake3.blake3(data, max_threads=hash_threads(len(data))).hexdigest() != self._graph.digest:
            raise _changed(self._graph.path)
        return data

    def verify_unchanged(self) -> None:
        """Make sure that every local file is still the one that was hashed.

        Raises:
            ModelError: One is not; the message names it.
        """
        for file in (self._graph, *self._sides.values()):
            if file.status is None:
                continue
            path = Path(file.path)
            try:
                if _identity(path.stat()) == _identity(file.status):
                    continue
                # A link made to it, or its permissions, may be all that changed; only its bytes matter.
                same = _hash_local(path).digest == file.digest
            except OSError as error:
                raise _changed(file.path) from error
            if not same:
                raise _changed(file.path)

    @cached_property
    def graph_digest(self) -> str:
        """``graph:`` and 64 hex digits over everything but the weights' values; see :mod:`trt_warmcache.onnx_structure`.

        Models that differ in their weights only share it. Weights that cannot be exchanged in an engine count.
        """
        if self.local_path is not None:
            with _readable(self.local_path), self.local_path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                if self._graph.status is not None and _identity(status) != _identity(self._graph.status):
                    raise _changed(str(self.local_path))
                found = structure(FileView(file.fileno(), status.st_size))
        else:
            found = structure(self.read())
        # Side files with anything but weights count as a whole.
        sides = {
            name: side for name, side in self._sides.items() if name in set(map(posixpath.normpath, found.locations))
        }
        graph = _File("", 0, found.digest)
        return "graph:" + _combine(graph, sides).partition(":")[2]

    def stage(self, folder: Path) -> Path:
        """Put graph and side files into a folder of this machine, for parsers that cannot reach or spell theirs.

        Returns:
            The graph file's path in there.
        """
        path = folder / "model.onnx"
        path.write_bytes(self.read())
        for location, side in self._sides.items():
            target = folder / location
            target.parent.mkdir(parents=True, exist_ok=True)
            if self._fetch is not None:
                self._fetch(location, target)
                if _hash_local(target).digest != side.digest:
                    raise _changed(side.path)
            else:
                _link_or_copy(Path(side.path), target)
        return path


def file_digest(path: Path, memo: DigestMemo) -> str:
    """``blake3:`` digest of a file that is not a model, such as a plugin library.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return "blake3:" + _hash_memoized(str(path), memo).digest
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror or error}.") from error


def _combine(graph: _File, sides: dict[str, _File]) -> str:
    parts = [(location, side.size, side.digest) for location, side in sorted(sides.items())]
    return _combined(graph.size, graph.digest, tuple(parts))


@functools.lru_cache(maxsize=256)
def _combined(size: int, digest: str, sides: tuple[tuple[str, int, str], ...]) -> str:
    lines = [f"graph {size} {digest}\n".encode()]
    # The location is part of the graph's bytes already; it is repeated here to bind each digest to its name.
    lines += [
        f"{len(location.encode())} ".encode() + location.encode() + f" {size} {digest}\n".encode()
        for location, size, digest in sides
    ]
    return "blake3:" + blake3.blake3(_DOMAIN + b"".join(lines)).hexdigest()


# ---- the four kinds of model ------------------------------------------------------------------------------------


def _from_bytes(data: bytes) -> ModelSource:
    summary = summarize(data)
    if summary.external:
        first = summary.external[0]
        raise ModelError(
            f"This model keeps {first.tensor!r} in a side file ({first.location!r}), which bytes do not say where to find; pass its path instead."
        )
    digest = blake3.blake3(data, max_threads=hash_threads(len(data))).hexdigest()
    return ModelSource(
        stem="model", summary=summary, graph=_File("the model", len(data), digest), sides={}, read=lambda: data
    )


def _from_proto(model: Any) -> ModelSource:
    try:
        data = model.SerializeToString(deterministic=True)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ModelError(
            f"This ModelProto cannot be serialized ({error}). Above 2 GB, save it with external data (onnx.save_model(..., save_as_external_data=True)) and pass the path."
        ) from error
    except Exception as error:
        # protobuf's EncodeError derives from Exception directly, and protobuf is not imported here to name it
        if type(error).__name__ != "EncodeError":
            raise
        raise ModelError(
            f"This ModelProto cannot be serialized ({error}). Above 2 GB, save it with external data (onnx.save_model(..., save_as_external_data=True)) and pass the path."
        ) from error
    return _from_bytes(data)


def _from_file_url(url: str) -> Path:
    """The path of a ``file://`` URL, as fsspec spells it (plain) or as ``Path.as_uri`` does (percent-encoded)."""
    from urllib.parse import unquote

    plain = url.removeprefix("file://").removeprefix("localhost")
    path = user_path(plain)
    return path if os.path.lexists(path) else user_path(unquote(plain))


@functools.lru_cache(maxsize=256)
def _absolute_path(text: str) -> Path:
    """The path of an absolute text; a service names the same model at every request."""
    return Path(text)


def _relative_path(text: str) -> Path:
    return (_from_file_url(text) if text.startswith("file://") else user_path(text)).absolute()


def _from_path(path: Path, memo: DigestMemo) -> ModelSource:
    with _readable(path):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(
                f"{path} is a {'folder' if stat.S_ISDIR(status.st_mode) else 'special file'}, not an ONNX file."
            )
        graph, facts = _graph(path, status, memo)
    sides = {need.location: _side(path, need, memo) for need in facts.sides}
    return ModelSource(
        stem=path.stem, summary=facts.summary, graph=graph, sides=sides, read=lambda: _read_all(path), local_path=path
    )


def _graph(path: Path, status: os.stat_result, memo: DigestMemo) -> tuple[_File, _Facts]:
    known = memo.get(path, status, decode=_read_facts)
    if known is not None:
        return _File(str(path), status.st_size, known.digest, status), known
    started = memo.clock()
    with path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if status.st_size > _LARGEST_GRAPH:
            raise ModelError(
                f"{path} is {status.st_size} bytes long; an ONNX graph file cannot exceed 2 GB. Save the model with external data."
            )
        digest = _hash(file)
        summary = summarize(FileView(file.fileno(), status.st_size))
        if _identity(os.fstat(file.fileno())) != _identity(status):
            raise _changed(str(path))
    memo.put(path, status, {"digest": digest, "summary": summary_to_json(summary)}, started)
    return _File(str(path), status.st_size, digest, status), _Facts(digest, summary, _side_files(summary))


def _read_facts(value: Any) -> _Facts | None:
    """Facts of a graph file, from what a memo kept; None if it kept something else."""
    if not isinstance(value, dict) or not isinstance(value.get("digest"), str):
        return None
    summary = summary_from_json(value.get("summary"))
    return None if summary is None else _Facts(value["digest"], summary, _side_files(summary))


def _side(model: Path, need: _SideFile, memo: DigestMemo) -> _File:
    # As seen from the requested path: two links to one graph file may stand beside different side files.
    path = f"{model.parent}/{need.location}"
    try:
        side = _hash_memoized(path, memo)
    except OSError as error:
        raise ModelError(
            f"Tensor {need.tensor!r} of {model.name} is kept in {need.location!r}, which cannot be read beside it: {error.strerror or error} ({path})."
        ) from error
    need.check_length(side.size)
    return side


def _from_url(url: str) -> ModelSource:
    import fsspec

    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"Cannot open {_without_secrets(url)}: {error}") from error
    with _readable(_without_secrets(url)):
        data: bytes = file_system.cat_file(path)
    summary = summarize(data)
    digest = blake3.blake3(data, max_threads=hash_threads(len(data))).hexdigest()
    parent = posixpath.dirname(path)
    sides = {}
    for need in _side_files(summary):
        remote = f"{parent}/{need.location}"
        try:
            with file_system.open(remote, "rb") as file:
                hashed = _hash(file)
                size = file.tell()
        except OSError as error:
            raise ModelError(
                f"Tensor {need.tensor!r} is kept in {need.location!r}, which cannot be read beside the model: {error}"
            ) from error
        need.check_length(size)
        sides[need.location] = _File(remote, size, hashed)
    return ModelSource(
        stem=Path(posixpath.basename(path)).stem or "model",
        summary=summary,
        graph=_File(_without_secrets(url), len(data), digest),
        sides=sides,
        read=lambda: data,
        fetch=lambda location, target: file_system.get_file(f"{parent}/{location}", str(target)),
    )


# ---- side files -------------------------------------------------------------------------------------------------


def _side_files(summary: ModelSummary) -> tuple[_SideFile, ...]:
    """Each side file once, with the tensor that needs most of it, by location.

    Raises:
        ModelError: One lies outside the model's folder.
    """
    spelled: dict[str, tuple[int, str]] = {}
    for tensor in summary.external:
        needed = tensor.offset + tensor.nbytes
        if tensor.location not in spelled or needed > spelled[tensor.location][0]:
            spelled[tensor.location] = (needed, tensor.tensor)
    # Thousands of tensors share a file or two, so each spelling is checked once; two spellings may mean one file.
    needs: dict[str, tuple[int, str]] = {}
    for location, need in spelled.items():
        plain = _safe_location(location, need[1])
        needs[plain] = max(need, needs.get(plain, need))
    return tuple(_SideFile(location, *need) for location, need in sorted(needs.items()))


def _safe_location(location: str, tensor: str) -> str:
    """The location, made plain; it comes from inside the model, so it must not lead out of the model's folder."""
    plain = posixpath.normpath(location) if location else ""
    escapes = (
        not plain
        or "\0" in location
        or plain.startswith("/")
        or plain in {".", ".."}
        or ".." in re.split(r"[/\\]", location)
        or location.startswith("\\")
        or re.match(r"[A-Za-z]:", location)
    )
    if escapes:
        raise ModelError(
            f"Tensor {tensor!r} names the side file {location!r}, which is not inside the model's folder; it is not opened. Save the model again with its data beside it."
        )
    return plain


# ---- reading ----------------------------------------------------------------------------------------------------


@contextmanager
def _readable(what: object) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ModelError(f"There is no model at {what}.") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ModelError(f"Cannot read the model {what}: {getattr(error, 'strerror', None) or error}.") from error


def _hash_memoized(path: str, memo: DigestMemo) -> _File:
    status = os.stat(path)  # noqa: PTH116  text: every hit comes along here, and paths are slow to make
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")  # reading a pipe or device could go on for ever
    known = memo.get(path, status)
    if isinstance(known, str):
        return _File(path, status.st_size, known, status)
    started = memo.clock()
    file = _hash_local(Path(path))
    assert file.status is not None
    memo.put(path, file.status, file.digest, started)
    return file


def _hash_local(path: Path) -> _File:
    with path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        digest = _hash(file)
        if _identity(os.fstat(file.fileno())) != _identity(status):
            raise _changed(str(path))
    return _File(str(path), status.st_size, digest, status)


def _hash(file: Any) -> str:
    """Hex digest of an open file. Read, not mapped: a file cut short meanwhile must not kill the process."""
    hasher = blake3.blake3(max_threads=hash_threads())
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    while count := file.readinto(view):
        hasher.update(view[:count])
    return hasher.hexdigest()


def _read_all(path: Path) -> bytes:
    with _readable(path):
        return path.read_bytes()


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.symlink_to(source.absolute())
    except OSError:
        shutil.copyfile(source, target)


def _identity(status: os.stat_result) -> tuple[int, int, int, int, int]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _changed(path: str) -> ModelError:
    return ModelError(f"{path} changed while it was in use. Ask again once it is complete.")


def _without_secrets(url: str) -> str:
    """The URL without user, password and query, which may carry credentials."""
    return re.sub(r"//[^/@]*@", "//", url.partition("?")[0])
