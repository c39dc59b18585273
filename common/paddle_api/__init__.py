"""Where Paddle is bound: models, backward, optimizers, and the names that Paddle programs use.

A bucket of gradients becomes ready here: a hook on each parameter (gradient_hooks.py) counts, and tells the
synchronizer, in a user's program through ready_buckets.py.
"""

__all__: list[str] = []
