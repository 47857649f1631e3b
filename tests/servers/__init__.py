"""Real storage servers on loopback, and a proxy that breaks them, for tests and benchmarks."""

from __future__ import annotations

from tests.servers.info import Refusal, ServerInfo, ServerKind
from tests.servers.launch import MissingServerError, running
from tests.servers.proxy import Answer, CutBody, DropAnswer, FaultProxy, FlipBit, Injection, Request, Stall

__all__ = [
    "Answer",
    "CutBody",
    "DropAnswer",
    "FaultProxy",
    "FlipBit",
    "Injection",
    "MissingServerError",
    "Refusal",
    "Request",
    "ServerInfo",
    "ServerKind",
    "Stall",
    "running",
]
