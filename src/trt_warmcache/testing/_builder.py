"""A builder that builds nothing real, quickly, and counts."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trt_warmcache.builders import BuilderCapabilities, BuildInputs, BuildOutput, LoadNeeds, Progress
from trt_warmcache.errors import BuildError
from trt_warmcache.options import BuildOptions
from trt_warmcache.target import Target

__all__ = ["FakeBuilder"]


@dataclass
class FakeBuilder:
    """An :class:`~trt_warmcache.EngineBuilder` for tests.

    Its plan is text made of everything that goes into a build, so that equal inputs give equal plans and nothing else
    does.

    Attributes:
        flavour: Part of every key.
        library: What :meth:`version` answers.
        seconds: How long a build takes.
        steps: Progress steps per build; the builder can be cancelled at each.
        size: Least size of a plan, in bytes.
        error: Raised by every build, if set.
        on_build: Called at the start of every build with its inputs.
        travels: Whether a fresh process can make this builder, as far as its settings are plain values.
        crash: How a build ends instead of finishing: ``"segfault"``, ``"kill"``, ``"memory"`` (takes all it gets),
            ``"hang"`` or ``"exit"``; for builds in processes of their own.
        plugins: What each plugin library is said to register.
        loader: What :meth:`deserialize` does; by default it returns the plan's text as a dictionary.
        builds: How many builds have begun.
    """

    flavour: str = "fake"
    library: str = "1.0.0"
    seconds: float = 0.0
    steps: int = 4
    size: int = 0
    error: BaseException | None = None
    on_build: Callable[[BuildInputs], None] | None = None
    loader: Callable[[memoryview], Any] | None = None
    travels: bool = False
    crash: str = ""
    plugins: tuple[str, ...] = ()
    capabilities: BuilderCapabilities = BuilderCapabilities(progress=True, compute_capabilities=True, plugins=True)
    builds: int = 0
    _guard: Any = field(default_factory=threading.Lock, repr=False)

    def version(self) -> str:
        """The version it was given."""
        return self.library

    def check(self, options: BuildOptions, target: Target) -> None:
        """Accepts everything."""

    def build(self, inputs: BuildInputs) -> BuildOutput:
        """Pretend to build."""
        with self._guard:
            self.builds += 1
        if self.on_build is not None:
            self.on_build(inputs)
        for step in range(self.steps):
            inputs.checkpoint()
            inputs.on_progress(Progress("Building engine", None, step, self.steps))
            time.sleep(self.seconds / self.steps)
            if step == self.steps // 2:
                _crash(self.crash)
        if self.error is not None:
            raise self.error
        document = {
            "model": inputs.model.digest,
            "network": inputs.network_name,
            "profiles": [profile.to_json() for profile in inputs.profiles],
            "options": inputs.options.to_json(),
            "target": inputs.target.to_json(),
            "configure": None if inputs.configure is None else inputs.configure(None, None),
            "calibration": inputs.calibration.decode() if isinstance(inputs.calibration, bytes) else None,
        }
        plan = b"fakeplan" + json.dumps(document, sort_keys=True).encode()
        timing = None
        if self.capabilities.timing_cache:
            timing = self.merge_timing(f"{inputs.network_name}\n".encode(), inputs.timing or b"")
        return BuildOutput(
            plan=plan.ljust(self.size, b" "),
            library=self.library,
            timing=timing,
            config={"options": inputs.options.to_json()},
            plugins=self.plugins if inputs.plugins else (),
        )

    def spawn_spec(self) -> Mapping[str, Any] | None:
        """How a fresh process makes this builder, where it `travels`."""
        if not self.travels:
            return None
        plain = ("flavour", "library", "seconds", "steps", "size", "crash")
        return {"factory": "trt_warmcache.testing:FakeBuilder", "arguments": {n: getattr(self, n) for n in plain}}

    def check_plan(self, plan: memoryview, *, older: bool = False) -> None:
        """Accepts everything; digests guard the tests."""

    def deserialize(self, plan: memoryview, needs: LoadNeeds | None = None) -> Any:
        """The plan's text as a dictionary, or what `loader` makes of it."""
        if self.loader is not None:
            return self.loader(plan)
        return json.loads(bytes(plan)[len(b"fakeplan") :])

    def merge_timing(self, newer: bytes, older: bytes) -> bytes:
        """Union of two caches of one entry per line; refuses anything that is not ASCII lines."""
        try:
            lines = {line for blob in (older, newer) for line in blob.decode("ascii").splitlines() if line}
        except UnicodeDecodeError as error:
            raise BuildError("not a timing cache of this builder") from error
        return "".join(f"{line}\n" for line in sorted(lines)).encode()


def _crash(how: str) -> None:
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "memory":
        hog = []
        while True:
            hog.append(bytearray(64 * 1024 * 1024))
    elif how == "hang":
        time.sleep(3600)
    elif how == "exit":
        sys.stderr.write("about to leave\n")
        sys.stderr.flush()
        os._exit(7)
