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
def second(tmp_path_factory):
    """Start one worker rank for all sessions of the tests, as on another host."""
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    here = tmp_path_factory.mktemp("second")
    command = python("-m", "toyexp", "engine=cpu")
    process = subprocess.Popen(command, cwd=here, env={**environment(here), **told, "RANK": "1"}, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    yield {**told, "RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    all_of_them = worker._connect_torchrun_ranks()
    all_of_them.is_persistent = False  # so that close() ends the worker, as at the end of a process
    all_of_them.close()
    worker._connect_torchrun_ranks.cache_clear()
    torchrun_store.cache_clear()
    printed, _ = process.communicate(timeout=30)
    assert (process.returncode, printed) == (0, "")


@pytest.fixture
def two(second, monkeypatch):
    """Return a function that builds an engine of two ranks from its settings."""

    def engines(**settings):
        for name, value in second.items():
            monkeypatch.setenv(name, value)
        return TorchCPU(**settings)

    return engines


def alone(the_plan, **settings):
    """Return the results of a session in one process, whatever the environment contains."""
    held = {name: os.environ.pop(name, None) for name in RANKS}
    try:
        return take_steps(TorchCPU(**settings.pop("engine", {})), the_plan, **settings)
    finally:
        os.environ.update({name: value for name, value in held.items() if value is not None})


class Between:
    """Stand-in for broadcasts between ranks of one process, each of which has its own flat vector."""

    def __init__(self, rank, flats, barrier):
        self._rank, self._flats, self._barrier = rank, flats, barrier

    def broadcast(self, part, rank):
        def wait():
            self._barrier.wait()
            here = slice(part.storage_offset(), part.storage_offset() + len(part))
            if rank != self._rank:
                part.copy_(self._flats[rank][here])

        return wait


def lay_out(the_plan):
    """Return each tensor's slice of a session's flat vector, and its length."""
    places, start = {}, 0
    for group in the_plan.updates:
        for tensor in (the_plan.tensor(name) for name in group.tensors):
            places[tensor.name] = slice(start, start + tensor.size)
            start += -(-tensor.size // ALIGNMENT) * ALIGNMENT
    return places, start


class Doubling:
    """Stand-in for a sum over two ranks with equal numbers, which records the order by offset."""

    def __init__(self):
        self.begun = []

    def sum(self, part):
        self.begun.append(part.storage_offset())
        return lambda: part.mul_(2)


def test_every_gradient_is_summed_once_and_in_one_order_whichever_is_there_first(monkeypatch):
    """Gradients of large models are sent in many buckets, some early; none waits for a tensor without a gradient."""
    the_plan = apply_optimiser(plan("llama"), ADAMW, 1e-2)
    places, size = lay_out(the_plan)
    monkeypatch.setattr(session, "BUCKET", 4 * size // 6)
    names, orders, early = [t.name for t in the_plan.trainable], [], []
    draw = np.random.default_rng(0)
    for come in (names[::-1], names, *(list(draw.permutation(names)) for _ in range(4))):
        gradient, total, group = torch.ones(size), torch.ones(1), Doubling()
        sums = GradientSums(the_plan, gradient, places, group)
        sums.begin()
        for name in come[:-1]:  # the last gradient never arrives
            sums.mark_complete(name)
        early.append(len(group.begun))
        sums.finish(total)
        assert all(bool((gradient[place] == 2).all()) for place in places.values()) and float(total) == 2
        orders.append(group.begun)
    assert len(orders[0]) > 4 and all(order == orders[0] for order in orders)
    assert early[0] > 2, "the backward pass comes from the end of a model to its beginning"


@pytest.mark.parametrize("name", ["sgd", "adafactor"])  # an element-wise rule, and one for whole tensors
def test_weights_in_two_bytes_are_all_rounded_whoever_changed_them(name):
    """GPUs keep bfloat16 copies; here formulas replace kernels, and threads replace processes."""
    the_plan = apply_optimiser(plan("llama"), OPTIMISERS[name], 1e-2)
    draw, (places, start) = torch.Generator().manual_seed(1), lay_out(the_plan)
    values, gradient = torch.zeros(start), torch.zeros(start)
    for place in places.values():
        for vector in (values, gradient):
            vector[place] = torch.randn(place.stop - place.start, generator=draw)
    flats = [values.clone(), values.clone(), values.clone()]
    rounded = [flat.to(torch.bfloat16) for flat in flats]
    barrier, numbers = threading.Barrier(2, timeout=20), the_plan.numbers(0, 1e-2)

    def step(rank):
        update = ShardedUpdate(the_plan, flats[rank], gradient, places, False, rounded[rank], Share(rank, 2))
        update.group = Between(rank, flats, barrier)
        update(numbers)

    threads = [threading.Thread(target=step, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Update(the_plan, flats[2], gradient, places, False, rounded[2])(numbers)
    assert not torch.equal(flats[2], values)
    for rank in range(2):
        assert torch.equal(flats[rank], flats[2]) and torch.equal(rounded[rank], rounded[2])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_50_steps_on_two_have_the_losses_of_one(two, name):
    the_plan = apply_optimiser(plan(name, rows=4, accumulate=2, grad_clip=0.5), ADAMW, 1e-2)
    # Sums in a different order; over 50 steps the differences grow, more so at a higher rate.
    found, wanted = take_steps(two(), the_plan, 50, lr=1e-3)[0], alone(the_plan, steps=50, lr=1e-3)[0]
    np.testing.assert_allclose(found[:, 0], wanted[:, 0], rtol=1e-4)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_is_that_of_one_device_and_shards_change_no_bit(two, name):
    """In float64, because signs and roots amplify rounding."""
    the_plan = apply_optimiser(plan("llama_tied_bias", rows=4, grad_clip=0.5), OPTIMISERS[name].with_mode("lora"), 1e-2)
    wanted = alone(the_plan, engine={"dtype": "float64"})
    whole, shared = (take_steps(two(dtype="float64", shard=shard), the_plan) for shard in (False, True))
    assert_close(dict(enumerate(whole)), dict(enumerate(wanted)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(whole[0], wanted[0], rtol=1e-9)
    np.testing.assert_array_equal(shared[0], whole[0])
    for array, values in whole[2].items():
        np.testing.assert_array_equal(shared[2][array], values, err_msg=array)


@pytest.mark.parametrize("shard", [False, True])
def test_a_bad_step_that_is_skipped_changes_nothing_on_any(two, shard):
    the_plan = apply_optimiser(plan("llama", rows=4, skip_nonfinite=True), ADAMW, 1e-2)
    metrics, _, arrays = take_steps(two(shard=shard), the_plan, bad=3)
    assert [bool(np.isfinite(step).all()) for step in metrics] == [step != 3 for step in range(6)]
    np.testing.assert_allclose(metrics[4:], alone(the_plan, bad=3)[0][4:], rtol=1e-4)
    arrays["token_embd.weight"] = arrays["token_embd.weight"][:-1]
    assert all(np.isfinite(array).all() for array in arrays.values())


@pytest.mark.parametrize("packed", [False, True])
def test_adapters_with_dropout_on_a_base_that_only_the_first_rank_reads(two, tmp_path, packed):
    write_base(tmp_path / "base.gguf", "llama", "q8_0")
    recipe = Lora(base=str(tmp_path / "base.gguf"), rank=2, dropout=0.5)
    the_plan = apply_optimiser(plan("llama", rows=4, recipe=recipe), ADAMW, 1e-2)
    found = take_steps(two(packed=packed, shard=True), the_plan)
    wanted = alone(the_plan, engine={"packed": packed})
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4)
    np.testing.assert_allclose(found[1]["logits"], wanted[1]["logits"], atol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_snapshot_goes_on_to_the_bit_on_as_many_and_in_tolerance_on_one(two, name):
    the_plan = apply_optimiser(plan("llama", rows=4), OPTIMISERS[name].with_mode("lora"), 1e-2)
    whole = take_steps(two(), the_plan, 8)
    _, _, half = take_steps(two(shard=True), the_plan, 4)
    for shard in (True, False):
        rest = take_steps(two(shard=shard), the_plan, 4, half, first=4)
        np.testing.assert_array_equal(rest[0], whole[0][4:])
        for array, values in whole[2].items():
            np.testing.assert_array_equal(rest[2][array], values, err_msg=array)
    np.testing.assert_allclose(alone(the_plan, steps=4, state=half, first=4)[0], whole[0][4:], rtol=1e-4)


@pytest.mark.parametrize("shard", [False, True])
def test_a_snapshot_is_taken_over_an_earlier_one(two, shard):
    """As on one device: a checkpoint needs no new memory, and does not wait for the one being written."""
    the_plan, data = apply_optimiser(plan("llama", rows=4), ADAMW, 1e-2), batches(rows=4)
    with two(shard=shard).realize(the_plan) as session:
        session.build()
        first = session.snapshot()
        places = {name: array.ctypes.data for name, array in first.items()}
        session.step(data.batch(0), the_plan.numbers(0, 1e-2))
        second, fresh = session.snapshot(first), session.snapshot()
    assert {name: array.ctypes.data for name, array in second.items()} == places
    for name, array in fresh.items():
        np.testing.assert_array_equal(second[name], array, err_msg=name)
        assert array.any(), f"{name}: nothing has changed it"


def test_a_plan_that_cannot_be_sent_is_refused_in_words(two):
    @dataclass
    class Hidden(Llama):
        name: ClassVar[str] = "hidden"

    model = Hidden(d_model=32, n_layers=1, n_heads=4, context=12).fit(token_dataset(VOCAB))
    with (
        two().realize(Scratch().plan(model, Setup(batches(4).inputs, rows=4))) as session,
        pytest.raises(UserError, match=r"the other ranks cannot import .*Hidden.* module"),
    ):
        session.build()


def test_a_message_makes_dataclasses_and_nothing_else():
    with contextlib.ExitStack() as closed:
        ours, theirs = (closed.enter_context(contextlib.closing(Link(end))) for end in socket.socketpair())
        value = {
            "numbers": [1.5, None, True],
            (1, 2): np.arange(6, dtype=np.int16).reshape(2, 3),
            "plan": plan("llama"),
        }
        ours.send(encode([value, value]))
        found, again = theirs.receive()
        np.testing.assert_array_equal(found[1, 2], value[1, 2])
        assert (found["numbers"], found["plan"].model) == (value["numbers"], value["plan"].model)
        assert again["plan"] is found["plan"], "what is one thing here is one thing there"
        for module, name in (("os", "system"), ("subprocess", "Popen"), ("builtins", "eval")):
            ours.send(f"c{module}\n{name}\n.".encode())
            with pytest.raises(UnpicklingError, match="is not a dataclass"):
                theirs.receive()
        with pytest.raises(UserError, match="lock cannot be sent"):
            encode([threading.Lock()])


def test_a_stranger_who_does_not_know_the_token_is_no_rank_and_none_is_taken_twice():
    for hello, known in (
        (b"guess 1 2 host\n", set()), (b"token 0 2 host\n", set()), (b"token 2 2 host\n", set()),
        (b"token one 2 host\n", set()), (b"\n", set()), (b"token 1 2 host\n", {1}),
    ):  # fmt: skip
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(hello)
            with pytest.raises(ValueError):
                worker._accept(ours, "token", known, 2)


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    Path("book.txt").write_text(TEXT)
    return tmp_path


def test_a_run_on_two_goes_on_on_two_to_the_bit_and_on_one(book, capsys):
    assert main([*RUN_ON_TWO, "hydra.run.dir=whole"]) == 0
    assert main([*RUN_ON_TWO, "engine.shard=true", "steps=8", "hydra.run.dir=begun"]) == 0
    assert main(["resume=begun", "steps=12"]) == 0
    assert Trace.of(Path("begun")).files == Trace.of(Path("whole")).files
    assert [e["loss"] for e in events("begun", "step")] == [e["loss"] for e in events("whole", "step")]
    (start,) = events("whole", "run_start")
    assert (start["backend"]["devices"], len(start["backend"]["ranks"]), start["backend"]["threads"]) == (2, 2, 2)
    assert main([*RUN, "hydra.run.dir=one"]) == 0
    for kind in ("step", "eval"):
        found, wanted = ([e["loss"] for e in events(run, kind)] for run in ("whole", "one"))
        np.testing.assert_allclose(found, wanted, rtol=1e-4)
    capsys.readouterr()
    assert main(["resume=whole", "steps=14", "engine.devices=1"]) == 0
    assert "engine devices was 2 and is 1: further steps are not bit-identical" in capsys.readouterr().out


@pytest.mark.parametrize("by_torchrun", [pytest.param(False, marks=pytest.mark.release), True])
def test_ranks_that_are_started_here_or_by_torchrun_know_a_local_plugin(book, by_torchrun):
    Path("of_mine.py").write_text(PLUGIN)
    own = ["plugins=[of_mine]", "model=mine", "model.d_ff=192", "hydra.run.dir=run"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command = [*torchrun, "-m", "toyexp", *RUN, *own] if by_torchrun else ["-m", "toyexp", *RUN_ON_TWO, *own]
    done = subprocess.run(python(*command), env=environment(book), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("completed after 12 steps") == 1, "only the first rank prints"
    (start,) = events("run", "run_start")
    assert (start["backend"]["devices"], len({*start["backend"]["ranks"]})) == (2, 2)
    assert main([*RUN, "model.d_ff=192", "hydra.run.dir=one"]) == 0
    found, wanted = ([e["loss"] for e in events(run, "step")] for run in ("run", "one"))
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("engine.devices=two", "engine.devices=two: must be a number from 1, or all"),
        ("engine.devices=9999", f"engine.devices=9999: only {os.cpu_count()} cores available; engine.devices=all"),
        ("engine.devices=2 batch_size=5", "a batch of 5 rows cannot be split .* 2 devices; use batch_size=6"),
        ("engine.devices=2 batch_size=5 data.path=empty.txt", "a batch of 5 rows"),  # before the data is opened
        (
            "engine.devices=2 batch_size=6 optim.accumulate=2",
            "3 for each of optim.accumulate=2.* cannot be split .*; use batch_size=8",
        ),
        (
            "engine=ggml engine.devices=2",
            "unknown key engine.devices with engine=ggml; it belongs to engine=cpu or cuda: ",
        ),
        ("engine.devices=\"' 2'\"", "engine.devices=' 2': must be a number from 1, or all"),
        (
            "engine.shard=true",
            "engine.shard=true: .* engine.devices is 1; set engine.devices=2, or leave engine.shard out",
        ),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_written(book, capsys, given, told):
    Path("empty.txt").touch()
    assert main([*RUN, *shlex.split(given), "hydra.run.dir=run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(told, line), line
    assert not Path("run").exists()


def test_several_devices_are_a_row_of_parity_and_of_bench(book, monkeypatch, capsys):
    """Also with devices=all."""
    monkeypatch.setattr(TorchCPU, "available_devices", lambda self: (2, "2 cores"))
    small = ["data=random", "data.vocab=32", "model.d_model=16", "model.n_layers=1", "model.context=8", "batch_size=2"]
    assert main(["parity", *small, "steps=3", "engine=cpu,cpu:devices=all", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [engine["engine"] for engine in report["engines"]] == ["cpu:devices=all"]
    words = ["--rounds=1", "--steps=2", "--no-memory", "--no-peak", "--json"]
    assert main(["bench", *small, "engine=cpu:devices=2,cpu", *words]) == 0
    two, one = json.loads(capsys.readouterr().out)["engines"]
    assert "2 processes, 1 thread each" in two["note"] and "processes" not in one["note"]
    assert two["note"].count("thread") == 1 and "busy" not in two["note"], two["note"]
    assert two["tokens_per_second"] * two["seconds_per_step"] == pytest.approx(16), "of the whole batch"


# -- failures and ends -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def supervise(count, silence_limit=2.0):
    """Return a supervisor of so many other ranks, and their ends of the connections."""
    pairs = [[Link(end) for end in socket.socketpair()] for _ in range(count)]
    it = Supervisor([Rank(rank, ours, 0, "host") for rank, (ours, _) in enumerate(pairs, 1)], _patience=silence_limit)
    try:
        yield it, [theirs for _, theirs in pairs]
    finally:
        it.close()
        for _, theirs in pairs:
            theirs.close()


def until(true):
    began = time.monotonic()
    while not true():
        assert time.monotonic() < began + 20
        time.sleep(0.01)


def test_the_rank_that_is_named_is_the_one_that_failed_and_not_the_first_to_lose_its_connection(monkeypatch):
    monkeypatch.setattr(supervisor, "REPORT_TIME", 0.2)
    with supervise(3) as (it, others):
        others[2].cut()
        others[0].send(encode({"failed": "RuntimeError: Connection closed by peer", "lost": True}))
        others[1].send(encode({"failed": "ValueError: boom", "lost": False}))
        until(lambda: it.failed)
        with pytest.raises(RunFailed, match=r"^rank 2 \(pid 0 on host\) failed: ValueError: boom$"):
            it.check()


def test_a_rank_that_says_that_it_lost_another_is_not_the_one_that_is_named():
    """Both fail; one reports an error of torch about a lost rank."""
    it = supervisor.start_local_ranks(3)
    try:
        until(lambda: all(rank.seen for rank in it.ranks))
        for rank, word in zip(it.ranks, ("gloo", "nothing"), strict=True):
            rank.link.send(encode([word]))
        until(lambda: it.failed)
        with pytest.raises(RunFailed, match=r"^rank 2 .* failed: AttributeError: .*'nothing' \(worker.py, line \d+\)$"):
            it.check()
    finally:
        it.close()


def test_a_rank_that_is_still_loading_may_be_silent_for_longer(monkeypatch):
    monkeypatch.setattr(supervisor, "HEARTBEAT", 0.02)
    monkeypatch.setattr(supervisor, "REPORT_TIME", 0.02)
    with supervise(1, silence_limit=0.1) as (it, (other,)):
        time.sleep(0.4)
        it.check()
        other.beat()
        until(lambda: it.failed)
    monkeypatch.setattr(supervisor, "START_TIMEOUT", 0.1)
    with supervise(1) as (it, _):
        until(lambda: it.failed)
        with pytest.raises(RunFailed, match="no heartbeat"):
            it.check()


def test_a_first_rank_that_was_suspended_itself_finds_the_others_alive(monkeypatch):
    ahead = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead, sleep=time.sleep)
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(supervisor, "HEARTBEAT", 0.05)
    monkeypatch.setattr(supervisor, "REPORT_TIME", 0.05)
    with supervise(1) as (it, (other,)):
        other.beat()
        until(lambda: it.ranks[0].seen)
        ahead = 1000.0
        time.sleep(0.2)
        it.check()
        until(lambda: it.failed)  # because the rank stays silent
        with pytest.raises(RunFailed, match="no heartbeat for 2 s"):
            it.check()


@pytest.mark.parametrize("given", ["0.5", "0", "-3", "1e6", "inf", "nan", "long"])
def test_a_patience_that_cannot_be_is_refused(book, monkeypatch, capsys, given):
    """It must exceed the time between heartbeats, half a second."""
    monkeypatch.setenv("TOYEXP_RANKS_PATIENCE", given)
    assert main([*RUN_ON_TWO, "hydra.run.dir=run"]) == 2
    assert f"TOYEXP_RANKS_PATIENCE={given}: must be a number of seconds, at least 1" in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        pytest.param(signal.SIGSTOP, "has sent no heartbeat for", marks=pytest.mark.release),
    ],
)
def test_a_rank_that_fails_ends_the_run_in_a_line_that_names_it(book, number, told):
    run = StartedRun(book, *RUN_ON_TWO, "engine.shard=true")
    os.kill(run.second, number)
    code, line = run.end()
    assert code == 1
    assert line.startswith(f"toyexp: error: rank 1 (pid {run.second} on ") and told in line, line
    assert re.search(r", at step \d+; \d+ of 1000000 steps are saved; to resume: toyexp resume=run$", line), line
    log = (book / "run" / "log.txt").read_text()
    assert told in log and "Traceback" not in log
    assert told in json.loads((book / "run" / "result.json").read_text())["error"]
    assert list(book.glob("run/checkpoints/step-*"))


RAISES = """
import sys

if sys.argv[0] == "-c":  # in the rank alone
    seen = 0

    def forward(self, ops, p, batch, before=Mine.forward):
        global seen
        seen += 1
        if seen == 20:
            raise ValueError("only on\\na rank")
        return before(self, ops, p, batch)

    Mine.forward = forward
"""


@pytest.mark.parametrize("at_import", [False, pytest.param(True, marks=pytest.mark.release)])
def test_what_a_rank_raises_is_told_with_its_line_and_its_traceback_stands_in_the_log(book, at_import):
    raises = RAISES.replace("seen = 0", "raise ValueError('only on\\na rank')") if at_import else RAISES
    Path("of_mine.py").write_text(PLUGIN + raises)
    own = ["plugins=[of_mine]", "model=mine", "model.d_ff=192", "hydra.run.dir=run"]
    done = toyexp([*RUN_ON_TWO, *own], book)
    line = done.stderr.splitlines()[-1]
    wanted = r"error: rank 1 \(pid \d+ on .*\) failed: ValueError: only on a rank \(of_mine.py, line \d+\)"
    wanted += (
        "; see run/log.txt$" if at_import else r", at step \d+; see run/log.txt; \d+ of 12 steps are saved; to resume: "
    )
    assert done.returncode == 1 and re.search(wanted, line), line
    assert re.search(r'of_mine.py", line \d+, in (forward|<module>)', (book / "run" / "log.txt").read_text())


def test_an_interrupted_run_saves_and_leaves_nobody_behind(book):
    run = StartedRun(book, *RUN_ON_TWO, "engine.shard=true")
    run.process.send_signal(signal.SIGINT)
    code, line = run.end()
    assert (code, "steps are saved" in line) == (130, True), line


def test_a_rank_whose_leader_is_killed_ends_by_itself(book):
    run = StartedRun(book, *RUN_ON_TWO)
    run.process.kill()
    assert run.end()[0] == -signal.SIGKILL
