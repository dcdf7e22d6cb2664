"""Generated configs of every job through `plan` in one process, and `run` for some of those that it accepts.

A config begins as a tiny one that runs; then a few of its options become something else: another type, a number at or
beyond a bound, a strange text, a hostile name or path. `plan` must accept it or refuse it in a message, and what it
accepted `run` must not end in a traceback.
"""

import contextlib
import functools
import io
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.campaign import tiny
from benchmarks.campaign.framework import Outcome, Try, scratch

ABOUT = "generated configs through `plan`, some of the accepted ones through `run`; accepted or refused in a message"
BATCH = 500  # configs of one try
RUNS = 1  # of those of a try that `plan` accepts
SECONDS = 60  # for one plan
RUN_SECONDS = 120
NUMBERS: tuple[Any, ...] = (
    *(0, 1, 2, 3, -1, -2, 7, 63, 64, 512, 10**6, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**13, 10**30, -(2**63)),
    *(0.5, 1.0, -0.5, 1e-30, 1e-9, 0.999999, 1e6, 1e30, 1e308, float("inf"), float("nan"), 5e-324),
)
TEXTS: tuple[str, ...] = (
    *("", " ", ".", "..", "/", "~", "???", "${a}", "²", "6" * 6000, "x" * 100_000, "a/b", "../x", "/etc/passwd", "/**"),
    *("**/*", "null", "nan", "é" * 300, "\0", "\n", "a\tb", "-", "--help", "{", "{}", "{a[0]}", "💥", "con", "C:\\x"),
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"a": {"b": 1}}, [1, "x"], {"": 1})
SMALL: dict[str, Any] = {
    "training": {"batch_size": 8, "validation_steps": 8},
    "architecture": {"block_size": 32, "n_layers": 1, "n_embd": 16, "n_head": 2},
    "logging": {"report_interval": 4},
    "data": {"max_documents": 50},
    "eval": {"evaluations": [], "limit": 4},
}


def tries(seed: int) -> Iterator[Try]:
    """Batches of configs, each of which its number makes."""
    number = 0
    while True:
        yield Try(f"configs {seed} {number}", functools.partial(batch, seed, number))
        number += 1


def batch(seed: int, number: int) -> Iterator[Outcome]:
    """Plan some configs; run a few of those that are accepted.

    Planning starts JAX, whose threads a fork would lose: it has its own process, and runs are forked from this one.
    """
    _quiet()
    found, log = scratch() / "planned.json", scratch() / "planned.log"
    found.unlink(missing_ok=True)
    code = tiny.forked(functools.partial(_plan_all, seed, number, found), log)
    if code or not found.exists():
        yield Outcome(
            "plan", f"exit code {code}: {' '.join(log.read_text(errors='replace').split())[-100:]}", held=False
        )
        return
    sys.stderr.write(log.read_text(errors="replace"))
    outcomes, accepted = json.loads(found.read_text())
    for outcome in outcomes:
        yield Outcome(*outcome)
    for index in accepted[:RUNS]:
        yield ran(generated(random.Random(f"{seed} {number} {index}")))


def _plan_all(seed: int, number: int, found: Path) -> int:
    """Plan the configs of a try; writes the outcomes, and the numbers of those that `run` may be given."""
    outcomes, accepted = [], []
    for index in range(BATCH):
        config = generated(random.Random(f"{seed} {number} {index}"))
        how, held = planned(config)
        outcomes.append((f"plan: {config['job'] if str(config['job']) in jobs() else 'no job'}", how, held))
        # Only those that write below the folder of the campaign are run.
        data = config.get("data")
        if how == "accepted" and isinstance(data, dict) and data.get("cache") == str(scratch() / "cache"):
            accepted.append(index)
    found.write_text(json.dumps([outcomes, accepted]))
    return 0


@functools.cache
def jobs() -> dict[str, dict[str, Any]]:
    """The options of every job that trains, by path."""
    from holdfast import registry
    from holdfast.config import schema
    from holdfast.training.config import config_classes

    return {job: dict(schema(*config_classes(job))) for job in registry.jobs.names()}


def generated(chance: random.Random) -> dict[str, Any]:
    """A config of some job with a few strange options."""
    job = chance.choice(sorted(jobs()))
    options = jobs()[job]
    config: dict[str, Any] = {"job": job, **{name: dict(values) for name, values in SMALL.items()}}
    config["data"]["cache"] = str(scratch() / "cache")
    if "training/dataset" in options:
        _curriculum(config, options, chance)
    for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3, 5))):
        path = chance.choice(sorted(options))
        _put(config, path, strange(options[path], chance))
    if chance.random() < 0.1:  # something that nobody declared, or a section that is a value
        _put(config, chance.choice(("training/nothing", "job/x", "training", "data/sources/x/path", "x")), _any(chance))
    return config


