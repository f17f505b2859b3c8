"""Shared training step of the baselines built from modules, on any device: from a host batch to the loss."""

import contextlib

import torch

from toyexp import Unavailable
from toyexp.base.formatting import pluralise
from toyexp.base.threads import available_cores
from toyexp.cli.bench_stepper import Stepper


class Loop(Stepper):
    """A stepper with a `module` on its `device`, the trainable `weights` and an `optimiser`."""

    compiled = False

    def __init__(self, plan, engine):
        if plan.accumulate > 1 or engine.dtype == "float64":
            raise Unavailable("only written for engine.dtype=float32 and bfloat16, without optim.accumulate")
        self.device, self.clip, self.half = torch.device(engine.device), plan.grad_clip, engine.dtype == "bfloat16"
        torch.backends.cuda.matmul.allow_tf32 = bool(getattr(engine, "tf32", False))
        self.note = f"torch {torch.__version__}, {'compiled, ' if self.compiled else ''}{engine.dtype}"
        self.threads_before = torch.get_num_threads()
        if engine.device == "cpu":
            threads = engine.threads or available_cores()
            torch.set_num_threads(threads)
            self.note += f", {pluralise(threads)}"

    def train(self, module, adamw, groups):
        """Prepare the module and its optimiser."""
        self.module = torch.compile(module) if self.compiled else module
        self.weights = [w for w in module.parameters() if w.requires_grad]
        betas = (adamw.beta1, adamw.beta2)
        self.optimiser = torch.optim.AdamW(groups, lr=adamw.lr, betas=betas, eps=adamw.eps, fused=True)

    def loss(self, tokens, targets):
        """Return the mean cross entropy over all targets [B, T]."""
        raise NotImplementedError

    def step(self, batch):
        """Take a step and read its loss; weights of targets are ignored."""
        tokens, targets = (self.there(batch[name]) for name in ("tokens", "targets"))
        with torch.autocast(self.device.type, torch.bfloat16) if self.half else contextlib.nullcontext():
            loss = self.loss(tokens, targets)
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.weights, self.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.item()

    def there(self, array):
        host = torch.from_numpy(array).long()
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def device_bytes(self):
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def close(self):
        self.module = self.weights = self.optimiser = None
        torch.set_num_threads(self.threads_before)
