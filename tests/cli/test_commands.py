"""The command line: what configure writes, what plan shows, and how mistakes end."""

import importlib
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli import main
from holdfast.config import schema
from holdfast.training.config import config_classes

ROOT = Path(__file__).resolve().parents[2]
JOBS = ["gpt/train/pretrain", "gpt/train/kl", "continual/train/abcd", "continual/train/abcd_kl"]

# The spec's fields: path -> default.
BASE: dict[str, Any] = {
    "training/batch_size": 512,
    "training/per_device_batch_size": -1,
    "training/tokens": 1_000_000_000,
    "optimization/lr": 0.0003,
    "training/warmup_pct": 0.01,
    "training/decay_pct": 0.1,
    "training/validation": True,
    "training/evaluate": True,
    "training/dataset": [{"name": "fineweb", "rate": 1, "style": "PMD"}],
    "eval/evaluations": [],
    "architecture/block_size": 512,
    "logging/report_interval": 32,
    "logging/checkpoint_interval": 1024,
    "logging/validation_interval": 512,
    "training/validation_steps": 2048,
    "logging/wandb": False,
}
KL = {
    **BASE,
    "training/tokens": [1_000_000_000, 100_000_000],
    "training/dataset": [[{"name": "fineweb", "rate": 1, "style": "PMD"}]] * 2,
    "optimization/kl/beta": 0.1,
}
ABCD = {
    **{path: value for path, value in BASE.items() if not path.endswith("_pct")},
    "training/tokens": [1_000_000_000, *[100_000_000] * 4],
    "optimization/warmup_pct": 0.01,
    "optimization/decay_pct": 0.01,
    "optimization/constant_pct": 0.3,
    "training/dataset": [
        [{"name": "fineweb", "rate": 1, "style": "PMD"}],
        *([{"name": name, "rate": 1, "style": "PADDED"}] for name in ("mnli", "qqp", "sst2", "siqa")),
    ],
    "eval/evaluations": ["mnli", "qqp", "sst2", "siqa"],
    "training/skip_first_dataset_validation": False,
    "training/fade/overlap": 0.0,
    "training/fade/curve": "linear",
    "training/fade/steepness": 10.0,
    "training/fade/per_boundary_overlap": [],
}
ABCD_KL = {
    **ABCD,
    "optimization/kl/betas": [0.0, 0.1, 0.1, 0.1, 0.1],
    "optimization/kl/reference_update_stages": [1],
}
SPEC = dict(zip(JOBS, (BASE, KL, ABCD, ABCD_KL), strict=True))


def holdfast(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
    try:
        main()
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def at(tree: Any, path: str) -> Any:
    for name in path.split("/"):
        tree = tree[name]
    return tree


@pytest.mark.parametrize("job", JOBS)
def test_configure_writes_the_specs_fields_with_their_defaults(job: str, tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "x.yaml"
    assert holdfast(monkeypatch, "configure", job, out) == 0
    tree = yaml.safe_load(out.read_text())
    assert tree["job"] == job
    for path, default in SPEC[job].items():
        assert at(tree, path) == default, path
    comments = [line for line in out.read_text().splitlines() if line.strip().startswith("#")]
    assert len(comments) > len(SPEC[job])


def test_configure_never_writes_over_a_file(tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "x.yaml"
    out.write_text("mine")
    assert holdfast(monkeypatch, "configure", JOBS[0], out) == 2
    assert out.read_text() == "mine"


@pytest.mark.parametrize(("job", "every"), [(JOBS[0], 6), pytest.param(JOBS[3], 1, marks=pytest.mark.slow)])
def test_nonsense_anywhere_is_named_by_its_path(
    job: str, every: int, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """What the command says; `test_job_configs` tries every path of every job."""
    out = tmp_path / "x.yaml"
    assert holdfast(monkeypatch, "configure", job, out) == 0
    for path in [*schema(*config_classes(job))][::every]:
        if path == "data/cache":  # any text is a folder that can be made
            continue
        tree = yaml.safe_load(out.read_text())
        *parents, last = path.split("/")
        section = at(tree, "/".join(parents)) if parents else tree
        section[last] = "../nonsense"
        edited = tmp_path / "edited.yaml"
        edited.write_text(yaml.safe_dump(tree))
        capsys.readouterr()
        assert holdfast(monkeypatch, "plan", edited) == 2, path
        said = capsys.readouterr().err
        assert path in said, said
        assert "Traceback" not in said


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["optimization.kl.betas=[0, 0.1]"], "optimization/kl/betas"),
        (["training.tokens=[1000000, 1000000]"], "training/dataset"),
        (["training.fade.per_boundary_overlap=[0.1]"], "training/fade/per_boundary_overlap"),
        (["optimization.kl.reference_update_stages=[7]"], "optimization/kl/reference_update_stages/0"),
        (["training.fade.curve=wobbly"], "training/fade/curve"),
        (["training.tokens.2=-5"], "training/tokens/2"),
        (["optimization.kl.betas.0=0.5"], "optimization/kl/betas/0"),
        (["optimization.kl.target=0.1"], "optimization/kl/target"),
        (["training.dataset.1.0.rate=0.5"], "training/dataset/1"),
        (["eval.evaluations=[mnly]"], "eval/evaluations/0"),
        (["training.batch_sise=3"], "training/batch_size"),
        (["training.per_device_batch_size=100"], "training/per_device_batch_size"),
        (["training.replay={objective: kl}", "optimization.kl.betas.3=0"], "training/replay/objective"),
    ],
)
def test_wrong_curricula_are_refused_before_anything_is_built(
    overrides: list[str], path: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    out = tmp_path / "x.yaml"
    holdfast(monkeypatch, "configure", JOBS[3], out)
    for command in (["plan", out], ["run", out, "--out", tmp_path / "runs"]):
        assert holdfast(monkeypatch, *command, *overrides) == 2
        assert path in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "x" * 101, "a b"])
