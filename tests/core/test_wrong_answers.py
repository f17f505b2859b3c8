"""Wrong return values of plugins: one line that names the plugin, on every engine, without a traceback."""

import os
from pathlib import Path

import pytest
from lines import drop_repeated_keys, noop, run_failing

from toyexp.cli.main import main

PLUGIN = """
import os
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from toyexp import TOKENS, Batches, Data, Format, ModelExport, Optimiser, Schedule, TokenDataset, hookimpl
from toyexp.testing.null import NullEngine, NullSession
from toyexp_data.images import Digits
from toyexp_models.llama import Llama

WRONG = {
    "negative": lambda b: b["tokens"].__setitem__((0, 0), -1),
    "beyond": lambda b: b["targets"].__setitem__((0, 0), 50),
    "shape": lambda b: b.update(targets=b["targets"][:, 1:]),
    "rows": lambda b: b.update({k: v[1:] for k, v in b.items()}),
    "weights": lambda b: b["weights"].__setitem__((0, 0), np.nan),
    "list": lambda b: b.update(tokens=b["tokens"].tolist()),
    "pixels": lambda b: b["images"].__setitem__((0, 0, 0, 0), np.nan),
}


class Wrong(Batches):
    def __init__(self, batches, at, late):
        self._batches, self._at, self._late, self.inputs = batches, at, late, batches.inputs

    def _spoilt(self, batch):
        WRONG[self._at](batch)
        return batch

    def batch(self, k):
        batch = self._batches.batch(k)
        return self._spoilt(batch) if k == 2 and not self._late else batch

    def held_out(self):
        if self._at in ("nothing", "empty"):
            return None if self._at == "nothing" else []
        return [self._spoilt(b) for b in self._batches.held_out()] if self._late else self._batches.held_out()


def spoil(dataset, data):
    make = dataset.batches
    if data.at in WRONG or data.at in ("nothing", "empty"):
        dataset.batches = lambda *given: Wrong(make(*given), data.at, data.late)
    elif data.at == "describe":
        dataset.describe = lambda: None
    elif data.at == "batches":
        dataset.batches = lambda *given: None
    return dataset


@dataclass
class Odd(Data):
    "Data that answers something else."
    name: ClassVar[str] = "odd"
    gives: ClassVar = TOKENS

    at: str = ""
    late: bool = False
    vocab: int = 50

    @classmethod
    def recognises(cls, path):
        raise KeyError("no such")

    def check(self):
        pass

    def open(self, vocabulary):
        ids = np.random.default_rng(0).integers(0, 50, 5000).astype(np.float32 if self.at == "fractions" else np.int32)
        return None if self.at == "open" else spoil(TokenDataset(ids[500:], ids[:500], None, self.vocab, 4, {}), self)


@dataclass
class OddDigits(Digits):
    "Images that are none."
    name: ClassVar[str] = "odd_digits"

    at: str = ""
    late: bool = False

    def open(self, vocabulary):
        return spoil(super().open(vocabulary), self)


@dataclass
class OddOptim(Optimiser):
    "A formula that is none."
    name: ClassVar[str] = "odd_optim"

    at: str = ""

    def slots(self, shape):
        if self.at == "counts":
            OddOptim.asked = getattr(OddOptim, "asked", 0) + 1
            return {f"m{OddOptim.asked}": shape}
        return {"m": shape}

    def numbers(self, step, lr, weight_decay):
        return {"lr": lr}

    def update(self, ops, w, g, state, n):
        m = ops.blend(g, state["m"], 0.9)
        new = ops.sub(w, ops.scale(m, n["lr"]))
        if self.at == "later" and "contract" not in type(w).__module__:
            raise KeyError("later")
        answers = {
            "shape": lambda: (ops.sum(new), {"m": m}),
            "slot": lambda: (new, {"m": ops.sum_last(m)}),
            "scalar": lambda: (0.0, {"m": m}),
            "operators": lambda: (w - 0.1 * g, {"m": m}),
            "number": lambda: (ops.mul(w, 0.5), {"m": m}),
            "lost": lambda: (new, {}),
            "more": lambda: (new, {"m": m, "q": m}),
            "alone": lambda: new,
            "backwards": lambda: (ops.add(ops.sum(w), w), {"m": m}),
            "unknown": lambda: (ops.exp(w), {"m": m}),
            "raises": lambda: (w, {})[2],
        }
        return answers.get(self.at, lambda: (new, {"m": m}))()


@dataclass
class Whole(OddOptim):
    "Says that each number is by itself, and looks at all."
    name: ClassVar[str] = "whole"
    elementwise: ClassVar[bool] = True

    def update(self, ops, w, g, state, n):
        return ops.sub(w, ops.div(g, ops.mean(w))), dict(state)


@dataclass
class OddFormat(Format):
    "A file that is none."
    name: ClassVar[str] = "odd"
    suffix: ClassVar[str] = ".odd"

    at: str = ""

    def read(self, path, models):
        model = next(cls for cls in models if cls.name == "llama")(vocab=8, d_model=8, n_heads=2, d_ff=8, n_layers=1)
        tensors = {t.name: np.ones(t.shape, np.float32) for t in model.tensors()}
        match path.read_text():
            case "None":
                return None
            case "model":
                model = models
            case "shape":
                tensors["token_embd.weight"] = np.ones((3, 3), np.float32)
            case "list":
                tensors["token_embd.weight"] = [1.0]
            case "less":
                del tensors["output_norm.weight"]
            case "more":
                tensors["nope"] = np.ones(3, np.float32)
        return ModelExport(model, tensors)

    def write(self, export, path):
        if self.at == "directory":
            path.mkdir()
        elif self.at == "pipe":
            os.mkfifo(path)
        elif self.at != "nothing":
            path.write_text("file")
        return None if self.at == "none" else []


@dataclass
class OddFolder(OddFormat):
    "A directory that is none."
    name: ClassVar[str] = "odd_folder"
    suffix: ClassVar[str] = "-odd"
    contents: ClassVar = frozenset({"x"})


@dataclass
class Unopened(NullEngine):
    "Gives a session that is not open."
    name: ClassVar[str] = "unopened"

    def realize(self, plan):
        return NullSession(plan, self)


class OddSession(NullSession):
    def do_snapshot(self, into):
        found = dict(super().do_snapshot(into))
        name = next(iter(found))
        answers = {
            "nothing": lambda: None,
            "less": lambda: {k: v for k, v in found.items() if k != name},
            "shape": lambda: {**found, name: found[name][1:]},
            "list": lambda: {**found, name: found[name].tolist()},
            "more": lambda: {**found, "nope": found[name]},
        }
        return answers[self._engine.at]()


@dataclass
class Forgetful(NullEngine):
    "Keeps something else than its state."
    name: ClassVar[str] = "forgetful"

    at: str = ""

    def realize(self, plan):
        return OddSession(plan, self).open()


@dataclass
class OddModel(Llama):
    "Scores and sizes that are none."
    name: ClassVar[str] = "odd_model"

    at: str = ""

    def scores(self, logits, batches):
        wrong = {"none": None, "text": {"bleu": "high"}, "array": {"bleu": np.ones(2)}, "unnamed": {1: 0.5}}
        return wrong.get(self.at, {})

    def settings(self):
        return None if self.at == "settings" else super().settings()


@dataclass(eq=False)
class OddSchedule(Schedule):
    "Looks at the plan itself, and not at what it scales."
    name: ClassVar[str] = "odd_schedule"

    def check_plan(self, plan):
        pass

    def factor(self, step, steps):
        return 1.0


@hookimpl
def register_models(register):
    register(OddModel)


@hookimpl
def register_callbacks(register):
    register(OddSchedule)


@hookimpl
def register_engines(register):
    register(Unopened)
    register(Forgetful)


@hookimpl
def register_formats(register):
    register(OddFormat)
    register(OddFolder)


@hookimpl
def register_data(register):
    register(Odd)
    register(OddDigits)


@hookimpl
def register_optimisers(register):
    register(OddOptim)
    register(Whole)
"""
PLUGINS, *TINY = noop("odd_plugin")
NOOP = [PLUGINS, *TINY, "steps=6", "eval_every=4", "callbacks=[gguf_export]", "hydra.run.dir=run"]
IMAGES = ["experiment=vit_digits", "data=odd_digits"]


