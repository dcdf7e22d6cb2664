"""What steers a budget (`keep`): the weight of old rows, moved by what control rows show. Pure functions in JAX.

The gradient of a step is (g_new + Σ λₖ gₖ)/(1 + Σ λₖ), gₖ the gradient of the old rows of budget k. Control rows ride
in the batch, are no part of the loss, and say by how much the loss of their source has risen:

    d = Σ (nats − nats when the source became old) / (Σ bytes · ln 2)
    D = mean of d, exponential over rows with a window of 32
    e = (D − a)/a within ±1, a = 0.8 of the budget
    I += 0.05 e where e > 0, else 0.02 e, which never falls in the last fifth of a stage
    λ = exp(I + 0.5 e) between 0.01 and 100, from 1 on

Legend: S micro-batches, B rows of one, T tokens of a row, K budgets of the stage.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from holdfast.curriculum import Budget
from holdfast.data.batches import Batch, kept_rows
from holdfast.data.control import MOST_CONTROL
from holdfast.data.sampling import SELF
from holdfast.methods.anchors import FORWARD, forward_kl
from holdfast.methods.method import TokenPenalty
from holdfast.types import Tree

WINDOW = 32  # rows
AIM = 0.8  # of a budget: single steps scatter around what is aimed at
UP, DOWN, GAIN = 0.05, 0.02, 0.5
LOWEST, HIGHEST = 0.01, 100.0


def _target_nll(logp_CV: jax.Array, _reference_logp_CV: jax.Array, targets_C: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(logp_CV, targets_C[:, None], axis=1)[:, 0]


def _no_gradient(logp_CV: jax.Array, *_others: jax.Array) -> jax.Array:
    return jnp.zeros_like(logp_CV)


# What is measured of control rows: as penalties that weigh nothing.
NLL_SUM = TokenPenalty(_target_nll, gradient=_no_gradient)
KL_SUM = TokenPenalty(forward_kl, gradient=_no_gradient)


class RowWeights(NamedTuple):
    """How a step weighs tokens under budgets, (S, B, T) each.

    Args:
        factors: on the weight that each token has in the mean over all tokens that train by cross-entropy.
        anchor: in the KL of old rows; None where old rows train by cross-entropy alone.
        control: of each budget the tokens of its control rows.
    """

    factors: jax.Array
    anchor: jax.Array | None
    control: tuple[jax.Array, ...]


@dataclass(frozen=True)
class Controller:
    """The budgets of a stage.

    Args:
        budgets: in the order in which batches number them.
        cross_entropy, kl: what old rows with a budget train by.
        edges: the first steps of all stages and the number of steps of the run.
        fades: first step, and the step after the last, of each fade: nothing is steered there.
    """

    budgets: tuple[Budget, ...]
    cross_entropy: bool
    kl: bool
    edges: tuple[int, ...]
    fades: tuple[tuple[int, int], ...] = ()

    def penalties(self) -> list[tuple[TokenPenalty, float]]:
        """What is asked of the loss beside the cross-entropy, and its weight: the measurements, then the KL."""
        measured = [(KL_SUM if budget.name == SELF.name else NLL_SUM, 0.0) for budget in self.budgets]
        return [*measured, *([(FORWARD, 1.0)] if self.kl else [])]

    def trained(self, batch: Batch) -> Batch:
        """A batch whose targets are those that train by cross-entropy."""
        budget = kept_rows(batch).budget[..., None]
        left_out = (budget < 0) | ((budget > 0) & (not self.cross_entropy))
        return batch._replace(y=jnp.where(left_out, -1, batch.y))

    def multipliers(self, held: Tree) -> jax.Array:
        """λ of each budget, (K,)."""
        return jnp.stack([held[budget.name]["multiplier"] for budget in self.budgets])

    def row_weights(self, held: Tree, batch: Batch, left: jax.Array | None = None) -> RowWeights:
        """How the tokens of a batch count, so that the gradient is the mix of new and old.

        Args:
            left: tokens that methods leave in the divisor of new rows; None: all of them.
        """
        rows, multipliers = kept_rows(batch), self.multipliers(held)
        real = (batch.padding_mask > 0) & (batch.y >= 0)
        counted = (batch.padding_mask > 0) & (self.trained(batch).y >= 0)
        of_row = multipliers[jnp.maximum(jnp.abs(rows.budget).astype(jnp.int32) - 1, 0)]
        share = 1 / (1 + multipliers.sum())
        old = jnp.where(rows.budget > 0, of_row * rows.per_token, 0) * share
        divided = counted if left is None else counted & left
        num_new = jnp.maximum((divided & (rows.budget == 0)[..., None]).sum(), 1)
        weights = jnp.where(rows.budget == 0, share / num_new, old)[..., None]
        factors = jnp.where(counted, weights * jnp.maximum(counted.sum(), 1), 0)
        control = [
            jnp.where(real, (rows.budget == -number)[..., None], False).astype(jnp.float32)
            for number in range(1, len(self.budgets) + 1)
        ]
        anchor = jnp.where(real, old[..., None], 0) if self.kl else None
        return RowWeights(factors, anchor, tuple(control))

    def stepped(
        self, held: Tree, batch: Batch, nats: Mapping[int, jax.Array], step: jax.Array, counts: jax.Array
    ) -> Tree:
        """What is held after a step.

        Args:
            nats: of each budget, by its place, the sum over its control rows that the loss measured.
            step: the number of steps that were complete before.
            counts: whether the step was taken; where it was not, nothing changes.
        """
        rows, steers, late = kept_rows(batch), counts & ~self._fades(step), self._late(step)
        after = dict(held)
        for place, budget in enumerate(self.budgets):
            own = held[budget.name]
            here = rows.budget == -(place + 1)
            index = jnp.clip(rows.place.astype(jnp.int32), 0, MOST_CONTROL - 1)
            reference = jnp.where(here, own["reference"][index], 0).sum()
            num_rows, num_bytes = here.sum(), jnp.where(here, rows.num_bytes, 0).sum()
            rise = (nats[place] - reference) / (jnp.maximum(num_bytes, 1) * math.log(2))
            moved = moved_by(own, rise, num_rows, budget.limit, late)
            holds = steers & (num_rows > 0)
            after[budget.name] = {name: jnp.where(holds, moved[name], own[name]) for name in own}
        return after

    def _fades(self, step: jax.Array) -> jax.Array:
        inside = [(step >= start) & (step < end) for start, end in self.fades]
        return jnp.stack(inside).any() if inside else jnp.asarray(False)

    def _late(self, step: jax.Array) -> jax.Array:
        """Whether a step lies in the last fifth of its stage."""
        edges = jnp.asarray(self.edges, jnp.int32)
        stage = jnp.searchsorted(edges[1:-1], step, side="right")
        return 5 * (step - edges[stage]) >= 4 * (edges[stage + 1] - edges[stage])

    def records(self, before: Tree, after: Tree) -> dict[str, jax.Array]:
        """What the record of a step has: the multiplier that it used, and the rise as it is known after it."""
        found = {}
        for budget in self.budgets:
            found[f"keep/{budget.name}/multiplier"] = before[budget.name]["multiplier"]
            found[f"keep/{budget.name}/difference"] = mean_of(after[budget.name]["mean"])
            found[f"keep/{budget.name}/at_bound"] = after[budget.name]["at_bound"]
        return found


def moved_by(own: Mapping[str, jax.Array], rise: jax.Array, num_rows: jax.Array, limit: float, late: jax.Array) -> Tree:
    """What is held of a budget after control rows were seen.

    Args:
        rise: d of these rows, in bits per byte.
        late: whether I may not fall any more.
    """
    memory = (1 - 1 / WINDOW) ** num_rows.astype(jnp.float32)
    mean = memory * own["mean"] + (1 - memory) * jnp.stack([rise, jnp.ones_like(rise)])
    aim = AIM * limit
    error = jnp.clip((mean_of(mean) - aim) / aim, -1.0, 1.0)
    drift = jnp.where(error > 0, UP * error, jnp.where(late, 0.0, DOWN * error))
    integral = own["integral"] + drift
    multiplier = jnp.exp(jnp.clip(integral + GAIN * error, math.log(LOWEST), math.log(HIGHEST)))
    count = num_rows.astype(jnp.int32)
    at_bound = jnp.where(integral + GAIN * error >= math.log(HIGHEST), own["at_bound"] + count, 0)
    return {
        "integral": integral,
        "multiplier": multiplier,
        "mean": mean,
        "rows": own["rows"] + count,
        "at_bound": at_bound,
        "reference": own["reference"],
    }


def mean_of(mean: jax.Array) -> jax.Array:
    """D of a (sum, weight); NaN before anything was seen."""
    return jnp.where(mean[1] > 0, mean[0] / jnp.maximum(mean[1], 1e-30), jnp.nan)


def unmoved() -> dict[str, jax.Array]:
    """What is held of a budget before any control row was seen."""
    return {
        "integral": jnp.float32(0),
        "multiplier": jnp.float32(1),
        "mean": jnp.zeros(2, jnp.float32),
        "rows": jnp.int32(0),
        "at_bound": jnp.int32(0),
        "reference": jnp.zeros(MOST_CONTROL, jnp.float32),
    }
