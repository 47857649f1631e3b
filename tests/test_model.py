"""Model identity: content and nothing else, wherever the model lies and however it is passed."""

from __future__ import annotations

import os
import shutil
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from tests import models

from trt_warmcache.errors import ConfigError, ModelError
from trt_warmcache.memo import DigestMemo
from trt_warmcache.model import ModelSource, file_digest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import RunPython

#: Names that have broken caches before (case 88).
FOLDERS = ["模型", "émoi", "with space", "😀", "100%25", "a#b", "q?x", "semi;colon", "new\nline", "back\\slash", "~x"]


def digest(model: Any, memo: DigestMemo | None = None) -> str:
    """The content digest of a model."""
    return ModelSource.open(model, memo=memo or DigestMemo(None)).digest


def settled_memo(folder: Path | None = None) -> DigestMemo:
    """A memo that trusts files made just now: its clock is an hour ahead."""
    return DigestMemo(folder, clock=lambda: time.time_ns() + 3600 * 10**9)


def outside_model(*locations: str) -> Any:
    """A model with one tensor of 16 bytes in each named side file."""
    model = models.tiny_model()
    model.graph.initializer.extend(models.external_tensor(f"t{n}", name) for n, name in enumerate(locations))
    return model


def save_outside(folder: Path, fill: bytes = b"\x01", location: str = "data.bin") -> Path:
    """A model with one side file in a folder."""
    path = models.save(outside_model(location), folder / "model.onnx")
    (folder / location).parent.mkdir(parents=True, exist_ok=True)
    (folder / location).write_bytes(fill * 16)
    return path


# ---- what counts ----------------------------------------------------------------------------------------------------


def test_weights_count(tmp_path: Path) -> None:
    """Case 1: one architecture, two sets of weights, two digests."""
    one = models.save(models.tiny_model(weight=1.0), tmp_path / "1.onnx")
    two = models.save(models.tiny_model(weight=1.5), tmp_path / "2.onnx")
    assert one.stat().st_size == two.stat().st_size
    assert digest(one) != digest(two)


def test_structure_counts() -> None:
    """Case 2: shapes, element types, attributes, operators and names in the graph are content."""
    variants = [
        models.tiny_model(dims=(3, 3)),
        models.tiny_model(dims=(4, 4)),
        models.tiny_model(dims=(3, 3), axis=1),
        models.tiny_model(dims=(3, 3), elem_type=TensorProto.FLOAT16),
        models.tiny_model(dims=("N", 3)),
        models.tiny_model(dims=(3, 3), name="other"),
    ]
    changed = models.tiny_model(dims=(3, 3))
    changed.graph.node[0].op_type = "Mul"
    assert len({digest(model) for model in [*variants, changed]}) == len(variants) + 1


