"""What a run asks of the cluster: nodes, tasks, time; checked before anything is written."""

import re
from dataclasses import dataclass

from holdfast.errors import UserError

TIME_FORMATS = "MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS or DAYS-HOURS:MINUTES:SECONDS"
_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?)"
    r"|(?:(?P<h>\d+):(?P<hm>\d+):(?P<hs>\d+))"
    r"|(?:(?P<m>\d+)(?::(?P<s>\d+))?)"
)


@dataclass(frozen=True)
class Resources:
    """What one job of a scheduler gets.

    Args:
        time: the limit of one start of the job, as SLURM writes it; the run goes on in the next start.
        tasks_per_node: processes of a node; None = one for each GPU, or one.
        grace_seconds: how long before the limit the run is asked to save and stop.
        max_requeues: how often the job may be queued again.
        parallel: jobs of a sweep that may run at the same time; None = all.
        setup: lines of shell before the run starts, such as `module load cuda`.
    """

    time: str
    nodes: int = 1
    tasks_per_node: int | None = None
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    mem: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    grace_seconds: int = 120
    max_requeues: int = 100
    parallel: int | None = None
    setup: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        limit = seconds_of(self.time)
        if self.grace_seconds >= limit:
            raise UserError(
                f"--grace {self.grace_seconds}: expected less than --time {self.time} ({limit} seconds): a run needs "
                "time to train before it is asked to stop"
            )
        for option in ("mem", "partition", "account", "qos", "constraint"):
            value = getattr(self, option)
            if value is not None and not re.fullmatch(r"[\w.,:@&|*!+=()\[\]-]+", value):
                raise UserError(f"--{option}: got {value!r}, expected a value as sbatch takes it, without spaces")

    @property
    def processes_per_node(self) -> int:
        """Processes of a node: JAX under SLURM gives each of them one GPU."""
        return self.tasks_per_node or max(1, self.gpus_per_node)

    @property
    def processes(self) -> int:
        """Processes of the whole run."""
        return self.nodes * self.processes_per_node


def seconds_of(time: str) -> int:
    """The seconds of a time as SLURM writes it.

    >>> [seconds_of(time) for time in ("90", "1:30", "2:00:00", "1-12", "1-0:30")]
    [5400, 90, 7200, 129600, 88200]
    """
    found = _TIME.fullmatch(time.strip())
    parts = {name: int(text) for name, text in (found.groupdict() if found else {}).items() if text is not None}
    hours = 24 * parts.get("days", 0) + parts.get("dh", 0) + parts.get("h", 0)
    minutes = 60 * hours + parts.get("dm", 0) + parts.get("hm", 0) + parts.get("m", 0)
    seconds = 60 * minutes + parts.get("ds", 0) + parts.get("hs", 0) + parts.get("s", 0)
    if seconds == 0:
        raise UserError(f"--time: got {time!r}, expected a time above 0 as SLURM writes it: {TIME_FORMATS}")
    return seconds
