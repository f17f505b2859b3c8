"""GPT-2's training step in the style of nanoGPT: modules, torch.compile, autocast, fused AdamW in two groups."""

import runpy
from pathlib import Path

import torch
import torch.nn.functional as F

from toyexp import Unavailable

ENGINE, BESIDE, KEEPS = "cuda", {"cuda", "ggml_cuda"}, ["dtype", "tf32"]
Loop = runpy.run_path(str(Path(__file__).with_name("_loop.py")))["Loop"]  # these files belong to no package


class Block(torch.nn.Module):
    """Attention and feed-forward layer, each behind a norm."""

    def __init__(self, width, heads, inner, eps):
        super().__init__()
        self.heads = heads
        self.attn_norm, self.ffn_norm = torch.nn.LayerNorm(width, eps), torch.nn.LayerNorm(width, eps)
        self.attn_qkv, self.attn_output = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.ffn_up, self.ffn_down = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width)

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.attn_qkv(self.attn_norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_output(y.transpose(1, 2).flatten(-2))
        return x + self.ffn_down(F.gelu(self.ffn_up(self.ffn_norm(x)), approximate="tanh"))


class Transformer(torch.nn.Module):
    """The model with GGUF names for its tensors."""

    def __init__(self, model):
        super().__init__()
        sizes = (model.d_model, model.n_heads, model.d_ff, model.norm_eps)
        self.token_embd = torch.nn.Embedding(model.vocab, model.d_model)
        self.position_embd = torch.nn.Embedding(model.context, model.d_model)
        self.blk = torch.nn.ModuleList(Block(*sizes) for _ in range(model.n_layers))
        self.output_norm = torch.nn.LayerNorm(model.d_model, model.norm_eps)
        self.output = torch.nn.Linear(model.d_model, model.vocab, bias=False)
        if model.tied:
            self.output.weight = self.token_embd.weight

    def forward(self, tokens, targets):
        x = self.token_embd(tokens) + self.position_embd.weight
        for block in self.blk:
            x = block(x)
        return F.cross_entropy(self.output(self.output_norm(x)).flatten(0, 1), targets.flatten())


class NanoGPT(Loop):
    """Steps of the nanoGPT-style loop from the plan's initial values."""

    name, compiled = "nanoGPT-style", True

    def __init__(self, plan, adamw, engine):
        if plan.model.name != "gpt2" or plan.adapters:
            raise Unavailable("only written for model=gpt2 without adapters")
        super().__init__(plan, engine)
        module = Transformer(plan.model)
        with torch.no_grad():
            for name, weights in module.named_parameters():
                weights.copy_(torch.from_numpy(plan.initial_values(plan.tensor(name))))
        weights = list(module.to(self.device).parameters())
        groups = [
            {"params": [w for w in weights if w.ndim > 1], "weight_decay": adamw.weight_decay},
            {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0},
        ]
        self.train(module, adamw, groups)

    def loss(self, tokens, targets):
        return self.module(tokens, targets)


class EagerNanoGPT(NanoGPT):
    """NanoGPT without torch.compile."""

    name, compiled = "nanoGPT-style eager", False


BASELINES = (NanoGPT, EagerNanoGPT)
