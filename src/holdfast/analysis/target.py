"""What was lost, as one smooth number: the log-loss of a task's questions, of one question, or of held-out rows.

Accuracy moves in jumps; a log-loss moves with every step. A question with choices counts −log of the share of the right
answer among them, one without choices the loss a token of its answer, a held-out row its loss a token.

Shapes: Q questions, C choices, T tokens of a row.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from holdfast.data.documents import Document
from holdfast.data.rows import IGNORE, Rows
from holdfast.data.sampling import DatasetStyle
from holdfast.data.tokenizers import Tokenizer
from holdfast.errors import UserError
from holdfast.evaluation import choice
from holdfast.evaluation.harness_tasks import HarnessTask, is_harness
from holdfast.objectives.token_loss import token_nll
from holdfast.training.base import Trainer
from holdfast.training.compile import tracing_for
from holdfast.training.results import chosen_evaluator
from holdfast.training.state import TrainState
from holdfast.types import Tree

CHUNK_TOKENS = 8192  # that are read at once
NARROWEST = 16

Floats = NDArray[np.float64]


class Asked(NamedTuple):
    """Questions as arrays, (Q, C, T) each; what fills them up counts nothing."""

    x: Any
    y: Any
    segment_ids: Any  # None where rows hold one text
    positions: Any
    label: Any  # (Q,)
    choices: Any  # (Q, C): 1 where there is one
    weight: Any  # (Q,): how much a question counts


class Losses(NamedTuple):
    """What was measured of every question."""

    loss: Floats  # nats
    weight: Floats
    right: Floats  # 1 where the right choice is the likeliest

    @property
    def mean(self) -> float:
        """The one number."""
        return float((self.loss * self.weight).sum() / self.weight.sum())

    @property
    def accuracy(self) -> float:
        """The share of questions whose right choice is the likeliest."""
        return float(self.right.mean())

    def rise_error(self, earlier: "Losses") -> float:
        """The standard error over questions of how much the number rose since an earlier measurement."""
        if len(self.loss) < 2:
            return 0.0
        share = self.weight / self.weight.sum()
        rises = self.loss - earlier.loss
        return float(np.sqrt(((rises - (share * rises).sum()) ** 2 * share**2).sum()))


@dataclass(frozen=True)
class Target:
    """What was lost.

    Args:
        name: of the task, question or dataset.
        kind: `task`, `example` or `dataset`.
        asked: its questions or rows, in pieces of one shape.
        count: how many there are.
        chosen: whether there are choices, and so an accuracy.
    """

    name: str
    kind: str
    asked: tuple[Asked, ...]
    count: int
    chosen: bool
    mesh: jax.sharding.Mesh

    @property
    def guessing(self) -> float | None:
        """The expected share of wrong answers of a guess; None where there are no choices."""
        if not self.chosen:
            return None
        wrong = np.concatenate([1 - 1 / part.choices.sum(1, dtype=float) for part in self.asked])
        weight = np.concatenate([part.weight for part in self.asked])
        return float((wrong * weight).sum() / weight.sum())

    def losses(self, state: TrainState) -> Losses:
        """Measure a state."""
        found = [self._call(_losses, state, part) for part in self.asked]
        loss, right, weight = (np.concatenate(parts).astype(np.float64) for parts in zip(*found, strict=True))
        real = weight > 0
        return Losses(loss[real], weight[real], right[real])

    def gradient(self, state: TrainState) -> Tree:
        """The gradient of the one number in the trained parameters."""
        total = sum(float(part.weight.sum()) for part in self.asked)
        parts = [self._call(_gradient, state, part) for part in self.asked]
        return jax.tree.map(lambda *leaves: sum(leaves) / total, *parts)

    def _call(self, function: Any, state: TrainState, part: Asked) -> Any:
        with tracing_for(self.mesh):
            return _compiled(function, state.objective)(state.params, part)


@functools.lru_cache(maxsize=16)
def _compiled(function: Any, objective: Any) -> Any:
    return jax.jit(functools.partial(function, objective))


def _question_losses(objective: Any, trained: Tree, params: Tree, part: Asked) -> tuple[jax.Array, jax.Array]:
    """Loss and rightness of each question, (Q,)."""
    model, whole = objective.model, objective.completed(params, trained)
    Q, C, T = part.x.shape
    segments, positions = (None if each is None else each.reshape(Q * C, T) for each in part[2:4])
    hidden, _ = model.hidden(whole, part.x.reshape(Q * C, T), segment_ids=segments, positions=positions)
    nll_N = token_nll(hidden, model.unembedding(whole), part.y.reshape(Q * C, T), softcap=model.softcap).sum(1)
    nll_QC = nll_N.reshape(Q, C)
    if C == 1:
        tokens_Q = jnp.maximum((part.y >= 0).sum((1, 2)), 1)
        return nll_QC[:, 0] / tokens_Q, jnp.zeros(Q)
    scores_QC = jnp.where(part.choices > 0, -nll_QC, -jnp.inf)
    own_Q = jnp.take_along_axis(scores_QC, part.label[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(scores_QC, axis=1) - own_Q, (own_Q >= scores_QC.max(1)).astype(jnp.float32)


def _losses(objective: Any, params: Tree, part: Asked) -> tuple[jax.Array, jax.Array, jax.Array]:
    loss, right = _question_losses(objective, objective.trained(params), params, part)
    return loss, right, jnp.asarray(part.weight)


def _gradient(objective: Any, params: Tree, part: Asked) -> Tree:
    def total(trained: Tree) -> jax.Array:
        loss_Q: jax.Array = _question_losses(objective, trained, params, part)[0] * part.weight
        return loss_Q.sum()

    return jax.grad(total)(objective.trained(params))


def find_target(
    trainer: Trainer, *, task: str | None = None, example: str | None = None, dataset: str | None = None, limit: int
) -> Target:
    """What a user names: a task, one question of the run's tasks, or a dataset.

    Args:
        example: the id of a question; with a task, one of that task.
        limit: the most questions or rows.
    """
    run, mesh = trainer.resolved, trainer.topology.mesh
    if dataset is not None:
        known = {source.name for source in run.curriculum.datasets} | {*run.held_out}
        if dataset not in known:
            raise UserError(f"--dataset {dataset}: this run has no such dataset; it has {', '.join(sorted(known))}")
        rows = chosen_evaluator(run, trainer.topology, [dataset]).rows[dataset]
        pieces = tuple(_row_pieces(rows, min(limit, len(rows))))
        return Target(dataset, "dataset", pieces, min(limit, len(rows)), False, mesh)
    names = [task] if task is not None else [name for name in run.config.evaluations if not is_harness(name)]
    evaluator = chosen_evaluator(run, trainer.topology, names)
    for name, found in evaluator.tasks.items():
        if isinstance(found, HarnessTask):
            raise UserError(f"--task {name}: tasks of the harness have no loss here; bisect one of the run's own")
    documents = {name: evaluator.examples(name) for name in evaluator.tasks}
    if example is not None:
        title, chosen = _one(documents, example)
    else:
        assert task is not None, "one of the three is named"
        title, chosen = task, documents[task][:limit]
    end_of_text = run.options.evaluation.end_of_text
    pieces = tuple(_question_pieces(chosen, run.tokenizer, run.config.block_size, end_of_text))
    kind = "example" if example is not None else "task"
    return Target(title, kind, pieces, len(chosen), pieces[0].x.shape[1] > 1, mesh)


def _one(documents: dict[str, list[Document]], example: str) -> tuple[str, list[Document]]:
    found = {name: each for name, several in documents.items() for each in several if each.id == example}
    if not found:
        few = [each.id for several in documents.values() for each in several][:3]
        shown = f", which are called {', '.join(few)}, …" if few else ""
        raise UserError(
            f"--example {example}: no question of {', '.join(documents) or 'the run'} has this id{shown}; "
            "`holdfast forgotten RUN --task T` shows those that were lost"
        )
    if len(found) > 1:
        raise UserError(
            f"--example {example}: several tasks have a question of this id; add --task, one of {', '.join(found)}"
        )
    return next((f"{name}: {example}", [each]) for name, each in found.items())


def _question_pieces(
    documents: Sequence[Document], tokenizer: Tokenizer, block_size: int, end_of_text: str
) -> Iterator[Asked]:
    """Questions with all their choices, as rows that train would see; in pieces of one shape."""
    choosing = all(len(each.choices) > 1 for each in documents)
    if not choosing:
        documents = [each._replace(choices=(each.answer,), label=0) for each in documents]
    asked = choice.questions(documents, tokenizer, block_size, end_of_text)
    labels = [each.choices.index(each.answer) if each.label is None else each.label for each in documents]
    most = max(len(each.choices) for each in asked)
    longest = max(len(each.prompt) + max(map(len, each.choices)) for each in asked)
    width = min(-(-longest // NARROWEST) * NARROWEST, block_size)
    per_piece = max(1, min(CHUNK_TOKENS // (width * most), len(asked)))
    for start in range(0, len(asked), per_piece):
        x = np.zeros((per_piece, most, width), np.int32)
        y = np.full((per_piece, most, width), IGNORE, np.int32)
        label, weight = np.zeros(per_piece, np.int32), np.zeros(per_piece, np.float32)
        choices = np.zeros((per_piece, most), np.int8)
        choices[:, 0] = 1
        for row, each in enumerate(asked[start : start + per_piece]):
            label[row], weight[row] = labels[start + row], 1.0
            for column, own in enumerate(each.choices):
                tokens = np.array([*each.prompt, *own], np.int32)
                first = len(each.prompt) - each.shared  # of the answer
                x[row, column, : len(tokens) - 1] = tokens[:-1]
                y[row, column, first - 1 : len(tokens) - 1] = tokens[first:]
                choices[row, column] = 1
        yield Asked(x, y, None, None, label, choices, weight)


def _row_pieces(rows: Rows, count: int) -> Iterator[Asked]:
    """The first held-out rows of a dataset; each counts by its tokens."""
    packed = rows.style is DatasetStyle.PACKED
    per_piece = max(1, min(CHUNK_TOKENS // rows.block_size, count))
    for start in range(0, count, per_piece):
        indices = np.arange(start, min(start + per_piece, count))
        found = rows.rows(np.concatenate([indices, np.zeros(per_piece - len(indices), np.int64)]))
        y = np.where(found.padding_mask > 0, found.y, IGNORE)
        y[len(indices) :] = IGNORE
        weight = (y >= 0).sum(1).astype(np.float32)
        yield Asked(
            x=found.x[:, None],
            y=y[:, None],
            segment_ids=found.segment_ids[:, None] if packed else None,
            positions=found.positions[:, None] if packed else None,
            label=np.zeros(per_piece, np.int32),
            choices=np.ones((per_piece, 1), np.int8),
            weight=weight,
        )
