"""What calibration may be fed with, how it is checked, and what its fingerprint depends on."""

from __future__ import annotations

import sys
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from trt_warmcache.calibration_batches import InputSpec
from trt_warmcache.calibration_data import Calibration, CalibrationAlgorithm
from trt_warmcache.calibration_table import CalibrationTable
from trt_warmcache.errors import ConfigError, MissError, UnknownFieldError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

X = InputSpec("x", "float32", ("n", 3, 4))
MASK = InputSpec("mask", "int64", (None, 4))


def batch(seed: int, size: int = 2) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).normal(size=(size, 3, 4)).astype(np.float32)}


def batches(*seeds: int) -> list[dict[str, Any]]:
    return [batch(seed) for seed in seeds]


def fingerprint(data: Any, inputs: tuple[InputSpec, ...] = (X,), **fields: Any) -> str:
    return Calibration(data=data, **fields).find_fingerprint(inputs)


class FakeTensor:
    """A torch tensor as far as calibration sees one: numpy() works only detached and on the CPU."""

    def __init__(self, array: Any, *, on_gpu: bool = True, in_graph: bool = True) -> None:
        self._array, self._on_gpu, self._in_graph = array, on_gpu, in_graph

    def detach(self) -> FakeTensor:
        return FakeTensor(self._array, on_gpu=self._on_gpu, in_graph=False)

    def cpu(self) -> FakeTensor:
        return FakeTensor(self._array, on_gpu=False, in_graph=self._in_graph)

    def numpy(self) -> Any:
        if self._in_graph:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        if self._on_gpu:
            raise TypeError("can't convert cuda:0 device type tensor to numpy.")
        return self._array

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()


class SequentialSampler:
    def __init__(self, source: list[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.source)))


class RandomSampler(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(len(self.source)).tolist())


