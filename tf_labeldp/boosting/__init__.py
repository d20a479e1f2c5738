"""Boosted trees on noisy labels."""

__all__: list[str] = []
