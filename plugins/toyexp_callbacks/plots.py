"""Loss and learning-rate curves as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Callback, Plan, Run, hookimpl, needed


@dataclass(eq=False)
class Plots(Callback):
    """Draws the loss and learning-rate curves to plots/curves.png."""

    name: ClassVar[str] = "plots"

    def __post_init__(self) -> None:
        self._steps: list[tuple[int, float, float]] = []
        self._held_out: list[tuple[int, float]] = []
        self._warned: list[int] = []

    def check(self) -> None:
        """Raises Unavailable without matplotlib."""
        with needed("matplotlib", "pip install 'toyexp[plots]'"):
            import matplotlib.backends.backend_agg
            import matplotlib.figure  # noqa: F401 - what on_end will use

    def looks(self, step: int) -> bool:
        """Never: it goes by what it is told."""
        return False

    def outputs(self, plan: Plan) -> Sequence[str]:
        """The picture."""
        return ["plots/curves.png"]

    @hookimpl
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Notes a point."""
        self._steps.append((step, metrics["loss"], metrics["lr"]))

    @hookimpl
    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Notes a held-out point."""
        self._held_out.append((step, metrics["loss"]))

    @hookimpl
    def on_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Notes where something was warned of."""
        if kind == "warning" and "step" in fields:
            self._warned.append(fields["step"])

    @hookimpl
    def on_end(self, run: Run) -> None:
        """Draws what there is."""
        if not self._steps:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display, and no global state
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 6), layout="constrained")
        FigureCanvasAgg(figure)
        loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        steps, losses, lrs = zip(*self._steps, strict=True)
        loss.plot(steps, losses, linewidth=0.8, alpha=0.6, label="training batch")
        if self._held_out:
            loss.plot(*zip(*self._held_out, strict=True), marker="o", markersize=3, label="held-out")
        for step in self._warned:
            loss.axvline(step, color="tab:red", linewidth=0.6, linestyle=":")
        loss.set_ylabel("loss (nats per target)")
        loss.set_title(f"{run.name} on {run.engine}, seed {run.seed}")
        loss.legend(frameon=False)
        rate.plot(steps, lrs, color="tab:gray")
        rate.set_ylabel("learning rate")
        rate.set_xlabel("step")
        for axes in (loss, rate):
            axes.grid(alpha=0.2)
        path = run.dir / "plots" / "curves.png"
        path.parent.mkdir(exist_ok=True)
        with run.output(path) as place:
            figure.savefig(place, dpi=120)
        run.emit("export", path=str(path), what="plot")
