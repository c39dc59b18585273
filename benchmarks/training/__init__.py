"""Trainings that are measured: who takes part, in which processes, and the certificate of equal bits."""

__all__: list[str] = []
