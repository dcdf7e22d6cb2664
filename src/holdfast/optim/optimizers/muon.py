"""Muon (Jordan 2024): orthogonalised momentum for the matrices inside the model, Adam for everything else.

Embeddings, the output head, norms and biases go to Adam. With `consistent_rms` a matrix's update has the
size of AdamW's (Liu et al. 2025), so one learning rate and one weight decay serve both.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.config import field
from holdfast.optim.masks import decays, path_names
from holdfast.registry import optimizers

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class MuonConfig:
    """Options of Muon."""

    beta: float = field("optimization/muon/beta", default=0.95, ge=0, lt=1, help="decay rate of the momentum")
    ns_steps: int = field("optimization/muon/ns_steps", default=5, ge=1, help="Newton-Schulz iterations")
    nesterov: bool = field("optimization/muon/nesterov", default=True, help="look ahead along the momentum")
    consistent_rms: float = field(
        "optimization/muon/consistent_rms",
        default=0.2,
        ge=0,
        help="RMS of a matrix's update, 0.2 is AdamW's; 0: scale by the matrix's shape instead",
    )
    adam_beta1: float = field("optimization/muon/adam_beta1", default=0.9, ge=0, lt=1, help="Adam's first-moment rate")
    adam_beta2: float = field(
        "optimization/muon/adam_beta2", default=0.95, ge=0, lt=1, help="Adam's second-moment rate"
    )


_NOT_INSIDE = re.compile(r"embed|^w[tp]e$|head$|unembed")


def matrix_axes(params: Any) -> Any:
    """For each parameter the axes that Muon sees as a matrix (the last two; others are stacked layers), or None."""
    import jax
    from optax.contrib import MuonDimensionNumbers

    def axes(path: Any, leaf: Any) -> Any:
        inside = decays(path, leaf) and not any(_NOT_INSIDE.search(name) for name in path_names(path))
        return MuonDimensionNumbers(reduction_axis=-2, output_axis=-1) if inside else None

    return jax.tree_util.tree_map_with_path(axes, params)


@optimizers.register("muon", config=MuonConfig, help="orthogonalised momentum for matrices, Adam for the rest")
def muon(config: MuonConfig) -> "optax.GradientTransformation":
    """The descent direction of Muon."""
    from optax import contrib

    return contrib.muon(
        1.0,
        ns_steps=config.ns_steps,
        beta=config.beta,
        nesterov=config.nesterov,
        adam_b1=config.adam_beta1,
        adam_b2=config.adam_beta2,
        muon_weight_dimension_numbers=matrix_axes,
        consistent_rms=config.consistent_rms or None,
    )
