"""An engine of your own; as it stands, PyTorch in float64 on the CPU: slow, and exact to a dozen digits.

An engine says whether it works here (`check`) and makes a session of a plan: tensors by name, a training step, logits.
The session implements `do_...`; its base class has checked states, names and shapes before, and cuts batches into
micro-batches. The ops are what models are written in: fourteen primitives, of which the base class makes the others.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from toyexp import Engine, Ops, Session, StepMetrics, hookimpl, require_package, updated


@dataclass
class MyEngine(Engine):
    """PyTorch in float64 on the CPU."""

    name: ClassVar[str] = "my_engine"  # what `engine=` takes
    # Fields would be settings, as those of the other parts are: `threads: int = 1  # its help`.

    def check(self):
        """A line about the device; `require_package` says what to install if a library is missing or broken."""
        with require_package("torch", "pip install torch"):
            import torch  # here and not above: to list plugins must not take as long as PyTorch does
        return f"torch {torch.__version__}, float64"

    def rounds_to(self):
        """The type of its matrix products."""
        return "float64"

    def realize(self, plan):
        """An open session of a plan."""
        self.check()
        return MyEngineSession(plan).open()


class MyEngineSession(Session):
    """A plan with its numbers; every step runs the model's own function, and PyTorch differentiates it."""

    # -- numbers in and out

    def do_open(self):
        import torch

        self.torch, self.ops, self.tensors, self.kept = torch, MyEngineOps(torch), {}, {}

    def do_upload(self, tensor, array):
        self.tensors[tensor.name] = self.torch.tensor(array, dtype=self.torch.float64)

    def do_download(self, tensor):
        return self.tensors[tensor.name].numpy().astype("float32")

    def do_snapshot(self, into):
        return {name: array.copy() for name, array in self.name_arrays(self.arrays(), self.kept).items()}

    def do_restore(self, tensor, values, state):
        self.do_upload(tensor, values)
        self.kept[tensor.name] = dict(state)

    def do_close(self):
        self.tensors = self.kept = {}

    def arrays(self):
        """The tensors as numpy sees them."""
        return {name: tensor.numpy() for name, tensor in self.tensors.items()}

    # -- the model's function

    def forward(self, tensors, micro):
        """Logits; `plan.params` puts around a weight what the recipe wants there, such as an adapter."""
        inputs = {name: self.torch.from_numpy(array) for name, array in micro.items()}
        return self.plan.model.forward(self.ops, self.plan.params(tensors, inputs), inputs)

    def loss(self, tensors, micro):
        """The weighted sum of the losses of a micro-batch; weights of all micro-batches together sum to 1."""
        targets, weights = (self.torch.from_numpy(micro[name]) for name in ("targets", "weights"))
        return self.ops.cross_entropy(self.forward(tensors, micro), targets, weights)

    def do_loss(self, micro):
        with self.torch.no_grad():
            return float(self.loss(self.tensors, micro))

    def do_logits(self, micro, rows):
        with self.torch.no_grad():
            return self.forward(self.tensors, micro)[:rows].numpy().astype("float32")

    # -- training

    def do_build(self):
        """Where an engine compiles its step; this one has nothing to prepare."""

    def do_reset_state(self):
        """The optimiser's state as it begins; here numpy arrays, for `updated` computes in them."""
        import numpy

        shapes = {t.name: self.plan.slots(t) for t in self.plan.trainable}
        self.kept = {n: {slot: numpy.zeros(shape) for slot, shape in of.items()} for n, of in shapes.items()}

    def total(self, micros):
        """The loss of all micro-batches, and the gradients of what trains."""
        learns = {t.name: self.tensors[t.name].clone().requires_grad_() for t in self.plan.trainable}
        loss = 0.0
        for micro in micros:
            part = self.loss({**self.tensors, **learns}, micro)
            part.backward()
            loss += float(part.detach())
        zeros = self.torch.zeros_like
        return loss, {n: (zeros(t) if t.grad is None else t.grad).numpy() for n, t in learns.items()}

    def do_step(self, micros, numbers):
        loss, gradients = self.total(micros)
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        if self.plan.skip_nonfinite and not math.isfinite(loss + norm):
            return StepMetrics(loss, norm)
        clip = min(1.0, self.plan.grad_clip / (norm + 1e-6)) if self.plan.grad_clip else 1.0
        arrays = self.arrays()
        for group, vector in zip(self.plan.updates, numbers, strict=True):
            for name in group.tensors:  # any optimiser's formula, in float64; fused ones would be faster
                new, self.kept[name] = updated(group, vector, arrays[name], clip * gradients[name], self.kept[name])
                self.tensors[name] = self.torch.from_numpy(new)
        return StepMetrics(loss, norm)

    def do_gradients(self, micros):
        return {name: g.astype("float32") for name, g in self.total(micros)[1].items()}


class MyEngineOps(Ops):
    """The primitives; toyexp/interfaces/ops.py has shapes and formulas."""

    def __init__(self, torch):
        self.torch = torch

    def rows(self, table, ids):
        return table[ids.long()]

    def matmul(self, x, w, bias=None):
        return x.to(w.dtype) @ w.T if bias is None else x.to(w.dtype) @ w.T + bias

    def add(self, a, b):
        return a + b

    def mul(self, a, b):
        return a * b

    def scale(self, x, factor):
        return x * factor

    def sigmoid(self, x):
        return x.sigmoid()

    def centre(self, x):
        return x - x.mean(-1, keepdim=True)

    def rms_norm(self, x, w, eps):
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w

    def reshape(self, x, shape):
        return x.reshape(tuple(shape))

    def part(self, x, axis, start, stop):
        return x.narrow(axis, start, stop - start)

    def concat(self, parts, axis):
        return self.torch.cat(list(parts), axis)

    def rope(self, x, rotary):
        positions, rates = self.torch.arange(x.shape[1]), self.torch.tensor(rotary.frequencies(x.shape[3]))
        angle = (positions[:, None] * rates.double())[:, None]  # [T, 1, D/2]
        a, b = x.chunk(2, -1) if rotary.halves else (x[..., 0::2], x[..., 1::2])
        turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        return self.torch.stack(turned, -2 if rotary.halves else -1).reshape(x.shape)

    def attention(self, q, k, v, causal=True):
        share = q.shape[2] // k.shape[2]  # query heads that read one key/value head
        q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])  # [B, H, T, T]
        if causal:
            later = self.torch.ones(scores.shape[2:], dtype=self.torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def cross_entropy(self, logits, targets, weights):
        chosen = logits.log_softmax(-1).gather(-1, targets.long()[..., None])[..., 0]
        return -(chosen * weights).sum()


@hookimpl
def register_engines(register):
    """What toyexp calls to learn of it."""
    register(MyEngine)
