"""What a run needs of a dataset of tokens: loaders, vocabulary, tokenizer."""

from dataclasses import dataclass

import torch

from data.prepare import ensure_dataset
from data.tokenizer import load_dataset_tokenizer
from train.dataloader import DataError, DataLoader
from train.distributed import from_main

GPT2_VOCABULARY = 50257  # of raw token files that say nothing else, as nanoGPT's and llm.c's


@dataclass
class TokenData:
    train: DataLoader
    val: DataLoader | None
    vocab_size: int
    tokenizer: object              # None where the folder says nothing about it
    token_bytes: torch.Tensor | None   # (vocab_size,) bytes of text each id stands for
    folder: str

    def announce(self, log):
        log(f"Loading data from {self.folder}...")
        log(f"[train] Data loaded. Length: {self.train.n_tokens:,} tokens")
        if self.val is not None:
            log(f"[val] Data loaded. Length: {self.val.n_tokens:,} tokens")


def open_token_data(config, micro_batch, ranks):
    """The TokenData of a run; a built-in dataset is prepared on first use."""
    c = config
    from_main(lambda: ensure_dataset(c.data_dir), ranks)
    tokenizer = load_dataset_tokenizer(c.data_dir)
    def load(split, batch_size, rank, world_size, vocab_size):
        return DataLoader(c.data_dir, batch_size, c.block_size, split, c.seed, rank, world_size,
                          vocab_size)
    mine = ("train", micro_batch, ranks.rank, ranks.world_size)
    train = load(*mine, c.vocab_size or (tokenizer.n_vocab if tokenizer else None))
    if train.vocab_size is None:  # again, so that every id is checked
        train = load(*mine, GPT2_VOCABULARY)
    vocab_size = train.vocab_size
    if tokenizer and tokenizer.n_vocab > vocab_size:
        raise DataError(f"vocab_size: {vocab_size} is below the {tokenizer.n_vocab} of the "
                        f"tokenizer of {c.data_dir}; leave vocab_size out to take the data's")
    val = load("val", c.batch_size, 0, 1, vocab_size) if c.eval_interval else None
    token_bytes = None
    if tokenizer:
        token_bytes = torch.zeros(vocab_size, dtype=torch.int64)
        token_bytes[:tokenizer.n_vocab] = torch.from_numpy(tokenizer.token_bytes())
    return TokenData(train, val, vocab_size, tokenizer, token_bytes, c.data_dir)
