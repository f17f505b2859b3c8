"""Reference optimisers in float64, from their papers or torch.optim, independent of toyexp's formulas."""

import numpy as np
import torch


class TorchOptimiser:
    """A tensor updated by an optimiser of torch.optim; decoupled `decay` is applied here if torch's differs."""

    def __init__(self, w, make, decay=0.0):
        self.parameter = torch.nn.Parameter(torch.tensor(w, dtype=torch.float64))
        self.optimiser, self.decay = make([self.parameter]), decay

    def step(self, g, lr):
        with torch.no_grad():
            self.parameter.mul_(1 - lr * self.decay)
        self.parameter.grad = torch.tensor(g, dtype=torch.float64)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        return self.parameter.detach().numpy().copy()


def sgd(w, decay, momentum=0.9, nesterov=False):
    return TorchOptimiser(w, lambda p: torch.optim.SGD(p, lr=1.0, momentum=momentum, nesterov=nesterov), decay)


def adamw(w, decay, betas=(0.9, 0.999)):
    return TorchOptimiser(w, lambda p: torch.optim.AdamW(p, lr=1.0, betas=betas, eps=1e-8, weight_decay=decay))


def adafactor(w, decay, eps2=1e-3, **settings):
    return TorchOptimiser(
        w, lambda p: torch.optim.Adafactor(p, lr=1.0, eps=(1e-30, eps2), weight_decay=decay, **settings)
    )


class Lion:
    """Algorithm 2 of Chen et al. 2023."""

    def __init__(self, w, decay):
        self.w, self.decay, self.m = np.array(w, np.float64), decay, np.zeros(np.shape(w))
        self.open = np.zeros(np.shape(w), bool)  # float32 rounding may flip the sign here

    def step(self, g, lr):
        c = 0.9 * self.m + 0.1 * g
        self.open |= (c != 0) & (np.abs(c) < 2e-6 * (0.9 * np.abs(self.m) + 0.1 * np.abs(g)))
        self.w = self.w - lr * (np.sign(c) + self.decay * self.w)
        self.m = 0.99 * self.m + 0.01 * g
        return self.w


class ConstantBetas:
    """AdamW in mode `from_scratch`: it multiplies by the constant betas instead of correcting the bias."""

    def __init__(self, w, decay):
        self.w, self.decay = np.array(w, np.float64), decay
        self.m, self.v = np.zeros(np.shape(w)), np.zeros(np.shape(w))

    def step(self, g, lr):
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.95 * self.v + 0.05 * g * g
        self.w = self.w * (1 - lr * self.decay) - lr * (self.m * 0.9) / (np.sqrt(self.v * 0.95) + 1e-8)
        return self.w


class Muon:
    """Jordan 2024, with the Newton-Schulz polynomial applied to the singular values of the SVD."""

    def __init__(self, w, decay, scale="match_adamw", nesterov=True, momentum=0.95, iterations=5):
        self.w, self.decay, self.scale, self.nesterov = np.array(w, np.float64), decay, scale, nesterov
        self.m, self.momentum, self.iterations = np.zeros(np.shape(w)), momentum, iterations

    def step(self, g, lr):
        mu = self.momentum
        self.m = mu * self.m + (1 - mu) * g
        direction = mu * self.m + (1 - mu) * g if self.nesterov else self.m
        u, s, v = np.linalg.svd(direction / (np.linalg.norm(direction) + 1e-7), full_matrices=False)
        for _ in range(self.iterations):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        rows, columns = self.w.shape
        size = {"original": max(1, rows / columns) ** 0.5, "match_adamw": 0.2 * max(rows, columns) ** 0.5}[self.scale]
        self.w = self.w * (1 - lr * self.decay) - lr * size * ((u * s) @ v)
        return self.w


def muon(name, w, decay, **settings):
    """Return Muon for matrices of blocks, AdamW for all other tensors."""
    return Muon(w, decay, **settings) if np.ndim(w) == 2 and name.startswith("blk.") else adamw(w, decay)
