"""Tensorboard files (extra `tensorboard`), in the run directory's `tensorboard/`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.registry import trackers
from holdfast.tracking.config import require_extra
from holdfast.tracking.events import Event, scalars
from holdfast.tracking.tracker import RunInfo, Sink
from holdfast.types import JsonView


@trackers.register("tensorboard", help="tensorboard files; needs the extra holdfast[tensorboard]")
class TensorboardSink(Sink):
    """Writes the numbers of recorded events as `kind/name`."""

    def __init__(self, info: RunInfo) -> None:
        require_extra("tensorboard")
        import tensorboardX

        # Steps after the one that a run resumes from are shown once: the readers drop what was there.
        purge = info.start_step + 1 if info.start_step else None
        self._writer = tensorboardX.SummaryWriter(logdir=str(info.directory / "tensorboard"), purge_step=purge)

    def log(self, event: Event) -> None:
        """Write the numbers of one recorded event."""
        if event.recorded:
            for name, value in scalars(event.values):
                self._writer.add_scalar(f"{event.kind}/{name}", value, event.step)

    def summarize(self, step: int, results: JsonView, pictures: Mapping[str, Path]) -> None:
        """Write metrics as scalars, score matrices as tables in text, and pictures as images."""
        import numpy as np
        from PIL import Image

        for name, value in scalars(results["metrics"]):
            self._writer.add_scalar(f"results/{name}", value, step)
        for measure, matrix in results["matrix"].items():
            self._writer.add_text(f"matrix/{measure}", markdown(results["stages"], results["tasks"], matrix), step)
        for name, path in pictures.items():
            with Image.open(path) as image:
                self._writer.add_image(f"report/{name}", np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def flush(self) -> None:
        """Write what is buffered."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is buffered and stop the writer's thread."""
        self._writer.close()


def markdown(stages: Sequence[str], tasks: Sequence[str], matrix: Sequence[Sequence[float | None]]) -> str:
    """A score matrix as a table in text.

    >>> print(markdown(["a"], ["t"], [[None], [0.5]]))
    | | t |
    |---|---|
    | before training | – |
    | a | 0.5 |
    """
    lines = ["| | " + " | ".join(tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
    for name, values in zip(["before training", *stages], matrix, strict=True):
        shown = ["–" if value is None else f"{value:.4g}" for value in values]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)
