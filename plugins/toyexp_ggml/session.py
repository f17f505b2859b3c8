"""One run's tensors on a ggml device, and the static graphs that train and look at them."""

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

from toyexp import Batch, Plan, PlanTensor, Session, SessionError, StepMetrics
from toyexp.formats import in_place
from toyexp_ggml.binding import GraphError, version
from toyexp_ggml.binding.backend import Backend
from toyexp_ggml.binding.graph import Graph
from toyexp_ggml.binding.tensors import MappedFile, Memory, Node, clear, get, get_all, host_arrays, put
from toyexp_ggml.inputs import Inputs
from toyexp_ggml.limits import beyond
from toyexp_ggml.ops import GGMLOps
from toyexp_ggml.profiles import CPU_BLAS, Profile
from toyexp_ggml.update import Update

SQUARES = 8  # of gradients that are held at a time for their norm

# Rows of a step in shares that are computed side by side, each by a backend, and so by threads, of its own. Within one
# graph ggml's threads wait for one another after every op, and each reads what the other has just written: where two
# cores share no cache, two threads are hardly faster than one. Those of a share meet the others once a step.
SHARES = 2
# Numbers to train times positions, from which on a step is long enough; and numbers to train, for every share sums
# gradients of its own and transposes the weights once more.
LONG, MOST = 2e8, 2**24

P = TypeVar("P", bound="Backend | Memory | MappedFile | Inputs")


def shares_of(plan: Plan) -> int:
    """In how many shares a step's rows are computed, by the plan alone: sums of shares have other last digits."""
    trained = sum(t.size for t in plan.trainable)
    all_trained = len(plan.trainable) == len(plan.tensors)  # a frozen matrix may have to be unpacked for each
    work = trained * plan.rows * math.prod(plan.inputs["targets"].shape)
    return SHARES if all_trained and trained <= MOST and work >= LONG and plan.rows % SHARES == 0 else 1


@dataclass(frozen=True)
class Share:
    """Some of a micro-batch's rows, what computes them, and where their gradients add up."""

    backend: Backend
    inputs: Inputs
    rows: slice
    sums: Mapping[str, Node]