def test_location_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases 6, 88, 121: folder, file name, spelling of the path and way of passing are not identity."""
    model = models.tiny_model()
    data = model.SerializeToString()
    found = {digest(data), digest(bytearray(data)), digest(memoryview(data)), digest(model)}
    for folder in FOLDERS:
        path = models.save(model, tmp_path / folder / f"{folder}.onnx")
        found |= {digest(path), digest(str(path)), digest(f"file://{path}"), digest(path.as_uri())}
        monkeypatch.chdir(path.parent)
        found |= {digest(path.name), digest(f"./{path.name}"), digest(f"../{folder}/{path.name}")}
    name = uuid.uuid4().hex
    with fsspec.open(f"memory://{name}/dir/model.onnx", "wb") as out:
        out.write(data)
    found |= {digest(f"memory://{name}/dir/model.onnx"), digest(f"local://{tmp_path}/émoi/émoi.onnx")}
    monkeypatch.setenv("HOME", str(tmp_path))
    found |= {digest("~/émoi/émoi.onnx"), digest(f"file://localhost{tmp_path}/émoi/émoi.onnx")}
    assert len(found) == 1


def test_time_stamps_and_modes_do_not_count(tmp_path: Path) -> None:
    """Touching or write-protecting a file is no change of content."""
    path = models.save(models.tiny_model(), tmp_path / "m.onnx")
    before = digest(path)
    os.utime(path, (1, 1))
    path.chmod(0o400)
    assert digest(path) == before


def test_overwritten_in_place(tmp_path: Path) -> None:
    """Case 125: other weights of equal size under an unchanged path are another model, memo or not."""
    memo = DigestMemo(tmp_path / "memo")
    path = models.save(models.tiny_model(weight=1.0), tmp_path / "m.onnx")
    os.utime(path, (10**9, 10**9))
    time.sleep(0.05)
    before = digest(path, memo)
    assert digest(path, memo) == before
    path.write_bytes(models.tiny_model(weight=2.0).SerializeToString())
    os.utime(path, (10**9, 10**9))
    assert digest(path, memo) != before


def test_side_bytes_count(tmp_path: Path) -> None:
    """Any one byte of a side file is content, also outside the ranges that tensors name."""
    base = digest(save_outside(tmp_path / "a"))
    assert digest(save_outside(tmp_path / "b")) == base
    other = save_outside(tmp_path / "c")
    side = other.with_name("data.bin")
    for damage in (b"\x01" * 15 + b"\x02", b"\x01" * 17):
        side.write_bytes(damage)
        assert digest(other) != base


def test_every_side_file_counts(tmp_path: Path) -> None:
    """Case 13: one byte changed in the side file of any tensor, wherever it hides, changes the digest."""
    path = models.save(models.everywhere_model("parts/{}.bin"), tmp_path / "m.onnx")
    (tmp_path / "parts").mkdir()
    for name in models.EVERYWHERE:
        (tmp_path / "parts" / f"{name}.bin").write_bytes(bytes(16))
    seen = {digest(path)}
    for name in sorted(models.EVERYWHERE):
        (tmp_path / "parts" / f"{name}.bin").write_bytes(bytes(15) + b"\x01")
        seen.add(digest(path))
    assert len(seen) == len(models.EVERYWHERE) + 1
    (tmp_path / "parts" / "branch_attr.bin").unlink()
    with pytest.raises(ModelError, match=r"'branch_attr'.*branch_attr\.bin.*No such file"):
        digest(path)


def test_saved_by_onnx(tmp_path: Path) -> None:
    """Models as onnx itself saves them, in one file or one per tensor, are read whole."""
    for number, together in enumerate((True, False)):
        big = models.tiny_model()
        big.graph.initializer.append(numpy_helper.from_array(np.arange(4096, dtype=np.float32), "big"))
        path = tmp_path / str(number) / "m.onnx"
        path.parent.mkdir()
        onnx.save_model(
            big,
            path,
            save_as_external_data=True,
            all_tensors_to_one_file=together,
            size_threshold=0,
            **({"location": "w e i g h t s.data"} if together else {}),
        )
        source = ModelSource.open(path, memo=DigestMemo(None))
        assert source.total_bytes == sum(file.stat().st_size for file in path.parent.iterdir())


# ---- links ----------------------------------------------------------------------------------------------------------


def test_two_snapshots_of_one_graph(tmp_path: Path) -> None:
    """Case 12: links to one graph blob beside different data are two models, in either order, with one memo."""
    blobs = tmp_path / "blobs"
    models.save(outside_model("data.bin"), blobs / "graph")
    snapshots = []
    for number, fill in enumerate((b"\x01", b"\x02")):
        (blobs / f"data{number}").write_bytes(fill * 16)
        snapshot = tmp_path / f"snapshot{number}"
        snapshot.mkdir()
        (snapshot / "model.onnx").symlink_to("../blobs/graph")
        (snapshot / "data.bin").symlink_to(f"../blobs/data{number}")
        snapshots.append(snapshot / "model.onnx")
    for order in (snapshots, snapshots[::-1]):
        memo = settled_memo(tmp_path / f"memo{order[0].parent.name}")
        first = [digest(path, memo) for path in order]
        assert len(set(first)) == 2
        assert [digest(path, memo) for path in order] == first
        assert [digest(path, settled_memo(memo.folder)) for path in order] == first


def test_hub_layout(tmp_path: Path) -> None:
    """Case 94: relative links for graph and data, as model hubs make them, read like plain files."""
    plain = digest(save_outside(tmp_path / "plain"))
    hub = tmp_path / "hub" / "snapshots" / "abc"
    hub.mkdir(parents=True)
    shutil.copytree(tmp_path / "plain", tmp_path / "hub" / "blobs")
    for name in ("model.onnx", "data.bin"):
        (hub / name).symlink_to(f"../../blobs/{name}")
    assert digest(hub / "model.onnx") == plain


@pytest.mark.parametrize(
    "location",
    [
        "../secret",
        "a/../../secret",
        "a/../data.bin",
        "/etc/hostname",
        "..",
        ".",
        "",
        "..\\secret",
        "a\\..\\..\\secret",
        "\\\\server\\share",
        "C:\\secret",
        "c:secret",
        "data\0.bin",
        "//etc/hostname",
    ],
)
def test_escapes_are_refused(tmp_path: Path, location: str) -> None:
    """Case 94: a name from inside the model that leads out of its folder is refused unopened, locally and remotely."""
    (tmp_path / "secret").write_bytes(bytes(100))
    path = models.save(outside_model(location), tmp_path / "inner" / "model.onnx")
    (tmp_path / "inner" / "data.bin").write_bytes(bytes(100))
    with pytest.raises(ModelError, match="not inside the model's folder"):
        digest(path)
    name = uuid.uuid4().hex
    with fsspec.open(f"memory://{name}/model.onnx", "wb") as out:
        out.write(path.read_bytes())
    with pytest.raises(ModelError, match="not inside the model's folder"):
        digest(f"memory://{name}/model.onnx")


@pytest.mark.parametrize("location", ["sub/data.bin", "./data.bin", "..data", "数据 1%.bin", "..."])
def test_inner_locations(tmp_path: Path, location: str) -> None:
    """Any name inside the folder is fine."""
    assert ModelSource.open(save_outside(tmp_path, location=location), memo=DigestMemo(None)).total_bytes > 16


# ---- missing, short, strange ----------------------------------------------------------------------------------------


def test_missing_side_file(tmp_path: Path) -> None:
    """A missing side file is a ModelError that names the tensor and where it was sought."""
    path = models.save(outside_model("weights.data"), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"'t0' of model\.onnx.*'weights\.data'.*No such file"):
        digest(path)


def test_short_side_file(tmp_path: Path) -> None:
    """A side file too short for its tensors is an incomplete copy, and said to be."""
    path = save_outside(tmp_path)
    (tmp_path / "data.bin").write_bytes(bytes(15))
    with pytest.raises(ModelError, match=r"'t0' needs 16 bytes.*'data.bin', which has 15"):
        digest(path)


def test_short_side_file_by_offset(tmp_path: Path) -> None:
    """The tensor that reaches furthest decides what a side file must have."""
    model = models.tiny_model()
    for name, offset in (("near", 0), ("far", 4096)):
        model.graph.initializer.append(models.external_tensor(name, "d", offset=offset, length=16))
    path = models.save(model, tmp_path / "m.onnx")
    (tmp_path / "d").write_bytes(bytes(4111))
    with pytest.raises(ModelError, match="'far' needs 4112"):
        digest(path)


def test_side_file_is_no_file(tmp_path: Path) -> None:
    """A folder, a pipe or a device in place of a side file is refused; nothing hangs."""
    path = models.save(outside_model("data.bin"), tmp_path / "model.onnx")
    side = tmp_path / "data.bin"
    side.mkdir()
    with pytest.raises(ModelError, match=r"data\.bin"):
        digest(path)
    side.rmdir()
    os.mkfifo(side)
    with pytest.raises(ModelError, match="not a regular file"):
        digest(path)
    side.unlink()
    side.symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="not a regular file"):
        digest(path)


def test_unreadable(tmp_path: Path) -> None:
    """A path to nothing, to a folder, a pipe, or of impossible spelling is a ModelError."""
    os.mkfifo(tmp_path / "pipe")
    for path, word in (
        (tmp_path / "nothing.onnx", "no model at"),
        (tmp_path, "folder"),
        (tmp_path / "pipe", "special file"),
        (tmp_path / ("x" * 300), "too long"),
        (str(tmp_path / "nul\0.onnx"), "null"),
        (f"file://{tmp_path}/nothing.onnx", "no model at"),
        (f"memory://{uuid.uuid4().hex}/nothing.onnx", "no model at"),
    ):
        with pytest.raises(ModelError, match=word):
            digest(path)


def test_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may be called ``~x``; a user of that name need not exist."""
    models.save(models.tiny_model(), tmp_path / "~model.onnx")
    monkeypatch.chdir(tmp_path)
    assert digest("~model.onnx") == digest(tmp_path / "~model.onnx")
    with pytest.raises(ModelError, match="no model at"):
        digest("~no-such-user/model.onnx")


