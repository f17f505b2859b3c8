"""An engine that computes with PyTorch in float64 on the CPU. Change it into your own.

`MyEngine` checks whether the engine works on this machine, and opens sessions. `MyEngineSession` stores the tensors of a
run, takes training steps and computes logits; the base class checks all arguments before it calls a `do_...` method.
`MyEngineOps` implements the primitive operations, and the base class composes all other operations from these.
`toyexp help plugins/ops` has shapes and formulas.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from toyexp import Engine, Ops, Session, StepMetrics, hookimpl, require_package, update_tensor


@dataclass
class MyEngine(Engine):
    """PyTorch in float64 on the CPU."""

    name: ClassVar[str] = "my_engine"  # the name to type: `engine=my_engine`
    # Fields are settings, and the comment after a field is its help text. This engine has none.

    def check(self):
        """Return a line about the device. Raise Unavailable, with what to install, if torch is missing or broken."""
        with require_package("torch", "pip install torch"):
            import torch  # imported here, so that `toyexp plugins` stays fast
        return f"torch {torch.__version__}, float64"

    def product_dtype(self):
        """Return the dtype in which matrix products are computed."""
        return "float64"

    def realize(self, plan):
        """Return an open session for the plan, which lists the tensors, the batch and the optimiser of a run."""
        self.check()
        return MyEngineSession(plan).open()


class MyEngineSession(Session):
    """Tensors and training step of one run. PyTorch computes the gradients of the model's forward function."""

    # -- tensors

    def do_open(self):
        import torch

        self.torch, self.ops, self.tensors, self.states = torch, MyEngineOps(torch), {}, {}

    def do_upload(self, tensor, array):
        self.tensors[tensor.name] = self.torch.tensor(array, dtype=self.torch.float64)

    def do_download(self, tensor):
        return self.tensors[tensor.name].numpy().astype("float32")

    def do_snapshot(self, into):
        return {name: array.copy() for name, array in self.name_arrays(self.arrays(), self.states).items()}

    def do_restore(self, tensor, values, state):
        self.do_upload(tensor, values)
        self.states[tensor.name] = dict(state)

    def do_close(self):
        self.tensors = self.states = {}

    def arrays(self):
        """Return the tensors as numpy arrays that share their memory."""
        return {name: tensor.numpy() for name, tensor in self.tensors.items()}

    # -- forward pass

    def forward(self, tensors, micro):
        """Return the logits. `plan.params` attaches the LoRA adapters of the plan to their weights."""
        inputs = {name: self.torch.from_numpy(array) for name, array in micro.items()}
        return self.plan.model.forward(self.ops, self.plan.params(tensors, inputs), inputs)

    def loss(self, tensors, micro):
        """Return the weighted sum of a micro-batch's losses. Over the whole batch, the weights add up to 1."""
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
        """Prepare the training step. This engine has nothing to prepare."""

    def do_reset_state(self):
        """Set the optimiser's state to zeros. It consists of numpy arrays, because `update_tensor` needs them."""
        import numpy

        shapes = {t.name: self.plan.slots(t) for t in self.plan.trainable}
        self.states = {n: {slot: numpy.zeros(s) for slot, s in slots.items()} for n, slots in shapes.items()}

    def loss_and_gradients(self, micros):
        """Return the batch's loss and the gradient of each trained tensor, both summed over the micro-batches."""
        trained = {t.name: self.tensors[t.name].clone().requires_grad_() for t in self.plan.trainable}
        loss = 0.0
        for micro in micros:
            part = self.loss({**self.tensors, **trained}, micro)
            part.backward()
            loss += float(part.detach())
        zeros = self.torch.zeros_like
        return loss, {n: (zeros(t) if t.grad is None else t.grad).numpy() for n, t in trained.items()}

    def do_step(self, micros, numbers):
        loss, gradients = self.loss_and_gradients(micros)
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        if self.plan.skip_nonfinite and not math.isfinite(loss + norm):
            return StepMetrics(loss, norm)
        clip = min(1.0, self.plan.grad_clip / (norm + 1e-6)) if self.plan.grad_clip else 1.0
        arrays = self.arrays()
        for group, vector in zip(self.plan.updates, numbers, strict=True):
            for name in group.tensors:  # the optimiser's formula in float64
                new, self.states[name] = update_tensor(
                    group, vector, arrays[name], clip * gradients[name], self.states[name]
                )
                self.tensors[name] = self.torch.from_numpy(new)
        return StepMetrics(loss, norm)

    def do_gradients(self, micros):
        return {name: g.astype("float32") for name, g in self.loss_and_gradients(micros)[1].items()}


class MyEngineOps(Ops):
    """The primitive ops on torch tensors."""

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

    def div(self, a, b):
        return a / b

    def scale(self, x, factor, offset=0.0):
        return x * factor + offset

    def step(self, x):
        return (x > 0).to(x.dtype)

    def exp(self, x):
        return x.exp()

    def log(self, x):
        return x.log()

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

    def permute(self, x, axes):
        return x.permute(tuple(axes))

    def product(self, a, b, transposed=False):
        return a @ (b.transpose(-1, -2) if transposed else b)

    def sum(self, x, axis=None, keep=False):
        return x.sum() if axis is None else x.sum(axis, keepdim=keep)

    def cumsum(self, x):
        return x.cumsum(-1)

    def softmax(self, x):
        return x.softmax(-1)

    def log_softmax(self, x):
        return x.log_softmax(-1)

    def take(self, x, ids):
        return x.gather(-1, ids.long()[..., None])[..., 0]

    def causal(self, x, window=0, fill=-math.inf):
        seen = self.torch.ones(x.shape[-2:], dtype=self.torch.bool).tril()
        return x.masked_fill(~(seen.triu(1 - window) if window else seen), fill)

    def rope(self, x, rotary):
        positions, rates = self.torch.arange(x.shape[1]), self.torch.tensor(rotary.frequencies(x.shape[3]))
        angle = (positions[:, None] * rates.double())[:, None]  # [T, 1, D/2]
        a, b = x.chunk(2, -1) if rotary.halves else (x[..., 0::2], x[..., 1::2])
        turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        return self.torch.stack(turned, -2 if rotary.halves else -1).reshape(x.shape)

    def attention(self, q, k, v, causal=True, **settings):
        return self.compose_attention(q, k, v, causal, **settings)  # of the ops above

    def cross_entropy(self, logits, targets, weights, smoothing=0.0, z_loss=0.0):
        flat, options = logits.flatten(0, -2), {"reduction": "none", "label_smoothing": smoothing}
        losses = self.torch.nn.functional.cross_entropy(flat, targets.long().flatten(), **options)
        return ((losses + z_loss * flat.logsumexp(-1) ** 2) * weights.flatten()).sum()


@hookimpl
def register_engines(register):
    """Register the class. toyexp calls this function when it loads the module."""
    register(MyEngine)
