"""Where Paddle is bound: models, backward, optimizers, and the names that Paddle programs use.

A bucket of gradients becomes ready here: a hook on each parameter (arena_binding.py) counts, ready_buckets.py tells the
synchronizer.
"""

__all__: list[str] = []
