"""Signatures: what no trusted key has signed for this very key never reaches a builder."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.stores.fleet import Heard, Remote
from tests.support import PROFILE, tiny_model

import trt_warmcache as twc
from trt_warmcache import manifest as manifests
from trt_warmcache.builders import BuilderCapabilities
from trt_warmcache.errors import ConfigError, IntegrityError, StoreError, UntrustedError
from trt_warmcache.events import EventKind
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import Manifest
from trt_warmcache.policy import Trust
from trt_warmcache.stores import Layer, LayeredStore, LocalStore, MemoryStore
from trt_warmcache.stores._base import manifest_name
from trt_warmcache.testing import FakeBuilder
from trt_warmcache.testing._stores import sample_entry
from trt_warmcache.trust import Keyring, PublicKey, SignedStore, Signer, secured, signed_bytes

SIGNER = Signer.generate("release-1")
OTHER = Signer.generate("stranger-1")
RING = Keyring([SIGNER.public])
ENTRY, PAYLOADS = sample_entry(1, b"a plan")


class Watchful(FakeBuilder):
    """A builder that notes every byte shown to it."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.seen: list[bytes] = []

    def check_plan(self, plan: memoryview, *, older: bool = False) -> None:
        self.seen.append(bytes(plan))


def manager(store: Any, **fields: Any) -> twc.EngineManager:
    """A manager with a fake builder and no memo."""
    return twc.EngineManager(store, **{"builder": FakeBuilder(), "memo": twc.DigestMemo(None), **fields})


SIGNED = twc.Policy(trust=Trust.SIGNED)


# ---- keys -------------------------------------------------------------------------------------------------------


def test_text_forms_round_trip(tmp_path: Path) -> None:
    """Keys survive being written and read; the secret file is readable by its owner only and never overwritten."""
    path = tmp_path / "key"
    SIGNER.save(path)
    assert Signer.load(path) == SIGNER
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="never overwritten"):
        SIGNER.save(path)
    assert PublicKey.parse(str(SIGNER.public)) == SIGNER.public
    with pytest.raises(ConfigError):
        PublicKey.parse(path.read_text())
    assert "trtwc-secret" not in repr(SIGNER)
    assert base64.b64encode(SIGNER._seed).decode() not in repr(SIGNER)
    assert pickle.loads(pickle.dumps(SIGNER)).public == SIGNER.public


@pytest.mark.parametrize(
    "text", ["", "x", "trtwc-public:a:b:c", "trtwc-public:nonumber:AAAA", "trtwc-public:a-1:AAAA", "trtwc-public:a-1:%"]
)
def test_bad_keys_are_refused(text: str) -> None:
    """What is no key is a configuration error, and is not repeated in the message where it may be secret."""
    with pytest.raises(ConfigError):
        PublicKey.parse(text)
    with pytest.raises(ConfigError):
        Signer.parse(text)


def test_keyring_file(tmp_path: Path) -> None:
    """A file of keys: one a line, comments, revocations."""
    path = tmp_path / "trusted"
    path.write_text(f"# our keys\n\n{SIGNER.public}\n{OTHER.public}\nrevoked stranger-1\n")
    assert Keyring.load(path).key_ids == ("release-1",)
    with pytest.raises(ConfigError):
        Keyring.load(tmp_path / "none")


def test_one_id_means_one_key() -> None:
    """Two keys of one id are refused: a new key gets a new number."""
    with pytest.raises(ConfigError, match="new number"):
        Keyring([SIGNER.public, Signer.generate("release-1").public])


# ---- signatures -------------------------------------------------------------------------------------------------


def test_sign_and_verify() -> None:
    """A signed manifest verifies, and the signature is deterministic, so that equal manifests stay equal bytes."""
    signed = SIGNER.sign(ENTRY)
    assert RING.verify(signed) == "release-1"
    assert SIGNER.sign(ENTRY) == signed
    assert SIGNER.sign(signed) == signed
    assert signed_bytes(signed) == signed_bytes(ENTRY)


