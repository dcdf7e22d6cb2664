"""A plug-in for tests: a tracker that holds a run up until it is resumed, and changes nothing in it."""

import os
import time

from holdfast import registry
from holdfast.tracking.events import Event
from holdfast.tracking.tracker import RunInfo, Sink


@registry.trackers.register("slowly", help="holds a run up")
class Slowly(Sink):
    """Sleeps for some seconds at every step of a run that begins."""

    def __init__(self, info: RunInfo) -> None:
        self.seconds = 0.0 if info.start_step else float(os.environ.get("SLOWLY_SECONDS", "0"))

    def log(self, event: Event) -> None:
        """Take the time."""
        if event.kind == "train":
            time.sleep(self.seconds)