class DataLoader:
    """torch's DataLoader in small: sampler, batches by stacking, a list of fields per batch for tuple samples."""

    def __init__(self, dataset: list[Any], batch_size: int = 2, *, shuffle: bool = False) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.sampler = RandomSampler(dataset) if shuffle else SequentialSampler(dataset)

    def __len__(self) -> int:
        return (len(self.dataset) + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        order = list(self.sampler)
        for start in range(0, len(order), self.batch_size):
            yield self._collate([self.dataset[index] for index in order[start : start + self.batch_size]])

    def _collate(self, samples: list[Any]) -> Any:
        if isinstance(samples[0], dict):
            return {key: FakeTensor(np.stack([sample[key] for sample in samples])) for key in samples[0]}
        if isinstance(samples[0], tuple):
            return [FakeTensor(np.stack(field)) for field in zip(*samples, strict=True)]
        return FakeTensor(np.stack(samples))


class TestFields:
    def test_unknown_field_names_the_nearest(self) -> None:
        """A slip of the pen is a TypeError and a ConfigError that names the right field."""
        with pytest.raises(UnknownFieldError, match="did you mean 'algorithm'"):
            Calibration(data=batches(1), algoritm="minmax")  # type: ignore[call-arg]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({}, "needs data"),
            ({"data": [], "algorithm": "kl"}, "'entropy', 'minmax', 'percentile'"),
            ({"data": [], "batches": 0}, "batches"),
            ({"data": [], "batches": True}, "batches"),
            ({"data": [], "batches": 2.0}, "batches"),
            ({"data": [], "percentile": 0}, "percentile"),
            ({"data": [], "percentile": 101}, "percentile"),
            ({"data": [], "percentile": "99"}, "percentile"),
            ({"data": [], "percentile": float("nan")}, "percentile"),
            ({"data": b"pictures"}, "iterable of batches"),
            ({"data": [], "providers": "CUDAExecutionProvider"}, "sequence of names"),
            ({"data": [], "providers": ()}, "sequence of names"),
            ({"data": [], "fingerprint": ""}, "fingerprint"),
            ({"data": [], "preprocess": lambda x: x}, "Do the preprocessing in loader"),
            ({"data": 5}, "iterable of batches"),
            ({"data": {"x": 1}}, r"write \[batch\]"),
            ({"data": [], "loader": len}, "belong to a folder"),
            ({"data": [], "version": "1"}, "belong to a folder"),
            ({"data": [], "table": CalibrationTable(0, "EntropyCalibration2", {})}, "not both"),
            ({"fingerprint": "f", "table": CalibrationTable(0, "EntropyCalibration2", {})}, "not both"),
        ],
    )
    def test_what_cannot_be_meant_is_refused_at_once(self, fields: dict[str, Any], message: str) -> None:
        """Every senseless combination fails at construction."""
        with pytest.raises(ConfigError, match=message):
            Calibration(**fields)

    def test_is_frozen(self) -> None:
        """Fields cannot be changed, and text became an enum."""
        made = Calibration(data=batches(1), algorithm="minmax")
        assert made.algorithm is CalibrationAlgorithm.MINMAX
        with pytest.raises(AttributeError):
            made.batches = 3  # type: ignore[misc]

    def test_one_shot_iterators_are_refused_with_advice(self) -> None:
        """A generator can be walked once only, so it is refused unless the caller vouches for the data."""
        with pytest.raises(ConfigError, match=r"data=lambda: batches\(\)"):
            Calibration(data=(b for b in batches(1)))
        vouched = Calibration(data=(b for b in batches(1, 2)), fingerprint="mine")
        assert len(list(vouched.feed([X]))) == 2

    def test_a_one_shot_iterator_is_not_resumed(self) -> None:
        """After a run that broke off, what is left of a generator must not pass for the whole data."""
        vouched = Calibration(data=(b for b in batches(1, 2, 3)), fingerprint="mine")
        next(vouched.feed([X]))
        with pytest.raises(ConfigError, match="an earlier run has used it"):
            next(vouched.feed([X]))

    def test_key_parts(self) -> None:
        """Everything that changes a table is in its key; the percentile only where it is used."""
        parts = Calibration(data=[], batches=3, preprocess="v2").key_parts("f")
        assert parts == {"data": "f", "algorithm": "entropy", "batches": 3, "preprocess": "v2"}
        high = Calibration(data=[], algorithm="percentile", percentile=99.9).key_parts("f")
        low = Calibration(data=[], algorithm="percentile", percentile=99).key_parts("f")
        assert high["algorithm"] == "percentile:99.9"
        assert low["algorithm"] == "percentile:99.0"


class TestChecks:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"xs": batch(0)["x"]}, "no input 'xs'; did you mean 'x'"),
            ({}, "lacks input 'x'"),
            ({"x": batch(0)["x"].astype(np.float64)}, r"takes float32, the data is float64.*astype\('float32'\)"),
            ({"x": batch(0)["x"][0]}, r"leading dimension: array\[None\]"),
            ({"x": batch(0)["x"][:, :2]}, r"float32, \?x3x4.*shape 2x2x4"),
            ({"x": np.zeros((0, 3, 4), np.float32)}, "is empty"),
            ({"x": np.full((1, 3, 4), np.nan, np.float32)}, "NaN or infinity"),
            ({"x": np.full((1, 3, 4), np.inf, np.float32)}, "NaN or infinity"),
            ({"x": np.array([["a"]])}, "not numbers"),
            ({"x": np.array([object()])}, "not numbers"),
            ([batch(0)["x"], np.zeros(2)], "2 parts for 1 inputs.*labels"),
        ],
    )
    def test_a_batch_that_does_not_fit(self, wrong: Any, message: str) -> None:
        """Names, types, shapes and values are checked against the model, first batch or later."""
        for data, number in (([wrong], 1), ([batch(0), wrong], 2)):
            with pytest.raises(ConfigError, match=f"batch {number}.*{message}"):
                fingerprint(data)

    def test_the_first_batch_is_checked_before_the_second_is_made(self) -> None:
        """Data for another model fails at once, not after an hour of loading."""

        def data() -> Iterator[Any]:
            yield {"y": batch(0)["x"]}
            pytest.fail("went on after a bad batch")

        with pytest.raises(ConfigError):
            fingerprint(data)

    def test_no_batches(self) -> None:
        """Empty data is an error, not an empty table."""
        with pytest.raises(ConfigError, match="holds no batch"):
            fingerprint([])

    def test_fewer_batches_than_asked_for(self, tmp_path: Path) -> None:
        """Asking for more batches than there are is refused, or the key would claim data that was never seen."""
        with pytest.raises(ConfigError, match="holds 2 batches, and batches=3 asks for more"):
            fingerprint(batches(1, 2), batches=3)
        with pytest.raises(ConfigError, match="holds 2 batches"):
            list(Calibration(data=batches(1, 2), batches=3, fingerprint="mine").feed([X]))
        np.save(tmp_path / "only.npy", batch(1)["x"])
        with pytest.raises(ConfigError, match="holds 1 batches"):
            fingerprint(tmp_path, batches=2)
        assert fingerprint(batches(1, 2), batches=2) == fingerprint(batches(1, 2))

    def test_factory_must_return_an_iterable(self) -> None:
        """A function that returns something else is named as the culprit."""
        with pytest.raises(ConfigError, match="returned int"):
            fingerprint(lambda: 5)

    def test_arrays_by_position(self) -> None:
        """A bare array does for one input, a sequence for several in the model's order."""
        x, mask = batch(1)["x"], np.ones((2, 4), np.int64)
        assert fingerprint([x]) == fingerprint([{"x": x}]) == fingerprint([(x,)])
        assert fingerprint([(x, mask)], (X, MASK)) == fingerprint([{"mask": mask, "x": x}], (X, MASK))


