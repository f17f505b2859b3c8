"""`toyexp doctor --numerics`: correct engines pass, and every kind of fault is found and named."""

import dataclasses
import resource
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from toyexp import UserError
from toyexp.cli import doctor
from toyexp.cli.doctor import Op, Training, build_engines, build_references, check_engine, format_table, gradient
from toyexp.cli.main import main
from toyexp.plugins.discovery import load
from toyexp.reference.opmodel import CASES, case_rows
from toyexp.testing import EngineSuite, op_batch, op_plan
from toyexp_ggml.engines import GGMLCPU
from toyexp_ggml.session import GGMLSession
from toyexp_torch.engines import TorchCPU

CHECKS = len(CASES) + 4  # ops, adapters and steps
ALL = f"{CHECKS} of {CHECKS}"


def select_references(kind):
    return [check for check in build_references() if isinstance(check, kind)]


def test_the_reference_gradient_is_that_of_autograd():
    """Compared number by number with an independent library."""
    import torch

    plan, batch = op_plan("swiglu"), op_batch()
    values = {t.name: plan.initial_values(t) for t in plan.tensors}
    leaves = {n: torch.from_numpy(v).double().requires_grad_() for n, v in values.items()}
    x = leaves["x"][torch.from_numpy(batch["tokens"]).long()]
    logits = torch.nn.functional.silu(x @ leaves["w"].T) * x
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, 8), torch.from_numpy(batch["targets"]).long().reshape(-1), reduction="none"
    )
    weights = torch.from_numpy(batch["weights"]).double().reshape(-1)
    (loss @ weights / weights.sum()).backward()
    for name, leaf in leaves.items():
        np.testing.assert_allclose(gradient(plan, values, batch, name), leaf.grad.numpy(), atol=1e-9)


class Wrong(GGMLSession):
    """An engine with one fault."""

    fault = ""

    def do_logits(self, micro, rows):
        return super().do_logits(micro, rows) * (1.001 if self.fault == "logits" else 1)

    def do_loss(self, micro):
        return super().do_loss(micro) * (1.001 if self.fault == "loss" else 1)

    def do_gradients(self, micros):
        gradients = super().do_gradients(micros)
        last = next(reversed(gradients))
        if self.fault == "one number":
            gradients[last].flat[np.abs(gradients[last]).argmax()] *= 1.05
        if self.fault == "nan":
            gradients[last].flat[0] = np.nan
        if self.fault == "raises":
            raise RuntimeError("the device is lost\nand more")
        return gradients

    def do_step(self, micros, numbers):
        numbers = [hp.copy() for hp in numbers]
        for hp in numbers:
            if self.fault == "decay":
                hp[4] = 0
            if self.fault == "slots":
                hp[5:] = 1
        return super().do_step(micros, numbers)


@dataclass
class WrongEngine(GGMLCPU):
    fault: str = ""

    def realize(self, plan):
        Wrong.fault = self.fault
        return Wrong(plan, self.device, self.profile, self.thread_count(), self.recompute).open()


@pytest.mark.parametrize("fault", ["", "logits", "loss", "one number", "nan", "raises", "decay", "slots"])
def test_doctor_finds_each_fault_and_reports_nothing_else(fault):
    lines = list(check_engine(WrongEngine(threads=1, fault=fault), build_references()))
    failed = {line.name for line in lines if not line.passed}
    op_names, training_names = (
        {op.name for op in select_references(Op)},
        {run.name for run in select_references(Training)},
    )
    if fault in ("decay", "slots"):
        assert failed and failed <= training_names
    else:
        assert failed == (op_names if fault else set())
    if fault == "raises":
        assert "RuntimeError: the device is lost" in {line.failure for line in lines}
        rows = format_table("x", GGMLCPU(), lines)
        assert any(row.endswith("  FAIL") for row in rows) and rows[-1].endswith(": RuntimeError: the device is lost")


def test_doctor_checks_the_available_engines_and_an_emulated_device(capsys):
    assert [label for label, _ in build_engines([], load())] == ["metal:emulate=true", "cpu", "ggml"]
    assert main(["doctor", "--numerics", "engine=ggml:threads=1,metal:threads=1:emulate=true"]) == 0
    out = capsys.readouterr().out
    assert len({row.index("PASS") for row in out.splitlines() if row.endswith("PASS")}) == 1, "columns are not aligned"
    assert (
        f"ggml:threads=1: {ALL} checks pass; matrix products in float32" in out
        and f"metal:threads=1:emulate=true: {ALL}" in out
    )
    assert out.count("PASS") == 2 * CHECKS and "FAIL" not in out


