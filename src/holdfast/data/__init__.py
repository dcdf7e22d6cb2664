"""Data: sources, tokenizers, prepared stores, rows, and the plan that draws them."""

from holdfast.data.sampling import DatasetStyle, Sampling, SourceKey

__all__ = ["DatasetStyle", "Sampling", "SourceKey"]
