"""Signals that ask a run to stop: the first counts, and only a second Ctrl-C ends the process at once."""

import os
import signal

import pytest

from holdfast.execution.signals import interrupts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_schedulers_may_ask_twice(number: signal.Signals) -> None:
    """SLURM does, at a preemption, within milliseconds; the checkpoint must not be cut short by it."""
    with interrupts() as asked:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert asked == [number, number]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_second_ctrl_c_ends_the_process_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts() as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == before
