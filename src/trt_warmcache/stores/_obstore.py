"""The fast path for S3 and Azure: obstore's own client, without fsspec.

Not ``obstore.fsspec``: that wrapper drops ``mode="create"`` silently, so every racing writer wins, and it loses the
speed too.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from trt_warmcache.stores._wire import PART_BYTES, Head, Part, Wire

__all__ = ["ObstoreWire", "obstore_config"]

#: Where obstore finds credentials by itself in a pod or a CI job. Profiles in ~/.aws it does not read.
_S3_AMBIENT = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)

#: The process in which obstore first ran: its threads are one set for the whole process, whoever uses them.
_FIRST_USE: list[int] = []


#: Time for obstore's threads to finish with an answer that was delivered already: they still use the interpreter then,
#: and one that has begun to shut down kills the process under them (PyO3/pyo3-async-runtimes#40).
_SETTLE_SECONDS = 0.05

#: Not empty once the process is about to end; whatever is still asked for then settles request by request.
_ENDING: list[bool] = []


def _settle_at_exit() -> None:
    _ENDING.append(True)
    if not forked():
        time.sleep(_SETTLE_SECONDS)


def forked() -> bool:
    """Whether obstore was used in a parent of this process: its threads do not survive a fork."""
    return bool(_FIRST_USE) and _FIRST_USE[0] != os.getpid()


def obstore_config(protocol: str, storage_options: Mapping[str, Any]) -> dict[str, str] | str:
    """Storage options of fsspec in obstore's terms, or the reason why that cannot be done faithfully."""
    if protocol in {"s3", "s3a"}:
        return _s3_config(dict(storage_options))
    if protocol in {"az", "abfs", "abfss"}:
        return _azure_config(dict(storage_options))
    return f"there is no native path for {protocol}"


def _s3_config(options: dict[str, Any]) -> dict[str, str] | str:
    client = dict(options.pop("client_kwargs", None) or {})
    config = dict(options.pop("config_kwargs", None) or {})
    style = (dict(config.pop("s3", None) or {})).pop("addressing_style", "auto")
    anonymous = bool(options.pop("anon", False))
    found = {
        "aws_access_key_id": options.pop("key", None) or options.pop("username", None),
        "aws_secret_access_key": options.pop("secret", None) or options.pop("password", None),
        "aws_session_token": options.pop("token", None),
        "aws_endpoint": options.pop("endpoint_url", None) or client.pop("endpoint_url", None) or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        "aws_region": client.pop("region_name", None) or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
    }  # fmt: skip
    unknown = [*options, *client, *(name for name in config if name != "retries")]
    if unknown:
        return f"there is no counterpart for {', '.join(sorted(unknown))}"
    if not found["aws_region"]:
        if not found["aws_endpoint"]:
            return "the region is not given (client_kwargs={'region_name': ...} or AWS_REGION)"
        found["aws_region"] = "us-east-1"
    if anonymous:
        found["aws_skip_signature"] = "true"
    elif not found["aws_access_key_id"] and (
        os.environ.get("AWS_PROFILE") or not any(os.environ.get(name) for name in _S3_AMBIENT)
    ):
        return "credentials are neither in the storage options nor in the environment"
    if style == "virtual" or (style == "auto" and not found["aws_endpoint"]):
        found["aws_virtual_hosted_style_request"] = "true"
        if found["aws_endpoint"]:
            return "virtual addressing needs the bucket in the endpoint"
    return {name: str(value) for name, value in found.items() if value}


def _azure_config(options: dict[str, Any]) -> dict[str, str] | str:
    words = dict(
        part.split("=", 1) for part in (options.pop("connection_string", None) or "").split(";") if "=" in part
    )
    found = {
        "azure_storage_account_name": options.pop("account_name", None) or words.get("AccountName"),
        "azure_storage_account_key": options.pop("account_key", None) or words.get("AccountKey"),
        "azure_storage_sas_key": (options.pop("sas_token", None) or words.get("SharedAccessSignature") or "").lstrip("?"),
        "azure_storage_endpoint": (words.get("BlobEndpoint") or "").rstrip("/"),
    }  # fmt: skip
    if options:
        return f"there is no counterpart for {', '.join(sorted(options))}"
    if not found["azure_storage_account_name"] or not (
        found["azure_storage_account_key"] or found["azure_storage_sas_key"]
    ):
        return "account and key are not in the storage options"
    return {name: str(value) for name, value in found.items() if value}


