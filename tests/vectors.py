"""Golden vectors of keys: requests written as JSON, with the digests they must always have.

``python -m tests.vectors`` fills in parts and digests: of new files, and of all after KEY_SCHEMA was changed. It refuses to
touch a digest within one schema, since every store in use would miss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_warmcache.keys import KEY_SCHEMA, Key, Kind, calibration_key, engine_key, timing_key
from trt_warmcache.options import BuildOptions
from trt_warmcache.profiles import normalize_profiles
from trt_warmcache.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

_MAKE: dict[Kind, Callable[..., Key]] = {
    Kind.ENGINE: engine_key,
    Kind.TIMING: timing_key,
    Kind.CALIBRATION: calibration_key,
}


def from_vector(vector: dict[str, Any]) -> Key:
    """The key that a golden vector's request gives."""
    fields = dict(vector["request"])
    if "target" in fields:
        fields["target"] = Target(**fields["target"])
    if "options" in fields:
        fields["options"] = BuildOptions(**fields["options"])
    if "profiles" in fields:
        fields["profiles"] = normalize_profiles(fields["profiles"])
    return _MAKE[Kind(vector["kind"])](**fields)


def complete(vector: dict[str, Any]) -> dict[str, Any]:
    """The vector with parts and digest of the present key recipe.

    Raises:
        ValueError: It has other ones, of the same schema.
    """
    key = from_vector(vector)
    if vector.get("schema") == KEY_SCHEMA and vector.get("digest", key.digest) != key.digest:
        raise ValueError("this request's key changed: change KEY_SCHEMA in trt_warmcache.keys too")
    return {**vector, "schema": KEY_SCHEMA, "parts": dict(key.parts), "digest": key.digest}


def main() -> None:
    """Rewrite the files."""
    for path in sorted(Path(__file__).parent.glob("data/keys/*.json")):
        try:
            vector = complete(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise SystemExit(f"{path.name}: {error}") from error
        path.write_text(json.dumps(vector, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
