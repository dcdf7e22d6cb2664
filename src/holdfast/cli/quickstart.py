"""`holdfast quickstart`: two small runs on text that Python itself carries, and what each of them kept."""

import functools
from pathlib import Path

import typer

from holdfast.cli.options import Out, Overrides

GROUP = "quickstart"
RUNS = {  # the name of a run: its preset, and what is said before it starts
    "plain": (
        "quickstart-plain",
        "Training plainly: docstrings, code, topics and lists, one after the other (about a minute) ...",
    ),
    "holdfast": ("quickstart", "The same with fades, a KL anchor and replay (about a minute and a half) ..."),
}


def quickstart_command(overrides: Overrides = None, out: Out = Path("runs")) -> None:
    """Train with and without an anchor, and compare; offline.

    Two small runs on text that Python itself carries, three minutes on two cores, in any folder. The same command again
    resumes. Overrides are for both runs; `holdfast configure JOB FILE --preset quickstart` writes the second config.

    Example: holdfast quickstart
    """
    from holdfast.cli.configs import job_config
    from holdfast.cli.configure import open_preset

    runs = []
    for name, (preset, said) in RUNS.items():  # both are checked before anything is trained
        _, job, values = open_preset(preset)
        runs.append((name, said, job_config(job, values, overrides or []).resolved()))

    from holdfast.execution import ExecutionSpec
    from holdfast.report import compare, write_report
    from holdfast.training.run import start_run

    folders = []
    for name, said, run in runs:
        typer.echo(said)
        on_results = functools.partial(write_report, pictures=None)
        spec = ExecutionSpec(name=name, group=GROUP, root=out, on_results=on_results)
        code = start_run(run, spec)
        if code:
            raise typer.Exit(code)
        folders.append(spec.run_dir)
    found = compare.compare([str(folder) for folder in folders])
    compare.print_comparison(found)
    typer.echo(str(compare.write_page(found, folders[0].parent / "compare.html")))
