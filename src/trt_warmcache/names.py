"""Names of files that people see: safe on every file system, short, and stable."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["MAX_NAME_BYTES", "readable_name", "safe_name", "size_text", "with_digest"]

#: Longest file name, extension included; most file systems allow 255 bytes, some layers on top need a few.
MAX_NAME_BYTES = 200

#: Room kept for "-" + 12 hex digits + the longest extension.
_RESERVED = 1 + 12 + len(".runtime")

_WINDOWS_DEVICES = re.compile(r"(con|prn|aux|nul|(com|lpt)[\d¹²³])(\..*)?", re.IGNORECASE)


def readable_name(model_name: str, version: str, gpu_type: str, input_shape: str) -> str:
    """``{model_name}_{version}_{gpu_type}_{input_shape}``, cut so that an extension and a digest still fit."""
    return _joined([_safe(part) for part in (model_name, version, gpu_type, input_shape)])


def safe_name(name: str) -> str:
    """A name that came from elsewhere, such as an entry's label, made as safe; one made here stays as it is."""
    return _joined([_safe(name)])


def with_digest(name: str, digest: str) -> str:
    """The name with the first 12 hex digits of a key appended, for where two would collide."""
    return f"{name}-{digest[:12]}"


def _joined(parts: list[str]) -> str:
    while len((name := _portable("_".join(parts))).encode()) > MAX_NAME_BYTES - _RESERVED:
        # Shorten the longest part, so that no part vanishes while another stays long.
        longest = max(range(len(parts)), key=lambda i: len(parts[i].encode()))
        parts[longest] = parts[longest][:-1].rstrip("-.")
    return name


def _safe(text: str) -> str:
    normal = unicodedata.normalize("NFC", text)
    # Letters and digits of every script stay; separators, quotes, control and shell characters become one "-".
    kept = re.sub(r"[^\w.+=@-]+", "-", normal).strip("-. ")
    return kept or "x"


def _portable(name: str) -> str:
    return f"x-{name}" if _WINDOWS_DEVICES.fullmatch(name) else name


def size_text(size: float) -> str:
    """A number of bytes for people, in decimal units: ``604.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
