"""Models that are PyTorch modules. torch is imported only when a module is used."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from toyexp import (
    IMAGES,
    TOKENS,
    Batch,
    Batches,
    Dataset,
    Kind,
    Model,
    Ops,
    Params,
    TensorSpec,
    UserError,
    Values,
    import_local,
)
from toyexp.base import error_location
from toyexp_torch.engines import import_torch

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

__tracebackhide__ = True  # error messages name a line of the user's module, not of this one
TRIAL_ROWS = 2  # rows of zeros with which the module is tried before a run


@dataclass
class TorchModule(Model):
    """Any torch.nn.Module; runs on the PyTorch engines only."""

    name: ClassVar[str] = "torch_module"
    reads: ClassVar[Kind] = TOKENS  # of an object that `adapt` returns: the kind of the data
    engines: ClassVar[tuple[str, ...]] = ("cpu", "cuda", "mps")
    cached_decoding: ClassVar[bool] = False
    score_names: ClassVar[tuple[str, ...]] = ("accuracy",)
    module: ClassVar[Any] = None  # of an object: the torch.nn.Module, which stays unchanged

    path: str = ""  # module and class of the network, such as my_module:Net; only allowed on the command line
    arguments: dict[str, Any] = field(default_factory=dict)  # keyword arguments: {width: 64} calls Net(width=64)
    context: int = 64  # tokens in a row; has no effect on images and vectors

    @classmethod
    def wrap(cls, module: Any, context: int = 64) -> TorchModule:
        """Return a model for `toyexp.train(model=...)` that starts from the weights of `module`."""
        model = cls(context=context)
        model.module = module  # type: ignore[misc]  # of this object
        return model

    def check(self) -> None:
        """Raise UserError if there is no module, or if it has parameters that cannot be trained."""
        self.require_positive("context")
        if self.module is None:
            self.module = self._build(0)  # type: ignore[misc]  # of this object
        parameters = dict(self.module.named_parameters())
        if not any(p.requires_grad for p in parameters.values()):
            raise UserError("model=torch_module: the module has no parameter with requires_grad=True")
        for name, parameter in parameters.items():
            if not parameter.is_floating_point():
                raise UserError(f"model=torch_module: {name} is {parameter.dtype}; its parameters must be floats")

    def _build(self, seed: int) -> Any:
        """Return a new module from `path`, with the initial values that it draws after `torch.manual_seed(seed)`."""
        if not self.path:
            hint = "type model.path=my_module:Net, or in Python pass the module: toyexp.train(model=net)"
            raise UserError(f"model=torch_module: has no module; {hint}")
        make, torch = import_local(self.path, "model.path"), import_torch()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                module = make(**self.arguments)
        except Exception as error:
            why = f"{type(error).__name__}: {error}{error_location(error)}"
            raise UserError(f"model.path={self.path} with model.arguments={self.arguments}: {why}") from error
        if not isinstance(module, torch.nn.Module):
            raise UserError(f"model.path={self.path}: gives a {type(module).__name__}, expected a torch.nn.Module")
        return module

    def adapt(self, kind: Kind) -> TorchModule:
        """Return a copy of the model that reads data of this kind, such as images or token ids."""
        model = copy.copy(self)
        model.reads = kind  # type: ignore[misc]  # of this object
        return model

    def inputs(self) -> dict[str, tuple[int | str, ...]]:
        """Return the input that the module reads as {name: ("T",)}; T is a size that the run sets."""
        return {self.reads.sequence or self.reads.name: ("T",)}

    def batches(self, dataset: Dataset, rows: int, seed: int) -> Batches:
        """Return the dataset's batches."""
        return dataset.batches(self.context if self.reads.sequence else 0, rows, seed)

    def tensors(self) -> list[TensorSpec]:
        """Return the module's parameters under their own names; those without requires_grad stay frozen."""
        parameters = self.module.named_parameters() if self.module is not None else ()
        return [TensorSpec(n, tuple(p.shape) or (1,), _Drawn(self), p.requires_grad) for n, p in parameters]

    def initial_values(self, seed: int) -> Mapping[str, np.ndarray]:
        """Return the initial values of all parameters, keyed by name.

        If the module was passed as an object, return its values. If `path` names it, build it with this seed.
        """
        if seed not in self._values:
            self._values.clear()
            module = self._build(seed) if self.path else self.module
            self._values[seed] = {n: p.detach().float().cpu().numpy() for n, p in module.named_parameters()}
        return self._values[seed]

    @cached_property
    def _values(self) -> dict[int, Mapping[str, np.ndarray]]:
        return {}

    @cached_property
    def _buffers(self) -> dict[Any, dict[str, Tensor]]:
        return {}

    @cached_property
    def _trials(self) -> dict[Any, tuple[int, ...]]:
        return {}

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Any]) -> Any:
        """Return the module's result for the batch's input: images as [B, C, H, W], token ids as int64.

        In the check before a run, whose tensors have only shapes, return the shape of the result.
        """
        torch = import_torch()
        source = next(name for name in batch if name not in ("targets", "weights"))
        x = batch[source]
        if not isinstance(x, torch.Tensor):
            shape = self._try_shape(source, x.shape)
            return type(next(iter(p.values())))(shape)
        shapes = {name: parameter.shape for name, parameter in self.module.named_parameters()}
        values = {name: p[name] if shape else p[name][0] for name, shape in shapes.items()}
        buffers = self._place_buffers(x.device, next(iter(values.values())).dtype)
        with _vectorise_attention(ops):
            return self._call(values, buffers, source, x)

    def _call(self, values: Mapping[str, Tensor], buffers: dict[str, Tensor], source: str, x: Tensor) -> Any:
        """Return the module's result for the input `x`, with `values` as its parameters and `buffers` as its buffers.

        If the module replaces a buffer, store the new buffer in `buffers`.
        """
        torch = import_torch()
        if self.reads.sequence == source:
            x = x.long()
        elif source == IMAGES.name:
            x = x.movedim(-1, 1)
        tensors = {**values, **buffers}
        result = torch.func.functional_call(self.module, tensors, (x,))
        buffers.update({name: tensors[name] for name in buffers})
        return result

    def _place_buffers(self, device: Any, dtype: Any) -> dict[str, Tensor]:
        """Return the module's buffers on a device. Floats become float64 if `dtype` is float64."""
        double = import_torch().float64
        key = device, dtype == double
        if key not in self._buffers:
            self._buffers[key] = {
                name: buffer.to(device, double if key[1] and buffer.is_floating_point() else buffer.dtype)
                for name, buffer in self.module.named_buffers()
            }
        return dict(self._buffers[key])

    def _try_shape(self, source: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result for an input of this shape, found by running the module on a few zeros.

        Raise UserError if the module fails, draws random numbers, changes buffers, returns no tensor, or if its result
        has no gradient.
        """
        if (source, shape) not in self._trials:
            self._trials[source, shape] = self._try(source, (min(shape[0], TRIAL_ROWS), *shape[1:]))
        rows, *rest = self._trials[source, shape]
        return (shape[0], *rest) if rows == min(shape[0], TRIAL_ROWS) else (rows, *rest)

    def _try(self, source: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        torch = import_torch()
        values = {
            name: parameter.detach().float().cpu().requires_grad_(parameter.requires_grad)
            for name, parameter in self.module.named_parameters()
        }
        buffers = {n: b.detach().to("cpu", copy=True) for n, b in self.module.named_buffers()}
        before, versions = dict(buffers), {name: buffer._version for name, buffer in buffers.items()}
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            state = torch.get_rng_state()
            try:
                result = self._call(values, buffers, source, torch.zeros(shape))
            except Exception as error:
                why = f"{type(error).__name__}: {' '.join(str(error).split())}{error_location(error)}"
                raise UserError(f"the module fails on {source} {list(shape)}: {why}") from error
            if not torch.equal(state, torch.get_rng_state()):
                raise UserError("the module draws random numbers (dropout?), so resuming would not be exact; "
                                "set its dropout to 0, or call net.eval() before training")  # fmt: skip
        for name, buffer in buffers.items():
            if buffer is not before[name] or buffer._version != versions[name]:
                raise UserError(f"the module changes its buffer {name}, which checkpoints do not hold; use GroupNorm "
                                "in place of BatchNorm, or call net.eval() before training")  # fmt: skip
        if not isinstance(result, torch.Tensor):
            raise UserError(f"the module returns a {type(result).__name__}; it must return one tensor")
        if not result.requires_grad:
            raise UserError("the module's result has no gradient; its forward() must not use detach() or no_grad()")
        return tuple(result.shape)

    def scores(self, logits: Callable[[Batch], np.ndarray], batches: Iterable[Batch]) -> dict[str, float]:
        """Return {"accuracy": value} for the classification of images, or {} for other data."""
        if self.reads != IMAGES:
            return {}
        correct = total = 0.0
        for batch in batches:
            predicted = logits({IMAGES.name: batch[IMAGES.name]}).argmax(-1)
            correct += float(batch["weights"][predicted == batch["targets"]].sum())
            total += float(batch["weights"].sum())
        return {"accuracy": correct / total}


def _vectorise_attention(ops: Ops) -> contextlib.AbstractContextManager[None]:
    """Return a context in which attention of stacked runs is computed as batched products.

    torch.vmap would call any other attention kernel for one run after another, which is slower.
    """
    from toyexp_torch.stacks.ops import StackedOps

    if not isinstance(ops, StackedOps):
        return contextlib.nullcontext()
    attention = import_torch().nn.attention
    context: contextlib.AbstractContextManager[None] = attention.sdpa_kernel(attention.SDPBackend.MATH)
    return context


class _Drawn(Values):
    """Initial values of a parameter, taken from the torch module itself."""

    def __init__(self, model: TorchModule):
        self._model = model

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """Return the values of the parameter `name` in a module that was built with this seed."""
        return self._model.initial_values(seed)[name].reshape(shape)
