"""Holdfast: train language models through a curriculum of datasets without losing the earlier ones."""

from holdfast.quick import quick

__all__ = ["quick"]
