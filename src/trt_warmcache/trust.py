"""Signatures: who may put a plan in front of TensorRT.

A digest finds accidents. Whoever can write to a store can write a digest too, and a serialized engine is executable: so
where writers are not all trusted, manifests are signed with ed25519 and checked before any payload is opened. The
signature covers the whole manifest, thus the key, the blobs and their sizes; a genuine manifest moved under another key
is refused like a forged one.

Needs the extra ``sign`` (the ``cryptography`` package).
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from trt_warmcache import manifest as manifests
from trt_warmcache.errors import ConfigError, IntegrityError, StoreError, StoreReason, UntrustedError
from trt_warmcache.keys import Kind
from trt_warmcache.manifest import Manifest
from trt_warmcache.policy import Policy, Trust
from trt_warmcache.stores import ForwardingStore, LayeredStore, Store
from trt_warmcache.stores._base import manifest_name

__all__ = ["Keyring", "PublicKey", "SignedStore", "Signer", "secured", "signed_bytes"]

#: What a signature covers begins so, and a signature made for anything else can never fit.
_DOMAIN = b"trt_warmcache manifest signature 1\n"

_SECRET, _PUBLIC = "trtwc-secret", "trtwc-public"
_KEY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*-\d{1,6}")
_KEY_BYTES = 32


@dataclass(frozen=True)
class PublicKey:
    """A key that signatures are checked with.

    Attributes:
        key_id: A name, a dash and a number, such as ``release-2``; the number counts up when a key is replaced.
        data: 32 bytes.
    """

    key_id: str
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check_key(self.key_id, self.data)

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """A key from its text form, ``trtwc-public:<key id>:<base64>``.

        Raises:
            ConfigError: Anything else; a secret key is never accepted in its place.
        """
        return cls(*_parse(text, _PUBLIC))

    def __str__(self) -> str:
        return _format(_PUBLIC, self.key_id, self.data)

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Whether a signature over these bytes was made with this key."""
        from cryptography.exceptions import InvalidSignature

        try:
            _crypto().Ed25519PublicKey.from_public_bytes(self.data).verify(signature, data)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class Signer:
    """A secret key, and what it is for: signing manifests.

    Attributes:
        key_id: See :class:`PublicKey`.
    """

    key_id: str
    _seed: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check_key(self.key_id, self._seed)

    @classmethod
    def generate(cls, key_id: str) -> Signer:
        """A new secret key under this id."""
        return cls(key_id, _crypto().Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def parse(cls, text: str) -> Signer:
        """A secret key from its text form, ``trtwc-secret:<key id>:<base64>``.

        Raises:
            ConfigError: Anything else.
        """
        return cls(*_parse(text, _SECRET))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Signer:
        """A secret key from a file.

        Raises:
            ConfigError: It cannot be read or holds no secret key.
        """
        return cls.parse(_read(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the secret key to a new file that only its owner can read.

        Raises:
            ConfigError: The file exists or cannot be written.
        """
        text = _format(_SECRET, self.key_id, self._seed)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(text + "\n")
        except FileExistsError as error:
            raise ConfigError(f"{path} exists; a secret key is never overwritten. Choose another name.") from error
        except OSError as error:
            raise ConfigError(f"Cannot write the secret key {path}: {error.strerror or error}.") from error

    @property
    def public(self) -> PublicKey:
        """The key that others check this one's signatures with."""
        private = _crypto().Ed25519PrivateKey.from_private_bytes(self._seed)
        return PublicKey(self.key_id, private.public_key().public_bytes_raw())

    def sign(self, manifest: Manifest) -> Manifest:
        """The manifest with this key's signature added; signatures by other keys stay, for times of rotation."""
        private = _crypto().Ed25519PrivateKey.from_private_bytes(self._seed)
        made = base64.b64encode(private.sign(signed_bytes(manifest))).decode("ascii")
        return msgspec.structs.replace(manifest, signature={**manifest.signature, self.key_id: made})


class Keyring:
    """The keys whose signatures count.

    Args:
        trusted: Public keys, as objects or in text form.
        revoked: Ids of keys that count no more, even where they are listed as trusted.

    Raises:
        ConfigError: Not a public key; or two different keys under one id.
    """

    def __init__(self, trusted: Iterable[PublicKey | str], *, revoked: Iterable[str] = ()) -> None:
        keys: dict[str, PublicKey] = {}
        for item in trusted:
            key = item if isinstance(item, PublicKey) else PublicKey.parse(item)
            if keys.setdefault(key.key_id, key) != key:
                raise ConfigError(f"Two different keys are called {key.key_id!r}; a new key gets a new number.")
        self._keys: Mapping[str, PublicKey] = keys
        self._revoked = frozenset(revoked)

    @classmethod
    def load(cls, *paths: str | os.PathLike[str], revoked: Iterable[str] = ()) -> Keyring:
        """A keyring from files with one public key per line; blank lines and lines that begin with # are passed over.

        A line ``revoked <key id>`` revokes a key.

        Raises:
            ConfigError: A file cannot be read or has a line that is neither.
        """
        trusted, withdrawn = [], list(revoked)
        for path in paths:
            for line in map(str.strip, _read(path).splitlines()):
                if line.startswith("revoked "):
                    withdrawn.append(line.split(maxsplit=1)[1])
                elif line and not line.startswith("#"):
                    trusted.append(line)
        return cls(trusted, revoked=withdrawn)

    def including(self, key: PublicKey) -> Keyring:
        """This keyring and one more key."""
        return Keyring([*self._keys.values(), key], revoked=self._revoked)

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Ids of the keys that count."""
        return tuple(sorted(self._keys.keys() - self._revoked))

    def verify(self, manifest: Manifest) -> str:
        """Check that a trusted key has signed a manifest.

        Returns:
            The id of that key.

        Raises:
            UntrustedError: ``reason`` is ``unsigned``, ``revoked``, ``unknown-key`` or ``wrong-signature``.
        """
        return self._verify(manifest.signature, signed_bytes(manifest), f"{manifest.kind}/{manifest.key}")

    def verify_document(self, document: Mapping[str, Any], name: str) -> str:
        """Like :meth:`verify`, for a manifest as it was stored, with whatever a later release has put there too."""
        found = document.get("signature")
        signatures = found if isinstance(found, Mapping) else {}
        return self._verify(signatures, _canonical(document), name)

    def _verify(self, signatures: Mapping[str, Any], data: bytes, name: str) -> str:
        if not signatures:
            raise _untrusted(name, "unsigned", "is not signed. Sign it (trt-warmcache sign), or build it anew")
        known = [key_id for key_id in sorted(signatures) if key_id in self._keys]
        valid = [key_id for key_id in known if key_id not in self._revoked]
        for key_id in valid:
            if self._keys[key_id].verifies(_signature(signatures[key_id]), data):
                return key_id
        by = ", ".join(str(key_id)[:80] for key_id in sorted(signatures)[:5])
        if valid:
            raise _untrusted(name, "wrong-signature", f"carries a signature by {by} that does not fit its content")
        if known or any(key_id in self._revoked for key_id in signatures):
            raise _untrusted(name, "revoked", f"is signed by {by}, which is revoked. Sign it with a current key")
        raise _untrusted(name, "unknown-key", f"is signed by {by}, which is not a trusted key")


class SignedStore(ForwardingStore):
    """Another store whose entries are signed when published, or checked when read, or both.

    Args:
        inner: The store.
        signer: Signs what is published.
        keyring: What is read must be signed by one of these keys, or have been published through this very object.
    """

    def __init__(self, inner: Store, *, signer: Signer | None = None, keyring: Keyring | None = None) -> None:
        if keyring is not None and signer is not None:
            keyring = keyring.including(signer.public)
        super().__init__(inner)
        self.verifies = keyring is not None or inner.verifies
        self._signer = signer
        self._keyring = keyring
        self._own: set[str] = set()

    def manifest(self, kind: Kind, digest: str) -> Manifest | None:
        """The manifest of an entry, once its signature is found good.

        Raises:
            UntrustedError: There is one, and no trusted key has signed it.
            IntegrityError: There is one and it is damaged.
            StoreError: The store could not answer.
        """
        if self._keyring is None:
            return self.inner.manifest(kind, digest)
        # Read here, not through the inner store: the signature covers the bytes, also fields this release drops.
        data = self.inner.read(manifest_name(kind, digest), limit=manifests.MAX_MANIFEST_BYTES)
        if data is None:
            return None
        try:
            found = manifests.decode(data, kind=kind, digest=digest)
        except IntegrityError as error:
            self._refuse_rebound(data, kind, digest, error)
            raise
        if _mark(found) not in self._own:
            self._keyring.verify_document(msgspec.json.decode(data), f"{kind.value}/{digest}")
        return found

    def _refuse_rebound(self, data: bytes, kind: Kind, digest: str, error: IntegrityError) -> None:
        """Tell a genuine manifest under another key's name, which somebody must have put there, from damage."""
        assert self._keyring is not None
        try:
            document = msgspec.json.decode(data[: manifests.MAX_MANIFEST_BYTES])
            name = f"{kind.value}/{digest}"
            key_id = self._keyring.verify_document(document if isinstance(document, dict) else {}, name)
        except (msgspec.DecodeError, RecursionError, UntrustedError, ConfigError):
            return
        if (document.get("kind"), document.get("key")) != (kind.value, digest):
            raise _untrusted(
                name, "rebound", f"is signed by {key_id}, but for {document.get('kind')}/{document.get('key')}"
            ) from error

    def publish(
        self, manifest: Manifest, payloads: Mapping[str, Any], *, replacing: Manifest | None = None
    ) -> Manifest:
        """Sign a manifest and store the entry.

        Raises:
            StoreError: As for any store; also where an entry that is not trusted lies under this key already.
        """
        signed = manifest if self._signer is None else self._signer.sign(manifest)
        if self._keyring is not None:
            # Before it can be seen: another thread may read it the moment it is there.
            self._own.add(_mark(signed))
        try:
            winner = self.inner.publish(signed, payloads, replacing=replacing)
            if winner == signed:
                return manifest
            if self._keyring is not None and _mark(winner) not in self._own:
                self._keyring.verify(winner)
        except UntrustedError as error:
            raise StoreError(
                f"The new entry was not stored, because one that is not trusted lies under its key: {error.message} "
                f"Remove that one (trt-warmcache rm {manifest.key[:12]}).",
                reason=StoreReason.DENIED,
                store=self.url,
            ) from error
        return winner


def secured(store: Store, *, signer: Signer | None = None, keyring: Keyring | None = None) -> Store:
    """A store that signs what is published and, with a keyring, refuses what no trusted key has signed.

    Of a :class:`LayeredStore`, the layers marked as trusted are believed without a signature.
    """
    if keyring is not None and signer is not None:
        keyring = keyring.including(signer.public)
    if keyring is not None:
        ring = keyring
        if isinstance(store, LayeredStore):
            store = store.view(lambda inner: SignedStore(inner, keyring=ring))
        else:
            store = SignedStore(store, keyring=ring)
    return store if signer is None else SignedStore(store, signer=signer)


class StoreViews:
    """One store as policies see it: as it is, or with nothing believed that no trusted key has signed.

    Args:
        store: The store, or all layers as one.
        default: The manager's policy.
        signer: Signs what is published.
        keyring: The trusted keys, if any.

    Attributes:
        default: The store as the manager's policy sees it.
        all: Every view there is.

    Raises:
        ConfigError: `default` asks for signatures, and there are no keys to check them with.
    """

    def __init__(self, store: Store, *, default: Policy, signer: Signer | None, keyring: Keyring | None) -> None:
        self._default = default
        self._plain = secured(store, signer=signer)
        self._strict = None if keyring is None else secured(store, signer=signer, keyring=keyring)
        self.default = self.of(default)
        self.all = tuple(view for view in (self._plain, self._strict) if view is not None)

    def of(self, policy: Policy) -> Store:
        """The store as a request's policy sees it, or the manager's if that is stricter.

        Raises:
            ConfigError: Signatures are asked for, and there are no keys to check them with.
        """
        if Trust.SIGNED not in {policy.trust, self._default.trust}:
            return self._plain
        if self._strict is None:
            raise ConfigError(
                "Policy(trust='signed') needs the keys to trust: EngineManager(..., keyring=Keyring([...]))."
            )
        return self._strict


def signed_bytes(manifest: Manifest) -> bytes:
    """What a signature covers: the manifest without its signatures, as canonical JSON."""
    document = msgspec.json.decode(manifests.encode(manifest))
    return _canonical(document)


def _canonical(document: Mapping[str, Any]) -> bytes:
    rest = {name: value for name, value in document.items() if name != "signature"}
    blobs = rest.get("blobs")
    if isinstance(blobs, list):
        # How a store packs its blobs is its own affair; digests and sizes are of the unpacked bytes.
        rest["blobs"] = [
            {name: value for name, value in blob.items() if name not in {"codec", "stored_size"}}
            if isinstance(blob, dict)
            else blob
            for blob in blobs
        ]
    text = json.dumps(rest, sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return _DOMAIN + text.encode("ascii")


def _mark(manifest: Manifest) -> str:
    return manifests.blob_digest(manifests.encode(manifests.plain(manifest)))


def _untrusted(name: str, reason: str, what: str) -> UntrustedError:
    return UntrustedError(f"Manifest {name} {what}.", name=name, reason=reason)


def _signature(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        return b""


def _check_key(key_id: str, data: bytes) -> None:
    if not _KEY_ID.fullmatch(key_id):
        raise ConfigError(f"A key id is a name, a dash and a number, such as release-1, not {key_id!r}.")
    if len(data) != _KEY_BYTES:
        raise ConfigError(f"An ed25519 key has {_KEY_BYTES} bytes; {key_id} has {len(data)}.")


def _format(kind: str, key_id: str, data: bytes) -> str:
    return f"{kind}:{key_id}:{base64.b64encode(data).decode('ascii')}"


def _parse(text: str, kind: str) -> tuple[str, bytes]:
    parts = text.strip().split(":")
    if len(parts) != 3 or parts[0] != kind:
        # The text is not repeated: it may be a secret.
        raise ConfigError(f"This is no {kind.removeprefix('trtwc-')} key; one looks like {kind}:<key id>:<base64>.")
    try:
        return parts[1], base64.b64decode(parts[2], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"The {kind.removeprefix('trtwc-')} key {parts[1]} is not base64.") from error


def _read(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the key file {path}: {error}.") from error


def _crypto() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigError("Signatures need the extra: pip install 'trt_warmcache[sign]'.") from error
    return ed25519
