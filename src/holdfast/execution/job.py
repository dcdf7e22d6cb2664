"""What a job is: something with a spec that runs; with state that is saved; that a new process can take up again."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, Self, TypeVar

from holdfast.execution.spec import ExecutionSpec

C = TypeVar("C")


class BasicJob(ABC, Generic[C]):
    """A job that runs once."""

    def __init__(self, spec: ExecutionSpec) -> None:
        """Args:
        spec: execution specification.
        """
        self.spec = spec

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether nothing is left to do."""

    @abstractmethod
    def run(self) -> None:
        """Do the work."""


class CheckpointedJob(BasicJob[C]):
    """A job whose state can be written to its folder and read back."""

    @property
    def checkpoint_dir(self) -> Path:
        """Where the checkpoints of this job are."""
        return self.spec.run_dir / "checkpoints"

    @abstractmethod
    def save(self, suffix: Path) -> None:
        """Write the state under a name."""

    @abstractmethod
    def load(self, suffix: Path) -> None:
        """Read the state of that name, if there is one."""


class RestoreableJob(CheckpointedJob[C]):
    """A job that a new process can take up where an earlier one stopped."""

    @classmethod
    def restore(cls, spec: ExecutionSpec, suffix: Path | str = "latest") -> Self:
        """A job with the state of an earlier checkpoint, the newest unless named."""
        job = cls(spec)
        job.load(Path(suffix))
        return job
