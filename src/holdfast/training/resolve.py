"""From options to a resolved run, once and in one place; nothing here imports JAX unless a class of the user's does.

A `ResolvedRun` is everything about a run that can be checked before a device is touched. The command line, the plan,
the report and the trainer are all handed the same one.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from holdfast import registry
from holdfast.config import build, flatten
from holdfast.curriculum import Curriculum
from holdfast.data.sampling import DatasetStyle
from holdfast.data.sources import find_source
from holdfast.data.tokenizers import Tokenizer, model_vocab_size
from holdfast.errors import ConfigError, UserError
from holdfast.evaluation.harness_tasks import check_folder
from holdfast.evaluation.tasks import find_task
from holdfast.execution.checkpoints import named_checkpoint
from holdfast.methods import Method, MethodConfig, StageFacts
from holdfast.methods.budget import with_budgets
from holdfast.methods.method import looks_back
from holdfast.models.family import DECODER, Model, chosen_family, resolve_model
from holdfast.models.parameters import Trainable, trainable_for
from holdfast.models.pretrained import tokenizer_for
from holdfast.optim import Schedule, ScheduleContext, build_schedule, scaled
from holdfast.training.config import BaseTrainerConfig, RunOptions, config_classes
from holdfast.types import Json

if TYPE_CHECKING:
    from holdfast.training.base import Trainer

FRESH_REFERENCE = (
    "the reference is a snapshot of fresh random weights; to continue a model that exists name it "
    "(architecture/from, or --init-from)"
)


@dataclass(frozen=True, eq=False)
class ResolvedRun:
    """A checked run: its options and what they resolve to.

    Args:
        job: the name that its trainer is registered under.
        trainable: the part of the model that is trained, None where that is all of it.
        declared_by: the trainer's class, None for the registered one, which is imported when first asked for.
    """

    job: str
    options: RunOptions
    curriculum: Curriculum
    tokenizer: Tokenizer
    model: Model
    trainable: Trainable | None
    declared_by: "type[Trainer] | None" = None

    @property
    def trainer(self) -> "type[Trainer]":
        """The class that declares optimizer, schedule, methods and evaluator."""
        found: type[Trainer] = self.declared_by or registry.jobs.get(self.job)
        return found

    @property
    def config(self) -> BaseTrainerConfig:
        """The trainer's own options."""
        return self.options.trainer

    @property
    def classes(self) -> list[type]:
        """The classes whose fields make up the configuration."""
        return config_classes(type(self.options.trainer))

    def flat_config(self) -> Json:
        """All options as path -> value."""
        return flatten(self.options.cfg, self.classes)

    def flat_defaults(self) -> Json:
        """The defaults of all options as path -> value."""
        return flatten(build(*self.classes), self.classes)

    @property
    def overrides_batch(self) -> bool:
        """Whether the trainer draws its own batches, so that the data plan is not what it trains on."""
        return self._overrides("batch")

    @property
    def overrides_evaluator(self) -> bool:
        """Whether the trainer has an evaluator of its own."""
        return self._overrides("evaluator")

    def _overrides(self, name: str) -> bool:
        from holdfast.training.base import BaseTrainer

        built_in = self.declared_by is None and registry.jobs.is_built_in(self.job)
        return not built_in and getattr(self.trainer, name) is not getattr(BaseTrainer, name)

    @property
    def held_out(self) -> tuple[str, ...]:
        """Datasets that are measured although no stage trains on them, in the order of `eval/held_out`."""
        trained = {source.name for source in self.curriculum.sources}
        return tuple(name for name in self.options.evaluation.held_out if name not in trained)

    @property
    def anchors_to_fresh_weights(self) -> bool:
        """Whether the reference is a snapshot of weights that nothing has trained, unless a command brings others."""
        untrained = self.options.architecture.source is None
        return untrained and 0 in self.curriculum.snapshot_steps()

    @property
    def packed(self) -> bool:
        """Whether any source is packed, so that batches carry segments."""
        return any(source.style is DatasetStyle.PACKED for source in self.curriculum.sources)