def test_signed_bytes_are_pinned() -> None:
    """What is signed does not change from release to release without notice."""
    manifest, _ = sample_entry(1, b"a plan", created=1.5)
    assert signed_bytes(manifest) == (
        b"trt_warmcache manifest signature 1\n"
        b'{"blobs":[{"digest":"blake3:' + manifest.blobs[0].hex.encode() + b'","role":"plan","size":6}],'
        b'"format":"trt_warmcache/1","key":"' + manifest.key.encode() + b'","kind":"engines",'
        b'"labels":{"entry":"sample-1"},"parts":{"model":"blake3:' + b"0" * 63 + b'1","profiles":[]},'
        b'"provenance":{"created":1.5},"schema":1}'
    )


@pytest.mark.parametrize("change", ["key", "parts", "blobs", "labels", "provenance", "extra"])
def test_any_change_breaks_it(change: str) -> None:
    """The signature covers every field."""
    other, _ = sample_entry(2, b"another")
    values = {
        "key": other.key, "parts": other.parts, "blobs": other.blobs, "labels": manifests.Labels(name="x"),
        "provenance": manifests.Provenance(created=1.0), "extra": {"x": 1},
    }  # fmt: skip
    changed = msgspec.structs.replace(SIGNER.sign(ENTRY), **{change: values[change]})
    with pytest.raises(UntrustedError) as caught:
        RING.verify(changed)
    assert caught.value.reason == "wrong-signature"


def test_rotation() -> None:
    """With two signatures an entry serves those who trust the old key and those who trust the new one."""
    new = Signer.generate("release-2")
    both = new.sign(SIGNER.sign(ENTRY))
    assert RING.verify(both) == "release-1"
    assert Keyring([new.public]).verify(both) == "release-2"
    assert Keyring([SIGNER.public, new.public], revoked=["release-1"]).verify(both) == "release-2"


def refused(reason: str) -> Manifest:
    """A manifest that must be refused for this reason."""
    made = {
        "unsigned": ENTRY,
        "unknown-key": OTHER.sign(ENTRY),
        "wrong-signature": msgspec.structs.replace(ENTRY, signature={"release-1": "AAAA"}),
        "revoked": SIGNER.sign(ENTRY),
    }
    return made[reason]


@pytest.mark.parametrize("reason", ["unsigned", "unknown-key", "wrong-signature", "revoked"])
def test_refusals_name_their_reason(reason: str) -> None:
    """Each kind of refusal has its own word and a sentence that names the entry."""
    ring = Keyring([SIGNER.public], revoked=["release-1"]) if reason == "revoked" else RING
    store = MemoryStore()
    store.publish(refused(reason), PAYLOADS)
    with pytest.raises(UntrustedError, match=ENTRY.key) as caught:
        SignedStore(store, keyring=ring).manifest(Kind.ENGINE, ENTRY.key)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "junk", [{"release-1": 7}, {"release-1": None}, {"release-1": "A" * 10**6}, {"": ""}, {"release-1": "é"}]
)
def test_junk_signatures(junk: dict[str, Any]) -> None:
    """Whatever stands where a signature should be is a refusal, never another error."""
    with pytest.raises(UntrustedError):
        RING.verify_document({**ENTRY.to_json(), "signature": junk}, "x")


def test_rebound_entry() -> None:
    """A genuine, signed manifest that somebody moved under another key is refused as untrusted."""
    store, (victim, _) = MemoryStore(), sample_entry(2)
    store.write(manifest_name(Kind.ENGINE, victim.key), manifests.encode(SIGNER.sign(ENTRY)))
    with pytest.raises(UntrustedError) as caught:
        SignedStore(store, keyring=RING).manifest(Kind.ENGINE, victim.key)
    assert caught.value.reason == "rebound"