@pytest.fixture(autouse=True)
def change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("odd_plugin.py").write_text(PLUGIN)


def error_line(capsys, *words):
    """Return the one-line error of a failing command."""
    return run_failing(capsys, *words, codes=(1, 2))[0]


def run_error_line(capsys, *words):
    """Return the one-line error of a run on the null engine."""
    is_experiment = words[0].startswith("experiment=")  # has sizes of its own
    return error_line(capsys, *drop_repeated_keys(*(w for w in NOOP if not is_experiment or "model." not in w), *words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.at=open"], ["open() returned None", "Dataset"]),
        (["data.vocab=0"], ["vocab is 0", ">= 1"]),
        (["data.vocab=-3"], ["vocab is -3"]),
    ],
)
def test_invalid_data_is_named_before_anything_is_written(words, message, capsys):
    line = run_error_line(capsys, "data=odd", *words)
    assert line.startswith("data.odd") and all(word in line for word in message)
    assert not Path("run").exists()


def test_invalid_batches_are_rejected_before_anything_is_written(capsys):
    line = run_error_line(capsys, "data=odd", "data.at=batches")
    assert line == "data.odd.batches() returned None, expected Batches"
    assert not Path("run").exists()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("negative", "batch['tokens']: -1 is not one of 0..49"),
        ("beyond", "batch['targets']: 50 is not one of 0..49"),
        ("shape", "batch['targets']: expected [rows, 16] int32, got [8, 15]"),
        ("rows", "7 rows"),
        ("weights", "batch['weights'] contains NaN"),
        ("list", "arrays"),
    ],
)
def test_a_wrong_batch_is_attributed_to_the_data_and_not_the_engine(at, message, late, capsys):
    line = run_error_line(capsys, "data=odd", f"data.at={at}", f"data.late={late}")
    assert line.startswith(f"data.odd at step {0 if late else 3}: ") and message in line


