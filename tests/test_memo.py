"""The digest memo: what is remembered, what is never trusted, and that nothing it does can fail a request."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trt_warmcache import memo as module
from trt_warmcache.memo import DigestMemo, default_memo_folder

if TYPE_CHECKING:
    from tests.conftest import RunPython

HOUR = 3600 * 10**9


class Clock:
    """A wall clock that tests set."""

    def __init__(self, now: int | None = None) -> None:
        self.now = time.time_ns() if now is None else now

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that a memo trusts (see `later`)."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def later() -> Clock:
    """A clock an hour ahead, so that files made just now count as settled."""
    return Clock(time.time_ns() + HOUR)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where memo files go."""
    return tmp_path / "memo"


def remember(memo: DigestMemo, path: Path, value: Any = "digest") -> bool:
    """Remember a value for a file as it is now."""
    return memo.put(path, path.stat(), value, memo.clock())


def recall(memo: DigestMemo, path: Path) -> Any:
    """What is remembered for a file as it is now."""
    return memo.get(path, path.stat())


def test_remembers_in_process_and_across(file: Path, folder: Path, later: Clock) -> None:
    """An unchanged file's value is found again, by the same memo and by a fresh one over the same folder."""
    memo = DigestMemo(folder, clock=later)
    assert recall(memo, file) is None
    assert remember(memo, file, {"a": [1, "b"]})
    assert recall(memo, file) == {"a": [1, "b"]}
    assert recall(DigestMemo(folder, clock=later), file) == {"a": [1, "b"]}
    assert recall(DigestMemo(None, clock=later), file) is None


def test_in_place_edit_with_restored_mtime(file: Path, folder: Path, later: Clock) -> None:
    """Case 126: other bytes of equal size under the old mtime are a miss: ctime cannot be set back."""
    memo = DigestMemo(folder, clock=later)
    before = file.stat()
    assert remember(memo, file)
    time.sleep(0.03)
    with file.open("r+b") as out:
        out.write(b"WEIGHTS")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert recall(memo, file) is None
    assert recall(DigestMemo(folder, clock=later), file) is None


def test_two_edits_within_one_tick(file: Path, folder: Path) -> None:
    """Case 126: a file touched within the clock's granularity of being read is not remembered."""
    touched = max(file.stat().st_mtime_ns, file.stat().st_ctime_ns)
    for distance, trusted in ((0, False), (1_000_000, False), (19_999_999, False), (20_000_000, True), (HOUR, True)):
        memo = DigestMemo(folder / str(distance), clock=Clock(touched + distance))
        assert remember(memo, file) is trusted, distance
        assert (recall(memo, file) is not None) is trusted, distance


def test_recent_change_under_an_old_mtime(file: Path, folder: Path) -> None:
    """Case 126: a file changed just now is not trusted, however old its mtime was made to look."""
    os.utime(file, (10**9, 10**9))
    changed = file.stat().st_ctime_ns
    assert not remember(DigestMemo(folder, clock=Clock(changed + 1_000_000)), file)
    assert remember(DigestMemo(folder, clock=Clock(changed + HOUR)), file)


def test_real_clock_never_gives_stale_values(file: Path, folder: Path) -> None:
    """Case 126: writers that change the file as fast as they can are always seen, with the real clock."""
    memo = DigestMemo(folder)
    end = time.monotonic() + 0.5
    number = 0
    while time.monotonic() < end:
        number += 1
        text = f"{number:07}"
        with file.open("r+b") as out:
            out.write(text.encode())
        assert recall(memo, file) in {None, text}
        remember(memo, file, text)
        assert recall(memo, file) in {None, text}


def test_coarse_time_stamps(file: Path, folder: Path) -> None:
    """Whole-second stamps come from coarse file systems, where two seconds must pass."""
    second = 1_700_000_000 * 10**9
    whole = os.stat_result([*file.stat()[:10]], {**fields(file.stat()), "st_mtime_ns": second, "st_ctime_ns": second})
    for distance, trusted in ((1_999_999_999, False), (2_000_000_000, True)):
        memo = DigestMemo(folder, clock=Clock(second + distance))
        assert memo.put(file, whole, "digest", memo.clock()) is trusted


def fields(status: os.stat_result) -> dict[str, Any]:
    """The named fields of a stat result, for making another."""
    return {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}


def test_clock_set_back(file: Path, folder: Path, later: Clock) -> None:
    """Case 126: a clock behind the one that wrote the memo may stamp a new edit with an old time, so it is a miss."""
    memo = DigestMemo(folder, clock=later)
    assert remember(memo, file)
    later.now -= 1
    assert recall(memo, file) is None
    assert recall(DigestMemo(folder, clock=later), file) is None


def test_file_from_the_future(file: Path, folder: Path) -> None:
    """A file stamped later than now is not trusted."""
    os.utime(file, ns=(time.time_ns() + HOUR, time.time_ns() + HOUR))
    memo = DigestMemo(folder)
    assert not remember(memo, file)
    assert recall(memo, file) is None


