"""The training loop: it reads from top to bottom like a recipe.

fresh start: evaluate, checkpoint
for each step: sample rows if the stage that begins replays the model itself, enter the stage if one begins,
               draw the batch, train,
               then what is due after the step: record, validate, evaluate, checkpoint
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from holdfast import registry
from holdfast.data.batches import Batch, prefetched, validation_batches, without_control
from holdfast.data.sampling import SELF
from holdfast.errors import RunError
from holdfast.evaluation.forward import Runner
from holdfast.execution import processes
from holdfast.execution.checkpoints import CheckpointStore, named_checkpoint
from holdfast.execution.checksums import not_finite
from holdfast.execution.faults import fault_point
from holdfast.execution.signals import Consent, Interrupted
from holdfast.execution.storage import disk_reason
from holdfast.execution.watchdog import Watchdog
from holdfast.methods.controller import HIGHEST
from holdfast.tracking import Tracker
from holdfast.tracking.jsonl import JsonlSink
from holdfast.training.certificate import end_of_stage
from holdfast.training.compile import CompiledSteps, host, local_rows, peak_memory, place
from holdfast.training.data import BoundaryRows
from holdfast.training.manifest import Progress, manifest_of
from holdfast.training.placement import copied
from holdfast.training.resolve import FRESH_REFERENCE
from holdfast.training.results import ResultsRecorder
from holdfast.training.self_replay import make_set
from holdfast.training.state import stage_state
from holdfast.training.step import KEEP, RECORDED
from holdfast.training.weights import held_facts
from holdfast.types import Json, Tree

if TYPE_CHECKING:
    from holdfast.training.base import Trainer

METHOD = "method/"  # before the name of a method, in what a step returns
BOUND_ROWS = 50  # control rows with a multiplier at its bound, after which a user is told
PARALLEL = 1 - 1e-6  # a cosine above it: the penalty only rescales the loss


class Clock:
    """Seconds spent on each kind of work since it was last read."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @contextlib.contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """Count the block as that kind of work."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, time.perf_counter() - started)

    def add(self, kind: str, seconds: float) -> None:
        """Count seconds as that kind of work."""
        self._spent[kind] = self._spent.get(kind, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """What was spent, rounded; the clock starts again."""
        spent, self._spent = self._spent, {}
        return {kind: round(seconds, 4) for kind, seconds in spent.items()}


@dataclass(frozen=True)
class _Pending:
    """A step whose metrics are on their way."""

    step: int
    loss: jax.Array
    meta: Json
    probed: Json


class TrainLoop:
    """One process's work on a run: the trainer's declarations, its compiled steps, and where results go.

    Args:
        trainer: whose state is trained; its `batch`, `train_step`, `val_step` and `evaluator` are what is used.
        on_results: called with the run's folder whenever results were written; what it raises is only shown.
    """

    def __init__(
        self,
        trainer: "Trainer",
        tracker: Tracker,
        store: CheckpointStore,
        recorder: ResultsRecorder,
        on_results: Callable[[Path], object] | None = None,
    ) -> None:
        self.trainer = trainer
        self.run = trainer.resolved
        self.curriculum = trainer.resolved.curriculum
        self.triggers = trainer.triggers
        self.tracker = tracker
        self.store = store
        self.recorder = recorder
        self.progress: Progress = recorder.progress
        self.on_results = on_results
        self.mesh = trainer.topology.mesh
        micro, options = trainer.micro_batch, self.run.options
        seed = options.run.seed_of("dropout")
        self.steps = CompiledSteps(trainer.train_step, trainer.val_step, self.mesh, seed, micro.precompiled)
        names = [*options.run.probes, *(["penalty_cosine"] if options.penalty.probe else [])]
        self.probes = tuple(registry.probes.get(name) for name in dict.fromkeys(names))
        self.sampled_at = {made.step: made for made in trainer.plan.sampled_sets.values()}
        self.runner: Runner = Runner(self.run.model, trainer.topology)  # samples rows where a stage asks for them
        self.control = trainer.control_sets(self.runner)
        self.warned_of_bound: set[str] = set()
        self.clock = Clock()
        self.watchdog = Watchdog(options.topology.step_timeout, trainer.spec.run_dir)
        self.pending: _Pending | None = None
        self.saved_step = self.progress.saved_step

    def train(self, consent: Consent) -> None:
        """All steps that are left."""
        start = int(self.trainer.state.step)
        self.announce()
        self.clock.add("compile", self.trainer.micro_batch.seconds)
        if start == 0 and self.saved_step < 0:
            self.after(0)
        elif processes.is_first():
            self.recorder.write_results(finished=False)  # of a finished run to which a stage was appended they said so
        fault_point("first step")
        for step in range(start, self.curriculum.total_steps):
            self.sample(step, consent)
            self.enter(step)
            if step == start or step in self.sampled_at:
                batches = self.prefetched(step)
            with self.clock.on("data"), self.watchdog.waiting(f"the rows of step {step + 1}"):
                batch = self.place(next(batches))
            self.advance(step, batch)
            fault_point("step")
            self.after(step + 1)
            with self.watchdog.waiting(f"the other processes after step {step + 1}"):
                signal_number = consent.given()
            if signal_number:
                self.settle()
                self.check_finite(step + 1)
                self.checkpoint(step + 1, (), durable=True)
                self.store.wait()
                raise Interrupted(signal_number, step + 1)

    def prefetched(self, start: int) -> Iterator[Batch]:
        """The batches from a step on; those beyond the next rows to be sampled cannot be made yet."""
        end = min((step for step in self.sampled_at if step > start), default=self.curriculum.total_steps)
        return prefetched(self.batch_at, end, start, self.run.options.run.prefetch)

    def batch_at(self, step: int) -> Batch:
        """This process's rows of a step."""
        return self.trainer.batch("train", step)

    def place(self, batch: Batch) -> Batch:
        """A batch on the devices."""
        return place(batch, self.mesh, self.trainer.batch_shape[1])

    def announce(self) -> None:
        """What the user should know before the first step."""
        run, topology = self.run, self.trainer.topology
        num_micro, rows = self.trainer.batch_shape
        per_device = rows // topology.num_row_shards
        trained = f" ({run.trainable.num_trained(run.model):,} trained)" if run.trainable else ""
        platform = self.mesh.devices.flat[0].platform
        attention = run.model.kind.attention(run.model, platform, packed=run.packed)
        self.tracker.message(
            f"{self.trainer.spec.run_dir}: {run.model.num_parameters():,} parameters{trained}, "
            f"{self.curriculum.total_steps} steps of {self.curriculum.tokens_per_step:,} tokens, "
            f"{num_micro} x {per_device} rows on each of {topology.num_row_shards} shards"
            + (f", attention: {attention}" if attention else "")
        )
        for leak in self.recorder.leaks:
            self.tracker.message(f"leak: {leak}")
        if self.recorder.leaks:
            self.tracker.message(
                "  held-out rows are meant to be new to the model; these are not, so that their scores flatter it; "
                "data/max_leak says how many are too many"
            )
        if run.anchors_to_fresh_weights and self.trainer.spec.init_from is None and int(self.trainer.state.step) == 0:
            self.tracker.message(f"note: {FRESH_REFERENCE}")
        weighed = any(stage.beta > 0 for stage in self.curriculum.stages)
        if "nll_difference" in run.trainer.penalties(run.options) and weighed:
            self.tracker.message(
                "note: the penalty nll_difference has the gradient of plain training and holds nothing back; "
                "optimization/kl/estimator: forward (or reverse) is an exact KL"
            )

    def sample(self, step: int, consent: Consent) -> None:
        """Let the model sample the rows of the stage that begins at this step, if it replays itself."""
        if step not in self.sampled_at:
            return
        made, trainer = self.sampled_at[step], self.trainer

        def told(done: int) -> None:
            values = {"name": f"rows of {SELF.name}", "done": done, "total": made.num_rows, "unit": "rows"}
            self.log("prepare", step, values)
            signal_number = consent.given()
            if signal_number:
                self.store.wait()
                raise Interrupted(signal_number, step)

        with self.clock.on("sampling"):
            folder = trainer.spec.run_dir
            make_set(self.run, self.runner, folder, trainer.state.params, made, told=told, say=self.tracker.message)
        fault_point("sampled")

    def enter(self, step: int) -> None:
        """Enter the stage that begins at this step, if one does, and take the snapshot that is due."""
        restorer = self.trainer.restorer

        def batch_at(step: int) -> Batch:
            return without_control(self.batch_at(step))

        def reference() -> Tree:
            return restorer.weights(named_checkpoint(str(self.run.options.penalty.reference_from)))

        seed, epoch_end = self.run.options.run.seed, self.trainer.plan.epoch_end
        data = BoundaryRows(self.curriculum, step, batch_at, self.place, reference, epoch_end, seed)
        self.trainer.state = stage_state(self.trainer.state, self.run, step, data)
        if step > 0 and self.curriculum.stage_at(step) == self.curriculum.stage_at(step - 1):
            return
        index = self.curriculum.stage_at(step)
        if self.control is not None and any(budget.since == index for budget in self.curriculum.budgets):
            with self.clock.on("evaluation"):
                self.trainer.state = self.control.entered(self.trainer.state, index)
        record = {
            "stage": index,
            "name": self.curriculum.stages[index].name,
            "beta": self.curriculum.stages[index].beta,
            "reference_updated": step in self.curriculum.snapshot_steps(),
            "processes": jax.process_count(),
            "devices": self.mesh.devices.size,
            "mesh": dict(self.trainer.topology.sizes),
            "cores": processes.visible_cores(),
        }
        self.log("stage", step, record)
        fault_point("stage entered")

    def advance(self, step: int, batch: Batch) -> None:
        """One optimizer step; its metrics are fetched while the next one runs."""
        compiled = self.steps.compile_seconds
        started = time.perf_counter()
        probed: Json = {}
        if self.triggers.probes_step(step + 1):
            probed = self.steps.probe(self.trainer.state, batch, self.probes)
        train = self.steps.ready(self.trainer.state, batch)
        with self.watchdog.waiting(f"the devices of all processes at step {step + 1}"):
            self.trainer.state, loss, meta = train()
        self.settle()
        self.pending = _Pending(step + 1, loss, meta, probed)
        compile_seconds = self.steps.compile_seconds - compiled
        self.clock.add("compile", compile_seconds)
        self.clock.add("compute", time.perf_counter() - started - compile_seconds)

    def settle(self) -> None:
        """Write the record of the step whose metrics are waiting, and stop a run that has gone wrong."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        step = pending.step
        with self.watchdog.waiting(f"the devices of all processes at step {step}"):
            values = host({"loss": pending.loss, **pending.meta})
            probed = host(pending.probed) if pending.probed else {}
        in_a_row = int(values["skipped_in_a_row"])
        if self.triggers.records(step) or probed:
            self.log("train", step, {**self.train_record(step, values), **probed})
        else:
            self.tracker.log("progress", step, self.tokens(step), {"loss": values["loss"]})
        self.warn_of_parallel(step, probed)
        self.warn_of_bound(step, values)
        if in_a_row >= self.run.options.run.max_skipped:
            raise RunError(
                f"step {step}: loss or gradient was not finite in {in_a_row} steps in a row; the updates were "
                f"skipped and the checkpoint of step {self.saved_step} is good; lower optimization/lr, or raise "
                "training/max_skipped_steps"
            )

    def warn_of_parallel(self, step: int, probed: Mapping[str, float]) -> None:
        """Name a penalty that cannot move the model away from plain training."""
        cosine = probed.get("penalty_cosine", math.nan)
        if abs(cosine) > PARALLEL:
            name = self.run.trainer.penalties(self.run.options)[0]
            self.tracker.message(
                f"step {step}: the gradient of {name} is parallel to the cross-entropy's "
                f"(cosine {cosine:.6f}): it only rescales plain training"
            )

    def warn_of_bound(self, step: int, values: Mapping[str, float]) -> None:
        """Say once that a budget cannot hold: its multiplier has been at the top for many control rows."""
        for budget in self.curriculum.budgets:
            rows = int(values.get(f"{KEEP}{budget.name}/at_bound", 0))
            if rows >= BOUND_ROWS and budget.name not in self.warned_of_bound:
                self.warned_of_bound.add(budget.name)
                self.tracker.message(
                    f"warning: step {step}: the multiplier of keep/{budget.name} has been at its bound of {HIGHEST:g} "
                    f"for {rows} control rows: the learning rate is too high for this budget; lower optimization/lr "
                    "or stages/N/lr"
                )

    def train_record(self, step: int, values: dict[str, float]) -> Json:
        """The record of one step: of this step alone, never an average."""
        rows: dict[str, int] = {}
        for source, count in self.trainer.plan.counts_at(step - 1).items():
            rows[source.name] = rows.get(source.name, 0) + count
        record = {
            "loss": values["loss"],
            "ce": values["ce"],
            "penalty": values["penalty"] if values["penalty_measured"] else None,
            "beta": values["beta"],
            "learning_rate": values["learning_rate"],
            "grad_norm": values["grad_norm"],
            "rows": rows,
            "stage": self.curriculum.stage_at(step - 1),
            "skipped": int(values["skipped"]),
            "seconds": self.clock.read(),
            "memory": peak_memory(self.mesh),
        }
        methods = {name.removeprefix(METHOD): value for name, value in values.items() if name.startswith(METHOD)}
        named = (METHOD, KEEP)
        own = {name: value for name, value in values.items() if name not in RECORDED and not name.startswith(named)}
        record |= {**own, **({"methods": methods} if methods else {})}  # own: the model's auxiliary losses
        budgets = self.curriculum.budgets_in(self.curriculum.stage_at(step - 1))
        kept = {
            budget.name: {name: values[f"{KEEP}{budget.name}/{name}"] for name in ("multiplier", "difference")}
            for budget in budgets
        }
        return {**record, **({"keep": kept} if kept else {})}

    def after(self, step: int) -> None:
        """What is due after a step: record, validation, evaluation, checkpoint, in this order."""
        triggers = self.triggers
        validates, measures, probes = triggers.validates(step), triggers.measures(step), triggers.probes(step)
        if not (validates or measures or probes or triggers.saves(step)):
            return
        self.settle()
        self.check_finite(step)
        self.certify(step)
        tags = list(triggers.tags(step))
        if validates:
            tags += self.validate(step)
        if measures or probes:
            with self.clock.on("evaluation"):
                point = self.recorder.measure(self.trainer.state, step, measures)
            fault_point("evaluated")
            for task, facts in point["facts"].items():
                if "failed" in facts:
                    self.tracker.message(f"warning: step {step}: {task} was not evaluated: {facts['failed']}")
            self.log("evaluation", step, point)
        if triggers.saves(step) or tags:
            self.checkpoint(step, tuple(tags))
        if measures:
            self.write_results(finished=False)

    def check_finite(self, step: int) -> None:
        """Stop a run whose weights are not numbers any more, before they are measured or saved."""
        wrong = not_finite(self.trainer.state.params)
        if wrong:
            good = "" if self.saved_step < 0 else f"the checkpoint of step {self.saved_step} is good; "
            raise RunError(
                f"step {step}: the weights are not finite ({', '.join(wrong[:3])}); {good}lower optimization/lr or "
                "optimization/weight_decay"
            )

    def certify(self, step: int) -> None:
        """What control rows prove of the budgets of a stage that has just ended, if it had some."""
        stage = self.curriculum.stage_at(max(step - 1, 0))
        if self.control is None or step != self.curriculum.stage_end(stage) or not self.curriculum.budgets_in(stage):
            return
        with self.clock.on("evaluation"):
            self.trainer.state, found = end_of_stage(
                self.trainer.state, stage, step, self.control, certify=self.run.options.keep.certify
            )
        self.progress.certificates.append(found)
        self.log("certificate", step, found)

    def validate(self, step: int) -> list[str]:
        """Validation loss of every source; returns the tag of a checkpoint that is the best of its stage."""
        losses, shape, num_rows = {}, self.trainer.batch_shape, self.run.config.validation_steps
        local = local_rows(self.mesh, shape)
        with self.clock.on("evaluation"):
            trained = {source.name for source in self.curriculum.sources}
            for name, rows in self.trainer.data.held_out().items():
                if name not in trained:
                    continue  # eval/held_out is measured by evaluations alone
                total = count = 0.0
                for batch in validation_batches(rows, num_rows, shape, self.run.packed, local):
                    loss_sum, tokens = self.steps.validate(self.trainer.state, self.place(batch))
                    total, count = total + loss_sum, count + tokens
                losses[name] = total / max(count, 1.0)
        index = self.curriculum.stage_at(step - 1)
        mixture = self.curriculum.datasets_of(index)
        loss = sum(sampling.rate * losses[sampling.name] for sampling in mixture)
        if len(mixture) < len(self.curriculum.stages[index].mixture):
            loss /= sum(sampling.rate for sampling in mixture)
        self.log("validation", step, {"loss": loss, "losses": losses, "stage": index})
        if loss < self.progress.best.get(str(index), float("inf")):
            self.progress.best[str(index)] = loss
            return [f"best_{index}"]
        return []

    def checkpoint(self, step: int, tags: tuple[str, ...], *, durable: bool = False) -> None:
        """Save the state with everything that is known so far, unless this step is saved already."""
        if step == self.saved_step:
            return
        with self.clock.on("checkpoint"):
            self.log("checkpoint", step, {"tags": list(tags)})
            sink = self.tracker.sink("jsonl")
            if isinstance(sink, JsonlSink):
                self.progress.metrics_length, self.progress.metrics_digest = sink.length(), sink.digest()
            state, trainer = self.trainer.state, self.trainer
            arrays = state.arrays()
            if jax.default_backend() == "cpu":
                # On a CPU the writer would share the memory that the next step is given to write in.
                arrays = copied(arrays)
            held = {**held_facts(state), **trainer.sampled.facts(step)}
            manifest = manifest_of(self.run, trainer.plan, step, tags, trainer.machine, held, self.progress)
            self.store.save(step, arrays, manifest, durable=durable)
        self.saved_step = step

    def write_results(self, *, finished: bool) -> None:
        """Write what is known, and let whoever asked make pages of it."""
        if not processes.is_first():
            return
        self.recorder.write_results(finished=finished)
        fault_point("results")
        if self.on_results is not None:
            try:
                self.on_results(self.trainer.spec.run_dir)
            except Exception as error:  # a picture that fails must not stop training
                self.tracker.message(f"warning: no report: {type(error).__name__}: {error}")
                if disk_reason(error) is None:  # a disk may be mended until the next one
                    self.on_results = None
        fault_point("report")
        if finished:
            self.tracker.summarize(self.curriculum.total_steps, self.trainer.spec.run_dir)

    def tokens(self, step: int) -> int:
        """Tokens seen after a step."""
        return step * self.curriculum.tokens_per_step

    def log(self, kind: str, step: int, values: Json) -> None:
        """One event to the trackers."""
        self.tracker.log(kind, step, self.tokens(step), values)
