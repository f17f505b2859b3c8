"""Torch engines `cpu`, `cuda` and `mps`: their settings and availability checks. torch is imported only when used."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import types
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
    from toyexp import Session, Stack
    from toyexp_torch.session import SessionSettings

DTYPES = ("float32", "bfloat16", "float64")


def import_torch() -> types.ModuleType:
    """Import and return torch. If this fails, raise Unavailable with the command that installs torch."""
    reduce_spinning()
    with require_package("torch", "pip install 'toyexp[torch]'"):
        import numpy as np
        import torch

        torch.from_numpy(np.zeros(1, np.float32))  # fails if torch was built for another numpy
    return torch


@dataclass
class TorchEngine(Engine):
    """Base class of the torch engines: common settings and checks."""

    device: ClassVar[str]
    library: ClassVar[str] = "gloo"  # backend of torch.distributed

    dtype: str = "float32"  # float32 | bfloat16 (autocast over float32 weights) | float64
    compile: bool = False  # torch.compile the forward and backward pass: starts slower, runs faster
    deterministic: bool = False  # use only kernels whose results repeat bit for bit; some are slower
    packed: bool = False  # keep frozen matrices in their GGUF type and dequantise them at each use
    recompute: bool = False  # activation checkpointing: recompute activations in the backward pass, to save memory
    devices: str = "1"  # number of devices that train together, each on an equal part of every batch; all: all devices
    shard: bool = False  # split the optimiser state over the devices (ZeRO stage 1)

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        if self.packed:
            import_torch()
            from toyexp.formats import mappable_tensor
            from toyexp_torch.kernels.packed import KINDS

            types = {info.type for tensor in preview.plan.tensors if (info := mappable_tensor(tensor))} - {"F32"}
            if not types:
                yield "engine.packed=true: has no effect; no frozen matrix of this run has a GGUF type other than F32"
            elif others := sorted(types - {*KINDS}):
                yield f"engine.packed=true: has no effect on {', '.join(others)} tensors; applies to {', '.join(KINDS)}"
        if self.shard and self.count() == 1:
            yield "engine.shard=true: has no effect on one device, which keeps all of the optimiser state"

    @abstractmethod
    def available_devices(self) -> tuple[int, str]:
        """Return how many devices of this kind the machine has, and a phrase for messages, such as "2 NVIDIA GPUs"."""

    def count(self) -> int:
        """Return the number of devices on which a run computes.

        Raise UserError if `engine.devices` is invalid, or larger than the number of devices.
        """
        ranks = started_ranks()
        has_blanks = self.devices.split() != [self.devices]
        setting = f"engine.devices={printable(repr(self.devices) if has_blanks else self.devices)}"
        if self.devices != "all" and not is_integer(self.devices, 1, MAX_INT):
            raise UserError(f"{setting}: must be a number of devices, at least 1, or all")
        if ranks.count > 1:
            if self.devices not in ("1", "all", str(ranks.count)):
                raise UserError(f"{setting}: torchrun has started {ranks.count} ranks; leave engine.devices out")
            return ranks.count
        if self.devices == "1":
            return 1
        available, words = self.available_devices()
        if self.devices != "all" and int(self.devices) > available:
            raise UserError(f"{setting}: only {words} available; engine.devices=all uses all of them")
        return available if self.devices == "all" else int(self.devices)

    def check_devices(self) -> int:
        """Return the number of devices on which a run computes, after checking that they can compute together.

        Raise UserError if settings contradict each other, and Unavailable if this PyTorch has no distributed backend.
        """
        count = self.count()
        if self.shard and self.devices == "1" and count == 1:
            raise UserError(
                "engine.shard=true: needs several devices, and engine.devices is 1; set engine.devices=2, or leave "
                "engine.shard out"
            )
        if count > 1:
            from toyexp_torch.distributed.supervisor import silence_limit

            silence_limit()
            distributed = import_torch().distributed
            if not distributed.is_available() or not getattr(distributed, f"is_{self.library}_available")():
                raise Unavailable(
                    f"engine.devices={self.devices}: this PyTorch is built without {self.library}; use engine.devices=1"
                )
        return count

    def check_rows(self, rows: int, accumulate: int) -> None:
        count, batch = self.count(), rows * accumulate
        if rows % count:
            multiple = count * accumulate
            parts = f" ({rows} in each of optim.accumulate={accumulate} micro-batches)" if accumulate > 1 else ""
            setting = f"WORLD_SIZE={count}" if started_ranks().count > 1 else f"engine.devices={self.devices}"
            raise UserError(
                f"{setting}: a batch of {batch} row{'' if batch == 1 else 's'}{parts} cannot be split equally over "
                f"{count} devices; use "
                f"{'engine.devices=1' if batch == 1 else f'batch_size={-(-batch // multiple) * multiple}'}"
            )

    def check_plan(self, plan: Plan) -> None:
        self.check_rows(plan.rows, plan.accumulate)
        count, together = self.count(), plan.objective.rows_together
        if plan.model.engines and count > 1:
            raise UserError(f"engine.devices={self.devices}: model={plan.model.name} runs on one device; leave it out")
        if count > 1 and (together == 0 or plan.rows // count % together):
            rows = "all rows of a batch" if together == 0 else f"groups of {together} rows"
            raise UserError(
                f"engine.devices={self.devices}: objective={plan.objective.name} compares {rows}, which {count} "
                "devices would separate; use engine.devices=1"
            )

    def preload(self) -> None:
        import_torch()
        import toyexp_torch.session  # noqa: F401

    def preload_stack(self) -> None:
        self.preload()
        import toyexp_torch.stacks.shapes
        import toyexp_torch.stacks.stack  # noqa: F401

    def generation_engine(self) -> Engine:
        return self if self.count() == 1 else replace(self, devices="1", shard=False)

    def product_dtype(self) -> str:
        return self.dtype

    def realize(self, plan: Plan) -> Session:
        title = self.check()
        if (count := self.count()) == 1:
            from toyexp_torch.session import TorchSession

            return TorchSession(plan, self._session_settings(title)).open()
        self.check_plan(plan)
        from toyexp_torch.distributed.session import LeadSession
        from toyexp_torch.distributed.worker import gather_ranks

        return LeadSession(plan, self._session_settings(title), count, self.shard, lambda: gather_ranks(count)).open()

    def stack_conflict(self, plans: Sequence[Plan]) -> str:
        single_run_settings = {
            "engine.compile=true": self.compile,
            "engine.recompute=true": self.recompute,
            "engine.packed=true": self.packed,
            f"engine.devices={self.devices}": self.count() > 1,
        }
        setting = next((key for key, is_set in single_run_settings.items() if is_set), "")
        if setting:
            return f"{setting}: cannot be used in a stack, which trains several runs at a time"
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

        return TorchStack(plans, self._session_settings(title)).open()

    def follow(self) -> None:
        if started_ranks().count > 1:
            self.check()
            from toyexp_torch.distributed.worker import follow, gather_ranks

            follow() if started_ranks().rank else gather_ranks(self.count())

    def _session_settings(self, title: str) -> SessionSettings:
        from toyexp_torch.session import SessionSettings

        return SessionSettings(
            self.device, title, self.dtype, self.compile, self.deterministic, self.packed, self.recompute
        )


@dataclass
class TorchCPU(TorchEngine):
    """PyTorch on the CPU."""

    name: ClassVar[str] = "cpu"
    device: ClassVar[str] = "cpu"
    priority: ClassVar[int] = 20

    threads: int = 0  # CPU threads, divided among engine.devices; 0: one for each core this process may use

    def check(self) -> str:
        require_choice("engine", self, dtype=DTYPES)
        check_threads(self.threads)
        threads = pluralise(self._threads_per_process())
        count = self.check_devices()
        return f"torch {import_torch().__version__}, {f'{count} processes, {threads} each' if count > 1 else threads}"

    def available_devices(self) -> tuple[int, str]:
        # Each device is a process, which needs a core.
        cores, total = available_cores(), machine_cores()
        limit = f" of {total} ({CORES_VARIABLE}={cores})" if cores < total else ""
        return cores, f"{pluralise(cores, 'core')}{limit}"

    def processes(self) -> int:
        if self.devices == "all":
            return available_cores()
        return int(self.devices) if is_integer(self.devices, 1, MAX_INT) else 1

    def _session_settings(self, title: str) -> SessionSettings:
        return replace(super()._session_settings(title), threads=self._threads_per_process())

    def _threads_per_process(self) -> int:
        """Return the number of threads that each of the run's processes on this machine uses."""
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if started_ranks().count > 1 else self.count()
        return max((self.threads or available_cores()) // processes, 1)

    def advice(self) -> list[str]:
        """Return a tip if there are too many threads for the cores of the machine and its current load.

        With several ranks the load is ignored, because the ranks themselves cause it.
        """
        line = crowding_note(self.threads or available_cores(), watched=self.count() == 1)
        return [line] if line else []


CUDA_IS_OPEN = threading.Event()  # set when this process opens CUDA, or begins to


def _open_cuda(deterministic: bool) -> None:
    with contextlib.suppress(Exception):
        matrix = import_torch().ones((8, 8), device="cuda")
        if not deterministic:  # a deterministic session must configure cuBLAS before cuBLAS is loaded
            matrix @ matrix


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

    capture: bool = True  # launch a training step as one CUDA graph; false: kernel by kernel
    bfloat16_attention: bool = False  # compute attention without soft caps, sinks and learned biases in bfloat16
    tf32: bool = False  # let float32 matrix products round their inputs to TF32 (10-bit mantissa)

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        yield from super().warnings(preview)
        if self.tf32 and self.dtype == "float64":
            yield "engine.tf32=true: has no effect with engine.dtype=float64; it applies to float32 products"
        if self.bfloat16_attention and self.dtype != "float32":
            yield f"engine.bfloat16_attention=true: has no effect with engine.dtype={self.dtype}; it applies to float32"

    def product_dtype(self) -> str:
        if self.dtype == "float32" and self.bfloat16_attention:
            return "bfloat16"
        return "tf32" if self.tf32 and self.dtype == "float32" else self.dtype

    def check(self) -> str:
        require_choice("engine", self, dtype=DTYPES)
        torch = import_torch()
        if not torch.cuda.is_available():
            why = "this PyTorch is built without CUDA" if not torch.version.cuda else "it finds no NVIDIA GPU"
            raise Unavailable(f"torch {torch.__version__}: {why}; use engine=cpu, or install a CUDA build of PyTorch")
        if self.tf32 and os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
            raise UserError(
                "engine.tf32=true: the environment variable NVIDIA_TF32_OVERRIDE=0, which engine=ggml_cuda also sets, "
                "forbids TF32 in this process; unset it, or leave engine.tf32 out"
            )
        count = self.check_devices()
        return f"torch {torch.__version__}, {f'{count} x ' if count > 1 else ''}{torch.cuda.get_device_name()}"

    def open_device_early(self) -> None:
        """Initialise CUDA and load cuBLAS in a background thread.

        This takes half a second, during which the run opens its data.
        """
        if self.devices == "1" and started_ranks().count == 1 and not CUDA_IS_OPEN.is_set():
            CUDA_IS_OPEN.set()
            threading.Thread(target=_open_cuda, args=(self.deterministic,), daemon=True).start()

    def free_bytes(self) -> int | None:
        """Return the bytes of free GPU memory, including memory that PyTorch has reserved but does not use."""
        cuda = import_torch().cuda
        return int(cuda.mem_get_info()[0]) + int(cuda.memory_reserved()) - int(cuda.memory_allocated())

    def gpus(self) -> int | None:
        return int(self.devices) if is_integer(self.devices, 1, MAX_INT) else None

    def available_devices(self) -> tuple[int, str]:
        count = int(import_torch().cuda.device_count())
        return count, f"{count} NVIDIA GPU{'' if count == 1 else 's'}"

    def advice(self) -> list[str]:
        count, words = self.available_devices()
        return [f"{words} available; engine.devices=all uses all of them"] if count > self.count() == 1 else []

    def _session_settings(self, title: str) -> SessionSettings:
        rounded = import_torch().bfloat16 if self.bfloat16_attention and self.dtype == "float32" else None
        settings = super()._session_settings(title)
        return replace(settings, tf32=self.tf32, capture=self.capture, attention_dtype=rounded)


@dataclass
class TorchMPS(TorchEngine):
    """PyTorch on the GPU of Apple silicon."""

    name: ClassVar[str] = "mps"
    on_gpu: ClassVar[bool] = True
    device: ClassVar[str] = "mps"
    priority: ClassVar[int] = 30
    devices: ClassVar[str] = "1"  # type: ignore[misc] # Apple silicon has one GPU: devices and shard are no settings here
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
        except RuntimeError as error:  # in a virtual machine the device exists, but has no memory
            reason = str(error).partition("\n")[0]
            raise Unavailable(f"torch {torch.__version__}: MPS fails here ({reason}); use engine=cpu") from None
        return f"torch {torch.__version__}, {platform.machine()}"

    def available_devices(self) -> tuple[int, str]:
        return 1, "one GPU"