class TestFingerprint:
    def test_same_data_same_fingerprint(self) -> None:
        """List, factory, other memory layout and other byte order of equal values agree."""
        expected = fingerprint(batches(1, 2))
        assert fingerprint(lambda: iter(batches(1, 2))) == expected
        assert fingerprint([{"x": np.asfortranarray(b["x"])} for b in batches(1, 2)]) == expected
        assert fingerprint([{"x": b["x"].astype(">f4")} for b in batches(1, 2)]) == expected

    def test_any_change_changes_it(self) -> None:
        """One value, the order, one batch more, the split into batches, shape, and type all count."""
        free = (InputSpec("x", "float32", None),)
        one = batches(1, 2)
        touched = batches(1, 2)
        touched[1]["x"][0, 0, 0] = np.nextafter(touched[1]["x"][0, 0, 0], np.float32(9))
        joined = [{"x": np.concatenate([b["x"] for b in one])}]
        reshaped = [{"x": b["x"].reshape(2, 4, 3)} for b in one]
        found = [fingerprint(data, free) for data in (one, touched, one[::-1], [*one, batch(3)], joined, reshaped)]
        found.append(fingerprint(one, free, batches=1))
        found.append(fingerprint([{"x": b["x"].view(np.int32)} for b in one], (InputSpec("x", "int32", None),)))
        assert len(set(found)) == len(found)

    def test_is_pinned(self) -> None:
        """Stored tables are looked up by it, so it must never change."""
        data = [{"x": np.arange(24, dtype=np.float32).reshape(2, 3, 4)}]
        assert fingerprint(data) == "batches:e6dd13e95c8ef023956116962fed4d5df5c8c2362e883c007eb047a0ec94b2ea"

    def test_given(self) -> None:
        """The caller's fingerprint is taken as it is, and the data is not touched."""
        given = fingerprint(lambda: pytest.fail("touched the data"), fingerprint="imagenet-500-v3")
        assert given == "given:imagenet-500-v3"
        assert Calibration(fingerprint="imagenet-500-v3").find_fingerprint([X]) == given

    def test_no_data_to_calibrate_with(self) -> None:
        """With only a fingerprint, a stored table may be used, and nothing can be made."""
        with pytest.raises(MissError, match="no data"):
            next(Calibration(fingerprint="f").feed([X]))

    def test_of_a_table(self, tmp_path: Path) -> None:
        """A finished table is its own fingerprint, in memory or in a file, whatever its header."""
        table = CalibrationTable(8601, "EntropyCalibration2", {"x": 0.5})
        (tmp_path / "t.cache").write_bytes(table.with_header("10.3.0").to_bytes())
        source = Calibration(table=tmp_path / "t.cache")
        loaded = source.load_table()
        assert loaded is not None
        assert loaded.scales == table.scales
        assert source.find_fingerprint([X]) == Calibration(table=table).find_fingerprint([X])

    def test_random_data_is_detected(self) -> None:
        """Two passes that disagree are refused with advice, at the end of the second."""
        rng = np.random.default_rng()
        source = Calibration(data=lambda: ({"x": rng.normal(size=(1, 3, 4)).astype(np.float32)} for _ in range(3)))
        first = source.find_fingerprint([X])
        with pytest.raises(ConfigError, match=r"changed between two passes.*random augmentation"):
            list(source.feed([X], expected=first))

    def test_a_factory_returning_its_one_iterator_is_detected(self) -> None:
        """`lambda: generator` is used up after the first pass; the second finds nothing and says so."""
        once = iter(batches(1, 2))
        source = Calibration(data=lambda: once)
        first = source.find_fingerprint([X])
        with pytest.raises(ConfigError, match="now 0 batches"):
            list(source.feed([X], expected=first))

    def test_constant_data_passes_twice(self) -> None:
        """Data that is the same twice is fed without complaint."""
        source = Calibration(data=batches(1, 2, 3), batches=2)
        assert len(list(source.feed([X], expected=source.find_fingerprint([X])))) == 2

    def test_memory_stays_flat(self) -> None:
        """A thousand batches of 120 kB are hashed within the memory of a few."""
        big = InputSpec("x", "float32", None)
        source = Calibration(data=lambda: ({"x": np.full((100, 300), i, np.float32)} for i in range(1000)))
        tracemalloc.start()
        try:
            source.find_fingerprint([big])
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2_000_000


class TestFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        root = tmp_path / "data"
        (root / "sub").mkdir(parents=True)
        np.save(root / "b.npy", batch(2)["x"])
        np.savez(root / "a.npz", **batch(1))
        np.save(root / "sub" / "c.npy", batch(3)["x"])
        (root / "readme.txt").write_text("not data")
        (root / ".hidden.npy").write_text("not data")
        return root

    def test_arrays_in_the_order_of_names(self, folder: Path) -> None:
        """.npy and .npz files are read in name order, sub-folders included, hidden and other files left out."""
        fed = list(Calibration(data=folder).feed([X]))
        for found, expected in zip(fed, batches(1, 2, 3), strict=True):
            assert np.array_equal(found["x"], expected["x"])
        assert len(list(Calibration(data=str(folder), batches=2).feed([X]))) == 2

    def test_fingerprint_follows_content_not_place(self, folder: Path, tmp_path: Path) -> None:
        """Moving the folder changes nothing; a byte, a name or the number of files used does."""
        before = fingerprint(folder)
        moved = folder.rename(tmp_path / "elsewhere")
        assert fingerprint(moved) == before
        assert fingerprint(moved, batches=2) != before
        (moved / "b.npy").rename(moved / "bb.npy")
        renamed = fingerprint(moved)
        assert renamed != before
        np.save(moved / "bb.npy", batch(9)["x"])
        assert fingerprint(moved) not in {before, renamed}

    def test_digests_come_from_the_callers_memo(self, folder: Path) -> None:
        """The digest function is asked once per used file, so a memo makes a second look free."""
        asked: list[str] = []

        def digest(path: Path) -> str:
            asked.append(path.name)
            return path.name

        Calibration(data=folder).find_fingerprint([X], digest_file=digest)
        assert asked == ["a.npz", "b.npy", "c.npy"]

    def test_version_replaces_digests(self, folder: Path) -> None:
        """With an explicit version no file is hashed; names, sizes and the version count."""
        source = Calibration(data=folder, version="2026-12")
        first = source.find_fingerprint([X], digest_file=lambda _: pytest.fail("hashed"))
        assert first != fingerprint(folder, version="2027-01")
        np.save(folder / "sub" / "c.npy", batch(4)["x"])
        assert fingerprint(folder, version="2026-12") == first
        np.save(folder / "sub" / "c.npy", batch(4, size=3)["x"])
        assert fingerprint(folder, version="2026-12") != first

    def test_loader_for_other_files(self, folder: Path) -> None:
        """A loader decides what a file means; here a text file holds the seed."""
        for path in folder.rglob("*.np*"):
            path.unlink()
        (folder / "readme.txt").write_text("7")
        source = Calibration(data=folder, loader=lambda path: batch(int(path.read_text())), preprocess="seed")
        (fed,) = source.feed([X])
        assert np.array_equal(fed["x"], batch(7)["x"])

    @pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes from Python 3.11 on")
    def test_failing_loader(self, folder: Path) -> None:
        """What a loader raises comes out unchanged, with a note of the file that it was reading."""

        def load(path: Path) -> Any:
            raise KeyError("no such label")

        with pytest.raises(KeyError, match="no such label") as caught:
            Calibration(data=folder, loader=load).check([X])
        assert caught.value.__notes__ == [f"while making a calibration batch of {folder / 'a.npz'}"]

    def test_random_loader_is_detected(self, folder: Path) -> None:
        """Files are fingerprinted without the loader, so a random one must be noticed by itself."""
        rng = np.random.default_rng()
        source = Calibration(data=folder, loader=lambda _: rng.normal(size=(1, 3, 4)).astype(np.float32))
        with pytest.raises(ConfigError, match="two different batches"):
            source.check([X])

    def test_loader_that_is_seldom_random_is_detected(self, folder: Path) -> None:
        """Augmentation that spares the first file is noticed at one of the later ones that are loaded twice."""
        calls: list[Path] = []

        def load(path: Path) -> Any:
            calls.append(path)
            return batch(len(calls) if path.name == "b.npy" else 0)["x"]

        with pytest.raises(ConfigError, match=r"two different batches of .*b\.npy"):
            list(Calibration(data=folder, loader=load).feed([X]))

    def test_another_loader_is_other_data(self, folder: Path) -> None:
        """Files are fingerprinted without their loader, so its name is part of the key unless the caller says more."""

        def one(path: Path) -> Any:
            return np.load(path)

        def two(path: Path) -> Any:
            return np.load(path) / 255

        keys = [Calibration(data=folder, loader=load).key_parts("f")["preprocess"] for load in (one, two, None)]
        assert len(set(keys)) == 3
        assert keys[0].startswith("loader:")
        assert keys[2] is None
        assert Calibration(data=folder, loader=one, preprocess="v1").key_parts("f")["preprocess"] == "v1"
        vouched = Calibration(data=folder, loader=one, fingerprint="mine")
        assert vouched.key_parts("f") == Calibration(fingerprint="mine").key_parts("f")

    def test_files_that_changed_meanwhile(self, folder: Path) -> None:
        """A file that is replaced, added or removed during a run is noticed at its end."""
        source = Calibration(data=folder)
        before = source.find_fingerprint([X])
        source.check_unchanged(before)
        np.save(folder / "b.npy", batch(9)["x"])
        with pytest.raises(ConfigError, match="changed during the calibration"):
            source.check_unchanged(before)
        Calibration(data=folder, fingerprint="mine").check_unchanged("given:mine")

    def test_misfit_is_found_by_the_first_file(self, folder: Path) -> None:
        """A folder for another model is refused by a look at its first file; data that is no folder is not touched."""
        with pytest.raises(ConfigError, match="batch 1"):
            Calibration(data=folder).check([MASK])
        Calibration(data=folder).check([X])
        Calibration(data=lambda: pytest.fail("touched"), fingerprint="f").check([MASK])

    def test_missing_and_empty(self, tmp_path: Path) -> None:
        """No folder, a file instead of one, and nothing in it are told apart from an empty data set."""
        with pytest.raises(ConfigError, match="does not exist"):
            fingerprint(tmp_path / "none")
        with pytest.raises(ConfigError, match=r"holds no \.npy or \.npz files; for other kinds pass a loader"):
            fingerprint(tmp_path)

    @pytest.mark.parametrize(("name", "keep"), [("a.npy", 90), ("a.npz", 60), ("a.npz", -20), ("a.npy", 0)])
    def test_torn_files_are_named(self, tmp_path: Path, name: str, keep: int) -> None:
        """A file that was cut off is refused by name, whatever numpy and zipfile raise for it."""
        path = tmp_path / name
        if name.endswith("npz"):
            np.savez(path, **batch(1))
        else:
            np.save(path, batch(1)["x"])
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ConfigError, match=rf"{name} cannot be read as numpy data"):
            Calibration(data=tmp_path).check([X])

    def test_damage_inside_an_archive(self, tmp_path: Path) -> None:
        """A flipped byte in a compressed member is refused too."""
        path = tmp_path / "a.npz"
        np.savez_compressed(path, **batch(1))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="cannot be read as numpy data"):
            Calibration(data=tmp_path).check([X])

    def test_pickled_arrays_are_refused(self, tmp_path: Path) -> None:
        """An array file that needs pickle is never loaded."""
        np.save(tmp_path / "a.npy", np.array([{"x": 1}], dtype=object), allow_pickle=True)
        with pytest.raises(ConfigError, match="cannot be read as numpy data"):
            Calibration(data=tmp_path).check([X])


