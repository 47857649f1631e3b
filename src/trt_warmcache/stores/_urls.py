"""URLs of stores: which package each scheme needs, and what of a URL may be shown."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from trt_warmcache.errors import ConfigError

__all__ = ["READ_ONLY", "extra", "protocol_of", "public", "require", "secrets_in"]

#: Module that must be installed, and what installs it.
_BACKENDS = {
    "s3": ("s3fs", "trt_warmcache[s3]"),
    "s3a": ("s3fs", "trt_warmcache[s3]"),
    "gs": ("gcsfs", "trt_warmcache[gcs]"),
    "gcs": ("gcsfs", "trt_warmcache[gcs]"),
    "az": ("adlfs", "trt_warmcache[azure]"),
    "abfs": ("adlfs", "trt_warmcache[azure]"),
    "abfss": ("adlfs", "trt_warmcache[azure]"),
    "hf": ("huggingface_hub", "huggingface_hub"),
    "http": ("aiohttp", "aiohttp"),
    "https": ("aiohttp", "aiohttp"),
    "sftp": ("paramiko", "paramiko"),
    "ssh": ("paramiko", "paramiko"),
    "memory": ("fsspec", "fsspec"),
    "file": ("fsspec", "fsspec"),
    "local": ("fsspec", "fsspec"),
}

#: fsspec's own caches hand out torn files when several processes read one uncached URL.
_CACHES = frozenset({"simplecache", "filecache", "blockcache", "cached"})

READ_ONLY = frozenset({"http", "https"})

#: Options whose values may be shown.
_HARMLESS = frozenset({"endpoint_url", "region_name", "addressing_style", "project"})

#: Options whose values may not, however short they are.
_PASSWORD = re.compile(r"secret|passw|passphrase|token|credential|(^|_)key$", re.IGNORECASE)


def protocol_of(url: str, public: str) -> str:
    protocol, separator, rest = url.partition("://")
    if "::" in url or protocol in _CACHES:
        raise ConfigError(
            f"{public} is a chain of file systems. Give the plain URL: fsspec's caches can hand out torn files, and "
            "a local folder as the nearest layer does their work."
        )
    if not separator or not protocol or (protocol != "memory" and not rest.strip("/")):
        raise ConfigError(f"{public!r} is not a URL of the form protocol://bucket/prefix.")
    return protocol


def public(url: str) -> str:
    """The URL without credentials: no user information, no query."""
    if not isinstance(url, str):
        raise ConfigError(f"A store's URL is text, not {type(url).__name__}.")
    protocol, separator, rest = url.partition("://")
    rest = rest.partition("?")[0].partition("#")[0]
    authority, slash, path = rest.partition("/")
    if protocol not in {"abfs", "abfss"}:  # there the part before the @ is the container
        authority = authority.rpartition("@")[2]
    return f"{protocol}{separator}{authority}{slash}{path}".rstrip("/")


def secrets_in(url: str, options: Mapping[str, Any]) -> re.Pattern[str]:
    """Finds every text that must not be shown: what the options hold, and what the URL carries beside the address."""
    found: set[str] = set()
    passwords: set[str] = set()

    def collect(value: Any, name: str = "") -> None:
        if isinstance(value, Mapping):
            for below, item in value.items():
                if below not in _HARMLESS:
                    collect(item, str(below))
        elif isinstance(value, (list, tuple)):
            for item in value:
                collect(item, name)
        elif isinstance(value, (str, bytes)):
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            (passwords if _PASSWORD.search(name) else found).add(text)
            passwords.update(part.partition("=")[2] for part in text.split(";") if part.partition("=")[0].lower().endswith(("key", "signature")))  # fmt: skip

    collect(options)
    parts = urlsplit(url)
    if parts.query:
        found.add(parts.query)
    if parts.scheme not in {"abfs", "abfss"} and "@" in parts.netloc:
        user, _, password = parts.netloc.rpartition("@")[0].partition(":")
        found.add(user)
        passwords.add(password)
    # Short words ("anon", "cloud") would only turn messages into riddles. Short passwords count where they stand alone.
    long = {text for text in found | passwords if len(text) >= 8}
    short = {text for text in passwords - long if len(text) >= 3 and text != "anon"}
    signs = [re.escape(text) for text in sorted(long, key=len, reverse=True)]
    signs += [rf"(?<!\w){re.escape(text)}(?!\w)" for text in sorted(short, key=len, reverse=True)]
    return re.compile("|".join(signs) or r"(?!)")


def require(protocol: str) -> None:
    known = _BACKENDS.get(protocol)
    if known is not None:
        if importlib.util.find_spec(known[0]) is None:
            raise ConfigError(f"{protocol}:// needs {known[0]}, which is not installed: pip install {known[1]}.")
        return
    import fsspec

    if protocol not in fsspec.available_protocols():
        raise ConfigError(f"No store for URL scheme {protocol!r}: neither this library nor fsspec knows it.")


def extra(protocol: str) -> str:
    wanted = _BACKENDS.get(protocol, ("", ""))[1]
    return wanted if wanted.startswith("trt_warmcache") else f"trt_warmcache[remote] {wanted}".rstrip()
