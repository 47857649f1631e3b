"""Building in a process of its own: a crash, a hang or a memory hog ends that process and nothing else.

The child is a fresh interpreter, so it inherits neither threads nor a CUDA context. It gets a JSON document with the
job, reports steps as JSON lines through a pipe, writes what TensorRT and the interpreter print into a log file, and
leaves the plan in a file that this process maps. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_warmcache import errors
from trt_warmcache.builders._base import (
    BuilderCapabilities,
    BuildInputs,
    BuildOutput,
    EngineBuilder,
    LoadNeeds,
    Progress,
)
from trt_warmcache.builders._folder import working_folder
from trt_warmcache.errors import BuildError, ConfigError, WarmCacheError
from trt_warmcache.options import BuildOptions
from trt_warmcache.policy import Isolation, Policy
from trt_warmcache.tactics import TacticReplay
from trt_warmcache.target import Target

if TYPE_CHECKING:
    import subprocess

__all__ = ["IsolatedBuilder", "ProcessLimits", "builder_spec", "callable_name", "isolated"]

#: Seconds between two looks at deadline and cancellation while the child says nothing.
_POLL = 0.05
#: Lines of the child's output kept for error reports.
_TAIL_LINES = 60
#: Largest part of the child's log that is read back, in bytes.
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class ProcessLimits:
    """What a building process may use.

    Attributes:
        memory_bytes: Most address space (``RLIMIT_AS``). CUDA reserves a lot of address space that it never fills,
            so for classic TensorRT allow tens of gigabytes more than the build needs; None sets no limit.
        device: UUID of the only GPU that the process may see; None leaves ``CUDA_VISIBLE_DEVICES`` as it is.
    """

    memory_bytes: int | None = None
    device: str | None = None


class IsolatedBuilder:
    """An :class:`EngineBuilder` whose builds run in fresh processes; everything else runs here.

    Args:
        inner: The builder to run there. It must be one that a fresh process can make: this library's own, or one with
            a method ``spawn_spec`` that returns ``{"factory": "module:name", "arguments": {...}}``.
        limits: What each process may use. A limit of time is the caller's `checkpoint`, asked all the while.

    Raises:
        ConfigError: No fresh process could make this builder.
    """

    def __init__(self, inner: EngineBuilder, limits: ProcessLimits | None = None) -> None:
        self.inner = inner
        self.limits = limits or ProcessLimits()
        self._spec = builder_spec(inner)

    @property
    def flavour(self) -> str:
        """That of the inner builder."""
        return self.inner.flavour

    @property
    def capabilities(self) -> BuilderCapabilities:
        """Those of the inner builder."""
        return self.inner.capabilities

    def version(self) -> str:
        """That of the inner builder."""
        return self.inner.version()

    def check(self, options: BuildOptions, target: Target) -> None:
        """Refuse what the inner builder cannot do."""
        self.inner.check(options, target)

    def check_plan(self, plan: memoryview, *, older: bool = False) -> None:
        """Look at a plan's header."""
        self.inner.check_plan(plan, older=older)

    def deserialize(self, plan: memoryview, needs: LoadNeeds | None = None) -> Any:
        """Load a plan into this process."""
        return self.inner.deserialize(plan, needs)

    def merge_timing(self, newer: bytes, older: bytes) -> bytes:
        """The union of two timing caches, made in this process."""
        return self.inner.merge_timing(newer, older)

    def build(self, inputs: BuildInputs) -> BuildOutput:
        """Build in a fresh process.

        Raises:
            BuildError: It failed, or its process died; with the last lines that it wrote.
        """
        inputs.checkpoint()
        with working_folder() as folder:
            return self._run(inputs, folder)

    def _run(self, inputs: BuildInputs, folder: Path) -> BuildOutput:
        job = self._job(inputs, folder)
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        import subprocess  # a hit never needs it

        reader, writer = os.pipe()
        try:
            with (folder / "log").open("wb") as log:
                child = subprocess.Popen(  # noqa: S603  our own interpreter and code
                    # The folder is private, so nothing that lies in it by chance is imported from there.
                    [sys.executable, "-c", _MAIN, str(writer)],
                    cwd=folder,
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(writer,),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(reader)
            raise BuildError(f"No process for the build could be started: {error}") from error
        finally:
            os.close(writer)
        try:
            with os.fdopen(reader, "rb", buffering=0) as pipe:
                self._follow(child, pipe, inputs)
            code = self._wait(child, inputs)
        except BuildError as error:  # a limit that the caller's checkpoint keeps
            error.log = error.log or _tail(folder / "log")
            raise
        finally:
            _end(child)
        return self._result(code, folder)

    def _job(self, inputs: BuildInputs, folder: Path) -> dict[str, Any]:
        model = inputs.model
        path = model.local_path
        if path is None:
            staged = folder / "model"
            staged.mkdir()
            path = model.stage(staged)
        for name in ("timing", "calibration"):
            data = getattr(inputs, name)
            if data is None:
                continue
            if not isinstance(data, bytes):
                raise ConfigError(
                    "Calibration data stays in this process; only a finished table can travel to another."
                )
            (folder / name).write_bytes(data)
        return {
            "builder": self._spec,
            "model": str(path),
            "digest": model.digest,
            "network_name": inputs.network_name,
            "profiles": [profile.to_json() for profile in inputs.profiles],
            "options": inputs.options.to_json(),
            "target": inputs.target.to_json(),
            "plugins": [str(plugin) for plugin in inputs.plugins],
            "configure": None if inputs.configure is None else callable_name(inputs.configure),
            "memory_bytes": self.limits.memory_bytes,
            "parent": os.getpid(),
        }

    def _environment(self) -> dict[str, str]:
        # The child must find what this process can import, also where a test runner or a notebook extended the path.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        if self.limits.device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.limits.device
        return environment

    def _follow(self, child: subprocess.Popen[bytes], pipe: Any, inputs: BuildInputs) -> None:
        """Pass on steps until the child closes its end; the caller's checkpoint is asked all the while."""
        pending = b""
        while True:
            inputs.checkpoint()
            # In this order: what the child wrote before it ended is read even if it ends between the two.
            ended = child.poll() is not None
            ready, _, _ = select.select([pipe], [], [], 0 if ended else _POLL)
            if not ready:
                if ended:
                    return
                continue
            data = pipe.read(65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                phase, parent, step, total = json.loads(line)
                inputs.on_progress(Progress(phase, parent, step, total))

    @staticmethod
    def _wait(child: subprocess.Popen[bytes], inputs: BuildInputs) -> int:
        while (code := child.poll()) is None:
            inputs.checkpoint()
            time.sleep(_POLL / 10)
        return code

    def _result(self, code: int, folder: Path) -> BuildOutput:
        tail = _tail(folder / "log")
        try:
            result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise BuildError(f"{self._fate(code)}{_last(tail)}", log=tail, exit_code=code) from None
        if "error" in result:
            raise _error(result["error"], tail, self._limited())
        tactics = result.pop("tactics")
        timing = (folder / "timing.out").read_bytes() if result.pop("has_timing") else None
        return BuildOutput(
            plan=_map(folder / "plan"),
            timing=timing,
            tactics=None if tactics is None else TacticReplay.from_json(tactics),
            warnings=tuple(result.pop("warnings")),
            plugins=tuple(result.pop("plugins")),
            **result,
        )

    def _fate(self, code: int) -> str:
        if code >= 0:
            return f"The building process ended with exit code {code} and no result."
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if -code == signal.SIGKILL:
            return "The building process was killed (SIGKILL), most likely because the machine ran out of memory."
        return f"The building process crashed ({name}); this process is unharmed.{self._limited()}"

    def _limited(self) -> str:
        """The limit, for errors that it may be the reason of."""
        limit = self.limits.memory_bytes
        return "" if limit is None else f" Its memory was limited to {limit} bytes (Policy.build_memory_bytes)."


def isolated(
    builder: EngineBuilder, policy: Policy, *, target: Target, configure: Any, timed: bool = False
) -> EngineBuilder:
    """The builder as a policy wants it run.

    Args:
        builder: Runs in this process.
        policy: Says where builds run and what they may use.
        target: Its GPU is the only one that a process of its own sees.
        configure: The request's hook, which has to travel too.
        timed: The request has a timeout. A builder without progress can only be stopped in a process of its own.

    Raises:
        ConfigError: The policy asks for a process of its own, or the target's GPU is not the one that this process
            builds on, and the builder or the hook cannot travel.
    """
    how = policy.isolation
    if how is Isolation.AUTO and timed and not builder.capabilities.progress:
        how = Isolation.WHERE_POSSIBLE
    here = _building_device(builder)
    elsewhere = here is not None and target.uuid is not None and here != target.uuid
    if how is Isolation.NONE:
        if elsewhere:
            raise ConfigError(
                f"The engine is for GPU {target.uuid}, and builds in this process run on {here}. Leave isolation='none' out, or select the GPU with CUDA_VISIBLE_DEVICES."
            )
        return builder
    limited = policy.build_memory_bytes is not None or (
        policy.build_seconds is not None and not builder.capabilities.progress
    )
    needed = limited or elsewhere
    if how is Isolation.AUTO and not needed:
        return builder
    device = target.uuid if builder.capabilities.needs_gpu else None
    try:
        if configure is not None:
            callable_name(configure)
        return IsolatedBuilder(builder, ProcessLimits(policy.build_memory_bytes, device))
    except ConfigError:
        if how is Isolation.WHERE_POSSIBLE and not needed:
            return builder
        raise


def _building_device(builder: EngineBuilder) -> str | None:
    """UUID of the GPU that a build in this process would use, where the builder can tell."""
    ask = getattr(builder, "current_device", None)
    uuid: str | None = None if ask is None else ask()
    return uuid


_MAIN = "from trt_warmcache.builders._worker import main; main()"


def builder_spec(builder: EngineBuilder) -> Mapping[str, Any]:
    """How a fresh process makes a builder: a factory's name and its arguments, JSON values.

    Raises:
        ConfigError: It cannot.
    """
    ask = getattr(builder, "spawn_spec", None)
    spec = ask() if ask is not None else None
    if spec is None:
        raise ConfigError(
            f"{type(builder).__name__} cannot be made anew in another process; use isolation='none', or give it a method spawn_spec()."
        )
    found: Mapping[str, Any] = spec
    return found


def callable_name(function: Any) -> str:
    """``module:name`` of a function that another process can import.

    Raises:
        ConfigError: It is a lambda, a nested function, or lives in ``__main__``.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not name or "<" in name:
        raise ConfigError(
            f"{function!r} cannot travel to another process; define it at the top of a module, or use isolation='none'."
        )
    return f"{module}:{name}"


def _error(told: Mapping[str, Any], tail: tuple[str, ...], limited: str) -> BaseException:
    """The child's error, made anew here."""
    kind = getattr(errors, told["type"], None)
    if isinstance(kind, type) and issubclass(kind, WarmCacheError):
        details, message = dict(told["details"]), told["message"]
        if issubclass(kind, BuildError):
            details["log"] = tuple(details.get("log", ())) or tail
        if issubclass(kind, (BuildError, ConfigError)):
            message += limited  # what cannot be loaded or allocated may only lack memory
        return kind(message, **details)
    if told["type"] == "MemoryError":
        return BuildError(f"The building process ran out of memory.{limited}{_last(tail)}", log=tail)
    return BuildError(f"The build failed with {told['type']}: {told['message']}{limited}", log=tail)


def _map(path: Path) -> memoryview:
    """The plan, mapped; its bytes stay when the file's name goes."""
    with path.open("rb") as file:
        try:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError:
            return memoryview(b"")
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            return memoryview(file.read())


def _tail(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-_TAIL_LINES:])


def _last(tail: tuple[str, ...]) -> str:
    lines = [line for line in tail if line.strip()]
    return f" Its last words: {lines[-1].strip()[:500]}" if lines else ""


def _end(child: subprocess.Popen[bytes]) -> None:
    """Leave nothing of the child behind, whatever it started."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
