"""Reference models in plain float64 PyTorch, independent of toyexp's code."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch


def rotate(x, angle, halves):
    """Return x [B, H, T, D] with its pairs of features rotated by angle [T, D/2]."""
    length, size = x.shape[2:]
    if halves:  # one rotation matrix per position
        turn = torch.zeros(length, size, size, dtype=torch.float64)
        for i in range(size // 2):
            j = i + size // 2
            turn[:, i, i] = turn[:, j, j] = angle[:, i].cos()
            turn[:, j, i] = angle[:, i].sin()
            turn[:, i, j] = -angle[:, i].sin()
        return torch.einsum("tij,bhtj->bhti", turn, x)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], size // 2, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).reshape(x.shape)


def silu(x):
    """Return x times its sigmoid."""
    return x / (1 + torch.exp(-x))


@dataclasses.dataclass
class Attention:
    """Attention of one layer: its rope, its window, and the factor and limit of its scores."""

    base: float
    has_rope: bool = True
    window: int = 0
    scale: float | None = None
    scaled_by: float | None = None  # divisor of positions; None: the model's
    cap: float = 0.0


def decoder(
    w, cfg, tokens, *, halves=True, head_norms=False, width_norms=False, gated=silu, scaled=1.0, residual=1.0,
    divisor=1.0, layer=lambda cfg, i: Attention(cfg.rope_base),
):  # fmt: skip
    """Return logits of token ids [B, T]; w maps GGUF names to float64 tensors."""
    length = tokens.shape[1]
    size = cfg.head_dim or cfg.d_model // cfg.n_heads

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + cfg.norm_eps) * weight

    def rope(x, base, divisor):  # [B, H, T, size]
        position = torch.arange(length, dtype=torch.float64) / (divisor or cfg.rope_scale)
        angle = position[:, None] * base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        if getattr(cfg, "rope_factors", []):
            angle = angle / torch.tensor(cfg.rope_factors, dtype=torch.float64)
        return rotate(x, angle, halves)

    x = w["token_embd.weight"][tokens] * scaled
    for i in range(cfg.n_layers):
        block = {n.removeprefix(f"blk.{i}."): t for n, t in w.items() if n.startswith(f"blk.{i}.")}
        own = layer(cfg, i)

        def linear(x, name, block=block):
            return x @ block[f"{name}.weight"].T + block.get(f"{name}.bias", 0)

        def norm_if_any(x, name, block=block):
            return norm(x, block[f"{name}.weight"]) if f"{name}.weight" in block else x

        h = norm_if_any(x, "attn_norm")
        if "shortconv.conv.weight" in block:
            x = x + short_convolution(h, block)
            h = norm_if_any(x, "ffn_norm")
            x = x + linear(gated(linear(h, "ffn_gate")) * linear(h, "ffn_up"), "ffn_down")
            continue
        q, k, v = (linear(h, f"attn_{n}") for n in "qkv")
        if width_norms:
            q, k = norm(q, block["attn_q_norm.weight"]), norm(k, block["attn_k_norm.weight"])
        q, k, v = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t in (q, k, v))
        if head_norms:
            q, k = norm(q, block["attn_q_norm.weight"]), norm(k, block["attn_k_norm.weight"])
        if own.has_rope:
            q, k = rope(q, own.base, own.scaled_by), rope(k, own.base, own.scaled_by)
        group = cfg.n_heads // cfg.n_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        h = linear(attention(q, k, v, scale=own.scale, window=own.window, cap=own.cap), "attn_output")
        x = x + residual * norm_if_any(h, "post_attention_norm")
        h = norm_if_any(x, "ffn_norm")
        if "ffn_gate_inp.weight" in block:
            h = mixture(h, block, cfg)
        elif "ffn_gate.weight" in block:
            h = linear(gated(linear(h, "ffn_gate")) * linear(h, "ffn_up"), "ffn_down")
        else:
            h = linear(linear(h, "ffn_up").clamp(min=0) ** 2, "ffn_down")
        x = x + residual * norm_if_any(h, "post_ffw_norm")
    return (
        norm(x, w["token_embd_norm.weight" if cfg.name == "lfm2" else "output_norm.weight"])
        @ w.get("output.weight", w["token_embd.weight"]).T
        / divisor
    )


def olmo2(w, cfg, tokens):
    """Return logits of token ids [B, T]; w maps GGUF names to float64 tensors."""
    return decoder(w, cfg, tokens, width_norms=True)


def mixture(x, block, cfg):
    """Return the output of the experts that the router chooses, one position and one expert after the other."""
    gate, up, down = (block[f"ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
    rows = []
    for h in x.flatten(0, 1):
        shares = torch.softmax(block["ffn_gate_inp.weight"] @ h, 0)
        chosen = shares.topk(cfg.experts_used)
        total = chosen.values.sum() if cfg.name == "qwen3moe" else 1.0
        outputs = [
            share / total * (down[e] @ (silu(gate[e] @ h) * (up[e] @ h))) for share, e in zip(*chosen, strict=True)
        ]
        rows.append(torch.stack(outputs).sum(0))
    return torch.stack(rows).view(x.shape)


def short_convolution(x, block):
    """Return the output of lfm2's gated convolution, with one filter for each feature."""
    before, after, x = (x @ block["shortconv.in_proj.weight"].T).chunk(3, -1)
    w = block["shortconv.conv.weight"]
    padded = torch.nn.functional.pad((before * x).transpose(1, 2), (w.shape[1] - 1, 0))
    mixed = torch.nn.functional.conv1d(padded, w[:, None], groups=len(w)).transpose(1, 2)
    return (after * mixed) @ block["shortconv.out_proj.weight"].T