def resolve(job: str, cfg: DictConfig, *, needs_data: bool = True) -> ResolvedRun:
    """The run of a job with these options; what is wrong is a UserError that names its path.

    The options' own curriculum is checked first. Then a trainer of the user's own is asked; the built-in ones have no
    other, so that their classes, and JAX, are not imported.

    Args:
        needs_data: refuse datasets, evaluations and folders that are not there; to look at a model needs none of them.
    """
    options = read_options(job, cfg)
    curriculum = curriculum_for(job, options)
    if needs_data:
        check_data(options, curriculum)
    return resolve_options(job, options, curriculum)


def read_options(job: str, cfg: DictConfig) -> RunOptions:
    """The options of a job in a tree, typed and checked one by one."""
    config = registry.jobs.config(job)
    assert config is not None, f"the job {job} was registered without a config class"
    return RunOptions.read(config, cfg)


def curriculum_for(job: str, options: RunOptions) -> Curriculum:
    """The curriculum of a job: that of its options, unless a trainer of the user's own has another."""
    curriculum: Curriculum = options.trainer.curriculum(options)
    if not registry.jobs.is_built_in(job):
        curriculum = registry.jobs.get(job).curriculum(options)
    return curriculum


def schedule_for(
    job: str, options: RunOptions, curriculum: Curriculum, declared_by: "type[Trainer] | None" = None
) -> Schedule:
    """The learning rate as a function of the step; the built-in trainers' classes are not imported for it."""
    config = options.trainer
    choice: str | Schedule | None = config.own_schedule
    if declared_by is not None or not registry.jobs.is_built_in(job):
        choice = (declared_by or registry.jobs.get(job)).schedule()
    context = ScheduleContext(
        lr=config.lr,
        total_steps=curriculum.total_steps,
        stage_starts=tuple(curriculum.stage_start(index) for index in range(len(curriculum.stages))),
        warmup_pct=config.warmup_pct,
        decay_pct=config.decay_pct,
        constant_pct=config.tail_pct,
        optim=options.optim,
        section=config.schedule_section,
    )
    plugin = options.plugin(registry.schedules, options.optim.schedule or choice)
    schedule = build_schedule(choice, context, plugin)
    return scaled(schedule, context.stage_starts, tuple(stage.lr for stage in curriculum.stages))


def resolve_options(
    job: str,
    options: RunOptions,
    curriculum: Curriculum,
    declared_by: "type[Trainer] | None" = None,
) -> ResolvedRun:
    """Check the names and numbers of a run's methods and model, whose curriculum is known."""
    curriculum = with_budgets(curriculum, options.keep, options)
    curriculum = _with_methods(curriculum, options, _methods(job, options, declared_by, len(curriculum.stages)))
    architecture = options.architecture
    with _at("architecture/from") if architecture.source else contextlib.nullcontext():
        tokenizer = tokenizer_for(architecture.source, options.tokenizer)
    # A pretrained model has the vocabulary that it has; ours is rounded up.
    vocab_size = tokenizer.vocab_size if architecture.source else model_vocab_size(tokenizer)
    with _at("architecture/from") if architecture.source else contextlib.nullcontext():
        name = chosen_family(architecture, _family_of(job, declared_by))
    # All of them, so that a wrong value is named also where its family is not the one in use.
    own = {each: options.plugin(registry.families, each) for each in registry.families}.get(name)
    model = resolve_model(name, architecture, own, block_size=curriculum.block_size, vocab_size=vocab_size)
    trainable = trainable_for(options.optim.freeze, options.optim.lora, model)
    return ResolvedRun(job, options, curriculum, tokenizer, model, trainable, declared_by)


def _family_of(job: str, declared_by: "type[Trainer] | None") -> str:
    """The family of models of a trainer's class, `MODEL`; the built-in ones need not be imported for it."""
    if declared_by is None and registry.jobs.is_built_in(job):
        return DECODER
    trainer = declared_by or registry.jobs.get(job)
    return str(trainer.MODEL)


