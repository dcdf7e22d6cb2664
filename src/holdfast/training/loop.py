"""The training loop: it reads from top to bottom like a recipe.

fresh start: evaluate, checkpoint
for each step: enter the stage if one begins, draw the batch, train,
               then at that step's duties: record, validate, evaluate, checkpoint
at the end: results and report
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from holdfast.config import to_yaml
from holdfast.data.batches import prefetched
from holdfast.errors import RunError
from holdfast.execution import processes
from holdfast.execution.checkpoints import CheckpointStore, named_checkpoint
from holdfast.execution.files import lock_file, run_lock, write_atomically
from holdfast.execution.storage import Patience, disk_reason
from holdfast.execution.watchdog import Watchdog
from holdfast.tracking import RunInfo, Tracker
from holdfast.tracking.jsonl import FILE_NAME, JsonlSink, truncate
from holdfast.training import compiling, measure, resume
from holdfast.training.clock import Clock
from holdfast.training.data import validation_batches
from holdfast.training.state import KLDivergenceTrainState, copied
from holdfast.training.step import penalty_cosine
from holdfast.training.stopping import Consent, Interrupted, interrupts

if TYPE_CHECKING:
    from holdfast.training.base import BaseTrainer


def run(
    trainer: "BaseTrainer[Any, Any]",
    parent: str | None = None,
    init_from: str | None = None,
    on_results: Callable[[Path], object] | None = None,
) -> None:
    """Train to the end, from wherever the run's checkpoints are.

    Args:
        parent: `RUN@CHECKPOINT` whose past a new run shares.
        init_from: `RUN[@CHECKPOINT]` whose weights a new run starts from.
        on_results: called with the run's folder whenever results were written; what it raises is only shown.
    """
    with held(trainer.spec.run_dir), interrupts() as asked:
        prepare_data(trainer)
        with processes.together():
            progress = resume.start(trainer, print if processes.is_first() else lambda _: None, parent)
            if init_from is not None and int(trainer.state.step) == 0:
                resume.init_from(trainer, init_from)
        already_done = trainer.done
        if processes.is_first():
            truncate(trainer.spec.run_dir / FILE_NAME, progress.metrics_length)
            write_run_files(trainer)
        names = trainer.settings.tracking.sink_names(trainer.config.wandb)
        info = run_info(trainer)
        tracker = Tracker.open(names if processes.is_first() and not already_done else [], info)
        rolling = trainer.settings.run.rolling
        store = CheckpointStore(trainer.checkpoint_dir, rolling=rolling, patience=info.patience)
        try:
            session = Session(trainer, tracker, store, progress, on_results, info.patience)
            if not already_done:
                with session.watchdog:
                    session.train(Consent(asked))
            elif processes.is_first():
                print(f"{trainer.spec.run_dir}: this run is finished ({trainer.stages.total_steps} steps)")
            store.wait()
            session.finish()
        finally:
            store.close()
            tracker.close()


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Hold the run's folder, in the first process for all of them."""
    with contextlib.ExitStack() as stack:
        with processes.together():
            if processes.is_first():
                stack.enter_context(run_lock(run_dir))
        yield


def prepare_data(trainer: "BaseTrainer[Any, Any]") -> None:
    """Make what is missing in the first process; the others wait, then open it, or make it on a disk of their own."""
    for first in (True, False):
        with processes.together(processes.PREPARE_SECONDS):
            if processes.is_first() == first:
                assert trainer.plan, "data is prepared before anything else"
    fingerprints = processes.gather(trainer.plan.fingerprint(trainer.stages.total_steps))
    for number, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise RunError(
                f"process {number} has other data than process 0; let all hosts read the same data/root and data/cache"
            )


def write_run_files(trainer: "BaseTrainer[Any, Any]") -> None:
    """The resolved config and the tokenizer, enough to run again and to read checkpoints."""
    folder = trainer.spec.run_dir
    classes = resume.trainer_classes(trainer)
    write_atomically(folder / "config.yaml", to_yaml(trainer.settings.cfg, classes, trainer.job_name))
    if not (folder / "tokenizer").exists():
        trainer.tokenizer.save(folder / "tokenizer")


def run_info(trainer: "BaseTrainer[Any, Any]") -> RunInfo:
    """What trackers know about the run."""
    stages, spec = trainer.stages, trainer.spec
    return RunInfo(
        directory=spec.run_dir,
        name=spec.name,
        project=spec.project,
        group=spec.group,
        id=spec.id,
        total_steps=stages.total_steps,
        tokens_per_step=stages.tokens_per_step,
        stages=tuple((stages.stage_start(index), stage.name) for index, stage in enumerate(stages.stages)),
        start_step=int(trainer.state.step),
        config=resume.flat_config(trainer),
        patience=Patience(
            trainer.settings.run.disk_patience, lock_file(spec.run_dir) if processes.is_first() else None
        ),
    )