def mamba2(w, cfg, tokens):
    """Return logits of token ids [B, T], computed position by position with a state for each head."""
    heads, inner, shared = cfg.n_heads, cfg.d_ff, cfg.n_groups * cfg.state
    size, share = inner // heads, heads // cfg.n_groups

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + cfg.norm_eps) * weight

    x = w["token_embd.weight"][tokens]
    for i in range(cfg.n_layers):
        block = {n.removeprefix(f"blk.{i}."): t for n, t in w.items() if n.startswith(f"blk.{i}.")}
        gate, mixed, dt = (norm(x, block["attn_norm.weight"]) @ block["ssm_in.weight"].T).split(
            [inner, inner + 2 * shared, heads], -1
        )
        kernel = block["ssm_conv1d.weight"]
        padded = torch.nn.functional.pad(mixed.transpose(1, 2), (kernel.shape[1] - 1, 0))
        mixed = torch.nn.functional.conv1d(padded, kernel[:, None], block["ssm_conv1d.bias"], groups=len(kernel))
        v, k, q = silu(mixed.transpose(1, 2)).split([inner, shared, shared], -1)
        v = v.unflatten(-1, (heads, size))
        k, q = (t.unflatten(-1, (cfg.n_groups, cfg.state)).repeat_interleave(share, 2) for t in (k, q))
        dt = torch.log1p(torch.exp(dt + block["ssm_dt.bias"]))
        decay = torch.exp(-dt * block["ssm_a"][:, 0].abs())
        state, rows = torch.zeros(len(tokens), heads, cfg.state, size, dtype=torch.float64), []
        for t in range(tokens.shape[1]):
            added = torch.einsum("bh,bhn,bhp->bhnp", dt[:, t], k[:, t], v[:, t])
            state = decay[:, t, :, None, None] * state + added
            rows.append(torch.einsum("bhn,bhnp->bhp", q[:, t], state) + block["ssm_d"] * v[:, t])
        y = (torch.stack(rows, 1).flatten(2) * silu(gate)).unflatten(-1, (cfg.n_groups, -1))
        x = x + norm(y, block["ssm_norm.weight"]).flatten(2) @ block["ssm_out.weight"].T
    return norm(x, w["output_norm.weight"]) @ w.get("output.weight", w["token_embd.weight"]).T


