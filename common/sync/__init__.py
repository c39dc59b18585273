"""The one interface between training and a scheme, its reference, and what both schemes do beside backward."""

__all__: list[str] = []