class Session:
    """One process's work on a run: the trainer, its compiled steps, and where results go."""

    def __init__(
        self,
        trainer: "BaseTrainer[Any, Any]",
        tracker: Tracker,
        store: CheckpointStore,
        progress: resume.Progress,
        on_results: Callable[[Path], object] | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.trainer = trainer
        self.on_results = on_results
        self.stages = trainer.stages
        self.agenda = trainer.agenda
        self.tracker = tracker
        self.store = store
        self.progress = progress
        self.steps = compiling.Steps(trainer)
        self.meter = measure.Meter(trainer, progress, patience)
        self.clock = Clock()
        self.watchdog = Watchdog(trainer.settings.topology.step_timeout, trainer.spec.run_dir)
        self.pending: tuple[int, Any, dict[str, Any]] | None = None
        self.saved_step = progress.saved_step

    def train(self, consent: Consent) -> None:
        """All steps that are left."""
        start = int(self.trainer.state.step)
        self.announce()
        self.clock.add("compile", self.trainer.search_seconds)
        if start == 0 and self.saved_step < 0:
            self.duties(0)
        elif processes.is_first():
            self.meter.write_results(finished=False)  # of a finished run to which a stage was appended they said so
        batches = prefetched(self.trainer.batches, start, self.trainer.settings.run.prefetch)
        for step in range(start, self.stages.total_steps):
            self.enter(step)
            with self.clock.on("data"), self.watchdog.waiting(f"the rows of step {step + 1}"):
                batch = compiling.place(next(batches), self.trainer.topology.mesh, self.trainer.batch_shape)
            self.advance(step, batch)
            self.duties(step + 1)
            with self.watchdog.waiting(f"the other processes after step {step + 1}"):
                signal_number = consent.given()
            if signal_number:
                self.settle()
                self.checkpoint(step + 1, (), durable=True)
                self.store.wait()
                raise Interrupted(signal_number, step + 1)

    def announce(self) -> None:
        """What the user should know before the first step."""
        trainer = self.trainer
        num_micro, rows = trainer.batch_shape
        per_device = rows // trainer.topology.num_row_shards
        trainable = trainer.trainable
        trained = f" ({trainable.num_trained(trainer.model_spec):,} trained)" if trainable else ""
        self.tracker.message(
            f"{trainer.spec.run_dir}: {trainer.model_spec.num_parameters():,} parameters{trained}, "
            f"{self.stages.total_steps} steps of {self.stages.tokens_per_step:,} tokens, "
            f"{num_micro} x {per_device} rows on each of {trainer.topology.num_row_shards} shards"
        )
        for leak in trainer.data.leaks:
            self.tracker.message(f"leak: {leak}")
        if "nll_difference" in trainer.penalties() and self.stages.needs_reference(0):
            self.tracker.message(
                "note: the penalty nll_difference has the gradient of plain training and holds nothing back; "
                "optimization/kl/estimator: forward (or reverse) is an exact KL"
            )

    def enter(self, step: int) -> None:
        """Take the snapshot and enter the stage that begin at this step, if any."""
        trainer, stages = self.trainer, self.stages
        begins = step == 0 or stages.stage_at(step) != stages.stage_at(step - 1)
        takes = step in stages.snapshot_steps()
        if step == 0 and stages.initial_reference:
            assert isinstance(trainer.state, KLDivergenceTrainState)
            source = named_checkpoint(str(trainer.settings.penalty.reference_from))
            trainer.state = trainer.state.anchored(resume.load_weights(trainer, source))
        if takes:
            assert isinstance(trainer.state, KLDivergenceTrainState)
            trainer.state = trainer.state.snapshot()
        if not begins:
            return
        index = stages.stage_at(step)
        stage = stages.stages[index]
        trainer.state = trainer.state.entered(stage, trainer.objective_at(index))
        if isinstance(trainer.state, KLDivergenceTrainState) and not stages.needs_reference(index):
            trainer.state = trainer.state.replace(reference=None)
        record = {
            "stage": index,
            "name": stage.name,
            "beta": stage.beta,
            "reference_updated": takes,
            "processes": jax.process_count(),
            "devices": trainer.topology.mesh.devices.size,
            "mesh": dict(trainer.topology.sizes),
        }
        self.log("stage", step, record)

    def advance(self, step: int, batch: Any) -> None:
        """One optimizer step; its metrics are fetched while the next one runs."""
        compiled = self.steps.compile_seconds
        started = time.perf_counter()
        self.probe_penalty(step, batch)
        train = self.steps.ready(self.trainer.state, batch)
        with self.watchdog.waiting(f"the devices of all processes at step {step + 1}"):
            self.trainer.state, loss, meta = train()
        self.settle()
        self.pending = (step + 1, loss, meta)
        compile_seconds = self.steps.compile_seconds - compiled
        self.clock.add("compile", compile_seconds)
        self.clock.add("compute", time.perf_counter() - started - compile_seconds)

    def probe_penalty(self, step: int, batch: Any) -> None:
        """Name a penalty that cannot move the model away from plain training, where asked to look."""
        trainer = self.trainer
        state = trainer.state
        due = trainer.settings.penalty.probe and self.agenda.records(step + 1)
        if not due or not isinstance(state, KLDivergenceTrainState) or state.objective.penalty is None:
            return
        with compiling.tracing_for(trainer.topology.mesh):
            cosine = float(jax.jit(penalty_cosine)(state, batch, jax.random.key(0)))
        self.meter.penalty_cosine = cosine
        if abs(cosine) > 1 - 1e-6:
            self.tracker.message(
                f"step {step + 1}: the gradient of {trainer.penalties()[0]} is parallel to the cross-entropy's "
                f"(cosine {cosine:.6f}): it only rescales plain training"
            )

    def settle(self) -> None:
        """Write the record of the step whose metrics are waiting, and stop a run that has gone wrong."""
        if self.pending is None:
            return
        step, loss, meta = self.pending
        self.pending = None
        with self.watchdog.waiting(f"the devices of all processes at step {step}"):
            values = compiling.host({"loss": loss, **meta})
        in_a_row = int(values["skipped_in_a_row"])
        if self.agenda.records(step):
            self.log("train", step, self.train_record(step, values))
        else:
            self.tracker.log("progress", step, self.tokens(step), {"loss": values["loss"]})
        if in_a_row >= self.trainer.settings.run.max_skipped:
            raise RunError(
                f"step {step}: loss or gradient was not finite in {in_a_row} steps in a row; the updates were "
                f"skipped and the checkpoint of step {self.saved_step} is good; lower optimization/lr, or raise "
                "training/max_skipped_steps"
            )

    def train_record(self, step: int, values: dict[str, float]) -> dict[str, Any]:
        """The record of one step: of this step alone, never an average."""
        rows: dict[str, int] = {}
        for source, count in self.trainer.plan.counts_at(step - 1).items():
            rows[source.name] = rows.get(source.name, 0) + count
        record = {
            "loss": values["loss"],
            "ce": values["ce"],
            "penalty": values["penalty"],
            "beta": values.get("beta", 0.0),
            "learning_rate": values["learning_rate"],
            "grad_norm": values["grad_norm"],
            "rows": rows,
            "stage": self.stages.stage_at(step - 1),
            "skipped": int(values["skipped"]),
            "seconds": self.clock.read(),
            "memory": compiling.peak_memory(self.trainer.topology.mesh),
        }
        if self.meter.penalty_cosine is not None:
            record["penalty_cosine"] = self.meter.penalty_cosine
        return record

    def duties(self, step: int) -> None:
        """What is due after a step: record, validation, evaluation, checkpoint, in this order."""
        validates, measures, probes = self.agenda.validates(step), self.agenda.measures(step), self.agenda.probes(step)
        if not (validates or measures or probes or self.agenda.saves(step)):
            return
        self.settle()
        tags = list(self.agenda.tags(step))
        if validates:
            tags += self.validate(step)
        if measures or probes:
            with self.clock.on("evaluation"):
                point = self.meter.measure(step, measures)
            self.log("evaluation", step, point)
        if self.agenda.saves(step) or tags:
            self.checkpoint(step, tuple(tags))
        if measures:
            self.write_results(finished=False)

    def validate(self, step: int) -> list[str]:
        """Validation loss of every source; returns the tag of a checkpoint that is the best of its stage."""
        trainer, losses = self.trainer, {}
        with self.clock.on("evaluation"):
            for name, rows in trainer.data.held_out().items():
                total = count = 0.0
                shape = trainer.batch_shape
                local = compiling.local_rows(trainer.topology.mesh, shape)
                for batch in validation_batches(rows, trainer.config.validation_steps, shape, trainer.packed, local):
                    placed = compiling.place(batch, trainer.topology.mesh, shape)
                    loss_sum, tokens = self.steps.validate(trainer.state, placed)
                    total, count = total + loss_sum, count + tokens
                losses[name] = total / max(count, 1.0)
        index = self.stages.stage_at(step - 1)
        mixture = self.stages.stages[index].mixture
        loss = sum(sampling.rate * losses[sampling.name] for sampling in mixture)
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
                self.progress.metrics_length = sink.length()
            state = self.trainer.state.arrays()
            if jax.default_backend() == "cpu":
                # On a CPU the writer would share the memory that the next step is given to write in.
                state = copied(state)
            manifest = resume.manifest_of(self.trainer, step, tags, self.progress)
            self.store.save(step, state, manifest, durable=durable)
        self.saved_step = step

    def finish(self) -> None:
        """The results of a whole run."""
        self.write_results(finished=True)

    def write_results(self, *, finished: bool) -> None:
        """Write what is known, and let whoever asked make pages of it."""
        if not processes.is_first():
            return
        self.meter.write_results(finished=finished)
        if self.on_results is not None:
            try:
                self.on_results(self.trainer.spec.run_dir)
            except Exception as error:  # a picture that fails must not stop training
                self.tracker.message(f"warning: no report: {type(error).__name__}: {error}")
                if disk_reason(error) is None:  # a disk may be mended until the next one
                    self.on_results = None
        if finished:
            self.tracker.summarize(self.stages.total_steps, self.trainer.spec.run_dir)

    def tokens(self, step: int) -> int:
        """Tokens seen after a step."""
        return step * self.stages.tokens_per_step

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One event to the trackers."""
        self.tracker.log(kind, step, self.tokens(step), values)
