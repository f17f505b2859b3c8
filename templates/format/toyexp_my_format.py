"""A file format that stores models as JSON. Change it into your own.

`toyexp export --type my_format` writes such a file, and `callbacks=[default,my_format_export]` writes one at the end of a
run. Because the class has a method `read`, all commands on model files accept these files. `write` gets a temporary
path; toyexp renames the file when `write` returns.
"""

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from toyexp import Format, ModelExport, UserError, hookimpl

MAX_NUMBERS = 2_000_000  # larger files are too slow to open


@dataclass
class MyFormat(Format):
    """JSON: the sizes of a model, and its tensors as lists of numbers."""

    name: ClassVar[str] = "my_format"  # the name to type: `--type my_format`
    suffix: ClassVar[str] = ".my_format.json"  # files are named model.my_format.json; must be unique

    # Fields are settings: `toyexp export RUN --type my_format indent=true`. The comment after a field is its help text.
    indent: bool = False  # write one number per line

    def check_model(self, model):
        """Raise UserError for a model that the format cannot hold. toyexp calls this before training."""
        if model.parameters() > MAX_NUMBERS:
            raise UserError(f"model={model.name} has {model.parameters():,} numbers; at most {MAX_NUMBERS:,} fit")

    def write(self, export, path):
        """Write the model and its float32 tensors. Return a sentence for each tensor with NaN or infinite numbers."""
        problems = [f"{name} contains NaN or infinity" for name, t in export.tensors.items() if not is_finite(t)]
        tensors = {
            name: {"shape": list(tensor.shape), "values": np.asarray(tensor).ravel().tolist()}
            for name, tensor in export.tensors.items()
        }
        content = {"model": export.model.name, "sizes": export.model.settings(), "tensors": tensors}
        path.write_text(json.dumps(content, indent=1 if self.indent else None))
        return problems

    def notes(self, export):
        """Return a sentence for each thing that the file omits."""
        return ["the tokenizer is not stored; the file works with token ids only"] if export.tokenizer else []

    def read(self, path, models):
        """Return the model in a file, an instance of one of the classes `models`. Raise UserError for other files."""
        try:
            content = json.loads(path.read_text())
            model, tensors = content["model"], content["tensors"]
            model_class = next(cls for cls in models if cls.name == model)
            arrays = {n: np.array(t["values"], np.float32).reshape(t["shape"]) for n, t in tensors.items()}
            return ModelExport(model_class(**content["sizes"]), arrays)
        except StopIteration:
            raise UserError(f"{path}: unknown model {model!r}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a model in JSON: {type(error).__name__}: {error}") from None


def is_finite(tensor):
    """Return True if all numbers of a tensor are finite."""
    return bool(np.isfinite(tensor).all())


@hookimpl
def register_formats(register):
    """Register the class. toyexp calls this function when it loads the module."""
    register(MyFormat)
