"""The calibration table format, comparison, coverage, and files of other tools."""

from __future__ import annotations

import contextlib
import math
import pickle
import struct
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_warmcache.calibration_files import read_table
from trt_warmcache.calibration_table import CalibrationTable, diff, version_number
from trt_warmcache.errors import ConfigError, IntegrityError, ModelError, WarmCacheError

if TYPE_CHECKING:
    from pathlib import Path

CLASSIC_8 = b"""TRT-8601-EntropyCalibration2
input: 3caa54fc
(Unnamed Layer* 64) [Shuffle]_output: 0
model/block: 1/conv [a]: out: 3d000000
Conv 12 + Relu 13: 3f800000
"""
CLASSIC_10 = b"TRT-101401-MinMaxCalibration\r\nimages: 3C010204\r\noutput0: 39b1c8a6\r\n"
PINNED = "c90d8d5d02fd41219b265efc7d32f6c2827f7bbdd6aaaf7c459962c3cab34f53"


def table(**scales: float) -> CalibrationTable:
    return CalibrationTable(0, "EntropyCalibration2", scales)


class TestParse:
    def test_documented_sample_of_8(self) -> None:
        """Names with spaces, brackets and colons are whole; scales are big-endian float32; `0` is zero."""
        parsed = CalibrationTable.parse(CLASSIC_8)
        assert (parsed.version, parsed.algorithm) == (8601, "EntropyCalibration2")
        assert list(parsed.scales) == [
            "input",
            "(Unnamed Layer* 64) [Shuffle]_output",
            "model/block: 1/conv [a]: out",
            "Conv 12 + Relu 13",
        ]
        assert parsed.scales["input"] == struct.unpack(">f", bytes.fromhex("3caa54fc"))[0]
        assert parsed.scales["(Unnamed Layer* 64) [Shuffle]_output"] == 0
        assert parsed.scales["model/block: 1/conv [a]: out"] == 0.03125

    def test_documented_sample_of_10(self) -> None:
        """The header of TensorRT 10, upper-case digits and Windows line ends are read."""
        parsed = CalibrationTable.parse(CLASSIC_10)
        assert (parsed.version, parsed.algorithm) == (101401, "MinMaxCalibration")
        assert list(parsed.scales) == ["images", "output0"]

    def test_writes_what_it_read(self) -> None:
        """A table without leading zeros comes back byte for byte."""
        assert CalibrationTable.parse(CLASSIC_8).to_bytes() == CLASSIC_8

    def test_leading_zeros_may_be_dropped(self) -> None:
        """Small scales are written short by TensorRT."""
        parsed = CalibrationTable.parse("TRT-8401-EntropyCalibration2\na: 1\nb: 00000001\n")
        assert parsed.scales["a"] == parsed.scales["b"] == 2**-149

    @pytest.mark.parametrize(
        ("data", "reason", "message"),
        [
            (b"", "truncated", "is empty"),
            (b"  \n ", "truncated", "is empty"),
            (b"input: 3caa54fc\n", "header", "TRT-<version>-<algorithm>"),
            (b"TRT-x-EntropyCalibration2\na: 0\n", "header", "TRT-<version>-<algorithm>"),
            (b"TRT-8601\na: 0\n", "header", "TRT-<version>-<algorithm>"),
            (b"TRT-8601-EntropyCalibration2\na: 0.5\n", "table", "line 2"),
            (b"TRT-8601-EntropyCalibration2\na: xyz\n", "table", "line 2"),
            (b"TRT-8601-EntropyCalibration2\na: 123456789\n", "table", "line 2"),
            (b"TRT-8601-EntropyCalibration2\na: 0\nb 3f800000\n", "table", "line 3"),
            (b"TRT-8601-EntropyCalibration2\n: 3f800000\n", "table", "line 2"),
            (b"TRT-8601-EntropyCalibration2\na: \n", "table", "line 2"),
            (b"TRT-8601-EntropyCalibration2\na: 3f8\0\0\0\0\0\n", "table", "NUL"),
            (b"TRT-8601-EntropyCalibration2\na: 0\na: 1\n", "table", "again in line 3"),
            (b"TRT-8601-EntropyCalibration2\n\xff\xfe: 0\n", "header", "not text"),
        ],
    )
    def test_damage_is_an_integrity_error(self, data: bytes, reason: str, message: str) -> None:
        """Whatever is no whole table is refused with a reason and the place, before any build."""
        with pytest.raises(IntegrityError, match=message) as caught:
            CalibrationTable.parse(data)
        assert caught.value.reason == reason

    @given(
        st.dictionaries(
            st.text(st.characters(exclude_characters="\0\r\n", exclude_categories=["Cs"]), min_size=1).filter(
                lambda name: not name.isspace()
            ),
            st.floats(width=32, allow_nan=False),
        ),
        st.sampled_from(["EntropyCalibration2", "MinMaxCalibration"]),
        st.integers(0, 999_999),
    )
    def test_any_table_survives_writing_and_reading(
        self, scales: dict[str, float], algorithm: str, version: int
    ) -> None:
        """Every name and scale the format can hold comes back exactly."""
        original = CalibrationTable(version, algorithm, scales)
        again = CalibrationTable.parse(original.to_bytes())
        assert again == original
        assert list(again.scales) == list(original.scales)

    @given(st.binary(max_size=200))
    def test_arbitrary_bytes_raise_only_our_errors(self, junk: bytes) -> None:
        """Foreign bytes never escape as another exception, with or without a plausible start."""
        for data in (junk, b"TRT-8601-EntropyCalibration2\n" + junk):
            with contextlib.suppress(WarmCacheError):
                CalibrationTable.parse(data)