class GGMLSession(Session):
    """A Plan as ggml graphs: one for a training step, others made when first asked for."""

    def __init__(self, plan: Plan, device: str, profile: Profile, threads: int, recompute: bool, fewer: bool = False):
        super().__init__(plan)
        self._device, self._threads = device, threads  # the CPU's, where a GPU is emulated
        self._fewer = fewer  # threads, while other processes need the cores
        self._profile, self._recompute = profile, recompute
        self._pool = ThreadPoolExecutor(min(SHARES, threads))  # of the shares
        self._graphs: dict[str, Graph] = {}
        self._parts = ExitStack()  # what is to be closed, the last one first

    def do_open(self) -> None:
        plan = self.plan
        if reason := beyond(plan):
            raise GraphError(reason)
        blas = self._profile is CPU_BLAS
        self._backend = self._owned(Backend(self._device, self._threads, blas, self._fewer))
        count = shares_of(plan) if self._profile.shares else 1
        self._memory = memory = self._owned(
            Memory(self._backend, len(plan.tensors) + (3 + count) * len(plan.trainable) + 16)
        )
        self._inputs = self._opened_inputs(self._backend, plan.rows)
        self._frozen = self._map_frozen()
        self._weights = {
            t.name: self._frozen.get(t.name) or memory.tensor(t.shape, trainable=t.trainable) for t in plan.tensors
        }
        self._update = Update(plan, memory, self._profile)
        # Gradients outlive a graph only where several graphs add up, or they are looked at before they are used.
        self._apart = plan.accumulate > 1 or plan.skip_nonfinite or count > 1
        self._shares = self._shared(count) if self._apart else []
        memory.allocate()

    def _shared(self, count: int) -> list[Share]:
        """Shares of the rows, with their memory: the whole on the session's own backend, or several on others."""
        rows, threads, shares = self.plan.rows // count, max(1, self._threads // count), []
        for i in range(count):
            backend, inputs = self._backend, self._inputs
            if count > 1:
                backend = self._owned(Backend(self._device, threads, fewer=self._fewer))
                inputs = self._opened_inputs(backend, rows)
            sums = {t.name: self._memory.tensor(t.shape) for t in self.plan.trainable}
            shares.append(Share(backend, inputs, slice(i * rows, (i + 1) * rows), sums))
        return shares

    def _map_frozen(self) -> dict[str, Node]:
        """Map what needs no copy: frozen matrices of any type, and frozen float32 tensors of any shape.

        Raises GGUFError for a file without them, and for numbers that are none.
        """
        files, nodes = defaultdict(list), {}
        for tensor in self.plan.tensors:
            if info := in_place(tensor):
                files[info.path].append((tensor, info))
        for path, tensors in files.items():
            file = self._owned(MappedFile(self._backend, str(path), len(tensors)))
            for tensor, info in tensors:
                nbytes = info.nbytes // info.shape[0] * tensor.shape[0]
                nodes[tensor.name] = file.tensor(tensor.shape, info.type_id, info.offset, nbytes)
            file.allocate()
        return nodes

    def _opened_inputs(self, backend: Backend, rows: int) -> Inputs:
        inputs = self._owned(Inputs(backend))
        for name, spec in self.plan.inputs.items():
            inputs.add(name, spec, rows)
        return inputs

    def _owned(self, part: P) -> P:
        self._parts.callback(part.close)
        return part

    def describe(self) -> dict[str, Any]:
        """Device, threads, and the training step's graph, if there is one: its size, and what of it runs where."""
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
        residency = graphs[0].residency()  # of one share, as of all
        return {
            **facts,
            **({"shares": len(graphs)} if len(graphs) > 1 else {}),
            "nodes": sum(sum(ops.values()) for ops in residency.values()),
            "residency": residency,
            "off_device": graphs[0].off_device(residency),
            "compute_bytes": sum(graph.compute_bytes for graph in graphs),
        }

    def device_bytes(self) -> int | None:
        """ggml's own buffers: tensors, inputs, and what the graphs so far compute in."""
        return self._backend.buffer_bytes + sum(graph.compute_bytes for graph in self._graphs.values())

    # -- the contract -------------------------------------------------------------------------------------------

    def do_load(self, tensor: PlanTensor) -> None:
        if tensor.name not in self._frozen:
            super().do_load(tensor)

    def do_upload(self, tensor: PlanTensor, array: np.ndarray) -> None:
        if tensor.name in self._frozen:
            raise SessionError(f"upload of {tensor.name}: it is frozen, and read where it lies in its file")
        put(self._weights[tensor.name], array)

    def do_download(self, tensor: PlanTensor) -> np.ndarray:
        node = self._weights[tensor.name]
        return self.plan.initial_values(tensor) if node.packed else get(node)

    def do_build(self) -> None:
        if not self.plan.trainable:
            return
        norm = ("norm",) if self.plan.skip_nonfinite else ()
        each = [f"accumulate {i}" for i in range(len(self._shares))]
        for name in (*each, *norm, "update") if self._apart else ("step",):
            self._graph(name)

    def do_reset_state(self) -> None:
        self._update.reset()

    def do_step(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> StepMetrics:
        self._update.load(numbers)
        if not self._apart:
            out = self._computed("step", micros[0])
            return StepMetrics(_number(out["loss"]), _number(out["norm"]))
        loss = 0.0
        if self.plan.accumulate > 1:
            for node in (node for share in self._shares for node in share.sums.values()):
                clear(node)
        for micro in micros:
            loss += self._accumulate_all(micro)
        if self.plan.skip_nonfinite:
            norm = _number(self._computed("norm")["norm"])
            if not (math.isfinite(loss) and math.isfinite(norm)):
                return StepMetrics(loss, norm)
        return StepMetrics(loss, _number(self._computed("update")["norm"]))

    def _accumulate_all(self, micro: Batch) -> float:
        """The loss of a micro-batch, whose shares are computed at the same time; all have ended before one raises."""
        if len(self._shares) == 1:
            return self._accumulate(micro, 0)
        calls = [self._pool.submit(self._accumulate, micro, i) for i in range(len(self._shares))]
        wait(calls)
        return sum(call.result() for call in calls)

    def _accumulate(self, micro: Batch, i: int) -> float:
        """The loss of a share of a micro-batch, whose gradients go to its sums."""
        share = self._shares[i]
        share.inputs.load({name: array[share.rows] for name, array in micro.items()})
        graph = self._graphs[f"accumulate {i}"]
        graph.compute()
        return _number(graph.outputs["loss"])

    def do_loss(self, micro: Batch) -> float:
        return _number(self._computed("loss", micro)["loss"])

    def do_logits(self, micro: Batch, rows: int) -> np.ndarray:
        return get(self._computed("logits", micro)["logits"])[:rows]

    def do_gradients(self, micros: Sequence[Batch]) -> dict[str, np.ndarray]:
        total = {t.name: np.zeros(t.shape, np.float32) for t in self.plan.trainable}
        for micro in micros:
            for name, node in self._computed("gradients", micro).items():
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
        self._pool.shutdown()  # an interrupt may have left a share at work
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._parts.close()

    # -- the graphs ---------------------------------------------------------------------------------------------

    def _computed(self, name: str, micro: Batch | None = None) -> dict[str, Node]:
        """The outputs of the graph of that name, computed from a micro-batch if it takes one."""
        graph = self._graph(name)
        if micro is not None:
            self._inputs.load(micro)
        graph.compute()
        return graph.outputs

    def _graph(self, name: str) -> Graph:
        """The graph of that name, built when first asked for; its outputs stay readable."""
        if name not in self._graphs:
            kind, _, i = name.partition(" ")
            share = [self._shares[int(i)]] if i else []
            backend = share[0].backend if share else self._backend
            graph = Graph(backend, capacity=4096 + 256 * len(self.plan.tensors))
            try:
                graph.outputs = getattr(self, f"_build_{kind}")(graph, *share)
                missing = graph.stuck() or {op for op in graph.ops() if not self._profile.has(op)}
                if missing:
                    raise GraphError(f"{self._profile.label} does not compute {', '.join(sorted(missing))}")
                graph.finish()
            except BaseException:
                graph.close()
                raise
            self._graphs[name] = graph
        return self._graphs[name]

    def _forward(self, graph: Graph, inputs: Inputs) -> tuple[GGMLOps, Node]:
        ops = GGMLOps(graph, self._profile, inputs, self._recompute)
        params = self.plan.params(self._weights, inputs.batch)
        return ops, self.plan.model.forward(ops, params, inputs.batch)

    def _loss_and_gradients(self, graph: Graph, inputs: Inputs) -> tuple[Node, dict[str, Node]]:
        """The loss, wanted and kept, and every trainable tensor's gradient, wanted but not kept."""
        ops, logits = self._forward(graph, inputs)
        loss, dlogits = ops.loss_and_gradient(logits, inputs.batch["weights"])
        graph.want(loss, keep=True)
        trainable = {t.name: self._weights[t.name] for t in self.plan.trainable}
        if self._profile.half_products:
            # The gradient of a mean over n targets would lie where float16 has few digits: n times it does not.
            factor = 2.0 ** int(math.log2(math.prod(logits.shape[:-1])))
            found = ops.backward({logits: graph.scale(dlogits(), factor)}, list(trainable.values()))
            found = {node: graph.scale(gradient, 1 / factor) for node, gradient in found.items()}
        else:
            found = ops.backward({logits: dlogits()}, list(trainable.values()))
        gradients = {n: found[w] if w in found else inputs.zeros(*w.shape) for n, w in trainable.items()}
        # All gradients come before the first update in the graph's order: an update changes a weight in place that
        # another gradient may still have to read.
        for gradient in gradients.values():
            graph.want(gradient)
        return loss, gradients

    def _norm(self, graph: Graph, gradients: dict[str, Node]) -> Node:
        """The global norm, [1]."""
        norm = graph.sqrt(reduce(graph.add, self._squares(graph, gradients.values())))
        graph.want(norm, keep=True)
        return norm

    def _squares(self, graph: Graph, gradients: Iterable[Node]) -> Iterator[Node]:
        """What adds up to the sum of all squares, [1] each."""
        if not self._profile.narrow_sum:
            yield from (graph.sum_of_squares(g, by_dot=self._profile.slow_sum) for g in gradients)
            return
        alike: dict[int, list[Node]] = {}  # tensors of one size are added up first: one sum for all of them
        for gradient in gradients:
            alike.setdefault(gradient.size, []).append(graph.reshape(gradient, gradient.size))
        totals = [self._sum_of_squares(graph, same) for same in alike.values()]
        rows = graph.in_turn(graph.row_sums(total) for total in totals)
        yield from graph.in_turn(graph.total(row) for row in rows)

    def _sum_of_squares(self, graph: Graph, alike: Sequence[Node]) -> Node:
        """The squares of nodes [n] added up, [n]; a few are held at a time."""
        total: Any = None
        for start in range(0, len(alike), SQUARES):
            for square in graph.in_turn(graph.sqr(x) for x in alike[start : start + SQUARES]):
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
                graph.in_turn(gradients.values())
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
        """The gradients of all shares."""
        return {t.name: reduce(graph.add, (share.sums[t.name] for share in self._shares)) for t in self.plan.trainable}

    def _build_norm(self, graph: Graph) -> dict[str, Node]:
        return {"norm": self._norm(graph, self._sums(graph))}

    def _build_update(self, graph: Graph) -> dict[str, Node]:
        gradients = self._sums(graph)
        norm = self._norm(graph, gradients)
        self._step(graph, gradients, norm)
        return {"norm": norm}

    def _build_loss(self, graph: Graph) -> dict[str, Node]:
        ops, logits = self._forward(graph, self._inputs)
        loss = ops.loss_and_gradient(logits, self._inputs.batch["weights"])[0]
        graph.want(loss, keep=True)
        return {"loss": loss}

    def _build_logits(self, graph: Graph) -> dict[str, Node]:
        _, logits = self._forward(graph, self._inputs)
        kept = graph.scale(logits, 1.0)  # an output must own its memory; the logits may be a view
        graph.want(kept, keep=True)
        return {"logits": kept}

    def _build_gradients(self, graph: Graph) -> dict[str, Node]:
        _, gradients = self._loss_and_gradients(graph, self._inputs)
        kept = {name: graph.scale(g, 1.0) for name, g in gradients.items()}
        for node in kept.values():
            graph.want(node, keep=True)
        return kept


def _number(node: Node) -> float:
    return float(get(node).reshape(-1)[0])
