"""Proves that both schemes compute the same, then measures them side by side."""