def test_replaced_and_swapped(file: Path, folder: Path, later: Clock) -> None:
    """Another file moved to the same path is another file, even with equal size and mtime."""
    memo = DigestMemo(folder, clock=later)
    assert remember(memo, file)
    other = file.with_name("other")
    other.write_bytes(b"WEIGHTS")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.replace(file)
    assert recall(memo, file) is None


def test_path_is_as_requested(file: Path, folder: Path, later: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative and absolute spellings are one; a link is remembered for itself."""
    memo = DigestMemo(folder, clock=later)
    assert remember(memo, file, "one")
    monkeypatch.chdir(file.parent)
    assert memo.get("model.onnx", file.stat()) == "one"
    link = file.with_name("link")
    link.symlink_to(file)
    assert recall(memo, link) is None


def test_strict_trusts_nothing(file: Path, folder: Path, later: Clock) -> None:
    """Strict mode neither recalls nor remembers."""
    assert remember(DigestMemo(folder, clock=later), file)
    strict = DigestMemo(folder, strict=True, clock=later)
    assert recall(strict, file) is None
    assert not remember(strict, file)


MOUNTS = """\
1 0 8:1 / / rw - ext4 /dev/sda rw
2 1 0:30 / /data rw,relatime shared:3 - nfs4 server:/export rw
3 1 0:31 / /data/fast rw - xfs /dev/sdb rw
4 1 0:32 / /with\\040space\\134x rw - cifs //server/share rw
5 1 0:33 / /stack rw - ext4 /dev/sdc rw
6 1 0:34 / /stack rw - fuse.sshfs host: rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/home/m.onnx", "ext4", False),
        ("/data/m.onnx", "nfs4", True),
        ("/database/m.onnx", "ext4", False),
        ("/data/fast/m.onnx", "xfs", False),
        ("/with space\\x/m.onnx", "cifs", True),
        ("/stack/m.onnx", "fuse.sshfs", True),
    ],
)
def test_mounts(path: str, kind: str, network: bool) -> None:
    """The file system of a path is that of its longest mount point, the topmost of stacked ones."""
    found = module._file_system(path.encode(), MOUNTS.encode())
    assert found == kind
    assert module._is_network(found) is network


