"""Fixtures of the store tests."""

from __future__ import annotations
