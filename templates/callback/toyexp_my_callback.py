"""A callback of your own; as it stands, it ends a run that has begun to learn its training data by heart.

A callback hears of a run (`on_...`) and answers (`lr`, `factors`, `stop_reason`): methods marked @hookimpl, of whose
arguments each names those it uses. `toyexp.interfaces.hooks.RunHooks` has them all, with what they are told.
"""

from dataclasses import dataclass
from typing import ClassVar

from toyexp import Callback, UserError, hookimpl


@dataclass(eq=False)
class MyCallback(Callback):
    """Ends the run when the held-out loss is too far above the training loss."""

    name: ClassVar[str] = "my_callback"  # what `callbacks=[default,my_callback]` takes

    # Fields are settings, `callbacks.my_callback.gap=0.5`; the comment behind one is its help.
    gap: float = 1.0  # the held-out loss may be so much above the mean training loss
    horizon: int = 50  # steps that the mean reaches back

    def __post_init__(self):
        """What it remembers; these are no settings."""
        self.mean = None  # of the training loss
        self.reason = None

    def check(self):
        """Raises UserError for what cannot work: what was asked, and what is true."""
        if not self.gap > 0:
            raise UserError(f"callbacks.my_callback.gap={self.gap}: must be above 0")
        if self.horizon < 1:
            raise UserError(f"callbacks.my_callback.horizon={self.horizon}: must be at least 1")

    def should_wait(self, step):
        """Whether it has to see the weights after this step; one that only counts lets a GPU run ahead."""
        return False

    @hookimpl
    def on_step(self, metrics):
        """Keeps the running mean."""
        new = metrics["loss"]
        self.mean = new if self.mean is None else self.mean + (new - self.mean) / self.horizon

    @hookimpl
    def on_eval(self, run, step, metrics):
        """Compares; what is emitted stands in events.jsonl, and other callbacks hear of it."""
        if self.mean is None:  # before the first step
            return
        gap = metrics["loss"] - self.mean
        run.emit("gap", step=step, gap=gap)
        if gap > self.gap:
            self.reason = f"my_callback: held out is {gap:.2f} above training, over {self.gap:g}"

    @hookimpl
    def stop_reason(self):
        """A sentence ends the run after this step, with everything saved; None lets it go on."""
        return self.reason

    def state(self):
        """What a checkpoint keeps of it, as JSON takes it."""
        return {"mean": self.mean}

    def resume(self, state):
        """Takes that back when a run goes on."""
        self.mean = state["mean"]


@hookimpl
def register_callbacks(register):
    """What toyexp calls to learn of it."""
    register(MyCallback)
