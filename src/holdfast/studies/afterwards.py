"""What finished runs are asked afterwards, on the seeds that are judged; no run is another one for it.

`relearn`: train on the old data again, plainly, from a run's last weights: after how many steps is the old loss back
where arms began? What comes back in a few steps was hidden, not lost. `drift`: KL(before ‖ after) on held-out new rows,
which is said to predict forgetting (arXiv 2509.04259). The answers are files below the run's folder, so that what was
asked once is not asked again.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.execution.files import write_json
from holdfast.studies.graph import Cell
from holdfast.studies.study import BOUNDS, RelearnConfig, StudyConfig
from holdfast.types import Json, Tree

if TYPE_CHECKING:
    from holdfast.execution.checkpoints import CheckpointInfo
    from holdfast.training.resolve import ResolvedRun

FOLDER, KL, LOSS = "afterwards", "kl_forward", "bits_per_byte"
COLUMNS = ("relearn_steps", "relearned", "new_kl")


def answer_files(config: StudyConfig, folder: Path, cell: Cell) -> dict[str, Path]:
    """Where the answers of a cell are, by what was asked; those of other settings have other names.

    Args:
        folder: of the cell's run.
    """
    if cell.arm in BOUNDS or cell.seed not in config.judging:
        return {}
    share = cell.choice.strength if cell.weights == "interpolated" else None
    weights = cell.weights if share is None else f"{share:g}"
    asked = {}
    if config.relearn is not None:
        asked["relearn"] = f"relearn-{config.relearn.steps}-{config.relearn.every}-{weights}.json"
    if config.drift:
        asked["drift"] = f"drift-{weights}.json"
    return {name: folder / FOLDER / file for name, file in asked.items()}


def answers(config: StudyConfig, folder: Path, cell: Cell) -> dict[str, str]:
    """The answers of a cell as columns of the results; a run that did not come back has the most steps and a 0."""
    found: dict[str, str] = {}
    for name, path in answer_files(config, folder, cell).items():
        told: Json = json.loads(path.read_bytes())
        if name == "relearn":
            found |= {"relearn_steps": str(told["steps"]), "relearned": str(int(told["back"]))}
        else:
            found["new_kl"] = f"{told['new_kl']:.8g}"
    return found


def rows_again(index: int, steps: int, old_steps: int) -> int:
    """The step of the old stages whose rows a step of relearning takes: spread over all of them.

    >>> [rows_again(index, 4, 400) for index in range(4)], [rows_again(index, 4, 3) for index in range(4)]
    ([0, 100, 200, 300], [0, 1, 2, 0])
    """
    return index * old_steps // steps if steps <= old_steps else index % old_steps


@dataclass(frozen=True)
class Beginning:
    """The weights that arms begin with, and the old loss there."""

    weights: Tree
    old: float


class Asker:
    """Asks the runs of one seed.

    Args:
        config: of the study.
        plain: plain training at the base rate with that seed: its model, optimizer, first stage and rows.
    """

    def __init__(self, config: StudyConfig, plain: "ResolvedRun") -> None:
        from holdfast.execution import ExecutionSpec
        from holdfast.execution.topology import TopologyConfig
        from holdfast.training.compile import CompiledSteps
        from holdfast.training.results import chosen_evaluator
        from holdfast.training.run import make_trainer

        self.config = config
        spec = ExecutionSpec.local(Path(tempfile.gettempdir()), name="afterwards", topology=TopologyConfig())
        self.trainer = make_trainer(plain, spec)
        tasks = [*dict.fromkeys([*config.old, *config.new_tasks])]
        self.evaluator = chosen_evaluator(plain, self.trainer.topology, tasks)
        mesh, micro = self.trainer.topology.mesh, self.trainer.micro_batch
        seed = plain.options.run.seed_of("dropout")
        self.steps = CompiledSteps(self.trainer.train_step, self.trainer.val_step, mesh, seed, micro.precompiled)
        self._beginnings: dict[str, Beginning] = {}

    def ask(self, first: str, last: str, cell: Cell, files: dict[str, Path]) -> None:
        """Answer what has no file yet.

        Args:
            first: the checkpoint that arms begin with, `RUN@CHECKPOINT`.
            last: the run's last one.
        """
        missing = {name: path for name, path in files.items() if not path.is_file()}
        if not missing:
            return
        from holdfast.execution.checkpoints import named_checkpoint

        if first not in self._beginnings:
            begun = self.trainer.restorer.weights(named_checkpoint(first))
            self._beginnings = {first: Beginning(begun, self._mean(begun, self.config.old, LOSS))}
        beginning = self._beginnings[first]
        weights = self._weights(beginning, named_checkpoint(last), cell)
        if "drift" in missing:
            apart = self._mean(weights, self.config.new_tasks, KL, beginning.weights)
            write_json(missing["drift"], {"new_kl": apart})
        if "relearn" in missing and self.config.relearn is not None:
            write_json(missing["relearn"], self._relearned(weights, beginning.old, self.config.relearn))

    def _weights(self, beginning: Beginning, info: "CheckpointInfo", cell: Cell) -> Tree:
        """The weights of a run that the cell is about."""
        import jax
        import jax.numpy as jnp

        from holdfast.analysis.interpolation import interpolate
        from holdfast.training.placement import shardings_of

        restorer = self.trainer.restorer
        if cell.weights == "ema":
            return restorer.weights(info, "ema")
        last = restorer.weights(info)
        if cell.weights != "interpolated":
            return last
        mixed = jax.jit(interpolate, out_shardings=shardings_of(last))
        return mixed(jnp.float32(cell.choice.strength), beginning.weights, last)

    def _mean(self, weights: Tree, tasks: Sequence[str], measure: str, reference: Tree = None) -> float:
        """The mean of a measure over the held-out rows of some datasets."""
        found = self.evaluator.evaluate(weights, reference, tasks=[], datasets=tasks)
        values = [found[task].measures[measure] for task in tasks]
        assert all(value is not None for value in values), "datasets with held-out rows have losses"
        return sum(float(value or 0.0) for value in values) / len(values)

    def _relearned(self, weights: Tree, level: float, relearn: RelearnConfig) -> Json:
        """Plain training on the rows of the old stages with a fresh optimizer until the old loss is at most a level."""
        from holdfast.training.compile import place
        from holdfast.training.initial import begun
        from holdfast.training.placement import copied

        trainer = self.trainer
        start = trainer.resolved.curriculum.stage_start(self.config.first_stage)
        state = begun(copied(trainer.state), trainer.resolved, weights)
        losses = {0: self._mean(state.params, self.config.old, LOSS)}
        step = 0
        while losses[max(losses)] > level and step < relearn.steps:
            batch = trainer.batch("train", rows_again(step, relearn.steps, start))
            placed = place(batch, trainer.topology.mesh, trainer.batch_shape[1])
            state, _, _ = self.steps.ready(state, placed)()
            step += 1
            if step % relearn.every == 0 or step == relearn.steps:
                losses[step] = self._mean(state.params, self.config.old, LOSS)
        back = losses[step] <= level
        return {"steps": step, "back": back, "level": level, "old": {str(at): loss for at, loss in losses.items()}}
