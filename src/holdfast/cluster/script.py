"""The batch script: submitit writes what SLURM reads, and around its `srun` stands when a job is queued again.

Without submitit the same script is written here, to be looked at: `--dry-run` needs no extra.
Nothing is pickled: the tasks run the `holdfast run` that the script shows.
"""

import importlib.util
import shlex
from collections.abc import Sequence
from pathlib import Path

from holdfast.cluster.resources import Resources
from holdfast.errors import UserError
from holdfast.types import Json

# The signal before the limit goes to this script, which remembers it and passes it on: srun hands SIGUSR1 to all
# tasks, and they save and stop. At a preemption and at scancel SLURM signals the tasks itself, but this script too,
# which must outlive them: a batch script that ends takes its tasks with it.
BEFORE = """\
timed_out=0
trap 'timed_out=1; [[ -z ${step-} ]] || kill -USR1 "$step"' USR1
trap : TERM"""

# Whoever cancels a job means it, and a job that is pushed out is queued again by SLURM: both are "completing" here.
# What is left is a job that still runs: its time is over, or SLURM gave it a grace time before it is pushed out.
# An array's own number would name all its jobs, so a job of an array is named by its index too.
AFTER = """\
step=$!
((timed_out)) && kill -USR1 "$step"
until wait "$step"; ! kill -0 "$step" 2>/dev/null; do :; done
wait "$step"
code=$?
((code)) || exit 0
me=$SLURM_JOB_ID
[[ -z ${{SLURM_ARRAY_TASK_ID-}} ]] || me=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
job=$(scontrol show job --oneliner "$me")
if [[ $job == *" JobState=RUNNING "* ]] && {{ ((timed_out)) || [[ $job == *" PreemptTime="[0-9]* ]]; }}; then
    if ((${{SLURM_RESTART_COUNT:-0}} >= {max_requeues})); then
        echo "holdfast: stopped before its end, and queued again {max_requeues} times already (--max-requeues)" >&2
    elif scontrol requeue "$me"; then
        echo "holdfast: stopped before its end; queued again to go on from its checkpoint" >&2
        exit 0
    else
        echo "holdfast: stopped before its end, and SLURM refused to queue it again; submit it again to go on" >&2
    fi
fi
exit "$code"
"""


def batch_script(
    name: str, folder: Path, directory: Path, commands: Sequence[Sequence[str]], resources: Resources
) -> str:
    """The text of a batch script.

    Args:
        name: what the queue calls the job.
        folder: where its logs go.
        directory: the working directory.
        commands: what every task runs; several make an array of jobs.
    """
    for path in (folder, directory):
        if any(letter in str(path) for letter in "%\\\n"):
            raise UserError(f"{path}: SLURM reads % and \\ in a path as patterns; choose a folder without them")
    setup, command = [*resources.setup, BEFORE], shlex.join(commands[0])
    parameters = sbatch_parameters(name, directory, resources)
    if len(commands) > 1:
        cases = [f"    {index}) run=({shlex.join(command)}) ;;" for index, command in enumerate(commands)]
        setup.append("\n".join(['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"]))
        command = '"${run[@]}"'
        parameters |= {"map_count": len(commands), "array_parallelism": resources.parallel or len(commands)}
    teardown = [AFTER.format(max_requeues=resources.max_requeues)]
    write = written_by_submitit if has_submitit() else written_here
    return write(folder, f"{command} &", {**parameters, "setup": setup, "teardown": teardown})


def sbatch_parameters(name: str, directory: Path, resources: Resources) -> Json:
    """The options of sbatch and srun under submitit's names."""
    # srun takes the CPUs of a task from its own option alone since SLURM 22.05.
    cpus = [] if resources.cpus_per_task is None else [f"--cpus-per-task={resources.cpus_per_task}"]
    more: Json = {"chdir": str(directory), "requeue": True, "signal": f"B:USR1@{resources.grace_seconds}"}
    return {
        "job_name": name,
        "time": resources.time,
        "nodes": resources.nodes,
        "ntasks_per_node": resources.processes_per_node,
        "gpus_per_node": resources.gpus_per_node or None,
        "cpus_per_task": resources.cpus_per_task,
        "mem": resources.mem,
        "partition": resources.partition,
        "account": resources.account,
        "qos": resources.qos,
        "constraint": resources.constraint,
        "wckey": None,
        "stderr_to_stdout": True,
        # One task that fails ends the others, which would wait for it.
        "srun_args": ["--kill-on-bad-exit=1", *cpus],
        "additional_parameters": more,
    }


def has_submitit() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("submitit") is not None


def require_submitit() -> None:
    """Say how to get submitit where it is not installed."""
    if not has_submitit():
        raise UserError("submitting needs the package submitit: pip install 'holdfast[slurm]'; --dry-run does not")


def written_here(folder: Path, command: str, parameters: Json) -> str:
    """The script that submitit would write for a command, letter for letter."""
    given = dict(parameters)
    setup, teardown, srun = given.pop("setup"), given.pop("teardown"), given.pop("srun_args")
    more, count, parallel = (given.pop(k, None) for k in ("additional_parameters", "map_count", "array_parallelism"))
    job = "%A_%a" if count else "%j"
    assert given.pop("stderr_to_stdout"), "a script with a file of errors is not written here"
    options = {**given, **more, "open_mode": "append", "output": f"{folder}/{job}_0_log.out"}
    if count:
        options["array"] = f"0-{count - 1}%{min(count, parallel)}"
    lines = [
        f"#SBATCH --{name.replace('_', '-')}" + ("" if value is True else f"={shlex.quote(str(value))}")
        for name, value in sorted(options.items())
        if value is not None and value is not False
    ]
    called = f"srun --unbuffered --output {shlex.quote(f'{folder}/{job}_%t_log.out')} {shlex.join(srun)} {command}"
    parts = ["#!/bin/bash", "", "# Parameters", *lines, "", "# setup", *setup, "", "# command"]
    return "\n".join([*parts, "export SUBMITIT_EXECUTOR=slurm", called, "", "", "# teardown", *teardown])


def written_by_submitit(folder: Path, command: str, parameters: Json) -> str:
    """The script that submitit writes for a command."""
    from submitit import SlurmExecutor

    class Script(SlurmExecutor):
        """The executor as a writer of scripts alone: it needs no SLURM on this machine and submits nothing."""

        @classmethod
        def affinity(cls) -> int:
            return 1

        def text(self) -> str:
            return str(self._make_submission_file_text(command, uid=""))

    script = Script(folder)
    script.parameters = parameters
    return script.text()
