"""The campaign: thousands of seeded faults against Holdfast, each of which must be noticed or change nothing.

`python -m benchmarks.campaign` (`make campaign`) tries one part after the other, prints what was tried and what held,
and keeps counts in `benchmarks/results/campaign/PART.csv`, so that it can be stopped at any time and goes on where it
was. `--write` writes the table of all parts into `docs/reliability.md`.

A part is one file in `benchmarks/campaign/parts/`, found by its name. It has

    ABOUT = "one line: what is done, and what has to hold"

    def tries(seed: int) -> Iterator[Try]: ...

`tries` yields the same sequence for the same seed, for as long as it likes; it is asked again after a pause, and what
was tried before is passed over without being done, so that yielding a `Try` must be cheap. What a part needs
(a finished run, a folder) it makes when the first `act` is called: `functools.cache` on a function does that.
`Try.act` does one thing and returns what came of it:

    Outcome("state/_METADATA", "noticed")               what it was done to, and how it held
    Outcome("metrics.jsonl", "trained on", held=False)  nothing may be silent or lost: this one is a finding

An `act` may return several outcomes (a run that is killed six times), and one that raises is a finding too. Every part
runs in a process of its own that has not started JAX yet, with `scratch()` as its folder.
"""

from benchmarks.campaign.framework import Outcome, Try, scratch

__all__ = ["Outcome", "Try", "scratch"]
