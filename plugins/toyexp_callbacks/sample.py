"""Samples of text from the model during training."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, ClassVar

import toyexp
from toyexp import Callback, Dataset, Run, RunPreview, UserError, hookimpl, is_changed, printable
from toyexp.base import require_range, stream

MAX_DELAY = 4.0  # seconds for which a sample may delay an interrupted run before it is cut off


@dataclass(eq=False)
class Sample(Callback):
    """Generate text at the end of the run, and every N steps with every=N."""

    name: ClassVar[str] = "sample"

    every: int = 0  # steps between samples; 0: only at the end
    prompt: str | None = None  # text to continue; null: the start of a held-out text
    tokens: int = 48  # number of tokens to generate
    temperature: float = 0.8  # divides the logits; 0: always the most likely token
    top_k: int = 40  # sample from this many most likely tokens; 0: all
    top_p: float = 1.0  # sample from the fewest most likely tokens that reach this total probability; 1: all
    min_p: float = 0.0  # sample from tokens with at least this fraction of the highest probability; 0: all

    def check(self) -> None:
        """Raise UserError for invalid settings."""
        require_range("callbacks.sample", self, every="[0,inf)", top_k="[0,inf)", tokens="[1,inf)")
        require_range("callbacks.sample", self, temperature="[0,100)", top_p="(0,1]", min_p="[0,1]")

    def should_wait(self, step: int) -> bool:
        """Return True if a sample is due at this step.

        The next step then waits, because sampling reads the weights of this step.
        """
        return bool(self.every) and step % self.every == 0

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Warn if the interval is longer than the run, or a sampling setting has no effect."""
        yield from preview.interval_warnings("callbacks.sample.every", self.every, "the only sample is at the end")
        changed = [key for key in ("top_k", "top_p", "min_p") if is_changed(self, key)]
        if not self.temperature and changed:
            setting = f"callbacks.sample.{changed[0]}={getattr(self, changed[0])}"
            yield f"{setting}: has no effect with callbacks.sample.temperature=0"

    def check_run(self, config: Mapping[str, Any], dataset: Dataset) -> None:
        """Encode the prompt. Raise UserError if the prompt is invalid or the data has no tokenizer."""
        if dataset.tokenizer is None:
            remedy = "set data.tokenizer=..., or " if "tokenizer" in config["data"] else ""
            raise UserError(f"callbacks.sample needs a tokenizer: {remedy}remove the callback with '~callbacks.sample'")
        if self.prompt is None:
            self._prompt = dataset.prompt()
            return
        try:
            self._prompt = dataset.tokenizer.prompt(self.prompt).tolist()
        except UserError as error:
            raise UserError(f"callbacks.sample.prompt={printable(self.prompt)}: {error}") from None

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Store the last completed step: 0 in a new run, the step of the checkpoint in a resumed one."""
        self._step = run.resumed_step

    @hookimpl
    def on_step(self, run: Run, step: int) -> None:
        """Generate a sample if one is due at this step."""
        self._step = step
        if self.every and step % self.every == 0 and step < run.steps:
            self._sample(run)

    @hookimpl
    def on_end(self, run: Run, reason: str) -> None:
        """Generate a sample from the final weights, unless the run failed or was interrupted."""
        if reason in ("completed", "aborted"):
            self._sample(run)

    def _sample(self, run: Run) -> None:
        tokenizer = run.dataset.tokenizer
        assert tokenizer is not None
        prompt = tokenizer.decode(self._prompt) if self.prompt is None else self.prompt
        sampling = toyexp.Sampling(self.temperature, self.top_k, self.top_p, self.min_p)
        random, ends, start = stream(run.seed, "sample", self._step), tokenizer.end_ids, time.monotonic()
        tokens = toyexp.generate_endlessly(run.session, self._prompt, sampling, random, tokenizer.vocab)

        def should_continue(token: int) -> bool:
            return token not in ends and not (run.stop_signals() and time.monotonic() - start > MAX_DELAY)

        ids = takewhile(should_continue, islice(tokens, self.tokens))
        text = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", errors="replace")
        run.emit("sample", step=self._step, prompt=prompt, text=text)
