"""Where and how jobs run: specification, device mesh, job classes, checkpoints, files.

Names are imported when first used: the start of a command needs none of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.execution.job import BasicJob, CheckpointedJob, RestoreableJob
    from holdfast.execution.spec import ExecutionSpec
    from holdfast.execution.topology import Topology, TopologyConfig

__all__ = ["BasicJob", "CheckpointedJob", "ExecutionSpec", "RestoreableJob", "Topology", "TopologyConfig"]

_HOMES = {
    **dict.fromkeys(("BasicJob", "CheckpointedJob", "RestoreableJob"), "job"),
    "ExecutionSpec": "spec",
    **dict.fromkeys(("Topology", "TopologyConfig"), "topology"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
