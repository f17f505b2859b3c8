"""Data: sums such as 27+58=85, one sum per line and one token per character. Change it into your own.

`open` reads the data and returns a `TokenDataset` (or an `ImageDataset`), which makes the batches. Batch k of a seed is
the same on every engine, in every process and in a resumed run.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from toyexp import TOKENS, Data, Kind, TokenDataset, UserError, hookimpl
from toyexp.tokenizers import Characters


@dataclass
class MyData(Data):
    """Sums of two numbers, such as 27+58=85."""

    name: ClassVar[str] = "my_data"  # the name to type: `data=my_data`
    gives: ClassVar[Kind] = TOKENS  # the kind of data; IMAGES is another

    # Fields are settings: `data.digits=3`. The comment after a field is its help text.
    digits: int = 2  # maximum number of digits of a summand
    val_fraction: float = 0.1  # fraction of the sums held out for validation; every seed holds out the same sums

    def check(self):
        """Raise UserError for bad settings and missing files, before the data is opened."""
        if self.digits not in (1, 2, 3):
            raise UserError(f"data.digits={self.digits}: must be 1, 2 or 3")
        if not 0 < self.val_fraction < 1:
            raise UserError(f"data.val_fraction={self.val_fraction}: must be above 0 and below 1")

    def open(self, vocabulary):
        """Return the data set. `vocabulary`, a GGUF whose tokenizer the recipe suggests, is not used here."""
        numbers = range(10**self.digits)
        lines = [f"{a}+{b}={a + b}\n" for a in numbers for b in numbers]
        np.random.default_rng(0).shuffle(lines)  # a fixed seed, so that every run holds out the same sums
        cut = round(len(lines) * (1 - self.val_fraction))
        tokenizer = Characters("0123456789+=\n")
        train, held_out = (tokenizer.encode("".join(part)) for part in (lines[:cut], lines[cut:]))
        facts = {"sums": len(lines)}  # added to what events.jsonl records: token counts and a digest
        return TokenDataset(train, held_out, tokenizer, tokenizer.vocab, eval_batches=16, facts=facts)


@hookimpl
def register_data(register):
    """Register the class. toyexp calls this function when it loads the module."""
    register(MyData)
