"""What a continuation of a model starts with: its options chosen from a few facts, each with its reason. No JAX here.

`holdfast keep` shows the reasons and writes the options as an ordinary config. They are starting points: what the model
should be held to is the budget's business, so that a rate that is somewhat too high costs new learning, not the old.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.data.control import CONTROL_EVERY
from holdfast.data.sampling import SELF
from holdfast.errors import UserError
from holdfast.methods.budget import LEAST_CONTROL
from holdfast.types import Json

JOB = "continual/train/abcd_kl"
RATE = 0.25  # share of old rows
LEAST_ROWS = math.ceil(1.1 * LEAST_CONTROL * CONTROL_EVERY / RATE)  # of which a tenth of the old ones steer the budget
LEAST_STEPS = 100
LEAST_BLOCK, LEAST_BATCH = 16, 4
MOST_PASSES = 4  # over new data, before rows are made shorter instead
LEAST_OLD_ROWS = 4 * LEAST_CONTROL  # different ones: control rows are at most half of them
HELD_OUT_ROWS = 512  # of each dataset, before and after: the interval decides whether a budget was kept
LORA_RANK, LORA_FACTOR = 16, 10
ROOM = 0.8  # share of the memory that a state may take; the rest is for the compiler's own
# Held-out text of a somewhat other kind was seen to lose a quarter more than the control rows that steer (stories260K).
STEERED = 0.7  # share of a budget on old data that the config asks for
NUMBER = 4  # bytes: parameters, gradients and moments are float32


class Size(NamedTuple):
    """What suits models of up to so many parameters."""

    parameters: float
    block_size: int
    step_tokens: int


SIZES = (Size(1e7, 256, 4096), Size(1e9, 512, 16_384), Size(math.inf, 1024, 65_536))


@dataclass(frozen=True)
class Facts:
    """What is known of a model, its data and the machine.

    Args:
        positions: the longest row that the model can read.
        fixed_positions: rows that are shorter would cut its positions off.
        activation_bytes: for each token that a forward pass keeps.
        new_tokens, old_tokens: of the training splits; no old data is None.
        tokens: to train on, where the user says so.
        memory: bytes that a device may use.
    """

    parameters: int
    positions: int
    fixed_positions: bool
    activation_bytes: int
    new_tokens: int
    old_tokens: int | None
    tokens: int | None
    memory: int


class Choice(NamedTuple):
    """An option that was chosen, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Defaults:
    """The options of a continuation that depend on the model, the data and the machine."""

    block_size: int
    batch_size: int
    steps: int
    lr: float
    lora_rank: int
    choices: tuple[Choice, ...]


def defaults(facts: Facts) -> Defaults:
    """The options for some facts, with reasons."""
    size = next(size for size in SIZES if facts.parameters <= size.parameters)
    block, block_choice = _block_size(facts, size)
    batch, steps, chosen = _lengths(facts, size, block)
    rank, lora_choice = _lora(facts, block)
    lr = learning_rate(facts.parameters) * (LORA_FACTOR if rank else 1)
    reason = f"for {facts.parameters:,} parameters; larger models take smaller steps"
    reason += f", adapters {LORA_FACTOR} times larger ones" if rank else ""
    return Defaults(
        block, batch, steps, lr, rank, (block_choice, *chosen, Choice("learning rate", f"{lr:g}", reason), lora_choice)
    )


def learning_rate(parameters: int) -> float:
    """A rate to go on with from a trained model, to one figure: 3e-4 at 260 thousand parameters, lower for larger ones.

    >>> [learning_rate(n) for n in (260_000, 135_000_000, 1_200_000_000, 8_000_000_000)]
    [0.0003, 4e-05, 2e-05, 1e-05]
    """
    rate = 3e-4 * (parameters / 260_000) ** -0.32
    return float(f"{min(max(rate, 1e-5), 1e-3):.0e}")


def _block_size(facts: Facts, size: Size) -> tuple[int, Choice]:
    """Tokens of a row: as many as suit the size, fewer where data or tokens would not give enough rows."""
    if facts.fixed_positions:
        reason = "all positions of the model, which are learned: shorter rows would cut the others off"
        return facts.positions, Choice("block size", f"{facts.positions}", reason)
    block = min(size.block_size, 2 ** (facts.positions.bit_length() - 1))
    reason = f"for a model of this size, which reads up to {facts.positions}"
    new = facts.new_tokens / (1 - RATE)
    shorter = (
        (
            facts.tokens or math.inf,
            LEAST_ROWS,
            f"so that these tokens give the {LEAST_ROWS:,} rows of a budget",
        ),
        (MOST_PASSES * new, LEAST_ROWS, f"so that the new data is read at most {MOST_PASSES} times or so"),
        (facts.old_tokens or math.inf, LEAST_OLD_ROWS, f"so that the old data has {LEAST_OLD_ROWS} rows"),
    )
    for tokens, rows, why in shorter:
        while block > LEAST_BLOCK and tokens < rows * block:
            block, reason = block // 2, why
    return block, Choice("block size", f"{block}", reason)


