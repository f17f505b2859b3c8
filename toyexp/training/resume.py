"""Resume a run: find its directory, check that its settings belong to the same experiment, and restore its state."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError, printable
from toyexp.base.files import explain_missing, open_file
from toyexp.base.formatting import format_value, short_path
from toyexp.base.ownership import SWEEP_FILE, Ledger, require_inside, require_unlocked
from toyexp.base.validators import is_integer
from toyexp.interfaces.callback import Callback
from toyexp.interfaces.data import Data
from toyexp.interfaces.run_preview import default_settings
from toyexp.interfaces.snapshot import state_misfit
from toyexp.training import checkpoint
from toyexp.training.provenance import MOVED, parse_origin, require_own_checkpoint, source_digests
from toyexp.training.run_config import ASIDE_KEYS, FREE_KEYS, Config, Outcome, Prepared
from toyexp.training.rundir import read_settings

log = logging.getLogger("toyexp")

AUTO = "auto"


@dataclass(frozen=True)
class ResumeState:
    """State from which a resumed run continues: its checkpoint, and how its settings differ from the saved ones."""

    checkpoint: checkpoint.Checkpoint
    outcome: Outcome  # progress at the checkpoint
    changed: Mapping[str, tuple[Any, Any]]  # changed settings: value then and now
    added: Mapping[str, Any]  # defaults of settings that are newer than the run and affect numbers
    damaged: list[str]  # an error per newer checkpoint that was skipped

    def lines(self) -> list[str]:
        """Return the lines to print for the user: damaged checkpoints that were skipped, and a summary.

        The summary has the step of the checkpoint, and the changed and new settings.
        """
        changes = [_change(key, a, b) for key, (a, b) in self.changed.items()]
        new = [f"{printable(key)}={printable(format_value(value))}" for key, value in self.added.items()]
        summary = f"resumed from step {self.checkpoint.step}" + (f"; changed: {', '.join(changes)}" if changes else "")
        summary += f"; new settings: {', '.join(new)}" if new else ""
        return [*(f"damaged {line}; using the previous checkpoint" for line in self.damaged), summary]

    def facts(self) -> dict[str, Any]:
        """Return the fields of the event `resume`."""
        return {
            "step": self.checkpoint.step,
            "checkpoint": self.checkpoint.path.name,
            "changed": {key: list(pair) for key, pair in self.changed.items()},
            "added": dict(self.added),
            "damaged": self.damaged,
        }

    def inexactness(self, engine: Mapping[str, Any]) -> str | None:
        """Return why the steps of the resumed run are not bit-identical to those of an uninterrupted run.

        The reason is a property of the engine that has changed: `engine` is the description of the current engine.
        Return None if no property has changed.
        """
        saved = self.checkpoint.state["engine"]
        for key in ("devices", "kind", "framework", "device", "dtype", "threads", "profile", "compile"):
            default = 1 if key == "devices" else None
            if saved.get(key, default) != engine.get(key, default):
                changed = f"engine {key} was {saved.get(key, default)} and is {engine.get(key, default)}"
                return f"{changed}: further steps are not bit-identical"
        return None


def _change(key: str, old: Any, new: Any) -> str:
    if isinstance(new, Mapping) or isinstance(old, Mapping):  # a callback
        return f"{printable(key)} {'added' if old is None else 'removed'}"
    return f"{printable(key)} {printable(format_value(old))} -> {printable(format_value(new))}"


class Complete(UserError):
    """Error: the run to resume has already taken all its steps."""

    def __init__(self, text: str, run: Path):
        self.run = run
        super().__init__(text)


def find_newest(parent: Path, name: str) -> Path | None:
    """Return the directory of the newest run in `parent` that is called `name` and has a checkpoint, or None."""
    runs = [d for d in parent.iterdir() if checkpoint.list_checkpoints(d / "checkpoints")] if parent.is_dir() else []
    return max((d for d in runs if _saved_config(d).get("name") == name), key=lambda d: d.name, default=None)


def saved_state(directory: Path) -> Mapping[str, Any]:
    """Return the state of a run's newest checkpoint; {} if it cannot be read."""
    newest = next(iter(checkpoint.list_checkpoints(directory / "checkpoints").values()), None)
    return checkpoint.read_json_or_empty(newest / checkpoint.STATE) if newest else {}


def _saved_config(directory: Path) -> Mapping[str, Any]:
    config = saved_state(directory).get("config")
    return config if isinstance(config, dict) else {}


