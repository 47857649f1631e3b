"""Everything one does with this repository, as sessions: ``python3 -m nox -s NAME``."""

from __future__ import annotations

import os
import pathlib
import shutil

import nox

nox.needs_version = ">=2024.10"
nox.options.sessions = ["lint", "typing", "layers", "tests"]
nox.options.reuse_existing_virtualenvs = True

PYPROJECT = nox.project.load_toml("pyproject.toml")

#: Packages that carry real ONNX models. Only their model files are read, so their own dependencies stay out.
MODEL_PACKAGES = PYPROJECT["tool"]["trt_warmcache"]["model-packages"]
DEMO_PACKAGE = next(package for package in MODEL_PACKAGES if package.startswith("rapidocr-onnxruntime"))


def _install_models(session: nox.Session, *packages: str) -> None:
    """Install packages for the files inside them, without what they depend on."""
    session.install("--no-deps", *packages)


@nox.session
def demo(session: nox.Session) -> None:
    """Build a real model cold, get it warm in a fresh process, and print both."""
    session.install("-e", ".[rtx]")
    _install_models(session, DEMO_PACKAGE)
    session.run("python", "examples/demo.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests: real TensorRT-RTX builds, real models, real storage servers, real processes killed for real."""
    extras = "rtx,s3,gcs,azure,obstore,sign,zstd,int8,plot"
    session.install("-e", f".[{extras}]", *nox.project.dependency_groups(PYPROJECT, "test", "servers"))
    _install_models(session, *MODEL_PACKAGES, PYPROJECT["tool"]["trt_warmcache"]["bindings"])
    _install_azurite(session)
    session.run("pytest", *(session.posargs or ("-n", str(max(2, min(os.cpu_count() or 1, 4))))))


def _install_azurite(session: nox.Session) -> None:
    """Install the Azure storage emulator; it comes from npm and stays inside ``.nox``."""
    if shutil.which("npm") is None:
        session.error("The Azure tests need Node.js with npm: apt-get install nodejs npm, or https://nodejs.org.")
    show = "from tests.servers.launch import azurite_home, azurite_install_command as c; print(azurite_home(), *c(), sep='\\n')"
    lines = session.run("python", "-c", show, silent=True)
    assert isinstance(lines, str)
    home, *command = lines.splitlines()
    if not (pathlib.Path(home) / "node_modules" / "azurite").is_dir():
        session.run(*command, external=True, silent=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typing(session: nox.Session) -> None:
    """Check types, strictly, over source, tests and benchmarks."""
    session.install("-e", ".[remote,sign,zstd]", *nox.project.dependency_groups(PYPROJECT, "typing", "test"))
    session.run("mypy")


@nox.session
def layers(session: nox.Session) -> None:
    """Check that imports point downwards only."""
    session.install("-e", ".", *nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("lint-imports")


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks; ``-- --quick`` for a smoke test."""
    extras = "rtx,s3,gcs,azure,obstore"
    session.install("-e", f".[{extras}]", *nox.project.dependency_groups(PYPROJECT, "bench", "servers"))
    _install_models(session, *MODEL_PACKAGES)
    for script in sorted(pathlib.Path("benchmarks").glob("bench_*.py")):
        session.run("python", str(script), *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; warnings are errors."""
    session.install("-e", ".", *nox.project.dependency_groups(PYPROJECT, "docs"))
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build sdist and wheel, and check what is in the wheel."""
    session.install("build", "twine")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build")
    session.run("twine", "check", "--strict", *map(str, pathlib.Path("dist").iterdir()))
