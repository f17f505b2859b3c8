"""Data of your own; as it stands, sums such as 27+58=85, a line each, a character a token.

Data are opened once and give batches by number: batch k of a seed is the same on every engine, in every process and
after a resume. `TokenDataset` sees to that, and so does `ImageDataset` for pictures; what is left is the reading.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from toyexp import TOKENS, Data, Kind, TokenDataset, UserError, hookimpl
from toyexp.tokenizers import Characters


@dataclass
class MyData(Data):
    """Sums of two numbers, such as 27+58=85."""

    name: ClassVar[str] = "my_data"  # what `data=` takes
    gives: ClassVar[Kind] = TOKENS  # the kind of data; IMAGES is another

    # Fields are settings, `data.digits=3`; the comment behind one is its help.
    digits: int = 2  # of each number that is added, at most
    val_fraction: float = 0.1  # of all sums, held out from training; the same ones whatever the seed

    def check(self):
        """Raises UserError for what cannot work, a file that is not there among it, before anything is opened."""
        if self.digits not in (1, 2, 3):
            raise UserError(f"data.digits={self.digits}: must be 1, 2 or 3")
        if not 0 < self.val_fraction < 1:
            raise UserError(f"data.val_fraction={self.val_fraction}: must be above 0 and below 1")

    def open(self, vocabulary):
        """The opened data. `vocabulary` is a GGUF whose tokenizer the recipe would like; these have their own."""
        numbers = range(10**self.digits)
        lines = [f"{a}+{b}={a + b}\n" for a in numbers for b in numbers]
        np.random.default_rng(0).shuffle(lines)  # a fixed seed: what is held out is held out in every run
        cut = round(len(lines) * (1 - self.val_fraction))
        tokenizer = Characters("0123456789+=\n")
        train, held_out = (tokenizer.encode("".join(part)) for part in (lines[:cut], lines[cut:]))
        facts = {"sums": len(lines)}  # what events.jsonl records, beside the counts of tokens and a digest
        return TokenDataset(train, held_out, tokenizer, tokenizer.vocab, eval_batches=16, facts=facts)


@hookimpl
def register_data(register):
    """What toyexp calls to learn of it."""
    register(MyData)
