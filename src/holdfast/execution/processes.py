"""Several processes as one: how they find each other, agree, and notice that one of them is gone.

Nothing here imports JAX until processes are joined; alone, every function is a no-op that answers at once.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from holdfast.errors import RunError, UserError
from holdfast.execution.storage import failed_line

HEARTBEAT_SECONDS = 45  # JAX ends all processes between half of this and this after one is gone
ALIVE_SECONDS, ALIVE_PATIENCE = 4, 16  # ours, with a message, comes before
AGREE_SECONDS = 300
START_SECONDS = 120  # topology/start_timeout unless a config says otherwise
ROLL_SECONDS = 5  # for one message between processes that start
SAME_SECONDS = 3  # in which all processes meet the same error if it is not of one alone
PREPARE_SECONDS = 7 * 24 * 3600
LINKS = ("Gloo", "NCCL", "RCCL", "UNAVAILABLE", "coordination service")  # in errors of a network between processes
STATUS = re.compile("[A-Z_]+: ")  # how the text of a runtime's error begins
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")

_keys = itertools.count()
_joined = False


class EndedElsewhere(Exception):  # noqa: N818  # not an error of this process
    """Another process has said why all of them end; this one ends without a word."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"ends with exit code {code}, as another process has said")


@dataclass(frozen=True)
class Membership:
    """This process's place among others; what is None is found by JAX in the environment."""

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None


def membership(
    coordinator: str | None, count: int | None, index: int | None, environ: Mapping[str, str] | None = None
) -> Membership | None:
    """The place that options or the environment give to this process; None where it is alone.

    >>> membership("10.0.0.1:4000", 2, 1, {})
    Membership(coordinator='10.0.0.1:4000', count=2, index=1)
    >>> membership(None, None, None, {})
    """
    if count == 1:
        return None
    if coordinator is None and count is None and index is None:
        return _from_environment(os.environ if environ is None else environ)
    if coordinator is None or count is None or index is None:
        raise UserError("--coordinator, --processes and --process-id: give all three or none of them")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--coordinator: got {coordinator!r}, expected HOST:PORT of process 0, such as 10.0.0.1:4000")
    if count < 1:
        raise UserError(f"--processes: got {count}, expected at least 1")
    if not 0 <= index < count:
        raise UserError(f"--process-id: got {index}, expected 0 to {count - 1} for --processes {count}")
    return Membership(coordinator, count, index)


def _from_environment(environ: Mapping[str, str]) -> Membership | None:
    """What schedulers say: SLURM, Open MPI, Kubernetes and TPU pods, as JAX understands them."""
    if all(name in environ for name in SLURM):
        tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
        return Membership(count=tasks) if tasks > 1 else None
    if int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        if "OMPI_MCA_orte_hnp_uri" not in environ:
            raise UserError(
                "this is one of several processes of an MPI that JAX cannot ask for the first one's address; give "
                "--coordinator HOST:PORT --processes $OMPI_COMM_WORLD_SIZE --process-id $OMPI_COMM_WORLD_RANK"
            )
        return Membership()
    if "," in environ.get("TPU_WORKER_HOSTNAMES", ""):
        return Membership()
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        import importlib.util

        if importlib.util.find_spec("kubernetes") is None:
            raise UserError(
                "this is a pod of an indexed job; give --coordinator HOST:PORT --processes N --process-id "
                "$JOB_COMPLETION_INDEX (--processes 1 for a pod that works alone), or install jax[k8s]"
            )
        return Membership()
    return None


@contextlib.contextmanager
def joined(place: Membership | None, start_timeout: float = START_SECONDS) -> Iterator[None]:
    """Be one of several processes within the block; a failure in it ends this process at once.

    At once, because a process that waits for the others to say goodbye would wait for those that wait for it.

    Args:
        start_timeout: seconds in which all must have come.
    """
    if place is None:
        yield
        return
    try:
        _join(place, start_timeout)
        with _watched():
            yield
            barrier("the end", PREPARE_SECONDS)
        _leave()
    except EndedElsewhere as ended:
        _end(ended.code)
    except UserError as error:
        _end(2, _said_once(f"error: {error}"))
    except RunError as error:
        _end(1, _said_once(f"failed: {error}"))
    except KeyboardInterrupt:
        _end(128 + signal.SIGINT, "stopped by SIGINT before the first step; the same command starts again")
    except BaseException as error:
        broken = _broken_link(error) or failed_line(error)
        if broken is None:
            traceback.print_exc()
        _end(1, broken or "")


