"""The documentation tells the truth: its code runs, its reference pages follow from the code, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))

#: A fenced block with the line before it. That line says, as a comment, what is to be done with the block:
#: ``run``, ``file: NAME`` (later blocks use it) or ``not run, because REASON``.
BLOCK = re.compile(r"^(?P<before>[^\n]*)\n```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (?:(?P<run>run)|file: (?P<file>\w+\.py)|not run, because (?P<reason>\w.+)) -->")
CODE = {"python", "sh"}


@dataclass(frozen=True)
class Block:
    """A code block and what its page says about it."""

    language: str
    code: str
    mark: re.Match[str] | None
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page."""
    text = page.read_text("utf-8")
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code")) + 1
        yield Block(found["language"], found["code"], MARK.fullmatch(found["before"]), line)


def runnable(page: Path) -> bool:
    """Whether any block of the page is to be run."""
    return any(block.mark and block.mark["run"] for block in blocks(page))


def name_of(page: Path) -> str:
    """A page's name in test reports."""
    return page.relative_to(DOCS).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_says_whether_it_is_run(page: Path) -> None:
    """Every Python or shell block is run, is a file that a later block uses, or says why it is not run."""
    found = list(blocks(page))
    assert len(found) == page.read_text("utf-8").count("\n```") / 2, "a fence is not closed, or opens the page"
    for block in found:
        assert block.language in CODE | {"text"}, f"line {block.line}: say what language this is"
        assert block.mark or block.language not in CODE, f"line {block.line}: neither run nor marked as not run"


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name_of)
@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs the rtx extra")
def test_code_runs(page: Path, tmp_path: Path) -> None:
    """The runnable blocks of a page work one after the other, in a fresh process and an empty home."""
    if "rapidocr_onnxruntime" in page.read_text("utf-8") and importlib.util.find_spec("rapidocr_onnxruntime") is None:
        pytest.skip("needs a package with a real model: pip install --no-deps rapidocr-onnxruntime")
    work = tmp_path / "work"
    work.mkdir()
    (work / "model.onnx").write_bytes(small_model())
    script = tmp_path / "page.py"
    script.write_text(script_of(page, work), "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=work, env=environment(tmp_path), capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def script_of(page: Path, work: Path) -> str:
    """One program of all runnable blocks; shell blocks run where they stand."""
    parts = ["import subprocess as _subprocess\n"]
    for block in blocks(page):
        if block.mark is None:
            continue
        if block.mark["file"]:
            (work / block.mark["file"]).write_text(block.code, "utf-8")
        elif block.mark["run"]:
            parts.append(f"# {page.name}, line {block.line}\n")
            shell = f"_subprocess.run(['bash', '-euo', 'pipefail', '-c', {block.code!r}], check=True)\n"
            parts.append(block.code if block.language == "python" else shell)
    return "".join(parts)


def environment(folder: Path) -> dict[str, str]:
    """A user's environment without a past, and with the command on the path."""
    bin_ = folder / "bin"
    bin_.mkdir()
    for name, words in (("trt-warmcache", "-m trt_warmcache"), ("python", "")):
        command = bin_ / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n', "utf-8")
        command.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRT_WARMCACHE", "PYTEST"))}
    paths = [str(folder / "work"), kept.get("PYTHONPATH", "")]
    return {
        **kept,
        "PATH": f"{bin_}{os.pathsep}{kept['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


def small_model() -> bytes:
    """The ``model.onnx`` of the how-to guides: one convolution over images, batch dynamic."""
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[7, 7], strides=[4, 4])],
        "images",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 224, 224])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8, 55, 55])],
        [numpy_helper.from_array(np.ones((8, 3, 7, 7), np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def test_reference_pages_are_up_to_date() -> None:
    """Pages written from the code are what the code would write now; if not: python docs/generate.py."""
    done = subprocess.run(
        [sys.executable, str(DOCS / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Links between pages name a file that is there, and a heading that is in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.is_file(), target
        assert not anchor or anchor in anchors(other), target


def anchors(page: Path) -> set[str]:
    """The ids that headings of a page get."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_navigation() -> None:
    """A page that nobody can find is not documentation, and an entry without a page is a dead end."""
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE))
    assert listed == {name_of(page) for page in PAGES}
