"""How the ranks of a run start: waiting for each other, a launcher's environment, and settings that are rejected."""

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from faults import TEXT, environment, python
from multi_device import PLUGIN, RANKS, RUN, RUN_ON_TWO, free_port

import toyexp.base.exit_codes
from toyexp import UserError
from toyexp.base import started_ranks
from toyexp.base.signals import ending_signals
from toyexp.cli.main import main
from toyexp.config.request import Request
from toyexp_torch.distributed.group import torchrun_store
from toyexp_torch.distributed.supervisor import silence_limit
from toyexp_torch.engines import TorchCPU

pytestmark = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    return tmp_path


SLEEPS = (
    PLUGIN
    + """
import sys, time
if sys.argv[0] == "-c":  # in the worker rank only
    time.sleep(300)
"""
)


def test_a_rank_that_waits_for_another_reports_it_and_ends_at_the_first_signal(book):
    """One rank is delayed by a plugin, one never starts; both at once, because they take a while."""
    Path("of_mine.py").write_text(SLEEPS)
    cases = [([*RUN_ON_TWO, "plugins=[of_mine]", "model=mine", "model.d_ff=192"], {}, r"rank 1 \(pid \d+ on .*\)")]
    for rank in (0, 1):
        port = str(free_port())
        environment_of_rank = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        cases.append((RUN, environment_of_rank, f"rank {1 - rank} of 2 at localhost:{port}"))
    processes = [
        subprocess.Popen(
            python("-m", "toyexp", *overrides, f"hydra.run.dir=run{n}"),
            env={**environment(book), **environment_of_rank},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for n, (overrides, environment_of_rank, _) in enumerate(cases)
    ]  # fmt: skip
    try:
        for process, (_, _, missing_rank) in zip(processes, cases, strict=True):
            line = process.stderr.readline()
            assert re.search(f"waiting for {missing_rank}$", line), line
            process.send_signal(signal.SIGTERM)
        for process in processes:
            _, errors = process.communicate(timeout=30)
            (line,) = errors.splitlines()
            assert (process.returncode, "interrupted by SIGTERM" in line) == (143, True), line
    finally:
        for process in processes:
            process.kill()


def test_an_empty_environment_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("TOYEXP_RANKS_PATIENCE", "")
    monkeypatch.setenv("TOYEXP_SIGUSR1", "")
    assert silence_limit() == 20
    assert signal.SIGUSR1 not in ending_signals()


def test_engine_auto_chooses_an_engine_that_supports_ranks(monkeypatch):
    for name, value in zip(RANKS, ("0", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    config = Request.parse(["engine=auto", "data=random"]).build_config()
    assert config.engine.name in ("cpu", "cuda") and "unavailable: " in config.engine_note


@pytest.mark.parametrize(
    ("overrides", "expected"), [([], "2"), (["engine.devices=1"], "2"), (["engine.devices=all"], "all")]
)
def test_the_configuration_records_how_many_devices_torchrun_started(monkeypatch, overrides, expected):
    for name, value in zip(RANKS, ("0", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    config = Request.parse(["engine=cpu", "data=random", *overrides]).build_config()
    assert config.plain["engine"]["devices"] == expected


@pytest.mark.parametrize(
    ("variables", "pattern"),
    [
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE=2: .* RANK, MASTER_ADDR, MASTER_PORT is not set, so this",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "WORLD_SIZE=2: .* MASTER_ADDR is not set, so this"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: "),
        ({"RANK": "abc"}, "RANK=abc: "),
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4: each of these processes trains a run of its own; use torchrun"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2: each"),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_NTASKS": "1", "MASTER_ADDR": "here", "RANK": "0", "WORLD_SIZE": "1"}, None),
    ],
)
def test_a_warning_is_printed_for_a_launcher_that_starts_no_ranks(monkeypatch, variables, pattern):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    warnings = Request.parse(["engine=cpu", "data=random"]).build_config().omissions
    assert len(warnings) == (pattern is not None)
    assert all(re.match(pattern, warning) for warning in warnings), warnings


@pytest.mark.parametrize("port", ["99999", "abc", "0"])
def test_an_invalid_port_is_rejected(book, monkeypatch, capsys, port):
    for name, value in zip(RANKS, ("0", "2", "127.0.0.1", port), strict=True):
        monkeypatch.setenv(name, value)
    assert main(RUN) == 2
    assert f"MASTER_PORT={port}: must be a port from 1 to 65535" in capsys.readouterr().err


def test_an_occupied_port_and_an_unknown_host_are_reported(monkeypatch):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        for name, value in zip(RANKS, ("0", "2", "localhost", str(port)), strict=True):
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"MASTER_ADDR=localhost, MASTER_PORT={port}: cannot listen there"):
            torchrun_store.__wrapped__()
        monkeypatch.setenv("MASTER_ADDR", "nohost.invalid")
        with pytest.raises(
            UserError, match=r"^MASTER_ADDR=nohost.invalid: the name of this host cannot be resolved \("
        ):
            torchrun_store.__wrapped__()


@pytest.mark.parametrize(("rank", "count"), [("2", "2"), ("-1", "2"), ("x", "2"), ("0", "0"), ("0", "two")])
def test_a_rank_outside_the_world_size_is_rejected(monkeypatch, rank, count):
    for name, value in zip(RANKS, (rank, count, "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^RANK={rank}, WORLD_SIZE={count}: RANK must be a whole number"):
        started_ranks()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine=ggml"], "engine=ggml: runs in one process only; start it without torchrun"),
        (
            ["engine=cpu", "engine.devices=4"],
            "torchrun has started 2 ranks; leave engine.devices out",
        ),
        (["engine=mps"], "engine=mps: Apple silicon has one GPU, and torchrun has started 2 ranks; use engine=cpu"),
        (["-m", "seed=1,2"], "-m: a sweep starts its own processes; only use torchrun to train one run"),
        (["plugins"], "plugins: runs in one process; only use torchrun to train"),
    ],
)
def test_commands_and_settings_that_torchrun_cannot_start_are_rejected(book, monkeypatch, capsys, arguments, message):
    for name, value in zip(RANKS, ("0", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["stepz=3"],
        pytest.param(["plugins"], marks=pytest.mark.release),
        pytest.param([*RUN, "data.path=missing.txt"], marks=pytest.mark.release),
    ],
)
def test_only_rank_0_of_torchrun_reports_bad_input(book, arguments):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "toyexp"]
    child = subprocess.run(
        python(*torchrun, *arguments), env=environment(book), capture_output=True, text=True, timeout=120
    )
    errors = [line for line in child.stderr.splitlines() if line.startswith("toyexp: ")]
    assert (child.returncode, len(errors), errors[0][:15]) == (1, 1, "toyexp: error: "), child.stderr


