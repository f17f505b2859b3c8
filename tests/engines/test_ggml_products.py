"""Products split for a GPU with wide tiles: the expected number of groups, and results of float64."""

import ctypes
import dataclasses
import math

import pytest
from float64_models import check_against_float64
from tiny import VOCAB, add_weights

from toyexp import Setup
from toyexp.testing import token_dataset
from toyexp_ggml.binding import ggml
from toyexp_ggml.engines import GGMLVulkan
from toyexp_ggml.products import slice_count, stack_count
from toyexp_ggml.profiles import VULKAN
from toyexp_models.gpt2 import GPT2
from toyexp_models.llama import Llama
from toyexp_recipes.scratch import Scratch

SIZES = {"d_model": 128, "n_layers": 1, "n_heads": 4, "context": 256, "vocab": VOCAB}


def make_plan(model, rows=1):
    data = token_dataset(VOCAB, count=2000, seed=5).batches(256, rows, 0)
    return Scratch().plan(model, Setup(data.inputs, rows=rows)), add_weights(data.batch(0))


class Uncut(GGMLVulkan):
    """Vulkan's graph without split products."""

    profile = dataclasses.replace(VULKAN, wide_tiles=False)


@pytest.mark.parametrize("d_ff", [320, 96])  # 64 does not divide 96: slices, and no stack
def test_a_model_whose_products_are_cut_agrees_with_float64(d_ff):
    check_against_float64(GGMLVulkan(threads=1, emulate=True), *make_plan(GPT2(**SIZES, d_ff=d_ff)))


def products(engine):
    """Return (rows of the result, columns, terms, products in the stack) of each product of a step."""
    with engine(threads=1, emulate=True).realize(make_plan(Llama(**SIZES, d_ff=320), rows=4)[0]) as session:
        session.build()
        nodes = [node.contents for node in session._graphs["step"]._nodes()]
        product_nodes = [node for node in nodes if node.op == ggml.GGML_OP_MUL_MAT]
        terms = [ctypes.cast(node.src[0], ctypes.POINTER(type(node))).contents.ne[0] for node in product_nodes]
        return [(n.ne[1], n.ne[0], k, n.ne[2] * n.ne[3]) for n, k in zip(product_nodes, terms, strict=True)]


def serial_terms(n, m, k, count):
    """Return the terms that a group adds up in sequence, by ggml's Vulkan rules, if there are too few groups."""
    side = 32 if min(n, m) <= 32 else 64 if min(n, m) <= 64 else 128
    groups = count * math.ceil(n / side) * math.ceil(m / side)
    return k * (side / 64) ** 2 if groups < 128 else 0  # a core computes that many numbers at a time


def test_cut_products_occupy_the_gpu_with_more_thread_groups():
    cut, uncut = products(GGMLVulkan), products(Uncut)
    assert sum(n * m * k * count for n, m, k, count in cut) == sum(n * m * k * count for n, m, k, count in uncut)
    assert sum(serial_terms(*product) for product in cut) < 0.3 * sum(serial_terms(*product) for product in uncut)
    large = [(n, m, k) for n, m, k, _ in cut if min(n, m) > 64]
    assert {k for _, _, k in large} == {32}  # attention scores, whose count is large


@pytest.mark.parametrize(
    ("n", "m", "k", "stack", "slices"),
    [
        (1024, 256, 256, 16, 2),  # a stack of 64 groups instead of 16, twice as many with slices
        (256, 256, 1024, 4, 8),  # a gradient of weights: 128 instead of 4
        (704, 256, 1024, 11, 4),
        (1024, 4096, 256, 1, 1),  # wide groups are enough
        (64, 64, 64, 1, 1),  # narrow tiles already
        (64, 64, 512, 1, 4),
        (100, 256, 1024, 1, 8),  # rows that 64 does not divide
        (256, 256, 1000, 4, 1),  # terms that no slice divides
        (8, 256, 1024, 1, 1),  # the kernel for few columns handles this
    ],
)
def test_the_stack_and_slice_counts_of_a_product(n, m, k, stack, slices):
    assert (stack_count(n, m), slice_count(n, m, k)) == (stack, slices)
