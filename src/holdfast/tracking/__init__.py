"""Events of a run and the sinks that write them down."""

from holdfast.tracking.config import TrackingConfig
from holdfast.tracking.events import Event, message, scalars
from holdfast.tracking.tracker import RunInfo, Sink, Tracker

__all__ = ["Event", "RunInfo", "Sink", "Tracker", "TrackingConfig", "message", "scalars"]
