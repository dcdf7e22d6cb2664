"""Objectives: token cross-entropy from hidden states; `token_loss` imports JAX.

`TokenPenalty` and `ParameterPenalty`, what a penalty of one's own is made of, are of `holdfast.methods`.
"""

from holdfast.methods import ParameterPenalty, TokenPenalty

__all__ = ["ParameterPenalty", "TokenPenalty"]
