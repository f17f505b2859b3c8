"""engine.devices: several processes compute the results of one device, and end together if one fails."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from faults import TEXT, Trace, environment, python, toyexp
from multi_device import (
    ADAMW,
    OPTIMISERS,
    PLUGIN,
    RANKS,
    RUN,
    RUN_ON_TWO,
    StartedRun,
    assert_close,
    events,
    free_port,
    take_steps,
)
from tiny import VOCAB, batches, plan, write_base

from toyexp import RunFailed, Setup, UserError
from toyexp.cli.main import main
from toyexp.interfaces.plan import apply_optimiser
from toyexp.testing import token_dataset
from toyexp_models.llama import Llama
from toyexp_recipes.lora import Lora
from toyexp_recipes.scratch import Scratch
from toyexp_torch.distributed import session, supervisor, worker
from toyexp_torch.distributed.group import torchrun_store
from toyexp_torch.distributed.rpc import Link, encode
from toyexp_torch.distributed.session import GradientSums, ShardedUpdate
from toyexp_torch.distributed.supervisor import Rank, Supervisor
from toyexp_torch.engines import TorchCPU
from toyexp_torch.update import ALIGNMENT, Share, Update

pytestmark = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")


@pytest.fixture(scope="module")
def second_rank(tmp_path_factory):
    """Start one worker rank for all sessions of the tests, as on another host."""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    directory = tmp_path_factory.mktemp("second")
    command = python("-m", "toyexp", "engine=cpu")
    process = subprocess.Popen(
        command, cwd=directory, env={**environment(directory), **variables, "RANK": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    yield {**variables, "RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    group = worker._connect_torchrun_ranks()
    group.is_persistent = False  # so that close() ends the worker, as at the end of a process
    group.close()
    worker._connect_torchrun_ranks.cache_clear()
    torchrun_store.cache_clear()
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "")


@pytest.fixture
def make_two_ranks(second_rank, monkeypatch):
    """Return a function that builds an engine of two ranks from its settings."""

    def make_engine(**settings):
        for name, value in second_rank.items():
            monkeypatch.setenv(name, value)
        return TorchCPU(**settings)

    return make_engine


def run_on_one_process(the_plan, **settings):
    """Return the results of a session of one process, without the rank variables of the environment."""
    saved_variables = {name: os.environ.pop(name, None) for name in RANKS}
    try:
        return take_steps(TorchCPU(**settings.pop("engine", {})), the_plan, **settings)
    finally:
        os.environ.update({name: value for name, value in saved_variables.items() if value is not None})


class LocalBroadcast:
    """Stand-in for broadcasts between ranks that are threads: copies the part from the other rank's flat vector."""

    def __init__(self, rank, flats, barrier):
        self._rank, self._flats, self._barrier = rank, flats, barrier

    def broadcast(self, part, rank):
        def wait():
            self._barrier.wait()
            part_slice = slice(part.storage_offset(), part.storage_offset() + len(part))
            if rank != self._rank:
                part.copy_(self._flats[rank][part_slice])

        return wait


