"""Jobs of several parts, as a TOML file lists them."""

__all__: list[str] = []
