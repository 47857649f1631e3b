"""Server processes: started on free loopback ports, bounded in time, ended with their whole process group."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

LOOPBACK = "127.0.0.1"
_SERVER_PORTS = range(20_000, 32_000)


class ServerError(RuntimeError):
    """A server did not start, or died."""


def free_ports(count: int) -> list[int]:
    """Gives ``count`` different TCP ports that are free on loopback now.

    They lie below the range from which the kernel takes ports for outgoing connections, so that none of those is in
    the way when the server binds. Another process can still be quicker, so starting is retried with new ports.
    """
    ports: list[int] = []
    for port in random.sample(_SERVER_PORTS, len(_SERVER_PORTS)):
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind((LOOPBACK, port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise ServerError(f"fewer than {count} free ports between {_SERVER_PORTS.start} and {_SERVER_PORTS.stop}")


class ServerProcess:
    """One server in its own session, with its output in a file.

    Args:
        command: Program and arguments.
        log: File for stdout and stderr; appended to.
        environment: Variables on top of the present ones.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server has not ended."""
        return self._process.poll() is None

    def wait_until(self, probe: Callable[[], None], timeout: float = 60.0) -> None:
        """Calls ``probe`` until it raises no ``OSError`` any more.

        Args:
            probe: One short attempt to use the server.
            timeout: Seconds after which the server counts as broken.

        Raises:
            ServerError: The server ended or stayed unusable; carries the end of its log.
        """
        deadline = time.monotonic() + timeout
        last: OSError | None = None
        while time.monotonic() < deadline:
            if not self.running:
                raise ServerError(f"server ended with status {self._process.returncode}:\n{self.log_tail()}")
            try:
                probe()
            except OSError as error:
                last = error
                time.sleep(0.1)
            else:
                return
        raise ServerError(f"server not usable within {timeout:g} s ({last!r}):\n{self.log_tail()}")

    def log_tail(self, size: int = 4096) -> str:
        """Gives the last ``size`` bytes of the log as text."""
        return self.log.read_bytes()[-size:].decode(errors="replace")

    def stop(self) -> None:
        """Kills the process group; safe to call twice. Data is temporary, so there is nothing to flush."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self._process.wait(timeout=10)


def accepts_connections(port: int) -> None:
    """Connects once to a loopback port; raises ``OSError`` while nobody listens there."""
    with socket.create_connection((LOOPBACK, port), timeout=1):
        pass
