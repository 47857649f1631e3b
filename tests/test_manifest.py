"""Manifests: what is written is what is read, and nothing damaged or foreign is taken for one."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_warmcache import manifest as manifests
from trt_warmcache.errors import IntegrityError
from trt_warmcache.keys import KEY_SCHEMA, EngineKey, Kind, digest_of
from trt_warmcache.manifest import BlobRef, Labels, Manifest, Provenance, decode, describe_blob, encode, seal

PARTS = {"model": "blake3:" + "0" * 64, "profiles": [{"shapes": {"输入": [[1], [2], [4]]}}], "options.fp16": True}
KEY = EngineKey(Kind.ENGINE, PARTS, "m_1_L4_1")
MANIFEST = seal(
    KEY,
    (describe_blob("plan", b"a plan"), describe_blob("timing", b"timings")),
    provenance=Provenance(
        created=1.5, build_seconds=3.25, creator="tests 1", target={"gpu": "L4"}, warnings=("one", "两")
    ),
    labels=Labels(name="面", version="7", entry=KEY.name),
    extra={"b": 1, "a": [None, 2.5]},
)
DOCUMENT: dict[str, Any] = msgspec.json.decode(encode(MANIFEST))


def read(document: Any, *, kind: Kind = Kind.ENGINE, digest: str = KEY.digest) -> Manifest:
    """Decode a document as if it had been found under the sample's name."""
    data = document if isinstance(document, bytes) else msgspec.json.encode(document)
    return decode(data, kind=kind, digest=digest)


def reason(document: Any, **where: Any) -> str:
    """Why a document is refused."""
    with pytest.raises(IntegrityError) as caught:
        read(document, **where)
    assert caught.value.name.endswith(where.get("digest", KEY.digest))
    return caught.value.reason


def test_round_trip() -> None:
    """A manifest comes back equal."""
    assert read(encode(MANIFEST)) == MANIFEST
    assert MANIFEST.size == 13
    assert MANIFEST.blob("timing").size == 7
    with pytest.raises(IntegrityError, match="no 'calibration' payload"):
        MANIFEST.blob("calibration")


def test_encoding_is_deterministic() -> None:
    """Equal manifests are equal bytes, whatever order their mappings were filled in."""
    shuffled = seal(
        EngineKey(Kind.ENGINE, dict(reversed(PARTS.items())), "m_1_L4_1"),
        MANIFEST.blobs,
        provenance=MANIFEST.provenance,
        labels=MANIFEST.labels,
        extra=dict(reversed(MANIFEST.extra.items())),
    )
    assert encode(shuffled) == encode(MANIFEST)


def test_unknown_fields_are_ignored() -> None:
    """A later minor release may add fields anywhere."""
    more = {**DOCUMENT, "later": {"x": [1]}, "labels": {**DOCUMENT["labels"], "later": 1}}
    more["blobs"] = [{**blob, "later": None} for blob in DOCUMENT["blobs"]]
    assert read(more) == MANIFEST


@pytest.mark.parametrize("field", ["format", "kind", "key", "schema", "parts", "blobs"])
def test_missing_fields(field: str) -> None:
    """Nothing that matters may be missing, null, or of another type."""
    assert reason({name: value for name, value in DOCUMENT.items() if name != field}) == "manifest"
    assert reason({**DOCUMENT, field: None}) == "manifest"
    assert reason({**DOCUMENT, field: 1.5}) == "manifest"


@pytest.mark.parametrize(
    "document",
    [
        {**DOCUMENT, "format": "trt_warmcache/2"},
        {"format": "trt_warmcache/2", "wholly": "different"},
        {"format": "trt_warmcache/17"},
    ],
)
def test_other_major_format(document: Any) -> None:
    """A document of another major release is not damage: it is left alone."""
    assert reason(document) == "format"


def test_wrong_name() -> None:
    """A manifest found under another key or kind, such as a file copied over another, is refused."""
    assert reason(encode(MANIFEST), digest="0" * 64) == "manifest"
    assert reason(encode(MANIFEST), kind=Kind.TIMING) == "manifest"
    assert reason({**DOCUMENT, "key": "0" * 64}) == "manifest"
    assert reason({**DOCUMENT, "kind": "timing"}) == "manifest"


@pytest.mark.parametrize(
    "parts",
    [
        {**PARTS, "model": "blake3:" + "1" * 64},
        {},
        {**PARTS, "x": 1.5},
        {**PARTS, "x": 2**70},
        {**PARTS, "x": [[[]]]},
        {**PARTS, "options.fp16": 1},
    ],
)
def test_parts_must_give_the_key(parts: Any) -> None:
    """The parts that an entry lists are those of its key; parts that no key can have are damage too."""
    assert reason({**DOCUMENT, "parts": parts}) == "manifest"


