"""Virtual environments of the peers: made once, each by itself, in the user's cache folder."""

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Exactly these: other versions of torch bring gigabytes of CUDA.
TORCH = ("torch==2.13.0", "numpy==2.4.6", "safetensors==0.8.0")
LEVANTER_VERSION, LIBTPU_VERSION = "1.2.dev1644", "0.0.42.1"
LEVANTER = (f"levanter=={LEVANTER_VERSION}", "haliax==1.4.dev453", "gitpython", "chex", "jax==0.10.2")
REQUIREMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "torch": (TORCH,),
    "transformers": (TORCH, ("transformers==5.22.2",)),
    "levanter": (LEVANTER,),
    "levanter-tpu": ((*LEVANTER, f"libtpu=={LIBTPU_VERSION}"),),  # compiles for TPUs; none is needed
}
STAMP = "complete"


@dataclass(frozen=True)
class Environment:
    """An interpreter, or the reason why there is none."""

    python: Path | None
    reason: str = ""


def folder() -> Path:
    """Where the environments are."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HOLDFAST_PEERS") or Path(base).expanduser() / "holdfast" / "peers")


def environment(name: str) -> Environment:
    """The environment of a peer, made now unless it is there; what pip says is the reason where it cannot be made."""
    wanted = REQUIREMENTS[name]
    digest = hashlib.sha256(repr((wanted, sys.version_info[:2])).encode()).hexdigest()[:8]
    place = folder() / f"{name}-{digest}"
    python = place / "bin" / "python"
    if (place / STAMP).exists():
        return Environment(python)
    print(f"Making the environment of {name} (some minutes the first time) ...", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    commands = [[sys.executable, "-m", "venv", str(place)]]
    # One group after the other: what the first one installed, the next takes as it is.
    commands += [[str(python), "-m", "pip", "install", "-qq", "--no-input", *group] for group in wanted]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in (done.stderr or done.stdout).splitlines() if line.startswith("ERROR")]
            return Environment(None, (said or done.stderr.splitlines() or ["it cannot be installed"])[-1][:300])
    (place / STAMP).touch()
    return Environment(python)
