"""The device mesh: named axes over the devices that JAX has, with sizes from the configuration."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.config import field
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    import jax

AXES = ("data", "fsdp", "tensor")
MOST_DEVICES = 2**20


@dataclass(frozen=True)
class TopologyConfig:
    """Sizes of the mesh axes, and how long a step may take."""

    data: int = field(
        "topology/data",
        resume="free",
        default=-1,
        help="devices that each see other rows; -1 = the rest",
        ge=-1,
        le=MOST_DEVICES,
    )
    fsdp: int = field(
        "topology/fsdp",
        resume="free",
        default=1,
        help="devices that share parameters and see other rows",
        ge=-1,
        le=MOST_DEVICES,
    )
    tensor: int = field(
        "topology/tensor",
        resume="free",
        default=1,
        help="devices that share each layer's width",
        ge=-1,
        le=MOST_DEVICES,
    )
    step_timeout: int = field(
        "topology/step_timeout",
        resume="free",
        default=1800,
        help="seconds without a step after which a process ends, saying what it waited for; 0 = never",
        ge=0,
        le=10**7,
    )
    start_timeout: int = field(
        "topology/start_timeout",
        resume="free",
        tells="nothing",
        default=120,
        help="seconds in which all processes of a run must have come; one line says who is missing",
        ge=1,
        le=10**6,
    )

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) == 0:
                raise ConfigError(f"topology/{axis}", 0, "-1 or at least 1", "1 leaves the axis out")


@dataclass(frozen=True)
class Topology:
    """A mesh of devices with the axes data, fsdp and tensor.

    Args:
        described: the devices are not there: programs can be compiled for them, but nothing lies on them.
    """

    mesh: "jax.sharding.Mesh"
    described: bool = False

    @classmethod
    def build(cls, config: TopologyConfig | None = None, devices: Sequence[Any] | None = None) -> "Topology":
        """The mesh over the given devices, all that JAX has unless given."""
        import jax
        import numpy as np

        found = list(jax.devices() if devices is None else devices)
        sizes = axis_sizes(config or TopologyConfig(), len(found))
        shape = [sizes[axis] for axis in AXES]
        types = (jax.sharding.AxisType.Auto,) * len(AXES)
        return cls(jax.sharding.Mesh(np.array(found).reshape(shape), AXES, axis_types=types))

    @property
    def sizes(self) -> Mapping[str, int]:
        """Devices along each axis."""
        return dict(self.mesh.shape)

    @property
    def num_row_shards(self) -> int:
        """Over how many shards the rows of a batch are spread."""
        return self.sizes["data"] * self.sizes["fsdp"]


def axis_sizes(config: TopologyConfig, num_devices: int) -> dict[str, int]:
    """Mesh sizes whose product is the number of devices; one of them may be -1, the rest.

    >>> axis_sizes(TopologyConfig(data=-1, fsdp=2, tensor=1), 8)
    {'data': 4, 'fsdp': 2, 'tensor': 1}
    """
    sizes = {axis: getattr(config, axis) for axis in AXES}
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ConfigError(f"topology/{free[1]}", -1, "at most one axis of -1", f"topology/{free[0]} is -1 already")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    wanted = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != -1)
    largest = max((axis for axis in AXES if axis not in free), key=lambda axis: sizes[axis])
    if num_devices % fixed or (not free and fixed != num_devices):
        raise ConfigError(
            f"topology/{largest}",
            sizes[largest],
            f"sizes that fit {num_devices} device{'s' if num_devices != 1 else ''} ({wanted} needs {fixed})",
            "set topology/data to -1 and make the others divide the number of devices",
        )
    for axis in free:
        sizes[axis] = num_devices // fixed
    return sizes
