"""A llama's training step as one would write it in PyTorch for this one model: eager, and with torch.compile."""

import torch
import torch._dynamo  # torch.optim would import it later, and its 70 MB would count as the optimiser's
import torch.nn.functional as F

from toyexp import Unavailable
from toyexp.base.formatting import pluralise
from toyexp.base.threads import available_cores
from toyexp.cli.bench_stepper import Stepper

ENGINE, BESIDE, KEEPS = "cpu", {"cpu", "ggml"}, ["threads"]


def is_plain(model):
    """Return True if a llama has no setting that the baselines do not support."""
    rope_as_is = model.rope_scale == 1 and not model.rope_factors
    return rope_as_is and not (model.head_dim or model.o_bias or model.ffn_bias)


class BareTorch(Stepper):
    """Steps of torch.optim.AdamW from the plan's initial values; weights of targets are ignored."""

    name = "bare torch"

    def __init__(self, plan, adamw, engine):
        model = plan.model
        if not self.supports(plan):
            raise Unavailable("only written for a plain model=llama")
        threads = engine.threads or available_cores()
        self.note = f"torch {torch.__version__}, {pluralise(threads)}"
        self.threads_before = torch.get_num_threads()
        torch.set_num_threads(threads)
        self.weights = {t.name: torch.from_numpy(plan.initial_values(t)).requires_grad_() for t in plan.tensors}
        self.optimiser = torch.optim.AdamW(
            self.weights.values(), lr=adamw.lr, betas=(adamw.beta1, adamw.beta2), eps=adamw.eps,
            weight_decay=adamw.weight_decay, fused=True,
        )  # fmt: skip
        self.model = model
        self.size = model.d_model // model.n_heads
        frequency = model.rope_base ** (-torch.arange(0, self.size, 2) / self.size)
        angle = torch.outer(torch.arange(model.context), frequency)  # [T, D/2]
        self.cos, self.sin = angle.cos(), angle.sin()

    @staticmethod
    def supports(plan):
        """Return True if the loop computes the plan's model."""
        return plan.model.name == "llama" and not plan.adapters and is_plain(plan.model)

    def step(self, batch):
        loss = self.loss(torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["targets"]).long())
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.item()

    def close(self):
        torch.set_num_threads(self.threads_before)

    def loss(self, tokens, targets):
        """Return the mean cross entropy over all targets [B, T]."""
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())

    def logits(self, tokens):
        """Return the logits [B, T, V] of token ids [B, T]."""
        w, model = self.weights, self.model
        x = F.embedding(tokens, w["token_embd.weight"])  # [B, T, d]
        for i in range(model.n_layers):
            block = f"blk.{i}."
            h = self.norm(x, w[block + "attn_norm.weight"])
            q, k, v = (F.linear(h, w[f"{block}attn_{n}.weight"], w.get(f"{block}attn_{n}.bias")) for n in "qkv")
            q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in (q, k, v))  # [B, H, T, D]
            grouped = model.n_kv_heads != model.n_heads
            a = F.scaled_dot_product_attention(self.rope(q), self.rope(k), v, is_causal=True, enable_gqa=grouped)
            x = x + F.linear(a.transpose(1, 2).flatten(-2), w[block + "attn_output.weight"])
            h = self.norm(x, w[block + "ffn_norm.weight"])
            h = F.silu(F.linear(h, w[block + "ffn_gate.weight"])) * F.linear(h, w[block + "ffn_up.weight"])
            x = x + F.linear(h, w[block + "ffn_down.weight"])
        output = w["token_embd.weight" if model.tied else "output.weight"]
        return F.linear(self.norm(x, w["output_norm.weight"]), output)

    def norm(self, x, weight):
        return F.rms_norm(x, weight.shape, weight, self.model.norm_eps)

    def rope(self, x):
        even, odd = x[..., 0::2], x[..., 1::2]  # [B, H, T, D/2]
        return torch.stack((even * self.cos - odd * self.sin, even * self.sin + odd * self.cos), -1).flatten(-2)


class CompiledTorch(BareTorch):
    """BareTorch with compiled forward and backward passes."""

    name = "bare torch compiled"

    def __init__(self, plan, adamw, engine):
        super().__init__(plan, adamw, engine)
        self.loss = torch.compile(self.loss, dynamic=False)


BASELINES = (BareTorch, CompiledTorch)
