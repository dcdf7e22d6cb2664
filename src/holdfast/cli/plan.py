"""`holdfast plan`: what a run will do, before it runs; with `--chip`, on devices that are not here."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, List, Optional

import typer

from holdfast.cli.options import table
from holdfast.errors import UserError
from holdfast.execution.chips import find_chip, num_devices, parse_devices
from holdfast.types import Json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from holdfast.training.resolve import ResolvedRun

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
    pilots: Annotated[
        Optional[List[Path]],
        typer.Option("--pilot", help="A shorter run on the same data: where would the losses end? Repeatable."),
    ] = None,
    budget: Annotated[
        Optional[float],
        typer.Option("--budget", help="Bits per byte that old losses may rise: which replay rate do pilots say?"),
    ] = None,
) -> None:
    """Show what a run will do, and about how long it takes.

    Stages in steps and tokens, rows of each dataset, fades, betas, learning rate, parameters, cost, time.

    Needs no data: what is not prepared yet is a warning. Refuses what `run` would refuse.

    With --chip also the memory, the collectives and the time of a step there, for each kind of stage.

    With --pilot where the losses would end, as shorter runs tell; with --budget the cheapest replay rate that keeps it.

    Example: holdfast plan my.yaml training.fade.overlap=0.2
    """
    if (chip is None) != (devices is None):
        raise UserError("--chip and --devices: give both, such as --chip tpu-v5e --devices 2x4, or none")
    target = find_chip(chip) if chip else None
    sizes = parse_devices(target, devices) if target and devices else ()
    from holdfast.cli.configs import read_config

    run = read_config(config, overrides or []).resolved()

    if target is not None:
        import jax

        jax.config.update("jax_platforms", "cpu")  # what is planned for is described; a TPU that is here stays free

    from holdfast.analysis.plan import plan_run

    plan = plan_run(run, num_devices(target, sizes) if target else None)
    if target is not None:
        from holdfast.analysis.chip_plan import chip_plan

        plan["chip"] = chip_plan(run, target, sizes)
    said = pilots_say(run, pilots or [], budget)
    if as_json:
        print(json.dumps(plan | ({"pilots": said} if pilots else {})))
        return
    from rich.console import Console

    show(plan, Console(highlight=False))
    for line in [*(chip_lines(plan["chip"]) if target is not None else ()), *said]:
        print(line)


def pilots_say(run: "ResolvedRun", paths: Sequence[Path], budget: float | None) -> list[str]:
    """What shorter runs say of a planned one.

    Args:
        budget: of every old dataset of the stages that pilots know; those of `keep` unless given.
    """
    if not paths:
        if budget is not None:
            raise UserError("--budget: pilots tell the cheapest replay rate; give --pilot RUN with at least 3 rates")
        return []
    from holdfast.report import readable
    from holdfast.report.forecasts import pilot, pilot_lines, stages_ahead
    from holdfast.report.run_files import open_run

    stages = stages_ahead(run.job, run.options, run.curriculum)
    if not stages:
        raise UserError("--pilot: the plan has one stage; a forecast is of what follows a switch")
    pilots = []
    for path in paths:
        with readable(path):
            pilots.append(pilot(open_run(path, curves=False), stages))
    old = dict.fromkeys(name for each in pilots for name in each.stage.old)
    kept = run.options.keep.limits
    budgets = {name: budget if budget is not None else kept[name] for name in old if budget is not None or name in kept}
    return pilot_lines(pilots, budgets)


def show(plan: Json, console: "Console") -> None:
    """The plan as tables and a picture."""
    from rich.text import Text

    trained = plan["trained_parameters"]
    part = f" ({trained:,} trained)" if trained != plan["parameters"] else ""
    facts = (
        f"{plan['job']}: {plan['total_steps']:,} steps of {plan['tokens_per_step']:,} tokens; "
        f"{plan['parameters']:,} parameters{part}; {plan['total_flops']:.3g} floating point operations; "
        f"about {plan['estimated_memory']['total'] / 2**30:.2f} GiB for a micro-batch of "
        f"{plan['estimated_memory']['micro_batch_rows']} rows"
    )
    console.print(Text(facts))
    if plan["estimated_time"] is not None:
        console.print(Text(time_line(plan["estimated_time"])))
    console.print(stage_table(plan))
    console.print(source_table(plan))
    if plan["held_out"]:
        console.print(Text(f"measured at every boundary without being trained on: {', '.join(plan['held_out'])}"))
    for name, stages in plan["methods"].items():
        console.print(Text(f"method {name}: acts in stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"))
    for each in plan["self_replay"]:
        console.print(Text(self_line(each)))
    for each in plan["keep"]:
        console.print(Text(keep_line(each)))
    for line in picture(plan):
        console.print(Text(line), soft_wrap=True)
    for warning in plan["warnings"]:
        console.print(Text(f"warning: {warning}", "yellow"))


def time_line(estimate: Json) -> str:
    """How long a run takes here, and how that is known."""
    low, high = (duration(estimate[end]) for end in ("low_seconds", "high_seconds"))
    return f"time on this machine: about {low} to {high} ({estimate['how']}; `holdfast profile` measures)"


def self_line(each: Json) -> str:
    """What the model samples from itself before a stage, and what that costs."""
    return (
        f"self-replay: before stage {each['stage']} (step {each['step']:,}) {each['rows']:,} rows are sampled from the "
        f"model, {each['tokens']:,} tokens; {each['flops']:.3g} operations, {each['share']:.1%} of all (of the time "
        "more: tokens come one after another)"
    )


def keep_line(each: Json) -> str:
    """A budget in a stage, and the control rows that steer it."""
    what = "the model may drift on its own samples" if each["name"] == "self" else f"{each['name']} may rise"
    different = "" if each["different"] is None else f", {each['different']:,} different ones"
    return (
        f"budget: {what} by {each['limit']:g} bits per byte; stage {each['stage']} draws {each['old_rows']:,} old rows "
        f"of it, {each['drawn']:,} of them control rows that are not trained on{different}"
    )


def duration(seconds: float) -> str:
    """A time in the unit that a person would use.

    >>> duration(42), duration(200), duration(20_000), duration(600_000)
    ('42 s', '3 min', '5.6 h', '6.9 days')
    """
    for unit, length in (("days", 86_400), ("h", 3600)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def stage_table(plan: Json) -> "Table":
    """One line a stage."""
    every, rates = plan["steps"]["every"], plan["steps"]["learning_rate"]
    rows = [
        (
            f"{stage['index']} {stage['name']}",
            f"{stage['start_step']:,} – {stage['end_step']:,}",
            f"{stage['tokens']:,}",
            ", ".join(f"{d['name']} {d['rate']:.4g} {d['style']}" for d in stage["datasets"]),
            f"{stage['beta']:g}",
            "snapshot" if stage["update_reference"] else "",
            f"{rates[stage['start_step'] // every]:.2e} → {rates[(stage['end_step'] - 1) // every]:.2e}",
        )
        for stage in plan["stages"]
    ]
    heads = ("stage", "steps", "tokens", "mixture", "beta", "reference", "learning rate")
    return table(heads, rows, title="stages")


def source_table(plan: Json) -> "Table":
    """One line for each source of a stage: rows, and what they bring to the loss."""
    rows = [
        (
            f"{stage['index']} {stage['name']}",
            f"{source['name']} {source['style']}",
            f"{source['rows']:,}",
            _or_unknown(source["loss_tokens"], ",d"),
            _or_unknown(source["in_loss"], ".1%"),
            _or_unknown(source["loss_share"], ".1%"),
            _or_unknown(source["epochs"], ".2f"),
        )
        for stage in plan["stages"]
        for source in stage["sources"]
    ]
    heads = ("stage", "source", "rows", "loss tokens", "of its tokens", "share of loss", "epochs")
    return table(heads, rows, title="rows (fades included)")


def _or_unknown(value: Any, form: str) -> str:
    return "?" if value is None else format(value, form)


def picture(plan: Json) -> list[str]:
    """One line for each dataset, shaded by its share of the rows, and the boundaries below."""
    every = plan["steps"]["every"]
    total = len(plan["steps"]["beta"])
    width = min(PICTURE_WIDTH, total)
    edges = [round(column * total / width) for column in range(width + 1)]
    batch = sum(rows[0] for rows in plan["steps"]["rows"].values())
    margin = max(len(name) for name in plan["steps"]["rows"])
    lines = []
    for name, rows in plan["steps"]["rows"].items():
        shares = [sum(rows[a:b]) / ((b - a) * batch) for a, b in itertools.pairwise(edges)]
        shaded = "".join(SHADES[_shade(share)] for share in shares)
        lines.append(f"{name:>{margin}} │{shaded}│")
    starts = {stage["start_step"] // every for stage in plan["stages"]}
    marks = "".join("▲" if any(a <= s < b for s in starts) else " " for a, b in itertools.pairwise(edges))
    return [*lines, f"{'':>{margin}}  {marks}"]


def _shade(share: float) -> int:
    # Anything drawn at all shows, and only a dataset alone is solid.
    return 0 if share <= 0 else min(len(SHADES) - 1, 1 + int(share * (len(SHADES) - 2) + 1e-9))


GIB = 2**30


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.2f} MiB"


def chip_lines(plan: Json) -> Iterator[str]:
    """The plan of a step on a chip, as text."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    yield ""
    yield (
        f"{plan['num_devices']} devices of {plan['chip']} with {plan['memory_of_a_device'] / GIB:.0f} GiB each, mesh "
        f"{mesh}, {plan['micro_batches']} micro-batches of {plan['rows_per_device']} rows a shard"
    )
    yield f"memory and collectives: {plan['source']}; operations: counted in the traced step; times: estimates"
    if plan["attention"]:
        yield f"attention: {plan['attention']}"
    for step in plan["steps"]:
        yield ""
        yield f"a step of the stages {', '.join(step['stages'])}: {step['kind']}"
        yield from _memory(step, plan["memory_of_a_device"])
        yield from _collectives(step)
        yield f"  operations    {step['flops_per_device']:.3g} a device: matrix products, attention by visible keys"
        yield from _seconds(step)


