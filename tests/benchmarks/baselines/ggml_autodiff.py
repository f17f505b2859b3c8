"""A llama's training step with ggml's own autodiff (ggml_build_backward_expand), on its CPU backend."""

import ctypes
import math

import ggml
import numpy as np

from toyexp import Unavailable
from toyexp.base.formatting import pluralise
from toyexp.base.threads import available_cores
from toyexp.cli.bench_stepper import Stepper

ENGINE, BESIDE, KEEPS = "ggml", {"cpu", "ggml"}, ["threads"]


class GGMLAutodiff(Stepper):
    """A static graph from tokens to updated weights; weights of targets are ignored."""

    name = "ggml autodiff"

    def __init__(self, plan, adamw, engine):
        model, rows = plan.model, plan.rows
        if model.name != "llama" or plan.adapters or plan.accumulate > 1 or model.biases():
            raise Unavailable("only written for a plain model=llama without micro-batches and biases")
        if model.head_dim or model.rope_scale != 1 or model.rope_factors:
            raise Unavailable("only written for a plain model=llama")
        if model.n_kv_heads != model.n_heads and rows > 1:
            raise Unavailable("ggml has no gradient of grouped heads in a batch: model.n_kv_heads=model.n_heads")
        threads = engine.threads or available_cores()
        self.note = f"ggml {ggml.ggml_version().decode()}, {pluralise(threads)}"
        self.model, self.rows, self.adamw, self.steps = model, rows, adamw, 0
        self.backend = ggml.ggml_backend_cpu_init()
        ggml.ggml_backend_cpu_set_n_threads(self.backend, threads)
        tokens = rows * model.context

        # memory that outlives a step: weights, moments, inputs
        self.kept = new_context(3 * len(plan.tensors) + 8)
        self.weights = {t.name: self.tensor(*reversed(t.shape)) for t in plan.tensors}
        self.moments = {n: [ggml.ggml_dup_tensor(self.kept, w) for _ in "mv"] for n, w in self.weights.items()}
        self.tokens = self.tensor(tokens, kind=ggml.GGML_TYPE_I32)
        self.positions = self.tensor(model.context, kind=ggml.GGML_TYPE_I32)
        self.labels = self.tensor(model.vocab, tokens)
        self.hp = self.tensor(7)
        self.kept_buffer = ggml.ggml_backend_alloc_ctx_tensors(self.kept, self.backend)
        ggml.ggml_backend_buffer_clear(self.kept_buffer, 0)
        for tensor in plan.tensors:
            put(self.weights[tensor.name], plan.initial_values(tensor))
            ggml.ggml_set_param(self.weights[tensor.name])
        put(self.positions, np.arange(model.context, dtype=np.int32))
        self.one_hot = np.zeros((tokens, model.vocab), np.float32)

        # The graph: forward, ggml's backward, and one AdamW node for every weight.
        capacity = 1024 + 256 * len(plan.tensors)
        self.context = new_context(capacity, ggml.ggml_graph_overhead_custom(capacity, True))
        self.loss = self.forward()
        ggml.ggml_set_loss(self.loss)
        ggml.ggml_set_output(self.loss)
        self.graph = ggml.ggml_new_graph_custom(self.context, capacity, True)
        ggml.ggml_build_forward_expand(self.graph, self.loss)
        ggml.ggml_build_backward_expand(self.context, self.graph, None)
        seed = ggml.ggml_graph_get_grad(self.graph, self.loss)
        ggml.ggml_set_output(seed)  # written once, so its memory must not be reused
        for name, weight in self.weights.items():
            gradient = ggml.ggml_graph_get_grad(self.graph, weight)
            update = ggml.ggml_opt_step_adamw(self.context, weight, gradient, *self.moments[name], self.hp)
            ggml.ggml_build_forward_expand(self.graph, update)
        self.allocator = ggml.ggml_gallocr_new(ggml.ggml_backend_get_default_buffer_type(self.backend))
        if not ggml.ggml_gallocr_alloc_graph(self.allocator, self.graph):
            raise MemoryError("ggml could not allocate the graph")
        put(seed, np.ones(1, np.float32))

    def step(self, batch):
        at = np.arange(len(self.one_hot)), batch["targets"].reshape(-1)
        self.one_hot[at] = 1
        put(self.labels, self.one_hot)
        self.one_hot[at] = 0
        put(self.tokens, batch["tokens"])
        put(self.hp, self.adamw.hp_for_step(self.steps).astype(np.float32))
        self.steps += 1
        if ggml.ggml_backend_graph_compute(self.backend, self.graph) != ggml.GGML_STATUS_SUCCESS:
            raise RuntimeError("ggml stopped computing")
        loss = np.empty(1, np.float32)
        ggml.ggml_backend_tensor_get(self.loss, loss.ctypes.data_as(ctypes.c_void_p), 0, loss.nbytes)
        return float(loss[0])

    def close(self):
        ggml.ggml_gallocr_free(self.allocator)
        ggml.ggml_backend_buffer_free(self.kept_buffer)
        ggml.ggml_free(self.context)
        ggml.ggml_free(self.kept)
        ggml.ggml_backend_free(self.backend)

    def tensor(self, *ne, kind=ggml.GGML_TYPE_F32):
        """Return a tensor that outlives a step; `ne` is in ggml's order, the contiguous axis first."""
        return ggml.ggml_new_tensor(self.kept, kind, len(ne), (ctypes.c_int64 * len(ne))(*ne))

    def forward(self):
        """Return the mean cross entropy of all tokens; shapes are in ggml's order."""
        c, w, model, rows = self.context, self.weights, self.model, self.rows
        size, tokens = model.d_model // model.n_heads, self.rows * model.context

        def norm(x, weight):
            return ggml.ggml_mul(c, ggml.ggml_rms_norm(c, x, model.norm_eps), weight)

        def heads(x, n):
            return ggml.ggml_reshape_4d(c, x, size, n, model.context, rows)

        def rope(x):
            rest = (size, 0, 0, model.rope_base, 1.0, 0.0, 1.0, 32.0, 1.0)  # mode 0: consecutive pairs; no scaling
            return ggml.ggml_rope_ext(c, x, self.positions, None, *rest)

        def permuted(x, *axes):
            return ggml.ggml_cont(c, ggml.ggml_permute(c, x, *axes))

        x = ggml.ggml_get_rows(c, w["token_embd.weight"], self.tokens)  # [d, B T]
        for i in range(model.n_layers):
            b = {n.removeprefix(f"blk.{i}."): t for n, t in w.items() if n.startswith(f"blk.{i}.")}
            h = norm(x, b["attn_norm.weight"])
            q, k, v = (ggml.ggml_mul_mat(c, b[f"attn_{n}.weight"], h) for n in "qkv")
            q = permuted(rope(heads(q, model.n_heads)), 0, 2, 1, 3)  # [D, T, H, B]
            k = permuted(rope(heads(k, model.n_kv_heads)), 0, 2, 1, 3)
            v = permuted(heads(v, model.n_kv_heads), 1, 2, 0, 3)  # [T, D, H, B]
            scores = ggml.ggml_scale(c, ggml.ggml_mul_mat(c, k, q), 1 / math.sqrt(size))  # [T, T, H, B]
            shares = ggml.ggml_soft_max(c, ggml.ggml_diag_mask_inf(c, scores, 0))
            a = permuted(ggml.ggml_mul_mat(c, v, shares), 0, 2, 1, 3)  # [D, H, T, B]
            a = ggml.ggml_reshape_2d(c, a, model.d_model, tokens)
            x = ggml.ggml_add(c, x, ggml.ggml_mul_mat(c, b["attn_output.weight"], a))
            h = norm(x, b["ffn_norm.weight"])
            gate, up = (ggml.ggml_mul_mat(c, b[f"ffn_{n}.weight"], h) for n in ("gate", "up"))
            h = ggml.ggml_swiglu_split(c, gate, up)
            x = ggml.ggml_add(c, x, ggml.ggml_mul_mat(c, b["ffn_down.weight"], h))
        output = w["token_embd.weight" if model.tied else "output.weight"]
        logits = ggml.ggml_mul_mat(c, output, norm(x, w["output_norm.weight"]))  # [V, B T]
        return ggml.ggml_cross_entropy_loss(c, logits, self.labels)


def new_context(tensors, more=0):
    """Return a context for that many tensors whose data is stored elsewhere."""
    size = ggml.ggml_tensor_overhead() * tensors + more
    return ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True))


def put(tensor, array):
    """Copy a contiguous array into a tensor."""
    ggml.ggml_backend_tensor_set(tensor, array.ctypes.data_as(ctypes.c_void_p), 0, array.nbytes)


BASELINES = (GGMLAutodiff,)
