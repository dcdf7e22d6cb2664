"""`holdfast plan`: what a run will do, before it runs."""

import itertools
import json
from pathlib import Path
from typing import Annotated, Any, List, Optional

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.plan_chip import chip_lines
from holdfast.errors import UserError
from holdfast.execution.chips import find_chip, num_devices, parse_devices

SHADES = " ░▒▓█"
PICTURE_WIDTH = 64


def plan_command(
    config: Annotated[Path, typer.Argument(help="YAML config file.")],
    overrides: Annotated[Optional[List[str]], typer.Argument(help="path=value …")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole plan as JSON.")] = False,
    chip: Annotated[
        Optional[str], typer.Option("--chip", help="Plan one step for this chip: tpu-v5e, h100, …; none is needed.")
    ] = None,
    devices: Annotated[
        Optional[str], typer.Option("--devices", help="How many: a TPU's torus (2x4), a number of GPUs (8).")
    ] = None,
) -> None:
    """Show stages in steps and tokens, rows of each dataset, fades, betas, learning rate, parameters, cost.

    Needs no data: what is not prepared yet is a warning. Refuses what `run` would refuse.

    With --chip also the memory, the collectives and the time of a step there, for each kind of stage.

    Example: holdfast plan my.yaml training.fade.overlap=0.2
    """
    if (chip is None) != (devices is None):
        raise UserError("--chip and --devices: give both, such as --chip tpu-v5e --devices 2x4, or none")
    target = find_chip(chip) if chip else None
    sizes = parse_devices(target, devices) if target and devices else ()
    from holdfast.cli.configs import read_config
    from holdfast.training.check import checked

    resolved = read_config(config, overrides or [])
    drawn = checked(resolved.job, resolved.cfg)

    if target is not None:
        import jax

        jax.config.update("jax_platforms", "cpu")  # what is planned for is described; a TPU that is here stays free

    from holdfast.training.forecast import forecast

    plan = forecast(resolved.job, drawn, num_devices(target, sizes) if target else None)
    if target is not None:
        from holdfast.training.ahead import chip_plan

        plan["chip"] = chip_plan(resolved.job, resolved.cfg, target, sizes)
    if as_json:
        print(json.dumps(plan))
        return
    show(plan, Console(highlight=False))
    if target is not None:
        for line in chip_lines(plan["chip"]):
            print(line)


def show(plan: dict[str, Any], console: Console) -> None:
    """The plan as tables and a picture."""
    trained = plan["trained_parameters"]
    part = f" ({trained:,} trained)" if trained != plan["parameters"] else ""
    console.print(
        f"{plan['job']}: {plan['total_steps']:,} steps of {plan['tokens_per_step']:,} tokens; "
        f"{plan['parameters']:,} parameters{part}; {plan['total_flops']:.3g} floating point operations; "
        f"about {plan['estimated_memory']['total'] / 2**30:.2f} GiB for a micro-batch of "
        f"{plan['estimated_memory']['micro_batch_rows']} rows"
    )
    console.print(stage_table(plan))
    console.print(source_table(plan))
    for line in picture(plan):
        console.print(line, soft_wrap=True)
    for warning in plan["warnings"]:
        console.print(f"warning: {warning}", style="yellow")


def stage_table(plan: dict[str, Any]) -> Table:
    """One line a stage."""
    table = Table("stage", "steps", "tokens", "mixture", "beta", "reference", "learning rate", title="stages")
    rates = plan["steps"]["learning_rate"]
    for stage in plan["stages"]:
        start, end = stage["start_step"], stage["end_step"]
        table.add_row(
            f"{stage['index']} {stage['name']}",
            f"{start:,} – {end:,}",
            f"{stage['tokens']:,}",
            ", ".join(f"{d['name']} {d['rate']:.4g} {d['style']}" for d in stage["datasets"]),
            f"{stage['beta']:g}",
            "snapshot" if stage["update_reference"] else "",
            f"{rates[start]:.2e} → {rates[end - 1]:.2e}",
        )
    return table


def source_table(plan: dict[str, Any]) -> Table:
    """One line for each source of a stage: rows, and what they bring to the loss."""
    table = Table("stage", "source", "rows", "loss tokens", "share of loss", "epochs", title="rows (fades included)")
    for stage in plan["stages"]:
        for source in stage["sources"]:
            table.add_row(
                f"{stage['index']} {stage['name']}",
                f"{source['name']} {source['style']}",
                f"{source['rows']:,}",
                _or_unknown(source["loss_tokens"], ",d"),
                _or_unknown(source["loss_share"], ".1%"),
                _or_unknown(source["epochs"], ".2f"),
            )
    return table


def _or_unknown(value: Any, form: str) -> str:
    return "?" if value is None else format(value, form)


def picture(plan: dict[str, Any]) -> list[str]:
    """One line for each dataset, shaded by its share of the rows, and the boundaries below."""
    total = plan["total_steps"]
    width = min(PICTURE_WIDTH, total)
    edges = [round(column * total / width) for column in range(width + 1)]
    batch = sum(rows[0] for rows in plan["steps"]["rows"].values())
    margin = max(len(name) for name in plan["steps"]["rows"])
    lines = []
    for name, rows in plan["steps"]["rows"].items():
        shares = [sum(rows[a:b]) / ((b - a) * batch) for a, b in itertools.pairwise(edges)]
        shaded = "".join(SHADES[_shade(share)] for share in shares)
        lines.append(f"{name:>{margin}} │{shaded}│")
    starts = {stage["start_step"] for stage in plan["stages"]}
    marks = "".join("▲" if any(a <= s < b for s in starts) else " " for a, b in itertools.pairwise(edges))
    return [*lines, f"{'':>{margin}}  {marks}"]


def _shade(share: float) -> int:
    # Anything drawn at all shows, and only a dataset alone is solid.
    return 0 if share <= 0 else min(len(SHADES) - 1, 1 + int(share * (len(SHADES) - 2) + 1e-9))
