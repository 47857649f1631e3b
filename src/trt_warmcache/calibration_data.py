"""What INT8 calibration is fed with: data in many forms, checked against the model and fingerprinted.

Two passes over the data are the rule: the first computes the fingerprint that the table is looked up by, the second
runs only on a miss, hashes again, and thereby proves that the data is the same every time. Batches are held one at a
time, so the size of a data set does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trt_warmcache._fields import strict_fields, to_enum
from trt_warmcache._words import Word
from trt_warmcache.calibration_batches import Batch, BatchHasher, InputSpec, check_batch, framed, load_arrays
from trt_warmcache.calibration_files import read_table
from trt_warmcache.calibration_table import CalibrationTable
from trt_warmcache.errors import ConfigError, MissError

if TYPE_CHECKING:
    import os


__all__ = ["QDQ_RECIPE", "Calibration", "CalibrationAlgorithm", "CalibrationRunner", "QdqOptions"]


QDQ_RECIPE: Final = 1
"""Goes up whenever the same table and options would give another Q/DQ model. The version of ONNX Runtime does not
count: engines must be found again on machines that have none."""

_ARRAY_FILES: Final = frozenset({".npy", ".npz"})
_AGAIN: Final = (
    "Calibration data must be the same on every pass: switch off shuffling and random augmentation, fix seeds inside "
    "the factory, or give fingerprint='...' to vouch for it yourself."
)


class CalibrationAlgorithm(Word):
    """How a tensor's range is chosen."""

    ENTROPY = "entropy"
    """The clipping that keeps most information (Kullback-Leibler divergence), TensorRT's preferred one."""
    MINMAX = "minmax"
    """The largest magnitude seen; nothing is clipped."""
    PERCENTILE = "percentile"
    """Clips the largest magnitudes; see :attr:`Calibration.percentile`. Not known to TensorRT's own calibrators."""

    @property
    def header(self) -> str:
        """What a table's first line calls it. TensorRT has no percentile; its tables read as entropy ones."""
        return "MinMaxCalibration" if self is CalibrationAlgorithm.MINMAX else "EntropyCalibration2"

    @classmethod
    def of_header(cls, name: str) -> CalibrationAlgorithm:
        """The algorithm that a table's first line calls so."""
        return cls.MINMAX if name == cls.MINMAX.header else cls.ENTROPY


class CalibrationRunner(Word):
    """What runs the model over the data."""

    ONNXRUNTIME = "onnxruntime"
    """ONNX Runtime on the CPU: the same everywhere, without a GPU, also while no TensorRT is installed."""
    TENSORRT = "tensorrt"
    """TensorRT's own calibrators, 8.6 to 10.16, on the GPU and as part of a build. It names fused tensors as that
    version fuses them."""


