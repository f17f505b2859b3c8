"""One run's tensors and training step in PyTorch.

All trainable tensors are views of one flat vector, and their gradients of another: zeroing, the norm, clipping and an
element-wise optimiser are then each a single pass over contiguous memory, whatever the number of tensors.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toyexp import Batch, Decoder, LoraAdapter, Plan, PlanTensor, Recompute, Session, StepMetrics, reason_to_recompute
from toyexp_torch.host_copy import HostCopy, wait_for_copies
from toyexp_torch.kernels.packed import Packed
from toyexp_torch.loss import ProjectedLossOps, ops_of_loss
from toyexp_torch.ops import CachedDecoder, TorchOps
from toyexp_torch.resident import KEPT, Resident
from toyexp_torch.update import ALIGNMENT, Update


def places_of(plan: Plan) -> tuple[dict[str, slice], int]:
    """Where in a flat vector each tensor that trains stands, in the order of the plan's groups, and its length."""
    places: dict[str, slice] = {}
    start = 0
    for tensor in (plan.tensor(name) for group in plan.updates for name in group.tensors):
        places[tensor.name] = slice(start, start + tensor.size)
        start += -(-tensor.size // ALIGNMENT) * ALIGNMENT
    return places, start


@dataclass(frozen=True)
class Wanted:
    """The settings of an engine as a session needs them."""

    device: str  # torch's name of it
    title: str  # the version, and what computes
    dtype: str  # float32 | bfloat16 | float64
    compile: bool
    deterministic: bool  # only kernels that repeat to the bit
    packed: bool  # keep frozen matrices in their file's type
    recompute: bool  # hold the activations of one block at a time and compute them twice
    threads: int | None = None  # None leaves the process's own
    tf32: bool | None = None  # whether float32 products may round their inputs; None leaves that as it is
    capture: bool = False  # launch the steps of a GPU as graphs


class TorchSession(Session):
    """A Plan on one torch device."""

    def __init__(self, plan: Plan, wanted: Wanted, update: Callable[..., Update] = Update):
        super().__init__(plan)
        self._own = plan  # with the rows that this process computes
        self._wanted, self._make_update = wanted, update
        self._device = torch.device(wanted.device)
        self._dtype = torch.float64 if wanted.dtype == "float64" else torch.float32
        self._gathers = wanted.device == "cuda"  # where a kernel for each gradient is what costs
        self._halved = wanted.device == "cuda" and wanted.dtype == "bfloat16"
        self._ops = TorchOps(wanted.recompute, torch.bfloat16 if self._halved else None)
        self._loss_ops = ops_of_loss(self._ops, wanted.device)
        self._settings = Switches(wanted)
        self._tensors: dict[str, Tensor | Packed] = {}
        self._exact: dict[str, np.ndarray] = {}  # frozen values that the device holds rounded
        self._resident: Resident | None = None  # what computes on a GPU

    def do_open(self) -> None:
        self._places, length = places_of(self.plan)
        self._flat, self._grad = self._vectors(length)
        self._rounded = torch.zeros_like(self._flat, dtype=torch.bfloat16) if self._halved else None
        self._leaves: list[Tensor] = []  # what the model computes with
        self._grads: list[Tensor] = []  # of each leaf
        for name, here in self._places.items():
            tensor = self.plan.tensor(name)
            weights = self._flat if self._rounded is None or not tensor.has_weight_decay else self._rounded
            self._tensors[tensor.name] = leaf = weights[here].view(tensor.shape).detach().requires_grad_()
            self._leaves.append(leaf)
            self._grads.append(self._grad[here].view(tensor.shape))
            leaf.grad = None if self._gathers else self._grads[-1]
        self._update = self._make_update(
            self.plan, self._flat, self._grad, self._places, self._wanted.compile, self._rounded
        )

    def _vectors(self, length: int) -> tuple[Tensor, Tensor]:
        """What holds the tensors that train, and their gradients."""
        flat = torch.zeros(length, dtype=self._dtype, device=self._device)
        return flat, torch.zeros_like(flat)

    def describe(self) -> dict[str, Any]:
        """Device, precision, threads, and of a GPU whether its steps are captured, or why they are not."""
        captured = {"captured": self._uncaptured or True} if self._device.type == "cuda" else {}
        return captured | {
            "framework": f"torch {torch.__version__}",
            "device": self._wanted.title,
            "dtype": self._wanted.dtype,
            "compile": self._wanted.compile,
            "threads": self._settings.threads or torch.get_num_threads(),
            "devices": 1,
        }

    @property
    def _uncaptured(self) -> str:
        """Why a GPU's kernels are launched one by one; empty where they are not."""
        return "engine.dtype=float64" if self._resident is None else self._resident.refused

    def device_bytes(self) -> int | None:
        # PyTorch counts what the whole process has, and not its sessions.
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def notes(self) -> Iterable[str]:
        if self._device.type == "cuda" and self._wanted.capture and self._uncaptured:
            yield f"its steps are launched kernel by kernel and not as one graph: {self._uncaptured}"

    # -- the contract -------------------------------------------------------------------------------------------

    def do_load(self, tensor: PlanTensor) -> None:
        packed = Packed.read(tensor, self._device, self._dtype) if self._wanted.packed else None
        if packed is None:
            super().do_load(tensor)
        else:
            self._tensors[tensor.name] = packed

    def do_upload(self, tensor: PlanTensor, array: np.ndarray) -> None:
        if not tensor.trainable:
            dtype = self._dtype
            if self._halved and tensor.has_weight_decay:  # a matrix: its products round it anyway
                self._exact[tensor.name], dtype = array.copy(), torch.bfloat16
            self._tensors[tensor.name] = torch.from_numpy(array).to(self._device, dtype, copy=True)
            return
        self._set(tensor, array)

    def _set(self, tensor: PlanTensor, array: np.ndarray) -> None:
        with torch.no_grad():
            self._weights(tensor).copy_(torch.from_numpy(array))
            if self._rounded is not None:
                here = self._places[tensor.name]
                self._rounded[here].copy_(self._flat[here])

    def _weights(self, tensor: PlanTensor) -> Tensor:
        """What training changes of a tensor."""
        return self._flat[self._places[tensor.name]].view(tensor.shape)

    def do_download(self, tensor: PlanTensor) -> np.ndarray:
        if tensor.trainable:
            return _host(self._weights(tensor))
        if tensor.name in self._exact:
            return self._exact[tensor.name].copy()
        values = self._tensors[tensor.name]
        return _host(values.dense() if isinstance(values, Packed) else values)

    def do_build(self) -> None:
        self._params = None if self.plan.dropout_adapters else self.plan.params(self._tensors)
        self._forward: Callable[[dict[str, Tensor]], Tensor] = self._logits
        self._loss: Callable[[dict[str, Tensor]], Tensor] = self._weighted_loss
        if self._wanted.compile:
            # One eager pass fills the tables that ops keep, so that the compiler finds them as constants.
            shape = {n: np.zeros((self._own.rows, *s.shape), s.dtype) for n, s in self.plan.inputs.items()}
            with torch.no_grad(), self._autocast():
                self._logits(self._upload_batch(shape))
            self._loss = torch.compile(self._loss, dynamic=False)
            self._forward = torch.compile(self._forward, dynamic=False)
        if self._device.type == "cuda" and self._dtype is torch.float32:
            with self._settings.applied():
                self._resident = self._make_resident()

    def _make_resident(self) -> Resident | None:
        """What computes on the GPU."""
        return Resident(self._own, self._update, self._measured, self._evaluated, self._wanted.capture, self.selects)

    @property
    def selects(self) -> bool:
        """Whether the loss is told which positions weigh something."""
        targets = self.plan.inputs["targets"]
        count = self.plan.rows * math.prod(targets.shape) * (targets.below or 0)
        return isinstance(self._loss_ops, ProjectedLossOps) and self._loss_ops.selects(count)

    def _loss_of(self, micro: dict[str, Tensor]) -> Tensor:
        """The loss of a micro-batch, beside whose inputs the positions may stand that weigh something."""
        if isinstance(self._loss_ops, ProjectedLossOps):
            self._loss_ops.kept = micro.get(KEPT)
        with self._autocast():
            return self._loss({name: tensor for name, tensor in micro.items() if name != KEPT})

    def _logits(self, batch: dict[str, Tensor]) -> Tensor:
        return self._computed(self._ops, batch)

    def _computed(self, ops: TorchOps, batch: dict[str, Tensor]) -> Any:
        params = self.plan.params(self._tensors, batch) if self._params is None else self._params
        return self.plan.model.forward(ops, params, batch)

    def _weighted_loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self._computed(self._loss_ops, batch)
        return self._loss_ops.cross_entropy(logits, batch["targets"], batch["weights"])

    def do_reset_state(self) -> None:
        for state in self._update.state.values():
            for values in state.values():
                values.zero_()

    @property
    def depth(self) -> int:
        """On a GPU 2: the host only queues what is to be done there."""
        return 1 if self._resident is None else 2

    def do_launch(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> Callable[[], StepMetrics]:
        if self._resident is None:
            return super().do_launch(micros, numbers)
        with self._settings.applied():
            wait = self._resident.launch(micros, numbers)
        return lambda: StepMetrics(*wait())

    def do_step(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> StepMetrics:
        with self._settings.applied():
            metrics = self._measured([self._upload_batch(micro) for micro in micros])
            if self.plan.skip_nonfinite and not all(map(math.isfinite, metrics.tolist())):
                return StepMetrics(*metrics.tolist())
            if self.plan.grad_clip:
                self._grad.mul_((self.plan.grad_clip / (metrics[1] + 1e-6)).clamp_(max=1.0))
            self._update(numbers)
            return StepMetrics(*metrics.tolist())

    def _measured(self, micros: Sequence[dict[str, Tensor]]) -> Tensor:
        """Leaves the summed gradient in the flat vector and returns the loss and the gradient's norm, [2]."""
        loss = self._backward(micros)
        norm = torch.linalg.vector_norm(self._grad)
        return torch.stack((loss, norm.to(loss.dtype)))  # one transfer, one wait

    def _backward(self, micros: Sequence[dict[str, Tensor]]) -> Tensor:
        """Leaves the summed gradient in the flat vector and returns the summed loss."""
        losses: list[Tensor] = []
        if not self._gathers:
            self._grad.zero_()
        for micro in micros:
            loss = self._loss_of(micro)
            if self._gathers:
                self._gather(loss, first=not losses)
            else:
                loss.backward()  # adds to what the leaves have, which is the flat vector
            losses.append(loss.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _gather(self, loss: Tensor, first: bool) -> None:
        """Puts a loss's gradients into the flat vector, or adds them: all of one type with a few kernels."""
        found = torch.autograd.grad(loss, self._leaves, allow_unused=True, materialize_grads=True)
        add = torch._foreach_copy_ if first else torch._foreach_add_
        for kind in {gradient.dtype for gradient in found}:
            pairs = [(g, f.contiguous()) for g, f in zip(self._grads, found, strict=True) if f.dtype == kind]
            add([g for g, _ in pairs], [f for _, f in pairs])

    def do_gradients(self, micros: Sequence[Batch]) -> dict[str, np.ndarray]:
        with self._settings.applied():
            self._backward([self._upload_batch(micro) for micro in micros])
        return {name: _host(gradient) for name, gradient in zip(self._places, self._grads, strict=True)}

    def do_loss(self, micro: Batch) -> float:
        with self._settings.applied():
            if self._resident is not None:
                return float(self._resident.loss(micro))
            return float(self._evaluated(self._upload_batch(micro)))

    def _evaluated(self, micro: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return self._loss_of(micro)

    def do_logits(self, micro: Batch, rows: int) -> np.ndarray:
        with self._settings.applied(), torch.no_grad(), self._autocast():
            return _host(self._forward(self._upload_batch(micro))[:rows])

    def do_snapshot(self, into: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        tensors = self.name_arrays({t.name: self._weights(t) for t in self.plan.trainable}, self._update.state)
        copy = into if isinstance(into, HostCopy) and into.fits(tensors) else HostCopy(tensors)
        copy.take(tensors)
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
        # Dropout is of training: a plan without it needs no mask of what follows.
        whole = [replace(a, dropout=0.0) if isinstance(a, LoraAdapter) else a for a in self.plan.adapters]
        params = replace(self.plan, adapters=tuple(whole)).params(self._tensors)

        def forward(ops: TorchOps, ids: np.ndarray) -> np.ndarray:
            with self._settings.applied(), torch.no_grad(), self._autocast():
                batch = {self.plan.model.reads.sequence: torch.from_numpy(ids).to(self._device)}
                return _host(self.plan.model.forward(ops, params, batch)[0, -1])

        return CachedDecoder(self, forward)

    def do_close(self) -> None:
        if self._resident is not None:
            self._resident.close()
        self._tensors.clear()
        self._leaves = self._grads = []
        self._params = self._forward = self._loss = None  # type: ignore[assignment]
        self._flat = self._grad = self._rounded = self._update = self._resident = None  # type: ignore[assignment]
        self._give_back()

    # -- helpers ------------------------------------------------------------------------------------------------

    def _give_back(self) -> None:
        """Gives the GPU's memory to other processes."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._wanted.dtype != "bfloat16":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _upload_batch(self, micro: Batch) -> dict[str, Tensor]:
        batch = {}
        for name in self.plan.inputs:
            host = torch.from_numpy(micro[name])
            if self._device.type == "cuda":
                host = host.pin_memory()  # lets the copy run beside the host's work
            dtype = self._dtype if host.is_floating_point() else host.dtype
            batch[name] = host.to(self._device, dtype, non_blocking=True)
        return batch


def _host(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float32, copy=True).numpy()


class Switches:
    """The process-wide switches a session wants, in force only while it computes.

    Sessions of other settings live in the same process (sweeps, parity), so nothing is left changed behind.
    """

    def __init__(self, wanted: Wanted):
        self.threads, self._tf32, self._deterministic = wanted.threads, wanted.tf32, wanted.deterministic
        if self._deterministic and wanted.device == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Sets what differs, and puts it back."""
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
