"""Prepares a dataset in a process of its own, slowly and in many small commits, so that it can be killed."""

import sys

from holdfast.data import encode, prepare, shards
from holdfast.data.config import DataConfig
from holdfast.data.tokenizers import load_tokenizer

if __name__ == "__main__":
    encode.BATCH_CHARACTERS = 2_000
    prepare.JOURNAL_SECONDS = -1.0  # commit after every batch
    root, cache, name, tokenizer, workers, *shard = sys.argv[1:]
    data = DataConfig(root=root, cache=cache, workers=int(workers))
    if shard:
        shards.PORTION = 3
        one = shards.Shard.parse(*shard)
        found = prepare.prepare_shard(
            name, "train", one, data=data, tokenizer=load_tokenizer(tokenizer), progress=False
        )
        sys.exit(0 if found is None else print(found.num_documents))
    made = prepare.prepare(name, "train", data=data, tokenizer=load_tokenizer(tokenizer), progress=False)
    print(made.num_documents)
