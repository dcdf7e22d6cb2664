"""Objectives: token cross-entropy from hidden states, and penalties that anchor to a reference.

The functions are in `holdfast.objectives.token_loss`, which imports JAX; penalties are listed without it.
"""

from holdfast.objectives.penalties import ParameterPenalty, TokenPenalty

__all__ = ["ParameterPenalty", "TokenPenalty"]
