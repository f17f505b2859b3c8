"""Text from the model while it learns."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, ClassVar

import toyexp
from toyexp import Callback, Dataset, Run, RunPreview, UserError, hookimpl, is_changed, printable
from toyexp.base import require_range, stream

PATIENCE = 4.0  # seconds a text takes at most once the run was asked to end; what is cut short is not taken again


@dataclass(eq=False)
class Sample(Callback):
    """Lets the model write some text, at the end and every so many steps."""

    name: ClassVar[str] = "sample"

    every: int = 0  # steps between samples; 0: only at the end
    prompt: str | None = None  # text to continue; null: how a text of the held-out data begins
    tokens: int = 48  # tokens to write
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 40  # choose among this many likeliest tokens; 0: all
    top_p: float = 1.0  # and among the fewest that together have this probability; 1: all
    min_p: float = 0.0  # and among those with this share of the likeliest one's probability; 0: all

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        require_range("callbacks.sample", self, every="[0,inf)", top_k="[0,inf)", tokens="[1,inf)")
        require_range("callbacks.sample", self, temperature="[0,100)", top_p="(0,1]", min_p="[0,1]")

    def should_wait(self, step: int) -> bool:
        """Where it samples."""
        return bool(self.every) and step % self.every == 0

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That there is one sample alone, and that nothing is drawn."""
        yield from preview.interval_warnings("callbacks.sample.every", self.every, "there is a sample at the end")
        drawing = [key for key in ("top_k", "top_p", "min_p") if is_changed(self, key)]
        if not self.temperature and drawing:
            given = f"callbacks.sample.{drawing[0]}={getattr(self, drawing[0])}"
            yield f"{given}: with callbacks.sample.temperature=0 the likeliest token is taken, nothing is drawn"

    def check_run(self, config: Mapping[str, Any], dataset: Dataset) -> None:
        """Encodes the prompt, so that one the tokenizer cannot take is refused before anything is built."""
        if dataset.tokenizer is None:
            give = "give data.tokenizer=..., or " if "tokenizer" in config["data"] else ""
            raise UserError(f"callbacks.sample needs a tokenizer: {give}drop '~callbacks.sample'")
        if self.prompt is None:
            self._prompt = dataset.prompt()
            return
        try:
            self._prompt = dataset.tokenizer.prompt(self.prompt).tolist()
        except UserError as error:
            raise UserError(f"callbacks.sample.prompt={printable(self.prompt)}: {error}") from None

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Notes where a resumed run stands."""
        self._step = run.resumed_step

    @hookimpl
    def on_step(self, run: Run, step: int) -> None:
        """Samples when it is time."""
        self._step = step
        if self.every and step % self.every == 0 and step < run.steps:
            self._sample(run)

    @hookimpl
    def on_end(self, run: Run, reason: str) -> None:
        """Samples from the final weights, unless someone waits for an interrupted run to end."""
        if reason in ("completed", "aborted"):
            self._sample(run)

    def _sample(self, run: Run) -> None:
        tokenizer = run.dataset.tokenizer
        assert tokenizer is not None
        prompt = tokenizer.decode(self._prompt) if self.prompt is None else self.prompt
        sampling = toyexp.Sampling(self.temperature, self.top_k, self.top_p, self.min_p)
        words, last, began = stream(run.seed, "sample", self._step), tokenizer.ends, time.monotonic()
        drawn = toyexp.generate_endlessly(run.session, self._prompt, sampling, words, tokenizer.vocab)

        def goes_on(token: int) -> bool:
            return token not in last and not (run.stop_signals() and time.monotonic() - began > PATIENCE)

        ids = takewhile(goes_on, islice(drawn, self.tokens))
        text = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", errors="replace")
        run.emit("sample", step=self._step, prompt=prompt, text=text)