def smollm3(w, cfg, tokens):
    """Return logits of token ids [B, T]; w maps GGUF names to float64 tensors."""
    return decoder(w, cfg, tokens, halves=False, layer=lambda cfg, i: Attention(cfg.rope_base, i % 4 != 3))


def gemma3(w, cfg, tokens):
    """Return logits of token ids [B, T]; w maps GGUF names to float64 tensors."""

    def layer(cfg, i):
        if not cfg.window or i % cfg.window_period == cfg.window_period - 1:
            return Attention(cfg.rope_base)
        return Attention(cfg.window_rope_base, window=cfg.window, scaled_by=1.0)

    logits = decoder(w, cfg, tokens, gated=tanh_gelu, scaled=cfg.d_model**0.5, head_norms=True, layer=layer)
    return cfg.final_softcap * torch.tanh(logits / cfg.final_softcap) if cfg.final_softcap else logits


def gemma2(w, cfg, tokens):
    """Return logits of token ids [B, T]; w maps GGUF names to float64 tensors."""

    def layer(cfg, i):
        has_window = i % cfg.window_period != cfg.window_period - 1
        return Attention(cfg.rope_base, window=cfg.window * has_window, cap=cfg.score_softcap)

    logits = decoder(w, cfg, tokens, gated=tanh_gelu, scaled=cfg.d_model**0.5, layer=layer)
    return cfg.final_softcap * torch.tanh(logits / cfg.final_softcap)


def granite(w, cfg, tokens):
    """Return logits of token ids [B, T]; w maps GGUF names to float64 tensors."""
    return decoder(
        w, cfg, tokens, halves=False, scaled=cfg.embedding_scale, residual=cfg.residual_scale, divisor=cfg.logit_scale,
        layer=lambda cfg, i: Attention(cfg.rope_base, cfg.rope, scale=cfg.attention_scale or None),
    )  # fmt: skip


