"""Going on with a run: which one, whether it is the same experiment, and what it brings along."""

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
class Resumed:
    """What a run goes on from."""

    checkpoint: checkpoint.Checkpoint
    outcome: Outcome  # how far training had come
    changed: Mapping[str, tuple[Any, Any]]  # settings, then and now
    added: Mapping[str, Any]  # settings that decide numbers, and were none then; at their defaults
    damaged: list[str]  # a line about each newer checkpoint that was passed over

    def lines(self) -> list[str]:
        """For the person who watches."""
        changes = [_change(key, a, b) for key, (a, b) in self.changed.items()]
        new = [f"{printable(key)}={printable(format_value(value))}" for key, value in self.added.items()]
        told = f"resumed from step {self.checkpoint.step}" + (f"; changed: {', '.join(changes)}" if changes else "")
        told += f"; new since then: {', '.join(new)}" if new else ""
        return [*(f"damaged {line}; the one before it is used" for line in self.damaged), told]

    def facts(self) -> dict[str, Any]:
        """What the event `resume` records."""
        return {
            "step": self.checkpoint.step,
            "checkpoint": self.checkpoint.path.name,
            "changed": {key: list(pair) for key, pair in self.changed.items()},
            "added": dict(self.added),
            "damaged": self.damaged,
        }

    def inexactness(self, engine: Mapping[str, Any]) -> str | None:
        """Why the steps from here on may differ in their last bits from those of a run that was never stopped."""
        then = self.checkpoint.state["engine"]
        for key in ("devices", "kind", "framework", "device", "dtype", "threads", "profile", "compile"):
            usual = 1 if key == "devices" else None
            if then.get(key, usual) != engine.get(key, usual):
                changed = f"engine {key} was {then.get(key, usual)} and is {engine.get(key, usual)}"
                return f"{changed}: not to the last bit the same from here"
        return None


def _change(key: str, then: Any, now: Any) -> str:
    if isinstance(now, Mapping) or isinstance(then, Mapping):  # a callback
        return f"{printable(key)} {'added' if then is None else 'left out'}"
    return f"{printable(key)} {printable(format_value(then))} -> {printable(format_value(now))}"


class Complete(UserError):
    """There is nothing to go on with: all steps of the `run` were taken."""

    def __init__(self, text: str, run: Path):
        self.run = run
        super().__init__(text)


def find_newest(parent: Path, name: str) -> Path | None:
    """The run directory below `parent` that was begun last, of the runs of that name that have a checkpoint."""
    found = [d for d in parent.iterdir() if checkpoint.list_checkpoints(d / "checkpoints")] if parent.is_dir() else []
    return max((d for d in found if _saved_config(d).get("name") == name), key=lambda d: d.name, default=None)


def saved_state(directory: Path) -> Mapping[str, Any]:
    """Return the state in the newest checkpoint of a run; empty if it cannot be read."""
    newest = next(iter(checkpoint.list_checkpoints(directory / "checkpoints").values()), None)
    return checkpoint.read_json_or_empty(newest / checkpoint.STATE) if newest else {}


def _saved_config(directory: Path) -> Mapping[str, Any]:
    config = saved_state(directory).get("config")
    return config if isinstance(config, dict) else {}


def restore_filled_settings(directory: Path, data: Data) -> None:
    """Settings of `data` that are empty, and that opening it filled in when the run began: they are that run's."""
    then = _saved_config(directory).get("data")
    for key in data.fills:
        if not getattr(data, key) and isinstance(then, dict) and isinstance(then.get(key), str):
            setattr(data, key, then[key])
    data.check()


def require_run(directory: Path, key: str) -> None:
    """Raise UserError unless `directory` holds a run to go on with, and no link that leads out of it."""
    config = directory / "config.yaml"
    if config.is_symlink() or config.is_file():
        require_inside(directory)
    if not config.is_file():
        raise UserError(f"{key}={directory}: {_no_run(directory, key)}")
    require_unlocked(directory)
    if not checkpoint.list_checkpoints(directory / "checkpoints"):
        settings = read_settings(config)
        if "checkpoint_every" not in settings:
            raise UserError(f"{key}={directory}: holds no run: its config.yaml is not one of toyexp's")
        every = printable(str(settings["checkpoint_every"]))
        raise UserError(f"{key}={directory}: that run has no checkpoint (its checkpoint_every={every}); begin anew")


def _no_run(path: Path, key: str) -> str:
    if not path.exists():
        return explain_missing(path)
    if (path / SWEEP_FILE).is_file():
        return f"holds a sweep; go on with it: sweep.resume={path}"
    around = [p for p in path.absolute().parents if (p / "checkpoints").is_dir()]
    below = sorted((p.parent for p in path.glob("*/checkpoints")), key=lambda d: d.name, reverse=True)
    hint = f"; did you mean {key}={short_path(meant[0])}?" if (meant := around + below) else ""
    return ("holds no run (config.yaml)" if path.is_dir() else "is no directory of a run") + hint


