"""A model of your own; as it stands, a transformer that has attention and no feed-forward layers.

A model is its sizes, the table of its tensors, and one function over `ops` (`toyexp.Ops` has them with shapes and
formulas). Gradients, recomputed blocks and text position by position come from that on every engine.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from toyexp import TOKENS, Constant, Kind, Model, Normal, Rotary, TensorSpec, UserError, hookimpl
from toyexp.formats import GGUFForm, Keys

SIZES = ("width", "layers", "heads", "context")


class MyModelForm(GGUFForm):
    """How its sizes stand in a run's model.gguf, so that eval, generate and export can read it."""

    def metadata(self, model):
        """Keys and values; each key gets the model's name in front."""
        return {name: getattr(model, name) for name in SIZES}

    def read(self, cls, file):
        """The model of a file; the numbers come by the names of its tensors."""
        vocab, _ = file.tensors["token_embd.weight"].shape
        return cls(**{name: Keys(file).whole(name) for name in SIZES}, vocab=vocab)


@dataclass
class MyModel(Model):
    """A transformer of attention alone (Elhage et al. 2021)."""

    name: ClassVar[str] = "my_model"  # what `model=` takes
    reads: ClassVar[Kind] = TOKENS  # the kind of data; IMAGES is another
    forms: ClassVar[dict[str, object]] = {"gguf": MyModelForm()}

    # Fields are settings, `model.width=128`; the comment behind one is its help.
    width: int = 64  # of the residual stream
    layers: int = 2  # blocks
    heads: int = 4  # attention heads a block
    context: int = 64  # tokens a sequence holds
    vocab: int = 0  # rows of the embedding; 0: as many as the tokenizer has

    def check(self):
        """Raises UserError for sizes that cannot work, before anything is allocated."""
        self.require_positive(*SIZES)
        if self.width % (2 * self.heads):  # rope turns pairs of a head's features
            raise UserError(f"model.width={self.width}: must be a multiple of 2 * model.heads={2 * self.heads}")

    def fit(self, dataset):
        """The same model with the sizes that come from the data."""
        return replace(self, vocab=self.vocab or dataset.vocab)

    def tensors(self):
        """Every tensor: its name, its shape (a matrix is [out, in]) and its first values. Blocks begin with blk.0."""
        d, specs = self.width, []
        for i in range(self.layers):
            specs.append(TensorSpec(f"blk.{i}.norm.weight", (d,), Constant(1)))
            specs.append(TensorSpec(f"blk.{i}.qkv.weight", (3 * d, d), Normal(d**-0.5)))
            specs.append(TensorSpec(f"blk.{i}.out.weight", (d, d), Normal(d**-0.5)))
        table = TensorSpec("token_embd.weight", (self.vocab, d), Normal(0.02))  # which is the output layer too
        return [table, *specs, TensorSpec("output_norm.weight", (d,), Constant(1))]

    def forward(self, ops, p, batch):
        """Logits [B, T, vocab] of tokens [B, T]; ops alone, for no engine's tensors have Python's operators."""
        x = ops.embed(p["token_embd.weight"], batch["tokens"])  # [B, T, d]
        for i in range(self.layers):
            x = ops.block(self.block, x, p.block(i))
        return ops.logits(ops.rms_norm(x, p["output_norm.weight"], 1e-5), p["token_embd.weight"])

    def block(self, ops, x, p):
        """One block, a function of its own: engine.recompute calls it again; names have lost their blk.i."""
        h, rotary = ops.rms_norm(x, p["norm.weight"], 1e-5), Rotary(10000.0)
        q, k, v = (ops.heads(t, self.heads) for t in ops.split(ops.linear(h, p["qkv.weight"]), 3))  # [B, T, H, D]
        seen = ops.attention(ops.rope(q, rotary), ops.rope(k, rotary), v)  # [B, T, d]
        return ops.add(x, ops.linear(seen, p["out.weight"]))


@hookimpl
def register_models(register):
    """What toyexp calls to learn of it."""
    register(MyModel)
