"""What a checkpoint says about itself, and whether a configuration may go on from it.

The past of a run must not change. Options that only concern the future or the way of working may: later stages,
future tokens, betas and fades, logging, evaluation, devices.
"""

from collections.abc import Mapping
from typing import Any

from holdfast.curriculum import Curriculum
from holdfast.data.plan import DataPlan
from holdfast.errors import UserError
from holdfast.training.trainable import OPTIONS

FORMAT = 2  # of manifests; the first one had another digest of the plan

# Options that never touch what has been trained so far.
FREE = (
    "logging/",
    "eval/",
    "topology/",
    "data/root",
    "data/cache",
    "data/workers",
    "data/max_broken",
    "data/max_leak",
    "training/validation",
    "training/validation_steps",
    "training/evaluate",
    "training/skip_first_dataset_validation",
    "training/per_device_batch_size",
    "training/prefetch",
    "training/max_skipped_steps",
    "training/disk_patience",
)

# Options that describe the curriculum: the plan itself shows whether the past is the same.
PLANNED = (
    "training/tokens",
    "training/dataset",
    "training/batch_size",
    "training/seed",
    "training/seed_data",
    "training/mixture_unit",
    "training/fade/",
    "training/replay",
    "stages",
    "tokenizer/",
    "data/sources",
    "data/max_documents",
    "data/max_tokens",
    "data/validation_fraction",
    "architecture/block_size",
    "optimization/kl/betas",
    "optimization/kl/beta",
    "optimization/kl/reference_update_stages",
)

# Options of the penalty: the past is the same if no step so far had one.
PENALTY = ("optimization/kl/",)


def past_of(curriculum: Curriculum, step: int) -> list[list[Any]]:
    """Everything but the rows that the curriculum did before a step."""
    entries: list[list[Any]] = [
        ["stage", curriculum.stage_start(index), stage.beta, stage.reset_optimizer, stage.lr]
        for index, stage in enumerate(curriculum.stages)
        if curriculum.stage_start(index) < step
    ]
    entries += [["reference", taken] for taken in sorted(curriculum.snapshot_steps()) if taken < step]
    # A reference that is there must stay there, and one that is not cannot be made up later.
    entries.append(["has_reference", curriculum.has_reference(step)])
    return entries


def facts(plan: DataPlan, step: int, version: int = FORMAT) -> dict[str, Any]:
    """The part of a manifest of some version that decides whether another configuration has the same past."""
    return {"plan": plan.fingerprint(step, version), "past": past_of(plan.curriculum, step)}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Paths whose values differ between two flat configurations, down to the element of a list that differs.

    >>> differences({"stages": [{"beta": 0.1, "tokens": 5}]}, {"stages": [{"beta": 0.2, "tokens": 5}]})
    {'stages/0/beta': (0.1, 0.2)}
    """
    found: dict[str, tuple[Any, Any]] = {}
    for path in sorted({*old, *new}):
        found.update(_differences(path, old.get(path), new.get(path)))
    return found


def _differences(path: str, old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    if isinstance(old, list) and isinstance(new, list):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        inner: dict[str, tuple[Any, Any]] = {}
        for key in dict.fromkeys([*old, *new]):
            inner.update(_differences(f"{path}/{key}", old.get(key), new.get(key)))
        return inner
    return {} if old == new else {path: (old, new)}


def check_resume(
    manifest: Mapping[str, Any], flat: Mapping[str, Any], plan: DataPlan, *, branch: bool = False
) -> list[str]:
    """Refuse a configuration with another past; otherwise say in lines what differs.

    Args:
        manifest: of the checkpoint to go on from.
        flat: the configuration as path -> value.
        plan: the new data plan.
        branch: a new run goes on from another's checkpoint; it may train other parts of the model.
    """
    step = manifest["step"]
    changed = differences(manifest["config"], flat)
    same_past = all(manifest[name] == value for name, value in facts(plan, step, manifest["format"]).items())
    no_penalty_yet = not any(entry[0] == "stage" and entry[2] > 0 for entry in past_of(plan.curriculum, step))
    refused = []
    for path, (old, new) in changed.items():
        if path.startswith(FREE) or (branch and path.startswith(OPTIONS)):
            continue
        planned = path.startswith(PLANNED) and same_past
        penalty = path.startswith(PENALTY) and no_penalty_yet
        if not planned and not penalty:
            refused.append(f"  {path}: was {old!r}, is {new!r}")
    if not same_past and not refused:
        refused.append("  the prepared data: its contents, or the tokenizer, are not what they were")
    if refused:
        raise UserError(
            f"the run's checkpoint at step {step} was made with another past:\n"
            + "\n".join(refused)
            + "\nput these back, choose another --name, or take its weights alone with --init-from"
        )
    return [f"{path}: was {old!r}, is {new!r}" for path, (old, new) in changed.items()]