def _curriculum(config: dict[str, Any], options: dict[str, Any], chance: random.Random) -> None:
    """Stages, in a spelling of the job's."""
    data = [{"name": chance.choice(("arithmetic", "lists")), "style": chance.choice(("PADDED", "PACKED", "PMD"))}]
    default = options["training/tokens"].default
    if not isinstance(default, list):
        config["training"] |= {"tokens": 2048, "dataset": data}
        return
    if "stages" in options and chance.random() < 0.5:
        config["stages"] = [{"tokens": 2048, "data": data} for _ in default]
        if chance.random() < 0.3:
            stage = chance.choice(config["stages"])
            stage[chance.choice(("tokens", "beta", "lr", "overlap", "optimizer", "name", "data"))] = _any(chance)
        return
    config["training"] |= {"tokens": [2048] * len(default), "dataset": [data] * len(default)}


def strange(entry: Any, chance: random.Random) -> Any:
    """A value for an option: at its bounds, of its type, or of any."""
    kind = str(entry.type)
    roll = chance.random()
    if entry.choices and roll < 0.5:
        return chance.choice(list(entry.choices))
    if entry.bounds and roll < 0.4:
        edge = chance.choice(list(entry.bounds.values()))
        return edge + chance.choice((-1, 0, 1)) if "int" in kind else edge * chance.choice((0.5, 1.0, 1.0000001, 2.0))
    if ("int" in kind or "float" in kind) and roll < 0.75:
        value: Any = chance.choice(NUMBERS)
        return [value] * chance.choice((1, 2, 5)) if "List" in kind else value
    if "str" in kind and roll < 0.75:
        text = chance.choice(TEXTS)
        return [text] if "List" in kind else text
    return _any(chance)


def _any(chance: random.Random) -> Any:
    return chance.choice((chance.choice(NUMBERS), chance.choice(TEXTS), chance.choice(OTHERS)))


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split("/")
    for name in parents:
        inner = tree.get(name)
        if not isinstance(inner, dict):
            inner = tree[name] = {}
        tree = inner
    tree[last] = value


def write(config: dict[str, Any]) -> Path:
    """The config as a file."""
    import yaml

    path = scratch() / "config.yaml"
    path.write_text(yaml.safe_dump(config, allow_unicode=False, sort_keys=False), encoding="utf-8")
    return path


def _late(_: int, __: FrameType | None) -> None:
    raise TimeoutError


def planned(config: dict[str, Any]) -> tuple[str, bool]:
    """What `plan` says: accepted, refused, or a finding."""
    from holdfast.analysis.plan import plan_run
    from holdfast.cli.configs import read_config
    from holdfast.errors import RunError, UserError

    path = write(config)
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            plan_run(read_config(path, []).resolved())
    except (UserError, RunError) as error:
        return ("refused", True) if str(error).strip() else ("refused without a word", False)
    except TimeoutError:
        return f"no answer in {SECONDS} s: {_kept(path)}", False
    except Exception as error:
        print(f"{_kept(path)}:\n{''.join(traceback.format_exception(error)[-4:])}", file=sys.stderr)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}", False
    finally:
        signal.alarm(0)
    return "accepted", True


def _kept(path: Path) -> Path:
    """A copy of a config that is a finding."""
    folder = scratch().parent / "holdfast-findings"
    folder.mkdir(exist_ok=True)
    kept = folder / f"config-{len(list(folder.iterdir()))}.yaml"
    kept.write_bytes(path.read_bytes())
    return kept


def ran(config: dict[str, Any]) -> Outcome:
    """`run` of a config that `plan` accepted: it ends in a result or in a message."""
    path = write(config)
    what, log = f"run: {config['job']}", scratch() / "run.log"
    name = f"run-{random.getrandbits(48):x}"

    def run() -> int:
        from holdfast.cli.app import main

        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the time of a run, whatever it is doing
        signal.alarm(RUN_SECONDS)
        sys.argv = ["holdfast", "run", str(path), "--out", str(scratch() / "runs"), "--name", name, "--quiet"]
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    code = tiny.forked(run, log)
    said = log.read_text(errors="replace")
    if code == -signal.SIGALRM:
        return Outcome(what, "still training when the time was over")
    if "Traceback" in said or code not in (0, 1, 2):
        print(f"{_kept(path)}:\n{said[-3000:]}", file=sys.stderr)
        return Outcome(what, f"exit code {code}: {' '.join(said.split())[-100:]}", held=False)
    return Outcome(what, ("ended well", "failed with a message", "refused with a message")[code])


@functools.cache
def _quiet() -> None:
    """Where JAX runs, where relative paths begin, and what a measurement of this machine would give."""
    tiny.environment()
    tiny.import_all()
    here = scratch() / "here"  # relative paths lead nowhere else
    here.mkdir(exist_ok=True)
    os.chdir(here)
    from holdfast.analysis import plan
    from holdfast.models import derived

    plan.matmul_speed = lambda _: 1e11  # type: ignore[assignment]  # the machine's speed is not what is tried
    derived.boxed_params = functools.lru_cache(maxsize=512)(derived.boxed_params)  # equal models have equal shapes
