"""kernels.c for ggml on the CPU: its results, and what happens without a compiler."""

import ctypes
import re
import shutil

import numpy as np
import pytest
import torch
from tiny import batches, plan

from toyexp import AdamW, UserError
from toyexp.cli.doctor import verdict
from toyexp.plugins.registry import Offer
from toyexp_ggml import binding, engines, native, profiles
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


@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1), (12, 32, 256), (25, 65, 300), (5, 33, 257), (400, 7, 515), (70, 130, 31),
        (70, 33, 1024),  # rows at a distance of 4 KiB, which are packed
        (1536, 40, 300),  # rows that fill the chunks to the last
    ],
)  # fmt: skip
def test_a_product_agrees_with_float64_and_is_equal_to_the_bit_for_any_number_of_threads(sizes, transposed):
    if native.unavailable_reason():
        pytest.skip(native.unavailable_reason())
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)(
        native.kernel("product")
    )
    draw, (n, m, k) = np.random.default_rng(0), sizes
    a, b = (draw.standard_normal(shape).astype(np.float32) for shape in ((n, k), (k, m)))
    stored = [np.ascontiguousarray(x.T) if turned else x for x, turned in zip((a, b), transposed, strict=True)]
    expected = a.astype(np.float64) @ b.astype(np.float64)
    results = []
    for threads in (1, 2, 3, 16):
        result = np.full((n, m), np.nan, np.float32)
        task = native.Product(
            n=n, m=m, k=k, a_transposed=transposed[0], b_transposed=transposed[1], target=result.ctypes.data
        )
        task.source[:] = [array.ctypes.data for array in stored]
        for thread in range(threads):
            call(None, thread, threads, ctypes.addressof(task))
        results.append(result)
    np.testing.assert_allclose(results[0], expected, rtol=0, atol=1e-6 * k**0.5 * np.abs(expected).max())
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (2, 64, 4, 4, 16), (2, 130, 4, 2, 10), (1, 77, 6, 2, 33)])
def test_attention_agrees_with_float64_and_is_equal_to_the_bit_for_any_number_of_threads(sizes, causal):
    if native.unavailable_reason():
        pytest.skip(native.unavailable_reason())
    rows, length, heads, shared, size = sizes
    draw, scale = torch.Generator().manual_seed(0), 0.3
    q, dy = (torch.randn(rows, length, heads, size, generator=draw) for _ in range(2))
    k, v = (torch.randn(rows, length, shared, size, generator=draw) for _ in range(2))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), is_causal=causal, scale=scale, enable_gqa=True
    ).transpose(1, 2)
    expected.backward(dy.double())
    gradients = torch.cat([x.grad.flatten() for x in leaves])
    for name, right in (("attention", expected.detach().flatten()), ("attention_back", gradients)):
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)(native.kernel(name))
        results = []
        for threads in (1, 2, 5):
            result = np.full(right.numel(), np.nan, np.float32)
            task = native.Attention(
                (ctypes.c_void_p * 4)(*(x.data_ptr() for x in (q, k, v, dy))), result.ctypes.data, *sizes, causal, scale
            )
            for thread in range(threads):
                call(None, thread, threads, ctypes.addressof(task))
            results.append(result)
        np.testing.assert_allclose(results[0], right, rtol=0, atol=2e-6 * float(right.abs().max()))
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])


def run(name, struct, sources, result, *rest):
    """Call a kernel on one thread."""
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)(native.kernel(name))
    task = struct(target=result.ctypes.data)
    task.source[: len(sources)] = [array.ctypes.data for array in sources]
    for (field, _), value in zip(struct._fields_[2:], rest, strict=True):
        setattr(task, field, value)
    call(None, 0, 1, ctypes.addressof(task))


def test_attention_weights_too_small_for_float32_are_zero():
    if native.unavailable_reason():
        pytest.skip(native.unavailable_reason())
    q = k = np.array([[1, 0], [-50, 0]], np.float32)
    v, result = np.array([[1, 2], [3, 4]], np.float32), np.full((2, 2), np.nan, np.float32)
    run("attention", native.Attention, (q, k, v), result, 1, 2, 1, 1, 2, False, 2.0)  # scores [2, -100], [-100, 5000]
    np.testing.assert_array_equal(result, v)


def test_gelu_and_swiglus_gradient_agree_with_float64_also_for_large_numbers():
    if native.unavailable_reason():
        pytest.skip(native.unavailable_reason())
    x = torch.linspace(-200, 200, 4001)
    y, z = torch.randn(2, x.numel(), generator=torch.Generator().manual_seed(0))
    leaves = [t.double().requires_grad_() for t in (x, y)]
    gelu = torch.nn.functional.gelu(leaves[0], approximate="tanh")
    (slope,) = torch.autograd.grad(gelu, leaves[0], y.double())
    back = torch.autograd.grad(torch.nn.functional.silu(leaves[0]) * leaves[1], leaves, z.double())
    cases = [("gelu", (x,), gelu), ("gelu", (x, y), slope), ("swiglu_back", (x, y, z), torch.cat(back))]
    for name, sources, right in cases:
        result = np.full(right.numel(), np.nan, np.float32)
        run(name, native.Elements, [t.numpy() for t in sources], result, x.numel())
        np.testing.assert_allclose(result, right.detach(), rtol=2e-5, atol=2e-6, err_msg=name)