class TestTable:
    def test_is_frozen_all_the_way(self) -> None:
        """Neither fields nor scales can be changed after construction, and the caller's dict is not shared."""
        scales = {"a": 1.0}
        made = CalibrationTable(0, "EntropyCalibration2", scales)
        scales["a"] = 2.0
        assert made.scales["a"] == 1
        with pytest.raises(TypeError):
            made.scales["a"] = 3  # type: ignore[index]
        with pytest.raises(AttributeError):
            made.version = 1  # type: ignore[misc]

    def test_crosses_process_boundaries(self) -> None:
        """A table survives the pickling of worker pools, and stays hashable."""
        made = table(a=0.5)
        assert pickle.loads(pickle.dumps(made)) == made
        assert len({made, pickle.loads(pickle.dumps(made))}) == 1

    @pytest.mark.parametrize("name", ["", "a\nb", "a\0", "a\r"])
    def test_unwritable_names_are_refused(self, name: str) -> None:
        """A name that would break the line format cannot get into a table."""
        with pytest.raises(ConfigError, match="cannot hold"):
            table(**{name: 1.0})

    @pytest.mark.parametrize("scale", ["1", None, 1e39])
    def test_scales_must_fit_float32(self, scale: Any) -> None:
        """Text, None and numbers beyond float32 are refused."""
        with pytest.raises(ConfigError, match="not a float32"):
            table(a=scale)

    def test_reheading_keeps_scales(self) -> None:
        """Another version's header changes nothing else, not even the digest that engine keys hold."""
        old = CalibrationTable.parse(CLASSIC_8)
        new = old.with_header("10.14.1", "MinMaxCalibration")
        assert new.to_bytes().startswith(b"TRT-101401-MinMaxCalibration\n")
        assert new.scales == old.scales
        assert new.digest == old.digest
        assert old.with_header(10701).algorithm == "EntropyCalibration2"

    def test_digest_follows_names_and_scales_only(self) -> None:
        """Order does not count; one bit of a scale or one letter of a name does."""
        assert table(a=1, b=2).digest == table(b=2, a=1).digest
        assert table(a=1).digest != table(a=math.nextafter(1, 2) + 1e-7).digest
        assert table(a=1).digest != table(b=1).digest

    def test_digest_is_pinned(self) -> None:
        """The digest goes into stored keys, so it must never change."""
        assert table(a=1.0, b=0.5).digest == PINNED

    @pytest.mark.parametrize(
        ("version", "number"),
        [
            ("8.4.1", 8401),
            ("8.6.1", 8601),
            ("7.1.3.4", 7103),
            ("10.14.1.48", 101401),
            ("11.4.0", 110400),
            ("1.7.1", 10701),
        ],
    )
    def test_version_numbers(self, version: str, number: int) -> None:
        """TensorRT's integers: thousands before 10, ten thousands from 10 on and for RTX."""
        assert version_number(version) == number

    def test_no_version(self) -> None:
        """Text that is no version is refused."""
        with pytest.raises(ConfigError):
            version_number("latest")


