"""What a checkpoint says about itself, and whether a configuration may go on from it.

The past of a run must not change. Options that only concern the future or the way of working may: later stages,
future tokens, betas and fades, logging, evaluation, devices.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast import __version__
from holdfast.config import Entry, Resume, entry_of, schema
from holdfast.conversion import respelled
from holdfast.curriculum import Curriculum
from holdfast.data.plan import DataPlan
from holdfast.errors import UserError
from holdfast.evaluation.results import FOLDER as EVALUATIONS
from holdfast.execution import processes
from holdfast.registry import plugin_digests
from holdfast.training.resolve import ResolvedRun
from holdfast.types import Json, JsonView

FORMAT = 2  # of manifests; the first one had another digest of the plan
# What steps mean. Where a version changes what the same options do, this grows, and a line in MEANINGS says what it is.
SEMANTICS = 3
# How the rows of a step are ordered: 1 as they are shuffled, 2 with old rows in the slots of each block where something
# looks at them alone. A run keeps the order that it was begun with.
ROW_ORDER = 2
PLACES = ("data/root", "data/cache")  # options that may differ between the hosts of a run
KEEP = "keep"  # the section of budgets
METHODS = "methods/"  # before the name of a method, in the paths of its options


def _decays(config: JsonView) -> bool:
    return config.get("optimization/schedule") != "constant"


def _has_budget(config: JsonView) -> bool:
    return config.get("optimization/kl/target") is not None


def _has_muon(config: JsonView) -> bool:
    return config.get("optimization/optimizer") == "muon"


def _averages(config: JsonView) -> bool:
    return "sfa" in (config.get("training/methods") or ())


# The number since which something holds, whether it concerns a run's options, and what to tell its user.
MEANINGS: tuple[tuple[int, Callable[[JsonView], bool], str], ...] = (
    (2, _decays, "the last step of a decay has the final learning rate, which came one step later before"),
    (2, _has_budget, "optimization/kl/target is a ceiling for the running mean of the KL"),
    (2, _has_muon, "the Adam part of muon is plain Adam, not Nesterov's"),
    (3, _averages, "sfa averages at the rounded multiples of methods/sfa/period, not at those of a rounded number"),
)


def changed_meanings(since: int, config: JsonView) -> list[str]:
    """What the options of a run begun under an earlier number mean differently now.

    >>> changed_meanings(SEMANTICS, {})
    []
    """
    return [text for number, concerns, text in MEANINGS if number > since and concerns(config)]


@dataclass
class Progress:
    """What a run has found out so far; every checkpoint's manifest holds it."""

    points: list[Json] = field(default_factory=list)  # evaluations, as in results.json
    best: dict[str, float] = field(default_factory=dict)  # stage -> lowest validation loss
    metrics_length: int = 0
    metrics_digest: str = ""  # of so many bytes of metrics.jsonl
    files: dict[str, str] = field(default_factory=dict)  # digests of what was written once, by path in the run's folder
    saved_step: int = -1  # step of the checkpoint that this was read from, -1 for a fresh start
    certificates: list[Json] = field(default_factory=list)  # of budgets at the ends of stages, as in results.json

    @classmethod
    def of(cls, manifest: JsonView, saved_step: int) -> "Progress":
        """What was known when a checkpoint was made; of another run's, only its evaluations come along (step -1)."""
        files = manifest.get("files", {}).items()
        return cls(
            points=list(manifest["points"]),
            best=dict(manifest["best"]),
            metrics_length=manifest["metrics_length"],
            metrics_digest=manifest.get("metrics_digest", ""),
            files={name: digest for name, digest in files if saved_step >= 0 or name.startswith(EVALUATIONS)},
            saved_step=saved_step,
            certificates=list(manifest.get("certificates", ())),
        )


def manifest_of(
    run: ResolvedRun,
    plan: DataPlan,
    step: int,
    tags: Sequence[str],
    machine: JsonView,
    held: JsonView,
    progress: Progress | None = None,
) -> Json:
    """What the checkpoint of a step says about itself.

    Args:
        machine: mesh, processes and micro-batch of the process that made it.
        held: what its arrays are beside those of every run: the base of adapters, methods' memories.
    """
    progress = progress or Progress()
    return {
        "format": FORMAT,
        "semantics": SEMANTICS,
        "step": step,
        "tokens": step * run.curriculum.tokens_per_step,
        "stage": run.curriculum.stage_at(max(step - 1, 0)),
        "tags": list(tags),
        "config": run.flat_config(),
        "model": run.model.described(),
        "tokenizer": run.tokenizer.fingerprint,
        **held,
        **facts(plan, step),
        **machine,
        "points": progress.points,
        "best": progress.best,
        "metrics_length": progress.metrics_length,
        "metrics_digest": progress.metrics_digest,
        "files": progress.files,
        **({"kept": kept_since(run.curriculum)} if run.curriculum.budgets else {}),
        **({"certificates": progress.certificates} if progress.certificates else {}),
    }


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


