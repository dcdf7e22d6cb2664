"""Ways to keep the old: the seam (`Method`), the anchors that `optimization/kl/estimator` names, and the others.

Importing this package does not import JAX.
"""

from holdfast.methods import (  # noqa: F401  # register themselves
    agem,
    dft,
    eaft,
    ewc,
    flow,
    osf,
    sfa,
    si,
    ssu,
    stm,
    talr,
)
from holdfast.methods.method import (
    BatchWeights,
    Method,
    MethodConfig,
    ParameterPenalty,
    PenaltyTokens,
    StageData,
    StagePosition,
    State,
    TokenPenalty,
)
from holdfast.methods.refusals import BESIDE, ELSEWHERE, StageFacts
from holdfast.registry import penalties

__all__ = [
    "BESIDE",
    "ELSEWHERE",
    "BatchWeights",
    "Method",
    "MethodConfig",
    "ParameterPenalty",
    "PenaltyTokens",
    "StageData",
    "StageFacts",
    "StagePosition",
    "State",
    "TokenPenalty",
]

penalties.lazy(
    "nll_difference",
    "holdfast.methods.anchors:NLL_DIFFERENCE",
    help="NLL minus the reference's: only scales the loss, holds nothing by itself",
)
penalties.lazy(
    "forward",
    "holdfast.methods.anchors:FORWARD",
    help="exact KL(reference || policy): keep what the reference would say",
)
penalties.lazy(
    "reverse",
    "holdfast.methods.anchors:REVERSE",
    help="exact KL(policy || reference): say nothing the reference would not",
)
penalties.lazy(
    "l2_reference",
    "holdfast.methods.anchors:L2_REFERENCE",
    help="half the squared distance of the parameters to the reference's",
)
