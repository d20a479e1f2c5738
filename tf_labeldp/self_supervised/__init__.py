"""Encoders that no label has touched; Keras on any backend."""

from tf_labeldp.self_supervised._views import strong_views, weak_views

__all__ = ["strong_views", "weak_views"]
