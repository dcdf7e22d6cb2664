"""Settings of the whole suite: compiled functions are shared between tests through JAX's cache."""

import os
import tempfile
from pathlib import Path

import hypothesis

# One folder for a run of the suite, also when it is spread over several processes.
SUITE = os.environ.setdefault("HOLDFAST_TEST_SUITE", f"{os.getpid()}")
CACHE = Path(tempfile.gettempdir()) / f"holdfast-tests-{os.getuid()}-{SUITE}"
os.environ.setdefault("HOLDFAST_CACHE", str(CACHE))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# What is compiled here runs for moments and is compiled for longer: LLVM need not make it fast. Programs that
# train for longer, in processes of their own, are started without this flag.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()

# In CI the same examples every time: a new counter-example is found at a desk, not by whoever submits next.
# Nowhere a limit of time: a machine that is busy is no counter-example.
hypothesis.settings.register_profile("desk", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "desk")
