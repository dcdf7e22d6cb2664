"""`holdfast profile`: where the time of a run goes; `holdfast selftest`: whether this machine computes as it should."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, List, Optional

import typer

from holdfast.cli.options import table

if TYPE_CHECKING:
    from rich.table import Table

    from holdfast.analysis.profile import Profile

SHOWN_OPERATIONS = 12


def profile_command(
    config: Annotated[Path, typer.Argument(help="YAML config file.")],
    overrides: Annotated[Optional[List[str]], typer.Argument(help="path=value …")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to measure.")] = 12,
    stage: Annotated[int, typer.Option("--stage", min=0, help="Stage to rehearse, counted from 0.")] = 0,
    out: Annotated[Optional[Path], typer.Option("--out", help="Folder for the trace; profiles/NAME.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Rehearse some steps and show where their time goes.

    Time of step, data and host, share of the machine's peak, longest operations, a trace. No run is started or
    touched. The trace opens at https://ui.perfetto.dev, without leaving this machine.

    Example: holdfast profile my.yaml --steps 12 --out profiles/my
    """
    from holdfast.cli.configs import read_config

    run = read_config(config, overrides or []).resolved()

    import json

    from rich.console import Console

    from holdfast.analysis.profile import FIGURES, TRACE, profile

    folder = out or Path("profiles") / config.stem
    found = profile(run, folder, steps=steps, stage=stage)
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    console = Console(highlight=False)
    console.print(times(found))
    console.print(
        f"{found.tokens_per_second:,.0f} tokens/s; {found.flops_per_step / 1e9:,.1f} GFLOP a step: "
        f"{found.share_of_peak:.0%} of the matrix-product peak of {found.peak_flops / 1e9:,.0f} GFLOP/s "
        f"measured here, on {found.devices} device{'s' if found.devices > 1 else ''}"
    )
    console.print(f"first step after {found.start:.1f} s, of which compiling {found.compile:.1f} s")
    console.print(operations(found))
    console.print(
        f"{folder / TRACE}: open it at https://ui.perfetto.dev; {folder / FIGURES}: all figures", soft_wrap=True
    )


def selftest_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print all checks as JSON, to send to somebody.")] = False,
) -> None:
    """Check the devices of this machine, and how exact they are.

    About two minutes on whatever devices JAX finds. Attention kernels against the plain formula, collectives, a short
    run twice, a checkpoint and back, the mesh against one device, tokens a second. Exits with 1 if something is wrong.

    Example: holdfast selftest
    """
    import json
    from dataclasses import asdict

    from rich.console import Console

    from holdfast.analysis import selftest

    about, found = selftest.machine(), list(selftest.checks())
    failed = [each for each in found if each.passed is False]
    if as_json:
        print(json.dumps({"machine": about, "passed": not failed, "checks": [asdict(each) for each in found]}))
    else:
        words = {True: "ok", False: "FAILED", None: "–"}
        rows = [(each.name, words[each.passed], each.found, f"{each.seconds:.1f}") for each in found]
        console = Console(highlight=False)
        console.print(", ".join(f"{name} {value}" for name, value in about.items()), soft_wrap=True)
        console.print(table(("check", "", "found", "seconds"), rows))
        print(f"{len(failed)} of {len(found)} checks failed" if failed else "all is well")
    if failed:
        raise typer.Exit(1)


def times(found: "Profile") -> "Table":
    """Where the time of a step goes."""
    times_of = {
        "compiled step": found.compute,
        "data: wait and placing": found.data,
        "host: the loop's own work": found.host,
        "all": found.wall,
        "(a batch, made in the background)": found.batch,
    }
    rows = [(name, f"{seconds * 1e3:,.2f}", f"{seconds / found.wall:.1%}") for name, seconds in times_of.items()]
    return table(("a step", "milliseconds", "share"), rows, title="where the time goes")


def operations(found: "Profile") -> "Table":
    """The longest operations; their times are summed over threads."""
    total = sum(operation.seconds for operation in found.operations)
    rows = [
        (each.origin, str(each.count), f"{each.seconds * 1e3:,.2f}", f"{each.seconds / total if total else 0.0:.1%}")
        for each in found.operations[:SHOWN_OPERATIONS]
    ]
    return table(("from", "operations", "milliseconds", "share"), rows, title="longest operations of the step")
