"""What a job needs to know about where it runs: its name, its folder and its devices."""

import dataclasses
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

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
        parent: `RUN@CHECKPOINT` whose past a new run shares.
        init_from: `RUN[@CHECKPOINT]` whose weights a new run starts from.
        on_results: called with the run's folder whenever results were written; what it raises is only shown.
        folder: the run's own folder where it lies elsewhere than `ROOT/PROJECT/GROUP/NAME`; for runs that exist.
        resolved: the resolved run (`training.resolve.ResolvedRun`); None: the job resolves the current configuration.
    """

    name: str
    project: str = DEFAULT_PROJECT
    group: str = DEFAULT_GROUP
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:12])
    topology: Optional[Topology] = None
    root: Path = DEFAULT_ROOT
    parent: Optional[str] = None
    init_from: Optional[str] = None
    on_results: Optional[Callable[[Path], object]] = None
    resolved: Any = None
    folder: Optional[Path] = None

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
        return cls(name=name, project=project, group=group, root=Path(root)).on_devices(topology)

    def on_devices(self, topology: TopologyConfig | None = None) -> "ExecutionSpec":
        """The same spec over all devices of this process."""
        return dataclasses.replace(self, topology=Topology.build(topology))

    def carrying(self, resolved: Any) -> "ExecutionSpec":
        """The same spec with a resolved run."""
        return dataclasses.replace(self, resolved=resolved)

    @property
    def run_dir(self) -> Path:
        """The run's own folder, `ROOT/PROJECT/GROUP/NAME` unless it is given."""
        return self.folder or self.root / self.project / self.group / self.name
