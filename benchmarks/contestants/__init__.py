"""Who can be measured: ours, the libraries a user would pick instead, and the machine's own limits.

sweep_contestants.py      those of `sweep`: single operations
training_contestants.py   those of `compare` and `accuracy`: whole trainings

Each has a table, and says what the module of a new line must have.
"""

__all__: list[str] = []
