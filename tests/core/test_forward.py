"""Models that no engine can compute: a one-line error on every engine, before anything is written."""

from pathlib import Path

import numpy as np
import pytest
from lines import drop_repeated_keys, noop, run_failing
from probe import Probe, probe_plan

from toyexp import LoraAdapter, Normal, PlanTensor, Rotary, UserError, lora_names
from toyexp.cli.main import main
from toyexp.reference import forward
from toyexp.reference.forward import check_forward
from toyexp.reference.opmodel import CASES, op_plan

PLUGIN = """
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from toyexp import TOKENS, Constant, Kind, Model, Normal, Optimiser, PlanTensor, Recipe, TensorSpec, hookimpl
from toyexp.formats import GGUFForm, Keys

WEIGHT = TensorSpec("out.weight", (16, 8), Normal(0.02))
NUMBERS = {"spread": (Normal, float("nan")), "negative spread": (Normal, -1.0), "start": (Constant, float("inf"))}
TENSORS = {
    "None": None,
    "names": ["token_embd.weight"],
    "zero": [WEIGHT, TensorSpec("z.weight", (0, 3), Normal(1))],
    "negative": [WEIGHT, TensorSpec("z.weight", (-1, 3), Normal(1))],
    "fraction": [WEIGHT, TensorSpec("z.weight", (3.5, 3), Normal(1))],
    "number": [WEIGHT, TensorSpec("z.weight", 3, Normal(1))],
    "twice": [WEIGHT, WEIGHT],
    "no values": [WEIGHT, TensorSpec("z.weight", (3, 3), None)],
    "nameless": [WEIGHT, TensorSpec("", (3, 3), Normal(1))],
    "escape": [WEIGHT, TensorSpec("a\\x1b[31m", (3, 3), Normal(1))],
}


def turned(x):
    return x @ x


class OddForm(GGUFForm):
    "Its context alone."

    def metadata(self, model):
        return {"context": model.context}

    def read(self, cls, file):
        return cls(context=Keys(file).integer("context"))


@dataclass
class Odd(Model):
    "A model that is none."
    name: ClassVar[str] = "odd"
    reads: ClassVar[Kind] = TOKENS
    forms: ClassVar[dict] = {"gguf": OddForm()}
    vocab: ClassVar[int] = 16
    context: int = 4
    at: str = ""

    def check(self):
        pass

    def tensors(self):
        if self.at in NUMBERS:
            values, number = NUMBERS[self.at]
            return [WEIGHT, TensorSpec("z.weight", (3, 3), values(number))]
        return TENSORS.get(self.at, [TensorSpec("token_embd.weight", (16, 8), Normal(0.02)), WEIGHT])

    def forward(self, ops, p, batch):
        at = Path("at").read_text() if Path("at").exists() else self.at
        x = ops.embed(p["token_embd.weight"], batch["tokens"])
        w = p["out.weight"]
        return {
            "unknown tensor": lambda: ops.logits(x, p["out.wieght"]),
            "unknown op": lambda: ops.conv2d(x, w),
            "adds": lambda: ops.logits(ops.add(x, 1), w),
            "nothing": lambda: None,
            "array": lambda: np.zeros((2, 4, 16), np.float32),
            "two": lambda: (ops.logits(x, w), x),
            "recursion": lambda: self.forward(ops, p, batch),
            "operator": lambda: ops.logits(turned(x), w),
            "looks": lambda: ops.logits(x, w) if batch["tokens"][0] else None,
            "few": lambda: x,
            "rows": lambda: ops.logits(p["token_embd.weight"], w),
            "exit": lambda: sys.exit(3),
            "own": lambda: {}["own"],
        }.get(at, lambda: ops.logits(x, w))()


@dataclass
class OddRecipe(Recipe):
    "Tensors that are not the model's."
    name: ClassVar[str] = "odd_recipe"
    shape: int = 8
    trains: bool = True

    def plan(self, model, setup):
        first = model.tensors()[:1]
        return setup.plan(model, [PlanTensor(t.name, (16, self.shape), t.init, self.trains) for t in first])


@dataclass
class Late(Optimiser):
    "Numbers that are none after two steps."
    name: ClassVar[str] = "late"
    at: str = "late"

    def slots(self, shape):
        return {"m": "shape"} if self.at == "slots" else {}

    def numbers(self, step, lr, weight_decay):
        return [lr] if self.at == "list" else {"lr": lr / (3 - step)}

    def update(self, ops, w, g, state, n):
        return ops.sub(w, ops.scale(g, n["lr"])), state


@hookimpl
def register_models(register):
    register(Odd)


@hookimpl
def register_recipes(register):
    register(OddRecipe)


@hookimpl
def register_optimisers(register):
    register(Late)
"""
ENGINE = """
from dataclasses import dataclass
from typing import ClassVar

from toyexp import hookimpl
from toyexp.reference.engine import ReferenceOps
from toyexp.reference.null import NullEngine, NullSession


class BrokenOps(ReferenceOps):
    def rows(self, table, ids):
        return {}["rows"]


class BrokenSession(NullSession):
    def do_build(self):
        if self.plan.trainable:
            None.shape

    def do_loss(self, micro):
        return self.plan.model.forward(BrokenOps(), self._tensors, micro)


@dataclass
class Broken(NullEngine):
    "Cannot compute what every other engine does."
    name: ClassVar[str] = "broken"

    def realize(self, plan):
        return BrokenSession(plan, self).open()


@hookimpl
def register_engines(register):
    register(Broken)
"""
PLUGINS, *TINY = noop("odd_model", "broken_engine")
OWN = ["model=odd", "data=random", "data.vocab=16", "steps=3", "eval_every=0", "batch_size=2", "hydra.run.dir=run"]
RUN = [PLUGINS, *(word for word in TINY if not word.startswith("model.")), *OWN, "callbacks=[cosine]"]