class TestDiff:
    def test_names_and_ratios(self) -> None:
        """Added, removed and changed tensors are listed, the largest change first, halving as large as doubling."""
        difference = diff(table(gone=1, same=2, up=1, down=1), table(same=2, up=1.5, down=0.5, new=3))
        assert difference.added == ("new",)
        assert difference.removed == ("gone",)
        assert [(change.name, change.ratio) for change in difference.changed] == [("down", 0.5), ("up", 1.5)]
        assert str(difference).splitlines() == [
            "~ down: 1 -> 0.5 (x0.5)",
            "~ up: 1 -> 1.5 (x1.5)",
            "+ new",
            "- gone",
        ]

    def test_long_differences_are_cut(self) -> None:
        """With a limit only the largest changes are named, and the rest is counted; at the limit nothing is cut."""
        difference = diff(table(a=1, b=1, c=1, old=1), table(a=2, b=8, c=4, new=1))
        assert difference.to_text(2).splitlines() == [
            "~ b: 1 -> 8 (x8)",
            "~ c: 1 -> 4 (x4)",
            "  ... and 1 more changed",
            "+ new",
            "- old",
        ]
        assert difference.to_text(3) == str(difference)

    def test_equal_tables(self) -> None:
        """No difference is falsy, whatever the headers; NaN equals NaN here."""
        same = diff(table(a=1, b=math.nan), table(a=1, b=math.nan).with_header(8601))
        assert not same
        assert str(same) == "no differences"

    def test_ratios_at_the_edges(self) -> None:
        """From zero is infinite, from or to a non-number is NaN, and neither crashes the ordering."""
        changes = {c.name: c.ratio for c in diff(table(a=0, b=math.inf, c=1), table(a=1, b=1, c=-1)).changed}
        assert changes["a"] == math.inf
        assert math.isnan(changes["b"])
        assert changes["c"] == -1


class TestCoverage:
    def test_everything_is_reported(self) -> None:
        """Missing, unknown, zero, negative and non-finite scales all show up; nothing unusable counts as matched."""
        found = table(a=1, b=0, c=math.inf, d=math.nan, e=-1, extra=1).coverage(["a", "b", "c", "d", "e", "f"])
        assert found.matched == ("a",)
        assert found.missing == ("f",)
        assert found.unknown == ("extra",)
        assert set(found.unusable) == {"b", "c", "d", "e"}
        assert not found.complete
        assert found.to_json() == {"matched": 1, "missing": 1, "unknown": 1, "unusable": 4}
        assert "4 unusable ('b', 'c', 'd', ...)" in str(found)

    def test_complete(self) -> None:
        """A table may hold more than the model, but not less, to be complete."""
        assert table(a=1, b=1).coverage(["a"]).complete

    def test_other_models_table_is_refused_with_the_count(self) -> None:
        """The message counts the tensors that do not match, and the numbers are attributes."""
        with pytest.raises(ModelError, match="3 of its 4 tensors") as caught:
            table(a=1, x=1, y=1, z=1).check(["a", "b", "c"])
        assert caught.value.matching == 1  # type: ignore[attr-defined]
        assert caught.value.mismatching == 3  # type: ignore[attr-defined]

    def test_half_is_not_enough(self) -> None:
        """A table belongs to the model that knows more than half of its tensors, not to one that knows half."""
        assert table(a=1, b=1, x=1).check(["a", "b"]).unknown == ("x",)
        with pytest.raises(ModelError, match="1 of its 2 tensors"):
            table(a=1, x=1).check(["a", "b"])

    def test_tensorrts_own_tensors_are_no_mismatch(self) -> None:
        """Tensors that TensorRT itself added do not make a table foreign, and fused ones may be absent."""
        scales = {"a": 1.0, **{f"(Unnamed Layer* {i}) [Shuffle]_output": 0.0 for i in range(9)}}
        assert CalibrationTable(8601, "EntropyCalibration2", scales).check(["a", "b", "c", "d"]).matched == ("a",)

    def test_table_without_a_usable_scale_is_refused(self) -> None:
        """Names alone are not enough: with nothing but zeros and infinities there is nothing to quantize by."""
        with pytest.raises(ModelError, match=r"no usable scale.* all 2"):
            table(a=0, b=math.inf).check(["a", "b"])

    def test_empty_table_is_refused(self) -> None:
        """A table without tensors fits no model."""
        with pytest.raises(ModelError):
            table().check(["a"])