def lay_out(the_plan):
    """Return each tensor's slice of a session's flat vector, and its length."""
    slices, start = {}, 0
    for group in the_plan.updates:
        for tensor in (the_plan.tensor(name) for name in group.tensors):
            slices[tensor.name] = slice(start, start + tensor.size)
            start += -(-tensor.size // ALIGNMENT) * ALIGNMENT
    return slices, start


class Doubling:
    """Stand-in for a sum over two ranks with equal numbers, which records the order by offset."""

    def __init__(self):
        self.begun = []

    def sum(self, part):
        self.begun.append(part.storage_offset())
        return lambda: part.mul_(2)


def test_every_gradient_is_summed_once_and_in_a_fixed_order(monkeypatch):
    """Gradients of large models are sent in many buckets, some early; none waits for a tensor without a gradient."""
    the_plan = apply_optimiser(plan("llama"), ADAMW, 1e-2)
    slices, size = lay_out(the_plan)
    monkeypatch.setattr(session, "BUCKET", 4 * size // 6)
    names, orders, early_counts = [t.name for t in the_plan.trainable], [], []
    draw = np.random.default_rng(0)
    for arrivals in (names[::-1], names, *(list(draw.permutation(names)) for _ in range(4))):
        gradient, total, group = torch.ones(size), torch.ones(1), Doubling()
        sums = GradientSums(the_plan, gradient, slices, group)
        sums.begin()
        for name in arrivals[:-1]:  # the last gradient never arrives
            sums.mark_complete(name)
        early_counts.append(len(group.begun))
        sums.finish(total)
        assert all(bool((gradient[tensor_slice] == 2).all()) for tensor_slice in slices.values()) and float(total) == 2
        orders.append(group.begun)
    assert len(orders[0]) > 4 and all(order == orders[0] for order in orders)
    assert early_counts[0] > 2, "parts in the order of the backward pass are not sent early"


@pytest.mark.parametrize("name", ["sgd", "adafactor"])  # an element-wise rule, and one for whole tensors
def test_bfloat16_copies_of_weights_are_rounded_whichever_rank_updated_them(name):
    """GPUs keep bfloat16 copies; here formulas replace kernels, and threads replace processes."""
    the_plan = apply_optimiser(plan("llama"), OPTIMISERS[name], 1e-2)
    draw, (slices, start) = torch.Generator().manual_seed(1), lay_out(the_plan)
    values, gradient = torch.zeros(start), torch.zeros(start)
    for tensor_slice in slices.values():
        for vector in (values, gradient):
            vector[tensor_slice] = torch.randn(tensor_slice.stop - tensor_slice.start, generator=draw)
    flats = [values.clone(), values.clone(), values.clone()]
    rounded = [flat.to(torch.bfloat16) for flat in flats]
    barrier, numbers = threading.Barrier(2, timeout=20), the_plan.numbers(0, 1e-2)

    def step(rank):
        update = ShardedUpdate(the_plan, flats[rank], gradient, slices, False, rounded[rank], Share(rank, 2))
        update.group = LocalBroadcast(rank, flats, barrier)
        update(numbers)

    threads = [threading.Thread(target=step, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Update(the_plan, flats[2], gradient, slices, False, rounded[2])(numbers)
    assert not torch.equal(flats[2], values)
    for rank in range(2):
        assert torch.equal(flats[rank], flats[2]) and torch.equal(rounded[rank], rounded[2])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_50_steps_on_two_ranks_have_the_losses_of_one_process(make_two_ranks, name):
    the_plan = apply_optimiser(plan(name, rows=4, accumulate=2, grad_clip=0.5), ADAMW, 1e-2)
    # Sums in a different order; over 50 steps the differences grow, more so at a higher rate.
    losses, expected = (
        take_steps(make_two_ranks(), the_plan, 50, lr=1e-3)[0],
        run_on_one_process(the_plan, steps=50, lr=1e-3)[0],
    )
    np.testing.assert_allclose(losses[:, 0], expected[:, 0], rtol=1e-4)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_agrees_with_one_process_and_shards_are_bit_identical(make_two_ranks, name):
    """In float64, because signs and roots amplify rounding."""
    the_plan = apply_optimiser(plan("llama_tied_bias", rows=4, grad_clip=0.5), OPTIMISERS[name].with_mode("lora"), 1e-2)
    expected = run_on_one_process(the_plan, engine={"dtype": "float64"})
    unsharded, sharded = (take_steps(make_two_ranks(dtype="float64", shard=shard), the_plan) for shard in (False, True))
    assert_close(dict(enumerate(unsharded)), dict(enumerate(expected)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(unsharded[0], expected[0], rtol=1e-9)
    np.testing.assert_array_equal(sharded[0], unsharded[0])
    for array, values in unsharded[2].items():
        np.testing.assert_array_equal(sharded[2][array], values, err_msg=array)


@pytest.mark.parametrize("shard", [False, True])
def test_a_skipped_step_changes_no_rank(make_two_ranks, shard):
    the_plan = apply_optimiser(plan("llama", rows=4, skip_nonfinite=True), ADAMW, 1e-2)
    metrics, _, arrays = take_steps(make_two_ranks(shard=shard), the_plan, bad=3)
    assert [bool(np.isfinite(step).all()) for step in metrics] == [step != 3 for step in range(6)]
    np.testing.assert_allclose(metrics[4:], run_on_one_process(the_plan, bad=3)[0][4:], rtol=1e-4)
    arrays["token_embd.weight"] = arrays["token_embd.weight"][:-1]
    assert all(np.isfinite(array).all() for array in arrays.values())


@pytest.mark.parametrize("packed", [False, True])
def test_adapters_with_dropout_train_on_a_base_that_only_rank_0_reads(make_two_ranks, tmp_path, packed):
    write_base(tmp_path / "base.gguf", "llama", "q8_0")
    recipe = Lora(base=str(tmp_path / "base.gguf"), rank=2, dropout=0.5)
    the_plan = apply_optimiser(plan("llama", rows=4, recipe=recipe), ADAMW, 1e-2)
    results = take_steps(make_two_ranks(packed=packed, shard=True), the_plan)
    expected = run_on_one_process(the_plan, engine={"packed": packed})
    np.testing.assert_allclose(results[0], expected[0], rtol=1e-4)
    np.testing.assert_allclose(results[1]["logits"], expected[1]["logits"], atol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_snapshot_resumes_bit_identically_on_two_ranks_and_within_tolerance_on_one(make_two_ranks, name):
    the_plan = apply_optimiser(plan("llama", rows=4), OPTIMISERS[name].with_mode("lora"), 1e-2)
    uninterrupted = take_steps(make_two_ranks(), the_plan, 8)
    _, _, snapshot = take_steps(make_two_ranks(shard=True), the_plan, 4)
    for shard in (True, False):
        resumed = take_steps(make_two_ranks(shard=shard), the_plan, 4, snapshot, first=4)
        np.testing.assert_array_equal(resumed[0], uninterrupted[0][4:])
        for array, values in uninterrupted[2].items():
            np.testing.assert_array_equal(resumed[2][array], values, err_msg=array)
    np.testing.assert_allclose(
        run_on_one_process(the_plan, steps=4, state=snapshot, first=4)[0], uninterrupted[0][4:], rtol=1e-4
    )


@pytest.mark.parametrize("shard", [False, True])
def test_a_snapshot_reuses_the_memory_of_an_earlier_one(make_two_ranks, shard):
    """A checkpoint then allocates no new memory and does not wait for a checkpoint being written."""
    the_plan, data = apply_optimiser(plan("llama", rows=4), ADAMW, 1e-2), batches(rows=4)
    with make_two_ranks(shard=shard).realize(the_plan) as session:
        session.build()
        first = session.snapshot()
        addresses = {name: array.ctypes.data for name, array in first.items()}
        session.step(data.batch(0), the_plan.numbers(0, 1e-2))
        second_rank, fresh = session.snapshot(first), session.snapshot()
    assert {name: array.ctypes.data for name, array in second_rank.items()} == addresses
    for name, array in fresh.items():
        np.testing.assert_array_equal(second_rank[name], array, err_msg=name)
        assert array.any(), f"{name}: the step did not change it"


def test_the_error_names_a_model_that_other_ranks_cannot_import(make_two_ranks):
    @dataclass
    class Hidden(Llama):
        name: ClassVar[str] = "hidden"

    model = Hidden(d_model=32, n_layers=1, n_heads=4, context=12).fit(token_dataset(VOCAB))
    with (
        make_two_ranks().realize(Scratch().plan(model, Setup(batches(4).inputs, rows=4))) as session,
        pytest.raises(UserError, match=r"the other ranks cannot import .*Hidden.* module"),
    ):
        session.build()


def test_a_message_can_only_construct_dataclasses():
    with contextlib.ExitStack() as stack:
        ours, theirs = (stack.enter_context(contextlib.closing(Link(end))) for end in socket.socketpair())
        value = {
            "numbers": [1.5, None, True],
            (1, 2): np.arange(6, dtype=np.int16).reshape(2, 3),
            "plan": plan("llama"),
        }
        ours.send(encode([value, value]))
        first, second = theirs.receive()
        np.testing.assert_array_equal(first[1, 2], value[1, 2])
        assert (first["numbers"], first["plan"].model) == (value["numbers"], value["plan"].model)
        assert second["plan"] is first["plan"], "an object sent twice is received as two"
        for module, name in (("os", "system"), ("subprocess", "Popen"), ("builtins", "eval")):
            ours.send(f"c{module}\n{name}\n.".encode())
            with pytest.raises(UnpicklingError, match="is not a dataclass"):
                theirs.receive()
        with pytest.raises(UserError, match="lock cannot be sent"):
            encode([threading.Lock()])


def test_a_connection_without_the_token_or_with_a_rank_already_connected_is_rejected():
    for hello, connected in (
        (b"guess 1 2 host\n", set()), (b"token 0 2 host\n", set()), (b"token 2 2 host\n", set()),
        (b"token one 2 host\n", set()), (b"\n", set()), (b"token 1 2 host\n", {1}),
    ):  # fmt: skip
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(hello)
            with pytest.raises(ValueError):
                worker._accept(ours, "token", connected, 2)


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    Path("book.txt").write_text(TEXT)
    return tmp_path


def test_a_run_on_two_ranks_resumes_bit_identically_and_can_resume_on_one(book, capsys):
    assert main([*RUN_ON_TWO, "hydra.run.dir=whole"]) == 0
    assert main([*RUN_ON_TWO, "engine.shard=true", "steps=8", "hydra.run.dir=begun"]) == 0
    assert main(["resume=begun", "steps=12"]) == 0
    assert Trace.read(Path("begun")).files == Trace.read(Path("whole")).files
    assert [e["loss"] for e in events("begun", "step")] == [e["loss"] for e in events("whole", "step")]
    (start,) = events("whole", "run_start")
    assert (start["backend"]["devices"], len(start["backend"]["ranks"]), start["backend"]["threads"]) == (2, 2, 2)
    assert main([*RUN, "hydra.run.dir=one"]) == 0
    for kind in ("step", "eval"):
        losses, expected = ([e["loss"] for e in events(run, kind)] for run in ("whole", "one"))
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
    capsys.readouterr()
    assert main(["resume=whole", "steps=14", "engine.devices=1"]) == 0
    assert "engine devices was 2 and is 1: further steps are not bit-identical" in capsys.readouterr().out


@pytest.mark.parametrize("by_torchrun", [pytest.param(False, marks=pytest.mark.release), True])
def test_ranks_started_by_toyexp_or_torchrun_load_a_local_plugin(book, by_torchrun):
    Path("of_mine.py").write_text(PLUGIN)
    overrides = ["plugins=[of_mine]", "model=mine", "model.d_ff=192", "hydra.run.dir=run"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command = (
        [*torchrun, "-m", "toyexp", *RUN, *overrides] if by_torchrun else ["-m", "toyexp", *RUN_ON_TWO, *overrides]
    )
    child = subprocess.run(python(*command), env=environment(book), capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    assert child.stdout.count("completed after 12 steps") == 1, "ranks other than 0 print"
    (start,) = events("run", "run_start")
    assert (start["backend"]["devices"], len({*start["backend"]["ranks"]})) == (2, 2)
    assert main([*RUN, "model.d_ff=192", "hydra.run.dir=one"]) == 0
    losses, expected = ([e["loss"] for e in events(run, "step")] for run in ("run", "one"))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "pattern"),
    [
        ("engine.devices=two", "engine.devices=two: must be a number of devices, at least 1, or all"),
        ("engine.devices=9999", f"engine.devices=9999: only {os.cpu_count()} cores available; engine.devices=all"),
        ("engine.devices=2 batch_size=5", "a batch of 5 rows cannot be split .* 2 devices; use batch_size=6"),
        ("engine.devices=2 batch_size=5 data.path=empty.txt", "a batch of 5 rows"),  # before the data is opened
        (
            "engine.devices=2 batch_size=6 optim.accumulate=2",
            "3 in each of optim.accumulate=2 micro-batches.* cannot be split .*; use batch_size=8",
        ),
        (
            "engine=ggml engine.devices=2",
            "unknown key engine.devices with engine=ggml; it belongs to engine=cpu or cuda: ",
        ),
        ("engine.devices=\"' 2'\"", "engine.devices=' 2': must be a number of devices, at least 1, or all"),
        (
            "engine.shard=true",
            "engine.shard=true: .* engine.devices is 1; set engine.devices=2, or leave engine.shard out",
        ),
    ],
)
def test_invalid_devices_are_rejected_before_anything_is_written(book, capsys, overrides, pattern):
    Path("empty.txt").touch()
    assert main([*RUN, *shlex.split(overrides), "hydra.run.dir=run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(pattern, line), line
    assert not Path("run").exists()


def test_parity_and_bench_accept_engines_with_several_devices(book, monkeypatch, capsys):
    """engine.devices=all is accepted too."""
    monkeypatch.setattr(TorchCPU, "available_devices", lambda self: (2, "2 cores"))
    small = ["data=random", "data.vocab=32", "model.d_model=16", "model.n_layers=1", "model.context=8", "batch_size=2"]
    assert main(["parity", *small, "steps=3", "engine=cpu,cpu:devices=all", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [engine["engine"] for engine in report["engines"]] == ["cpu:devices=all"]
    words = ["--rounds=1", "--steps=2", "--no-memory", "--no-peak", "--json"]
    assert main(["bench", *small, "engine=cpu:devices=2,cpu", *words]) == 0
    make_two_ranks, one = json.loads(capsys.readouterr().out)["engines"]
    assert "2 processes, 1 thread each" in make_two_ranks["note"] and "processes" not in one["note"]
    assert make_two_ranks["note"].count("thread") == 1 and "busy" not in make_two_ranks["note"], make_two_ranks["note"]
    assert make_two_ranks["tokens_per_second"] * make_two_ranks["seconds_per_step"] == pytest.approx(16), (
        "tokens per second are not those of the full batch"
    )


# -- failures and ends -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def supervise(count, silence_limit=2.0):
    """Yield a supervisor of `count` workers, and the workers' ends of the connections."""
    pairs = [[Link(end) for end in socket.socketpair()] for _ in range(count)]
    monitor = Supervisor(
        [Rank(rank, supervisor_link, 0, "host") for rank, (supervisor_link, _) in enumerate(pairs, 1)],
        _patience=silence_limit,
    )
    try:
        yield monitor, [worker_link for _, worker_link in pairs]
    finally:
        monitor.close()
        for _, worker_link in pairs:
            worker_link.close()


def wait_until(condition):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + 20
        time.sleep(0.01)


def test_the_error_names_the_rank_that_failed_and_not_the_first_to_lose_its_connection(monkeypatch):
    monkeypatch.setattr(supervisor, "REPORT_TIME", 0.2)
    with supervise(3) as (monitor, workers):
        workers[2].cut()
        workers[0].send(encode({"failed": "RuntimeError: Connection closed by peer", "lost": True}))
        workers[1].send(encode({"failed": "ValueError: boom", "lost": False}))
        wait_until(lambda: monitor.failed)
        with pytest.raises(RunFailed, match=r"^rank 2 \(pid 0 on host\) failed: ValueError: boom$"):
            monitor.check()


def test_the_error_does_not_name_a_rank_that_lost_its_connection_to_another():
    """Each rank fails at the command that it receives, one of them with an error of torch."""
    monitor = supervisor.start_local_ranks(3)
    try:
        wait_until(lambda: all(rank.seen for rank in monitor.ranks))
        for rank, command in zip(monitor.ranks, ("gloo", "nothing"), strict=True):
            rank.link.send(encode([command]))
        wait_until(lambda: monitor.failed)
        with pytest.raises(RunFailed, match=r"^rank 2 .* failed: AttributeError: .*'nothing' \(worker.py, line \d+\)$"):
            monitor.check()
    finally:
        monitor.close()


def test_a_rank_that_is_still_starting_has_a_longer_timeout(monkeypatch):
    monkeypatch.setattr(supervisor, "HEARTBEAT", 0.02)
    monkeypatch.setattr(supervisor, "REPORT_TIME", 0.02)
    with supervise(1, silence_limit=0.1) as (monitor, (worker_link,)):
        time.sleep(0.4)
        monitor.check()
        worker_link.beat()
        wait_until(lambda: monitor.failed)
    monkeypatch.setattr(supervisor, "START_TIMEOUT", 0.1)
    with supervise(1) as (monitor, _):
        wait_until(lambda: monitor.failed)
        with pytest.raises(RunFailed, match="no heartbeat"):
            monitor.check()


def test_a_supervisor_that_was_suspended_does_not_report_its_workers_as_dead(monkeypatch):
    suspended_seconds = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + suspended_seconds, sleep=time.sleep)
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(supervisor, "HEARTBEAT", 0.05)
    monkeypatch.setattr(supervisor, "REPORT_TIME", 0.05)
    with supervise(1) as (monitor, (worker_link,)):
        worker_link.beat()
        wait_until(lambda: monitor.ranks[0].seen)
        suspended_seconds = 1000.0
        time.sleep(0.2)
        monitor.check()
        wait_until(lambda: monitor.failed)  # because the rank stays silent
        with pytest.raises(RunFailed, match="no heartbeat for 2 s"):
            monitor.check()


@pytest.mark.parametrize("value", ["0.5", "0", "-3", "1e6", "inf", "nan", "long"])
def test_an_invalid_heartbeat_timeout_is_rejected(book, monkeypatch, capsys, value):
    """Heartbeats are sent twice a second, so the timeout must be at least 1 s."""
    monkeypatch.setenv("TOYEXP_RANKS_PATIENCE", value)
    assert main([*RUN_ON_TWO, "hydra.run.dir=run"]) == 2
    assert f"TOYEXP_RANKS_PATIENCE={value}: must be a number of seconds, at least 1" in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        pytest.param(signal.SIGSTOP, "has sent no heartbeat for", marks=pytest.mark.release),
    ],
)
def test_a_killed_or_stopped_rank_ends_the_run_with_an_error_that_names_it(book, number, message):
    run = StartedRun(book, *RUN_ON_TWO, "engine.shard=true")
    os.kill(run.second, number)
    code, line = run.end()
    assert code == 1
    assert line.startswith(f"toyexp: error: rank 1 (pid {run.second} on ") and message in line, line
    assert re.search(r", at step \d+; \d+ of 1000000 steps are saved; to resume: toyexp resume=run$", line), line
    log = (book / "run" / "log.txt").read_text()
    assert message in log and "Traceback" not in log
    assert message in json.loads((book / "run" / "result.json").read_text())["error"]
    assert list(book.glob("run/checkpoints/step-*"))


RAISES = """
import sys

if sys.argv[0] == "-c":  # in the worker rank only
    calls = 0

    def forward(self, ops, p, batch, before=Mine.forward):
        global calls
        calls += 1
        if calls == 20:
            raise ValueError("only on\\na rank")
        return before(self, ops, p, batch)

    Mine.forward = forward
"""


@pytest.mark.parametrize("at_import", [False, pytest.param(True, marks=pytest.mark.release)])
def test_the_error_of_a_rank_names_its_line_and_its_traceback_is_in_the_log(book, at_import):
    plugin_code = RAISES.replace("calls = 0", "raise ValueError('only on\\na rank')") if at_import else RAISES
    Path("of_mine.py").write_text(PLUGIN + plugin_code)
    overrides = ["plugins=[of_mine]", "model=mine", "model.d_ff=192", "hydra.run.dir=run"]
    child = toyexp([*RUN_ON_TWO, *overrides], book)
    line = child.stderr.splitlines()[-1]
    expected = r"error: rank 1 \(pid \d+ on .*\) failed: ValueError: only on a rank \(of_mine.py, line \d+\)"
    expected += (
        "; see run/log.txt$" if at_import else r", at step \d+; see run/log.txt; \d+ of 12 steps are saved; to resume: "
    )
    assert child.returncode == 1 and re.search(expected, line), line
    assert re.search(r'of_mine.py", line \d+, in (forward|<module>)', (book / "run" / "log.txt").read_text())


def test_an_interrupted_run_saves_and_all_its_ranks_end(book):
    run = StartedRun(book, *RUN_ON_TWO, "engine.shard=true")
    run.process.send_signal(signal.SIGINT)
    code, line = run.end()
    assert (code, "steps are saved" in line) == (130, True), line


def test_a_worker_ends_if_rank_0_is_killed(book):
    run = StartedRun(book, *RUN_ON_TWO)
    run.process.kill()
    assert run.end()[0] == -signal.SIGKILL