@pytest.fixture
def change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("odd_model.py").write_text(PLUGIN)
    Path("broken_engine.py").write_text(ENGINE)
    return tmp_path


def rejected_line(capsys, *words):
    """Return the one-line error of a run that is rejected before anything is written."""
    line, _ = run_failing(capsys, *drop_repeated_keys(*RUN, *words), codes=(2,))
    assert not Path("run").exists()
    return line


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("unknown tensor", ["no tensor out.wieght", "did you mean out.weight?", "(odd_model.py, line "]),
        ("unknown op", ["no op conv2d", "(odd_model.py, line "]),
        ("adds", ["ops.add takes tensors, got 1", "(odd_model.py, line "]),
        ("nothing", ["returns None, expected logits [2, 4, classes]"]),
        ("array", ["returns a ndarray, expected logits"]),
        ("two", ["returns a tuple, expected logits"]),
        ("recursion", ["RecursionError", "(odd_model.py, line "]),
        ("operator", ["operator", "ops.add", "(odd_model.py, line "]),
        ("looks", ["operator", "(odd_model.py, line "]),
        ("few", ["logits of 8 classes", "up to 15"]),
        ("rows", ["returns [16, 16], expected logits [2, 4, classes]"]),
        ("exit", ["SystemExit: 3", "(odd_model.py, line "]),
        ("own", ["KeyError: 'own'", "(odd_model.py, line "]),
        ("None", ["tensors() returned None"]),
        ("names", ["'token_embd.weight'", "expected a TensorSpec"]),
        ("zero", ["tensor z.weight has the shape (0, 3)"]),
        ("negative", ["tensor z.weight has the shape (-1, 3)"]),
        ("fraction", ["tensor z.weight has the shape (3.5, 3)"]),
        ("number", ["tensor z.weight has the shape 3"]),
        ("no values", ["tensor z.weight has the initial values None", "such as Normal(0.02)"]),
        ("twice", ["tensor out.weight is listed twice"]),
        ("spread", ["Normal(std=nan)", "(odd_model.py, line "]),
        ("negative spread", ["Normal(std=-1.0)", "(odd_model.py, line "]),
        ("start", ["Constant(value=inf)", "(odd_model.py, line "]),
        ("nameless", ["named ''"]),
        ("escape", ["named 'a\\"]),
    ],
)
def test_an_uncomputable_model_is_named_before_anything_is_written(at, message, change_directory, capsys):
    line = rejected_line(capsys, f"model.at={at}")
    assert line.startswith("model.odd") and all(word in line for word in message)


