"""Tensors and training step of one run in PyTorch.

All trainable tensors are views of one long vector (the flat vector), and their gradients are views of another. Thus
zeroing, norm, clipping and element-wise optimisers each take one pass over contiguous memory.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toyexp import (
    Batch,
    CrossEntropy,
    Decoder,
    LoraAdapter,
    Params,
    Plan,
    PlanTensor,
    Recompute,
    Session,
    StepMetrics,
    reason_to_recompute,
)
from toyexp_torch.host_copy import HostCopy, wait_for_copies
from toyexp_torch.kernels.packed import Packed
from toyexp_torch.loss import ProjectedLossOps, make_loss_ops
from toyexp_torch.ops import CachedDecoder, TorchOps
from toyexp_torch.resident import SELECTED, Resident
from toyexp_torch.update import ALIGNMENT, Update


def flat_layout(plan: Plan) -> tuple[dict[str, slice], int]:
    """Lay out all trainable tensors in one vector. Return each tensor's slice by name, and the vector's length.

    The tensors are in the order of the plan's parameter groups.
    """
    slices: dict[str, slice] = {}
    start = 0
    for tensor in (plan.tensor(name) for group in plan.updates for name in group.tensors):
        slices[tensor.name] = slice(start, start + tensor.size)
        start += -(-tensor.size // ALIGNMENT) * ALIGNMENT
    return slices, start


@dataclass(frozen=True)
class SessionSettings:
    """Settings of the engine, converted to the values that a session needs."""

    device: str  # torch's name of the device
    title: str  # torch's version and the hardware, as shown to the user
    dtype: str  # float32 | bfloat16 | float64
    compile: bool
    deterministic: bool  # use only kernels whose results repeat bit for bit
    packed: bool  # keep frozen matrices in their GGUF type
    recompute: bool  # activation checkpointing, block by block
    threads: int | None = None  # CPU threads; None: do not change the number that the process uses
    tf32: bool | None = None  # round the inputs of float32 products to TF32; None: do not change torch's setting
    attention_dtype: torch.dtype | None = None  # round queries, keys and values to this dtype; None: do not round
    capture: bool = False  # launch a training step as one CUDA graph


class TorchSession(Session):
    """Session that holds a plan's tensors on one torch device and trains them."""

    def __init__(self, plan: Plan, settings: SessionSettings, update: Callable[..., Update] = Update):
        super().__init__(plan)
        self._local_plan = plan  # the plan with the number of rows that this rank computes
        self._settings, self._make_update = settings, update
        self._device = torch.device(settings.device)
        self._dtype = torch.float64 if settings.dtype == "float64" else torch.float32
        self._gathers_gradients = settings.device == "cuda"  # with a few multi-tensor kernels, not one per gradient
        in_ops = not plan.model.engines  # other code expects weights in float32, as autocast does
        self._keeps_bfloat16 = settings.device == "cuda" and settings.dtype == "bfloat16" and in_ops
        activations = torch.bfloat16 if self._keeps_bfloat16 else None
        self._ops = TorchOps(settings.recompute, activations, settings.attention_dtype)
        self._loss_ops = make_loss_ops(self._ops, settings.device, settings.compile)
        self._switches = Switches(settings)
        self._tensors: dict[str, Tensor | Packed] = {}
        self._exact_values: dict[str, np.ndarray] = {}  # frozen values that the device holds rounded to bfloat16
        self._resident: Resident | None = None  # launches the step and the loss on a GPU

    def do_open(self) -> None:
        self._slices, length = flat_layout(self.plan)
        self._flat, self._grad = self._allocate_vectors(length)
        self._rounded = torch.zeros_like(self._flat, dtype=torch.bfloat16) if self._keeps_bfloat16 else None
        self._leaves: list[Tensor] = []  # trainable tensors as seen by autograd
        self._grads: list[Tensor] = []  # view of the gradient vector for each leaf
        for name, part in self._slices.items():
            tensor = self.plan.tensor(name)
            weights = self._flat if self._rounded is None or not tensor.has_weight_decay else self._rounded
            self._tensors[tensor.name] = leaf = weights[part].view(tensor.shape).detach().requires_grad_()
            self._leaves.append(leaf)
            self._grads.append(self._grad[part].view(tensor.shape))
            leaf.grad = None if self._gathers_gradients else self._grads[-1]
        self._update = self._make_update(
            self.plan, self._flat, self._grad, self._slices, self._settings.compile, self._rounded
        )

    def _allocate_vectors(self, length: int) -> tuple[Tensor, Tensor]:
        """Return new flat vectors for the trainable tensors and for their gradients, filled with zeros."""
        flat = torch.zeros(length, dtype=self._dtype, device=self._device)
        return flat, torch.zeros_like(flat)

    def describe(self) -> dict[str, Any]:
        """Return device, precision and threads for the event run_start; see Session.

        On a GPU, `captured` is True if steps are CUDA graphs, or the reason why they are not.
        """
        captured = {"captured": self._uncaptured_reason or True} if self._device.type == "cuda" else {}
        return captured | {
            "framework": f"torch {torch.__version__}",
            "device": self._settings.title,
            "dtype": self._settings.dtype,
            "compile": self._settings.compile,
            "threads": self._switches.threads or torch.get_num_threads(),
            "devices": 1,
        }

    @property
    def _uncaptured_reason(self) -> str:
        """Reason why steps on a GPU are not captured as CUDA graphs; empty if they are."""
        return "engine.dtype=float64" if self._resident is None else self._resident.uncaptured_reason

    def device_bytes(self) -> int | None:
        # PyTorch counts the memory of the whole process, not of one session.
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def notes(self) -> Iterable[str]:
        if engines := self.plan.model.engines:
            yield (
                f"model={self.plan.model.name} runs on {', '.join(engines)} only; it has no GGUF file and no cached "
                "generation, and its weights go to model.safetensors"
            )
        if self._device.type == "cuda" and self._settings.capture and self._uncaptured_reason:
            yield f"its steps are launched kernel by kernel, not as one CUDA graph: {self._uncaptured_reason}"

    # -- the session interface -------------------------------------------------------------------------------------

    def do_load(self, tensor: PlanTensor) -> None:
        packed = Packed.read(tensor, self._device, self._dtype) if self._settings.packed else None
        if packed is None:
            super().do_load(tensor)
        else:
            self._tensors[tensor.name] = packed

    def do_upload(self, tensor: PlanTensor, array: np.ndarray) -> None:
        if not tensor.trainable:
            dtype = self._dtype
            if self._keeps_bfloat16 and tensor.has_weight_decay:  # a matrix, which products round to bfloat16 anyway
                self._exact_values[tensor.name], dtype = array.copy(), torch.bfloat16
            self._tensors[tensor.name] = torch.from_numpy(array).to(self._device, dtype, copy=True)
            return
        self._set(tensor, array)

    def _set(self, tensor: PlanTensor, array: np.ndarray) -> None:
        with torch.no_grad():
            self._weights(tensor).copy_(torch.from_numpy(array))
            if self._rounded is not None:
                part = self._slices[tensor.name]
                self._rounded[part].copy_(self._flat[part])

    def _weights(self, tensor: PlanTensor) -> Tensor:
        """Return a trainable tensor as a view of the flat vector, in the precision that the optimiser updates."""
        return self._flat[self._slices[tensor.name]].view(tensor.shape)

    def do_download(self, tensor: PlanTensor) -> np.ndarray:
        if tensor.trainable:
            return _to_numpy(self._weights(tensor))
        if tensor.name in self._exact_values:
            return self._exact_values[tensor.name].copy()
        values = self._tensors[tensor.name]
        return _to_numpy(values.dense() if isinstance(values, Packed) else values)

    def do_build(self) -> None:
        is_fixed = not (self.plan.dropout_adapters or self.plan.neftune)
        self._params = self.plan.params(self._tensors) if is_fixed else None
        self._forward: Callable[[dict[str, Tensor]], Tensor] = self._logits
        objective = self.plan.objective
        self._loss: Callable[[dict[str, Tensor]], Tensor] = partial(self._run_objective, objective.training_loss)
        self._held_out_loss: Callable[[dict[str, Tensor]], Tensor]
        self._held_out_loss = partial(self._run_objective, objective.held_out_loss)
        if self._settings.compile:
            # One eager pass fills the ops' tables (of RoPE), which the compiler then treats as constants.
            blank = {n: np.zeros((self._local_plan.rows, *s.shape), s.dtype) for n, s in self.plan.inputs.items()}
            with torch.no_grad(), self._autocast():
                self._logits(self._upload_batch(blank))
            self._loss = torch.compile(self._loss, dynamic=False)
            self._held_out_loss = torch.compile(self._held_out_loss, dynamic=False)
            self._forward = torch.compile(self._forward, dynamic=False)
        if self._device.type == "cuda" and self._dtype is torch.float32:
            with self._switches.apply():
                self._resident = self._make_resident()

    def _make_resident(self) -> Resident | None:
        functions = self._compute_metrics, self._evaluate_loss
        return Resident(self._local_plan, self._update, *functions, self._settings.capture, self.selects_positions)

    @property
    def selects_positions(self) -> bool:
        """True if micro-batches must have an entry `SELECTED`, the list of all positions of non-zero target weight.

        The loss then computes only the logits of these positions.
        """
        if type(self.plan.objective) is not CrossEntropy:  # it may need the logits of other positions
            return False
        targets = self.plan.inputs["targets"]
        count = self.plan.rows * math.prod(targets.shape) * (targets.below or 0)
        return isinstance(self._loss_ops, ProjectedLossOps) and self._loss_ops.selects_positions(count)

    def _compute_loss(self, micro: dict[str, Tensor], held_out: bool = False) -> Tensor:
        """Return the loss of a micro-batch.

        If the micro-batch has an entry `SELECTED`, compute logits only at the positions that it lists.
        """
        if isinstance(self._loss_ops, ProjectedLossOps):
            self._loss_ops.selected = micro.get(SELECTED)
        loss = self._held_out_loss if held_out else self._loss
        with self._autocast():
            return loss({name: tensor for name, tensor in micro.items() if name != SELECTED})

    def _logits(self, batch: dict[str, Tensor]) -> Tensor:
        return self.plan.model.forward(self._ops, self._get_params(batch), batch)

    def _get_params(self, batch: dict[str, Tensor]) -> Params:
        return self.plan.params(self._tensors, batch) if self._params is None else self._params

    def _run_objective(self, method: Callable[..., Any], batch: dict[str, Tensor]) -> Any:
        """Return the result of the method `training_loss`, `held_out_loss` or `metrics` of the plan's objective."""
        return method(self._loss_ops, self.plan.model, self._get_params(batch), batch)

    def do_reset_state(self) -> None:
        for state in self._update.state.values():
            for values in state.values():
                values.zero_()

    @property
    def depth(self) -> int:
        """Maximum number of launched steps whose metrics are unread: 2 if a GPU queues steps, otherwise 1."""
        return 1 if self._resident is None else 2

    def do_launch(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> Callable[[], StepMetrics]:
        if self._resident is None:
            return super().do_launch(micros, numbers)
        with self._switches.apply():
            wait = self._resident.launch(micros, numbers)
        return lambda: StepMetrics(*wait())

    def do_step(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> StepMetrics:
        with self._switches.apply():
            metrics = self._compute_metrics([self._upload_batch(micro) for micro in micros])
            if self.plan.skip_nonfinite and not all(map(math.isfinite, metrics.tolist())):
                return StepMetrics(*metrics.tolist())
            if self.plan.grad_clip:
                self._grad.mul_((self.plan.grad_clip / (metrics[1] + 1e-6)).clamp_(max=1.0))
            self._update(numbers)
            return StepMetrics(*metrics.tolist())

    def _compute_metrics(self, micros: Sequence[dict[str, Tensor]]) -> Tensor:
        """Write the gradients, summed over micro-batches, into the flat gradient vector.

        Return a tensor with two elements: the summed loss, and the norm of all gradients before clipping.
        """
        loss = self._backward(micros)
        norm = torch.linalg.vector_norm(self._grad)
        return torch.stack((loss, norm.to(loss.dtype)))  # the host fetches both with one transfer

    def _backward(self, micros: Sequence[dict[str, Tensor]]) -> Tensor:
        """Write the gradients, summed over micro-batches, into the flat gradient vector; return the summed loss."""
        losses: list[Tensor] = []
        if not self._gathers_gradients:
            self._grad.zero_()
        for micro in micros:
            loss = self._compute_loss(micro)
            if self._gathers_gradients:
                self._gather(loss, first=not losses)
            else:
                loss.backward()  # accumulates into leaf.grad, a view of the flat vector
            losses.append(loss.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _gather(self, loss: Tensor, first: bool) -> None:
        """Compute the gradients of `loss` and add them to the flat gradient vector.

        One multi-tensor kernel per dtype adds them. If `first` is True, overwrite the vector instead of adding to it.
        """
        gradients = torch.autograd.grad(loss, self._leaves, allow_unused=True, materialize_grads=True)
        add = torch._foreach_copy_ if first else torch._foreach_add_
        for kind in {gradient.dtype for gradient in gradients}:
            pairs = [(g, f.contiguous()) for g, f in zip(self._grads, gradients, strict=True) if f.dtype == kind]
            add([g for g, _ in pairs], [f for _, f in pairs])

    def do_gradients(self, micros: Sequence[Batch]) -> dict[str, np.ndarray]:
        with self._switches.apply():
            self._backward([self._upload_batch(micro) for micro in micros])
        return {name: _to_numpy(gradient) for name, gradient in zip(self._slices, self._grads, strict=True)}

    def do_loss(self, micro: Batch) -> float:
        with self._switches.apply():
            if self._resident is not None:
                return float(self._resident.loss(micro))
            return float(self._evaluate_loss(self._upload_batch(micro)))

    def _evaluate_loss(self, micro: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return self._compute_loss(micro, held_out=True)

    def do_metrics(self, micro: Batch) -> Mapping[str, float]:
        with self._switches.apply(), torch.no_grad(), self._autocast():
            metrics = self._run_objective(self.plan.objective.metrics, self._upload_batch(micro))
            return {name: float(value) for name, value in metrics.items()}

    def do_logits(self, micro: Batch, rows: int) -> np.ndarray:
        with self._switches.apply(), torch.no_grad(), self._autocast():
            return _to_numpy(self._forward(self._upload_batch(micro))[:rows])

    def do_snapshot(self, into: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        tensors = self.name_arrays({t.name: self._weights(t) for t in self.plan.trainable}, self._update.state)
        copy = into if isinstance(into, HostCopy) and into.matches(tensors) else HostCopy(tensors)
        copy.copy_from(tensors)
        wait_for_copies(self._device)
        return copy

    def do_restore(self, tensor: PlanTensor, values: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        self._set(tensor, values)
        with torch.no_grad():
            for slot, array in state.items():
                self._update.state[tensor.name][slot].copy_(torch.from_numpy(array))

    def do_decoder(self) -> Decoder:
        if reason_to_recompute(self.plan):
            return Recompute(self)
        # Without dropout the plan needs no masks from the batch.
        adapters = [replace(a, dropout=0.0) if isinstance(a, LoraAdapter) else a for a in self.plan.adapters]
        params = replace(self.plan, adapters=tuple(adapters)).params(self._tensors)

        def forward(ops: TorchOps, ids: np.ndarray) -> np.ndarray:
            with self._switches.apply(), torch.no_grad(), self._autocast():
                batch = {self.plan.model.reads.sequence: torch.from_numpy(ids).to(self._device)}
                return _to_numpy(self.plan.model.forward(ops, params, batch)[0, -1])

        return CachedDecoder(self, forward)

    def do_close(self) -> None:
        if self._resident is not None:
            self._resident.close()
        self._tensors.clear()
        self._leaves = self._grads = []
        self._params = self._forward = self._loss = self._held_out_loss = None  # type: ignore[assignment]
        self._flat = self._grad = self._rounded = self._update = self._resident = None  # type: ignore[assignment]
        self._release_memory()

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _release_memory(self) -> None:
        """Free the GPU memory that PyTorch has cached, so that other processes can use it."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._settings.dtype != "bfloat16":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _upload_batch(self, micro: Batch) -> dict[str, Tensor]:
        batch = {}
        for name in self.plan.inputs:
            host = torch.from_numpy(micro[name])
            if self._device.type == "cuda":
                host = host.pin_memory()  # makes the copy asynchronous
            dtype = self._dtype if host.is_floating_point() else host.dtype
            batch[name] = host.to(self._device, dtype, non_blocking=True)
        return batch


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float32, copy=True).numpy()


class Switches:
    """Process-wide torch settings of a session (threads, determinism, TF32), in effect only while the session computes.

    In sweeps and `toyexp parity`, sessions with different settings share a process. Therefore each session restores the
    previous values after a computation.
    """

    def __init__(self, settings: SessionSettings):
        self.threads, self._tf32, self._deterministic = settings.threads, settings.tf32, settings.deterministic
        if self._deterministic and settings.device == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, when it starts

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Apply the session's settings to the process, and restore the previous ones at the end of the body."""
        threads, matmul = torch.get_num_threads(), torch.backends.cuda.matmul
        with contextlib.ExitStack() as undo:
            if self.threads is not None and threads != self.threads:
                torch.set_num_threads(self.threads)
                undo.callback(torch.set_num_threads, threads)
            if self._deterministic and not torch.are_deterministic_algorithms_enabled():
                torch.use_deterministic_algorithms(True)
                undo.callback(torch.use_deterministic_algorithms, False)
            if self._tf32 is not None and matmul.allow_tf32 != self._tf32:
                matmul.allow_tf32 = self._tf32
                undo.callback(setattr, matmul, "allow_tf32", not self._tf32)
            yield
