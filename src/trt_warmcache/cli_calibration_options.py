"""Options by which a command line says what to calibrate with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from trt_warmcache.calibration_data import Calibration, CalibrationAlgorithm, CalibrationRunner, QdqOptions
from trt_warmcache.errors import ConfigError

__all__ = ["asked_for", "data_options", "load_function", "request_calibration", "request_options"]

_F = TypeVar("_F", bound=Callable[..., Any])
_PERCENTILE = 99.99


def request_options(command: _F) -> _F:
    """Options of commands that build, by which a request gets a calibration."""
    for option in reversed(
        (
            click.option("--calib-data", type=click.Path(), default=None, help="INT8: folder of calibration data."),
            click.option("--calib-loader", metavar="MODULE:FUNCTION", default=None, help="INT8: reads its files."),
            click.option("--calib-table", type=click.Path(), default=None, help="INT8: a finished calibration table."),
            click.option("--calib-fingerprint", metavar="NAME", default=None, help="INT8: your name for the data."),
            click.option(
                "--calib-algorithm",
                type=click.Choice([algorithm.value for algorithm in CalibrationAlgorithm]),
                default=CalibrationAlgorithm.ENTROPY.value,
                show_default=True,
                help="INT8: how ranges are chosen.",
            ),
            click.option(
                "--calib-runner",
                type=click.Choice([runner.value for runner in CalibrationRunner]),
                default=CalibrationRunner.ONNXRUNTIME.value,
                show_default=True,
                help="INT8: what runs the model over the data; tensorrt needs a GPU and TensorRT 8.6 to 10.16.",
            ),
            click.option(
                "--calib-percentile",
                type=float,
                default=None,
                help=f"INT8, algorithm percentile: the share that is kept, in percent. [default: {_PERCENTILE}]",
            ),
            click.option("--calib-batches", type=int, default=None, help="INT8: use this many batches."),
            click.option(
                "--calib-preprocess", metavar="TAG", default=None, help="INT8: your version of preprocessing."
            ),
            click.option(
                "--calib-data-version",
                metavar="TEXT",
                default=None,
                help="INT8: your version of the files; they are not hashed then.",
            ),
            click.option(
                "--qdq-exclude",
                metavar="NODE",
                multiple=True,
                help="INT8, TensorRT 11 and RTX: a node that stays in floating point; repeat it.",
            ),
            click.option(
                "--qdq-min-channels",
                type=int,
                default=None,
                help=f"INT8, TensorRT 11 and RTX: nodes with fewer channels stay in floating point. [default: {QdqOptions().min_channels}]",
            ),
        )
    ):
        command = option(command)
    return command


def request_calibration(given: dict[str, Any]) -> Calibration | None:
    """The calibration that these options ask for, or None.

    Raises:
        ConfigError: They contradict each other.
    """
    data, table, fingerprint = given["calib_data"], given["calib_table"], given["calib_fingerprint"]
    if data is None and table is None and fingerprint is None:
        return None
    how: dict[str, Any] = {"nodes_exclude": given["qdq_exclude"]}
    if given["qdq_min_channels"] is not None:
        how["min_channels"] = given["qdq_min_channels"]
    return Calibration(
        data=data,
        table=table,
        fingerprint=fingerprint,
        algorithm=given["calib_algorithm"],
        percentile=_percentile(
            given["calib_percentile"], given["calib_algorithm"], "--calib-percentile", "--calib-algorithm"
        ),
        batches=given["calib_batches"],
        preprocess=given["calib_preprocess"],
        runner=given["calib_runner"],
        loader=load_function(given["calib_loader"]),
        version=given["calib_data_version"],
        qdq=QdqOptions(**how),
    )


def data_options(command: _F) -> _F:
    """Options that name a calibration, with or without its data."""
    for option in reversed(
        (
            click.option(
                "--algorithm",
                type=click.Choice([algorithm.value for algorithm in CalibrationAlgorithm]),
                default=None,
                help="How ranges are chosen. [default: entropy, or what an imported file says]",
            ),
            click.option(
                "--percentile",
                type=float,
                default=None,
                help=f"With --algorithm percentile: the share that is kept, in percent. [default: {_PERCENTILE}]",
            ),
            click.option("--batches", type=int, default=None, help="Use this many batches; all if left out."),
            click.option("--preprocess", metavar="TAG", default=None, help="Your version of the preprocessing."),
            click.option("--fingerprint", metavar="NAME", default=None, help="Your own name for data and order."),
            click.option("--name", help="A name for people; the model's file name if left out."),
            click.option("--model-version", help="A version for people."),
        )
    ):
        command = option(command)
    return command


def asked_for(given: dict[str, Any], **more: Any) -> Calibration:
    """The calibration that :func:`data_options` ask for, with further fields."""
    algorithm = given["algorithm"] or CalibrationAlgorithm.ENTROPY
    return Calibration(
        algorithm=algorithm,
        percentile=_percentile(given["percentile"], algorithm, "--percentile", "--algorithm"),
        batches=given["batches"],
        preprocess=given["preprocess"],
        fingerprint=given["fingerprint"],
        **more,
    )


def _percentile(share: float | None, algorithm: str, option: str, needed: str) -> float:
    if share is not None and algorithm != CalibrationAlgorithm.PERCENTILE:
        raise ConfigError(f"{option} belongs to {needed} percentile.")
    return _PERCENTILE if share is None else share


def load_function(spec: str | None) -> Any:
    """The function that ``package.module:function`` names; what it raises names the file."""
    if spec is None:
        return None
    module, colon, name = spec.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"Cannot read loader {spec!r}; write package.module:function.")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"Cannot load {spec}: {error}. Is its folder in PYTHONPATH?") from error
    except Exception as error:
        raise ConfigError(f"Cannot load {spec}: {type(error).__name__}: {error}.") from error
    if not callable(found):
        raise ConfigError(f"{spec} is {type(found).__name__}, not a function that makes a batch of a file.")

    @wraps(found)
    def load(path: Path) -> Any:
        try:
            return found(path)
        except Exception as error:
            raise ConfigError(f"{spec} cannot read {path}: {type(error).__name__}: {error}.") from error

    return load
