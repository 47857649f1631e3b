"""Pinning and recording tactics through an algorithm selector: TensorRT 8.6 to 10.16."""

from __future__ import annotations

from typing import Any

from trt_warmcache.tactics import TacticReplay

__all__ = ["make_selector"]


def make_selector(trt: Any, replay: TacticReplay | None) -> Any:
    """An ``IAlgorithmSelector`` that takes the recorded tactics, and records what was taken.

    Its ``missing`` names the layers whose recorded tactic TensorRT did not offer, ``not_asked()`` the recorded layers that
    TensorRT never asked about; it only prints an exception raised in a callback, so the adapter asks afterwards.
    """

    class Selector(trt.IAlgorithmSelector):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IAlgorithmSelector.__init__(self)
            self.missing: list[str] = []
            self.taken: dict[str, tuple[int, int]] = {}
            self._asked: set[str] = set()

        def not_asked(self) -> list[str]:
            return [] if replay is None else sorted(replay.layers.keys() - self._asked)

        def select_algorithms(self, context: Any, choices: list[Any]) -> list[int]:
            self._asked.add(context.name)
            wanted = None if replay is None else replay.layers.get(context.name)
            if wanted is None:
                return list(range(len(choices)))
            for index, choice in enumerate(choices):
                if _identity(choice) == wanted:
                    return [index]
            self.missing.append(context.name)
            return []

        def report_algorithms(self, contexts: list[Any], choices: list[Any]) -> None:
            self.taken = {context.name: _identity(choice) for context, choice in zip(contexts, choices, strict=True)}

    return Selector()


def _identity(choice: Any) -> tuple[int, int]:
    variant = choice.algorithm_variant
    return (int(variant.implementation), int(variant.tactic))