def _join(place: Membership, start_timeout: float) -> None:
    if place.coordinator is not None and place.count is not None and place.index is not None:
        call_roll(place.coordinator, place.count, place.index, start_timeout)
    import jax

    global _joined  # as JAX's own runtime, a process joins once
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM for itself; the loop has a handler of its own.
    jax.config.update("jax_enable_preemption_service", False)
    host = (place.coordinator or "").rpartition(":")[0]
    too_late = threading.Timer(start_timeout, _end, (1, f"failed: {_absent(place, start_timeout)}"))
    too_late.daemon = True
    try:
        too_late.start()
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            cluster_detection_method="deactivate" if place.coordinator else None,
            coordinator_bind_address=place.coordinator if host in ("127.0.0.1", "localhost") else None,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            initialization_timeout=int(start_timeout) + AGREE_SECONDS,  # it aborts; ours says who is missing
            shutdown_timeout_seconds=60,
        )
    except Exception as error:  # whatever the runtime or a scheduler's interface raises
        reason = " ".join(str(error).split())[:300]
        raise RunError(f"this process cannot join the others: {type(error).__name__}: {reason}") from error
    finally:
        too_late.cancel()
    _joined = True


def _absent(place: Membership, seconds: float) -> str:
    """What to say where JAX alone knows who has come."""
    number = "the" if place.count is None else f"the {place.count}"
    return (
        f"not all of {number} processes have come within {seconds:g} s (topology/start_timeout); the output of those "
        "that are missing may say why"
    )


def call_roll(coordinator: str, count: int, index: int, seconds: float) -> None:
    """Wait until all processes have come, at the address where JAX's own service will be; say who has not.

    JAX ends a process with a stack of C++ where one is missing, and does not say which.
    """
    host, _, port = coordinator.rpartition(":")
    address = (host.strip("[]"), int(port))
    deadline = time.monotonic() + seconds
    missing = _hear_all(address, count, deadline) if index == 0 else _answer(address, index, deadline)
    if missing:
        who = f"process {', '.join(map(str, missing))} of {count}"
        raise RunError(
            f"{who} has not come within {seconds:g} s (topology/start_timeout); start all with the same --coordinator "
            f"and --processes; the output of those that are missing may say why"
        )


def _hear_all(address: tuple[str, int], count: int, deadline: float) -> list[int]:
    """Process 0: hear every other process, then tell all of them who is missing; returns that."""
    loopback = address[0] in ("127.0.0.1", "localhost")
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    heard: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((address[0] if loopback else "", address[1]))
        except OSError as error:
            raise RunError(f"--coordinator {address[0]}:{address[1]}: {error.strerror}; choose another port") from error
        server.listen(count)
        while len(heard) < count - 1 and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, ValueError):  # a stranger, or nobody
                caller, _ = server.accept()
                stack.enter_context(caller)
                caller.settimeout(ROLL_SECONDS)
                number = int(caller.recv(16))
                if 0 < number < count:
                    heard[number] = caller
        missing = [number for number in range(1, count) if number not in heard]
        for caller in heard.values():
            with contextlib.suppress(OSError):
                caller.sendall(json.dumps(missing).encode() + b"\n")
                caller.recv(1)  # it hangs up first, so that the port is free at once
    return missing


def _answer(address: tuple[str, int], index: int, deadline: float) -> list[int]:
    """Another process: report to process 0 and hear who is missing; [0] where nothing answers in time."""
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError, ValueError), socket.create_connection(address, timeout=left) as call:
            call.sendall(str(index).encode())
            call.settimeout(max(deadline - time.monotonic(), 0) + ROLL_SECONDS)
            answer = call.makefile("rb").readline()
            if answer:
                return [int(number) for number in json.loads(answer)]
        time.sleep(0.1)
    return [0]


def _leave() -> None:
    import jax

    global _joined
    sys.stdout.flush()
    jax.distributed.shutdown()
    _joined = False