@pytest.mark.parametrize("engine", ["cpu", "ggml"])
def test_the_error_is_the_same_on_every_engine(engine, change_directory, capsys):
    assert rejected_line(capsys, "model.at=adds") == rejected_line(capsys, "model.at=adds", f"engine={engine}")


@pytest.mark.parametrize("engine", ["cpu", "ggml"])
def test_eval_and_generate_name_the_model_too(engine, change_directory, capsys):
    assert main([*drop_repeated_keys(*RUN, "callbacks=[gguf_export]", "eval_every=3")]) == 0
    arguments = ["run", PLUGINS, f"engine={engine}"]
    assert main(["eval", *arguments]) == 0
    Path("at").write_text("adds")
    generate = ["generate", "run", "--ids", "1", "--engine", engine, PLUGINS]
    for words in (["eval", *arguments], generate):
        line, _ = run_failing(capsys, *words, codes=(2,))
        assert line.startswith("model.odd: in its forward pass ops.add takes tensors, got 1 (odd_model.py, line ")


def test_an_engine_failing_on_a_valid_model_is_the_engines_error(change_directory, capsys):
    line, _ = run_failing(capsys, *drop_repeated_keys(*RUN, "engine=broken"), codes=(1,))
    assert line.startswith("engine.broken failed while it built the training step: AttributeError")
    assert main([*drop_repeated_keys(*RUN, "callbacks=[gguf_export]", "eval_every=3", "hydra.run.dir=other")]) == 0
    line, _ = run_failing(capsys, "eval", "other", PLUGINS, "engine=broken", codes=(1,))
    assert line.startswith("engine.broken failed while it evaluated: KeyError: 'rows' (broken_engine.py, line ")


@pytest.mark.parametrize(("shape", "message"), [(8, "no tensor out.weight"), (0, "has the shape (16, 0)")])
def test_missing_or_changed_tensors_of_a_plan_are_attributed_to_the_recipe(shape, message, change_directory, capsys):
    line = rejected_line(capsys, "recipe=odd_recipe", f"recipe.shape={shape}")
    assert line.startswith("recipe.odd_recipe: ") and message in line


def test_a_plan_without_trainable_tensors_is_rejected(change_directory, capsys):
    line = rejected_line(capsys, "recipe=odd_recipe", "recipe.trains=false")
    assert line == "recipe.odd_recipe: trains no tensor; its plan() must mark at least one as trainable"


@pytest.mark.parametrize(("at", "message"), [("slots", "slots((16, 8)) returned {'m': 'shape'}"), ("list", "[0.0")])
def test_invalid_numbers_and_slots_of_an_optimiser_are_reported(at, message, change_directory, capsys):
    line = rejected_line(capsys, "optim=late", f"optim.at={at}")
    assert line.startswith("optim.late: ") and message in line


def test_an_optimiser_that_fails_on_scheduled_numbers_is_named(change_directory, capsys):
    line, _ = run_failing(capsys, *drop_repeated_keys(*RUN, "optim=late"), codes=(1,))
    assert line.startswith("optim.late failed ") and "ZeroDivisionError" in line and "(odd_model.py, line " in line


@pytest.mark.parametrize("case", CASES)
def test_every_op_of_the_conformance_kit_passes_the_check(case):
    check_forward(op_plan(case), "recipe.any")


@pytest.mark.parametrize("adapter", ["lens", "lora"])
def test_adapters_pass_the_check(adapter):
    check_forward(op_plan("matmul", adapter), "recipe.any")


def test_adapters_of_the_wrong_shape_are_attributed_to_the_recipe():
    plan = op_plan("matmul", "lora")
    a, _ = lora_names("w")
    wrong = [PlanTensor(a, (2, 99), Normal(1)) if t.name == a else t for t in plan.tensors]
    with pytest.raises(UserError, match=r"^recipe.any: .*\[2, 99\]"):
        check_forward(type(plan)(**{**vars(plan), "tensors": tuple(wrong)}), "recipe.any")
    assert any(isinstance(adapter, LoraAdapter) for adapter in plan.adapters)