def test_parts_of_another_recipe() -> None:
    """An entry made by another key recipe can be read, for explanations; its digest is its own."""
    assert read({**DOCUMENT, "schema": KEY_SCHEMA + 1, "parts": {"other": 1}}).parts == {"other": 1}


@pytest.mark.parametrize(
    "blob",
    [
        {"size": -1},
        {"size": 2**70},
        {"size": 1.5},
        {"digest": "blake3:" + "0" * 63},
        {"digest": "blake3:../../../etc/passwd" + "0" * 41},
        {"digest": "blake3:" + "A" * 64},
        {"digest": "0" * 64 + "\n"},
        {"digest": ""},
        {"chunks": ["0" * 64]},
        {"size": manifests.CHUNK_BYTES + 1, "chunks": ["0" * 64]},
        {"size": manifests.CHUNK_BYTES + 1, "chunks": ["0" * 64, "x" * 64]},
        {"role": None},
    ],
)
def test_impossible_blobs(blob: Any) -> None:
    """A payload whose size, digest or chunks cannot be is refused before anything is fetched."""
    assert reason({**DOCUMENT, "blobs": [{**DOCUMENT["blobs"][0], **blob}]}) == "manifest"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\x80\x04\x95",
        b"\xef\xbb\xbf{}",
        b"[" * 1_000_000,
        b'{"a":' * 500_000,
        encode(MANIFEST)[:-40],
        encode(MANIFEST) + b"{}",
        encode(MANIFEST).replace("面".encode(), b"\xff\xfe"),
        encode(MANIFEST) + b" " * manifests.MAX_MANIFEST_BYTES,
    ],
    ids=lambda data: f"{len(data)} bytes",
)
def test_damage(data: bytes) -> None:
    """Empty, cut, foreign, bottomless and oversized files are refused, quickly."""
    started = time.perf_counter()
    assert reason(data) == "manifest"
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize("field", ["extra", "later", "parts"])
@pytest.mark.parametrize("depth", [100, 900, 3000, 100_000])
def test_nesting_is_bounded(field: str, depth: int) -> None:
    """Deep nesting in any field is read or refused, and never ends the process."""
    nested = b"[" * depth + b"]" * depth
    document = encode(MANIFEST).rstrip()[:-1] + b',"%s":{"x":%s}}' % (field.encode(), nested)
    with contextlib.suppress(IntegrityError):
        assert read(document).key == KEY.digest


@settings(max_examples=300)
@given(st.floats(0, 0.999), st.integers(0, 255))
def test_any_byte_changed(where: float, value: int) -> None:
    """A manifest with any byte changed is refused, or says the same of its key and payload sizes."""
    data = bytearray(encode(MANIFEST))
    data[int(where * len(data))] = value
    try:
        found = read(bytes(data))
    except IntegrityError:
        return
    assert found.key == KEY.digest
    assert found.schema != KEY_SCHEMA or digest_of(Kind.ENGINE, found.parts) == KEY.digest


def test_a_good_manifest_lends_no_trust_to_another() -> None:
    """Checks are skipped for the very bytes that passed them, and each reader gets a manifest of its own."""
    data = encode(MANIFEST)
    read(data).extra["b"] = read(data).parts["model"] = "changed by a caller"
    assert read(data) == MANIFEST
    digest = describe_blob("plan", b"a plan").hex
    assert data.count(digest.encode()) == 1
    assert reason(data.replace(digest.encode(), b"../" + digest[3:].encode())) == "manifest"
    assert reason(data, digest="0" * 64) == "manifest"
    assert reason(data, kind=Kind.TIMING) == "manifest"
    assert read(data) == MANIFEST


def test_describe_blob() -> None:
    """Payloads of more than one chunk carry a digest for each."""
    one = describe_blob("plan", b"x" * manifests.CHUNK_BYTES)
    many = describe_blob("plan", bytearray(manifests.CHUNK_BYTES * 2 + 1))
    assert one.chunks == ()
    assert len(many.chunks) == 3
    assert many.chunks[0] == many.chunks[1] != many.chunks[2]
    assert describe_blob("plan", memoryview(b"abcd").cast("I")) == describe_blob("plan", b"abcd")
    assert isinstance(one, BlobRef)
    assert one.hex == one.digest.removeprefix("blake3:")
