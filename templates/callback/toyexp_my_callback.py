"""A callback that ends a run when it overfits. Change it into your own.

toyexp calls the methods marked @hookimpl, the hooks. Hooks named `on_...` are told what happened; `lr`, `factors` and
`stop_reason` return a value. Declare only the arguments that you need. `toyexp help plugins/callback` lists all hooks.
"""

from dataclasses import dataclass
from typing import ClassVar

from toyexp import Callback, UserError, hookimpl


@dataclass(eq=False)
class MyCallback(Callback):
    """End the run when the held-out loss is too far above the training loss."""

    name: ClassVar[str] = "my_callback"  # the name to type: `callbacks=[default,my_callback]`

    # Fields are settings: `callbacks.my_callback.gap=0.5`. The comment after a field is its help text.
    gap: float = 1.0  # end the run if held-out loss minus mean training loss exceeds this
    horizon: int = 50  # steps of the running mean of the training loss

    def __post_init__(self):
        """Initialise the state, which is not part of the settings."""
        self.mean = None  # running mean of the training loss
        self.reason = None

    def check(self):
        """Raise UserError for bad settings. The message names the key, its value and the allowed values."""
        if not self.gap > 0:
            raise UserError(f"callbacks.my_callback.gap={self.gap}: must be above 0")
        if self.horizon < 1:
            raise UserError(f"callbacks.my_callback.horizon={self.horizon}: must be at least 1")

    def should_wait(self, step):
        """Return False, so that a GPU need not wait for this callback: it uses metrics, never the weights."""
        return False

    @hookimpl
    def on_step(self, metrics):
        """Update the running mean of the training loss."""
        new = metrics["loss"]
        self.mean = new if self.mean is None else self.mean + (new - self.mean) / self.horizon

    @hookimpl
    def on_eval(self, run, step, metrics):
        """Compare the held-out and training loss. Emit an event, which other callbacks and events.jsonl receive."""
        if self.mean is None:  # before the first step
            return
        gap = metrics["loss"] - self.mean
        run.emit("gap", step=step, gap=gap)
        if gap > self.gap:
            self.reason = f"my_callback: held-out loss is {gap:.2f} above training loss, limit {self.gap:g}"

    @hookimpl
    def stop_reason(self):
        """Return a sentence to end the run after this step, or None to continue. A run that ends saves everything."""
        return self.reason

    def state(self):
        """Return the state for a checkpoint, as JSON values."""
        return {"mean": self.mean}

    def resume(self, state):
        """Restore the state that `state` returned, when a run is resumed."""
        self.mean = state["mean"]


@hookimpl
def register_callbacks(register):
    """Register the class. toyexp calls this function when it loads the module."""
    register(MyCallback)