def test_expected_batches(tmp_path: Path) -> None:
    """The number of batches is known for lists, folders and limits, and left open for generators."""
    for name in "abc":
        np.save(tmp_path / f"{name}.npy", batch(0)["x"])
    assert Calibration(data=tmp_path).expected_batches == 3
    assert Calibration(data=tmp_path, batches=2).expected_batches == 2
    assert Calibration(data=[batch(0)], batches=2).expected_batches == 1
    assert Calibration(data=lambda: iter([batch(0)]), batches=2).expected_batches == 2
    assert Calibration(data=lambda: iter([batch(0)])).expected_batches is None


class TestDataLoader:
    def test_dicts_tensors_and_lists(self) -> None:
        """All three collations of a DataLoader give the same as the arrays themselves, detached and on the CPU."""
        samples = [batch(seed, size=1)["x"][0] for seed in range(4)]
        expected = fingerprint([{"x": np.stack(samples[:2])}, {"x": np.stack(samples[2:])}])
        assert fingerprint(DataLoader(samples)) == expected
        assert fingerprint(DataLoader([{"x": sample} for sample in samples])) == expected
        assert fingerprint(DataLoader([(sample,) for sample in samples])) == expected

    def test_stream_without_a_length(self) -> None:
        """A DataLoader over a stream has a __len__ that raises; its batches are fed all the same, their number open."""

        class Stream(DataLoader):
            def __len__(self) -> int:
                raise TypeError("object of type 'IterableDataset' has no len()")

        samples = [batch(seed, size=1)["x"][0] for seed in range(4)]
        assert Calibration(data=Stream(samples)).expected_batches is None
        assert Calibration(data=Stream(samples), batches=1).expected_batches == 1
        assert fingerprint(Stream(samples)) == fingerprint(DataLoader(samples))

    def test_labels_are_not_taken_for_inputs(self) -> None:
        """Image and label for a model of one input is ambiguous, and refused with advice."""
        samples = [(batch(seed, size=1)["x"][0], np.int64(1)) for seed in range(4)]
        with pytest.raises(ConfigError, match="Yield dicts"):
            fingerprint(DataLoader(samples))

    def test_shuffling_is_refused_at_once(self) -> None:
        """A shuffling DataLoader never gives one fingerprint; no pass is needed to know."""
        samples = [batch(seed, size=1)["x"][0] for seed in range(4)]
        with pytest.raises(ConfigError, match="shuffles"):
            Calibration(data=DataLoader(samples, shuffle=True))
        vouched = Calibration(data=DataLoader(samples, shuffle=True), fingerprint="mine")
        assert len(list(vouched.feed([X]))) == 2
