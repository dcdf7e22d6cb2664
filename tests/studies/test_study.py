"""The file of a study: what it says, and what is refused with the place that is wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from data_examples import SHARED
from holdfast.errors import UserError
from holdfast.studies.graph import Cell, Graph
from holdfast.studies.study import as_stages, bound_stages, configurations, read_study, scaled_stages
from studies.tiny_study import CONFIG, tiny

LISTS = {key: value for key, value in CONFIG.items() if key != "stages"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"old": None}, "'old'"),
        ({"old": []}, "old: got []"),
        ({"armz": {}}, "tiny.yaml: armz: unknown configuration key; did you mean arms?"),
        ({"arms": {"a": {"sett": []}}}, "tiny.yaml: arms/a/sett: unknown configuration key; did you mean arms/a/set?"),
        ({"base": "none.yaml"}, "tiny.yaml: base: got 'none.yaml', expected a file, relative to the study's; there is"),
        ({"arms": "none.yaml"}, "tiny.yaml: arms: got 'none.yaml', expected a file, relative to the study's; there is"),
        ({"config": None}, "base: got None"),
        ({"seeds": []}, "judging: got []"),
        ({"seeds": [0, 0]}, "judging/1: got 0"),
        ({"seeds": {"selection": [0], "judging": [0]}}, "seeds/selection/0: got 0, expected a seed that is not judged"),
        ({"seeds": {"selection": [0, 1]}}, "expected a mapping that has the key 'judging'"),
        ({"seeds": {"selection": [8], "judging": [0]}, "arms": {"a": {"rates": [1, 3]}}}, "seeds/selection: got [8]"),
        ({"new": []}, "new: got []"),
        ({"old": ["lists", "lists"]}, "old/1: got 'lists', expected a task that is named once"),
        ({"new": "lists"}, "new/0: got 'lists', expected a task that is named once"),
        ({"results": "."}, "results: got '.'"),
        (
            {"config": {**LISTS, "training": {"tokens": [8, 4], "dataset": [[], []]}}},
            "tiny.yaml: optimization/kl/betas",
        ),
        ({"plain": {"rates": [0.1]}}, "plain/rates"),
        ({"plain": {"early": [1.5]}}, "plain/early/0: got 1.5"),
        ({"bounds": ["lower"]}, "bounds/0: got 'lower'"),
        ({"first_stage": 2}, "first_stage: got 2"),
        ({"arms": {"plain": {}}}, "arms/plain"),
        ({"arms": {"a b": {}, "a-b": {}}}, "names that differ"),
        ({"arms": {"a": {"rates": [1, 3]}}}, "arms/a: got '2 configurations'"),
        ({"arms": {"a": {"weights": "first"}}}, "arms/a/weights: got 'first'"),
        ({"arms": {"a": {"weights": "interpolated"}}}, "arms/a/shares"),
        ({"config": {**CONFIG, "job": "continual/train/abcdkl"}}, "job"),
        ({"config": {**CONFIG, "job": "gpt/train/pretrain", "stages": None}}, "stages"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        tiny(tmp_path, **changes)
    assert told in str(caught.value)
    assert "tiny.yaml" in str(caught.value) or "stages" in told


def test_a_study_that_is_not_there_is_no_config_to_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: no such file; expected the YAML file of a study"):
        read_study(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"arms": {"a": {"set": ["stages.1.betta=1"]}}}, "arms/a: stages/1/betta"),
        ({"arms": {"a": {"set": ["stages.7.beta=1"]}}}, "arms/a: stages/7"),
        ({"arms": {"a": {"set": ["training.seed=1"]}}}, "arms/a/set"),
        ({"arms": {"a": {"weights": "ema"}}}, "arms/a: weights: got 'ema'"),
        ({"old": ["lost"]}, "old/0: got 'lost'"),
        ({"new": ["arithmetic", "lost"]}, "new/1: got 'lost'"),
    ],
)
def test_a_mistake_in_an_arm_is_named_before_anything_runs(tmp_path: Path, changes: Any, told: str) -> None:
    graph = Graph(tiny(tmp_path, **changes))
    with pytest.raises(UserError) as caught:
        graph.runs(graph.judging({}))
    assert told in str(caught.value)


def test_parallel_lists_are_written_as_stages() -> None:
    flat = as_stages(
        "continual/train/abcd_kl",
        {
            "training": {"tokens": [30, 20], "dataset": [[{"name": "lists"}], [{"name": "arithmetic"}]]},
            "optimization": {"kl": {"betas": [0.0, 0.5], "reference_update_stages": [1]}},
        },
    )
    assert "training/tokens" not in flat
    assert "optimization/kl/betas" not in flat
    assert [(stage["tokens"], stage["beta"], stage["update_reference"]) for stage in flat["stages"]] == [
        (30, 0.0, False),
        (20, 0.5, True),
    ]


def test_base_and_arms_may_stand_in_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "ways.yaml").write_text("EMA: {set: [training.ema=0.9], weights: ema}")
    study = tiny(tmp_path, base="base.yaml", config={"optimization": {"lr": 0.5}}, arms="ways.yaml")
    assert study.values["optimization/lr"] == 0.5
    assert study.values["optimization/schedule"] == "constant"
    assert list(study.config.arms) == ["EMA"]


def test_learning_rates_are_scaled_from_the_first_stage_of_arms_on() -> None:
    stages = scaled_stages([{"tokens": 1}, {"tokens": 1, "lr": 0.5}, {"tokens": 1}], 1, 0.2)
    assert [stage.get("lr", 1.0) for stage in stages] == [1.0, 0.1, 0.2]


def test_bounds_have_all_data_in_every_stage_or_the_last_alone() -> None:
    stages = [
        {"tokens": 30, "data": [{"name": "a", "rate": 1.0}], "beta": 0.0},
        {"tokens": 10, "data": [{"name": "b", "rate": 1.0}], "beta": 0.5, "update_reference": True},
    ]
    joint = bound_stages(stages, "joint", 1)
    assert [stage["tokens"] for stage in joint] == [30, 10]
    assert all({each["name"]: each["rate"] for each in stage["data"]} == {"a": 0.75, "b": 0.25} for stage in joint)
    assert not any("beta" in stage for stage in joint)
    single = bound_stages(stages, "single", 1)
    assert [(stage["tokens"], stage["data"][0]["name"]) for stage in single] == [(5, "b"), (5, "b")]


EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "studies"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_studies_of_the_published_table_can_be_read(path: Path) -> None:
    study = read_study(path)
    assert study.config.results == f"results/{path.stem}.csv"
    assert len(study.config.plain.rates) >= 5
    assert len(study.config.judging) >= 3
    assert {*study.config.old} == {study.stages[0]["name"]}
    assert {*study.config.new_tasks} == {stage["name"] for stage in study.stages[1:]}


def test_the_two_large_studies_have_sixteen_ways_with_three_configurations_each() -> None:
    for name in ("stories-shakespeare", "fineweb-sst2"):
        config = read_study(EXAMPLES / f"{name}.yaml").config
        grids = [len(configurations(arm)) for arm in config.arms.values()]
        assert grids.count(3) == 16
        assert (len(config.selection), len(config.judging)) == (2, 8)


def test_every_arm_of_the_published_studies_is_a_run_that_could_start() -> None:
    if not (SHARED / "data").is_dir():
        pytest.skip("the shared data is not here (HOLDFAST_SHARED names its folder)")
    for name in ("stories-shakespeare", "order-german-tinystories-speeches"):
        study = read_study(EXAMPLES / f"{name}.yaml")
        study.values["data/root"] = str(SHARED / "data")
        graph = Graph(study)
        shared = [
            graph.runs([Cell(arm, graph.choices(arm)[0], 0) for arm in ("plain", other)]) for other in study.config.arms
        ]
        assert all(len(runs) == 1 or runs[1].parent == runs[0].name for runs in shared), name
