"""The callbacks that ship with toyexp."""

from toyexp import Register, hookimpl


@hookimpl
def register_callbacks(register: Register) -> None:
    """Register schedules, displays, recorders, exporters and callbacks that end a run."""
    from toyexp_callbacks import dashboard, events, plots, progress, sample, schedules, stopping

    for schedule in (schedules.Constant, schedules.Linear, schedules.Cosine, schedules.WarmupStableDecay):
        register(schedule)
        register(schedules.make_second(schedule))
    for cls in (
        progress.Progress,
        events.Events,
        dashboard.Wandb,
        dashboard.Tensorboard,
        dashboard.Trackio,
        sample.Sample,
        plots.Plots,
        stopping.EarlyStop,
        stopping.QualityGate,
        stopping.Watch,
    ):
        register(cls)
