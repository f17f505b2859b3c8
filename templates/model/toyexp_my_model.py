"""A transformer with attention and no feed-forward layers. Change it into your own model.

A model has sizes (its fields), a list of tensors, and a function `forward` that computes the logits with the operations
of `ops`. Every engine can run this function and compute its gradients.
`toyexp help plugins/ops` lists the ops with shapes and formulas.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from toyexp import TOKENS, Constant, Kind, Model, Normal, Rotary, TensorSpec, UserError, hookimpl
from toyexp.formats import GGUFForm, Keys

SIZES = ("width", "layers", "heads", "context")


class MyModelForm(GGUFForm):
    """Description of how model.gguf stores the model, so that eval, generate and export can load the file."""

    def metadata(self, model):
        """Return the metadata to write, as keys and values. toyexp puts the model's name before each key."""
        return {name: getattr(model, name) for name in SIZES}

    def read(self, cls, file):
        """Return the model that a file describes. toyexp loads the values of the tensors by name."""
        vocab, _ = file.tensors["token_embd.weight"].shape
        return cls(**{name: Keys(file).integer(name) for name in SIZES}, vocab=vocab)


@dataclass
class MyModel(Model):
    """Attention-only transformer (Elhage et al. 2021)."""

    name: ClassVar[str] = "my_model"  # the name to type: `model=my_model`
    reads: ClassVar[Kind] = TOKENS  # the kind of data; IMAGES is another
    forms: ClassVar[dict[str, object]] = {"gguf": MyModelForm()}

    # Fields are settings: `model.width=128`. The comment after a field is its help text.
    width: int = 64  # width of the residual stream
    layers: int = 2  # number of blocks
    heads: int = 4  # attention heads per block
    context: int = 64  # tokens in a row
    vocab: int = 0  # rows of the embedding; 0: the size of the data's vocabulary

    def check(self):
        """Raise UserError for bad sizes, before memory is allocated."""
        self.require_positive(*SIZES)
        if self.width % (2 * self.heads):  # rope rotates pairs of features
            raise UserError(f"model.width={self.width}: must be a multiple of 2 * model.heads={2 * self.heads}")

    def fit(self, dataset):
        """Return the model with the data's vocabulary size, unless `vocab` is set."""
        return replace(self, vocab=self.vocab or dataset.vocab)

    def tensors(self):
        """Return all tensors: name, shape (a matrix is [out, in]) and initial values. The first block is blk.0."""
        d, specs = self.width, []
        for i in range(self.layers):
            specs.append(TensorSpec(f"blk.{i}.norm.weight", (d,), Constant(1)))
            specs.append(TensorSpec(f"blk.{i}.qkv.weight", (3 * d, d), Normal(d**-0.5)))
            specs.append(TensorSpec(f"blk.{i}.out.weight", (d, d), Normal(d**-0.5)))
        table = TensorSpec("token_embd.weight", (self.vocab, d), Normal(0.02))  # also the output layer
        return [table, *specs, TensorSpec("output_norm.weight", (d,), Constant(1))]

    def forward(self, ops, p, batch):
        """Return logits [B, T, vocab] of tokens [B, T]. Use methods of `ops`: tensors have no operators such as +."""
        x = ops.embed(p["token_embd.weight"], batch["tokens"])  # [B, T, d]
        for i in range(self.layers):
            x = ops.block(self.block, x, p.block(i))
        return ops.logits(ops.rms_norm(x, p["output_norm.weight"], 1e-5), p["token_embd.weight"])

    def block(self, ops, x, p):
        """Return the output [B, T, d] of one block. In `p` the block's tensors have names without `blk.0.`."""
        h, rotary = ops.rms_norm(x, p["norm.weight"], 1e-5), Rotary(10000.0)
        q, k, v = (ops.heads(t, self.heads) for t in ops.split(ops.linear(h, p["qkv.weight"]), 3))  # [B, T, H, D]
        mixed = ops.attention(ops.rope(q, rotary), ops.rope(k, rotary), v)  # [B, T, d]
        return ops.add(x, ops.linear(mixed, p["out.weight"]))


@hookimpl
def register_models(register):
    """Register the class. toyexp calls this function when it loads the module."""
    register(MyModel)
