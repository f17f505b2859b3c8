"""kernels.c for ggml on the CPU: its results, and what happens without a compiler."""

import ctypes
import json
import shutil

import numpy as np
import pytest
from tiny import batches, plan

from toyexp import AdamW
from toyexp.cli.doctor import verdict
from toyexp.cli.main import main
from toyexp.plugins.registry import Offer
from toyexp_ggml import binding, engines, native
from toyexp_ggml.engines import GGMLCPU

SHAPES = [(1, 1, 1), (1, 16, 16), (2, 32, 48), (1, 17, 33), (3, 5, 64), (2, 64, 5), (4, 31, 16), (1, 1, 40), (5, 40, 1)]


@pytest.fixture
def no_compiler(monkeypatch):
    """Return a function that removes the compiler."""

    def remove_compiler():
        monkeypatch.setenv("CC", "false")
        native._library.cache_clear()

    yield remove_compiler
    native._library.cache_clear()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_transpose_equals_numpys_for_any_number_of_threads(shape, threads):
    if native.unavailable_reason():
        pytest.skip(native.unavailable_reason())
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)(
        native.kernel("transpose")
    )
    draw = np.random.default_rng(0)
    for sources in (1, 2):
        arrays = [draw.standard_normal(shape).astype(np.float32) for _ in range(sources)]
        matrices, rows, columns = shape
        result = np.full((sources * matrices, columns, rows), np.nan, np.float32)
        task = native.Transpose(matrices=sources * matrices, rows=rows, columns=columns, target=result.ctypes.data)
        task.source[:sources] = [array.ctypes.data for array in arrays]
        for thread in range(threads):
            call(None, thread, threads, ctypes.addressof(task))
        np.testing.assert_array_equal(result, np.concatenate(arrays).transpose(0, 2, 1))


def take_steps(name):
    """Return a model's weights after two steps, and the number of nodes by op."""
    with GGMLCPU(threads=2, blas=False).realize(plan(name, rows=3)) as session:
        session.build()
        for k in range(2):
            session.step(batches(rows=3).batch(k), AdamW.for_lora().hp_for_step(k))
        weights = {t.name: session.download(t.name) for t in session.plan.trainable}
        return weights, session.describe()["residency"]["CPU"]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_steps_are_the_same_to_the_bit_without_a_compiler(name, no_compiler):
    if native.unavailable_reason():
        pytest.skip(native.unavailable_reason())
    weights, ops = take_steps(name)
    no_compiler()
    without, ops_without = take_steps(name)
    assert ops["CUSTOM"] > ops_without.get("CUSTOM", 0)
    assert ops_without["CONT"] > ops.get("CONT", 0)
    for tensor, array in weights.items():
        np.testing.assert_array_equal(array, without[tensor], err_msg=tensor)


@pytest.mark.parametrize(
    ("cc", "path", "reason"),
    [("false", None, "the C compiler false failed"), ("nothing-here", None, "No such file"), ("", "", "no C compiler")],
)
def test_doctor_says_why_copies_are_slow(cc, path, reason, no_compiler, monkeypatch):
    no_compiler()
    monkeypatch.setenv("CC", cc)
    if path is not None:
        monkeypatch.setenv("PATH", path)
    (line,) = [line for line in GGMLCPU(threads=1).advice() if "transposes" in line]
    assert reason in line


@pytest.mark.parametrize("headers", [False, True])
def test_doctor_reports_whether_ggml_has_blas_and_how_to_build_it_in(headers, tmp_path, monkeypatch):
    if headers:
        (tmp_path / "x86_64" / "openblas-openmp").mkdir(parents=True)
        (tmp_path / "x86_64" / "openblas-openmp" / "cblas.h").touch()
    monkeypatch.setattr(engines, "HEADERS", tmp_path)
    monkeypatch.setattr(engines.platform, "system", lambda: "Linux")
    monkeypatch.setattr(binding, "devices", lambda: {"CPU": "a CPU"})
    report = verdict(Offer("engine", "ggml", GGMLCPU, "", ""))
    assert "PASS  ggml on the CPU without BLAS" in report and 'CMAKE_ARGS="-DGGML_LLAMAFILE=ON -DGGML_BLAS=ON' in report
    assert ("libopenblas-openmp-dev" in report) is not headers
    assert any("see `toyexp doctor`" in line for line in GGMLCPU().advice()) is headers, (
        "a run does not name system packages"
    )
    monkeypatch.setattr(binding, "devices", lambda: {"CPU": "a CPU", "BLAS": "OpenBLAS"})
    report = verdict(Offer("engine", "ggml", GGMLCPU, "", ""))
    assert "PASS  ggml on the CPU with BLAS" in report and "GGML_BLAS" not in report