def test_an_error_of_a_single_rank_is_reported_with_its_number(monkeypatch, capsys):
    for name, value in zip((*RANKS, "TORCHELASTIC_RUN_ID"), ("1", "2", "127.0.0.1", "1", "none"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(toyexp.base.exit_codes, "TORCHRUN_GRACE", 0.0)
    assert main(["engine=cpu", "stepz=3"]) == 2
    assert re.match(r"toyexp: error: rank 1 \(on .*\): .*stepz", capsys.readouterr().err)


def test_threads_are_divided_between_the_processes(monkeypatch):
    """If there are fewer threads than processes, each process has one."""
    monkeypatch.setattr("toyexp.base.threads.machine_cores", lambda: 4)
    monkeypatch.setattr("toyexp_torch.engines.machine_cores", lambda: 4)
    monkeypatch.setattr("toyexp.base.threads._count_busy_now", lambda: 4)
    for threads, note in ((0, "2 processes, 2 threads each"), (1, "2 processes, 1 thread each")):
        engine = TorchCPU(devices="2", threads=threads)
        assert engine.check().endswith(note) and engine.advice() == []
    assert TorchCPU(devices="2", threads=8).advice() == ["8 threads share 4 cores; engine.threads=4 is faster"]


def test_a_run_has_no_more_devices_than_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr("toyexp.base.threads.machine_cores", lambda: 4)
    monkeypatch.setattr("toyexp_torch.engines.machine_cores", lambda: 4)
    monkeypatch.setenv("TOYEXP_CORES", "1")
    with pytest.raises(UserError, match=r"engine.devices=2: only 1 core of 4 \(TOYEXP_CORES=1\) available"):
        TorchCPU(devices="2").check()
    assert (TorchCPU(devices="all").count(), TorchCPU(devices="all").processes()) == (1, 1)
