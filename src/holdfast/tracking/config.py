"""Which trackers a run has beside the console and `metrics.jsonl`."""

from dataclasses import dataclass
from typing import List

from holdfast import registry
from holdfast.config import field
from holdfast.errors import require_package

DEFAULT_SINKS = ("jsonl", "console")
_EXTRAS = {
    "wandb": "wandb",
    "tensorboard": "tensorboardX",
    "mlflow": "mlflow",
    "trackio": "trackio",
}  # tracker (and extra) -> module
SWITCHED = ("wandb", "tensorboard")  # trackers with an option of their own


@dataclass(frozen=True)
class TrackingConfig:
    """Options of tracking; `logging/wandb` stands in the trainers' configs."""

    tensorboard: bool = field(
        "logging/tensorboard",
        resume="free",
        tells="nothing",
        default=False,
        help="write tensorboard files; needs the extra",
    )
    trackers: List[str] = field(
        "logging/trackers",
        resume="free",
        tells="nothing",
        default_factory=list,
        help="further registered trackers that get every event",
    )

    def __post_init__(self) -> None:
        for index, name in enumerate(self.trackers):
            registry.trackers.get(name, path=f"logging/trackers/{index}")

    def sink_names(self, wandb: bool = False) -> list[str]:
        """The trackers of a run, each once; one whose extra is not installed is a UserError.

        >>> TrackingConfig().sink_names()
        ['jsonl', 'console']
        """
        asked = [("wandb", wandb), ("tensorboard", self.tensorboard), *((name, True) for name in self.trackers)]
        names = list(dict.fromkeys([*DEFAULT_SINKS, *(name for name, on in asked if on)]))
        for name in names:
            require_extra(name)
        return names


def require_extra(name: str) -> None:
    """Raise a UserError when a built-in tracker needs a package that is not installed; imports nothing."""
    module = _EXTRAS.get(name)
    if module is not None:
        switch = f"set logging/{name} to false" if name in SWITCHED else f"take {name} out of logging/trackers"
        require_package(module, name, f"logging: the tracker {name}", f"or {switch}")
