"""Helpers for tests of stacked runs: jobs, the same jobs trained alone, and training loops that record metrics."""

import dataclasses

import numpy as np
from tiny import VOCAB, add_weights, batches, plan, write_base

from toyexp import Bus, Callback, Run, Setup, hookimpl
from toyexp.batching.tokens import Dropout
from toyexp.formats.gguf.write import write_model
from toyexp.interfaces.plan import apply_optimiser
from toyexp.testing import token_dataset
from toyexp.training.loop import Training
from toyexp_optimisers.adamw import AdamWOptimiser
from toyexp_optimisers.muon import Adafactor, Muon
from toyexp_optimisers.sgd import SGD, Lion
from toyexp_recipes.lora import Lora
from toyexp_torch.engines import TorchCPU

ENGINE = TorchCPU(threads=1)
EXACT = TorchCPU(threads=1, dtype="float64")  # sums in another order agree to about 1e-15


@dataclasses.dataclass
class Job:
    """One run of a stack: its plan, learning rate and the seed of its batches."""

    plan: object
    lr: float
    data: int

    def batch(self, step):
        rows = self.plan.rows * self.plan.accumulate
        stream = batches(rows, self.data)
        is_random = self.plan.dropout_shares or self.plan.neftune
        return add_weights((Dropout(stream, self.plan) if is_random else stream).batch(step), step)

    def step_input(self, session, step):
        return session.step_input(self.batch(step), self.plan.numbers(step, self.lr / (1 + step / 10)))

    def step(self, session, step):
        return session.step(self.batch(step), self.plan.numbers(step, self.lr / (1 + step / 10)))


def build_sessions(sessions):
    for session in sessions:
        session.build()
    return sessions


def build_stack(jobs, engine):
    """Return the stack of the jobs, ready to step, and its sessions."""
    stack = engine.realize_stack([job.plan for job in jobs])
    return stack, build_sessions(stack.sessions)


def begin(stack, jobs, steps):
    """Begin a step of the rows in `steps`; return a waiting function for each row, in order."""
    inputs = {row: jobs[row].step_input(stack.sessions[row], step) for row, step in steps.items()}
    return [*stack.step(inputs).values()]


def begin_all(stack, jobs, step):
    return begin(stack, jobs, dict.fromkeys(range(len(jobs)), step))


def take_all(stack, jobs, step):
    return [wait() for wait in begin_all(stack, jobs, step)]


def train_alone(job, steps, engine=ENGINE):
    with build_sessions([engine.realize(job.plan)])[0] as session:
        losses = [job.step(session, step) for step in range(steps)]
        return np.array(losses), session.snapshot()


ADAMW = [
    (AdamWOptimiser(mode="lora", weight_decay=0.1), 0.01),
    (AdamWOptimiser(mode="from_scratch", beta1=0.8), 0.003),
    (AdamWOptimiser(mode="lora", eps=1e-6, beta2=0.99), 0.001),
]
OPTIMISERS = {
    "adamw": ADAMW,
    "averaged": [(AdamWOptimiser(mode="lora", ema=0.5), 0.01), (AdamWOptimiser(mode="lora", ema=0.9), 0.003)],
    "sgd": [(SGD(momentum=0.0), 0.1), (SGD(momentum=0.0, weight_decay=0.1), 0.03)],
    "sgd_momentum": [(SGD(), 0.03), (SGD(momentum=0.5), 0.1)],
    "lion": [(Lion(weight_decay=0.1), 0.001), (Lion(beta1=0.8), 0.0003)],
    "adafactor": [(Adafactor(weight_decay=0.1), 0.03), (Adafactor(beta2_decay=-0.6), 0.01)],
    "muon": [(Muon(weight_decay=0.1), 0.01), (Muon(momentum=0.9, adamw_lr=0.001), 0.003)],
}


def make_jobs(name, optimisers, **settings):
    return [
        Job(apply_optimiser(plan(name, seed=i, **settings), optimiser, lr), lr, i)
        for i, (optimiser, lr) in enumerate(optimisers)
    ]


def lora_jobs(tmp_path, bases, dropout, **settings):
    jobs = []
    for i, base in enumerate(bases):
        folder = tmp_path / f"{i}"
        folder.mkdir()
        model = write_base(folder / "base.gguf", "llama")
        if base:  # other weights of the same shapes
            values = {t.name: t.init.draw(t.shape, 70 + base, t.name) for t in model.tensors()}
            write_model(folder / "base.gguf", model, values, None)
        settings = {"rank": 3, "targets": ["q", "v", "ffn_*"], "dropout": dropout, **settings}
        recipe = Lora(base=str(folder / "base.gguf"), **settings)
        recipe.check()
        lora_plan = recipe.plan(model, Setup(batches().inputs, rows=3, seed=i))
        jobs.append(Job(apply_optimiser(lora_plan, AdamWOptimiser(mode="lora"), 0.01 / (1 + i)), 0.01 / (1 + i), i))
    return jobs


@dataclasses.dataclass(eq=False)
class Watch(Callback):
    """Callback that records metrics and stops its run at the step `stops_at`."""

    name = "watch"
    stops_at: int = 0
    steps: list = dataclasses.field(default_factory=list)
    evals: list = dataclasses.field(default_factory=list)

    @hookimpl
    def on_step(self, step, metrics):
        self.steps.append((step, metrics["loss"], metrics["lr"], metrics["grad_norm"]))

    @hookimpl
    def on_eval(self, step, metrics):
        self.evals.append((step, metrics["loss"]))

    @hookimpl
    def stop_reason(self, step):
        return "enough" if step == self.stops_at else None


def make_training(job, session, folder, steps, eval_every, stops_at):
    watch = Watch(stops_at=stops_at)
    bus = Bus({"watch": watch})
    dataset = token_dataset(VOCAB, count=2000, seed=5)
    run = Run("stacked", folder, 0, steps, job.lr, {}, "cpu", job.plan, session, dataset, {}, bus)
    return watch, Training(run, bus, batches(3, job.data), eval_every)