def restore_filled_settings(directory: Path, data: Data) -> None:
    """For each empty setting named in `data.fills`, set the value that the run in `directory` saved.

    A data plugin fills in these settings when it opens its data.
    """
    saved = _saved_config(directory).get("data")
    for key in data.fills:
        if not getattr(data, key) and isinstance(saved, dict) and isinstance(saved.get(key), str):
            setattr(data, key, saved[key])
    data.check()


def require_run(directory: Path, key: str) -> None:
    """Raise UserError unless `directory` is a run that can be resumed; `key` is the setting that names it.

    The run must have a checkpoint, no link that leads out of its directory, and no process that is training it.
    """
    config = directory / "config.yaml"
    if config.is_symlink() or config.is_file():
        require_inside(directory)
    if not config.is_file():
        raise UserError(f"{key}={directory}: {_no_run(directory, key)}")
    require_unlocked(directory)
    if not checkpoint.list_checkpoints(directory / "checkpoints"):
        settings = read_settings(config)
        if "checkpoint_every" not in settings:
            raise UserError(f"{key}={directory}: is not a run: its config.yaml was not written by toyexp")
        every = printable(str(settings["checkpoint_every"]))
        problem = f"the run has no checkpoint: its checkpoints/ is empty or missing (checkpoint_every={every})"
        raise UserError(f"{key}={directory}: {problem}; start a new run")


def _no_run(path: Path, key: str) -> str:
    if not path.exists():
        return explain_missing(path)
    if (path / SWEEP_FILE).is_file():
        return f"is a sweep; to resume it: sweep.resume={path}"
    parents = [p for p in path.absolute().parents if (p / "checkpoints").is_dir()]
    children = sorted((p.parent for p in path.glob("*/checkpoints")), key=lambda d: d.name, reverse=True)
    hint = f"; did you mean {key}={short_path(candidates[0])}?" if (candidates := parents + children) else ""
    return ("is not a run (no config.yaml)" if path.is_dir() else "is not a run directory") + hint


def load_resume_state(directory: Path, prepared: Prepared) -> ResumeState:
    """Return the state from which `prepared` resumes the run in `directory`: its newest valid checkpoint.

    Raise UserError if `prepared` is another experiment than the run, or if no checkpoint is valid. Raise Complete if
    the run has taken all its steps.
    """
    saved, damaged = checkpoint.read_newest(directory / "checkpoints")
    if saved is None:
        raise UserError(f"resume={short_path(directory)}: no checkpoint is valid: {'; '.join(damaged)}")
    state, settings = saved.state, prepared.config.settings
    parts, saved_origin = ("outcome", "callbacks", "engine", "config", "scores"), parse_origin(state)
    if not all(isinstance(state.get(part), dict) for part in parts) or not saved_origin.sources:
        raise UserError(f"{saved.path}: {checkpoint.STATE} is damaged: it lacks some keys; remove this checkpoint")
    require_own_checkpoint(saved.path, state)
    outcome = _outcome(saved)
    plain, complete = prepared.config.plain, with_defaults(state["config"], prepared.config)
    changed = dict(differences(complete, plain))
    new = dict(differences(state["config"], {k: v for k, v in complete.items() if k in plain}))
    added = {k: value for k, (old, value) in new.items() if old is None and k.split(".")[0] not in ASIDE_KEYS}
    free = {*FREE_KEYS, *(key for key, roles in MOVED.items() if saved_origin.sources.keys() & {*roles})}
    fixed = {k: v for k, v in changed.items() if not {k, k.split(".")[0]} & free}
    changes = [
        f"{printable(k)} was {printable(format_value(a))} and is {printable(format_value(b))}"
        for k, (a, b) in fixed.items()
    ]
    if changes:
        more = f", and {len(changes) - 3} more" if len(changes) > 3 else ""
        problem = f"the run has other settings or data: {'; '.join(changes[:3])}{more}"
        raise UserError(f"resume={short_path(directory)}: {problem}; to start a new run, set another name=...")
    if changes := saved_origin.list_changes(source_digests(prepared)):
        role, places = changes[0].split()[-2], [key.split(".") for key in MOVED]
        paths = [f" ({s}.{n}={plain[s][n]})" for s, n in places if role in MOVED[f"{s}.{n}"] and plain[s].get(n)]
        remedy = f"put the old file{''.join(paths)} back, or start a new run (name=...)"
        raise UserError(f"resume={short_path(directory)}: {changes[0]} since the run started; {remedy}")
    if saved.step > settings.steps:
        raise UserError(f"steps={settings.steps}: the run is already at step {saved.step}; set a larger number")
    result = checkpoint.read_result(directory)
    if saved.step == settings.steps and result.get("reason") == "completed" and not result.get("error"):
        raise Complete(
            f"{short_path(directory)}: is complete, {saved.step} of {settings.steps} steps; "
            f"to train longer: resume={short_path(directory)} steps={2 * settings.steps}",
            directory,
        )
    if misfit := state_misfit(prepared.plan, saved.arrays):
        raise UserError(f"{saved.path / checkpoint.ARRAYS}: {misfit}")
    _require_unchanged_outputs(directory, prepared)
    _restore_callbacks(saved, prepared.config.callbacks)
    changed = {k: v for k, v in changed.items() if not k.startswith(("resume", "plugins"))}
    return ResumeState(saved, outcome, changed, added, damaged)


