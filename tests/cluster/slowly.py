"""A plug-in for tests: a tracker that holds a run up for some seconds a step and changes nothing in it."""

import os
import time

from holdfast import registry
from holdfast.tracking.events import Event
from holdfast.tracking.tracker import RunInfo, Sink


@registry.trackers.register("slowly", help="holds a run up")
class Slowly(Sink):
    """Sleeps at every record of a step."""

    def __init__(self, info: RunInfo) -> None:
        self.seconds = float(os.environ.get("SLOWLY_SECONDS", "0"))

    def log(self, event: Event) -> None:
        """Take the time."""
        if event.kind == "train":
            time.sleep(self.seconds)
