"""Weights by the model's own probability of the target: DFT, and ASFT, which adds an anchor to the snapshot."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Optional

from holdfast import registry
from holdfast.config import field
from holdfast.methods.method import Method
from holdfast.methods.refusals import StageFacts
from holdfast.methods.weighing import WeighingConfig
from holdfast.types import Tree

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class DFTConfig(WeighingConfig):
    """Options of dynamic fine-tuning."""

    stages: Optional[List[int]] = field(
        "methods/dft/stages", default=None, help="stages it acts in (0-based); null = all from the second on", ge=0
    )


@dataclass(frozen=True)
class ASFTConfig(WeighingConfig):
    """Options of anchored supervised fine-tuning."""

    weight: float = field(
        "methods/asft/weight", default=0.05, help="weight of KL(snapshot || model); 0.05 to 0.1", ge=0, le=1e6
    )
    stages: Optional[List[int]] = field(
        "methods/asft/stages", default=None, help="stages it acts in (0-based); null = all from the second on", ge=0
    )
    needs_reference = True
    penalty_tokens = "new"

    def check(self, about: StageFacts) -> None:
        """ASFT is DFT and more, and its anchor looks at new rows."""
        super().check(about)
        if "dft" in about.acting:
            raise about.refusal("no dft beside it: asft weighs tokens by their probability already", "list one of them")
        if not about.draws_new:
            raise about.refusal(
                f"stages with new rows: stage {about.stage} draws from earlier stages' datasets alone",
                "name other stages in methods/asft/stages, or use dft",
            )


@registry.methods.register("dft", config=DFTConfig, help="each token's loss times the model's probability of it")
@dataclass(frozen=True)
class DFT(Method):
    """Dynamic fine-tuning (arXiv 2508.05629): loss × sg(π(target)), a mean over tokens that is not renormalised."""

    config: DFTConfig

    def token_weights(
        self, memory: Tree, logp: "jax.Array", reference_logp: "jax.Array | None", targets: "jax.Array"
    ) -> "jax.Array":
        """π(target)."""
        return probability(logp, targets)


@registry.methods.register("asft", config=ASFTConfig, help="dft, held near the snapshot by a small KL on new rows")
@dataclass(frozen=True)
class ASFT(Method):
    """Anchored supervised fine-tuning (arXiv 2509.23753): DFT and KL(snapshot ‖ π) on the loss's tokens of new rows."""

    config: ASFTConfig

    def token_weights(
        self, memory: Tree, logp: "jax.Array", reference_logp: "jax.Array | None", targets: "jax.Array"
    ) -> "jax.Array":
        """π(target)."""
        return probability(logp, targets)

    def token_penalty(self, logp: "jax.Array", reference_logp: "jax.Array", targets: "jax.Array") -> "jax.Array":
        """KL(snapshot ‖ π)."""
        from holdfast.methods.anchors import forward_kl

        return forward_kl(logp, reference_logp, targets)

    def token_penalty_gradient(
        self, logp: "jax.Array", reference_logp: "jax.Array", targets: "jax.Array", value: "jax.Array"
    ) -> "jax.Array":
        """π − r."""
        from holdfast.methods.anchors import forward_kl_gradient

        return forward_kl_gradient(logp, reference_logp, targets, value)


def probability(logp_CV: "jax.Array", targets_C: "jax.Array") -> "jax.Array":
    """The probability of each target, (C,)."""
    import jax.numpy as jnp

    return jnp.exp(jnp.take_along_axis(logp_CV, targets_C[:, None], axis=1)[:, 0])