def _end(code: int, message: str = "") -> NoReturn:
    if message:
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _said_once(message: str) -> str:
    """The message, unless the first process has failed with the same one and says it for all."""
    try:
        said = gather(message, SAME_SECONDS)
    except RunError:  # the others have not failed, or are gone
        return message if count() == 1 else f"{message} (process {index()})"
    return "" if index() and said[0] == message else message


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Notice within half a minute that another process is gone, and end with a message that names it."""
    from orbax.checkpoint import multihost

    wait, stopping = multihost.get_barrier_sync_fn(), threading.Event()

    def watch() -> None:
        for number in itertools.count():
            try:
                wait(key=f"alive-{number}", timeout_ms=ALIVE_PATIENCE * 1000)
            except Exception as error:
                if not stopping.is_set():
                    _end(1, f"failed: {_missing(str(error), ALIVE_PATIENCE)}")
                return
            if stopping.wait(ALIVE_SECONDS):
                return

    threading.Thread(target=watch, name="other processes", daemon=True).start()
    try:
        yield
    finally:
        stopping.set()


def _broken_link(error: BaseException) -> str | None:
    """The message for an error of the network between processes, None for any other."""
    text = " ".join(str(error).split())
    # Where arrays are gathered, JAX raises the runtime's error as a ValueError.
    of_runtime = type(error).__name__ == "JaxRuntimeError" or (type(error) is ValueError and STATUS.match(text))
    if not of_runtime or not any(word in text for word in LINKS):
        return None
    return (
        f"failed: the connection to another process broke ({text[:200]}); it may have died: its own output may say "
        "why; the same command goes on from the newest checkpoint"
    )


def _missing(error: str, seconds: int) -> str:
    """What to tell the user of a barrier that not all have reached.

    >>> _missing("Barrier timed out. Some timed out task names:\\n1\\n3\\n", 16)[:39]
    'process 1, 3 has not answered for 16 s;'
    """
    _, _, tail = error.partition("task names:")
    numbers = list(itertools.takewhile(str.isdigit, tail.split()))
    who = f"process {', '.join(numbers)}" if numbers else "another process"
    return (
        f"{who} has not answered for {seconds} s; it has died or hangs (its own output may say why); "
        "the same command goes on from the newest checkpoint"
    )


def visible_cores() -> int:
    """How many cores this process may use (`taskset`, a batch system); XLA's sums on a CPU depend on it."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # a system without affinities
        return os.cpu_count() or 1


def count() -> int:
    """How many processes work on this run."""
    if not _joined:
        return 1
    import jax

    return int(jax.process_count())


def index() -> int:
    """The number of this process."""
    if not _joined:
        return 0
    import jax

    return int(jax.process_index())


def is_first() -> bool:
    """Whether this process is the one that writes and speaks for all."""
    return index() == 0


def barrier(name: str, seconds: int = AGREE_SECONDS) -> None:
    """Wait until all processes are here; without devices, so that it may take long."""
    if count() == 1:
        return
    from orbax.checkpoint import multihost

    try:
        multihost.get_barrier_sync_fn()(key=f"{name}-{next(_keys)}", timeout_ms=seconds * 1000)
    except Exception as error:  # the runtime's own, of a type that only JAX knows
        raise RunError(_missing(str(error), seconds)) from error


def gather(value: Any, seconds: int = AGREE_SECONDS) -> list[Any]:
    """A JSON value of every process, in their order, known to all of them."""
    if count() == 1:
        return [value]
    import numpy as np
    from jax.experimental import multihost_utils

    barrier("gather", seconds)
    data = json.dumps(value).encode()
    lengths = multihost_utils.process_allgather(np.int32(len(data)))
    width = 1 << max(int(lengths.max()) - 1, 255).bit_length()  # few widths, so that few programs are compiled
    padded = np.zeros(width, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    everything = multihost_utils.process_allgather(padded)
    return [json.loads(row[:length].tobytes()) for row, length in zip(everything, lengths.tolist(), strict=True)]


def agreed(value: Any) -> Any:
    """The first process's value, for all of them."""
    return gather(value)[0]


@contextlib.contextmanager
def together(seconds: int = AGREE_SECONDS) -> Iterator[None]:
    """Work after which all processes go on, or all end with the message of the first that could not.

    Args:
        seconds: how long to wait for the slowest.
    """
    if count() == 1:
        yield
        return
    failure: UserError | RunError | None = None
    try:
        yield
    except (UserError, RunError) as error:
        failure = error
    said = None if failure is None else [isinstance(failure, UserError), str(failure)]
    try:
        heard = gather(said, seconds)
    except RunError as missing:
        raise failure or missing from None
    for number, found in enumerate(heard):
        if found is None:
            continue
        if not is_first():
            raise EndedElsewhere(2 if found[0] else 1)
        if failure is not None:
            raise failure
        raise (UserError if found[0] else RunError)(f"process {number}: {found[1]}")
