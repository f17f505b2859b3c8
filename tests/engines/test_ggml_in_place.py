"""ggml's allocator may put an op's result over a source that nothing reads later; fused gradients must allow that.

Each op is computed twice: on weights, which the allocator never overwrites, and on sources computed in the graph.
"""

import ggml
import numpy as np
import pytest
from tiny import MODELS, batches, plan

from toyexp import AdamW
from toyexp_ggml.binding.backend import Backend
from toyexp_ggml.binding.graph import Graph
from toyexp_ggml.binding.tensors import Memory, Node, get, put
from toyexp_ggml.engines import GGMLCPU, GGMLMetal

ROWS, WIDTH = 6, 40
IN_PLACE = ["RMS_NORM_BACK", "SILU_BACK"]  # ops whose result the allocator puts over a source


@pytest.fixture
def backend():
    backend = Backend("CPU", threads=1)
    yield backend
    backend.close()


def soft_max_back(graph, dy, y):
    return Node(ggml.ggml_soft_max_ext_back(graph._context, dy.ptr, y.ptr, 1.0, 0.0), y.shape, y.size, packed=False)


# name: (the op on two sources and ids, from its definition in float64)
OPS = {
    "RMS_NORM_BACK": (
        lambda g, a, b, ids: g.rms_norm_back(a, b, 1e-5),
        lambda a, b, ids: (a - b * (a * b).mean(-1, keepdims=True) / mean_square(b)) / np.sqrt(mean_square(b)),
    ),
    "SILU_BACK": (
        lambda g, a, b, ids: g.silu_back(a, b),
        lambda a, b, ids: a / (1 + np.exp(-b)) * (1 + b / (1 + np.exp(b))),
    ),
    "GET_ROWS_BACK": (
        lambda g, a, b, ids: g.get_rows_back(a, ids, b),  # b only gives the shape
        lambda a, b, ids: np.stack([a[ids == i].sum(0) for i in range(ROWS)]),
    ),
    "REPEAT_BACK": (
        lambda g, a, b, ids: g.repeat_back(a, b),  # b only gives the shape: the same, so that the layouts agree
        lambda a, b, ids: a,
    ),
    "SOFT_MAX_BACK": (
        lambda g, a, b, ids: soft_max_back(g, a, b),
        lambda a, b, ids: b * (a - (a * b).sum(-1, keepdims=True)),
    ),
}


def mean_square(x):
    return (x**2).mean(-1, keepdims=True) + 1e-5


def address(node):
    return node.ptr.contents.data


def compute(backend, op, computed, kept):
    """Return the op's result, the expected result, and the source whose memory it uses.

    Sources in `computed` are computed in the graph; those in `kept` have a later reader.
    """
    build, define = OPS[op]
    draw = np.random.default_rng(0)
    arrays = {n: draw.uniform(0.1, 2, (ROWS, WIDTH)).astype(np.float32) for n in "ab"}
    ids = draw.integers(0, ROWS, ROWS, dtype=np.int32)
    memory, graph = Memory(backend, 3), Graph(backend, 64)
    try:
        leaves = {n: memory.tensor((ROWS, WIDTH)) for n in "ab"}
        ids_node = memory.tensor((ROWS,), np.int32)
        memory.allocate()
        for n, node in leaves.items():
            put(node, arrays[n])
        put(ids_node, ids)
        sources = {n: graph.scale(leaf, 1.0) if n in computed else leaf for n, leaf in leaves.items()}
        for node in sources.values():
            graph.want(node)
        result = build(graph, sources["a"], sources["b"], ids_node)
        graph.want(result, keep=True)
        for n in kept:
            graph.want(graph.scale(sources[n], 1.0), keep=True)
        graph.finish()
        graph.compute()
        overwritten = [n for n in computed if address(sources[n]) == address(result)]
        return get(result), define(*(arrays[n].astype(np.float64) for n in "ab"), ids), overwritten
    finally:
        graph.close()
        memory.close()


@pytest.mark.parametrize("kept", ["", "a", "b"])
@pytest.mark.parametrize("op", [op for op in OPS if op != "SOFT_MAX_BACK"])
def test_a_fused_gradient_is_right_in_place(backend, op, kept):
    ours, expected, overwritten = compute(backend, op, computed="ab", kept=kept)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    if op in IN_PLACE:
        assert overwritten == ["b" if kept == "a" else "a"]  # otherwise the test would prove nothing


def test_soft_max_back_is_wrong_in_place(backend):
    """Therefore a graph with it must keep the softmax alive. If this test fails, ggml has fixed the fault."""
    ours, expected, overwritten = compute(backend, "SOFT_MAX_BACK", computed="", kept="")
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
    assert overwritten == []
    ours, expected, overwritten = compute(backend, "SOFT_MAX_BACK", computed="ab", kept="a")
    assert overwritten == ["b"]
    assert np.linalg.norm(ours - expected) > 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("engine", [GGMLCPU(threads=1), GGMLMetal(threads=1, emulate=True)], ids=["ggml", "metal"])
@pytest.mark.parametrize("name", MODELS)
def test_no_graph_lets_soft_max_back_overwrite_its_source(name, engine, accumulate):
    with engine.realize(plan(name, accumulate=accumulate, grad_clip=1.0)) as session:
        session.build()
        batch = batches(rows=3 * accumulate).batch(0)
        session.step(batch, AdamW.for_lora().hp_for_step(0))
        session.evaluate([batch])
        session.gradients(batch)
        session.logits({"tokens": batch["tokens"][:3]})
        assert {"loss", "logits", "gradients"} < set(session._graphs)
        for graph in session._graphs.values():
            for i in range(ggml.ggml_graph_n_nodes(graph._graph)):
                node = ggml.ggml_graph_node(graph._graph, i).contents
                if ggml.ggml_op_name(node.op) == b"SOFT_MAX_BACK":
                    assert node.data != node.src[1].contents.data
