"""How far training has come, and what saves it on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """How far training has come, and how it ended."""

    steps: int = 0  # steps taken
    reason: str = "completed"  # or aborted (a callback asked for it), or interrupted
    train_loss: float | None = None  # of the last batch
    eval_loss: float | None = None  # of the held-out data, last evaluated
    first_eval_loss: float | None = None
    seconds: float = 0.0  # in all
    training_seconds: float = 0.0  # of them in steps
    tokens: int = 0  # targets learned from
    skipped: int = 0  # steps that changed nothing, because their numbers were not finite
    why: str | None = None  # the sentence of the callback that ended it
    eval_step: int | None = None  # the step after which the held-out data was last evaluated
    eval_scores: Mapping[str, float] = field(default_factory=dict)  # what the model reports beside eval_loss
    first_eval_scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of the steps alone."""
        return self.tokens / self.training_seconds if self.training_seconds else None


class Saver:
    """What saves a run on its way; this one does not."""

    def begin(self, metrics: Mapping[str, float]) -> None:
        """Called before the first step, with the scores of an evaluation then."""

    def wants(self, step: int) -> bool:
        """Whether it must be called after `step`, with the session as it stands then, whatever that step gives."""
        return False

    def after(self, outcome: Outcome, metrics: Mapping[str, float], last: bool) -> None:
        """Called at the end of each step, with the scores of an evaluation after this very step."""
