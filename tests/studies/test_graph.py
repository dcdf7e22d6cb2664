"""The graph of a study: equal pasts are one node, and nothing else is."""

import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import registry
from holdfast.config import field
from holdfast.errors import ConfigError
from holdfast.studies.graph import Graph, cost
from holdfast.studies.study import Choice
from studies.tiny_study import CONFIG, tiny

STAGES = [
    {"tokens": 768, "data": [{"name": "lists", "style": "PADDED"}]},
    {"tokens": 512, "data": [{"name": "arithmetic", "style": "PADDED"}]},
    {"tokens": 256, "data": [{"name": "lists", "style": "PMD"}]},
    {"tokens": 256, "data": [{"name": "arithmetic", "style": "PMD"}]},
]
STEPS = [3, 2, 1, 1]  # of each stage


def graph_of(folder: Path, **changes: object) -> Graph:
    return Graph(tiny(folder, **changes))


@settings(max_examples=8)
@given(
    st.lists(st.tuples(*[st.sampled_from([0.5, 2.0])] * 4), min_size=1, max_size=4),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
def test_equal_pasts_are_trained_once_and_unequal_ones_never_shared(
    arms: list[tuple[float, ...]], seeds: int, chance: object
) -> None:
    """Arms differ in the learning rates of stages: a past is equal where those before the boundary are."""
    with tempfile.TemporaryDirectory() as folder:
        graph = graph_of(
            Path(folder),
            config={**CONFIG, "stages": STAGES},
            seeds=list(range(seeds)),
            plain={"rates": [1], "early": [], "interpolations": []},
            arms={
                f"arm {index}": {"set": [f"stages.{stage}.lr={rate}" for stage, rate in enumerate(rates)]}
                for index, rates in enumerate(arms)
            },
        )
        rates = {"plain": (1.0,) * 4} | {f"arm {index}": each for index, each in enumerate(arms)}
        cells = graph.judging({})
        # Some of the runs are there, as a first pass over all of them would have begun them.
        first = graph.runs(cells)
        begun = {run.name: run.branch_stage for run in first if chance.random() < 0.3}  # type: ignore[attr-defined]  # hypothesis' Random
        runs = graph.runs(cells, begun)
    by_name = {run.name: run for run in runs}
    assert sorted(cell.name for run in runs for cell in run.cells) == sorted(cell.name for cell in cells)
    seen: set[str] = set()
    for run in runs:
        own = rates[run.cell.arm]
        assert all(rates[cell.arm] == own and cell.seed == run.cell.seed for cell in run.cells)
        if run.parent is not None:
            parent = by_name[run.parent]
            assert run.parent in seen, "a run comes after the one that it branches from"
            assert parent.cell.seed == run.cell.seed
            assert rates[parent.cell.arm][: run.branch_stage] == own[: run.branch_stage]
            assert run.branch_stage > begun.get(parent.name, 0), "the parent has trained that past itself"
        assert run.shared_steps == sum(STEPS[: run.branch_stage])
        seen.add(run.name)
    alone = {name for name, stage in begun.items() if stage == 0}
    if any(run.name in begun and run.name not in alone and not run.parent for run in runs):
        return  # of a past that was deleted it is enough that nobody branches from who does not have it
    prefixes = {each[:stage] for each in rates.values() for stage in range(1, 5)}
    ideal = seeds * sum(STEPS[len(prefix) - 1] for prefix in prefixes)
    assert cost(first).steps == ideal
    assert ideal <= cost(runs).steps <= cost(runs).alone  # a run that was begun stays where it branched off


def test_what_arms_switch_on_begins_with_them_and_what_they_change_before_does_not_share(tmp_path: Path) -> None:
    arms = {
        "EWC": {"set": ["training.methods=[ewc]"]},
        "LoRA": {"set": ["optimization.lora.rank=2"]},
        "EMA": {"set": ["training.ema=0.9"], "weights": "ema"},
        "KL": {"set": ["stages.1.beta=1", "stages.1.update_reference=true", "optimization.kl.estimator=forward"]},
        "replay": {"set": ["training.replay={rate: 0.25, rows: 4}"]},
        "self": {"set": ["training.replay={rate: 0.25, source: self}"]},
        "longer": {"set": ["stages.1.tokens=4096"]},
        "other optimizer": {"set": ["optimization.weight_decay=0.3"]},
        "other order": {"set": ["training.seed_data=7"]},
        "other weights": {"set": ["training.seed_init=7"]},
        "earlier": {"set": ["stages.0.lr=0.5"]},
        "faded": {"set": ["training.fade.overlap=1"]},
    }
    graph = graph_of(tmp_path, seeds=[3], arms=arms)
    shared = {run.cell.arm: run.parent is not None for run in graph.runs(graph.judging({}))}
    alone = {"other optimizer", "other order", "other weights", "earlier", "faded"}
    assert {arm for arm in arms if not shared[arm]} == alone


def test_a_decaying_schedule_is_a_past_that_a_longer_stage_changes(tmp_path: Path) -> None:
    decaying = {**CONFIG, "optimization": {"lr": 0.003, "schedule": "wsd"}}
    arms = {
        "longer": {"set": ["stages.1.tokens=4096"]},
        "held": {"set": ["stages.1.beta=1", "stages.1.update_reference=true"]},
    }
    graph = graph_of(tmp_path, config=decaying, seeds=[0], arms=arms)
    parents = {run.cell.arm: run.parent for run in graph.runs(graph.judging({})) if run.cell.choice == Choice()}
    assert parents == {"plain": None, "longer": None, "held": "plain-x1-s0"}


def test_with_three_stages_adapters_are_a_past_of_their_own_after_the_first(tmp_path: Path) -> None:
    arms = {
        "LoRA": {"set": ["optimization.lora.rank=2"]},
        "LoRA held": {"set": ["optimization.lora.rank=2", "stages.2.lr=0.5"]},
    }
    graph = graph_of(tmp_path, config={**CONFIG, "stages": STAGES[:3]}, seeds=[0], arms=arms)
    found = {run.cell.arm: run for run in graph.runs(graph.judging({})) if run.cell.choice == Choice()}
    assert (found["LoRA"].parent, found["LoRA"].branch_stage) == ("plain-x1-s0", 1)
    assert (found["LoRA held"].parent, found["LoRA held"].branch_stage) == (found["LoRA"].name, 2)


def test_an_average_of_plain_is_measured_on_plains_own_run(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, seeds=[0])
    run = next(run for run in graph.runs(graph.judging({})) if run.name == "plain-x1-s0")
    assert [cell.arm for cell in run.cells] == ["plain", "averaging"]


def test_grids_are_run_on_selection_seeds_and_the_chosen_one_on_the_others(tmp_path: Path) -> None:
    arms = {
        "KL": {"set": ["stages.1.update_reference=true"], "strength": {"path": "stages.1.beta", "values": [0.5, 2]}}
    }
    graph = graph_of(tmp_path, seeds={"selection": [8, 9], "judging": [0]}, arms=arms)
    assert {cell.seed for cell in graph.selection()} == {8, 9}
    assert {cell.choice.strength for cell in graph.selection() if cell.arm == "KL"} == {0.5, 2.0}
    assert not [cell for cell in graph.judging({}) if cell.arm == "KL"]
    chosen = Choice(1.0, 2.0)
    assert [cell.choice for cell in graph.judging({"KL": chosen}) if cell.arm == "KL"] == [chosen]


def test_several_options_take_each_strength_together(tmp_path: Path) -> None:
    strength = {"path": ["stages.1.beta", "stages.2.beta"], "values": [0.5, 2]}
    arms = {"KL": {"set": ["stages.1.update_reference=true"], "strength": strength}}
    seeds = {"selection": [8, 9], "judging": [0]}
    graph = graph_of(tmp_path, config={**CONFIG, "stages": STAGES[:3]}, seeds=seeds, arms=arms)
    stages = graph.resolved("KL", Choice(1.0, 2.0)).curriculum.stages
    assert [stage.beta for stage in stages] == [0.0, 2.0, 2.0]
    one = {"KL": {**arms["KL"], "strength": {**strength, "path": "stages.1.beta"}}}
    alone = graph_of(tmp_path, config={**CONFIG, "stages": STAGES[:3]}, seeds=seeds, arms=one)
    assert [stage.beta for stage in alone.resolved("KL", Choice(1.0, 2.0)).curriculum.stages] == [0.0, 2.0, 0.0]
    none = {"KL": {**arms["KL"], "strength": {**strength, "path": []}}}
    with pytest.raises(ConfigError, match="arms/KL/strength/path"):
        graph_of(tmp_path, seeds=seeds, arms=none)


def test_digests_do_not_depend_on_where_data_is_but_on_what_it_is(tmp_path: Path) -> None:
    def digest(**data: object) -> str:
        graph = graph_of(tmp_path, config={**CONFIG, "data": data})
        return graph.configuration("plain", Choice()).digest

    assert digest() == digest(root=str(tmp_path), workers=2)
    assert digest() != digest(max_documents=5)


def test_options_of_a_method_that_is_off_change_no_digest(tmp_path: Path) -> None:
    """Else a plug-in that happens to be loaded would make every run of a study another one."""

    def digest(**more: object) -> str:
        return graph_of(tmp_path, config={**CONFIG, **more}).configuration("plain", Choice()).digest

    options = {"methods": {"ewc": {"weight": 5.0}}}
    on = {"training": {**CONFIG["training"], "methods": ["ewc"]}}
    assert digest() == digest(**options)
    assert digest(**on) != digest(**on, **options)


@dataclasses.dataclass(frozen=True)
class OtherOptions:
    """Options of a plug-in of a user's."""

    size: int = field("architecture/other/size", default=3, help="how large")


def test_a_plugin_that_is_loaded_beside_changes_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(**more: object) -> str:
        return graph_of(tmp_path, config={**CONFIG, **more}).configuration("plain", Choice()).digest

    before = digest()
    monkeypatch.setattr(registry.families, "_entries", dict(registry.families._entries))
    registry.families.lazy("other", "nowhere:Other", config=OtherOptions)
    assert digest() == before
    assert digest(architecture={**CONFIG["architecture"], "other": {"size": 4}}) != before


def test_all_of_the_first_stage_is_shared_by_the_arms_of_a_seed(tmp_path: Path) -> None:
    """The shape that the speed of studies is measured with: 8 arms, 5 seeds, 400 and 150 steps."""
    stages = [dict(stage, tokens=count * 256) for stage, count in zip(CONFIG["stages"], (400, 150), strict=True)]
    graph = graph_of(
        tmp_path,
        config={**CONFIG, "stages": stages},
        seeds=[0, 1, 2, 3, 4],
        plain={"rates": [0.03, 0.1, 0.2, 0.5, 1], "early": [], "interpolations": []},
        arms={f"replay {rate}": {"set": [f"training.replay={{rate: {rate}}}"]} for rate in (0.05, 0.1, 0.25)},
    )
    found = cost(graph.runs(graph.judging({})))
    assert dataclasses.astuple(found) == (40, 5 * 400 + 40 * 150, 40 * 550)
    assert round(found.ideal, 2) == 0.36
