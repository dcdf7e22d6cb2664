"""Penalties that hold the model near a frozen reference, one file each."""

from holdfast.objectives.penalties.kinds import ParameterPenalty, TokenPenalty
from holdfast.registry import penalties

__all__ = ["ParameterPenalty", "TokenPenalty"]

penalties.lazy(
    "nll_difference",
    "holdfast.objectives.penalties.nll_difference:PENALTY",
    help="NLL minus the reference's: only scales the loss, holds nothing by itself",
)
penalties.lazy(
    "forward",
    "holdfast.objectives.penalties.forward:PENALTY",
    help="exact KL(reference || policy): keep what the reference would say",
)
penalties.lazy(
    "reverse",
    "holdfast.objectives.penalties.reverse:PENALTY",
    help="exact KL(policy || reference): say nothing the reference would not",
)
penalties.lazy(
    "l2_reference",
    "holdfast.objectives.penalties.l2_reference:PENALTY",
    help="half the squared distance of the parameters to the reference's",
)
