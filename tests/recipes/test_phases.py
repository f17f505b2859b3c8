"""Recipes of several phases: weights that a recipe edits between steps, frozen elements, and tensors in turns.

The recipes are those that the documentation shows.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from faults import BOOK, ENGINES, TEXT
from shown import import_shown, save_shown
from tiny import VOCAB

import toyexp
from toyexp import InputSpec, PlanTensor, Setup, hookimpl
from toyexp.base.errors import UserError
from toyexp.batching.tokens import Dropout
from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.interfaces.plan import apply_optimiser
from toyexp.interfaces.snapshot import state_shapes
from toyexp.testing import token_dataset
from toyexp.testing.suites import Bare
from toyexp.training.checkpoint import list_checkpoints, read_checkpoint
from toyexp_data.text import Text
from toyexp_ggml.engines import GGMLCPU, GGMLMetal
from toyexp_models.llama import Llama
from toyexp_models.mlp import MLP
from toyexp_objectives.vectors import MSE
from toyexp_optimisers.adamw import AdamWOptimiser
from toyexp_optimisers.muon import Muon
from toyexp_optimisers.sgd import SGD
from toyexp_torch.engines import TorchCPU

OBJECTS = {"cpu": TorchCPU(threads=1), "ggml": GGMLCPU(threads=1), "metal": GGMLMetal(emulate=True)}
EARLY, PRUNE_AT, STEPS = 2, 5, 9
TICKET = ["plugins=[lottery_ticket]", "recipe=lottery_ticket", f"recipe.early={EARLY}", f"recipe.prune_at={PRUNE_AT}"]
TINY = ["model.d_model=16", "model.n_layers=1", "batch_size=4", "eval_every=4", "callbacks=[constant,gguf_export]"]


@dataclass(eq=False)
class Watch(toyexp.Schedule):
    """Schedule with a rate of 0 in the step after the edit; it also keeps the weights after each step."""

    name: ClassVar[str] = "watch_weights"

    def __post_init__(self):
        super().__post_init__() if hasattr(super(), "__post_init__") else None
        self.weights = []

    def factor(self, step, steps):
        return float(step != PRUNE_AT)

    @hookimpl
    def on_step(self, run, step):
        self.weights.append({t.name: run.session.download(t.name) for t in run.plan.trainable})


@pytest.mark.parametrize("optimiser", [AdamWOptimiser(), SGD(), Muon(), AdamWOptimiser(ema=0.5)])
@pytest.mark.parametrize("engine", OBJECTS)
def test_a_ticket_rewinds_to_early_weights_and_keeps_pruned_weights_at_zero(engine, optimiser, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    ticket = import_shown("lottery_ticket", tmp_path, monkeypatch).LotteryTicket(early=EARLY, prune_at=PRUNE_AT)
    watch = Watch()
    toyexp.train(
        model=Llama(d_model=16, n_layers=1, n_heads=2, context=16), data=Text(path="book.txt", tokenizer="byte"),
        recipe=ticket, engine=OBJECTS[engine], optim=replace(optimiser, weight_decay=0.1), callbacks=[watch],
        steps=STEPS, lr=0.01, eval_every=0, batch_size=4,
    )  # fmt: skip
    before, rewound, last = (watch.weights[i - 1] for i in (PRUNE_AT, PRUNE_AT + 1, STEPS))
    for name, early in watch.weights[EARLY - 1].items():
        pruned = np.zeros(early.shape, bool)
        if early.ndim > 1:
            smallest = np.argsort(np.abs(before[name]).ravel(), kind="stable")[: early.size // 2]
            pruned.flat[smallest] = True
        if optimiser.ema:  # the weights before the edit are averages
            assert (last[name] == 0).mean() >= (0.5 if early.ndim > 1 else 0)
            continue
        np.testing.assert_array_equal(rewound[name], np.where(pruned, 0, early), err_msg=name)
        assert (last[name][pruned] == 0).all() and (last[name][~pruned] != early[~pruned]).all(), name


def read_weights(directory):
    with GGUFFile(directory / "model.gguf") as file:
        return {name: file.read(name) for name in file.tensors}


@pytest.mark.parametrize("engine", ["cpu", "ggml"])
@pytest.mark.parametrize("stop", [EARLY, EARLY + 1, PRUNE_AT, PRUNE_AT + 1])
def test_a_run_that_is_resumed_in_any_phase_ends_with_the_same_bits(engine, stop, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    save_shown(tmp_path, "lottery_ticket.py")
    words = [*TICKET, *BOOK, *TINY, *ENGINES[engine], "checkpoint_every=100"]
    assert main([*words, f"steps={STEPS}", "hydra.run.dir=whole"]) == 0, capsys.readouterr().err
    assert main([*words, f"steps={stop}", "hydra.run.dir=parts"]) == 0
    assert main(["resume=parts", TICKET[0], f"steps={STEPS}"]) == 0, capsys.readouterr().err
    whole, parts = read_weights(tmp_path / "whole"), read_weights(tmp_path / "parts")
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
    assert (whole["blk.0.ffn_up.weight"] == 0).mean() == 0.5


def test_stacked_tickets_are_those_of_single_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    save_shown(tmp_path, "lottery_ticket.py")
    words = [*TICKET, *BOOK, *TINY, *ENGINES["cpu"], f"steps={STEPS}", "checkpoint_every=0"]
    sweep = ["-m", "seed=0,1", "sweep.report=false", "hydra.sweep.dir=sweep"]
    assert main([*words, *sweep, "sweep.launcher=stacked"]) == 0, capsys.readouterr().err
    for seed in (0, 1):
        assert main([*words, f"seed={seed}", f"hydra.run.dir=alone{seed}"]) == 0
        (stacked,) = (tmp_path / "sweep").glob(f"{seed}-*")
        expected = read_weights(tmp_path / f"alone{seed}")
        for name, values in read_weights(stacked).items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
            assert np.array_equal(values == 0, expected[name] == 0), name


def test_an_edit_that_spoils_the_arrays_names_the_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    save_shown(tmp_path, "lottery_ticket.py")
    monkeypatch.delitem(sys.modules, "lottery_ticket", raising=False)
    text = Path("lottery_ticket.py").read_text()
    Path("lottery_ticket.py").write_text(text.replace('.astype("float32")', "[:1]"))
    assert main([*TICKET, *BOOK, *TINY, *ENGINES["ggml"], "steps=9"]) == 1
    assert (
        "recipe.lottery_ticket: after edit() at step 5, token_embd.weight@frozen has shape [1, 16]"
        in capsys.readouterr().err
    )


# -- turns ------------------------------------------------------------------------------------------------------------


def pair_plan(module, optimiser, **settings):
    inputs = {name: InputSpec((n,), "float32") for name, n in (("vectors", 4), ("targets", 2))}
    setup = Setup({**inputs, "weights": InputSpec((), "float32")}, 6, objective=module.Adversarial(), **settings)
    return apply_optimiser(module.InTurns().plan(module.Pair(8, 4, 2), setup), optimiser, 0.01)


def pair_batch(step):
    draw = np.random.default_rng(step)
    arrays = {"vectors": draw.normal(size=(6, 4)), "targets": draw.normal(2, 1, (6, 2)), "weights": np.ones(6)}
    arrays["turn"] = np.full(6, step % 2)
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def train_pair_in_torch(plan, steps):
    """Train with two torch optimisers in float64, each of which takes every second step; return the weights."""
    weights = {t.name: torch.from_numpy(plan.initial_values(t)).double().requires_grad_() for t in plan.tensors}
    settings = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    parts = {part: [w for name, w in weights.items() if name.startswith(part)] for part in ("critic", "generator")}
    optimisers = {part: torch.optim.AdamW(tensors, **settings) for part, tensors in parts.items()}

    def run(part, x):
        return torch.nn.functional.silu(x @ weights[f"{part}.0.weight"].T) @ weights[f"{part}.1.weight"].T

    for step in range(steps):
        batch = {name: torch.from_numpy(array).double() for name, array in pair_batch(step).items()}
        fake, part = run("critic", run("generator", batch["vectors"])), ("critic", "generator")[step % 2]
        ones = torch.ones_like(fake)
        bce = torch.nn.functional.binary_cross_entropy_with_logits
        loss = bce(fake, ones) if step % 2 else bce(run("critic", batch["targets"]), ones) + bce(fake, 0 * ones)
        optimisers[part].zero_grad()
        loss.backward()
        optimisers[part].step()
    return {name: w.detach().numpy() for name, w in weights.items()}


@pytest.mark.parametrize(("engine", "tolerance"), [("cpu", 2e-5), ("ggml", 2e-5), ("metal", 2e-5), ("float64", 1e-10)])
def test_two_networks_in_turns_train_as_with_two_torch_optimisers(engine, tolerance, tmp_path, monkeypatch):
    module = import_shown("adversarial", tmp_path, monkeypatch)
    plan = pair_plan(module, AdamWOptimiser(beta2=0.999, weight_decay=0.1).with_mode("lora"))
    realizer = TorchCPU(threads=1, dtype="float64") if engine == "float64" else OBJECTS[engine]
    with realizer.realize(plan) as session:
        session.build()
        for step in range(7):
            before = session.snapshot()
            session.step(pair_batch(step), plan.numbers(step, 0.01))
            resting = ("generator", "critic")[step % 2]
            for name, array in session.snapshot().items():
                assert np.array_equal(array, before[name]) == name.startswith(resting), name
        for name, expected in train_pair_in_torch(plan, 7).items():
            np.testing.assert_allclose(session.snapshot()[name], expected, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("engine", ["cpu", "ggml"])
def test_batches_hold_the_turn_and_a_resumed_run_continues_with_the_right_one(engine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_shown(tmp_path, "adversarial.py")
    draw = np.random.default_rng(0)
    np.savez("points.npz", x=draw.normal(size=(50, 4)), y=draw.normal(2, 0.5, (50, 2)))
    words = ["plugins=[adversarial]", "recipe=in_turns", "model=pair", "objective=adversarial", "data=vectors",
             "data.path=points.npz", *ENGINES[engine], "callbacks=[constant,gguf_export]", "eval_every=2"]  # fmt: skip
    assert main([*words, "steps=7", "hydra.run.dir=whole"]) == 0, capsys.readouterr().err
    assert main([*words, "steps=3", "checkpoint_every=3", "hydra.run.dir=parts"]) == 0
    arrays = read_checkpoint(list_checkpoints(tmp_path / "parts" / "checkpoints")[3]).arrays
    assert main(["resume=parts", words[0], "steps=7"]) == 0, capsys.readouterr().err
    whole, parts = read_weights(tmp_path / "whole"), read_weights(tmp_path / "parts")
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
    assert not np.array_equal(arrays["critic.0.weight"], whole["critic.0.weight"])


def test_the_turn_of_a_batch_is_its_step_modulo_the_number_of_turns():
    inputs = {**token_dataset(VOCAB).batches(16, 3, 0).inputs}
    model = Llama(d_model=16, n_layers=1, n_heads=2, context=16).fit(token_dataset(VOCAB))
    tensors = [replace(PlanTensor.from_spec(t), turns=(1, 1, 0)) for t in model.tensors()]
    plan = Setup(inputs, 3).plan(model, tensors)
    batches = Dropout(token_dataset(VOCAB).batches(16, 3, 0), plan, 0)
    assert [batches.batch(k)["turn"].tolist() for k in range(5)] == [[k % 3] * 3 for k in range(5)]


@pytest.mark.parametrize("engine", OBJECTS)
def test_an_objective_need_not_read_the_turn(engine):
    inputs = {"vectors": InputSpec((4,), "float32"), "targets": InputSpec((4,), "float32")}
    setup = Setup({**inputs, "weights": InputSpec((), "float32")}, 2, objective=MSE())
    model = MLP(4, 8, 4)
    tensors = [replace(PlanTensor.from_spec(t), turns=(0, 1) if "0" in t.name else (1, 0)) for t in model.tensors()]
    plan = apply_optimiser(setup.plan(model, tensors), SGD(), 0.01)
    assert "turn" in plan.inputs and plan.turns == 2
    batch = {name: np.ones((2, *spec.shape), np.float32) for name, spec in plan.inputs.items()}
    with OBJECTS[engine].realize(plan) as session:
        session.build()
        before = session.snapshot()
        session.step(batch, plan.numbers(1, 0.01))
        after = session.snapshot()
    assert {n.split(".")[1] for n in after if not np.array_equal(after[n], before[n])} == {"0"}


def test_turns_of_different_lengths_are_an_error():
    model = MLP(4, 8, 4)
    turns = [(1, 0), (1, 0, 0), (), ()]
    tensors = [replace(PlanTensor.from_spec(t), turns=n) for t, n in zip(model.tensors(), turns, strict=True)]
    with pytest.raises(UserError, match="`turns` of its tensors differ in length"):
        Setup({"weights": InputSpec((), "float32")}, 2, objective=MSE()).plan(model, tensors)


def plans_with_kept_arrays():
    """Return a plan, and the same plan with an array that its tensors keep."""
    inputs = {n: InputSpec((4,), "float32") for n in ("vectors", "targets")} | {"weights": InputSpec((), "float32")}
    plan = Bare().plan(MLP(4, 8, 4), Setup(inputs, 2, objective=MSE()))
    return plan, replace(plan, tensors=tuple(replace(t, keeps=("early",)) for t in plan.tensors))


def test_kept_arrays_are_part_of_a_snapshot():
    shapes = state_shapes(plans_with_kept_arrays()[1])
    assert shapes["layer.0.weight@early"] == shapes["layer.0.weight"] == shapes["layer.0.weight@m"]


@pytest.mark.parametrize("engine", OBJECTS)
def test_arrays_that_a_tensor_keeps_do_not_change_its_training(engine):
    results = []
    for plan in plans_with_kept_arrays():
        plan = apply_optimiser(plan, SGD(), 0.1)
        batch = {name: np.ones((2, *spec.shape), np.float32) for name, spec in plan.inputs.items()}
        with OBJECTS[engine].realize(plan) as session:
            session.build()
            session.restore({n: np.ones_like(x) if "@early" in n else x for n, x in session.snapshot().items()})
            session.step(batch, plan.numbers(0, 0.1))
            results.append(session.snapshot())
    plain, kept = results
    assert all(np.array_equal(kept[name], array) for name, array in plain.items())
    assert {name for name in kept if name not in plain} == {f"{name}@early" for name in plain if "@" not in name}
    assert all((array == 1).all() for name, array in kept.items() if name.endswith("@early"))
