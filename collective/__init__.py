"""Collective scheme: no server; every rank keeps a full copy, and the ranks ring-all-reduce their gradients."""

from __future__ import annotations

from collective.group import Group, connect

__all__ = ["Group", "connect"]
