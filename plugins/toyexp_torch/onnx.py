"""ONNX format of image classifiers. PyTorch's exporter writes it; torch is imported only when a file is written."""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from toyexp import Format, Model, ModelExport, Params, UserError, require_package
from toyexp_torch.engines import import_torch


@dataclass
class ONNX(Format):
    """A file for ONNX Runtime, for an image classifier (vit). It normalises images itself."""

    name: ClassVar[str] = "onnx"
    suffix: ClassVar[str] = ".onnx"

    def check(self) -> None:
        """Raise Unavailable if torch is missing."""
        import_torch()

    def check_model(self, model: Model) -> None:
        """Raise UserError for a model without patches, unlike `vit`; Unavailable without torch's onnxscript."""
        if "patches" not in model.inputs():
            raise UserError(f"model={model.name}: the format onnx only holds image classifiers (model=vit)")
        with require_package("onnxscript", "pip install 'toyexp[onnx]'"):
            import_module("onnxscript")

    def write(self, export: ModelExport, path: Path) -> list[str]:
        """Write the file. Return a warning for each tensor with NaN or infinite numbers.

        The graph maps `images`, float32 [B, C, H, W] with pixel values from 0 to 1, to `logits` [B, classes]. The
        file's metadata has the names of the classes as JSON.
        """
        import torch

        from toyexp_torch.ops import TorchOps

        sizes, tensors = export.model.settings(), {n: torch.from_numpy(a.copy()) for n, a in export.tensors.items()}
        side, patch = sizes["image_size"], sizes["patch"]
        pixels = [export.data.get(key, [default]) for key, default in (("image_mean", 0), ("image_std", 1))]
        mean, std = (torch.tensor(list(map(float, values)))[:, None, None] for values in pixels)

        class Network(torch.nn.Module):
            def forward(self, images: Any) -> Any:
                x = ((images - mean) / std).unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # B, C, row, y, col, x
                patches = x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
                return export.model.forward(TorchOps(), Params(tensors), {"patches": patches})

        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own future changes
            program: Any = torch.onnx.export(
                Network(), (torch.zeros(2, sizes["channels"], side, side),), input_names=["images"],
                output_names=["logits"], dynamic_shapes=({0: torch.export.Dim("batch")},), dynamo=True, verbose=False,
            )  # fmt: skip
        program.model.metadata_props["classes"] = json.dumps(list(export.data.get("classes", ())))
        program.save(path)
        return [f"{n} contains NaN or infinity" for n, value in tensors.items() if not value.isfinite().all()]
