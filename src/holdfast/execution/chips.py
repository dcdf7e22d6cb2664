"""Accelerators as their makers publish them: memory, arithmetic and links of one device.

`holdfast plan --chip` asks a TPU's own compiler where it can; everything else it says about time, and all that it
says about GPUs, rests on these numbers. They are peaks: a step takes longer.
"""

import math
import re
from dataclasses import dataclass

from holdfast.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device of an accelerator.

    Args:
        memory: bytes of a device.
        flops: dense bfloat16 operations per second.
        bandwidth: bytes per second between the device and its memory.
        link: bytes per second that a device sends to its neighbours of one ring (TPU: both directions of one axis
            of the torus; GPU: NVLink or PCIe, one direction).
        topology: what libtpu calls it; None for what is not a TPU.
        axes: dimensions of a TPU's torus.
        side: chips along each of them at most; 0 leaves it to the compiler, which ends the process for some.
        node: GPUs that share the fast link; a ring over more is as fast as `network`.
        network: bytes per second of a GPU's share of its host's network.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float
    link: float
    topology: str | None = None
    axes: int = 0
    side: int = 0
    cores: int = 1  # devices that libtpu describes for one chip
    node: int = 8
    network: float = 0.0

    @property
    def is_tpu(self) -> bool:
        """Whether libtpu compiles for it."""
        return self.topology is not None

    def ring_bandwidth(self, num_devices: int) -> float:
        """Bytes per second of a ring over all devices."""
        return self.link if self.is_tpu or num_devices <= self.node else self.network


# Sources: Google Cloud's TPU pages and "How to Scale Your Model" (TPUs), NVIDIA's data sheets (GPUs, without sparsity).
_ALL = (
    Chip("tpu-v4", 16 * GIB, 137.5e12, 614e9, 90e9, topology="v4", axes=3, cores=2),
    Chip("tpu-v5e", 16 * GIB, 197e12, 819e9, 90e9, topology="v5e", axes=2, side=16),
    Chip("tpu-v5p", 95 * GIB, 459e12, 2765e9, 180e9, topology="v5p", axes=3),
    Chip("tpu-v6e", 32 * GIB, 918e12, 1640e9, 180e9, topology="v6e", axes=2, side=16),
    Chip("a100-40gb", 40 * GIB, 312e12, 1555e9, 300e9, network=25e9),
    Chip("a100", 80 * GIB, 312e12, 2039e9, 300e9, network=25e9),
    Chip("l40s", 48 * GIB, 362e12, 864e9, 32e9, network=25e9),
    Chip("h100", 80 * GIB, 989e12, 3350e9, 450e9, network=50e9),
    Chip("h200", 141 * GIB, 989e12, 4800e9, 450e9, network=50e9),
    Chip("b200", 180 * GIB, 2250e12, 8000e9, 900e9, network=50e9),
)
CHIPS = {chip.name: chip for chip in _ALL}


def find_chip(name: str) -> Chip:
    """The chip of a name; an unknown one is an error that lists those there are."""
    if name not in CHIPS:
        raise UserError(f"--chip {name}: unknown chip; there are {', '.join(CHIPS)}")
    return CHIPS[name]


# What JAX calls a device, in part: the chip; the first that is found counts.
_KINDS = (
    ("v5 lite", "tpu-v5e"),
    ("v5e", "tpu-v5e"),
    ("v6", "tpu-v6e"),
    ("v5", "tpu-v5p"),
    ("v4", "tpu-v4"),
    ("a100", "a100"),
    ("l40s", "l40s"),
    ("h100", "h100"),
    ("h200", "h200"),
    ("b200", "b200"),
)


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a device by JAX's name for it; None for what is not published here.

    >>> [chip and chip.name for chip in map(chip_of, ("TPU v5 lite", "NVIDIA H100 80GB HBM3", "cpu"))]
    ['tpu-v5e', 'h100', None]
    """
    kind = device_kind.lower()
    known = kind.startswith(("tpu", "nvidia"))
    return next((CHIPS[name] for part, name in _KINDS if known and part in kind), None)


def parse_devices(chip: Chip, text: str) -> tuple[int, ...]:
    """The sizes in `--devices`: a torus for a TPU (2x4), a number for a GPU (8).

    >>> parse_devices(CHIPS["tpu-v5e"], "2x4"), parse_devices(CHIPS["h100"], "64")
    ((2, 4), (64,))
    """
    wanted = {0: "a number of GPUs, such as 8", 2: "a torus such as 2x4", 3: "a torus such as 2x2x2"}[chip.axes]
    sizes = tuple(int(part) for part in text.split("x")) if re.fullmatch(r"\d+(x\d+)*", text) else ()
    if len(sizes) != max(1, chip.axes) or math.prod(sizes) < 1:
        raise UserError(f"--devices {text}: expected {wanted}, as {chip.name} has it")
    if chip.side and max(sizes) > chip.side:
        largest = "x".join([str(chip.side)] * chip.axes)
        raise UserError(
            f"--devices {text}: a slice of {chip.name} has at most {largest} chips; of several slices, which share the "
            "rows, plan one, with its part of training/batch_size"
        )
    return sizes


def num_devices(chip: Chip, sizes: tuple[int, ...]) -> int:
    """How many devices these are; a TPU v4 counts as two, as its compiler sees it without its megacore."""
    return math.prod(sizes) * chip.cores
