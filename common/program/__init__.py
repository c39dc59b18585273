"""A user's own program as a rank: started as it is, with a scheme in the place of Paddle's groups."""

__all__: list[str] = []
