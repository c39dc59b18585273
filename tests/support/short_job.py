"""A launcher that does not wait long for the end of its processes."""

from __future__ import annotations

from dataclasses import dataclass

from common.launch import job

__all__ = ["Job"]


@dataclass
class Job(job.Job):
    patience: float = 0.5
    settle: float = 0.3