@pytest.mark.parametrize("data", [b"", b"{", b"\x80\x04pickle", b"[" * 10**6, b"[]", b"null"])
def test_damage_stays_damage(data: bytes) -> None:
    """Bytes that are no manifest at all are damage, not distrust."""
    store = MemoryStore()
    store.write(manifest_name(Kind.ENGINE, ENTRY.key), data)
    with pytest.raises(IntegrityError):
        SignedStore(store, keyring=RING).manifest(Kind.ENGINE, ENTRY.key)


def test_fields_of_later_releases_are_covered() -> None:
    """A field this release does not know is part of what was signed: verified when whole, refused when changed."""
    document = {**ENTRY.to_json(), "later": {"x": 1.25, "y": [1, None]}}
    from cryptography.hazmat.primitives.asymmetric import ed25519

    from trt_warmcache.trust import _canonical

    private = ed25519.Ed25519PrivateKey.from_private_bytes(SIGNER._seed)
    document["signature"] = {"release-1": base64.b64encode(private.sign(_canonical(document))).decode()}
    store = MemoryStore()
    name = manifest_name(Kind.ENGINE, ENTRY.key)
    store.write(name, msgspec.json.encode(document))
    assert SignedStore(store, keyring=RING).manifest(Kind.ENGINE, ENTRY.key) is not None
    store.write(name, msgspec.json.encode({**document, "later": {}}))
    with pytest.raises(UntrustedError):
        SignedStore(store, keyring=RING).manifest(Kind.ENGINE, ENTRY.key)


# ---- managers ---------------------------------------------------------------------------------------------------


def test_signed_by_one_used_by_another(tmp_path: Path) -> None:
    """What a signing manager builds, a manager that trusts its key uses, in another process later."""
    model = tiny_model()
    with manager(tmp_path, signer=SIGNER) as builder:
        assert builder.get(model, profiles=PROFILE).outcome is twc.Outcome.BUILT
    with manager(tmp_path, keyring=RING, policy=SIGNED) as user:
        assert user.get(model, profiles=PROFILE).outcome is twc.Outcome.HIT


@pytest.mark.parametrize("signer", [None, OTHER])
@pytest.mark.parametrize("per_request", [False, True])
def test_untrusted_never_reaches_the_builder(tmp_path: Path, signer: Signer | None, per_request: bool) -> None:
    """An entry that is unsigned, or signed by a stranger, is refused before the builder sees a byte of it."""
    model = tiny_model()
    with manager(tmp_path, signer=signer) as builder:
        builder.get(model, profiles=PROFILE)
    watchful = Watchful()
    policy, request = (twc.Policy(), {"policy": SIGNED}) if per_request else (SIGNED, {})
    with manager(tmp_path, builder=watchful, keyring=RING, policy=policy) as user:
        for call in (user.get, user.lookup):
            with pytest.raises(UntrustedError):
                call(model, profiles=PROFILE, **request)
    assert watchful.seen == []
    assert watchful.builds == 0


def test_timing_caches_need_signatures_too(tmp_path: Path) -> None:
    """A timing cache of unknown origin is dropped and told, not passed to the builder, and not fatal."""
    timing = BuilderCapabilities(progress=True, timing_cache=True)
    with manager(tmp_path, builder=FakeBuilder(capabilities=timing)) as builder:
        builder.get(tiny_model(weight=1), profiles=PROFILE)
    got: list[bytes | None] = []
    heard = Heard()
    fake = FakeBuilder(capabilities=timing, on_build=lambda inputs: got.append(inputs.timing))
    with manager(tmp_path, builder=fake, keyring=RING, signer=SIGNER, policy=SIGNED, hooks=[heard]) as user:
        assert user.get(tiny_model(weight=2), profiles=PROFILE).stored
    assert got == [None]
    assert EventKind.TIMING_DROPPED in heard.kinds


def test_own_unsigned_entries_are_trusted_by_their_maker(tmp_path: Path) -> None:
    """What this manager has published itself it uses again, signed or not; a later process does not."""
    model = tiny_model()
    with manager(tmp_path, keyring=RING, policy=SIGNED) as one:
        assert one.get(model, profiles=PROFILE).outcome is twc.Outcome.BUILT
        assert one.get(model, profiles=PROFILE).outcome is twc.Outcome.HIT
    with manager(tmp_path, keyring=RING, policy=SIGNED) as other, pytest.raises(UntrustedError):
        other.get(model, profiles=PROFILE)