@pytest.mark.parametrize("model", [None, 3, "", object(), ["m.onnx"]])
def test_not_a_model(model: Any) -> None:
    """Anything else is a ConfigError that says what is taken."""
    with pytest.raises(ConfigError, match=r"path, a URL, bytes or an onnx\.ModelProto"):
        digest(model)


def test_unknown_url() -> None:
    """A URL of an unknown kind is a ConfigError, and credentials stay out of the message."""
    with pytest.raises(ConfigError) as caught:
        digest("nosuch://user:secret@host/model.onnx?token=secret")
    assert "nosuch" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_bytes_with_side_files() -> None:
    """Bytes do not say where side files are, so they are refused with advice."""
    model = outside_model("data.bin")
    for spelling in (model, model.SerializeToString()):
        with pytest.raises(ModelError, match="pass its path"):
            digest(spelling)


def test_proto_too_large() -> None:
    """A ModelProto that cannot be serialized is a ModelError that names the way out."""

    class EncodeError(Exception):
        """As protobuf's own, which derives from Exception."""

    class Huge:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def SerializeToString(self, **_: Any) -> bytes:
            raise self.error

    for error in (ValueError("exceeds 2GB"), EncodeError("Failed to serialize proto")):
        with pytest.raises(ModelError, match="save_as_external_data=True") as caught:
            digest(Huge(error))
        assert caught.value.__cause__ is error
    with pytest.raises(ZeroDivisionError):
        digest(Huge(ZeroDivisionError()))


