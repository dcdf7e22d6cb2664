"""Workers: long-lived processes that do timed steps when they are asked to, one at a time, in turns."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.execution.pages import with_huge_pages

ROOT = Path(__file__).parents[1]


class WorkerError(Exception):
    """A worker that ended or never answered, with the end of what it said."""


class Worker:
    """One process and what it has measured.

    Args:
        command: how to start it.
        log: where its standard error goes.
        huge_pages: whether it is started as `holdfast run` starts itself.
    """

    def __init__(self, command: Sequence[str], log: Path, *, huge_pages: bool = False) -> None:
        self.log = log
        self.seconds: list[float] = []  # of one step, one entry a round
        self.memory = 0
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True,
            cwd=ROOT, env=environment(huge_pages=huge_pages),
        )  # fmt: skip
        try:
            self.facts = self._read()
        except WorkerError:
            self.close()
            raise

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            said = [text for text in self.log.read_text(errors="replace").splitlines() if text.strip()]
            raise WorkerError(said[-1][:300] if said else f"exit code {self._process.returncode}")
        facts: dict[str, Any] = json.loads(line)
        return facts

    def measure(self, steps: int) -> None:
        """One round of some steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"steps": steps}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self.seconds.append(answer["seconds"] / steps)
        self.memory = answer["memory"]

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)

    def per_second(self, amount: float) -> tuple[float, float]:
        """Something done in every step, a second: the median and the spread over the rounds."""
        rates = [amount / seconds for seconds in self.seconds]
        return statistics.median(rates), max(rates) - min(rates)


def environment(*, huge_pages: bool = False) -> dict[str, str]:
    """What workers find in their environment: our sources, a CPU, no hub, no cache of compiled functions.

    Args:
        huge_pages: as `holdfast run` takes them by itself.
    """
    paths = [str(ROOT / "src"), str(ROOT)]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPILATION_CACHE")}
    threads = {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found = {**inherited, **threads, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    return with_huge_pages(found) if huge_pages else found


def our_command(module: str, told: dict[str, Any] | None = None) -> list[str]:
    """How to start a worker of our own."""
    return [sys.executable, "-m", f"benchmarks.{module}", *([json.dumps(told)] if told is not None else [])]


def our_worker(told: dict[str, Any], log: Path) -> Worker:
    """Our own training as a worker, in the environment that `holdfast run` makes for itself."""
    return Worker(our_command("our_worker", told), log, huge_pages=True)


def one_shot(module: str, told: dict[str, Any]) -> dict[str, Any]:
    """What a script of ours that measures by itself prints last."""
    command, variables = our_command(module, told), environment(huge_pages=True)
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WorkerError(f"{module}: {done.stderr[-1500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def in_turns(
    workers: Mapping[str, Worker], rounds: int, steps: Mapping[str, int], otherwise: int = 1
) -> dict[str, str]:
    """Measure round by round, each worker after the other, so that all see the same machine.

    Args:
        steps: of one round, by worker; `otherwise` for those that are not named.

    Returns:
        Peers that ended, and why; where one of ours ends, nothing is measured.
    """
    ended: dict[str, str] = {}
    for _ in range(rounds):
        for name, worker in workers.items():
            try:
                if name not in ended:
                    worker.measure(steps.get(name, otherwise))
            except WorkerError as error:
                if name.startswith("ours"):
                    raise
                ended[name] = str(error)
    return ended
