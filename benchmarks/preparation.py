"""Preparation: its speed beside the tokenizer library's own, and its memory on a large file.

    python benchmarks/preparation.py --megabytes 2048 [--tokenizer bytes]

Writes a text file of that size into a temporary folder, encodes a part of it with the library alone, prepares it
all, and prints both speeds in CPU time and wall time and the peak of resident memory, worker processes included.
"""

import argparse
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.data.config import DataConfig
from holdfast.data.documents import SourceContext
from holdfast.data.prepare import prepare
from holdfast.data.sources import documents, find_source
from holdfast.data.tokenizers import Tokenizer, load_tokenizer
from holdfast.data.tokenizers.train import train_tokenizer


def paragraphs(megabytes: int) -> Iterator[str]:
    """Prose made of sentences that Python carries, shuffled, up to a size."""
    sentences = [
        sentence
        for document in documents("pydocs", "train", DataConfig())
        for sentence in document.text.replace("\n", " ").split(". ")
    ]
    rng = random.Random(0)
    size = 0
    while size < megabytes << 20:
        paragraph = ". ".join(rng.choices(sentences, k=8))
        size += len(paragraph.encode()) + 2
        yield paragraph


def _library(tokenizer: Tokenizer, folder: Path) -> Callable[[list[str]], object]:
    """The library's own batch encoding with the same tokenizer; for bytes, Python's."""
    if tokenizer.name == "bytes":
        return lambda texts: [text.encode() for text in texts]
    from tokenizers import Tokenizer as RustTokenizer

    tokenizer.save(folder)
    rust = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda texts: rust.encode_batch(texts, add_special_tokens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--tokenizer", default=None, help="as tokenizer/name; a byte-level BPE is trained if not given")
    parser.add_argument("--workers", type=int, default=0, help="as data/workers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "root" / "generated" / "train.txt"
        file.parent.mkdir(parents=True)
        with file.open("w", encoding="utf-8") as out:
            out.writelines(paragraph + "\n\n" for paragraph in paragraphs(options.megabytes))
        data = DataConfig(root=str(Path(folder) / "root"), cache=folder, workers=options.workers)
        if options.tokenizer is None:
            sample = [text for _, text in zip(range(20_000), paragraphs(16), strict=False)]
            tokenizer: Tokenizer = train_tokenizer(sample, 8192, "trained")
        else:
            tokenizer = load_tokenizer(options.tokenizer)
        library_encode = _library(tokenizer, Path(folder) / "tokenizer")
        source = find_source("generated", data)
        texts = [
            document.text
            for _, document in zip(range(8192), source.documents("train", SourceContext(data)), strict=False)
        ]
        sample_bytes = sum(len(text.encode()) for text in texts)
        cpu, wall = time.process_time(), time.perf_counter()
        for start in range(0, len(texts), 512):
            library_encode(texts[start : start + 512])
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        print(f"library: {sample_bytes / cpu / 1e6:.2f} MB a CPU second, {sample_bytes / wall / 1e6:.2f} MB/s")
        library = sample_bytes / cpu
        del texts
        cpu, wall = time.process_time(), time.perf_counter()
        made = prepare("generated", "train", data=data, tokenizer=tokenizer)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        print(f"prepare: {made.num_bytes / cpu / 1e6:.2f} MB a CPU second, {made.num_bytes / wall / 1e6:.2f} MB/s")
        if options.workers == 0:
            print(f"ratio in CPU time: {made.num_bytes / cpu / library:.2f}")
        peaks = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        print(f"peak resident memory: {peaks[0]:.0f} MB, largest worker {peaks[1]:.0f} MB; {made.num_tokens:,} tokens")


if __name__ == "__main__":
    main()
