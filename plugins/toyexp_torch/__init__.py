"""Engines that run PyTorch on the CPU, on NVIDIA GPUs and on Apple silicon."""

from toyexp import Register, hookimpl


@hookimpl
def register_engines(register: Register) -> None:
    """Register the engines `cpu`, `cuda` and `mps`."""
    from toyexp_torch.engines import TorchCPU, TorchCUDA, TorchMPS

    for engine in (TorchCPU, TorchCUDA, TorchMPS):
        register(engine)


@hookimpl
def register_models(register: Register) -> None:
    """Register the model `torch_module`."""
    from toyexp_torch.module import TorchModule

    register(TorchModule)


@hookimpl
def register_formats(register: Register) -> None:
    """Register the format `onnx`."""
    from toyexp_torch.onnx import ONNX

    register(ONNX)