@pytest.mark.parametrize("late", [False, True])
def test_nan_pixels_are_attributed_to_the_data(late, capsys):
    line = run_error_line(capsys, *IMAGES, "data.at=pixels", f"data.late={late}")
    assert line.startswith(f"data.odd_digits at step {0 if late else 3}: batch['patches'] contains NaN")


def test_held_out_batches_must_be_a_sequence(capsys):
    assert run_error_line(capsys, "data=odd", "data.at=nothing").startswith("data.odd failed at step 0: TypeError")


def test_missing_held_out_batches_end_only_runs_that_evaluate(capsys):
    line = run_error_line(capsys, "data=odd", "data.at=empty", "data.late=true")
    assert line.startswith("eval_every=4: data.odd has no held-out batches; eval_every=0 trains without evaluations")
    assert (
        main(
            [
                *drop_repeated_keys(
                    *NOOP, "data=odd", "data.at=empty", "data.late=true", "eval_every=0", "hydra.run.dir=other"
                )
            ]
        )
        == 0
    )


def test_data_without_a_description_is_named(capsys):
    line = run_error_line(capsys, "data=odd", "data.at=describe")
    assert line.startswith("data.odd.") and line.endswith(" returned None, expected Mapping")


def test_non_integer_ids_are_rejected_before_anything_is_written(capsys):
    line = run_error_line(capsys, "data=odd", "data.at=fractions")
    assert line == "the ids of the data's training part are float32; they must be integers"
    assert not Path("run").exists()


def test_eval_names_the_data_too(capsys):
    assert main([*NOOP, "steps=1"]) == 0
    Path("x.txt").write_text("words")
    words = ["eval", "run", PLUGINS, "engine=noop"]
    assert error_line(capsys, *words, "--data", "x.txt").startswith("data.odd failed in recognises(): KeyError")
    assert error_line(capsys, *words, "data=odd", "data.at=open").startswith("data.odd.open() returned None, expected ")
    line = error_line(capsys, *words, "data=odd", "data.at=negative", "data.late=true")
    assert line.startswith("data.odd ") and "-1 is not one of 0..49" in line


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("shape", ["returns [1] for the tensor, expected [50, 16]"]),
        ("slot", ["returns [50, 1] for slot m"]),
        ("scalar", ["no tensor for the tensor"]),
        ("operators", ["operator", "ops.scale", "(odd_plugin.py, line "]),
        ("number", ["ops.scale"]),
        ("lost", ["no tensor for slot m"]),
        ("more", ["slot q"]),
        ("counts", ["slots(", "at the second call", "resumed"]),
        ("alone", ["two values"]),
        ("backwards", ["[1]", "cannot broadcast"]),
        ("unknown", ["has no attribute 'exp' (odd_plugin.py, line "]),
        ("raises", ["IndexError", "(odd_plugin.py, line "]),
    ],
)
def test_an_invalid_optimiser_update_is_rejected_with_the_plan(at, message, capsys):
    line = run_error_line(capsys, "data=odd", "model.d_ff=50", "optim=odd_optim", f"optim.at={at}")
    assert line.startswith("optim.odd_optim") and all(word in line for word in message)
    assert not Path("run").exists()


def test_an_elementwise_update_that_reads_a_whole_tensor_is_rejected(capsys):
    assert "elementwise" in run_error_line(capsys, "optim=whole")


@pytest.mark.parametrize("engine", ["cpu", "ggml"])
def test_an_update_that_raises_on_an_engine_is_attributed_to_the_optimiser(engine, capsys):
    line = run_error_line(capsys, "optim=odd_optim", "optim.at=later", f"engine={engine}")
    assert line.startswith("optim.odd_optim failed ") and "KeyError: 'later'" in line


