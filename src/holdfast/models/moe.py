"""The family `moe`: the decoder whose feed-forward parts are mixtures of experts; nothing here imports JAX.

The options of the decoder (`architecture/n_layers`, …) mean what they mean there; `architecture/n_ff` is the width of
a feed-forward part in a dense model of the same active size, from which the width of an expert follows. The computation
is in `experts.py`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from holdfast import registry
from holdfast.config import field
from holdfast.errors import ConfigError
from holdfast.models import axes
from holdfast.models.config import ArchitectureConfig, ModelSpec, check_size, own_values, resolve, told
from holdfast.models.family import Model, TransformerFamily, check_family, decoder
from holdfast.types import Json, JsonView

MOE = "moe"
BALANCES = ("loss", "bias", "none")
BALANCE, ROUTER_Z, BIAS = "balance", "router_z", "router_bias"  # auxiliary losses
# Of the loss whose gradient is the sign of each expert's load: optimizers that normalise gradients do not see it, and
# it is far below what gradients are clipped at.
BIAS_WEIGHT = 1e-4


@dataclass(frozen=True)
class MoeConfig:
    """What a mixture of experts has beyond the decoder's options."""

    n_experts: Optional[int] = field(
        "architecture/moe/n_experts", default=None, ge=1, le=2**16, help="experts to choose from; null: 8"
    )
    top_k: Optional[int] = field(
        "architecture/moe/top_k", default=None, ge=1, le=2**16, help="experts that each token goes to; null: 2"
    )
    n_shared: Optional[int] = field(
        "architecture/moe/n_shared", default=None, ge=0, le=2**16, help="experts that all tokens go to; null: 0"
    )
    n_ff: Optional[int] = field(
        "architecture/moe/n_ff",
        default=None,
        ge=1,
        le=2**22,
        help="width inside one expert; null: architecture/n_ff / (top_k + n_shared), the active size of a dense model",
    )
    normalise: Optional[bool] = field(
        "architecture/moe/normalise", default=None, help="weights of the chosen experts sum to 1; null: true"
    )
    balance: Optional[str] = field(
        "architecture/moe/balance",
        default=None,
        choices=BALANCES,
        help="loads are evened by an auxiliary loss, by a bias on the choice alone, or not; null: loss",
    )
    balance_weight: Optional[float] = field(
        "architecture/moe/balance_weight",
        default=None,
        ge=0,
        le=1e3,
        help="weight of the auxiliary loss, which is 1 where loads are even; null: 0.01",
    )
    z_loss: Optional[float] = field(
        "architecture/moe/z_loss",
        default=None,
        ge=0,
        le=1e3,
        help="weight of the squared log-sum-exp of the router's logits; null: 0",
    )


@dataclass(frozen=True)
class MoeSpec(ModelSpec):
    """A decoder with experts in full; `n_ff` is the width inside one expert."""

    family: ClassVar[str] = MOE

    n_experts: int = 8
    top_k: int = 2
    n_shared: int = 0
    normalise: bool = True
    balance: str = "loss"
    balance_weight: float = 0.01
    z_loss: float = 0.0

    @property
    def losses(self) -> tuple[tuple[str, float], ...]:
        """The auxiliary losses and their weights; how even the loads are is measured in any case."""
        found = [(BALANCE, self.balance_weight if self.balance == "loss" else 0.0)]
        if self.balance == "bias":
            found.append((BIAS, BIAS_WEIGHT))
        if self.z_loss:
            found.append((ROUTER_Z, self.z_loss))
        return tuple(found)

    def mlp_parameters(self) -> int:
        """Of all experts and of the router."""
        return self._experts(self.n_experts + self.n_shared)

    def mlp_active(self) -> int:
        """Of the experts that a token goes to and of the router."""
        return self._experts(self.top_k + self.n_shared)

    def _experts(self, number: int) -> int:
        router = (self.n_embd + (self.balance == "bias")) * self.n_experts
        return number * self.n_embd * self.n_ff * (3 if self.gated else 2) + router


# What may differ between a pretrained model and the run that continues it, and between a checkpoint and that run.
FREE = ("balance_weight", "z_loss")


@registry.families.register(MOE, config=MoeConfig, help="decoder with a mixture of experts: Mixtral, Qwen3-MoE")
class MoeFamily(TransformerFamily[MoeSpec]):
    """The decoder with the feed-forward parts of `experts.py`."""

    specification = MoeSpec
    option_of_axis = {
        axes.EXPERTS: "architecture/moe/n_experts",
        axes.EMBED: "architecture/n_embd",
        axes.MLP: "architecture/moe/n_ff",
        axes.VOCAB: "architecture/vocab_size",
    }

    def resolve(
        self, name: str, architecture: ArchitectureConfig, options: Any, *, block_size: int, vocab_size: int
    ) -> Model:
        """The decoder that the options of the decoder ask for, with experts."""
        base = resolve(architecture, block_size=block_size, vocab_size=vocab_size)
        check_family(name, architecture, base)
        if isinstance(base, MoeSpec):
            return decoder(_continued(base, options, architecture))
        own = own_values(name, architecture, options)
        spec = MoeSpec(**{**dataclasses.asdict(base), **own, "n_ff": own.get("n_ff", base.n_ff)})
        if spec.top_k > spec.n_experts:
            raise ConfigError(
                "architecture/moe/top_k", spec.top_k, f"at most architecture/moe/n_experts = {spec.n_experts}"
            )
        if spec.bias:
            raise ConfigError("architecture/bias", True, "false: experts have no biases", "set architecture/qkv_bias")
        if "n_ff" not in own:
            spec = dataclasses.replace(spec, n_ff=max(1, base.n_ff // (spec.top_k + spec.n_shared)))
        check_size(spec)
        return decoder(spec)

    def build(self, options: MoeSpec, vocab_size: int, block_size: int) -> Any:
        """A `Decoder` with other feed-forward parts."""
        from holdfast.models.decoder import Decoder, stacked_layers
        from holdfast.models.experts import Experts

        layers = functools.partial(stacked_layers, feed_forward=Experts)
        return Decoder(options, layers, options.losses)

    def check_mesh(self, model: Model, mesh_sizes: Mapping[str, int]) -> None:
        """Experts, their widths and the rest as for a decoder."""
        super().check_mesh(model, mesh_sizes)
        axes.check_divisible(model.options, mesh_sizes)

    def described(self, model: Model) -> Json:
        """The specification."""
        return {"family": MOE, **told(model.options)}

    def harmless(self, described: JsonView) -> frozenset[str]:
        """As for a decoder, and the weights of auxiliary losses."""
        return super().harmless(described) | set(FREE)


def _continued(spec: MoeSpec, options: MoeConfig, architecture: ArchitectureConfig) -> MoeSpec:
    """A pretrained mixture with the options of training that were set; the others must be what it has."""
    free: Json = {}
    for item in dataclasses.fields(options):
        value, own = getattr(options, item.name), getattr(spec, item.name)
        free_too = item.name == "balance" and value != "bias"  # a bias would be a parameter that the file has not
        if value is not None and item.name not in FREE and not free_too and value != own:
            raise ConfigError(
                f"architecture/moe/{item.name}",
                value,
                f"{own!r}, which {architecture.source} has",
                "leave it null, or remove architecture/from",
            )
        if value is not None:
            free[item.name] = value
    return dataclasses.replace(spec, **free)