def test_names_are_checked_before_they_become_paths(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "x.yaml"
    holdfast(monkeypatch, "configure", JOBS[0], out)
    for option in ("--project", "--group"):
        assert holdfast(monkeypatch, "run", out, option, name, "--out", tmp_path / "runs") == 2
        assert option in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def plan_of(monkeypatch: Any, capsys: Any, *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert holdfast(monkeypatch, "plan", *arguments, "--json") == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


def test_the_plan_of_the_default_config(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "x.yaml"
    holdfast(monkeypatch, "configure", JOBS[3], out)
    plan = plan_of(monkeypatch, capsys, out)
    assert plan["tokens_per_step"] == 512 * 512
    assert plan["total_steps"] == 1_400_000_000 // (512 * 512)
    assert [stage["name"] for stage in plan["stages"]] == ["fineweb", "mnli", "qqp", "sst2", "siqa"]
    assert [stage["beta"] for stage in plan["stages"]] == [0.0, 0.1, 0.1, 0.1, 0.1]
    assert [stage["update_reference"] for stage in plan["stages"]] == [False, True, False, False, False]
    for key in ("beta", "learning_rate"):
        assert len(plan["steps"][key]) == plan["total_steps"]
    totals = [sum(rows[step] for rows in plan["steps"]["rows"].values()) for step in range(plan["total_steps"])]
    assert set(totals) == {512}
    for stage in plan["stages"]:
        for step in (stage["start_step"], stage["end_step"] - 1):
            assert plan["steps"]["rows"][stage["name"]][step] == 512
            assert plan["steps"]["beta"][step] == stage["beta"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chip", "tpu-v5e"], "--chip and --devices: give both"),
        (["--devices", "8"], "--chip and --devices: give both"),
        (["--chip", "h1000", "--devices", "8"], "--chip h1000: unknown chip; there are"),
        (["--chip", "tpu-v5e", "--devices", "8"], "--devices 8: expected a torus such as 2x4"),
        (["--chip", "h100", "--devices", "8", "topology.fsdp=3"], "topology/fsdp: got 3"),
        (["--chip", "h100", "--devices", "24"], "training/batch_size: got 512, expected a multiple of 24"),
        (["--chip", "h100", "--devices", "8", "topology.tensor=8"], "topology/tensor: got 8, expected a divisor"),
    ],
)
def test_a_chip_that_cannot_be_planned_for(
    options: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    out = tmp_path / "x.yaml"
    holdfast(monkeypatch, "configure", JOBS[0], out)
    assert holdfast(monkeypatch, "plan", out, *options) == 2
    assert message in capsys.readouterr().err


def test_the_plan_for_a_chip(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "x.yaml"
    holdfast(monkeypatch, "configure", "continual/train/abcd_kl", out)
    options = ["--chip", "h100", "--devices", "8", "topology.fsdp=8", "training.per_device_batch_size=1"]
    chip = plan_of(monkeypatch, capsys, out, *options)["chip"]
    assert (chip["num_devices"], chip["micro_batches"], chip["source"]) == (8, 64, "computed from shapes")
    assert holdfast(monkeypatch, "plan", out, *options) == 0
    shown = capsys.readouterr().out
    assert "memory and collectives: computed from shapes" in shown
    assert "a step of the stages fineweb: plain" in shown
    assert "a step of the stages mnli, qqp, sst2, siqa: anchored (nll_difference)" in shown
    assert shown.count("all-gather") == shown.count("estimate from published peaks") == 2


def test_both_spellings_give_the_same_plan(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    shared = {
        "job": JOBS[3],
        "architecture": {"block_size": 64},
        "eval": {"evaluations": []},
    }
    lists = {
        **shared,
        "training": {
            "batch_size": 4,
            "tokens": [25600, 12800, 12800],
            "dataset": [
                [{"name": "pydocs"}],
                [{"name": "pycode", "rate": 0.9}, {"name": "pydocs", "rate": 0.1}],
                [{"name": "lists", "style": "PADDED"}],
            ],
            "fade": {"per_boundary_overlap": [0.5, 0.2], "curve": "cosine"},
        },
        "optimization": {"kl": {"betas": [0, 0.1, 0.2], "reference_update_stages": [1, 2]}},
    }
    section = {
        **shared,
        "training": {"batch_size": 4, "fade": {"curve": "cosine"}},
        "stages": [
            {"tokens": 25600, "data": lists["training"]["dataset"][0]},
            {
                "tokens": 12800,
                "data": lists["training"]["dataset"][1],
                "beta": 0.1,
                "update_reference": True,
                "overlap": 0.5,
            },
            {
                "tokens": 12800,
                "data": lists["training"]["dataset"][2],
                "beta": 0.2,
                "update_reference": True,
                "overlap": 0.2,
            },
        ],
    }
    plans = []
    for name, tree in (("lists", lists), ("section", section)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree))
        plans.append(plan_of(monkeypatch, capsys, path))
    assert plans[0] == plans[1]
    assert holdfast(monkeypatch, "plan", tmp_path / "section.yaml", "training.tokens=[1,2]") == 2
    assert "training/tokens" in capsys.readouterr().err


def test_replay_is_shown_in_the_plan(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "x.yaml"
    holdfast(monkeypatch, "configure", JOBS[3], out)
    plan = plan_of(monkeypatch, capsys, out, "training.replay={}")
    rates = {d["name"]: d["rate"] for d in plan["stages"][1]["datasets"]}
    assert rates == {"mnli": 0.95, "fineweb": 0.05}


def test_the_terminal_shows_a_picture(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "x.yaml"
    holdfast(monkeypatch, "configure", JOBS[3], out)
    capsys.readouterr()
    assert holdfast(monkeypatch, "plan", out, "training.fade.overlap=0.5") == 0
    said = capsys.readouterr().out
    assert "siqa │" in said
    assert "█" in said


def test_a_missing_run_is_a_users_mistake(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for command in ("checkpoints", "show", "report", "eval", "export"):
        extra = [tmp_path / "out"] if command == "export" else []
        assert holdfast(monkeypatch, command, tmp_path / "nothing", *extra) == 2, command
        assert "nothing" in capsys.readouterr().err


def test_the_plan_says_about_how_long_a_run_takes_here(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "x.yaml"
    holdfast(monkeypatch, "configure", JOBS[3], out, "--preset", "laptop")
    times = [plan_of(monkeypatch, capsys, out, *more)["estimated_time"] for more in ([], ["stages.0.tokens=32768000"])]
    assert times[0]["matmul_flops_per_second"] > 1e8
    assert 0 < times[0]["low_seconds"] < times[0]["high_seconds"]
    assert times[1]["low_seconds"] - 10 > 10 * (times[0]["low_seconds"] - 10)
    assert holdfast(monkeypatch, "plan", out) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "time on this machine: about" in said
    assert "an estimate: matrix products run at" in said
    chip = ["--chip", "h100", "--devices", "8"]
    assert plan_of(monkeypatch, capsys, out, *chip)["estimated_time"] is None


@pytest.mark.parametrize("preset", ["laptop", "own-data", "pretrained"])
def test_a_starting_point_is_short_and_readable(preset: str, tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "x.yaml"
    assert holdfast(monkeypatch, "configure", JOBS[3], out, "--preset", preset) == 0
    text = (ROOT / "src" / "holdfast" / "cli" / "presets" / f"{preset}.yaml").read_text()
    assert out.read_text() == text
    assert len(text.splitlines()) < 45
    tree = yaml.safe_load(text)
    assert tree["optimization"]["kl"]["estimator"] == "forward"
    assert tree["training"]["replay"]["rate"] > 0
    full = tmp_path / "full.yaml"
    assert holdfast(monkeypatch, "configure", JOBS[3], full, "--preset", preset, "--full") == 0
    assert len(full.read_text().splitlines()) > 200
    assert at(yaml.safe_load(full.read_text()), "training/batch_size") == tree["training"]["batch_size"]


def test_starting_points_run_when_their_paths_are_there(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for preset in ("laptop", "own-data", "pretrained"):
        holdfast(monkeypatch, "configure", JOBS[3], f"{preset}.yaml", "--preset", preset)
    assert holdfast(monkeypatch, "plan", "laptop.yaml") == 0
    assert holdfast(monkeypatch, "plan", "own-data.yaml") == 2
    assert "data/sources/notes/path: got 'notes/*.txt'" in capsys.readouterr().err
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a note\n")
    (tmp_path / "tickets.jsonl").write_text('{"body": "where is my bill?", "team": "billing"}\n')
    assert holdfast(monkeypatch, "plan", "own-data.yaml") == 0
    assert holdfast(monkeypatch, "plan", "pretrained.yaml") == 2
    assert "architecture/from: my-model" in capsys.readouterr().err


def test_overrides_change_a_starting_point_and_keep_it_short(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out, plain = tmp_path / "x.yaml", tmp_path / "plain.yaml"
    holdfast(monkeypatch, "configure", JOBS[3], plain, "--preset", "laptop")
    assert holdfast(monkeypatch, "configure", JOBS[3], out, "training.seed=3", "--preset", "laptop") == 0
    assert len(out.read_text().splitlines()) < 90
    plans = [plan_of(monkeypatch, capsys, path, *more) for path, more in ((out, []), (plain, ["training.seed=3"]))]
    assert plans[0] == plans[1]
    short = tmp_path / "short.yaml"
    assert holdfast(monkeypatch, "configure", JOBS[3], short, "--short") == 0
    assert len(short.read_text().splitlines()) < 90
    default = tmp_path / "default.yaml"
    holdfast(monkeypatch, "configure", JOBS[3], default)
    assert plan_of(monkeypatch, capsys, short) == plan_of(monkeypatch, capsys, default)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([JOBS[0], "x.yaml", "--preset", "laptop"], "is for the job continual/train/abcd_kl, got gpt/train/pretrain"),
        ([JOBS[3], "x.yaml", "--preset", "phone"], "expected one of laptop, own-data, pretrained"),
        ([JOBS[3], "x.yaml", "--short", "--full"], "choose one"),
    ],
)
def test_a_starting_point_that_is_not_there(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert holdfast(monkeypatch, "configure", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("group", [[], ["queue"], ["data"], ["tokenizer"]], ids=str)
def test_no_summary_in_the_help_is_cut(group: list[str], monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert holdfast(monkeypatch, *group, "--help") == 0
    commands = capsys.readouterr().out.partition("Commands:")[2]
    assert commands.strip()
    assert "..." not in commands


def test_the_version_is_that_of_the_package(monkeypatch: Any, capsys: Any) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert importlib.import_module("holdfast").__version__ == project["version"]
    assert holdfast(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"holdfast {project['version']}\n"


def test_brackets_in_the_list_of_plugins_are_shown(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert holdfast(monkeypatch, "jobs") == 0
    said = capsys.readouterr().out
    assert "needs the extra holdfast[wandb]" in said
    assert "needs the extra holdfast[tensorboard]" in said


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eval": {"evaluations": ["arithmetik"]}}, "error: eval/evaluations/0: there is no evaluation 'arithmetik'"),
        (
            {"eval": {"evaluations": ["x"]}, "data": {"sources": {"x": {"path": __file__, "format": "txt"}}}},
            "error: eval/evaluations/0: got 'x', expected a task",
        ),
        (
            {"training": {"dataset": [{"name": "x"}]}, "data": {"sources": {"x": {"path": "no/where.txt"}}}},
            "error: data/sources/x/path: got 'no/where.txt', expected a file",
        ),
        ({"training": {"dataset": [{"name": "x"}]}}, "error: training/dataset: there is no dataset 'x'"),
    ],
    ids=["evaluation", "evaluation of text", "path", "dataset"],
)
def test_a_message_names_one_path(
    values: dict[str, Any], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"job": JOBS[0], **values}))
    assert holdfast(monkeypatch, "plan", path) == 2
    assert capsys.readouterr().err.startswith(message)


def test_a_run_of_a_plugin_names_the_option(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "config.yaml").write_text("job: mine/train/own\n")
    for command in (["eval", tmp_path], ["generate", tmp_path, "def "]):
        assert holdfast(monkeypatch, *command) == 2, command
        said = capsys.readouterr().err
        assert "'mine/train/own'" in said
        assert "--plugin MODULE" in said
    assert holdfast(monkeypatch, "run", tmp_path / "config.yaml", "--name", "x") == 2
    assert "--plugin MODULE" in capsys.readouterr().err
