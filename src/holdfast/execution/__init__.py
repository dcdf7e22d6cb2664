"""Where and how jobs run: specification, device mesh, job classes, checkpoints, files."""

from holdfast.execution.job import BasicJob, CheckpointedJob, RestoreableJob
from holdfast.execution.spec import ExecutionSpec
from holdfast.execution.topology import Topology, TopologyConfig

__all__ = ["BasicJob", "CheckpointedJob", "ExecutionSpec", "RestoreableJob", "Topology", "TopologyConfig"]