def _lengths(facts: Facts, size: Size, block: int) -> tuple[int, int, tuple[Choice, ...]]:
    """Rows of a step and steps."""
    least = LEAST_ROWS * block
    if facts.tokens is not None:
        if facts.tokens < least:
            raise UserError(
                f"--tokens {facts.tokens:,}: a budget is steered by {LEAST_CONTROL} control rows, which takes "
                f"{least:,} tokens in rows of {block}; ask for at least so many"
            )
        tokens, reason = facts.tokens, "as asked for"
    else:
        one_pass = math.ceil(facts.new_tokens / (1 - RATE))
        tokens, reason = one_pass, f"one pass over {facts.new_tokens:,} new tokens beside the old ones"
        if tokens < least:
            passes = least * (1 - RATE) / max(facts.new_tokens, 1)
            tokens, reason = (
                least,
                f"the {LEAST_ROWS:,} rows of a budget, {passes:.1f} passes over the new data",
            )
    rows = tokens // block
    batch = min(size.step_tokens // block, rows // LEAST_STEPS)
    batch = max(2 ** (max(batch, 1).bit_length() - 1), LEAST_BATCH)
    steps = math.ceil(rows / batch)
    return (
        batch,
        steps,
        (
            Choice("tokens", f"{steps * batch * block:,}", reason),
            Choice("batch size", f"{batch}", f"{batch * block:,} tokens a step, {steps:,} steps"),
        ),
    )


def _lora(facts: Facts, block: int) -> tuple[int, Choice]:
    """The rank of adapters: none where the whole model can be trained here."""
    row = block * facts.activation_bytes
    # Parameters, their gradients, two moments of Adam, and the snapshot that the budget counts from.
    whole = 5 * NUMBER * facts.parameters + row
    here = f"of {facts.memory / 2**30:.1f} GiB here"
    if whole <= ROOM * facts.memory:
        return 0, Choice("trained", "the whole model", f"it takes about {whole / 2**30:.2f} GiB {here}")
    needed = NUMBER * facts.parameters + row
    if needed > facts.memory:
        raise UserError(
            f"the model takes at least {needed / 2**30:.1f} GiB {here}, even with adapters alone; use a larger "
            "machine, or write a config and spread it (topology/fsdp)"
        )
    reason = f"training all of it would take about {whole / 2**30:.1f} GiB {here}"
    return LORA_RANK, Choice("trained", f"adapters of rank {LORA_RANK}", reason)


class Steered(NamedTuple):
    """What the config asks for of a budget."""

    limit: float
    choice: Choice


def steered(budget: float, old: "Dataset | None") -> Steered:
    """The limit that steers training so that a budget is kept on text that does not steer.

    >>> steered(0.05, None).limit, steered(0.05, Dataset("old", None, task=False)).limit
    (0.05, 0.035)
    """
    if old is None:
        return Steered(budget, Choice("steered at", f"{budget:g}", "bits per byte of drift on the model's own samples"))
    limit = float(f"{STEERED * budget:.3g}")
    reason = f"{STEERED:g} of the budget: held-out text of another kind loses more than the rows that steer"
    return Steered(limit, Choice("steered at", f"{limit:g}", reason))


class Dataset(NamedTuple):
    """Data to train on: its name in the config, the path behind it where it has one, and whether it is a task."""

    name: str
    path: str | None
    task: bool

    @property
    def sampling(self) -> Json:
        """As a stage has it: texts as a stream, examples of a task whole."""
        return {"name": self.name, "style": "PACKED" if self.task else "PMD"}


def config_values(chosen: Defaults, model: str, new: Dataset, old: Dataset | None, budget: float) -> Json:
    """The options of the run, as a config file has them."""
    tokens, steps = chosen.batch_size * chosen.block_size, chosen.steps
    stages: list[Json] = [{"tokens": steps * tokens, "data": [new.sampling]}]
    replay: Json = {"rate": RATE, "objective": "kl"}
    if old is None:
        replay["source"] = SELF.name
    else:
        # One step that changes nothing: the old data has its own stage, and the budget counts from its end.
        stages[0]["optimizer"] = "reset"
        stages.insert(0, {"tokens": tokens, "data": [old.sampling], "lr": 0.0})
    named = [each for each in (new, old) if each is not None]
    tasks = [each.name for each in named if each.task]
    optimization: Json = {"lr": chosen.lr, "schedule": "wsd", "decay_pct": 0.3}
    if chosen.lora_rank:
        optimization["lora"] = {"rank": chosen.lora_rank, "alpha": 2.0 * chosen.lora_rank}
    keep: Json = {SELF.name if old is None else old.name: steered(budget, old).limit}
    if not chosen.lora_rank:
        keep["certify"] = True
    return {
        "architecture": {"from": model, "block_size": chosen.block_size},
        "data": {"sources": {each.name: {"path": each.path} for each in named if each.path is not None}},
        "stages": stages,
        "training": {
            "batch_size": chosen.batch_size,
            "validation": False,  # held-out rows are for the end; the budget's own curve is in the records
            "validation_steps": HELD_OUT_ROWS,
            "replay": replay,
        },
        "optimization": optimization,
        "keep": keep,
        "eval": {"evaluations": tasks, **({"limit": HELD_OUT_ROWS} if tasks else {})},
        "logging": {"report_interval": max(1, steps // 100), "checkpoint_interval": max(1, steps // 8)},
    }