def load_resumed(directory: Path, prepared: Prepared) -> Resumed:
    """What the run in `directory` goes on from; UserError when `prepared` is another experiment, or all is done."""
    found, damaged = checkpoint.read_newest(directory / "checkpoints")
    if found is None:
        raise UserError(f"resume={short_path(directory)}: no checkpoint is whole: {'; '.join(damaged)}")
    state, settings = found.state, prepared.config.settings
    parts, then = ("outcome", "callbacks", "engine", "config", "scores"), parse_origin(state)
    if not all(isinstance(state.get(part), dict) for part in parts) or not then.sources:
        raise UserError(f"{found.path}: its {checkpoint.STATE} lacks a part")
    require_own_checkpoint(found.path, state)
    outcome = _outcome(found)
    plain, filled = prepared.config.plain, with_defaults(state["config"], prepared.config)
    changed = dict(differences(filled, plain))
    new = dict(differences(state["config"], {k: v for k, v in filled.items() if k in plain}))
    added = {k: now for k, (then, now) in new.items() if then is None and k.split(".")[0] not in ASIDE_KEYS}
    free = {*FREE_KEYS, *(key for key, roles in MOVED.items() if then.sources.keys() & {*roles})}
    fixed = {k: v for k, v in changed.items() if not {k, k.split(".")[0]} & free}
    told = [
        f"{printable(k)} was {printable(format_value(a))} and is {printable(format_value(b))}"
        for k, (a, b) in fixed.items()
    ]
    if told := told or then.list_changes(source_digests(prepared)):
        more = f", and {len(told) - 3} more" if len(told) > 3 else ""
        what = f"that run is another experiment: {'; '.join(told[:3])}{more}"
        raise UserError(f"resume={short_path(directory)}: {what}; a new run takes a name=... of its own")
    if found.step > settings.steps:
        raise UserError(f"steps={settings.steps}: the run stands at step {found.step} already")
    ended = checkpoint.read_result(directory)
    if found.step == settings.steps and ended.get("reason") == "completed" and not ended.get("error"):
        raise Complete(
            f"{short_path(directory)}: is complete, {found.step} of {settings.steps} steps; "
            f"to train on: resume={short_path(directory)} steps={2 * settings.steps}",
            directory,
        )
    if misfit := state_misfit(prepared.plan, found.arrays):
        raise UserError(f"{found.path / checkpoint.ARRAYS}: {misfit}")
    _require_unchanged_outputs(directory, prepared)
    _hand_back(found, prepared.config.callbacks)
    changed = {k: v for k, v in changed.items() if not k.startswith(("resume", "plugins"))}
    return Resumed(found, outcome, changed, added, damaged)


def _require_unchanged_outputs(directory: Path, prepared: Prepared) -> None:
    left = [name for callback in prepared.config.callbacks.values() for name in callback.outputs(prepared.plan)]
    for path in Ledger.open(directory).foreign_paths(["result.json", *left]):
        what = f"{short_path(path)} is not what this run wrote there, and would be replaced"
        if path.is_file():
            open_file(path).close()  # or say that it cannot be read
        raise UserError(f"resume={short_path(directory)}: {what}: move it elsewhere first")


def _outcome(found: checkpoint.Checkpoint) -> Outcome:
    try:
        outcome = checkpoint.rebuild_dataclass(Outcome, found.state["outcome"])
    except ValueError as error:
        raise UserError(f"{found.path / checkpoint.STATE}: outcome.{error}") from None
    if outcome.steps != found.step:
        raise UserError(f"{found.path / checkpoint.STATE}: is of step {outcome.steps}")
    for part, kind in (("scores", Mapping[str, float | None]), ("evals", Mapping[str, Mapping[str, float | None]])):
        held = found.state.get(part, {})
        if not checkpoint.matches_type(held, kind) or not all(is_integer(k, 0, found.step) for k in held):
            raise UserError(f"{found.path / checkpoint.STATE}: its {part} are none")
    return outcome


def _hand_back(found: checkpoint.Checkpoint, callbacks: Mapping[str, Callback]) -> None:
    began = found.state["config"].get("callbacks")
    for name, callback in callbacks.items():
        if not isinstance(began, dict) or name not in began:
            callback.join(found.step)
        if name in found.state["callbacks"]:
            try:
                callback.resume(found.state["callbacks"][name])
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                why = f"{type(error).__name__}: {printable(str(error))}"
                state = found.path / checkpoint.STATE
                raise UserError(f"{state}: holds no state of callbacks.{name} ({why})") from None


def with_defaults(then: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """A saved configuration with the settings that are new since then at their defaults: so they were meant to be."""
    parts = {kind: getattr(config, kind) for kind, now in config.plain.items() if isinstance(now, Mapping)}
    del parts["callbacks"]
    callbacks = _fill_defaults(then.get("callbacks"), config.plain["callbacks"], config.callbacks)
    return {
        **default_settings(config.settings), **then, "callbacks": callbacks,
        **_fill_defaults({kind: then.get(kind) for kind in parts}, config.plain, parts),
    }  # fmt: skip


def _fill_defaults(then: Any, now: Mapping[str, Any], parts: Mapping[str, Any]) -> Any:
    """The settings of some parts, each with the defaults of those that it has only now, if it is the same thing."""
    if not isinstance(then, Mapping):
        return then
    filled = dict(then)
    for kind, part in parts.items():
        node = then.get(kind)
        if isinstance(node, Mapping) and node.get("name") == now[kind]["name"]:
            filled[kind] = {**{k: v for k, v in default_settings(part).items() if k in now[kind]}, **node}
    return filled


def differences(then: Any, now: Any, key: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The dotted keys under which two trees of plain data differ, with both values."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        other = bool(key) and then.get("name") != now.get("name")  # its settings are those of another thing
        for name in ["name"] if other else dict.fromkeys([*then, *now]):
            yield from differences(then.get(name), now.get(name), f"{key}.{name}" if key else str(name))
    elif then != now:
        yield key, (then, now)
