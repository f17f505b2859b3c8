"""A format of your own; as it stands, a model as JSON, which a page in a browser or any other program can read.

A format is how a model stands in a file. `toyexp export --type my_format` writes it, `callbacks=[default,my_format_export]`
does at the end of a run, and a file that it reads is a model for every command. It appears whole or not at all: `write`
gets a place of its own, and what stands there is renamed when it returns.
"""

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from toyexp import Format, ModelExport, UserError, hookimpl

MOST = 2_000_000  # numbers; more make a file that nobody wants to open


@dataclass
class MyFormat(Format):
    """JSON: the sizes of a model, and its tensors as lists of numbers."""

    name: ClassVar[str] = "my_format"  # what `--type` takes
    suffix: ClassVar[str] = ".my_format.json"  # behind `model` in a run's directory; no other format has it

    # Fields are settings, `toyexp export RUN --type my_format indent=true`; the comment behind one is its help.
    indent: bool = False  # a number a line, for people

    def check_model(self, model):
        """Raises UserError in one line for what it cannot hold; asked before anything is trained."""
        if model.parameters() > MOST:
            raise UserError(f"model={model.name} has {model.parameters():,} numbers; JSON is for up to {MOST:,}")

    def write(self, export, path):
        """Writes `export` (its model, tensors in float32, tokenizer); a sentence for each tensor that is not finite."""
        odd = [f"{name} holds numbers that are not finite" for name, t in export.tensors.items() if not finite(t)]
        tensors = {
            name: {"shape": list(tensor.shape), "values": np.asarray(tensor).ravel().tolist()}
            for name, tensor in export.tensors.items()
        }
        whole = {"model": export.model.name, "sizes": export.model.settings(), "tensors": tensors}
        path.write_text(json.dumps(whole, indent=1 if self.indent else None))
        return odd

    def notes(self, export):
        """What the file leaves out, a sentence each."""
        return ["its tokenizer is left out: what is read from it knows ids alone"] if export.tokenizer else []

    def read(self, path, models):
        """The other way round; `models` are the classes that are known here. UserError for what is no such file."""
        try:
            whole = json.loads(path.read_text())
            model, tensors = whole["model"], whole["tensors"]
            known = next(cls for cls in models if cls.name == model)
            arrays = {n: np.array(t["values"], np.float32).reshape(t["shape"]) for n, t in tensors.items()}
            return ModelExport(known(**whole["sizes"]), arrays)
        except StopIteration:
            raise UserError(f"{path}: holds the model {model!r}, which is not known here") from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: is no model in JSON: {type(error).__name__}: {error}") from None


def finite(tensor):
    """Whether all of its numbers are."""
    return bool(np.isfinite(tensor).all())


@hookimpl
def register_formats(register):
    """What toyexp calls to learn of it."""
    register(MyFormat)
