"""`holdfast keep`: teach a model that exists something new, and keep what it knows within a budget; one line."""

import functools
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, List, Optional

import typer

from holdfast.cli.options import Out, named_data
from holdfast.cli.run import Strict
from holdfast.errors import UserError

if TYPE_CHECKING:
    from holdfast.analysis.continuation import Choice, Dataset, Facts
    from holdfast.data.config import DataConfig
    from holdfast.data.tokenizers import Tokenizer
    from holdfast.models.config import ModelSpec
    from holdfast.training.resolve import ResolvedRun
    from holdfast.types import JsonView

PROJECT, GROUP = "general", "keep"
CONFIG, START, MODEL = "keep.yaml", "start", "model"  # in the run's folder
RESERVED = ("self", "certify")  # names that `keep` has another use for


def keep_command(
    model: Annotated[str, typer.Argument(help="Folder of a model, hub name, RUN or RUN@CHECKPOINT.")],
    new: Annotated[str, typer.Option("--new", help="What to learn: files, a folder, a hub name or a dataset.")],
    overrides: Annotated[Optional[List[str]], typer.Argument(help="path=value …, such as training.seed=1")] = None,
    old: Annotated[
        Optional[str], typer.Option("--old", help="What to keep, the same; without: the model's own samples.")
    ] = None,
    budget: Annotated[float, typer.Option("--budget", help="Bits per byte that the old may get worse.")] = 0.05,
    tokens: Annotated[
        Optional[int], typer.Option("--tokens", min=1, help="Tokens to train on; without: a pass over the new data.")
    ] = None,
    name: Annotated[Optional[str], typer.Option("--name", help="Name of the run; the model's and the data's.")] = None,
    out: Out = Path("runs"),
    strict: Strict = False,
) -> None:
    """Teach a model something new, and keep what it knows.

    Chooses the options, says why, and writes them as a config. Then measures, trains within the budget, measures again,
    and writes a report and a folder that transformers loads. The same command again goes on.

    Exits with 3 where the budget was broken.

    Example: holdfast keep my-model --new notes.jsonl --old old.jsonl --budget 0.05
    """
    if not 0 < budget <= 100:
        raise UserError(f"--budget {budget:g}: expected bits per byte above 0 and at most 100, such as 0.05")
    asked = Asked(model, new, old, budget, tokens, tuple(overrides or ()))
    if not asked.line.isprintable():
        raise UserError("the names of models and data on this command line hold characters that cannot be printed")
    raise typer.Exit(_keep(asked, name or asked.run_name, out, strict=strict))


@dataclass(frozen=True)
class Asked:
    """What was typed."""

    model: str
    new: str
    old: str | None
    budget: float
    tokens: int | None
    overrides: tuple[str, ...]

    @property
    def line(self) -> str:
        """The command, so that the same one is known again."""
        parts = ["holdfast", "keep", self.model, "--new", self.new]
        parts += ["--old", self.old] if self.old is not None else []
        parts += ["--budget", f"{self.budget:g}"]
        parts += ["--tokens", f"{self.tokens}"] if self.tokens is not None else []
        return shlex.join([*parts, *self.overrides])

    @property
    def run_name(self) -> str:
        """A name for the run: the model's and the data's.

        >>> Asked("models/tiny", "notes", "owner/old", 0.05, None, ()).run_name
        'tiny-notes-old'
        """
        parts = [_plain(Path(self.model).name), *(_plain(named_data(each)[0]) for each in self.data)]
        return "-".join(parts)[:100]

    @property
    def data(self) -> list[str]:
        """The data, new before old."""
        return [each for each in (self.new, self.old) if each is not None]


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=-]+", "_", name).strip("._=-") or "model"


def _keep(asked: Asked, name: str, root: Path, *, strict: bool) -> int:
    """Everything, from the config to the last sentence; returns the exit code."""
    from holdfast.cli.configs import read_config
    from holdfast.execution.names import check_name

    run_dir = root / PROJECT / GROUP / check_name(name, "--name")
    path = run_dir / CONFIG
    if path.is_file():
        _check_same(asked, path)
        print(f"{path}: goes on with the config that was written before")
        run = read_config(path, []).resolved()
    else:
        run = _configured(asked, run_dir)
    from holdfast.evaluation.budgets import exit_code, judged_by
    from holdfast.execution import ExecutionSpec
    from holdfast.report import write_report
    from holdfast.report.run_files import read_results
    from holdfast.training.run import start_run

    told = functools.partial(write_report, pictures=None)
    code = start_run(run, ExecutionSpec(name=name, project=PROJECT, group=GROUP, root=root, on_results=told))
    if code:
        return code
    folder = _exported(run, run_dir)
    results = judged_by(asked.budget, read_results(run_dir))
    new = run.curriculum.stages[-1].mixture[0].name
    print()
    for sentence in sentences(results, run_dir, new, folder):
        print(sentence)
    return exit_code(results, strict=strict)