def test_lower_precisions_pass_with_their_own_tolerances_and_fail_with_float32s():
    from toyexp_torch.engines import TorchCPU

    half = TorchCPU(threads=1, dtype="bfloat16")
    assert all(line.passed for line in check_engine(half, build_references()))

    class ClaimsFloat32(TorchCPU):
        def product_dtype(self):
            return "float32"

    claims_float32 = ClaimsFloat32(threads=1, dtype="bfloat16")
    failed = {line.name for line in check_engine(claims_float32, build_references()) if not line.passed}
    assert {"matmul", "attention", "3 steps, lora"} <= failed
    assert all(line.passed for line in check_engine(TorchCPU(threads=1, dtype="float64"), build_references()))


def test_a_failing_engine_gives_exit_code_1_without_a_traceback(capsys, monkeypatch):
    monkeypatch.setattr("toyexp_ggml.session.GGMLSession.do_loss", lambda self, micro: 1.0)
    assert main(["doctor", "--numerics", "engine=ggml:threads=1"]) == 1
    assert capsys.readouterr().out.count("FAIL") >= 23
    assert main(["doctor", "--numerics", "engine=ggml:threads=1,cpu:threads=1"]) == 1
    assert f"cpu:threads=1: {ALL} checks pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("precision", "op", "training"),
    [
        ("tf32", (5e-3, 2e-2), (5e-3, 2e-1)),
        ("float16", (1e-2, 2e-2), (1e-2, 2e-1)),
        ("float32", (1e-4,) * 2, (1e-4, 5e-3)),
    ],
)
def test_the_tolerances_of_ops_and_training_follow_the_engines_precision(precision, op, training):
    class Rounding(GGMLCPU):
        def product_dtype(self):
            return precision

    engine = Rounding(threads=1)
    lines = list(check_engine(engine, [select_references(Op)[0], select_references(Training)[0]]))
    assert [line.tolerances for line in lines] == [op, training]
    columns = [row.split()[-5:] for row in format_table("x", engine, lines)[-2:]]
    assert [(float(row[1]), float(row[3])) for row in columns] == [op, training]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine=gml"], "did you mean ggml"),
        (["engine=ggml:thread=1"], "did you mean threads"),
        (["engine=ggml:threads=many"], "must be a whole number"),
        (["engine=ggml:threads"], "expected ggml:key=value"),
        (["engine=metal"], "metal"),
        (["steps=3"], "takes engine=name[:key=value],... and plugins=[...]"),
    ],
)
def test_bad_arguments_are_rejected_in_one_line(words, message, capsys):
    assert main(["doctor", "--numerics", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_doctor_needs_neither_pytest_nor_autograd():
    """Nor hypothesis. Plugin authors without them can still use the null engine."""
    program = (
        "import sys\n"
        "for name in ('pytest', '_pytest', 'autograd', 'hypothesis', 'torch'): sys.modules[name] = None\n"
        "from toyexp.cli.main import main\n"
        "from toyexp.testing import NullEngine, OpModel, ReferenceOps\n"
        "sys.exit(main(['doctor', '--numerics', 'engine=ggml:threads=1']))\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 0, child.stderr
    assert f"{ALL} checks pass" in child.stdout
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 8


def test_every_name_of_the_conformance_kit_can_be_imported():
    import toyexp.testing as kit

    for name in kit.__all__:
        assert getattr(kit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        kit.Nothing  # noqa: B018


def test_the_references_use_every_op():
    from toyexp.interfaces.ops import Ops
    from toyexp.testing import ReferenceOps

    used = set()

    class RecordingOps(ReferenceOps):
        def __getattribute__(self, name):
            used.add(name)
            return super().__getattribute__(name)

    for op in select_references(Op):
        values = {t.name: op.plan.initial_values(t).astype(np.float64) for t in op.plan.tensors}
        op.plan.model.forward(RecordingOps(), op.plan.params(values, op.batch), op.batch)
    assert Ops.__abstractmethods__ - {"cross_entropy"} <= used
    assert all(dataclasses.is_dataclass(op) for op in select_references(Op))


@dataclass
class Pairs(GGMLCPU):
    """An engine that rejects odd numbers of rows, like an engine of two devices."""

    def check_plan(self, plan):
        if plan.rows % 2:
            raise UserError("no equal shares")

    def realize(self, plan):
        self.check_plan(plan)
        return super().realize(plan)


def test_the_conformance_kit_and_doctor_choose_a_row_count_that_the_devices_can_share(monkeypatch):
    monkeypatch.setattr(TorchCPU, "available_devices", lambda self: (5, "5 cores"))
    assert [case_rows(TorchCPU(devices=n)) for n in ("1", "2", "5")] == [3, 4, 5]
    suite = EngineSuite()
    suite.engine = Pairs(threads=1)
    suite.test_op_computes_what_its_definition_says("rope", None)
    suite.test_accumulation_equals_one_large_batch()
    monkeypatch.setattr(doctor, "CASES", {name: CASES[name] for name in ("matmul", "rope")})
    lines = list(check_engine(suite.engine, build_references.__wrapped__(4)))
    assert (len(lines), [line for line in lines if not line.passed]) == (6, [])