class ObstoreWire(Wire):
    """Requests through obstore. Coroutines run on fsspec's loop, so that a time limit cancels what it cuts short.

    Args:
        protocol: ``s3`` or ``az`` and their aliases.
        bucket: Bucket or container.
        root: Path of the layout folder in it.
        config: See :func:`obstore_config`.
        seconds: Longest time that any one request may take.
    """

    conditional = True

    def __init__(self, protocol: str, bucket: str, root: str, config: Mapping[str, str], seconds: float) -> None:
        from obstore import store

        if not _FIRST_USE:
            _FIRST_USE.append(os.getpid())
            atexit.register(_settle_at_exit)
        make: Any = store.S3Store if protocol.startswith("s3") else store.AzureStore
        self._store = make(
            bucket,
            config=dict(config),
            client_options={"allow_http": True, "timeout": timedelta(seconds=seconds), "connect_timeout": timedelta(seconds=min(seconds, 10))},
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=seconds)},
        )  # fmt: skip
        self._root = root.strip("/")

    def _run(self, seconds: float, act: Any, *args: Any, **kwargs: Any) -> Any:
        from fsspec.asyn import get_loop, sync

        async def run() -> Any:
            return await act(self._store, *args, **kwargs)

        try:
            return sync(get_loop(), run, timeout=seconds)
        finally:
            if _ENDING:
                time.sleep(_SETTLE_SECONDS)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def get(self, name: str, start: int, stop: int, seconds: float) -> Any:
        import obstore

        return self._run(seconds, obstore.get_range_async, self._path(name), start=start, end=stop)

    def head(self, name: str, seconds: float) -> Head:
        import obstore

        return _head(self._run(seconds, obstore.head_async, self._path(name)))

    def put(self, name: str, data: Any, seconds: float) -> None:
        self._put(name, data, seconds, "overwrite")

    def create(self, name: str, data: bytes, seconds: float) -> None:
        self._put(name, data, seconds, "create")

    def replace(self, name: str, data: bytes, tag: str, seconds: float) -> None:
        self._put(name, data, seconds, {"e_tag": tag})

    def _put(self, name: str, data: Any, seconds: float, mode: Any) -> None:
        import obstore

        self._run(seconds, obstore.put_async, self._path(name), data, mode=mode, use_multipart=False)

    def upload(self, name: str, data: memoryview, seconds: float, workers: int, part: Part) -> None:
        import obstore

        # obstore sends all parts in one call, so the call gets the time of several.
        rounds = 1 + data.nbytes // (2 * PART_BYTES)
        self._run(
            seconds * rounds, obstore.put_async, self._path(name), data,
            use_multipart=True, chunk_size=PART_BYTES, max_concurrency=workers,
        )  # fmt: skip

    def delete(self, name: str, seconds: float) -> None:
        import obstore

        self._run(seconds, obstore.delete_async, self._path(name))

    def list(self, prefix: str, seconds: float) -> Iterator[tuple[str, Head]]:
        import obstore

        pages = obstore.list(self._store, self._path(prefix), chunk_size=1000)

        async def more(_: Any) -> Any:
            return await anext(pages.__aiter__(), None)

        while page := self._run(seconds, more):
            for found in page:
                yield found["path"][len(self._root) + 1 :], _head(found)

    def bucket_exists(self, seconds: float) -> bool:
        # A missing bucket shows by its own code in each answer with a body; only HEAD has none.
        for _ in self.list("", seconds):
            break
        return True


def _head(found: Mapping[str, Any]) -> Head:
    return Head(int(found["size"]), str(found["e_tag"] or ""), found["last_modified"].timestamp())