def test_graph_too_large(tmp_path: Path) -> None:
    """A graph file of more than protobuf can hold is refused unread."""
    path = tmp_path / "huge.onnx"
    with path.open("wb") as out:
        out.write(models.tiny_model().SerializeToString())
        out.truncate(2**31)
    started = time.perf_counter()
    with pytest.raises(ModelError, match="external data"):
        digest(path)
    assert time.perf_counter() - started < 1


HUGE_SIDE = """
import resource, sys, time
from trt_warmcache.memo import DigestMemo
from trt_warmcache.model import ModelSource
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
started = time.perf_counter()
source = ModelSource.open(sys.argv[1], memo=DigestMemo(None))
print(source.total_bytes, time.perf_counter() - started)
"""


def test_side_file_above_2_gb(tmp_path: Path, run_python: RunPython) -> None:
    """Case 96: a 2.5 GB side file is hashed within 1 GiB of address space, in seconds."""
    model = models.tiny_model()
    model.graph.initializer.append(models.external_tensor("w", "w.bin", count=4, offset=2_500_000_000))
    path = models.save(model, tmp_path / "m.onnx")
    with (tmp_path / "w.bin").open("wb") as out:
        out.truncate(2_500_000_016)
    total, seconds = run_python(HUGE_SIDE, path).split()
    assert int(total) == path.stat().st_size + 2_500_000_016
    assert float(seconds) < 30