def take_steps(name):
    """Return a model's weights after two steps, and the number of nodes by op."""
    with GGMLCPU(threads=2, products="ggml").realize(plan(name, rows=3)) as session:
        session.build()
        for k in range(2):
            session.step(batches(rows=3).batch(k), AdamW.for_lora().hp_for_step(k))
        weights = {t.name: session.download(t.name) for t in session.plan.trainable}
        return weights, session.describe()["residency"]["CPU"]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_steps_with_ggmls_products_are_the_same_to_the_bit_without_a_compiler(name, no_compiler):
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
def test_doctor_says_why_kernels_are_not_used(cc, path, reason, no_compiler, monkeypatch):
    no_compiler()
    monkeypatch.setenv("CC", cc)
    if path is not None:
        monkeypatch.setenv("PATH", path)
    (line,) = [line for line in GGMLCPU(threads=1).advice() if "kernels" in line]
    assert reason in line


@pytest.mark.parametrize(("compiler", "llamafile"), [(True, False), (False, True), (False, False)])
def test_doctor_says_what_multiplies_and_how_to_build_a_slow_ggml_again(compiler, llamafile, no_compiler, monkeypatch):
    if not native.instruction_set():
        pytest.skip("kernels.c has no fast products here")
    if not compiler:
        no_compiler()
    monkeypatch.setattr(binding, "devices", lambda: {"CPU": "a CPU"})
    monkeypatch.setattr(binding, "has_llamafile", lambda: llamafile)
    report, is_slow = verdict(Offer("engine", "ggml", GGMLCPU, "", "")), not compiler and not llamafile
    assert report.startswith(
        f"PASS  ggml on the CPU {f'with kernels.c ({native.instruction_set()})' if compiler else ''}".rstrip()
    )
    assert ('CMAKE_ARGS="-DGGML_LLAMAFILE=ON' in report) is is_slow
    assert any("see `toyexp doctor`" in line for line in GGMLCPU().advice()) is is_slow
    assert ("kernels are not used" in report) is not compiler


def test_blas_multiplies_on_a_mac_or_without_a_compiler(no_compiler, monkeypatch):
    monkeypatch.setattr(binding, "devices", lambda: {"CPU": "a CPU", "BLAS": "a BLAS"})
    if native.instruction_set():
        assert GGMLCPU().profile is profiles.CPU_KERNELS
    monkeypatch.setattr(engines.platform, "system", lambda: "Darwin")
    assert GGMLCPU().profile is profiles.CPU_BLAS
    monkeypatch.setattr(engines.platform, "system", lambda: "Linux")
    no_compiler()
    assert GGMLCPU().profile is profiles.CPU_BLAS


def test_products_that_this_machine_does_not_have_are_refused(no_compiler, monkeypatch):
    no_compiler()
    monkeypatch.setattr(binding, "devices", lambda: {"CPU": "a CPU"})
    with pytest.raises(UserError, match=r"engine\.products=blas: this ggml-python is built without BLAS; use"):
        GGMLCPU(products="blas").check()
    with pytest.raises(UserError, match=r"engine\.products=kernels: the C compiler false failed"):
        GGMLCPU(products="kernels").check()
    with pytest.raises(UserError, match=r"engine\.products=kernel: did you mean kernels\?"):
        GGMLCPU(products="kernel").check()


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
    short = tmp_path / "short.c"  # compiles in a tenth of a second
    short.write_text('void transpose(void) {}\nconst char *instruction_set(void) { return ""; }')
    monkeypatch.setattr(native, "SOURCE", short)

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


def test_ggml_goes_without_a_library_whose_functions_are_hidden(build_count, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", f"{tmp_path / 'compiler'} -fvisibility=hidden")
    native._library.cache_clear()
    assert "failed" in native.unavailable_reason() and not native.instruction_set()


def test_the_reason_is_the_first_error_of_the_compiler(build_count, tmp_path, monkeypatch):
    (tmp_path / "other.h").write_text('#include "none.h"\n')
    native.SOURCE.write_text('#include "other.h"\n')
    native._library.cache_clear()
    assert re.search(r"failed \(\S*other\.h:1:.*error: ", native.unavailable_reason())


def test_a_compiled_kernel_is_not_reused_on_another_cpu(build_count, tmp_path, monkeypatch):
    build_count()
    monkeypatch.setattr(native, "CPU_INFO", tmp_path / "cpuinfo")
    native.CPU_INFO.write_text("processor : 0\nflags : sse2\n\nprocessor : 1\nflags : other\n")
    assert (build_count(), build_count()) == (2, 2)
    native.CPU_INFO.write_text("processor : 0\nflags : sse2 avx2\n\n")
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
    assert bool(native.cache_problem()) == (open_to_others in ("cache", "cache/kernels"))  # it is not written either
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
    (line,) = [line for line in GGMLCPU(threads=1).advice() if "cache" in line]
    reason = {"no directory": f"{tmp_path / 'cache'}: Not a directory", "relative": "cache: is not an absolute path"}
    assert line.startswith("kernels.c is compiled at each start: the cache ") and f"{reason[problem]}; set" in line