def facts(plan: DataPlan, step: int, version: int = FORMAT) -> Json:
    """The part of a manifest of some version that decides whether another configuration has the same past."""
    return {"plan": plan.fingerprint(step, version), "past": past_of(plan.curriculum, step)}


def differences(old: JsonView, new: JsonView) -> dict[str, tuple[Any, Any]]:
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


def shared_facts(run: ResolvedRun) -> Json:
    """What all processes of a run must have in common: every option but the places of files, versions and plug-ins."""
    config = {path: value for path, value in run.flat_config().items() if path not in PLACES}
    sources = config.get("data/sources") or {}
    config["data/sources"] = {
        name: {key: value for key, value in source.items() if key not in ("path", "validation")}
        for name, source in sources.items()
    }
    facts = {
        **config,
        "job": run.job,
        "the tokenizer": run.tokenizer.fingerprint,
        "the version of holdfast": __version__,
        "the version of JAX": importlib.metadata.version("jax"),
        **{f"--plugin {name}": digest for name, digest in plugin_digests().items()},
    }
    made: Json = json.loads(json.dumps(facts))
    return made


def digest_of(facts: JsonView) -> str:
    """A digest of what JSON can hold."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def check_same(run: ResolvedRun, place: JsonView) -> None:
    """Refuse to train together with processes that were given something else.

    Args:
        place: name of the run and what it starts from, as options.
    """
    facts = {**shared_facts(run), **place}
    if len(set(processes.gather(digest_of(facts)))) == 1:
        return
    gathered = processes.gather(facts)
    for number, other in enumerate(gathered):
        changed = differences(gathered[0], other)
        if changed:
            lines = [f"  {path}: {first!r} in process 0, {own!r} here" for path, (first, own) in changed.items()]
            raise UserError(
                f"process {number} was started with something else than process 0:\n"
                + "\n".join(lines[:10])
                + "\ngive all processes the same config file, overrides, version and plug-ins"
            )


def check_resume(manifest: JsonView, run: ResolvedRun, plan: DataPlan, *, branch: bool = False) -> list[str]:
    """Refuse a configuration with another past; otherwise the paths whose values differ.

    What may differ each option says itself (`field(resume=...)`).

    Args:
        manifest: of the checkpoint to go on from.
        run: with the new configuration.
        plan: the new data plan.
        branch: a new run goes on from another's checkpoint; it may train other parts of the model.
    """
    step, entries = manifest["step"], schema(*run.classes)
    changed = differences(_options_of(manifest, run, entries), run.flat_config())
    same_past = all(manifest[name] == value for name, value in facts(plan, step, manifest["format"]).items())
    refused = []
    for path, (old, new) in changed.items():
        entry = entry_of(path, entries)
        allowed = {
            "free": True,
            "planned": same_past,
            "unused": not _used(path, manifest, run.curriculum),
            "branch": branch,
            "fixed": False,
        }
        if not allowed[_policy(path, entry)]:
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


def _options_of(manifest: JsonView, run: ResolvedRun, entries: Mapping[str, Entry]) -> Json:
    """A checkpoint's options; with their defaults those that were not there yet, and keys as they are spelled now."""
    known = {**run.flat_defaults(), **manifest["config"]}
    return {
        path: respelled(value, entries[path].type if path in entries else None, path) for path, value in known.items()
    }


def _policy(path: str, entry: Entry | None) -> Resume:
    if path.startswith(METHODS):
        return "unused"
    return "fixed" if entry is None else entry.resume


def _used(path: str, manifest: JsonView, curriculum: Curriculum) -> bool:
    """Whether a step before a checkpoint used an option of the anchor, of a method, or a budget."""
    if path.startswith(METHODS):
        return path.removeprefix(METHODS).split("/")[0] in (manifest["config"].get("training/methods") or ())
    if path.split("/")[0] == KEEP:
        both = (manifest.get("kept", {}), kept_since(curriculum))
        begun = {name for kept in both for name, step in kept.items() if step < manifest["step"]}
        name = path.partition("/")[2]
        return name in begun or (name not in kept_since(curriculum) and bool(begun))
    return any(entry[0] == "stage" and entry[2] > 0 for entry in past_of(curriculum, manifest["step"]))


def kept_since(curriculum: Curriculum) -> dict[str, int]:
    """The step from which each budget holds."""
    return {budget.name: curriculum.stage_start(budget.since) for budget in curriculum.budgets}