# Each gets x [2, 3, 8], t [2, 3, 2, 4] and w [5, 8].
WRONG = {
    "a matrix the other way round": lambda ops, x, t, w: ops.linear(x, ops.reshape(w, (8, 5))),
    "a bias of another length": lambda ops, x, t, w: ops.linear(x, w, ops.reshape(ops.part(w, 0, 0, 1), (8,))),
    "an addend that is no ending": lambda ops, x, t, w: ops.add(ops.part(x, 1, 0, 1), x),
    "factors of two shapes": lambda ops, x, t, w: ops.mul(x, ops.part(x, 1, 0, 2)),
    "a product of unlike factors": lambda ops, x, t, w: ops.product(x, x),
    "a sum over a missing axis": lambda ops, x, t, w: ops.sum(x, 3),
    "axes twice": lambda ops, x, t, w: ops.permute(x, (0, 1, 1)),
    "a mask of no square": lambda ops, x, t, w: ops.causal(x),
    "ids of other positions": lambda ops, x, t, w: ops.take(ops.part(x, 1, 0, 1), t),
    "no finite factor": lambda ops, x, t, w: ops.scale(x, float("inf")),
    "a weight that is no vector": lambda ops, x, t, w: ops.rms_norm(x, w, 1e-5),
    "a negative eps": lambda ops, x, t, w: ops.rms_norm(x, ops.reshape(ops.part(w, 0, 0, 1), (8,)), -1.0),
    "other numbers than there are": lambda ops, x, t, w: ops.reshape(x, (2, 23)),
    "a size to be worked out": lambda ops, x, t, w: ops.reshape(x, (-1, 8)),
    "five axes": lambda ops, x, t, w: ops.reshape(x, (2, 3, 2, 2, 2)),
    "an axis from the end": lambda ops, x, t, w: ops.part(x, -1, 0, 2),
    "places past the end": lambda ops, x, t, w: ops.part(x, 1, 2, 4),
    "nothing joined": lambda ops, x, t, w: ops.concat([], 1),
    "joined what differs": lambda ops, x, t, w: ops.concat([x, ops.part(x, 2, 0, 4)], 1),
    "heads that do not divide": lambda ops, x, t, w: ops.heads(x, 3),
    "parts that do not divide": lambda ops, x, t, w: ops.split(x, 3),
    "heads for rope": lambda ops, x, t, w: ops.rope(x, Rotary(10.0)),
    "heads of an odd size": lambda ops, x, t, w: ops.rope(ops.part(t, 3, 0, 3), Rotary(10.0)),
    "queries of other positions": lambda ops, x, t, w: ops.attention(ops.part(t, 1, 0, 1), t, t),
    "heads that do not share": lambda ops, x, t, w: ops.attention(t, ops.reshape(t, (2, 3, 4, 2)), t),
    "a bias of other positions": lambda ops, x, t, w: ops.attention(
        t, t, t, bias=ops.reshape(ops.part(w, 0, 0, 1), (2, 2, 2))
    ),
    "a table of fewer distances": lambda ops, x, t, w: ops.distance_bias(ops.part(w, 1, 0, 2), 3),
    "rows by numbers": lambda ops, x, t, w: ops.embed(w, x),
}


@pytest.mark.parametrize("case", WRONG)
def test_op_calls_that_engines_do_not_agree_on_are_rejected(case):
    called = []

    def function(ops, p, batch):
        x = ops.embed(p["table"], batch["tokens"])
        called.append(x)
        WRONG[case](ops, x, ops.heads(x, 2), p["w"])
        return ops.logits(x, p["w"])

    arrays = {"table": np.ones((5, 8), np.float32), "w": np.ones((5, 8), np.float32)}
    plan = probe_plan(Probe(arrays, function), 2, {"tokens": (3,), "targets": (3,), "weights": (3,)})
    with pytest.raises(UserError, match=r"^model.probe: in its forward pass ") as refusal:
        check_forward(plan, "recipe.any")
    assert called and "test_forward.py, line " in str(refusal.value)


def test_an_endless_forward_pass_is_stopped(monkeypatch):
    monkeypatch.setattr(forward, "MOST_OPS", 100)

    def function(ops, p, batch):
        x = ops.embed(p["table"], batch["tokens"])
        while True:
            x = ops.add(x, x)

    plan = probe_plan(
        Probe({"table": np.ones((5, 8), np.float32)}, function), 2, {"tokens": (3,), "targets": (3,), "weights": (3,)}
    )
    with pytest.raises(UserError, match="more than 100 ops; is there"):
        check_forward(plan, "recipe.any")
