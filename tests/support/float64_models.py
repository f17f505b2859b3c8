"""Llama, GPT-2 and ViT once more, in plain float64 PyTorch, sharing no code with toyexp: the judge of its numbers."""

import math

import torch


def llama(w, cfg, tokens):
    """Logits of token ids [B, T]; w maps GGUF names to float64 tensors."""
    batch, length = tokens.shape
    size = cfg.d_model // cfg.n_heads

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + cfg.norm_eps) * weight

    position = torch.arange(length, dtype=torch.float64)
    angle = position[:, None] * cfg.rope_base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turn = torch.polar(torch.ones_like(angle), angle)  # [T, size/2]

    def rope(x):  # [B, H, T, size]
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], size // 2, 2).contiguous())
        return torch.view_as_real(pairs * turn).reshape(x.shape)

    x = w["token_embd.weight"][tokens]
    for i in range(cfg.n_layers):
        block = {n.removeprefix(f"blk.{i}."): t for n, t in w.items() if n.startswith(f"blk.{i}.")}
        h = norm(x, block["attn_norm.weight"])
        q, k, v = (h @ block[f"attn_{n}.weight"].T + block.get(f"attn_{n}.bias", 0) for n in "qkv")
        q = rope(q.view(batch, length, cfg.n_heads, size).transpose(1, 2))
        k = rope(k.view(batch, length, cfg.n_kv_heads, size).transpose(1, 2))
        v = v.view(batch, length, cfg.n_kv_heads, size).transpose(1, 2)
        group = cfg.n_heads // cfg.n_kv_heads
        x = (
            x
            + attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)) @ block["attn_output.weight"].T
        )
        h = norm(x, block["ffn_norm.weight"])
        gate = h @ block["ffn_gate.weight"].T
        x = x + (gate / (1 + torch.exp(-gate)) * (h @ block["ffn_up.weight"].T)) @ block["ffn_down.weight"].T
    return norm(x, w["output_norm.weight"]) @ w.get("output.weight", w["token_embd.weight"]).T


def gpt2(w, cfg, tokens):
    """Logits of token ids [B, T]; w maps GGUF names to float64 tensors."""
    batch, length = tokens.shape
    size = cfg.d_model // cfg.n_heads

    def norm(x, name):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(var + cfg.norm_eps) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["token_embd.weight"][tokens] + w["position_embd.weight"][:length]
    for i in range(cfg.n_layers):
        qkv = linear(norm(x, f"blk.{i}.attn_norm"), f"blk.{i}.attn_qkv")
        q, k, v = (t.view(batch, length, cfg.n_heads, size).transpose(1, 2) for t in qkv.split(cfg.d_model, -1))
        x = x + linear(attention(q, k, v), f"blk.{i}.attn_output")
        h = linear(norm(x, f"blk.{i}.ffn_norm"), f"blk.{i}.ffn_up")
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"blk.{i}.ffn_down")
    return norm(x, "output_norm") @ w.get("output.weight", w["token_embd.weight"]).T


def vit(w, cfg, images):
    """Logits of images [B, H, W, C]; w maps GGUF names to float64 tensors."""
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
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    kernel = w["v.patch_embd.weight"].view(cfg.d_model, cfg.channels, cfg.patch, cfg.patch)
    x = torch.nn.functional.conv2d(images.permute(0, 3, 1, 2), kernel, w.get("v.patch_embd.bias"), stride=cfg.patch)
    x = x.flatten(2).transpose(1, 2)  # [B, P, d]
    x = torch.cat([w["v.class_embd"].repeat(batch, 1, 1), x], dim=1) + w["v.position_embd.weight"]
    for i in range(cfg.n_layers):
        h = norm(x, f"v.blk.{i}.ln1")
        q, k, v = (linear(h, f"v.blk.{i}.attn_{n}").unflatten(-1, (-1, size)).transpose(1, 2) for n in "qkv")
        x = x + linear(attention(q, k, v, causal=False), f"v.blk.{i}.attn_out")
        x = x + linear(activation(linear(norm(x, f"v.blk.{i}.ln2"), f"v.blk.{i}.ffn_up")), f"v.blk.{i}.ffn_down")
    return linear(norm(x, "v.post_ln")[:, 0], "v.head")


def attention(q, k, v, causal=True):
    """Attention of [B, H, T, D], heads joined to [B, T, H*D]."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        future = torch.triu(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool), 1)
        scores = scores.masked_fill(future, -math.inf)
    out = scores.softmax(-1) @ v
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


def loss(logits, batch):
    """Mean negative log-likelihood of the weighted targets."""
    targets = torch.from_numpy(batch["targets"]).long()
    weights = torch.from_numpy(batch["weights"]).double()
    picked = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    return -(picked * weights).sum() / weights.sum()


def gradients(forward, plan, batch):
    """Logits, loss and every tensor's gradient as numpy, of the plan's initial values on a batch of tokens."""
    weights = {t.name: torch.from_numpy(plan.initial(t)).double().requires_grad_() for t in plan.tensors}
    logits = forward(weights, plan.model, torch.from_numpy(batch["tokens"]).long())
    value = loss(logits, batch)
    found = torch.autograd.grad(value, list(weights.values()))
    return logits.detach().numpy(), value.item(), {n: g.numpy() for n, g in zip(weights, found, strict=True)}


def adamw(w, g, m, v, t, *, lr, beta1, beta2, eps, weight_decay, correct):
    """One step as written in the papers, in place; `correct` divides by 1 - beta^t, else multiplies by the betas."""
    m.mul_(beta1).add_((1 - beta1) * g)
    v.mul_(beta2).add_((1 - beta2) * g * g)
    first = m / (1 - beta1**t) if correct else m * beta1
    second = v / (1 - beta2**t) if correct else v * beta2
    w.mul_(1 - lr * weight_decay).sub_(lr * first / (second.sqrt() + eps))
