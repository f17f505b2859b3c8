"""The three torch engines: their settings, and whether they work here. torch itself is imported only when used."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import toyexp
from toyexp import Engine, Plan, RunPreview, Unavailable, UserError, printable, require_package
from toyexp.base import (
    CORES_VARIABLE,
    MAX_INT,
    available_cores,
    check_threads,
    crowding_note,
    is_integer,
    machine_cores,
    pluralise,
    reduce_spinning,
    require_choice,
    started_ranks,
)

if TYPE_CHECKING:
    import types

    from toyexp import Session, Stack
    from toyexp_torch.session import Wanted

DTYPES = ("float32", "bfloat16", "float64")


def import_torch() -> types.ModuleType:
    """torch, or Unavailable with what to install."""
    reduce_spinning()
    with require_package("torch", "pip install 'toyexp[torch]'"):
        import numpy as np
        import torch

        torch.from_numpy(np.zeros(1, np.float32))  # which one that was built for another numpy does not do
    return torch


@dataclass
class TorchEngine(Engine):
    """What the torch devices share."""

    device: ClassVar[str]
    library: ClassVar[str] = "gloo"  # by which several of its devices speak

    dtype: str = "float32"  # float32 | bfloat16 (autocast over float32 weights) | float64
    compile: bool = False  # torch.compile the forward and backward pass; slower to start, faster to run
    deterministic: bool = False  # only kernels that repeat to the bit; some are slower
    packed: bool = False  # keep frozen matrices in their GGUF's type, and unpack them at each use
    recompute: bool = False  # hold the activations of one block at a time and compute them twice
    devices: str = "1"  # that compute together, each its rows of a batch; all: as many as there are here
    shard: bool = False  # each device keeps the optimiser's state of its own part of the weights alone

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        if self.packed:
            import_torch()
            from toyexp.formats import in_place
            from toyexp_torch.kernels.packed import KINDS

            types = {info.type for tensor in preview.plan.tensors if (info := in_place(tensor))} - {"F32"}
            if not types:
                yield "engine.packed=true: no frozen matrix of this run comes from a GGUF file that has it packed"
            elif whole := sorted(types - {*KINDS}):
                yield f"engine.packed=true: {', '.join(whole)} is held as numbers; packed are {', '.join(KINDS)}"
        if self.shard and self.count() == 1:
            yield "engine.shard=true: there is one device, which keeps all of the optimiser's state"

    @abstractmethod
    def there(self) -> tuple[int, str]:
        """How many devices there are for it on this machine, and those in words."""

    def count(self) -> int:
        """How many compute; UserError for what cannot be."""
        ranks = started_ranks()
        blank = self.devices.split() != [self.devices]
        asked = f"engine.devices={printable(repr(self.devices) if blank else self.devices)}"
        if self.devices != "all" and not is_integer(self.devices, 1, MAX_INT):
            raise UserError(f"{asked}: takes a number from 1, or all")
        if ranks.count > 1:
            if self.devices not in ("1", "all", str(ranks.count)):
                raise UserError(f"{asked}: torchrun has started {ranks.count} ranks; leave engine.devices out")
            return ranks.count
        if self.devices == "1":
            return 1
        there, words = self.there()
        if self.devices != "all" and int(self.devices) > there:
            raise UserError(
                f"{asked}: there {'is' if there == 1 else 'are'} {words} here; engine.devices=all takes all"
            )
        return there if self.devices == "all" else int(self.devices)

    def check_devices(self) -> int:
        """How many compute; UserError for what cannot be."""
        count = self.count()
        if self.shard and self.devices == "1" and count == 1:
            raise UserError(
                "engine.shard=true: spreads the optimiser's state over several devices, and engine.devices=1 is one; "
                "engine.devices=2, or leave it out"
            )
        if count > 1:
            from toyexp_torch.distributed.supervisor import patience

            patience()
            distributed = import_torch().distributed
            if not distributed.is_available() or not getattr(distributed, f"is_{self.library}_available")():
                raise Unavailable(
                    f"engine.devices={self.devices}: this PyTorch is built without {self.library}; engine.devices=1"
                )
        return count

    def check_rows(self, rows: int, accumulate: int) -> None:
        count, batch = self.count(), rows * accumulate
        if rows % count:
            whole = count * accumulate
            each = f", {rows} in each of optim.accumulate={accumulate}," if accumulate > 1 else ""
            asked = f"WORLD_SIZE={count}" if started_ranks().count > 1 else f"engine.devices={self.devices}"
            raise UserError(
                f"{asked}: a batch of {batch} row{'' if batch == 1 else 's'}{each} has no equal shares for {count} "
                f"devices; {'engine.devices=1' if batch == 1 else f'batch_size={-(-batch // whole) * whole} has'}"
            )

    def check_plan(self, plan: Plan) -> None:
        self.check_rows(plan.rows, plan.accumulate)

    def preload(self) -> None:
        import_torch()
        import toyexp_torch.session  # noqa: F401

    def preload_stack(self) -> None:
        self.preload()
        import toyexp_torch.stacks.shapes
        import toyexp_torch.stacks.stack

        toyexp_torch.stacks.shapes.preload()

    def generation_engine(self) -> Engine:
        return self if self.count() == 1 else replace(self, devices="1", shard=False)

    def rounds_to(self) -> str:
        return self.dtype

    def realize(self, plan: Plan) -> Session:
        title = self.check()
        if (count := self.count()) == 1:
            from toyexp_torch.session import TorchSession

            return TorchSession(plan, self._wanted(title)).open()
        self.check_plan(plan)
        from toyexp_torch.distributed.session import LeadSession
        from toyexp_torch.distributed.worker import gather_ranks

        return LeadSession(plan, self._wanted(title), count, self.shard, lambda: gather_ranks(count)).open()

    def stack_conflict(self, plans: Sequence[Plan]) -> str:
        asked = {
            "engine.compile=true": self.compile,
            "engine.recompute=true": self.recompute,
            "engine.packed=true": self.packed,
            f"engine.devices={self.devices}": self.count() > 1,
        }
        of_one = next((key for key, on in asked.items() if on), "")
        if of_one:
            return f"{of_one}: is of one run at a time"
        if why := toyexp.program_difference(plans):
            return why
        return self._try_step(plans[0])[0]

    def stack_bytes(self, plan: Plan) -> int:
        return self._try_step(plan)[1]

    def _try_step(self, plan: Plan) -> tuple[str, int]:
        torch = import_torch()
        from toyexp_torch.stacks.shapes import try_step

        return try_step(plan, torch.float64 if self.dtype == "float64" else torch.float32)

    def realize_stack(self, plans: Sequence[Plan]) -> Stack:
        title = self.check()
        if why := self.stack_conflict(plans):
            raise UserError(why)
        from toyexp_torch.stacks.stack import TorchStack

        return TorchStack(plans, self._wanted(title)).open()

    def follow(self) -> None:
        if started_ranks().count > 1:
            self.check()
            from toyexp_torch.distributed.worker import follow, gather_ranks

            follow() if started_ranks().rank else gather_ranks(self.count())

    def _wanted(self, title: str) -> Wanted:
        from toyexp_torch.session import Wanted

        return Wanted(self.device, title, self.dtype, self.compile, self.deterministic, self.packed, self.recompute)


@dataclass
class TorchCPU(TorchEngine):
    """PyTorch on the CPU."""

    name: ClassVar[str] = "cpu"
    device: ClassVar[str] = "cpu"
    priority: ClassVar[int] = 20

    threads: int = 0  # cores to use, shared by its devices; 0: all that this process may use

    def check(self) -> str:
        require_choice("engine", self, dtype=DTYPES)
        check_threads(self.threads)
        each = pluralise(self._share())
        ranks = f"{count} processes, {each} each" if (count := self.check_devices()) > 1 else each
        return f"torch {import_torch().__version__}, {ranks}"

    def there(self) -> tuple[int, str]:
        """Each is a process, and has a core at least."""
        cores, all_there = available_cores(), machine_cores()
        fewer = f" of {all_there} ({CORES_VARIABLE}={cores})" if cores < all_there else ""
        return cores, f"{pluralise(cores, 'core')}{fewer}"

    def processes(self) -> int:
        if self.devices == "all":
            return available_cores()
        return int(self.devices) if is_integer(self.devices, 1, MAX_INT) else 1

    def _wanted(self, title: str) -> Wanted:
        return replace(super()._wanted(title), threads=self._share())

    def _share(self) -> int:
        """Threads of each of its processes on this machine."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if started_ranks().count > 1 else self.count()
        return max((self.threads or available_cores()) // here, 1)

    def advice(self) -> list[str]:
        """Whether its threads have to share their cores. Where it is several processes, those are the busy ones."""
        line = crowding_note(self.threads or available_cores(), watched=self.count() == 1)
        return [line] if line else []


CUDA_IS_OPEN = threading.Event()  # or opening, in this process


def _open_cuda(deterministic: bool) -> None:
    with contextlib.suppress(Exception):
        some = import_torch().ones((8, 8), device="cuda")
        if not deterministic:  # for which cuBLAS is told how before it is loaded
            some @ some


@dataclass
class TorchCUDA(TorchEngine):
    """PyTorch on an NVIDIA GPU."""

    name: ClassVar[str] = "cuda"
    on_gpu: ClassVar[bool] = True
    device_variable: ClassVar[str] = "CUDA_VISIBLE_DEVICES"
    own_memory: ClassVar[bool] = True
    device: ClassVar[str] = "cuda"
    library: ClassVar[str] = "nccl"
    priority: ClassVar[int] = 40

    capture: bool = True  # launch the kernels of a step as one graph; false: one by one
    tf32: bool = False  # let float32 matrix products round their inputs to TF32 (10-bit mantissa)

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        yield from super().warnings(preview)
        if self.tf32 and self.dtype == "float64":
            yield "engine.tf32=true: is of products in float32; with engine.dtype=float64 there are none"

    def rounds_to(self) -> str:
        return "tf32" if self.tf32 and self.dtype == "float32" else self.dtype

    def check(self) -> str:
        require_choice("engine", self, dtype=DTYPES)
        torch = import_torch()
        if not torch.cuda.is_available():
            why = "this PyTorch is built without CUDA" if not torch.version.cuda else "it finds no NVIDIA GPU"
            raise Unavailable(f"torch {torch.__version__}: {why}; use engine=cpu, or install a CUDA build of PyTorch")
        if self.tf32 and os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
            raise UserError(
                "engine.tf32=true: NVIDIA_TF32_OVERRIDE=0 forbids it in this process (engine=ggml_cuda with tf32=false "
                "sets it)"
            )
        count = self.check_devices()
        return f"torch {torch.__version__}, {f'{count} x ' if count > 1 else ''}{torch.cuda.get_device_name()}"

    def wake(self) -> None:
        """Opens CUDA and loads cuBLAS, which takes half a second in which data can be opened."""
        if self.devices == "1" and started_ranks().count == 1 and not CUDA_IS_OPEN.is_set():
            CUDA_IS_OPEN.set()
            threading.Thread(target=_open_cuda, args=(self.deterministic,), daemon=True).start()

    def free_bytes(self) -> int | None:
        """Of the GPU itself, what this process has and does not use counted in."""
        cuda = import_torch().cuda
        return int(cuda.mem_get_info()[0]) + int(cuda.memory_reserved()) - int(cuda.memory_allocated())

    def gpus(self) -> int | None:
        return int(self.devices) if is_integer(self.devices, 1, MAX_INT) else None

    def there(self) -> tuple[int, str]:
        count = int(import_torch().cuda.device_count())
        return count, f"{count} NVIDIA GPU{'' if count == 1 else 's'}"

    def advice(self) -> list[str]:
        count, words = self.there()
        return [f"{words} are here; engine.devices=all computes on all of them"] if count > self.count() == 1 else []

    def _wanted(self, title: str) -> Wanted:
        return replace(super()._wanted(title), tf32=self.tf32, capture=self.capture)


@dataclass
class TorchMPS(TorchEngine):
    """PyTorch on the GPU of Apple silicon."""

    name: ClassVar[str] = "mps"
    on_gpu: ClassVar[bool] = True
    device: ClassVar[str] = "mps"
    priority: ClassVar[int] = 30
    devices: ClassVar[str] = "1"  # type: ignore[misc] # Apple silicon has one GPU: these two are no settings of it
    shard: ClassVar[bool] = False  # type: ignore[misc]

    dtype: str = "float32"  # float32 | bfloat16 (autocast over float32 weights)

    def check(self) -> str:
        require_choice("engine", self, dtype=DTYPES)
        if self.dtype == "float64":
            raise UserError("engine.dtype=float64: MPS has no float64; use float32, or engine=cpu")
        if (ranks := started_ranks().count) > 1:
            raise Unavailable(f"Apple silicon has one GPU, and torchrun has started {ranks} ranks; use engine=cpu")
        if platform.system() != "Darwin":
            raise Unavailable(f"MPS needs macOS on Apple silicon; this is {platform.system()}. Use engine=cpu")
        torch = import_torch()
        if not torch.backends.mps.is_available():
            raise Unavailable(f"torch {torch.__version__}: no MPS device here; use engine=cpu")
        self.check_devices()
        try:
            torch.ones(1, device="mps")
        except RuntimeError as error:  # in a virtual machine the device is there and has no memory to give
            told = str(error).partition("\n")[0]
            raise Unavailable(f"torch {torch.__version__}: its MPS device does not work here ({told})") from None
        return f"torch {torch.__version__}, {platform.machine()}"

    def there(self) -> tuple[int, str]:
        return 1, "one GPU"