def test_blas_false_on_a_build_without_blas_is_a_warning_and_a_note_of_bench(tmp_path, monkeypatch, capsys):
    if "BLAS" in binding.devices():
        pytest.skip("this ggml-python has BLAS")
    monkeypatch.chdir(tmp_path)
    small = ["data=random", "model.d_model=16", "model.n_layers=1", "model.context=16", "batch_size=2"]
    warning = "engine.blas=false: has no effect; this ggml-python is built without BLAS"
    assert main([*small, "steps=2", "engine=ggml", "engine.blas=false", "eval_every=0", "hydra.run.dir=run"]) == 0
    assert warning in capsys.readouterr().err + (tmp_path / "run" / "log.txt").read_text()
    options = ["--rounds=1", "--steps=1", "--no-memory", "--no-peak", "--json"]
    assert main(["bench", *small, "engine=ggml,ggml:blas=false", *options]) == 0
    usual, without = json.loads(capsys.readouterr().out)["engines"]
    assert warning in without["note"] and warning not in usual["note"] and "CMAKE" not in usual["note"]


@pytest.fixture
def build_count(tmp_path, monkeypatch):
    """Return a function that loads the kernel as a new process would, and returns how often a compiler has run."""
    if native.unavailable_reason():
        pytest.skip(native.unavailable_reason())
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    real = next(shutil.which(name) for name in native.COMPILERS if shutil.which(name))
    compiler.write_text(f'#!/bin/sh\necho >> {log}\nexec {real} "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))

    def count():
        native._library.cache_clear()
        assert native.kernel("transpose")
        return len(log.read_text())

    yield count
    native._library.cache_clear()


def cached_file(tmp_path):
    (file,) = tmp_path.glob("cache/kernels-*/*.so")
    return file


def test_a_compiled_kernel_is_reused_until_its_compiler_or_source_changes(build_count, tmp_path, monkeypatch):
    assert (build_count(), build_count()) == (1, 1)
    assert (cached_file(tmp_path).stat().st_mode & 0o777, cached_file(tmp_path).parent.stat().st_mode & 0o777) == (
        0o600,
        0o700,
    )
    other = tmp_path / "kernels.c"
    other.write_text(f"{native.SOURCE.read_text()}\n")
    monkeypatch.setattr(native, "SOURCE", other)
    assert (build_count(), build_count()) == (2, 2)
    with open(tmp_path / "compiler", "a") as file:
        file.write("# a newer one\n")
    assert (build_count(), build_count()) == (3, 3)


@pytest.mark.parametrize("open_to_others", ["cache", "cache/kernels", "file", "replaced"])
def test_a_library_that_other_users_could_have_written_is_never_loaded(build_count, tmp_path, open_to_others):
    build_count()
    file = cached_file(tmp_path)
    match open_to_others:
        case "cache":
            (tmp_path / "cache").chmod(0o775)
        case "cache/kernels":
            file.parent.chmod(0o777)
        case "file":
            file.unlink()  # this process keeps the deleted library loaded
            file.write_bytes(b"of a stranger")
            file.chmod(0o666)
        case "replaced":
            stranger = tmp_path / "stranger.so"
            stranger.write_bytes(b"of a stranger")
            stranger.chmod(0o666)
            file.unlink()
            file.symlink_to(stranger)
    assert build_count() == 2
    if open_to_others in ("file", "replaced"):  # it is replaced by one of our own
        assert build_count() == 2 and not cached_file(tmp_path).is_symlink()


@pytest.mark.parametrize("name", ["*.so", "*.sha256"])
@pytest.mark.parametrize("damage", ["tail of zeros", "cut", "other", "gone"])
def test_a_damaged_library_is_built_again_and_not_loaded(build_count, tmp_path, name, damage):
    build_count()
    (file,) = tmp_path.glob(f"cache/kernels-*/{name}")
    raw = file.read_bytes()
    file.unlink()  # this process keeps the deleted library loaded
    if damage != "gone":
        half = raw[: len(raw) // 2]
        file.write_bytes({"tail of zeros": half + bytes(len(raw) - len(half)), "cut": half, "other": b"x"}[damage])
        file.chmod(0o600)
    assert (build_count(), build_count()) == (2, 2)
    assert cached_file(tmp_path).read_bytes() == raw or name == "*.sha256"


@pytest.mark.parametrize("problem", ["no directory", "relative"])
def test_without_a_usable_cache_the_kernel_is_built_in_every_process(build_count, tmp_path, monkeypatch, problem):
    match problem:
        case "no directory":
            (tmp_path / "cache").write_text("a file")
        case "relative":
            monkeypatch.chdir(tmp_path)
            monkeypatch.setenv("TOYEXP_CACHE", "cache")
    before = build_count()
    assert build_count() == before + 1
