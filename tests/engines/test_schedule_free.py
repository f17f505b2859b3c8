"""The schedule-free optimiser of the documentation: its numbers, and which weights evaluations and files use."""

from pathlib import Path

import numpy as np
import pytest
from faults import BOOK, ENGINES, TEXT
from shown import import_shown, save_shown
from tiny import batches, plan

from toyexp.base.errors import UserError
from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.interfaces.plan import apply_optimiser
from toyexp.training.checkpoint import list_checkpoints, read_checkpoint
from toyexp_ggml.engines import GGMLCPU, GGMLMetal
from toyexp_torch.engines import TorchCPU

OBJECTS = {
    "cpu": TorchCPU(threads=1), "float64": TorchCPU(threads=1, dtype="float64"), "ggml": GGMLCPU(threads=1),
    "metal": GGMLMetal(emulate=True),
}  # fmt: skip
LR, DECAY, STEPS = 0.01, 0.1, 12


class Paper:
    """Algorithm 1 of Defazio et al. 2024 in float64: `y` is where gradients are taken, `x` is evaluated."""

    def __init__(self, w, decay, beta1=0.9, beta2=0.999, eps=1e-8, warmup=5):
        self.x = self.y = self.z = np.array(w, np.float64)
        self.v, self.t, self.sum = np.zeros(self.x.shape), 0, 0.0
        self.decay, self.beta1, self.beta2, self.eps, self.warmup = decay, beta1, beta2, eps, warmup

    def step(self, g, lr):
        self.t += 1
        self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
        rate = lr * np.sqrt(1 - self.beta2**self.t) * min(1, self.t / self.warmup)
        self.z = self.z - rate * g / (np.sqrt(self.v) + self.eps) - rate * self.decay * self.y
        self.sum += rate**2
        c = rate**2 / self.sum
        self.x = (1 - c) * self.x + c * self.z
        self.y = (1 - self.beta1) * self.z + self.beta1 * self.x


@pytest.mark.parametrize(("engine", "tolerance"), [("float64", 1e-7), ("cpu", 2e-5), ("ggml", 2e-5), ("metal", 2e-5)])
def test_steps_and_evaluations_are_those_of_the_paper(engine, tolerance, tmp_path, monkeypatch):
    """The gradients are the engine's own, in float32, so that only the update is compared."""
    optimiser = import_shown("schedule_free", tmp_path, monkeypatch).ScheduleFree(warmup=5, weight_decay=DECAY)
    the_plan = apply_optimiser(plan("llama"), optimiser, LR)
    papers = {t.name: Paper(the_plan.initial_values(t), DECAY * t.has_weight_decay) for t in the_plan.trainable}
    with OBJECTS[engine].realize(the_plan) as session:
        session.build()
        for step in range(STEPS):
            batch = batches().batch(step)
            for name, gradient in session.gradients(batch).items():
                papers[name].step(gradient.astype(np.float64), LR)
            session.step(batch, the_plan.numbers(step, LR))
            session.evaluate([batch])
        for name, trained in papers.items():
            scale = np.abs(trained.x - the_plan.initial_values(the_plan.tensor(name))).max()
            np.testing.assert_allclose(session.snapshot()[name], trained.y, atol=tolerance, rtol=tolerance)
            np.testing.assert_allclose(session.download(name), trained.x, atol=tolerance, rtol=tolerance)
            assert np.abs(trained.x - trained.y).max() > 10 * tolerance * scale, "x and y differ by more than rounding"


@pytest.mark.parametrize("engine", ["cpu", "ggml"])
def test_files_hold_the_average_and_a_resumed_run_is_exact(engine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    save_shown(tmp_path, "schedule_free.py")
    words = ["plugins=[schedule_free]", "optim=schedule_free", *BOOK, *ENGINES[engine], "model.d_model=16", "lr=0.01",
             "model.n_layers=1", "batch_size=4", "callbacks=[constant,gguf_export]", "eval_every=2"]  # fmt: skip
    assert main([*words, "steps=8", "checkpoint_every=8", "hydra.run.dir=whole"]) == 0, capsys.readouterr().err
    assert main([*words, "steps=5", "hydra.run.dir=parts"]) == 0
    assert main(["resume=parts", words[0], "steps=8"]) == 0, capsys.readouterr().err
    arrays = read_checkpoint(list_checkpoints(tmp_path / "whole" / "checkpoints")[8]).arrays
    with GGUFFile("whole/model.gguf") as whole, GGUFFile("parts/model.gguf") as parts:
        for name in whole.tensors:
            x = arrays[name] + arrays[f"{name}@eval_offset"]
            assert np.array_equal(whole.read(name), x) and not np.array_equal(x, arrays[name]), name
            assert np.array_equal(parts.read(name), x), name


def test_a_second_average_is_an_error(tmp_path, monkeypatch):
    optimiser = import_shown("schedule_free", tmp_path, monkeypatch).ScheduleFree(ema=0.9)
    with pytest.raises(UserError, match=r"optim.ema=0.9: optim=schedule_free has its own average; set ema to 0"):
        apply_optimiser(plan("llama"), optimiser, LR)
