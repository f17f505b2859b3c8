"""Helpers for tests on several devices: results of a session, and runs in separate processes that are ended."""

import json
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
from faults import environment, python, words
from tiny import VOCAB, add_weights, batches

from toyexp_optimisers.adamw import AdamWOptimiser
from toyexp_optimisers.muon import Adafactor, Muon
from toyexp_optimisers.sgd import SGD, Lion

RANKS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RUN = [*words("scratch", "llama", "cpu"), "callbacks=[constant,events]", "checkpoint_every=4"]
RUN_ON_TWO = [*RUN, "engine.devices=2", "engine.threads=2"]
ADAMW = AdamWOptimiser(weight_decay=0.1, mode="lora")
OPTIMISERS = {
    "adamw": ADAMW,
    "adamw_from_scratch": AdamWOptimiser(weight_decay=0.1, mode="from_scratch"),
    "adamw_averaged": AdamWOptimiser(weight_decay=0.1, mode="lora", ema=0.8),
    "sgd": SGD(momentum=0.9, nesterov=True),
    "sgd_plain": SGD(),
    "lion": Lion(),
    "adafactor": Adafactor(),
    "muon": Muon(),
}


PLUGIN = '''
from dataclasses import dataclass
from typing import ClassVar

from toyexp import Register, hookimpl
from toyexp_models.llama import Llama


@dataclass
class Mine(Llama):
    """A llama with another name."""

    name: ClassVar[str] = "mine"
    factor: float = 1.0  # multiplies the logits

    def forward(self, ops, p, batch):
        return ops.scale(super().forward(ops, p, batch), self.factor)


@hookimpl
def register_models(register: Register) -> None:
    register(Mine)
'''


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def make_infinite(session):
    """Set the embedding of the last token to infinity; call it before `session.build()`."""
    embedding = session.download("token_embd.weight")
    embedding[-1] = np.inf
    session.upload("token_embd.weight", embedding)


def read_batch(data, step, bad=None):
    """Return a step's batch with weighted targets; if `bad` is set, only that step's batch contains the last token."""
    batch = add_weights(data.batch(step), step)
    if bad is not None:
        ids = np.where(step == bad, VOCAB - 1, np.minimum(batch["tokens"], VOCAB - 2))
        batch["tokens"] = ids.astype(np.int32)
    return batch


def take_steps(engine, the_plan, steps=6, state=None, first=0, bad=None, lr=1e-2):
    """Train some steps; return the metrics of each, results of all session methods, and a snapshot."""
    data = batches(rows=the_plan.rows * the_plan.accumulate)
    with engine.realize(the_plan) as session:
        if bad is not None:
            make_infinite(session)
        session.build()
        if state is not None:
            session.restore(state)
        metrics = []
        for step in range(first, first + steps):
            metrics.append(session.step(read_batch(data, step, bad), the_plan.numbers(step, lr)))
        last = data.batch(99)
        answers = {
            "loss": session.evaluate([add_weights(last), last]),
            "logits": session.logits({"tokens": last["tokens"][:-1]}),
            "decoded": session.decoder().feed(last["tokens"][0, :5]),
            "gradients": session.gradients(last),
        }
        assert session.describe().get("captured", True) in (True, "engine.capture=false", "engine.dtype=float64")
        return np.array(metrics), answers, session.snapshot()


def assert_close(actual, expected, rtol, atol):
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_close(actual[name], value, rtol, atol)
        else:
            np.testing.assert_allclose(actual[name], value, rtol=rtol, atol=atol, err_msg=name)


def events(directory, kind):
    lines = map(json.loads, Path(directory, "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


class StartedRun:
    """A run on two devices in its own process, which has saved a checkpoint."""

    def __init__(self, here, *settings):
        command = python("-m", "toyexp", *settings, "steps=1000000", "eval_every=0", "hydra.run.dir=run")
        env = environment(here) | {"TOYEXP_RANKS_PATIENCE": "6"}  # seconds; default 20
        self.process = subprocess.Popen(command, cwd=here, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                        text=True)  # fmt: skip
        deadline = time.monotonic() + 120
        while not list(here.glob("run/checkpoints/step-*")):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(self.process.communicate()[1])
            time.sleep(0.02)
        (start,) = events(here / "run", "run_start")
        self.second = int(start["backend"]["ranks"][1].split()[1])
        self.began = time.monotonic()

    def end(self):
        """Wait at most 30 s for both ranks to end; return the exit code and the last line of stderr."""
        try:
            _, errors = self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        while Path(f"/proc/{self.second}").exists():
            assert time.monotonic() < self.began + 30
            time.sleep(0.02)
        return self.process.returncode, errors.strip().splitlines()[-1] if errors.strip() else ""