class TestFiles:
    @pytest.mark.parametrize("data", [CLASSIC_8, CLASSIC_10])
    def test_tensorrt_files(self, tmp_path: Path, data: bytes) -> None:
        """Files of trtexec and Polygraphy are TensorRT's own format."""
        path = tmp_path / "calib.cache"
        path.write_bytes(data)
        assert read_table(path) == CalibrationTable.parse(data)

    def test_missing_path(self, tmp_path: Path) -> None:
        """A file that does not exist is an error, never an empty table."""
        with pytest.raises(ConfigError, match="does not exist"):
            read_table(tmp_path / "no.cache")
        with pytest.raises(ConfigError, match="cannot be read"):
            read_table(tmp_path)

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\n",
            b"hello\n",
            b"{}",
            b'{"a": 1}',
            b'{"a": {"lowest": 1}}',
            b"{",
            b"\0" * 64,
            b"\1\0\0\0",
            b"a 1\na 2\n",
            b"\xff\xfe a",
        ],
    )
    def test_damaged_files(self, tmp_path: Path, data: bytes) -> None:
        """Empty, truncated and foreign files of every format are integrity errors."""
        path = tmp_path / "t"
        path.write_bytes(data)
        with pytest.raises(IntegrityError):
            read_table(path)

    def test_huge_files_are_not_read(self, tmp_path: Path) -> None:
        """A file far too large for a table is refused by its size."""
        path = tmp_path / "t"
        with path.open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(IntegrityError, match="larger than"):
            read_table(path)

    def test_onnxruntime_files(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """All files that ONNX Runtime writes are read; only JSON keeps the ranges of negative tensors.

        The others lost them when they were written. A range that shows it is not usable, and a warning tells of the rest.
        """
        calibrate = pytest.importorskip("onnxruntime.quantization.calibrate")
        np = pytest.importorskip("numpy")
        from onnxruntime.quantization.quant_utils import write_calibration_table

        data = {
            "a b: c": calibrate.TensorData(lowest=np.float32(-1), highest=np.float32(2.54)),
            "mostly": calibrate.TensorData(lowest=np.array(-5, np.float32), highest=np.array([1], np.float32)),
            "never above": calibrate.TensorData(lowest=np.float32(-5), highest=np.float32(-1)),
            "up to 0": calibrate.TensorData(lowest=np.float32(-5), highest=np.float32(0)),
        }
        write_calibration_table(data, str(tmp_path))
        whole = calibrate.TensorsData(calibrate.CalibrationMethod.MinMax, data)
        calibrate.save_tensors_data(whole, tmp_path / "tensors.json")
        for name, whole_ranges in (
            ("calibration.json", True),
            ("tensors.json", True),
            ("calibration.flatbuffers", False),
            ("calibration.cache", False),
        ):
            found = read_table(tmp_path / name)
            assert found.algorithm == ("MinMaxCalibration" if name == "tensors.json" else "EntropyCalibration2")
            assert read_table(tmp_path / name, algorithm="MinMaxCalibration").algorithm == "MinMaxCalibration"
            caplog.clear()
            read_table(tmp_path / name)
            assert found.scales["a b: c"] == pytest.approx(0.02), name
            coverage = found.coverage(data)
            if whole_ranges:
                assert coverage.complete, name
                assert all(found.scales[tensor] == pytest.approx(5 / 127) for tensor in list(data)[1:]), name
                assert not caplog.records
            else:
                assert found.scales["mostly"] == pytest.approx(1 / 127), name
                assert set(coverage.unusable) == {"never above", "up to 0"}, name
                assert "calibration.json" in caplog.text
                assert name in caplog.text

    def test_older_onnxruntime_json(self, tmp_path: Path) -> None:
        """Releases up to 1.16 wrote pairs; NaN stays NaN whatever its place."""
        path = tmp_path / "calibration.json"
        path.write_text('{"a": [-1.27, 1.0], "b": ["0", "2.54"], "c": [NaN, 1], "d": [1, NaN]}')
        scales = read_table(path).scales
        assert scales["a"] == pytest.approx(0.01)
        assert scales["b"] == pytest.approx(0.02)
        assert math.isnan(scales["c"])
        assert math.isnan(scales["d"])

    @given(st.binary(max_size=120))
    def test_flipped_flatbuffers_raise_only_our_errors(self, junk: bytes) -> None:
        """Damage in the binary format never escapes as an index or memory error."""
        from trt_warmcache.calibration_files import _from_flatbuffers

        for data in (junk, struct.pack("<I", 16) + bytes(12) + junk):
            with contextlib.suppress(WarmCacheError):
                _from_flatbuffers(data, "t")
