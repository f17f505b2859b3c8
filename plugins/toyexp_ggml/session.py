"""Session of one run on a ggml device: its tensors, and the static graphs for training and evaluation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import numpy as np

from toyexp import Batch, FromGGUF, Params, Plan, PlanTensor, Session, SessionError, StepMetrics
from toyexp.formats import mappable_tensor
from toyexp_ggml.binding import GraphError, version
from toyexp_ggml.binding.backend import Backend
from toyexp_ggml.binding.graph import Graph
from toyexp_ggml.binding.tensors import MappedFile, Memory, Node, clear, get, get_all, host_arrays, put
from toyexp_ggml.inputs import Inputs
from toyexp_ggml.limits import exceeded_limit
from toyexp_ggml.ops import GGMLOps
from toyexp_ggml.profiles import CPU_BLAS, Profile
from toyexp_ggml.update import Update

SQUARES = 8  # squared gradients in memory at a time, for the norm

# Shares of a step's rows that are computed at the same time, each by its own backend and threads. In one graph ggml's
# threads wait for each other after every op and read data that other threads have just written, so on cores without a
# common cache two threads are hardly faster than one. Shares wait for each other only once a step.
SHARES = 2
# A step is split into shares only if its trained numbers times positions are at least LONG, and its trained numbers at
# most MOST, since each share sums its own gradients and transposes the weights again.
LONG, MOST = 2e8, 2**24

P = TypeVar("P", bound="Backend | Memory | MappedFile | Inputs")


def choose_share_count(plan: Plan) -> int:
    """Return into how many shares to split the rows of a step, to compute the shares at the same time.

    The result depends only on the plan, not on the machine, because it changes the last digits of the losses.
    """
    trained = sum(t.size for t in plan.trainable)
    splits = plan.objective.rows_together == 1
    all_trained = len(plan.trainable) == len(plan.tensors)  # each share would dequantise frozen matrices again
    work = trained * plan.rows * math.prod(plan.inputs["weights"].shape)
    return SHARES if splits and all_trained and trained <= MOST and work >= LONG and plan.rows % SHARES == 0 else 1


@dataclass(frozen=True)
class Share:
    """A part of the rows of a micro-batch, the backend that computes it, and nodes that sum its gradients."""

    backend: Backend
    inputs: Inputs
    rows: slice
    sums: Mapping[str, Node]


class GGMLSession(Session):
    """Session that runs a Plan as ggml graphs.

    It builds the graphs of a training step at the start, and each other graph when it is first used.
    """

    def __init__(
        self, plan: Plan, device: str, profile: Profile, threads: int, recompute: bool, adaptive: bool = False
    ):
        super().__init__(plan)
        self._device, self._threads = device, threads  # device is "CPU" if a GPU is emulated
        self._adaptive = adaptive  # use fewer threads while other processes need the cores
        self._profile, self._recompute = profile, recompute
        self._pool = ThreadPoolExecutor(min(SHARES, threads))  # computes the shares
        self._graphs: dict[str, Graph] = {}
        self._parts = ExitStack()  # closes backends, memory and inputs in reverse order

    def do_open(self) -> None:
        plan = self.plan
        if reason := exceeded_limit(plan):
            raise GraphError(reason)
        blas = self._profile is CPU_BLAS
        self._backend = self._register(Backend(self._device, self._threads, blas, self._adaptive))
        count = choose_share_count(plan) if self._profile.shares else 1
        self._memory = memory = self._register(
            Memory(self._backend, len(plan.tensors) + (3 + count) * len(plan.trainable) + 16)
        )
        self._inputs = self._open_inputs(self._backend, plan.rows)
        self._frozen = self._map_frozen()
        self._weights = {
            t.name: self._frozen.get(t.name) or memory.tensor(t.shape, trainable=t.trainable) for t in plan.tensors
        }
        self._update = Update(plan, memory, self._profile)
        # Gradients must outlive a graph if several graphs are summed, or if they are checked before the update.
        self._keeps_gradients = plan.accumulate > 1 or plan.skip_nonfinite or count > 1
        self._shares = self._make_shares(count) if self._keeps_gradients else []
        memory.allocate()

    def _make_shares(self, count: int) -> list[Share]:
        """Split the rows of a micro-batch into `count` equal shares.

        A single share uses the session's backend. With several shares, each has a backend of its own.
        """
        rows, threads, shares = self.plan.rows // count, max(1, self._threads // count), []
        for i in range(count):
            backend, inputs = self._backend, self._inputs
            if count > 1:
                backend = self._register(Backend(self._device, threads, adaptive=self._adaptive))
                inputs = self._open_inputs(backend, rows)
            sums = {t.name: self._memory.tensor(t.shape) for t in self.plan.trainable}
            shares.append(Share(backend, inputs, slice(i * rows, (i + 1) * rows), sums))
        return shares

    def _map_frozen(self) -> dict[str, Node]:
        """Return, by name, the frozen tensors that keep their type in the file: all matrices, and all float32 tensors.

        On the CPU these tensors are memory-mapped, not copied, unless the file has them in another form, such as
        other rows first. Raise GGUFError if a tensor is missing or contains NaN or infinity.
        """
        files, nodes = defaultdict(list), dict[str, Node]()
        for tensor in self.plan.tensors:
            if (info := mappable_tensor(tensor)) and info.offset < 0:
                nodes[tensor.name] = self._memory.tensor(tensor.shape, info.type_id)
            elif info:
                files[info.path].append((tensor, info))
        for path, tensors in files.items():
            file = self._register(MappedFile(self._backend, str(path), len(tensors)))
            for tensor, info in tensors:
                nbytes = info.nbytes // info.shape[0] * tensor.shape[0]
                nodes[tensor.name] = file.tensor(tensor.shape, info.type_id, info.offset, nbytes)
            file.allocate()
        return nodes

    def _open_inputs(self, backend: Backend, rows: int) -> Inputs:
        inputs = self._register(Inputs(backend))
        for name, spec in self.plan.inputs.items():
            inputs.add(name, spec, rows)
        return inputs

    def _register(self, part: P) -> P:
        self._parts.callback(part.close)
        return part

    def describe(self) -> dict[str, Any]:
        """Return the device and the number of threads.

        If the plan trains tensors, also describe the graph of the training step: its nodes, backends and memory.
        """
        facts = {
            "framework": f"ggml {version()}",
            "device": self._device,
            "profile": self._profile.label,
            "threads": self._threads,
        }
        if not self.plan.trainable:
            return facts
        names = [f"accumulate {i}" for i in range(len(self._shares))] or ["step"]
        graphs = [self._graphs[name] for name in names]
        residency = graphs[0].residency()  # the same for all shares
        return {
            **facts,
            **({"shares": len(graphs)} if len(graphs) > 1 else {}),
            "nodes": sum(sum(ops.values()) for ops in residency.values()),
            "residency": residency,
            "off_device": graphs[0].off_device(residency),
            "compute_bytes": sum(graph.compute_bytes for graph in graphs),
        }

    def device_bytes(self) -> int | None:
        """Return the bytes of ggml's buffers: tensors, inputs, and working memory of the graphs built so far."""
        return self._backend.buffer_bytes + sum(graph.compute_bytes for graph in self._graphs.values())

    # -- the session interface -------------------------------------------------------------------------------------

    def do_load(self, tensor: PlanTensor) -> None:
        if (info := mappable_tensor(tensor)) is None:
            super().do_load(tensor)
        elif info.offset < 0:
            assert isinstance(tensor.values, FromGGUF)
            put(self._weights[tensor.name], tensor.values.raw())

    def do_upload(self, tensor: PlanTensor, array: np.ndarray) -> None:
        if tensor.name in self._frozen:
            problem = "the tensor is frozen and mapped from its file, so its values cannot be replaced"
            raise SessionError(f"upload of {tensor.name}: {problem}")
        put(self._weights[tensor.name], array)

    def do_download(self, tensor: PlanTensor) -> np.ndarray:
        node = self._weights[tensor.name]
        return self.plan.initial_values(tensor) if node.packed else get(node)

    def do_build(self) -> None:
        if not self.plan.trainable:
            return
        norm = ("norm",) if self.plan.skip_nonfinite else ()
        shares = [f"accumulate {i}" for i in range(len(self._shares))]
        for name in (*shares, *norm, "update") if self._keeps_gradients else ("step",):
            self._graph(name)

    def do_reset_state(self) -> None:
        self._update.reset()

    def do_step(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> StepMetrics:
        self._update.load(numbers)
        if not self._keeps_gradients:
            out = self._compute("step", micros[0])
            return StepMetrics(_number(out["loss"]), _number(out["norm"]))
        loss = 0.0
        if self.plan.accumulate > 1:
            for node in (node for share in self._shares for node in share.sums.values()):
                clear(node)
        for micro in micros:
            loss += self._accumulate_all(micro)
        if self.plan.skip_nonfinite:
            norm = _number(self._compute("norm")["norm"])
            if not (math.isfinite(loss) and math.isfinite(norm)):
                return StepMetrics(loss, norm)
        return StepMetrics(loss, _number(self._compute("update")["norm"]))

    def _accumulate_all(self, micro: Batch) -> float:
        """Call `_accumulate` for all shares of a micro-batch at the same time, and return the micro-batch's loss.

        If one call fails, wait for the other calls before raising the error.
        """
        if len(self._shares) == 1:
            return self._accumulate(micro, 0)
        calls = [self._pool.submit(self._accumulate, micro, i) for i in range(len(self._shares))]
        wait(calls)
        return sum(call.result() for call in calls)

    def _accumulate(self, micro: Batch, i: int) -> float:
        """Compute the loss and the gradients of share `i` of a micro-batch's rows, and return the loss.

        With gradient accumulation, add the gradients to the share's `sums`. Otherwise replace the `sums`.
        """
        share = self._shares[i]
        share.inputs.load({name: array[share.rows] for name, array in micro.items()})
        graph = self._graphs[f"accumulate {i}"]
        graph.compute()
        return _number(graph.outputs["loss"])

    def do_loss(self, micro: Batch) -> float:
        return _number(self._compute("loss", micro)["loss"])

    def do_metrics(self, micro: Batch) -> Mapping[str, float]:
        return {name: _number(node) for name, node in self._compute("metrics", micro).items()}

    def do_logits(self, micro: Batch, rows: int) -> np.ndarray:
        return get(self._compute("logits", micro)["logits"])[:rows]

    def do_gradients(self, micros: Sequence[Batch]) -> dict[str, np.ndarray]:
        total = {t.name: np.zeros(t.shape, np.float32) for t in self.plan.trainable}
        for micro in micros:
            for name, node in self._compute("gradients", micro).items():
                total[name] += get(node)
        return total

    def do_snapshot(self, into: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        nodes = self.name_arrays(self._weights, self._update.state)
        arrays = into or host_arrays(self._backend, nodes)
        get_all(self._backend, ((node, arrays[name]) for name, node in nodes.items()))
        return arrays

    def do_restore(self, tensor: PlanTensor, values: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        put(self._weights[tensor.name], values.astype(np.float32))
        for slot, array in state.items():
            put(self._update.state[tensor.name][slot], array.astype(np.float32))

    def do_close(self) -> None:
        self._pool.shutdown()  # after an interrupt a share may still be running
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._parts.close()

    # -- the graphs ------------------------------------------------------------------------------------------------

    def _compute(self, name: str, micro: Batch | None = None) -> dict[str, Node]:
        """Compute the graph `name`, after uploading `micro` if it is given; return the graph's outputs by name."""
        graph = self._graph(name)
        if micro is not None:
            self._inputs.load(micro)
        graph.compute()
        return graph.outputs

    def _graph(self, name: str) -> Graph:
        """Return the graph `name`, built at its first use. Its outputs can be read after each computation."""
        if name not in self._graphs:
            kind, _, i = name.partition(" ")
            share = [self._shares[int(i)]] if i else []
            backend = share[0].backend if share else self._backend
            graph = Graph(backend, capacity=4096 + 256 * len(self.plan.tensors))
            try:
                graph.outputs = getattr(self, f"_build_{kind}")(graph, *share)
                missing = graph.unsupported_in_place() or {op for op in graph.ops() if not self._profile.has(op)}
                if missing:
                    raise GraphError(f"{self._profile.label} does not support {', '.join(sorted(missing))}")
                graph.finish()
            except BaseException:
                graph.close()
                raise
            self._graphs[name] = graph
        return self._graphs[name]

    def _arguments(self, graph: Graph, inputs: Inputs) -> tuple[GGMLOps, Params, Mapping[str, Any]]:
        """Return the arguments ops, p and batch for a forward pass in the graph."""
        ops = GGMLOps(graph, self._profile, inputs, self._recompute)
        return ops, self.plan.params(self._weights, inputs.batch), inputs.batch

    def _loss_and_gradients(self, graph: Graph, inputs: Inputs) -> tuple[Node, dict[str, Node]]:
        """Add the loss and the gradients to the graph. Return the loss, and the gradients by tensor name.

        After a computation only the loss can be read, because the memory of the gradients is reused.
        """
        ops, params, batch = self._arguments(graph, inputs)
        loss = self.plan.objective.training_loss(ops, self.plan.model, params, batch)
        graph.want(loss, keep=True)
        trainable = {t.name: self._weights[t.name] for t in self.plan.trainable}
        # The gradient of a mean over n targets is too small for float16, so it is multiplied by about n.
        factor = 2.0 ** int(math.log2(batch["weights"].size)) if self._profile.half_products else 1.0
        by_weight = ops.backward(loss, inputs.vector((factor,)), factor, list(trainable.values()))
        if factor != 1:
            by_weight = {node: graph.scale(gradient, 1 / factor) for node, gradient in by_weight.items()}
        gradients = {n: by_weight[w] if w in by_weight else inputs.zeros(*w.shape) for n, w in trainable.items()}
        # All gradients must precede the first update, which changes a weight in place that other gradients may read.
        for gradient in gradients.values():
            graph.want(gradient)
        return loss, gradients

    def _norm(self, graph: Graph, gradients: dict[str, Node]) -> Node:
        norm = graph.sqrt(reduce(graph.add, self._squares(graph, gradients.values())))
        graph.want(norm, keep=True)
        return norm

    def _squares(self, graph: Graph, gradients: Iterable[Node]) -> Iterator[Node]:
        """Yield nodes of shape [1]; their sum is the squared norm of all gradients together."""
        if not self._profile.narrow_sum:
            yield from (graph.sum_of_squares(g, by_dot=self._profile.slow_sum) for g in gradients)
            return
        alike: dict[int, list[Node]] = {}  # tensors by size; tensors of one size share one SUM
        for gradient in gradients:
            alike.setdefault(gradient.size, []).append(graph.reshape(gradient, gradient.size))
        totals = [self._sum_of_squares(graph, same) for same in alike.values()]
        rows = graph.want_all(graph.row_sums(total) for total in totals)
        yield from graph.want_all(graph.total(row) for row in rows)

    def _sum_of_squares(self, graph: Graph, alike: Sequence[Node]) -> Node:
        """Square the nodes `alike` [n] element by element, and return the sum [n] of these squares.

        To save memory, at most SQUARES squared nodes exist at a time.
        """
        total: Any = None
        for start in range(0, len(alike), SQUARES):
            for square in graph.want_all(graph.sqr(x) for x in alike[start : start + SQUARES]):
                total = square if total is None else graph.add(total, square)
            graph.want(total)
        return total

    def _step(self, graph: Graph, gradients: dict[str, Node], norm: Node) -> None:
        clip = self.plan.grad_clip
        if clip:
            limit = graph.scale(graph.div(self._inputs.ones(1), graph.scale(norm, 1.0, 1e-6)), clip)
            factor = graph.clamp(limit, 0.0, 1.0)
            gradients = {name: graph.mul(g, factor) for name, g in gradients.items()}
            if self._profile.side_by_side:
                graph.want_all(gradients.values())
        self._update.build(graph, self._weights, gradients)

    def _build_step(self, graph: Graph) -> dict[str, Node]:
        loss, gradients = self._loss_and_gradients(graph, self._inputs)
        norm = self._norm(graph, gradients)
        self._step(graph, gradients, norm)
        return {"loss": loss, "norm": norm}

    def _build_accumulate(self, graph: Graph, share: Share) -> dict[str, Node]:
        loss, gradients = self._loss_and_gradients(graph, share.inputs)
        for name, gradient in gradients.items():
            total = graph.add(gradient, share.sums[name]) if self.plan.accumulate > 1 else gradient
            graph.want(graph.copy_into(total, share.sums[name]))
        return {"loss": loss}

    def _sums(self, graph: Graph) -> dict[str, Node]:
        return {t.name: reduce(graph.add, (share.sums[t.name] for share in self._shares)) for t in self.plan.trainable}

    def _build_norm(self, graph: Graph) -> dict[str, Node]:
        return {"norm": self._norm(graph, self._sums(graph))}

    def _build_update(self, graph: Graph) -> dict[str, Node]:
        gradients = self._sums(graph)
        norm = self._norm(graph, gradients)
        self._step(graph, gradients, norm)
        return {"norm": norm}

    def _build_loss(self, graph: Graph) -> dict[str, Node]:
        ops, params, batch = self._arguments(graph, self._inputs)
        loss = self.plan.objective.held_out_loss(ops, self.plan.model, params, batch)
        graph.want(loss, keep=True)
        return {"loss": loss}

    def _build_metrics(self, graph: Graph) -> dict[str, Node]:
        ops, params, batch = self._arguments(graph, self._inputs)
        metrics = self.plan.objective.metrics(ops, self.plan.model, params, batch)
        outputs = {name: graph.scale(value, 1.0) for name, value in metrics.items()}
        for node in outputs.values():
            graph.want(node, keep=True)
        return outputs

    def _build_logits(self, graph: Graph) -> dict[str, Node]:
        logits = self.plan.model.forward(*self._arguments(graph, self._inputs))
        copy = graph.scale(logits, 1.0)  # an output must own its memory; the logits may be a view
        graph.want(copy, keep=True)
        return {"logits": copy}

    def _build_gradients(self, graph: Graph) -> dict[str, Node]:
        _, gradients = self._loss_and_gradients(graph, self._inputs)
        copies = {name: graph.scale(g, 1.0) for name, g in gradients.items()}
        for node in copies.values():
            graph.want(node, keep=True)
        return copies


def _number(node: Node) -> float:
    return float(get(node).reshape(-1)[0])