def test_network_mounts_are_not_trusted(
    file: Path, folder: Path, later: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 126: on a network mount nothing is remembered, nor recalled from what others wrote; links are followed."""
    assert remember(DigestMemo(folder, clock=later), file)
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(module, "_MOUNTS", mounts)
    where = str(file.parent).replace(" ", "\\040")
    local = "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
    mounts.write_text(f"{local}2 1 0:30 / {where} rw - nfs4 server:/export rw\n")
    memo = DigestMemo(folder, clock=later)
    assert recall(memo, file) is None
    assert not remember(memo, file)
    mounts.write_text(local)
    assert recall(memo, file) == "digest"
    mounts.unlink()  # no /proc: nothing can be told
    assert recall(DigestMemo(folder, clock=later), file) is None


def test_folder_is_private(file: Path, folder: Path, later: Clock) -> None:
    """Folders are made for the user alone."""
    old = os.umask(0)
    try:
        assert remember(DigestMemo(folder, clock=later), file)
    finally:
        os.umask(old)
    made = [folder, *folder.rglob("*")]
    assert len(made) == 3
    assert all(path.stat().st_mode & 0o077 == 0 for path in made)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_folder_others_may_write(file: Path, folder: Path, later: Clock, mode: int) -> None:
    """A folder that others may write to is neither read nor written."""
    assert remember(DigestMemo(folder, clock=later), file)
    folder.chmod(mode)
    memo = DigestMemo(folder, clock=later)
    assert recall(memo, file) is None
    other = file.with_name("other")
    other.write_bytes(b"x")
    before = sorted(folder.rglob("*"))
    remember(memo, other)
    assert sorted(folder.rglob("*")) == before


def test_folder_of_someone_else(file: Path, folder: Path, later: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that belongs to another user is left alone."""
    assert remember(DigestMemo(folder, clock=later), file)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert recall(DigestMemo(folder, clock=later), file) is None


def test_unusable_folder(file: Path, tmp_path: Path, later: Clock) -> None:
    """Without a usable folder the memo still works in the process, and nothing is raised."""
    blocked = tmp_path / "a file"
    blocked.write_bytes(b"")
    for folder in (blocked, blocked / "below", Path("/proc/nothing/here")):
        memo = DigestMemo(folder, clock=later)
        assert remember(memo, file)
        assert recall(memo, file) == "digest"


DAMAGE: list[bytes] = [b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"format":"trtwc-memo-1"}']


@pytest.mark.parametrize("damage", [*DAMAGE, "cut", "format", "path", "fifo", "folder", "link", "huge"])
def test_damaged_memo_files(file: Path, folder: Path, later: Clock, damage: bytes | str, tmp_path: Path) -> None:
    """Whatever a memo file has become, it is a miss and is replaced where possible."""
    assert remember(DigestMemo(folder, clock=later), file)
    (stored,) = folder.rglob("*.json")
    whole = stored.read_bytes()
    document = json.loads(whole)
    stored.unlink()
    if isinstance(damage, bytes):
        stored.write_bytes(damage)
    elif damage == "cut":
        stored.write_bytes(whole[:-3])
    elif damage in {"format", "path"}:
        stored.write_text(json.dumps({**document, damage: document[damage] + "x"}))
    elif damage == "fifo":
        os.mkfifo(stored)
    elif damage == "folder":
        stored.mkdir()
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(whole)
        stored.symlink_to(tmp_path / "elsewhere")
    else:
        with stored.open("wb") as out:
            out.write(whole)
            out.truncate(module._MAX_FILE + 1)
    memo = DigestMemo(folder, clock=later)
    assert recall(memo, file) is None
    assert remember(memo, file, "again")
    if damage != "folder":
        assert recall(DigestMemo(folder, clock=later), file) == "again"
    assert [path for path in stored.parent.iterdir() if path != stored] == []


def test_names_that_are_not_utf8(tmp_path: Path, folder: Path, later: Clock) -> None:
    """Any file name that the kernel takes can be remembered."""
    for raw in (b"mod\xe9le.onnx", "模型 😀 100%#.onnx".encode(), b"new\nline"):
        path = tmp_path / os.fsdecode(raw)
        path.write_bytes(b"x")
        memo = DigestMemo(folder, clock=later)
        assert remember(memo, path, raw.hex())
        assert recall(DigestMemo(folder, clock=later), path) == raw.hex()


def test_bounded(tmp_path: Path, later: Clock) -> None:
    """The layer in memory does not grow without end."""
    memo = DigestMemo(None, clock=later)
    path = tmp_path / "f"
    path.write_bytes(b"x")
    status = path.stat()
    for number in range(module._MAX_ENTRIES + 10):
        assert memo.put(tmp_path / str(number), status, "v", later.now)
    assert len(memo._recent) == module._MAX_ENTRIES


CROWD = """
import os, sys, time
from pathlib import Path
from trt_warmcache.memo import DigestMemo
folder, path, gate, count = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
children = []
for number in range(count):
    child = os.fork()
    if child == 0:
        while not gate.exists():
            time.sleep(0.001)
        ok = True
        for round_ in range(30):
            memo = DigestMemo(folder, clock=lambda: time.time_ns() + 10**12)
            status = path.stat()
            found = memo.get(path, status)
            ok &= found is None or (found["size"] == len(found["fill"]) and found["size"] % 1000 == 0)
            memo.put(path, status, {"size": number * 1000, "fill": "x" * number * 1000}, memo.clock() )
        os._exit(0 if ok else 1)
    children.append(child)
gate.touch()
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def test_many_processes(file: Path, folder: Path, tmp_path: Path, run_python: RunPython) -> None:
    """32 processes that read and write one memo at once see nothing or a whole entry, and leave no litter."""
    assert run_python(CROWD, folder, file, tmp_path / "gate", 32).strip() == str([0] * 32)
    assert [path.suffix for path in folder.rglob("*") if path.is_file()] == [".json"]


FORK = """
import os, sys, threading
from pathlib import Path
from trt_warmcache.memo import DigestMemo
path = Path(sys.argv[1])
memo = DigestMemo(None, clock=lambda: path.stat().st_ctime_ns + 10**12)
assert memo.put(path, path.stat(), "parent", memo.clock())
memo._lock.acquire()  # as if another thread were inside it at the fork
child = os.fork()
if child == 0:
    assert memo.put(path, path.stat(), "child", memo.clock())
    os._exit(0 if memo.get(path, path.stat()) == "child" else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_fork(file: Path, run_python: RunPython) -> None:
    """A child forked while another thread held the lock neither hangs nor sees a half-made state."""
    assert run_python(FORK, file).strip() == "0"


def test_many_threads(file: Path, folder: Path, later: Clock) -> None:
    """Threads sharing one memo get nothing or the right value."""
    memo = DigestMemo(folder, clock=later)
    wrong: list[Any] = []

    def act() -> None:
        for _ in range(50):
            found = recall(memo, file)
            if found not in {None, "digest"}:
                wrong.append(found)
            remember(memo, file)

    threads = [threading.Thread(target=act) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_default_folder() -> None:
    """XDG_CACHE_HOME where it is absolute, else ~/.cache."""
    assert default_memo_folder({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/trt_warmcache/digests")
    assert default_memo_folder({"XDG_CACHE_HOME": "c", "HOME": "/h"}) == Path("/h/.cache/trt_warmcache/digests")
    assert default_memo_folder({"HOME": "/h"}) == Path("/h/.cache/trt_warmcache/digests")
    assert default_memo_folder({}).is_absolute()