def _memory(step: Json, limit: int) -> Iterator[str]:
    memory = step["memory"]
    parts = ", ".join(f"{name} {_size(size)}" for name, size in memory.items() if name != "total" and size)
    verdict = "fits" if step["fits"] else "DOES NOT FIT: lower training/per_device_batch_size, raise topology/fsdp"
    total = "more than there is" if memory["total"] > 1e6 * limit else f"{_size(memory['total'])} a device"
    yield f"  memory        {total}{f' ({parts})' if parts else ''}: {verdict}"
    if step["host_bytes"]:
        yield f"  on the host   {_size(step['host_bytes'])} for each device: the reference's weights"


def _collectives(step: Json) -> Iterator[str]:
    if step["collectives"] is None:
        return
    if not step["collectives"]:
        yield "  collectives   none"
    for part in step["collectives"]:
        yield (
            f"  {part['kind']:<18} {part['count']:>7,} over {part['group']:>4} devices{_along(part)}, "
            f"{_size(part['num_bytes'])} in all, a device sends {_size(part['sent'])}"
        )


def _along(part: Json) -> str:
    return f" ({part['axes']})" if part["axes"] else ""


def _seconds(step: Json) -> Iterator[str]:
    times = step["seconds"]
    if times is None:
        return
    yield (
        f"  time          estimate from published peaks: {times['at_least']:.3g} s if all overlaps, "
        f"{times['one_after_another']:.3g} s if nothing does (compute {times['compute']:.3g}, memory "
        f"{times['memory']:.3g}, communication {times['communication']:.3g})"
    )
