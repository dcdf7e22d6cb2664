"""Tensorboard files (extra `tensorboard`), in the run directory's `tensorboard/`."""

from holdfast.registry import trackers
from holdfast.tracking.config import require_extra
from holdfast.tracking.events import Event, scalars
from holdfast.tracking.tracker import RunInfo, Sink


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

    def flush(self) -> None:
        """Write what is buffered."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is buffered and stop the writer's thread."""
        self._writer.close()
