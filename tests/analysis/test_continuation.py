"""The options of a continuation: chosen from facts alone, with a reason each."""

import dataclasses

import pytest

from holdfast.analysis.continuation import LEAST_ROWS, Dataset, Facts, config_values, defaults
from holdfast.data.plan import DataPlan
from holdfast.errors import UserError
from holdfast.methods.budget import LEAST_CONTROL, control_facts
from training import tiny

STORIES = Facts(
    parameters=260_032,
    positions=512,
    fixed_positions=False,
    activation_bytes=20_000,
    new_tokens=637_398,
    old_tokens=800_000,
    tokens=None,
    memory=8 * 2**30,
)


def facts(**changed: object) -> Facts:
    return dataclasses.replace(STORIES, **changed)  # type: ignore[arg-type]  # of the names given


def test_a_pass_over_the_new_data_in_rows_that_suit_the_model() -> None:
    chosen = defaults(STORIES)
    assert (chosen.block_size, chosen.batch_size, chosen.lr, chosen.lora_rank) == (256, 16, 3e-4, 0)
    new = chosen.steps * chosen.batch_size * chosen.block_size * 0.75
    assert STORIES.new_tokens <= new < STORIES.new_tokens + chosen.batch_size * chosen.block_size
    assert [each.name for each in chosen.choices] == ["block size", "tokens", "batch size", "learning rate", "trained"]
    assert all(each.reason for each in chosen.choices)


@pytest.mark.parametrize("changed", [{"tokens": 100_000}, {"new_tokens": 20_000}, {"old_tokens": 9_000}], ids=str)
def test_little_data_and_few_tokens_make_rows_shorter(changed: dict[str, int]) -> None:
    chosen = defaults(facts(**changed))
    assert 16 <= chosen.block_size < 256
    assert chosen.steps * chosen.batch_size >= LEAST_ROWS
    assert "so that" in chosen.choices[0].reason


def test_tokens_that_no_row_length_makes_enough_of_are_refused() -> None:
    with pytest.raises(UserError, match=r"--tokens 1,000: .* 45,056 tokens"):
        defaults(facts(tokens=1000))


def test_adapters_where_the_whole_model_does_not_fit_and_nothing_where_they_do_not() -> None:
    large = facts(parameters=1_000_000_000, positions=4096, memory=16 * 2**30)
    whole, adapters = defaults(dataclasses.replace(large, memory=80 * 2**30)), defaults(large)
    assert (whole.lora_rank, adapters.lora_rank) == (0, 16)
    assert adapters.lr == pytest.approx(10 * whole.lr)
    assert "GiB" in adapters.choices[-1].reason
    new = Dataset("new", None, task=False)
    assert config_values(whole, "m", new, None, 0.05)["keep"] == {"self": 0.05, "certify": True}
    assert config_values(adapters, "m", new, None, 0.05)["keep"] == {"self": 0.05}
    with pytest.raises(UserError, match="even with adapters"):
        defaults(dataclasses.replace(large, memory=2**30))


def test_learned_positions_are_not_cut_off() -> None:
    assert defaults(facts(fixed_positions=True, positions=1000)).block_size == 1000


@pytest.mark.parametrize("asked", [None, LEAST_ROWS * 16, 123_457, 10**6])
@pytest.mark.parametrize("new_tokens", [3_000, 637_398])
def test_every_choice_draws_enough_control_rows(asked: int | None, new_tokens: int) -> None:
    chosen = defaults(facts(tokens=asked, new_tokens=new_tokens))
    new, old = (Dataset(name, None, task=True) for name in ("lists", "arithmetic"))
    values = config_values(chosen, "model", new, old, 0.05)
    del values["architecture"]["from"]
    values["architecture"] |= tiny.PRETRAIN["architecture"] | {"block_size": chosen.block_size}
    plan = DataPlan(tiny.resolved("continual/train/abcd_kl", values).curriculum, 0)
    (found,) = control_facts(plan)
    assert found["drawn"] >= LEAST_CONTROL
