"""Choices that are written as words."""

from __future__ import annotations

from enum import Enum

__all__ = ["Word"]


class Word(str, Enum):
    """A choice that equals its word, and reads as its word wherever it is printed."""

    __str__ = str.__str__
