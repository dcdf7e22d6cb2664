"""What the parts of a benchmark share: where files go, how many rounds, and our own options."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES, TINY, Shape, options, write_corpus

OUT = Path(__file__).parent / "out"
SHARED = Path(os.environ.get("HOLDFAST_SHARED", Path(__file__).parents[2] / "shared"))


@dataclass(frozen=True)
class Bench:
    """One run of the benchmarks.

    Args:
        rounds: how often each worker is measured.
        quick: few and tiny, to see that the harness works; the figures mean nothing.
    """

    folder: Path
    rounds: int
    quick: bool = False

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes to measure."""
        return dict.fromkeys(SHAPES, TINY) if self.quick else SHAPES

    @property
    def cache(self) -> Path:
        """TokenStore stores of this run."""
        return self.folder / "cache"

    def log(self, name: str) -> Path:
        """Where a worker's messages go."""
        path = self.folder / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def options(self, name: str) -> dict[str, Any]:
        """The config of our own run of a shape; its corpus is written now unless it is there."""
        corpus = self.folder / name / "corpus"
        if not corpus.exists():
            write_corpus(corpus, self.shapes[name])
        return options(self.shapes[name], corpus, self.cache)


def say(text: str) -> None:
    """Tell the user how far it is."""
    print(text, flush=True)
