"""Who can be measured: ours, the libraries a user would pick instead, and the machine's own limits.

table_of_sweeps.py      those of `sweep`: single operations
table_of_trainings.py   those of `compare` and `accuracy`: whole trainings

Each has a table, and says what the module of a new line must have.
"""

__all__: list[str] = []