def _methods(
    job: str, options: RunOptions, declared_by: "type[Trainer] | None", num_stages: int
) -> dict[str, tuple[type[Method], MethodConfig]]:
    """The methods of a run by name, their classes and options: listed ones, or what a trainer of the user's own has."""
    listed = {
        name: (registry.methods.get(name), _method_config(name, options, num_stages)) for name in options.run.methods
    }
    if declared_by is None and registry.jobs.is_built_in(job):
        return listed
    declared = (declared_by or registry.jobs.get(job)).methods(options)
    return {name: (type(method), method.config) for name, method in declared.items()}


def _with_methods(
    curriculum: Curriculum, options: RunOptions, methods: Mapping[str, tuple[type[Method], MethodConfig]]
) -> Curriculum:
    """A curriculum that takes a snapshot where a method looks at the reference, unless there is one by then.

    A method that makes no sense in a stage in which it acts is refused.
    """
    kinds = {name: kind for name, (kind, _) in methods.items()}
    looking: set[int] = set()
    for stage in range(len(curriculum.stages)):
        acting = {name: config for name, (_, config) in methods.items() if config.acts_in(stage)}
        for name, config in acting.items():
            config.check(StageFacts(name, stage, curriculum, options, acting, kinds))
            if looks_back(kinds[name], config):
                looking.add(stage)
    if not looking:
        return curriculum
    first, made = min(looking), list(curriculum.stages)
    if not (curriculum.initial_reference or any(stage.update_reference for stage in made[: first + 1])):
        made[first] = dataclasses.replace(made[first], update_reference=True)
    looking |= {*curriculum.referenced}
    return dataclasses.replace(curriculum, stages=tuple(made), referenced=tuple(sorted(looking)))


def _method_config(name: str, options: RunOptions, num_stages: int) -> MethodConfig:
    """The options of a method that is listed; its stages must be there."""
    config: MethodConfig | None = options.plugin(registry.methods, name)
    if config is None:
        raise UserError(f"training/methods: {name} is registered without a config; give it a MethodConfig of its own")
    for position, stage in enumerate(config.stages or ()):
        path = f"methods/{name}/stages/{position}"
        if stage not in range(num_stages):
            raise ConfigError(path, stage, f"the index of a stage, 0 to {num_stages - 1}")
        if stage in list(config.stages or ())[:position]:
            raise ConfigError(path, stage, "each stage once")
    if config.stages is not None and not config.stages:
        raise ConfigError(
            f"methods/{name}/stages",
            [],
            "at least one stage in which the method acts, or null for all from the second on",
            "or take the method out of training/methods",
        )
    if config.stages is None and not any(map(config.acts_in, range(num_stages))):
        raise ConfigError(
            f"methods/{name}/stages",
            None,
            "the stages in which the method acts: null is all from the second on, and this run has one",
            "set it to [0] where the method makes sense in a first stage, or take it out of training/methods",
        )
    return config


def check_data(options: RunOptions, curriculum: Curriculum) -> None:
    """Refuse datasets, evaluations, folders, runs and trackers that are not there."""
    options.tracking.sink_names(options.trainer.wandb)
    root = options.data.root
    if root is not None and not Path(root).expanduser().is_dir():
        raise ConfigError("data/root", root, "a folder that is there", "create it, or leave data/root null")
    if options.penalty.reference_from is not None:
        with _at("optimization/kl/reference_from"):
            named_checkpoint(options.penalty.reference_from)
    for source in curriculum.datasets:
        with _at(curriculum.spelling.data.format(curriculum.home(source))):
            find_source(source.name, options.data)
    check_folder(options.evaluation)
    for index, name in enumerate(options.trainer.evaluations):
        find_task(name, options.data, evaluation=options.evaluation, path=f"eval/evaluations/{index}")
    for index, name in enumerate(options.evaluation.held_out):
        with _at(f"eval/held_out/{index}"):
            find_source(name, options.data)


@contextlib.contextmanager
def _at(path: str) -> Iterator[None]:
    """Name the config path in an error that does not name one."""
    try:
        yield
    except ConfigError:
        raise
    except UserError as error:
        raise error if str(error).startswith(path) else UserError(f"{path}: {error}") from error