@pytest.mark.parametrize(
    ("form", "at", "message"),
    [
        ("odd", "nothing", "format.odd wrote nothing, expected a file"),
        ("odd", "directory", "format.odd wrote a directory, expected a file"),
        ("odd", "pipe", "format.odd wrote a pipe, expected a file"),
        ("odd", "none", "format.odd: write() must return"),
        ("odd_folder", "nothing", "format.odd_folder wrote nothing, expected a directory"),
        ("odd_folder", "file", "format.odd_folder wrote a file, expected a directory"),
    ],
)
def test_a_format_that_writes_no_file_is_named_and_replaces_nothing(form, at, message, capsys):
    name = f"{form}_export"
    assert run_error_line(capsys, f"callbacks=[{name}]", f"callbacks.{name}.at={at}").startswith(message)
    assert not list(Path("run").glob("*odd*"))
    assert main([*NOOP[:-1], "steps=1", "hydra.run.dir=whole"]) == 0
    target = Path("x.odd" if form == "odd" else "x-odd")
    target.write_text("before") if form == "odd" else target.mkdir()
    before = sorted(Path().iterdir())
    words = ["export", "whole", "--type", form, f"at={at}", "--to", str(target), "--force", PLUGINS]
    assert error_line(capsys, *words).startswith(message)
    assert sorted(Path().iterdir()) == before and (form != "odd" or target.read_text() == "before")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("None", "format.odd.read() returned None, expected ModelExport"),
        ("model", "x.odd: format.odd read [<class"),
        ("shape", "x.odd: format.odd read shape [3, 3] for token_embd.weight, expected [8, 8]"),
        ("list", "x.odd: format.odd read [1.0] for token_embd.weight, expected an array [8, 8]"),
        ("less", "x.odd: format.odd read no tensor output_norm.weight, which model.llama has"),
        ("more", "x.odd: format.odd read a tensor nope, which model.llama does not have"),
    ],
)
def test_a_format_that_reads_a_wrong_model_is_named_and_nothing_is_written(text, message, capsys):
    Path("x.odd").write_text(text)
    assert error_line(capsys, "export", "x.odd", "--type", "f16", PLUGINS).startswith(message)
    assert not list(Path().glob("*.gguf"))
    Path("x.odd").write_text("whole")
    assert main(["export", "x.odd", "--type", "f16", PLUGINS]) == 0


def test_a_pipe_as_a_formats_file_is_rejected_without_blocking(capsys):
    os.mkfifo("x.odd")
    assert error_line(capsys, "export", "x.odd", "--type", "f16", PLUGINS).startswith("x.odd: is a pipe")


def test_a_session_that_is_not_open_is_an_error(capsys):
    message = "realize() returned a NullSession that is not open; return Session(plan).open()"
    assert run_error_line(capsys, "engine=unopened") == message
    assert main([*NOOP, "steps=1", "hydra.run.dir=whole"]) == 0
    assert error_line(capsys, "eval", "whole", PLUGINS, "engine=unopened") == message


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("none", "OddModel.scores() returned None, expected dict"),
        ("text", "OddModel.scores() returned {'bleu': 'high'}, expected numbers by their names"),
        ("array", "OddModel.scores() returned {'bleu': array([1., 1.])}, expected numbers by their names"),
        ("unnamed", "OddModel.scores() returned {1: 0.5}, expected numbers by their names"),
        ("settings", "OddModel.settings() returned None, expected dict"),
    ],
)
def test_invalid_metrics_and_settings_of_a_model_are_named(at, message, capsys):
    assert message in run_error_line(capsys, "model=odd_model", f"model.at={at}", "callbacks=[]")


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("nothing", " returned None, expected Mapping"),
        ("less", ": the snapshot lacks token_embd.weight, unlike the plan"),
        ("shape", ": token_embd.weight has shape [49, 16], expected [50, 16]"),
        ("list", ": token_embd.weight must be an array, got list"),
        ("more", ": the snapshot has nope, unlike the plan"),
    ],
)
def test_an_invalid_snapshot_is_attributed_to_the_engine(at, message, capsys):
    line = run_error_line(capsys, "data=odd", "engine=forgetful", f"engine.at={at}", "checkpoint_every=2")
    assert f"OddSession.do_snapshot(){message}" in line


def test_a_schedule_with_its_own_check_plan_still_checks_its_scaled_number(capsys):
    line = run_error_line(capsys, "callbacks=[odd_schedule]", "callbacks.odd_schedule.scales=nope")
    assert (
        line.startswith("callbacks.odd_schedule.scales=nope: this optimiser has no setting of that name")
        and "lr" in line
    )
    assert not Path("run").exists()
