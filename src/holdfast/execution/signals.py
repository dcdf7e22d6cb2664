"""How a run is asked to stop: by signals, on which all of its processes agree at one step."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Interrupted(Exception):  # noqa: N818  # not an error: the user asked for it
    """The run was asked to stop and has saved a checkpoint."""

    def __init__(self, signal_number: int, step: int) -> None:
        self.signal_number = signal_number
        super().__init__(f"stopped by {signal.Signals(signal_number).name} at step {step}; the same command goes on")


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Signals that ask the run to stop, as they arrive; a second Ctrl-C ends the process at once.

    SIGUSR1 is what a scheduler sends before the time is over. Schedulers also send SIGTERM twice within milliseconds,
    so that one means nothing more the second time: who does not want to wait for the checkpoint has SIGKILL.
    """
    asked: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

    def handle(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    try:
        for number in previous:
            signal.signal(number, handle)
    except ValueError:  # not the main thread: a notebook's or a test's own handlers stay
        previous = {}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Consent:
    """The signal on which all processes stop: each tells its own at every step, and hears of all one step later.

    One step late, because the answer is on its way while the next step is computed: nobody waits for it.

    Args:
        asked: the signals of this process, as they arrive.
    """

    def __init__(self, asked: list[int]) -> None:
        self._asked = asked
        self._alone = jax.process_count() == 1
        self._answer: jax.Array | None = None
        mesh = Mesh(np.array(jax.devices()), ("all",))
        self._told = NamedSharding(mesh, PartitionSpec("all"))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def given(self) -> int | None:
        """The number of the signal, if the run is to stop now; called once at every step."""
        mine = self._asked[0] if self._asked else 0
        if self._alone:
            return mine or None
        heard = 0 if self._answer is None else int(self._answer)
        flags = np.full(jax.local_device_count(), mine, np.int32)
        self._answer = self._largest(jax.make_array_from_process_local_data(self._told, flags))
        if jax.default_backend() == "cpu":
            jax.block_until_ready(self._answer)  # as with steps: collectives of a CPU go one at a time
        return heard or None