def _require_unchanged_outputs(directory: Path, prepared: Prepared) -> None:
    outputs = [name for callback in prepared.config.callbacks.values() for name in callback.outputs(prepared.plan)]
    ledger = Ledger.open(directory)
    for path in ledger.foreign_paths(["result.json", *outputs]):
        is_changed = ledger.is_replaced(path)
        history = "was changed or cut off since the run wrote it" if is_changed else "was not written by this run"
        problem = f"{short_path(path)} {history} and would be replaced"
        if path.is_file():
            open_file(path).close()  # raises if it cannot be read
        raise UserError(f"resume={short_path(directory)}: {problem}; move it away first")


def _outcome(saved: checkpoint.Checkpoint) -> Outcome:
    try:
        outcome = checkpoint.rebuild_dataclass(Outcome, saved.state["outcome"])
    except ValueError as error:
        raise UserError(f"{saved.path / checkpoint.STATE}: outcome.{error}") from None
    if outcome.steps != saved.step:
        raise UserError(f"{saved.path}: damaged checkpoint: {checkpoint.STATE} is of step {outcome.steps}; remove it")
    for part, kind in (("scores", Mapping[str, float | None]), ("evals", Mapping[str, Mapping[str, float | None]])):
        scores = saved.state.get(part, {})
        if not checkpoint.matches_type(scores, kind) or not all(is_integer(k, 0, saved.step) for k in scores):
            raise UserError(f"{saved.path / checkpoint.STATE}: has invalid {part}; remove this checkpoint")
    return outcome


def _restore_callbacks(saved_checkpoint: checkpoint.Checkpoint, callbacks: Mapping[str, Callback]) -> None:
    saved = saved_checkpoint.state["config"].get("callbacks")
    for name, callback in callbacks.items():
        if not isinstance(saved, dict) or name not in saved:
            callback.join(saved_checkpoint.step)
        if name in saved_checkpoint.state["callbacks"]:
            try:
                callback.resume(saved_checkpoint.state["callbacks"][name])
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                cause = f"{type(error).__name__}: {printable(str(error))}"
                state = saved_checkpoint.path / checkpoint.STATE
                raise UserError(f"{state}: invalid state ({cause}); to go on without it: '~callbacks.{name}'") from None


def with_defaults(saved: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the saved configuration `saved`, with defaults for settings that toyexp did not have when it was saved."""
    parts = {kind: getattr(config, kind) for kind, settings in config.plain.items() if isinstance(settings, Mapping)}
    del parts["callbacks"]
    callbacks = _fill_defaults(saved.get("callbacks"), config.plain["callbacks"], config.callbacks)
    return {
        **default_settings(config.settings), **saved, "callbacks": callbacks,
        **_fill_defaults({kind: saved.get(kind) for kind in parts}, config.plain, parts),
    }  # fmt: skip


def _fill_defaults(saved: Any, current: Mapping[str, Any], parts: Mapping[str, Any]) -> Any:
    """Return the saved settings `saved`, with the defaults of settings that toyexp has added since.

    `parts` maps keys to the current parts; a part that has another name in `saved` stays as saved.
    """
    if not isinstance(saved, Mapping):
        return saved
    filled = dict(saved)
    for kind, part in parts.items():
        node = saved.get(kind)
        if isinstance(node, Mapping) and node.get("name") == current[kind]["name"]:
            filled[kind] = {**{k: v for k, v in default_settings(part).items() if k in current[kind]}, **node}
    return filled


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield (dotted key, (old value, new value)) for each difference between two nested configurations.

    If the `name` of a part differs, only the name is yielded.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        old, new = ({str(name): value for name, value in node.items()} for node in (old, new))  # JSON has text keys
        is_other_part = bool(key) and old.get("name") != new.get("name")  # its settings are not comparable
        for name in ["name"] if is_other_part else dict.fromkeys([*old, *new]):
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
    elif old != new:
        yield key, (old, new)
