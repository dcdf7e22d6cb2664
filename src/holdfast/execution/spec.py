"""What a job needs to know about where it runs: its name, its folder and its devices."""

import dataclasses
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from holdfast.execution.names import check_name
from holdfast.execution.topology import Topology, TopologyConfig

DEFAULT_ROOT = Path("runs")
DEFAULT_PROJECT = "general"
DEFAULT_GROUP = "default"


@dataclass(frozen=True)
class ExecutionSpec:
    """Execution specification of a job.

    Args:
        name: name of the run.
        project, group: folders above it.
        id: identity of this execution, for trackers; made up unless given.
        topology: devices; a job that only looks at files needs none.
        root: the folder of all runs.
    """

    name: str
    project: str = DEFAULT_PROJECT
    group: str = DEFAULT_GROUP
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:12])
    topology: Optional[Topology] = None
    root: Path = DEFAULT_ROOT

    def __post_init__(self) -> None:
        check_name(self.name, "--name")
        check_name(self.project, "--project")
        check_name(self.group, "--group")
        check_name(self.id, "id")
        object.__setattr__(self, "root", Path(self.root))

    @classmethod
    def local(
        cls,
        root: Path | str = DEFAULT_ROOT,
        *,
        name: str = "run",
        project: str = DEFAULT_PROJECT,
        group: str = DEFAULT_GROUP,
        topology: TopologyConfig | None = None,
    ) -> "ExecutionSpec":
        """A spec over all devices of this process."""
        bare = cls(name=name, project=project, group=group, root=Path(root))
        return dataclasses.replace(bare, topology=Topology.build(topology))

    @property
    def run_dir(self) -> Path:
        """The run's own folder, `ROOT/PROJECT/GROUP/NAME`."""
        return self.root / self.project / self.group / self.name