# ---- changes while in use -------------------------------------------------------------------------------------------


def test_read_gives_the_hashed_bytes(tmp_path: Path) -> None:
    """``read`` returns what was hashed, or says that the file is another one now."""
    path = models.save(models.tiny_model(), tmp_path / "m.onnx")
    source = ModelSource.open(path, memo=DigestMemo(None))
    assert source.read() == path.read_bytes()
    path.write_bytes(models.tiny_model(weight=2.0).SerializeToString())
    with pytest.raises(ModelError, match="changed while it was in use"):
        source.read()
    path.unlink()
    with pytest.raises(ModelError, match="no model at"):
        source.read()


@pytest.mark.parametrize("victim", ["model.onnx", "data.bin"])
@pytest.mark.parametrize("how", ["edit", "replace", "delete", "restore-mtime"])
def test_changes_during_a_build_show(tmp_path: Path, victim: str, how: str) -> None:
    """A graph or side file edited, replaced or deleted after hashing is a ModelError that names it."""
    source = ModelSource.open(save_outside(tmp_path), memo=DigestMemo(None))
    source.verify_unchanged()
    file = tmp_path / victim
    data, status = file.read_bytes(), file.stat()
    time.sleep(0.03)
    if how == "delete":
        file.unlink()
    elif how == "replace":
        (tmp_path / "new").write_bytes(bytes([data[0] ^ 1]) + data[1:])
        (tmp_path / "new").replace(file)
    else:
        file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        if how == "restore-mtime":
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ModelError, match=victim):
        source.verify_unchanged()


def test_change_while_hashing(tmp_path: Path) -> None:
    """A file written to while it is being hashed never gets a digest."""
    path = save_outside(tmp_path)
    side = tmp_path / "data.bin"
    side.write_bytes(bytes(64 << 20))
    stop = threading.Event()

    def scribble() -> None:
        with side.open("r+b", buffering=0) as out:
            while not stop.is_set():
                out.seek(0)
                out.write(os.urandom(8))
                time.sleep(0.001)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        with pytest.raises(ModelError, match="changed while it was in use"):
            digest(path)
    finally:
        stop.set()
        thread.join()


# ---- the rest -------------------------------------------------------------------------------------------------------


def test_memo_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look at an unchanged model reads neither graph nor side file; a strict memo reads both."""
    path = save_outside(tmp_path / "m")
    memo = settled_memo(tmp_path / "memo")
    before = ModelSource.open(path, memo=memo)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr("trt_warmcache.model._hash", refuse)
        for again in (memo, settled_memo(memo.folder)):
            source = ModelSource.open(path, memo=again)
            assert (source.digest, source.summary) == (before.digest, before.summary)
        with pytest.raises(AssertionError, match="read again"):
            ModelSource.open(path, memo=DigestMemo(memo.folder, strict=True))
    (path.parent / "data.bin").write_bytes(b"\x09" * 16)
    assert digest(path, memo) != before.digest


def test_remembered_models_still_need_their_side_files(tmp_path: Path) -> None:
    """A remembered graph does not hide that a side file went missing."""
    path = save_outside(tmp_path / "m")
    memo = settled_memo(tmp_path / "memo")
    digest(path, memo)
    (path.parent / "data.bin").unlink()
    with pytest.raises(ModelError, match=r"'data\.bin'"):
        digest(path, memo)


def test_stage(tmp_path: Path) -> None:
    """Case 128: graph and side files can be staged under an ASCII path, from local and remote folders alike."""
    path = save_outside(tmp_path / "模型", location="deep/data.bin")
    name = uuid.uuid4().hex
    fsspec.filesystem("memory").put(str(path.parent), f"/{name}", recursive=True)
    for number, model in enumerate((path, f"memory://{name}/model.onnx")):
        source = ModelSource.open(model, memo=DigestMemo(None))
        folder = tmp_path / f"staged{number}"
        folder.mkdir()
        staged = source.stage(folder)
        assert staged.read_bytes() == path.read_bytes()
        assert (folder / "deep" / "data.bin").read_bytes() == b"\x01" * 16
        assert digest(staged) == source.digest == digest(path)


def test_remote_side_files(tmp_path: Path) -> None:
    """Side files of a remote model are hashed, checked and missed like local ones."""
    path = save_outside(tmp_path)
    memory = fsspec.filesystem("memory")
    name = uuid.uuid4().hex
    memory.pipe(f"/{name}/model.onnx", path.read_bytes())
    url = f"memory://{name}/model.onnx"
    with pytest.raises(ModelError, match=r"'t0'.*'data.bin'"):
        digest(url)
    memory.pipe(f"/{name}/data.bin", bytes(15))
    with pytest.raises(ModelError, match="which has 15"):
        digest(url)
    memory.pipe(f"/{name}/data.bin", b"\x01" * 16)
    assert digest(url) == digest(path)


def test_stem(tmp_path: Path) -> None:
    """The label is the file's stem, in text that JSON can hold, whatever bytes the name is made of."""
    data = models.tiny_model().SerializeToString()
    assert ModelSource.open(data, memo=DigestMemo(None)).stem == "model"
    for raw, stem in (
        (b"face.v2.onnx", "face.v2"),
        ("模型.onnx".encode(), "模型"),
        (b"mod\xe9le.onnx", "mod\\udce9le"),
    ):
        path = tmp_path / os.fsdecode(raw)
        path.write_bytes(data)
        assert ModelSource.open(path, memo=DigestMemo(None)).stem == stem