def test_policy_without_keys_is_refused(tmp_path: Path) -> None:
    """Asking for signatures without saying whose is a configuration error, at construction or at the call."""
    with pytest.raises(ConfigError, match="keyring"):
        manager(tmp_path, policy=SIGNED)
    with manager(tmp_path) as made, pytest.raises(ConfigError, match="keyring"):
        made.get(tiny_model(), profiles=PROFILE, policy=SIGNED)


def test_untrusted_occupant_blocks_publishing_loudly() -> None:
    """A key taken by an untrusted entry: the publication fails with what to do, and the occupant stays."""
    store = MemoryStore()
    store.publish(OTHER.sign(ENTRY), PAYLOADS)
    mine, payloads = sample_entry(1, b"mine", created=3.0)
    with pytest.raises(StoreError, match="trt-warmcache rm"):
        secured(store, signer=SIGNER, keyring=RING).publish(mine, payloads)


# ---- layers -----------------------------------------------------------------------------------------------------


def layers(near: MemoryStore, far: MemoryStore, *, trusted: bool) -> LayeredStore:
    """A near layer in front of a far one that is never trusted by itself."""
    return LayeredStore([Layer(near, trusted=trusted), Remote(far)])


def test_trust_is_per_layer() -> None:
    """An unsigned entry serves from a trusted layer and not from another."""
    near, far = MemoryStore(), MemoryStore()
    near.publish(ENTRY, PAYLOADS)
    assert secured(layers(near, far, trusted=True), keyring=RING).manifest(Kind.ENGINE, ENTRY.key) == ENTRY
    with pytest.raises(UntrustedError):
        secured(layers(near, far, trusted=False), keyring=RING).manifest(Kind.ENGINE, ENTRY.key)


def test_trust_is_not_gained_by_copying() -> None:
    """An entry from an untrusted layer is not filled into a trusted one unless its signature was checked."""
    for signed, keyring, kept in ((False, None, False), (True, None, False), (True, RING, True)):
        near, far = MemoryStore(), MemoryStore()
        far.publish(SIGNER.sign(ENTRY) if signed else ENTRY, PAYLOADS)
        store = secured(layers(near, far, trusted=True), keyring=keyring)
        found = store.manifest(Kind.ENGINE, ENTRY.key)
        assert found is not None
        store.fetch(found.blob("plan")).close()
        assert (near.manifest(Kind.ENGINE, ENTRY.key) is not None) == kept


def test_untrusted_near_falls_through_to_signed_far() -> None:
    """An untrusted entry in a near layer does not hide a signed one farther away."""
    near, far = MemoryStore(), MemoryStore()
    near.publish(ENTRY, PAYLOADS)
    far.publish(SIGNER.sign(ENTRY), PAYLOADS)
    store = secured(layers(near, far, trusted=False), keyring=RING)
    assert store.manifest(Kind.ENGINE, ENTRY.key) == SIGNER.sign(ENTRY)


def test_views_share_counters() -> None:
    """The layered store that a user made counts what a manager does through its own view."""
    near, far = MemoryStore(), MemoryStore()
    store = layers(near, far, trusted=False)
    secured(store, keyring=RING).manifest(Kind.ENGINE, ENTRY.key)
    assert [counters.misses for counters in store.counters()] == [1, 1]


def test_local_store_signs_on_disk(tmp_path: Path) -> None:
    """The signature lies in the manifest, so that a copy of the tree keeps it."""
    secured(LocalStore(tmp_path), signer=SIGNER).publish(ENTRY, PAYLOADS)
    found = LocalStore(tmp_path).manifest(Kind.ENGINE, ENTRY.key)
    assert found is not None
    assert list(found.signature) == ["release-1"]
