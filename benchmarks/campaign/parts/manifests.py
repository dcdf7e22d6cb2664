"""Mutated manifests: a key that is gone, another type, another number, in this version's form and in the last one's.

One with checksums must be noticed. One of the version before has none: it may be set aside, refused with a message, or
taken with the word that it cannot be checked; never a traceback, and never a run that cannot go on although older
checkpoints are good.
"""

import copy
import functools
import json
import random
import shutil
from collections.abc import Iterator
from typing import Any

from benchmarks.campaign.framework import Outcome, Try, scratch
from benchmarks.campaign.parts.flips import finished

ABOUT = "a manifest with another key, type or value; noticed, refused in a line, or said to be without checksums"
STRANGE: tuple[Any, ...] = (None, True, -1, 0, 2**63, 1.5, "", "x", "²", [], [1], {}, {"a": 1}, "9" * 5000)


def tries(seed: int) -> Iterator[Try]:
    """Mutations, each of a place and a value that its number chooses."""
    number = 0
    while True:
        chance = random.Random(f"manifests {seed} {number}")
        act = mutate_sealed if number % 4 else mutate_old
        yield Try(f"{act.__name__} {seed} {number}", functools.partial(act, chance))
        number += 1


def mutated(manifest: Any, chance: random.Random) -> tuple[Any, str]:
    """A copy with one thing changed, and what was done."""
    made = copy.deepcopy(manifest)
    holder, depth = made, 0
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = chance.choice(keys)
        inner = holder[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.6:
            holder, depth = inner, depth + 1
            continue
        break
    kind = chance.choice(["removed", "renamed", "another type", "another value"])
    if kind == "removed":
        del holder[key]
    elif kind == "renamed" and isinstance(holder, dict):
        holder[f"{key}_"] = holder.pop(key)
    elif kind == "another value" and type(inner) in (int, float, str):
        holder[key] = inner + 1 if not isinstance(inner, str) else inner + "x"
    else:
        kind = "another type"
        holder[key] = chance.choice([value for value in STRANGE if type(value) is not type(inner)])
    return made, f"{kind}, depth {min(depth, 2)}"


def mutate_sealed(chance: random.Random) -> Outcome:
    """A change in a manifest of this version, as a disk or an editor makes it."""
    from holdfast.execution.checkpoints import list_checkpoints, unusable_checkpoints

    run = finished()
    path = run.info.path / "manifest" / "metadata"
    good = path.read_bytes()
    made, what = mutated(run.info.manifest, chance)
    path.write_text(json.dumps(made))
    try:
        if run.info.path.name in unusable_checkpoints(run.info.path.parent):
            return Outcome(what, "noticed")
        same = list_checkpoints(run.info.path.parent)[-1].manifest == run.info.manifest
    finally:
        path.write_bytes(good)
    return Outcome(what, "identical") if same else Outcome(what, "taken as good", held=False)


def mutate_old(chance: random.Random) -> Outcome:
    """A change in a manifest of the version before, in a copy of the run."""
    from holdfast.errors import RunError, UserError
    from holdfast.execution.checkpoints import list_checkpoints
    from holdfast.training import restore

    run = finished()
    folder = scratch() / "old" / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run.folder, folder)
    infos = list_checkpoints(folder / "checkpoints")
    what = ""
    for info in infos:
        manifest = {key: value for key, value in info.manifest.items() if key not in ("seal", "checksums")}
        for name in ("metrics_digest", "files"):
            manifest.pop(name)
        if info is infos[-1]:
            manifest, what = mutated(manifest, chance)
        (info.path / "manifest" / "metadata").write_text(json.dumps(manifest))
    said: list[str] = []
    trainer = run.trainer
    restorer = restore.Restorer(trainer.resolved, trainer.topology.mesh, folder)
    try:
        state, _ = restore.start(restorer, trainer.state, trainer.plan, trainer.triggers.tags, said.append)
    except (UserError, RunError):
        return Outcome(f"old: {what}", "refused in a line")
    if int(state.step) < infos[-1].step:
        return Outcome(f"old: {what}", "noticed" if said else "set aside silently", held=bool(said))
    warned = any("cannot be checked" in line for line in said)
    return Outcome(f"old: {what}", "taken, and said to be without checksums" if warned else "taken", held=warned)
