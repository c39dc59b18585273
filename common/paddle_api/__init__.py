"""Where Paddle is bound: models, backward, optimizers, and the names that Paddle programs use."""

__all__: list[str] = []
