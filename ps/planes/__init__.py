"""How chunks travel between trainers and servers."""

__all__: list[str] = []
