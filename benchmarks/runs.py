"""`holdfast run` as a user starts it, watched from outside."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.workers import ROOT, environment

JOB = "gpt/train/pretrain"


def write_config(path: Path, config: dict[str, Any]) -> Path:
    """A config file for the command line."""
    path.write_text(yaml.safe_dump({"job": JOB, **config}))
    return path


def holdfast(*arguments: str, cache: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the command line with a cache folder of its own."""
    variables = {**environment(), "HOLDFAST_CACHE": str(cache)}
    command = [sys.executable, "-m", "holdfast", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log.open("w"), stderr=subprocess.STDOUT)


def train_records(metrics: Path) -> list[dict[str, Any]]:
    """The train records that are written so far."""
    if not metrics.exists():
        return []
    data = metrics.read_bytes()
    records = map(json.loads, data[: data.rfind(b"\n") + 1].splitlines())
    return [record for record in records if record["kind"] == "train"]


def watch(process: subprocess.Popen[bytes], every: float) -> Iterator[int]:
    """Resident bytes of a process, again and again until it ends."""
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            yield watched.memory_info().rss
        except psutil.Error:
            return
        time.sleep(every)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that has shown what it had to."""
    process.kill()
    process.wait()


def check(process: subprocess.Popen[bytes], log: Path) -> None:
    """Complain about a process that failed."""
    if process.wait():
        raise RuntimeError(f"{os.fspath(log)}: {log.read_text(errors='replace')[-500:]}")