@strict_fields
@dataclass(frozen=True)
class QdqOptions:
    """How a table becomes Q/DQ nodes, where TensorRT has no calibrators. Part of the engine's key.

    Args:
        op_types: Operators to quantize; None for Conv, ConvTranspose, Gemm and MatMul with constant weights.
        nodes_exclude: Names of nodes that stay in floating point.
        per_channel_weights: A scale per output channel rather than one for the whole weight.
        min_channels: Nodes with fewer input channels per group, or output channels, stay in floating point.

    Raises:
        ConfigError: A value that cannot be meant.
    """

    op_types: tuple[str, ...] | None = None
    nodes_exclude: tuple[str, ...] = ()
    per_channel_weights: bool = True
    min_channels: int = 17

    def __post_init__(self) -> None:
        for attribute in ("op_types", "nodes_exclude"):
            names = getattr(self, attribute)
            if isinstance(names, str) or (names is not None and not all(isinstance(name, str) for name in names)):
                raise ConfigError(f"{attribute} is a collection of names, not {names!r}.")
            # order and repetition mean nothing, so they must not make another key
            object.__setattr__(self, attribute, None if names is None else tuple(sorted(set(names))))
        if type(self.min_channels) is not int or self.min_channels < 1:
            raise ConfigError(f"min_channels must be a positive whole number, not {self.min_channels!r}.")
        if type(self.per_channel_weights) is not bool:
            raise ConfigError(f"per_channel_weights must be True or False, not {self.per_channel_weights!r}.")

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON values, with the version of the procedure itself."""
        return {
            "recipe": QDQ_RECIPE,
            "op_types": None if self.op_types is None else list(self.op_types),
            "nodes_exclude": list(self.nodes_exclude),
            "per_channel_weights": self.per_channel_weights,
            "min_channels": self.min_channels,
        }


@strict_fields
@dataclass(frozen=True, eq=False)
class Calibration:
    """INT8 calibration of a request: the data, or what stands for it.

    Args:
        data: One of: an iterable of batches that can be walked more than once; a function without arguments that
            returns such an iterable (for generators); a folder of ``.npy``/``.npz`` files or of anything `loader`
            reads; a torch ``DataLoader`` without shuffling. A batch maps input names to arrays; a bare array does for
            a model of one input, a sequence of arrays for several in the model's order. None to use only what is
            stored already.
        algorithm: ``"entropy"``, ``"minmax"`` or ``"percentile"``.
        batches: Use this many batches from the front, and refuse data that has fewer; None for all.
        fingerprint: The caller's own name for data and order, instead of one computed from the bytes. With it the
            data is read only when a table must be made, and may be left out where one is stored.
        preprocess: The caller's own version of what happens between files and batches; part of the key. Change it
            whenever `loader` or the pipeline behind `data` changes. Left out, the name of `loader` stands in for it.
        table: A finished table, or the path of one; then nothing is calibrated and no data is needed.
        loader: For folders: makes one batch of one file. Files are taken in the order of their names.
        version: For folders: the caller's version of the files. The fingerprint is then made of names, sizes and this
            rather than of the files' bytes.
        percentile: Share of the magnitudes that is kept, in percent, for ``"percentile"``.
        runner: ``"onnxruntime"`` or ``"tensorrt"``; part of the key.
        providers: ONNX Runtime's execution providers in order of preference, such as ``("CUDAExecutionProvider",)``, which
            needs the package onnxruntime-gpu; CPU if left out. Not part of the key: ranges differ by rounding only.
        qdq: How the table becomes Q/DQ nodes, for TensorRT 11 and TensorRT-RTX. Not part of the table's key.

    Raises:
        ConfigError: Anything that cannot be meant, or data that can be walked only once.
    """

    data: Any = field(default=None, repr=False)
    algorithm: CalibrationAlgorithm | str = CalibrationAlgorithm.ENTROPY
    batches: int | None = None
    fingerprint: str | None = None
    preprocess: str | None = None
    table: CalibrationTable | str | os.PathLike[str] | None = None
    loader: Callable[[Path], Any] | None = None
    version: str | None = None
    percentile: float = 99.99
    runner: CalibrationRunner | str = CalibrationRunner.ONNXRUNTIME
    providers: Sequence[str] = ("CPUExecutionProvider",)
    qdq: QdqOptions = QdqOptions()
    _walked: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", to_enum(CalibrationAlgorithm, self.algorithm, "algorithm"))
        object.__setattr__(self, "runner", to_enum(CalibrationRunner, self.runner, "runner"))
        if self.runner is CalibrationRunner.TENSORRT and self.algorithm is CalibrationAlgorithm.PERCENTILE:
            raise ConfigError("TensorRT's own calibrators know no percentile: runner='onnxruntime' does.")
        if self.batches is not None and (type(self.batches) is not int or self.batches < 1):
            raise ConfigError(f"batches must be a positive whole number or None for all, not {self.batches!r}.")
        share: object = self.percentile
        if not isinstance(share, (int, float)) or not 50 < share <= 100:
            raise ConfigError(f"percentile must lie above 50 and at most at 100, not {self.percentile!r}.")
        for name in ("fingerprint", "preprocess", "version"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                hint = " Do the preprocessing in loader or data." if callable(value) else ""
                raise ConfigError(f"{name} is a text of your choice that changes when what it stands for does.{hint}")
        if isinstance(self.providers, str) or not self.providers or not all(isinstance(p, str) for p in self.providers):
            raise ConfigError(
                f"providers is a sequence of names such as CUDAExecutionProvider, not {self.providers!r}."
            )
        object.__setattr__(self, "providers", tuple(self.providers))
        if not isinstance(self.qdq, QdqOptions):
            raise ConfigError(f"qdq must be QdqOptions, not {self.qdq!r}.")
        if self.table is not None and (self.data is not None or self.fingerprint is not None):
            raise ConfigError("Give either a finished table or data (or its fingerprint), not both.")
        if self.table is None and self.data is None and self.fingerprint is None:
            raise ConfigError("Calibration needs data, the fingerprint of data calibrated earlier, or a table.")
        if (self.loader is not None or self.version is not None) and not self._is_folder:
            raise ConfigError("loader and version belong to a folder; give its path as data.")
        if self.data is not None:
            self._check_source()

    @property
    def _is_folder(self) -> bool:
        return isinstance(self.data, (str, Path)) or hasattr(self.data, "__fspath__")

    def _check_source(self) -> None:
        if self._is_folder:
            return
        if isinstance(self.data, (Mapping, bytes)) or not (callable(self.data) or hasattr(self.data, "__iter__")):
            raise ConfigError(
                "data must be an iterable of batches, a function returning one, a folder or a DataLoader, "
                f"not {type(self.data).__name__}. For a single batch, write [batch]."
            )
        if isinstance(self.data, Iterator) and self.fingerprint is None:
            raise ConfigError(
                "data is a one-shot iterator, but it is walked twice: to name it and to calibrate. Pass a function "
                "that makes it anew (data=lambda: batches()), or give fingerprint='...'."
            )
        if type(getattr(self.data, "sampler", None)).__name__ == "RandomSampler" and self.fingerprint is None:
            raise ConfigError(f"The DataLoader shuffles. {_AGAIN}")

    @property
    def computes_fingerprint(self) -> bool:
        """Whether the fingerprint comes from the batches' bytes, so that finding it means walking the data."""
        return self.fingerprint is None and self.table is None and not self._is_folder

    @property
    def expected_batches(self) -> int | None:
        """How many batches there will be, for showing progress; None where only walking the data would tell."""
        if self._is_folder:
            return len(self.files())
        try:
            known = len(self.data)
        except TypeError:  # has none, or is a DataLoader over a stream, whose __len__ raises
            known = None
        return min((count for count in (known, self.batches) if count is not None), default=None)

    def load_table(self) -> CalibrationTable | None:
        """The table given, read if it was given as a path; None when there is none."""
        return self.table if self.table is None or isinstance(self.table, CalibrationTable) else read_table(self.table)

    def key_parts(self, data_fingerprint: str) -> dict[str, Any]:
        """What a table's key is made of besides the model; `data_fingerprint` is :meth:`find_fingerprint`'s."""
        algorithm = str(self.algorithm)
        if self.algorithm is CalibrationAlgorithm.PERCENTILE:
            algorithm += f":{float(self.percentile)!r}"
        parts = {
            "data": data_fingerprint,
            "algorithm": algorithm,
            "batches": self.batches,
            "preprocess": self.preprocess or self._loader_tag,
        }
        # A table that is given was made by whoever made it.
        other = self.runner is not CalibrationRunner.ONNXRUNTIME and self.table is None
        return {**parts, "runner": str(self.runner)} if other else parts

    @property
    def _loader_tag(self) -> str | None:
        """What stands for the preprocessing where files are fingerprinted and nothing was said of their loader."""
        if self.loader is None or self.fingerprint is not None:
            return None
        return f"loader:{getattr(self.loader, '__qualname__', type(self.loader).__qualname__)}"

    def find_fingerprint(
        self,
        inputs: Sequence[InputSpec],
        *,
        digest_file: Callable[[Path], str] | None = None,
        checkpoint: Callable[[], None] = lambda: None,
    ) -> str:
        """The fingerprint of data and order.

        A given one is returned as it is, without touching the data. For a folder it is made of the files, without
        loading any (so numpy is not needed); otherwise of every batch's bytes, checked against the model on the way.

        Args:
            inputs: The model's inputs.
            digest_file: Hex digest of a file's bytes; hand in one that remembers. BLAKE3 by default.
            checkpoint: Called after each batch that is read; what it raises ends the pass.

        Raises:
            ConfigError: Data that does not fit the model, or none at all.
        """
        if self.fingerprint is not None:
            return f"given:{self.fingerprint}"
        table = self.load_table()
        if table is not None:
            return f"table:{table.digest}"
        if self._is_folder:
            return self._fingerprint_files(digest_file or _digest_file)
        hasher = BatchHasher()
        for batch in self.feed(inputs):
            hasher.update(batch)
            checkpoint()
        return hasher.fingerprint

    def check(self, inputs: Sequence[InputSpec]) -> None:
        """Look at the first batch of a folder, so that data for another model fails before any work is done.

        Other data is left alone: taking its fingerprint has checked all of it, or the caller vouches for it.

        Raises:
            ConfigError: It does not fit, or the loader makes another batch each time.
        """
        if self._is_folder:
            next(self.feed(inputs), None)

    def feed(self, inputs: Sequence[InputSpec], *, expected: str | None = None) -> Iterator[Batch]:
        """Walk the batches, each checked against the model.

        Args:
            inputs: The model's inputs.
            expected: What :meth:`find_fingerprint` returned earlier. Data fingerprinted by its bytes is hashed again
                and must agree at the end; only use what was made of the batches when this iterator ends normally.

        Raises:
            ConfigError: A batch that does not fit, no batch at all, or data that changed since `expected`.
            MissError: There is no data to calibrate with, only a fingerprint.
        """
        if self.data is None:
            raise MissError(
                "No calibration table is stored for this model and fingerprint, and the request has no data to make "
                "one. Pass Calibration(data=..., fingerprint=...) once where the data is, or import the table."
            )
        if isinstance(self.data, Iterator):
            if self._walked:
                # what is left of it would go into the store as if it were all
                raise ConfigError(
                    "data is a one-shot iterator, and an earlier run has used it. Pass a new one, or a function that "
                    "makes it anew (data=lambda: batches())."
                )
            object.__setattr__(self, "_walked", True)
        hasher = BatchHasher() if expected is not None and self.computes_fingerprint else None
        number = 0
        for number, raw in enumerate(islice(self._source(inputs), self.batches), start=1):
            batch = check_batch(raw, inputs, number)
            if hasher is not None:
                hasher.update(batch)
            yield batch
        if hasher is not None and hasher.fingerprint != expected:
            raise ConfigError(f"The calibration data changed between two passes (now {number} batches). {_AGAIN}")
        if not number:
            raise ConfigError(
                "The calibration data holds no batch. Check the folder, or that the iterable is not used up."
            )
        self._check_count(number)

    def check_unchanged(self, expected: str, *, digest_file: Callable[[Path], str] | None = None) -> None:
        """Look at the files of a folder again, after they were read; batches are compared by :meth:`feed`.

        Args:
            expected: What :meth:`find_fingerprint` returned before.
            digest_file: As there.

        Raises:
            ConfigError: They are not what was fingerprinted.
        """
        if (
            self._is_folder
            and self.fingerprint is None
            and self._fingerprint_files(digest_file or _digest_file) != expected
        ):
            raise ConfigError(
                f"Files in {self.data} changed during the calibration. Calibrate again when it is at rest."
            )

    def _check_count(self, found: int) -> None:
        if self.batches is not None and found < self.batches:
            raise ConfigError(
                f"The calibration data holds {found} batches, and batches={self.batches} asks for more. Give more data, "
                "or leave batches out to use all there is."
            )

    def files(self) -> list[Path]:
        """The files of a folder, in the order they are used.

        Raises:
            ConfigError: No such folder, or nothing usable or too little in it.
        """
        root = Path(self.data).expanduser()
        if not root.is_dir():
            raise ConfigError(f"The calibration folder {root} does not exist or is no folder.")
        found = [
            path
            for path in root.rglob("*")
            if path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(root).parts)
            and (self.loader is not None or path.suffix.lower() in _ARRAY_FILES)
        ]
        if not found:
            what = "files" if self.loader is not None else ".npy or .npz files; for other kinds pass a loader"
            raise ConfigError(f"The calibration folder {root} holds no {what}.")
        self._check_count(len(found))
        return sorted(found, key=lambda path: path.relative_to(root).as_posix())[: self.batches]

    def _fingerprint_files(self, digest_file: Callable[[Path], str]) -> str:
        from blake3 import blake3

        root = Path(self.data).expanduser()
        hasher = blake3()
        for path in self.files():
            content = f"version:{self.version}" if self.version is not None else digest_file(path)
            for part in (path.relative_to(root).as_posix(), str(path.stat().st_size), content):
                hasher.update(framed(part.encode("utf-8", "surrogateescape")))
        return f"files:{hasher.hexdigest()}"

    def _source(self, inputs: Sequence[InputSpec]) -> Iterable[Any]:
        if self._is_folder:
            return self._load_files(inputs)
        # a DataLoader is an iterable that is not callable; a class with both is taken as an iterable
        return self.data if hasattr(self.data, "__iter__") else self._call_factory()

    def _call_factory(self) -> Iterable[Any]:
        made = self.data()
        if not hasattr(made, "__iter__"):
            raise ConfigError(f"The function given as data returned {type(made).__name__}, not an iterable of batches.")
        return made  # type: ignore[no-any-return]

    def _load_files(self, inputs: Sequence[InputSpec]) -> Iterator[Any]:
        load = self.loader or load_arrays
        for position, path in enumerate(self.files()):
            try:
                batch = load(path)
            except Exception as error:
                if hasattr(error, "add_note"):  # from Python 3.11 on
                    error.add_note(f"while making a calibration batch of {path}")
                raise
            # Files are fingerprinted without the loader, so nothing else would notice a random one. The first file and
            # ever fewer of the others are loaded twice, because a flip of a coin may spare one.
            sampled = position & (position + 1) == 0
            if sampled and self.loader is not None and self.fingerprint is None:
                pair = [BatchHasher(), BatchHasher()]
                pair[0].update(check_batch(batch, inputs, position + 1))
                pair[1].update(check_batch(load(path), inputs, position + 1))
                if pair[0].fingerprint != pair[1].fingerprint:
                    raise ConfigError(f"The loader made two different batches of {path}. {_AGAIN}")
            yield batch


def _digest_file(path: Path) -> str:
    from blake3 import blake3

    return blake3().update_mmap(path).hexdigest()