def test_file_digest(tmp_path: Path) -> None:
    """Case 82: plugin libraries are content too; one that cannot be read is a ConfigError."""
    library = tmp_path / "libplugin.so"
    library.write_bytes(b"one")
    one = file_digest(library, DigestMemo(None))
    assert one.startswith("blake3:")
    library.write_bytes(b"two")
    assert file_digest(library, DigestMemo(None)) != one
    for path in (tmp_path / "nothing.so", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            file_digest(path, DigestMemo(None))


def test_real_build_beside_external_data_in_cjk_folder(tmp_path: Path) -> None:
    """Case 128: the real TensorRT-RTX parser reads a model with external data in a folder of any name."""
    pytest.importorskip("tensorrt_rtx")
    import trt_warmcache as twc

    plans = set()
    for folder in ("plain", *FOLDERS):
        path = tmp_path / folder / "model.onnx"
        path.parent.mkdir()
        weights = models.tiny_model()
        weights.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.full((2, 3), 2.0, np.float32), "w"))
        onnx.save_model(weights, path, save_as_external_data=True, size_threshold=0, location="weights 1.bin")
        with twc.EngineManager(twc.MemoryStore(), builder="tensorrt_rtx", memo=DigestMemo(None)) as manager:
            plans.add(bytes(manager.get(path, name="m", version="1").plan))
    assert len(plans) == 1


def test_model_replaced_during_the_build(tmp_path: Path) -> None:
    """A model that changes while its engine is being built is a ModelError, and nothing is stored."""
    import trt_warmcache as twc
    from trt_warmcache.testing import FakeBuilder

    path = save_outside(tmp_path)
    store = twc.MemoryStore()

    def replace(_: Any) -> None:
        (tmp_path / "data.bin").write_bytes(b"\x07" * 16)

    builder = FakeBuilder(on_build=replace)
    target = twc.Target(gpu="Test GPU", compute_capability="8.9")
    with twc.EngineManager(store, builder=builder, target=target, memo=DigestMemo(None)) as manager:
        with pytest.raises(ModelError, match="changed while it was in use"):
            manager.get(path)
        assert list(store.list("")) == []


def test_generated_models_are_valid() -> None:
    """The generated models are valid ONNX, so that the tests above say something about real ones."""
    onnx.checker.check_model(models.tiny_model(dims=("N", 3)))
    onnx.checker.check_model(models.two_input_model(["N", 3], [2]))
