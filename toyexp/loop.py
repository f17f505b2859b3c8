"""The training loop, once, for every recipe and engine. It trains correctly with no callback at all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from toyexp.bus import Bus, Run
from toyexp.data import Batches
from toyexp.engine import Batch
from toyexp.errors import RunFailed
from toyexp.optim import AdamW


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    steps: int  # steps taken
    reason: str  # completed, aborted (a callback asked for it), or interrupted
    train_loss: float | None  # of the last batch
    eval_loss: float | None  # of the held-out data, last evaluated
    first_eval_loss: float | None
    seconds: float
    tokens_per_second: float | None
    why: str | None = None  # the sentence of the callback that ended it
    eval_scores: Mapping[str, float] = field(default_factory=dict)  # what the model reports beside eval_loss
    first_eval_scores: Mapping[str, float] = field(default_factory=dict)


def train(
    run: Run, bus: Bus, batches: Batches, adamw: AdamW, eval_every: int, stopped: Callable[[], bool] = lambda: False
) -> Outcome:
    """Takes `run.steps` steps, evaluating before the first, every `eval_every` steps (0: never) and at the end.

    `stopped` is asked after every step, and ends the run early as interrupted. Raises RunFailed when the loss is no
    longer a finite number.
    """
    session = run.session
    held_out: Sequence[Batch] = batches.held_out() if eval_every else ()
    outcome = Outcome(0, "completed", None, None, None, 0.0, None)
    tokens = 0
    training = 0.0  # seconds spent in steps, without evaluation

    def evaluate(step: int) -> Outcome:
        loss, scores = session.evaluate(held_out), run.plan.model.scores(session, held_out)
        bus.hook.on_eval(run=run, step=step, metrics={"loss": loss, "ppl": math.exp(min(loss, 700)), **scores})
        return replace(outcome, eval_loss=loss, eval_scores=scores)

    began = time.perf_counter()
    if held_out:
        outcome = evaluate(0)
        outcome = replace(outcome, first_eval_loss=outcome.eval_loss, first_eval_scores=outcome.eval_scores)

    for step in range(run.steps):
        started = time.perf_counter()
        answer = bus.hook.lr(run=run, step=step, steps=run.steps)
        lr = run.lr if answer is None else answer
        batch = batches.batch(step)
        loss, grad_norm = session.step(batch, replace(adamw, lr=lr).hp_for_step(step))
        seconds = time.perf_counter() - started

        done = step + 1
        count = int(batch["weights"].astype(bool).sum())
        tokens, training = tokens + count, training + seconds
        metrics = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens": count, "wall_us": seconds * 1e6}
        bus.hook.on_step(run=run, step=done, metrics=metrics)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RunFailed(
                f"step {done}: the loss is {loss} and the gradient norm {grad_norm}; "
                f"try a lower lr (it was {lr:g}) or optim.grad_clip=1"
            )

        interrupted = stopped()
        due = bool(held_out) and not interrupted and (done % eval_every == 0 or done == run.steps)
        if due:
            outcome = evaluate(done)
        why = bus.hook.stop_reason(run=run, step=done, metrics=metrics)
        if interrupted or why or done == run.steps:
            reason = "interrupted" if interrupted else "aborted" if why else "completed"
            if held_out and not due and not interrupted:
                outcome = evaluate(done)
            outcome = replace(outcome, steps=done, reason=reason, train_loss=loss, why=why)
            break

    rate = tokens / training if training else None
    return replace(outcome, seconds=time.perf_counter() - began, tokens_per_second=rate)