def tanh_gelu(x):
    """Return the tanh approximation of GELU."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gpt2(w, cfg, tokens, drop=lambda x, name: x):
    """Return logits of token ids [B, T]; w maps GGUF names to float64 tensors. `drop(x, name)` applies dropout."""
    batch, length = tokens.shape
    size = cfg.d_model // cfg.n_heads

    def norm(x, name):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(var + cfg.norm_eps) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = drop(w["token_embd.weight"][tokens] + w["position_embd.weight"][:length], "token_embd")
    for i in range(cfg.n_layers):
        qkv = linear(norm(x, f"blk.{i}.attn_norm"), f"blk.{i}.attn_qkv")
        q, k, v = (t.view(batch, length, cfg.n_heads, size).transpose(1, 2) for t in qkv.split(cfg.d_model, -1))
        x = x + drop(linear(attention(q, k, v), f"blk.{i}.attn_output"), f"blk.{i}.attn_output")
        h = linear(norm(x, f"blk.{i}.ffn_norm"), f"blk.{i}.ffn_up")
        x = x + drop(linear(tanh_gelu(h), f"blk.{i}.ffn_down"), f"blk.{i}.ffn_down")
    return norm(x, "output_norm") @ w.get("output.weight", w["token_embd.weight"]).T


def lab(w, cfg, tokens, drop=lambda x, name: x):
    """Return logits of token ids [B, T]; w maps GGUF names to float64 tensors. `drop(x, name)` applies dropout."""
    size, length = cfg.head_dim or cfg.d_model // cfg.n_heads, tokens.shape[1]
    angle = torch.arange(length, dtype=torch.float64)[:, None] / cfg.rope_scale
    angle = angle * cfg.rope_base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)

    def rms(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + cfg.norm_eps) * w[f"{name}.weight"]

    def norm(x, name):
        if cfg.norm_kind == "rms":
            return rms(x, name)
        if cfg.norm_kind == "none":
            return x
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(var + cfg.norm_eps) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def heads(x):
        return x.unflatten(-1, (-1, size)).transpose(1, 2)

    def attend(h, i, first):
        q, k, v = (linear(h, f"blk.{i}.attn_{n}") for n in "qkv")
        if cfg.qk_norm == "width":
            q, k = rms(q, f"blk.{i}.attn_q_norm"), rms(k, f"blk.{i}.attn_k_norm")
        if cfg.value_residual and i:
            v = w[f"blk.{i}.value_own.weight"] * v + w[f"blk.{i}.value_first.weight"] * first
        q, k, v = map(heads, (q, k, v))
        if cfg.qk_norm == "head":
            q, k = rms(q, f"blk.{i}.attn_q_norm"), rms(k, f"blk.{i}.attn_k_norm")
        if cfg.positions == "rope" and (cfg.nope_every == 0 or i % cfg.nope_every != cfg.nope_every - 1):
            q, k = rotate(q, angle, False), rotate(k, angle, False)
        group = cfg.n_heads // cfg.n_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        window = 0 if i % cfg.window_period == cfg.window_period - 1 else cfg.window
        return linear(attention(q, k, v, window=window, cap=cfg.score_softcap), f"blk.{i}.attn_output")

    def feed_forward(h, i):
        up = linear(h, f"blk.{i}.ffn_up")
        if cfg.activation in ("swiglu", "geglu"):
            hidden = (silu if cfg.activation == "swiglu" else tanh_gelu)(linear(h, f"blk.{i}.ffn_gate")) * up
        else:
            hidden = tanh_gelu(up) if cfg.activation == "gelu" else torch.where(up > 0, up**2, 0.0)
        return linear(hidden, f"blk.{i}.ffn_down")

    def branch(x, i, name, layer, post, function):
        h = function(x if cfg.norm_place == "after" else norm(x, f"blk.{i}.{name}_norm"), i)
        h = drop(h, f"blk.{i}.{layer}")
        h = h if cfg.norm_place == "before" else norm(h, f"blk.{i}.{post}")
        return x + h * (w[f"blk.{i}.{name}_scale.weight"] if cfg.residual_scalars == "branch" else 1)

    x = w["token_embd.weight"][tokens]
    x = drop(x + w["position_embd.weight"][:length] if cfg.positions == "learned" else x, "token_embd")
    first = linear(x if cfg.norm_place == "after" else norm(x, "blk.0.attn_norm"), "blk.0.attn_v")
    for i in range(cfg.n_layers):
        x = x * w[f"blk.{i}.block_scale.weight"] if cfg.residual_scalars == "block" else x
        x = branch(x, i, "attn", "attn_output", "post_attention_norm", partial(attend, first=first))
        x = branch(x, i, "ffn", "ffn_down", "post_ffw_norm", feed_forward)
    logits = norm(x, "output_norm") @ w.get("output.weight", w["token_embd.weight"]).T
    return cfg.final_softcap * torch.tanh(logits / cfg.final_softcap) if cfg.final_softcap else logits


FORWARD = {
    "llama": partial(decoder, halves=False),
    "qwen2": decoder,
    "qwen3": partial(decoder, head_norms=True),
    "gemma": lambda w, cfg, tokens: decoder(w, cfg, tokens, gated=tanh_gelu, scaled=cfg.d_model**0.5),
    "gemma2": gemma2,
    "gemma3": gemma3,
    "granite": granite,
    "qwen3moe": partial(decoder, head_norms=True),
    "olmoe": partial(decoder, width_norms=True),
    "arcee": partial(decoder, halves=False),
    "smollm3": smollm3,
    "olmo2": olmo2,
    "lfm2": partial(decoder, head_norms=True),
    "mamba2": mamba2,
    "gpt2": gpt2,
    "lab": lab,
}


def vit(w, cfg, images):
    """Return logits of images [B, H, W, C]; w maps GGUF names to float64 tensors."""
    batch, size = len(images), cfg.d_model // cfg.n_heads

    def norm(x, name):
        if cfg.block == "rmsnorm_silu":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + cfg.norm_eps) * w[f"{name}.weight"]
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(var + cfg.norm_eps) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def activation(x):
        if cfg.block == "rmsnorm_silu":
            return x / (1 + torch.exp(-x))
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2))) if cfg.block == "layernorm_gelu_erf" else tanh_gelu(x)

    kernel = w["v.patch_embd.weight"].view(cfg.d_model, cfg.channels, cfg.patch, cfg.patch)
    x = torch.nn.functional.conv2d(images.permute(0, 3, 1, 2), kernel, w.get("v.patch_embd.bias"), stride=cfg.patch)
    x = x.flatten(2).transpose(1, 2)  # [B, P, d]
    x = torch.cat([w["v.class_embd"].repeat(batch, 1, 1), x], dim=1) + w["v.position_embd.weight"]
    for i in range(cfg.n_layers):
        h = norm(x, f"v.blk.{i}.ln1")
        q, k, v = (linear(h, f"v.blk.{i}.attn_{n}").unflatten(-1, (-1, size)).transpose(1, 2) for n in "qkv")
        x = x + linear(attention(q, k, v, causal=False), f"v.blk.{i}.attn_out")
        x = x + linear(activation(linear(norm(x, f"v.blk.{i}.ln2"), f"v.blk.{i}.ffn_up")), f"v.blk.{i}.ffn_down")
    return linear(norm(x[:, 0] if cfg.pool == "class" else x[:, 1:].mean(1), "v.post_ln"), "v.head")


def attention(q, k, v, causal=True, scale=None, window=0, cap=0.0):
    """Return the attention of q, k, v [B, H, T, D] with the heads joined: [B, T, H*D]."""
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    if causal:
        position = torch.arange(q.shape[2])
        distance = position[:, None] - position  # of a key before its query
        scores = scores.masked_fill((distance < 0) | ((distance >= window) if window else False), -math.inf)
    out = scores.softmax(-1) @ v
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


def loss(logits, batch):
    """Return the mean negative log-likelihood of the weighted targets."""
    targets = torch.from_numpy(batch["targets"]).long()
    weights = torch.from_numpy(batch["weights"]).double()
    picked = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    return -(picked * weights).sum() / weights.sum()


def gradients(forward, plan, batch):
    """Return logits, loss and all gradients as numpy, for the plan's initial values on a batch of tokens."""
    weights = {t.name: torch.from_numpy(plan.initial_values(t)).double().requires_grad_() for t in plan.tensors}
    logits = forward(weights, plan.model, torch.from_numpy(batch["tokens"]).long())
    value = loss(logits, batch)
    grads = torch.autograd.grad(value, list(weights.values()))
    return logits.detach().numpy(), value.item(), {n: g.numpy() for n, g in zip(weights, grads, strict=True)}


def adamw(w, g, m, v, t, *, lr, beta1, beta2, eps, weight_decay, correct):
    """Take one AdamW step in place; `correct` divides by 1 - beta^t, otherwise moments are multiplied by the betas."""
    m.mul_(beta1).add_((1 - beta1) * g)
    v.mul_(beta2).add_((1 - beta2) * g * g)
    first = m / (1 - beta1**t) if correct else m * beta1
    second = v / (1 - beta2**t) if correct else v * beta2
    w.mul_(1 - lr * weight_decay).sub_(lr * first / (second.sqrt() + eps))


def check_against_float64(engine, the_plan, batch):
    """Check the logits, the loss and all gradients of a plan on a ggml engine."""
    logits, value, grads = gradients(FORWARD[the_plan.model.name], the_plan, batch)
    with engine.realize(the_plan) as session:
        session.build()
        np.testing.assert_allclose(session.logits(batch), logits, atol=2e-6)
        assert session.evaluate([batch]) == pytest.approx(value, rel=1e-6)
        for tensor, actual in session.gradients(batch).items():
            expected = grads[tensor]
            assert np.linalg.norm(actual - expected) <= 5e-6 * np.linalg.norm(expected) + 1e-9, tensor