def _check_same(asked: Asked, path: Path) -> None:
    """Refuse another command than the one that the run was started by."""
    first = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    if first != asked.line:
        raise UserError(
            f"{path.parent}: this run was started by `{first}`, which is not `{asked.line}`; type it as it was, or "
            f"give this one a --name of its own; an edited copy of {path} is for `holdfast run`"
        )


def _configured(asked: Asked, run_dir: Path) -> "ResolvedRun":
    """Choose the options, show them with their reasons, and keep them as a config in the run's folder."""
    from holdfast.analysis.continuation import JOB, config_values, defaults, steered
    from holdfast.cli.configs import job_config, read_config
    from holdfast.cli.configure import only_changed
    from holdfast.config import to_yaml
    from holdfast.execution.files import write_atomically

    new, old = _datasets(asked)

    from holdfast.analysis.plan import plan_run  # it imports JAX, which data that is not there need not wait for

    source, spec, tokenizer, exported = _opened(asked.model, run_dir)
    data = _data_options(asked, new, old)
    facts = _facts(asked, spec, _sizes(data, tokenizer, new, old))
    chosen = defaults(facts)
    choices = (*chosen.choices, steered(asked.budget, old).choice)
    _show(choices)
    if exported is not None:
        from holdfast.analysis.export import export_run

        shutil.rmtree(run_dir / START, ignore_errors=True)  # of an attempt that did not come as far as a config
        export_run(exported, run_dir / START)
    values = config_values(chosen, source, new, old, asked.budget)
    made = job_config(JOB, values, list(asked.overrides))
    run = made.resolved()
    plan = plan_run(run)  # what it refuses is refused before anything is written
    text = to_yaml(only_changed(made, ()), made.classes, JOB)
    reasons = "\n".join(f"# {each.name}: {each.value} ({each.reason})" for each in choices)
    path = run_dir / CONFIG
    head = f"# {asked.line}\n# wrote this. To change it, edit a copy and `holdfast run` that."
    write_atomically(path, f"{head}\n{reasons}\n{text}")
    print(f"\n{text}\nwrote {path}")
    _show_plan(plan)
    return read_config(path, []).resolved()


def _datasets(asked: Asked) -> "tuple[Dataset, Dataset | None]":
    """The data by the names it gets in the config; whether it is there is asked now."""
    from holdfast.analysis.continuation import Dataset

    found: list[Dataset] = []
    for option, text in (("--new", asked.new), ("--old", asked.old)):
        if text is None:
            continue
        name, path = named_data(text, [*RESERVED, *(each.name for each in found)])
        again = any(name == each.name or (path and each.path and _same(path, each.path)) for each in found)
        if again or (path is None and name in RESERVED):
            raise UserError(f"{option} {text}: expected other data than --new, and no dataset called {text}")
        found.append(Dataset(name, path, task=False))
    data = _data_options(asked, *found)
    from holdfast.data.sources import find_source

    made = [each._replace(task=find_source(each.name, data).kind == "task") for each in found]
    return made[0], made[1] if len(made) > 1 else None


def _same(path: str, other: str) -> bool:
    """Whether two paths, patterns or hub names are of the same data."""
    return path == other or Path(path).resolve() == Path(other).resolve()


def _data_options(asked: Asked, *datasets: "Dataset | None") -> "DataConfig":
    """Where the data is, as the config will say it."""
    from holdfast.analysis.continuation import JOB
    from holdfast.cli.configs import job_config
    from holdfast.config import configure
    from holdfast.data.config import DataConfig

    sources = {each.name: {"path": each.path} for each in datasets if each is not None and each.path is not None}
    made = job_config(JOB, {"data": {"sources": sources}}, list(asked.overrides))
    return configure(DataConfig, made.cfg)


