"""A run that exists: its options and its checkpoints, opened to look at the model."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from holdfast.config import JOB_KEY, merge, read_yaml
from holdfast.errors import UserError
from holdfast.execution import ExecutionSpec
from holdfast.execution.checkpoints import CheckpointInfo, find_checkpoint
from holdfast.execution.topology import TopologyConfig
from holdfast.training.jobs import config_classes


@dataclass(frozen=True)
class OpenRun:
    """The folder of a run, its job and its options."""

    directory: Path
    job: str
    cfg: DictConfig

    def checkpoint(self, name: str = "latest") -> CheckpointInfo:
        """The checkpoint of a name: `latest`, a step, or a tag."""
        return find_checkpoint(self.directory / "checkpoints", name)

    def trainer(self, name: str = "latest") -> Any:
        """A trainer with the weights of a checkpoint, and its reference, to look at the model."""
        from holdfast.training import resume

        info = self.checkpoint(name)
        trainer = self.empty_trainer()
        resume.look(trainer, info)
        return trainer

    def empty_trainer(self) -> Any:
        """A trainer before its first step, on all devices of this process whatever the run's mesh was.

        It is for looking: it must not be run, and its own folder is a temporary one.
        """
        from holdfast.training.start import make_trainer, use_compilation_cache

        use_compilation_cache(self.cfg)
        spec = ExecutionSpec.local(Path(tempfile.gettempdir()), name="looking", topology=TopologyConfig())
        return make_trainer(self.job, self.cfg, spec)


def open_run(run_dir: Path | str, overrides: list[str] | None = None) -> OpenRun:
    """Open the folder of a run.

    Args:
        overrides: `path=value` for options that do not concern the model, such as `eval.limit=100`.
    """
    folder = Path(run_dir)
    path = folder / "config.yaml"
    if not path.is_file():
        raise UserError(f"{folder}: this is not the folder of a run: it has no config.yaml")
    values = read_yaml(path)
    job = str(values.pop(JOB_KEY, ""))
    tokenizer = folder / "tokenizer"
    extra = [f"tokenizer.name={tokenizer}", "tokenizer.eot=null", "tokenizer.pad=null"] if tokenizer.is_dir() else []
    # A batch that any mesh divides is of no concern to somebody who only looks.
    cfg = merge(config_classes(job), values, [*extra, *(overrides or []), "training.per_device_batch_size=1"])
    return OpenRun(folder, job, cfg)
