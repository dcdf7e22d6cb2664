"""What exists already, opened to look at the model: a run with its options and checkpoints, or a pretrained folder."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from omegaconf import DictConfig

from holdfast import registry
from holdfast.config import JOB_KEY, merge, read_yaml
from holdfast.errors import UserError
from holdfast.execution import ExecutionSpec
from holdfast.execution.checkpoints import CheckpointInfo, find_checkpoint
from holdfast.execution.topology import TopologyConfig
from holdfast.training.config import config_classes
from holdfast.training.resolve import ResolvedRun, resolve

if TYPE_CHECKING:
    from holdfast.data.tokenizers import Tokenizer
    from holdfast.evaluation.forward import Runner
    from holdfast.training.base import Trainer
    from holdfast.types import Tree


@dataclass(frozen=True)
class OpenRun:
    """The folder of a run, its job and its options."""

    directory: Path
    job: str
    cfg: DictConfig

    def checkpoint(self, name: str = "latest") -> CheckpointInfo:
        """The checkpoint of a name: `latest`, a step, or a tag."""
        return find_checkpoint(self.directory / "checkpoints", name)

    def resolved(self) -> ResolvedRun:
        """The run's options and what they resolve to."""
        return resolve(self.job, self.cfg, needs_data=False)

    def trainer(self, name: str = "latest") -> "Trainer":
        """A trainer with the weights of a checkpoint, and its reference, to look at the model."""
        info = self.checkpoint(name)
        trainer = self.empty_trainer()
        trainer.state = trainer.restorer.look(trainer.state, info)
        return trainer

    def own_trainer(self) -> "Trainer":
        """A trainer in the run's own folder, before its first step and on a mesh as its options say.

        It takes the run's steps again, exactly; it must not be run, which would write.
        """
        from holdfast.training.run import make_trainer, use_compilation_cache

        run = resolve(self.job, self.cfg)
        use_compilation_cache(run.options.data)
        return make_trainer(run, ExecutionSpec(name="again", folder=self.directory))

    def empty_trainer(self) -> "Trainer":
        """A trainer before its first step, on all devices of this process whatever the run's mesh was.

        It is for looking: it must not be run, and its own folder is a temporary one.
        """
        from holdfast.training.run import make_trainer, use_compilation_cache

        run = self.resolved()
        use_compilation_cache(run.options.data)
        spec = ExecutionSpec.local(Path(tempfile.gettempdir()), name="looking", topology=TopologyConfig())
        return make_trainer(run, spec)


def open_run(run_dir: Path | str, overrides: list[str] | None = None, *, looking: bool = True) -> OpenRun:
    """Open the folder of a run.

    Args:
        overrides: `path=value` for options that do not concern the model, such as `eval.limit=100`.
        looking: no steps are taken; else the batch is cut as the run's own options say.
    """
    folder = Path(run_dir)
    path = folder / "config.yaml"
    if not path.is_file():
        raise UserError(f"{folder}: this is not the folder of a run: it has no config.yaml")
    values = read_yaml(path)
    job = str(values.pop(JOB_KEY, ""))
    if job not in registry.jobs:
        raise UserError(
            f"{path}: {JOB_KEY}: there is no job {job!r} here; the run was made with a plug-in: load it by "
            f"`holdfast --plugin MODULE …`. Known: {', '.join(registry.jobs.names())}"
        )
    tokenizer = folder / "tokenizer"
    extra = [f"tokenizer.name={tokenizer}", "tokenizer.eot=null", "tokenizer.pad=null"] if tokenizer.is_dir() else []
    # A batch that any mesh divides is of no concern to somebody who only looks.
    extra += ["training.per_device_batch_size=1"] if looking else []
    cfg = merge(config_classes(job), values, [*extra, *(overrides or [])])
    return OpenRun(folder, job, cfg)


@dataclass(frozen=True)
class OpenModel:
    """A model that can be asked: of a run's checkpoint, or pretrained.

    Args:
        title: as the user named it.
        run: its options, None for a pretrained model.
    """

    title: str
    runner: "Runner"
    tokenizer: "Tokenizer"
    params: "Tree"
    run: Optional[ResolvedRun] = None


def open_model(name: str) -> OpenModel:
    """The model of `RUN[@CHECKPOINT]`, of a folder that holds a pretrained model, or of a hub name."""
    from holdfast.evaluation.forward import Runner
    from holdfast.execution.checkpoints import split_name

    folder, checkpoint = split_name(name)
    if (folder / "config.yaml").is_file():
        trainer = open_run(folder).trainer(checkpoint)
        run = trainer.resolved
        return OpenModel(name, Runner(run.model, trainer.topology), run.tokenizer, trainer.state.params, run)
    return open_pretrained(name)


def open_pretrained(source: str) -> OpenModel:
    """A pretrained model by its folder, llama2.c file or hub name."""
    from holdfast.data.config import TokenizerConfig
    from holdfast.evaluation.forward import Runner
    from holdfast.execution.topology import Topology
    from holdfast.models.family import decoder
    from holdfast.models.pretrained import load_params, load_spec, tokenizer_for

    spec, tokenizer, topology = load_spec(source), tokenizer_for(source, TokenizerConfig()), Topology.build()
    runner: Runner = Runner(decoder(spec), topology)
    return OpenModel(source, runner, tokenizer, load_params(source, spec, topology.mesh))