def _opened(model: str, run_dir: Path) -> "tuple[str, ModelSpec, Tokenizer, str | None]":
    """What `architecture/from` will name, the model's specification and tokenizer, and the run to export first."""
    from holdfast.data.config import TokenizerConfig
    from holdfast.data.tokenizers import load_tokenizer
    from holdfast.execution.checkpoints import named_checkpoint, split_name
    from holdfast.models.config import ModelSpec
    from holdfast.models.pretrained.source import open_model
    from holdfast.models.pretrained.tokenizers import tokenizer_for

    folder, _ = split_name(model)
    if not (folder / "config.yaml").is_file():
        try:
            return model, open_model(model).spec(), tokenizer_for(model, TokenizerConfig()), None
        except UserError as error:
            raise UserError(f"MODEL: {error}") from None
    info = named_checkpoint(model)
    described = info.manifest["model"]
    if "family" in described:
        raise UserError(f"{model}: models of the family {described['family']} cannot be continued like this")
    step = f"{folder}@{info.step}"  # the run may go on meanwhile
    return str(run_dir / START), ModelSpec(**described), load_tokenizer(folder / "tokenizer"), step


def _sizes(data: "DataConfig", tokenizer: "Tokenizer", new: "Dataset", old: "Dataset | None") -> tuple[int, int | None]:
    """Tokens of the new and of the old data, which are prepared for it if they are not yet."""
    from holdfast.data.prepare import prepare

    first, second = (
        None if each is None else prepare(each.name, "train", data=data, tokenizer=tokenizer).num_tokens
        for each in (new, old)
    )
    assert first is not None
    return first, second


def _facts(asked: Asked, spec: "ModelSpec", sizes: tuple[int, int | None]) -> "Facts":
    """What the options are chosen from."""
    from holdfast.analysis.continuation import Facts
    from holdfast.execution.topology import Topology
    from holdfast.models.family import decoder
    from holdfast.training.compile import device_limit

    model = decoder(spec)
    return Facts(
        parameters=spec.num_parameters(),
        positions=spec.block_size,
        fixed_positions=spec.positions == "learned",
        activation_bytes=model.kind.activation_bytes(model),
        new_tokens=sizes[0],
        old_tokens=sizes[1],
        tokens=asked.tokens,
        memory=device_limit(Topology.build().mesh),
    )


def _show(choices: "tuple[Choice, ...]") -> None:
    from rich.console import Console

    from holdfast.cli.options import table

    Console(highlight=False).print(table(("option", "chosen", "because"), choices, name="option"))


def _show_plan(plan: "JsonView") -> None:
    """How long it will take, and what the plan warns of."""
    from holdfast.cli.plan import time_line

    if plan["estimated_time"] is not None:
        print(time_line(plan["estimated_time"]))
    for warning in plan["warnings"]:
        print(f"warning: {warning}")


def _exported(run: "ResolvedRun", run_dir: Path) -> Path | str:
    """The folder that other programs load, written now unless it is there; why there is none where there cannot be."""
    from holdfast.analysis.export import export_run
    from holdfast.models.pretrained.families import family_for
    from holdfast.models.pretrained.source import open_model

    folder = run_dir / MODEL
    if (folder / "config.json").is_file():
        return folder
    source = run.options.architecture.source
    assert source is not None, "a continuation starts from a model"
    start = open_model(source)
    family = start.family.model_type
    try:
        family_for(run.model.options, family)
    except UserError as error:
        return str(error)
    export_run(f"{run_dir}@final", folder, family, positions=start.spec().block_size)
    return folder


def sentences(results: "JsonView", run_dir: Path, new: str, folder: Path | str) -> list[str]:
    """What was learned, what was lost against the budget, and where the model is.

    Args:
        folder: of the export, or why there is none.
    """
    from holdfast.evaluation.budgets import kept_lines
    from holdfast.report.page import REPORT

    where = f"The model is in {folder}, as transformers loads it"
    if isinstance(folder, str):
        where = f"The model is in the checkpoints of {run_dir}, without an export ({folder})"
    return [learned(results, run_dir, new), *kept_lines(results), f"{where}; the report is {run_dir / REPORT}."]


def learned(results: "JsonView", run_dir: Path, new: str) -> str:
    """How the new data's held-out loss changed from before the first step, with its interval."""
    from holdfast.evaluation.budgets import held_out_rise

    points = results["points"]
    change = held_out_rise(new, 0, run_dir, points)
    if change is None:
        return f"Learned: unknown, since {new} was not measured on held-out data before and after."
    before, after = (point["scores"][new]["bits_per_byte"] for point in (points[0], points[-1]))
    words = "Learned" if change["high"] < 0 else "Nothing learned for sure"
    return (
        f"{words}: {new} went from {before:.3f} to {after:.3f} bits per byte on held-out text "
        f"({change['rise']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}], over {change['num']} {change['unit']})."
    )
