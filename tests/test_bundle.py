"""Bundles, copies and whole-store checks: deterministic, verified, and deaf to hostile names."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.stores.fleet import Remote
from tests.support import PROFILE, run_python, tiny_model

import trt_warmcache as twc
from trt_warmcache import manifest as manifests
from trt_warmcache.bundle import copy_store, export_bundle, import_bundle, read_bundle, verify_store
from trt_warmcache.errors import ConfigError, IntegrityError, StoreError, StoreReason
from trt_warmcache.keys import EngineKey, Kind
from trt_warmcache.manifest import CHUNK_BYTES, BlobRef, Labels, Manifest, Provenance
from trt_warmcache.stores import FsspecStore, LayeredStore, LocalStore, MemoryStore, Payload, Store
from trt_warmcache.stores._base import WritePiece, blob_name, manifest_name
from trt_warmcache.testing import FakeBuilder
from trt_warmcache.testing._stores import sample_entry
from trt_warmcache.trust import Keyring, Signer, secured

ENTRIES = [sample_entry(number, b"plan %d " % number * 100) for number in range(3)]


def filled(store: Store | None = None) -> Store:
    """A store with the sample entries."""
    store = store or MemoryStore()
    for manifest, payloads in ENTRIES:
        store.publish(manifest, payloads)
    return store


def everything(store: Store) -> dict[str, bytes]:
    """All entries of a store by key, verified."""
    found = {}
    for kind in Kind:
        for info in store.entries(kind):
            manifest = store.manifest(kind, info.digest)
            assert manifest is not None
            payload = store.fetch(manifest.blobs[0], rehash=True)
            found[info.digest] = bytes(payload.view)
            payload.close()
    return found


ALL = everything(filled())
MANIFESTS = [manifest for manifest, _ in ENTRIES]


def named(name: str, version: str, number: int, kind: Kind = Kind.ENGINE) -> tuple[Manifest, dict[str, bytes]]:
    """An entry with a readable name."""
    key = EngineKey(kind, {"model": f"blake3:{number:064x}"}, f"{name}_{version}_L4_1x3x224x224")
    ref = manifests.describe_blob("plan", b"%d" % number)
    return (
        manifests.seal(key, (ref,), provenance=Provenance(), labels=Labels(name=name, version=version, entry=key.name)),
        {"plan": b"%d" % number},
    )


# ---- bundles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst", ""])
def test_round_trip(tmp_path: Path, suffix: str) -> None:
    """What is exported is imported, byte for byte, from every form; a second import changes nothing."""
    target = tmp_path / f"bundle{suffix}"
    export_bundle(filled(), MANIFESTS, target)
    assert read_bundle(target) == sorted(MANIFESTS, key=lambda one: one.key)
    store = LocalStore(tmp_path / "store")
    assert [row.outcome for row in import_bundle(store, target).rows] == ["copied"] * 3
    assert everything(store) == ALL
    assert [row.outcome for row in import_bundle(store, target).rows] == ["present"] * 3


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst"])
def test_equal_entries_give_equal_bytes(tmp_path: Path, suffix: str) -> None:
    """A bundle depends on nothing but its entries: not on order, time, user, or where they were stored."""
    export_bundle(filled(), MANIFESTS, tmp_path / f"a{suffix}")
    previous = os.umask(0o077)
    try:
        export_bundle(filled(LocalStore(tmp_path / "s")), [*MANIFESTS[::-1], MANIFESTS[0]], tmp_path / f"b{suffix}")
    finally:
        os.umask(previous)
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_names_are_for_people(tmp_path: Path) -> None:
    """Files are called by model, version, GPU and shape, with the right ending, and a digest only where they collide."""
    store = MemoryStore()
    entries = [named("face", "7", 1), named("ocr", "1", 2), named("OCR", "1", 3), named("face", "7", 4, Kind.TIMING)]
    for manifest, payloads in entries:
        store.publish(manifest, payloads)
    export_bundle(store, [manifest for manifest, _ in entries], tmp_path / "b")
    found = {path.name for path in (tmp_path / "b").iterdir() if not path.name.endswith(".json")}
    keys = [manifest.key[:12] for manifest, _ in entries]
    assert found == {
        "face_7_L4_1x3x224x224.engine", f"ocr_1_L4_1x3x224x224-{keys[1]}.engine",
        f"OCR_1_L4_1x3x224x224-{keys[2]}.engine", "face_7_L4_1x3x224x224.cache", "SHA256SUMS",
    }  # fmt: skip


def test_ordinary_tools_can_read_it(tmp_path: Path) -> None:
    """tar unpacks it and sha256sum agrees."""
    export_bundle(filled(), MANIFESTS, tmp_path / "b.tar")
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "b.tar", "-C", tmp_path / "out"], check=True)
    subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=tmp_path / "out", check=True)


def test_bundles_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder bundle holds no path: moved, made read-only and read from elsewhere it is the same bundle."""
    export_bundle(filled(), MANIFESTS, tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    for path in (tmp_path / "there").iterdir():
        path.chmod(0o444)
        assert str(tmp_path).encode() not in path.read_bytes()
    (tmp_path / "there").chmod(0o555)
    monkeypatch.chdir("/")
    store = MemoryStore()
    import_bundle(store, tmp_path / "there")
    assert everything(store) == ALL


def test_choosing(tmp_path: Path) -> None:
    """Only what is chosen is exported, and only what is chosen is imported."""
    export_bundle(filled(), MANIFESTS[:2], tmp_path / "b.tar")
    store = MemoryStore()
    import_bundle(store, tmp_path / "b.tar", choose=lambda manifest: manifest == MANIFESTS[1])
    assert list(everything(store)) == [MANIFESTS[1].key]
    with pytest.raises(ConfigError):
        export_bundle(filled(), [], tmp_path / "c.tar")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    with pytest.raises(ConfigError, match="not empty"):
        export_bundle(filled(), MANIFESTS, tmp_path / "full")


def test_occupied_keys_stay(tmp_path: Path) -> None:
    """An entry that the store already holds otherwise is left alone, and the report says so."""
    export_bundle(filled(), MANIFESTS[:1], tmp_path / "b.tar")
    other, payloads = sample_entry(0, b"another plan", created=1.0)
    store = MemoryStore()
    store.publish(other, payloads)
    assert [row.outcome for row in import_bundle(store, tmp_path / "b.tar").rows] == ["differs"]
    assert store.manifest(Kind.ENGINE, other.key) == other


def test_damaged_payload_is_not_exported(tmp_path: Path) -> None:
    """A damaged entry stops the export, and leaves no file behind."""
    store = filled()
    store.write(blob_name(MANIFESTS[1].blobs[0]), b"x" * MANIFESTS[1].size)
    with pytest.raises(IntegrityError):
        export_bundle(store, MANIFESTS, tmp_path / "b.tar")
    assert list(tmp_path.iterdir()) == []


def test_signatures_travel(tmp_path: Path) -> None:
    """A signed entry is a signed entry after export and import."""
    signer = Signer.generate("release-1")
    source, target = MemoryStore(), MemoryStore()
    secured(source, signer=signer).publish(*ENTRIES[0])
    found = source.manifest(Kind.ENGINE, MANIFESTS[0].key)
    assert found is not None
    export_bundle(source, [found], tmp_path / "b.tar")
    import_bundle(target, tmp_path / "b.tar")
    assert secured(target, keyring=Keyring([signer.public])).manifest(Kind.ENGINE, found.key) == found


# ---- hostile bundles --------------------------------------------------------------------------------------------


def rewrite(source: Path, target: Path, change: Callable[[tarfile.TarInfo, bytes], Any]) -> None:
    """A tar with each member changed: `change` returns what to add instead, as pairs."""
    with tarfile.open(source) as old, tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as new:
        for member in old:
            file = old.extractfile(member)
            data = file.read() if file is not None else b""
            for changed, content in change(member, data):
                changed.size = len(content)
                new.addfile(changed, io.BytesIO(content))


def extra(**fields: Any) -> Callable[[tarfile.TarInfo, bytes], Any]:
    """Add one odd member beside the others."""

    def change(member: tarfile.TarInfo, data: bytes) -> Any:
        yield member, data
        if member.name == "SHA256SUMS":
            odd = tarfile.TarInfo(fields.get("name", "odd"))
            odd.type = fields.get("type", tarfile.REGTYPE)
            odd.linkname = fields.get("linkname", "")
            yield odd, b"" if odd.type != tarfile.REGTYPE else b"evil"

    return change


HOSTILE = {
    "parent": extra(name="../evil"),
    "deep parent": extra(name="a/../../evil"),
    "absolute": extra(name="/tmp/evil"),
    "drive": extra(name="C:evil"),
    "drive path": extra(name="C:\\evil"),
    "unc": extra(name="\\\\host\\share\\evil"),
    "folder": extra(name="sub/evil"),
    "hidden": extra(name=".evil"),
    "nul": extra(name="ev\nil"),
    "symlink": extra(name="link", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard link": extra(name="link", type=tarfile.LNKTYPE, linkname="SHA256SUMS"),
    "device": extra(name="dev", type=tarfile.CHRTYPE),
    "fifo": extra(name="fifo", type=tarfile.FIFOTYPE),
    "directory": extra(name="dir", type=tarfile.DIRTYPE),
    "duplicate": extra(name="SHA256SUMS"),
    "duplicate by case": extra(name="sha256sums"),
    "unlisted": extra(name="unlisted.engine"),
    "long": extra(name="x" * 5000),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_members(tmp_path: Path, kind: str) -> None:
    """A bundle with a member that could lead astray is refused whole: nothing is stored, nothing written anywhere."""
    export_bundle(filled(), MANIFESTS, tmp_path / "good.tar")
    rewrite(tmp_path / "good.tar", tmp_path / "bad.tar", HOSTILE[kind])
    before = sorted(tmp_path.rglob("*"))
    store = MemoryStore()
    with pytest.raises(IntegrityError) as caught:
        import_bundle(store, tmp_path / "bad.tar")
    assert caught.value.reason == "bundle"
    assert everything(store) == {}
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/tmp/evil").exists()


def edit_index(change: Callable[[dict[str, Any]], None]) -> Callable[[tarfile.TarInfo, bytes], Any]:
    """Change the list of what belongs to what."""

    def act(member: tarfile.TarInfo, data: bytes) -> Any:
        if member.name == "trt_warmcache-bundle.json":
            document = json.loads(data)
            change(document)
            data = json.dumps(document).encode()
        yield member, data

    return act


LIES = {
    "path": lambda d: d["entries"][0].update(manifest="../../etc/passwd"),
    "absolute payload": lambda d: d["entries"][0]["payloads"].update(plan="/etc/passwd"),
    "shared payload": lambda d: d["entries"][0].update(payloads=d["entries"][1]["payloads"]),
    "other key": lambda d: d["entries"][0].update(key="0" * 64),
    "path as key": lambda d: d["entries"][0].update(key="../" * 20 + "abcd"),
    "other kind": lambda d: d["entries"][0].update(kind="timing"),
    "odd kind": lambda d: d["entries"][0].update(kind="../x"),
    "role": lambda d: d["entries"][0].update(payloads={}),
    "format": lambda d: d.update(format="trt_warmcache-bundle/9"),
    "no list": lambda d: d.pop("entries"),
}


@pytest.mark.parametrize("kind", LIES)
def test_lying_index(tmp_path: Path, kind: str) -> None:
    """A list that does not fit the files is refused, and no path in it is ever opened."""
    export_bundle(filled(), MANIFESTS, tmp_path / "good.tar")
    rewrite(tmp_path / "good.tar", tmp_path / "bad.tar", edit_index(LIES[kind]))
    store = MemoryStore()
    with pytest.raises(IntegrityError):
        import_bundle(store, tmp_path / "bad.tar")
    assert everything(store) == {}


@pytest.mark.parametrize(
    "data", [b"", b"x", b"\x80\x04pickle", b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfdjunk", b"\0" * 10240]
)
def test_no_bundle_at_all(tmp_path: Path, data: bytes) -> None:
    """What is no bundle is refused as damaged."""
    (tmp_path / "b.tar").write_bytes(data)
    with pytest.raises(IntegrityError):
        read_bundle(tmp_path / "b.tar")


def test_missing_bundle(tmp_path: Path) -> None:
    """A bundle that is not there is a store error."""
    with pytest.raises(StoreError):
        read_bundle(tmp_path / "none.tar")


def test_every_cut_and_many_flips(tmp_path: Path) -> None:
    """However a bundle is cut or flipped: an entry is imported right, or not at all."""
    export_bundle(filled(), MANIFESTS, tmp_path / "b.tar")
    whole = (tmp_path / "b.tar").read_bytes()
    bad = tmp_path / "bad.tar"
    for number in range(0, len(whole), 97):
        for data in (whole[:number], whole[:number] + bytes([whole[number] ^ 0x41]) + whole[number + 1 :]):
            bad.write_bytes(data)
            store = MemoryStore()
            with contextlib.suppress(IntegrityError):
                import_bundle(store, bad)
            for key, plan in everything(store).items():
                assert ALL[key] == plan


def test_folder_with_a_link(tmp_path: Path) -> None:
    """A link in a folder bundle is refused, also where it leads to a file of the right content."""
    export_bundle(filled(), MANIFESTS, tmp_path / "b")
    victim = next(path for path in (tmp_path / "b").iterdir() if path.suffix == ".engine")
    victim.rename(tmp_path / "elsewhere")
    victim.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IntegrityError, match="plain file"):
        import_bundle(MemoryStore(), tmp_path / "b")


# ---- copying ----------------------------------------------------------------------------------------------------


def test_copy_sends_what_is_missing(tmp_path: Path) -> None:
    """Only what the target lacks is sent; a second run sends nothing."""
    source, target = filled(LocalStore(tmp_path)), Remote(MemoryStore())
    target.publish(*ENTRIES[0])
    target.calls.clear()
    report = copy_store(source, target)
    assert [row.outcome for row in report.rows].count("copied") == 2
    assert report.count("present") == 1
    assert len(target.names("put_blob")) == 2
    assert everything(target) == ALL
    target.calls.clear()
    assert copy_store(source, target).size == 0
    assert target.names("put_blob") == target.names("create") == []


def test_copy_resumes_after_a_kill(tmp_path: Path) -> None:
    """A copy killed half-way is finished by another, without sending again what has arrived."""
    filled(LocalStore(tmp_path / "a"))
    code = """
import os, signal, sys
from trt_warmcache.bundle import copy_store
from trt_warmcache.stores import LocalStore
from trt_warmcache.testing import FlakyStore
def die(call, name):
    if call == "create":
        os.kill(os.getpid(), signal.SIGKILL)
copy_store(LocalStore(sys.argv[1]), FlakyStore(LocalStore(sys.argv[2]), die), workers=1)
"""
    with pytest.raises(AssertionError):
        run_python(code, tmp_path / "a", tmp_path / "b")
    target = Remote(LocalStore(tmp_path / "b"))
    copy_store(LocalStore(tmp_path / "a"), target)
    assert everything(target) == ALL
    assert len(target.names("put_blob")) == 2


def test_copy_into_a_folder_needs_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes from afar is written where it stays, piece by piece, and never held whole."""
    source = MemoryStore()
    manifest, payloads = sample_entry(1, bytes(range(250)) * 100_000)
    source.publish(manifest, payloads)
    pieces: list[int] = []

    def fetch_into(ref: BlobRef, write: WritePiece) -> None:
        for at in range(0, ref.size, CHUNK_BYTES):
            piece = payloads[ref.role][at : at + CHUNK_BYTES]
            pieces.append(len(piece))
            write(piece, at)

    monkeypatch.setattr(source, "fetch_into", fetch_into)
    monkeypatch.setattr(source, "fetch", None)
    report = copy_store(source, LocalStore(tmp_path))
    assert (report.count("copied"), report.size, sum(pieces)) == (1, manifest.size, manifest.size)
    monkeypatch.undo()
    assert verify_store(LocalStore(tmp_path)).good == 1


def test_copy_verifies(tmp_path: Path) -> None:
    """A damaged entry of the source is reported and not copied; the others are."""
    source, target = filled(LocalStore(tmp_path)), MemoryStore()
    bad = MANIFESTS[1]
    (tmp_path / "trtwc-1" / blob_name(bad.blobs[0])).write_bytes(b"x" * bad.size)
    report = copy_store(source, target)
    assert not report.ok
    assert [row.key for row in report.rows if row.error] == [bad.key]
    assert set(everything(target)) == set(ALL) - {bad.key}


def test_copy_repairs_the_target(tmp_path: Path) -> None:
    """What is damaged or half there in the target is made whole."""
    target = LocalStore(tmp_path)
    filled(target)
    (tmp_path / "trtwc-1" / manifest_name(Kind.ENGINE, MANIFESTS[0].key)).write_bytes(b"{")
    (tmp_path / "trtwc-1" / blob_name(MANIFESTS[1].blobs[0])).unlink()
    copy_store(filled(), target)
    assert everything(target) == ALL


def test_copy_stops_where_nothing_can_be_written() -> None:
    """A full or forbidden target ends the copy with that error, not with one failure per entry."""

    def full(call: str, name: str) -> None:
        if call == "put_blob":
            raise StoreError("no space left", reason=StoreReason.FULL, store="x")

    with pytest.raises(StoreError) as caught:
        copy_store(filled(), Remote(MemoryStore(), full))
    assert caught.value.reason is StoreReason.FULL


def test_copy_into_layers(tmp_path: Path) -> None:
    """A layered target gets the entries in all its writable layers."""
    near, far = LocalStore(tmp_path), MemoryStore()
    copy_store(filled(), LayeredStore([near, Remote(far)]))
    assert everything(near) == everything(far) == ALL


def test_copy_into_layers_packs_for_the_far_one(tmp_path: Path) -> None:
    """A copy into a folder and a bucket leaves mappable bytes in the one and packed ones in the other."""
    source, far = MemoryStore(), FsspecStore(f"memory://copied-{tmp_path.name}")
    source.publish(*sample_entry(1, b"some text " * 50_000))
    near = LocalStore(tmp_path)
    assert copy_store(source, LayeredStore([near, far])).count("copied") == 1
    assert [info.name.endswith(".zst") for info in far.list("blobs/")] == [True]
    assert [info.name.endswith(".zst") for info in near.list("blobs/")] == [False]
    assert verify_store(far).good == verify_store(near).good == 1


def test_any_tool_can_copy_the_tree(tmp_path: Path) -> None:
    """A copy of the folder made with cp is a working store, also read-only and as the lower layer of another."""
    model = tiny_model()
    with twc.EngineManager(tmp_path / "a", builder=FakeBuilder(), memo=twc.DigestMemo(None)) as manager:
        manager.get(model, profiles=PROFILE)
    subprocess.run(["cp", "-r", tmp_path / "a", tmp_path / "image"], check=True)
    before = sorted(path for path in (tmp_path / "image").rglob("*"))
    image = twc.Layer(LocalStore(tmp_path / "image", read_only=True))
    builder = FakeBuilder()
    with twc.EngineManager([tmp_path / "disk", image], builder=builder, memo=twc.DigestMemo(None)) as manager:
        assert manager.get(model, profiles=PROFILE).outcome is twc.Outcome.HIT
    assert builder.builds == 0
    assert sorted(path for path in (tmp_path / "image").rglob("*")) == before


# ---- checking ---------------------------------------------------------------------------------------------------


def test_verify_finds_all_damage(tmp_path: Path) -> None:
    """Every damaged entry is found, by several threads, with progress; on request it is set aside."""
    store = filled(LocalStore(tmp_path))
    assert verify_store(store).ok
    (tmp_path / "trtwc-1" / blob_name(MANIFESTS[0].blobs[0])).write_bytes(b"")
    (tmp_path / "trtwc-1" / manifest_name(Kind.ENGINE, MANIFESTS[1].key)).write_bytes(b"{}")
    seen: list[tuple[int, int, int]] = []
    report = verify_store(store, progress=lambda *now: seen.append(now), quarantine=True)
    assert (report.good, len(report.bad)) == (1, 2)
    assert [done for done, _, _ in seen] == [1, 2, 3]
    assert verify_store(store).good == 1
    assert verify_store(store).ok


def test_verify_goes_on_past_what_cannot_be_read(tmp_path: Path) -> None:
    """One file on a bad sector does not hide the state of the others; a service that is down is an error at once."""

    class BadSector(LocalStore):
        def fetch(self, ref: BlobRef, *, rehash: bool = False) -> Payload:
            if ref == MANIFESTS[1].blobs[0]:
                raise StoreError("Input/output error", reason=StoreReason.UNAVAILABLE, store=self.url)
            return super().fetch(ref, rehash=rehash)

    report = verify_store(filled(BadSector(tmp_path)))
    assert report.good == 2
    assert [(digest, str(error)) for _, digest, error in report.bad] == [(MANIFESTS[1].key, "Input/output error")]

    def down(call: str, name: str) -> None:
        if call == "fetch":
            raise StoreError("down", reason=StoreReason.UNAVAILABLE, store="far")

    with pytest.raises(StoreError, match="down"):
        verify_store(Remote(filled(), down))


def test_verify_runs_in_parallel() -> None:
    """Entries are checked at the same time, not one after the other."""
    barrier = threading.Barrier(3, timeout=10)

    def meet(call: str, name: str) -> None:
        if call == "fetch":
            barrier.wait()

    assert verify_store(Remote(filled(), meet), workers=3).ok


def test_verify_checks_signatures() -> None:
    """With keys, an unsigned entry is a finding, and is not set aside like damage."""
    signer = Signer.generate("release-1")
    store = filled()
    report = verify_store(secured(store, keyring=Keyring([signer.public])), quarantine=True)
    assert len(report.bad) == 3
    assert everything(store) == ALL
