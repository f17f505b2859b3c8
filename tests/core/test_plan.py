"""Validation and properties of plans."""

import dataclasses
import math

import numpy as np
import pytest

from toyexp import ArrayValues, Constant, InputSpec, Lens, LoraAdapter, Plan, PlanTensor, UserError
from toyexp.interfaces.objective import CrossEntropy
from toyexp.interfaces.plan import inherited_metadata
from toyexp.interfaces.snapshot import state_misfit, state_shapes
from toyexp.reference.forward import check_forward
from toyexp.testing import OpModel, op_batch, op_plan

TOKENS, TARGETS, WEIGHTS = InputSpec((5,), "int32"), InputSpec((5,), "int32"), InputSpec((5,), "float32")
INPUTS = {"tokens": TOKENS, "targets": TARGETS, "weights": WEIGHTS}
TENSORS = [PlanTensor(name, (8, 8), Constant(0.5)) for name in ("x", "w", "p")]
PAIR = [PlanTensor("w.lora_a", (2, 8), Constant(0.5)), PlanTensor("w.lora_b", (8, 2), Constant(0.5))]
MASK = {"w.dropout": InputSpec((5, 8), "float32", optional=True)}


def plan(**changes):
    """Return a plan of three matrices with some fields changed."""
    settings = {"tensors": (*TENSORS, *PAIR), "inputs": INPUTS, "rows": 3, **changes}
    return Plan(OpModel("matmul"), **settings)


def without(name):
    return {n: spec for n, spec in INPUTS.items() if n != name}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensors": tuple(TENSORS), "adapters": (LoraAdapter("w", 1.0),)}, ["adapter of w", "w.lora_a"]),
        ({"tensors": (*TENSORS, PAIR[0]), "adapters": (LoraAdapter("w", 1.0),)}, ["adapter of w", "w.lora_b"]),
        ({"adapters": (LoraAdapter("v", 1.0),)}, ["adapter of v", "tensor v,"]),
        ({"adapters": (Lens("x", "q"),)}, ["adapter of x", "tensor q,"]),
        ({"adapters": (Lens("y", "p"),)}, ["adapter of y", "tensor y,"]),
        ({"adapters": (LoraAdapter("w", 1.0, 0.1),)}, ["dropout of w", "input w.dropout"]),
        ({"rows": 0}, ["rows=0", "at least 1"]),
        ({"accumulate": 0}, ["accumulate=0", "at least 1"]),
        ({"grad_clip": -0.1}, ["grad_clip=-0.1", "at least 0"]),
        ({"grad_clip": math.inf}, ["grad_clip=inf"]),
        ({"grad_clip": math.nan}, ["grad_clip=nan"]),
        ({"inputs": without("targets")}, ["objective=cross_entropy", "integer", "no targets"]),
        ({"inputs": without("weights")}, ["input weights", "kind float", "missing"]),
        ({"inputs": {**INPUTS, "targets": WEIGHTS}}, ["objective=cross_entropy", "integer", "float32"]),
        ({"inputs": {**INPUTS, "weights": TARGETS}}, ["input weights", "kind float", "int32"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_invalid_plan_is_rejected_by_name(changes, words):
    with pytest.raises(UserError) as error:
        plan(**changes)
    assert str(error.value).startswith(("plan: ", "plan.", "objective="))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"adapters": (LoraAdapter("w", 1.0), Lens("x", "p"))},
        {"adapters": (LoraAdapter("w", 1.0, 0.1),), "inputs": {**INPUTS, **MASK}},
        {"rows": 1, "accumulate": 7, "grad_clip": 1e-9},
        {"inputs": {**INPUTS, "targets": InputSpec((), "int64"), "weights": InputSpec((), "float64")}},
    ],
    ids=["plain", "adapters", "dropout", "sizes", "wide types"],
)
def test_a_valid_plan_is_accepted(changes):
    assert plan(**changes).rows == changes.get("rows", 3)


@dataclasses.dataclass
class Unlisted(CrossEntropy):
    name = "unlisted"
    metric_names = ("a",)

    def metrics(self, ops, model, p, batch):
        return {"b": self.loss(ops, model, p, batch)}


def test_metrics_that_an_objective_does_not_list_are_named():
    with pytest.raises(UserError, match=r"^objective.unlisted: metrics\(\) returns b, metric_names lists a$"):
        check_forward(dataclasses.replace(op_plan("matmul"), objective=Unlisted()), "recipe=none")


def test_matrices_decay_and_norms_and_biases_do_not():
    decays = {t.name: t.has_weight_decay for t in op_plan("bias").tensors}
    assert decays == {"x": True, "w": True, "b": False}


def test_trainable_tensors_are_selected_by_name_and_flag():
    frozen = op_plan("bias", frozen=True)
    assert [t.name for t in frozen.trainable] == ["w", "b"]
    assert frozen.tensor("b").size == 8
    with pytest.raises(KeyError):
        frozen.tensor("c")


def test_values_of_the_wrong_shape_are_rejected():
    with pytest.raises(UserError, match=r"w: expected shape \[8, 8\], got \[3, 8\]"):
        plan().initial_values(PlanTensor("w", (8, 8), ArrayValues(np.ones((3, 8), np.float32))))


def test_initial_values_depend_only_on_the_seed_and_the_name():
    first = op_plan("swiglu")
    w = first.tensor("w")
    moved = dataclasses.replace(first, tensors=first.tensors[::-1])
    np.testing.assert_array_equal(first.initial_values(w), moved.initial_values(w))
    assert (first.initial_values(w) != dataclasses.replace(first, seed=4).initial_values(w)).all()
    assert (first.initial_values(w) != first.initial_values(dataclasses.replace(w, name="v"))).all()


def test_dropout_without_masks_in_the_batch_is_rejected():
    drops = plan(adapters=(LoraAdapter("w", 1.0, 0.1),), inputs={**INPUTS, **MASK})
    values = {t.name: drops.initial_values(t) for t in drops.tensors}
    assert [a.mask for a in drops.dropout_adapters] == ["w.dropout"]
    with pytest.raises(UserError, match="the adapter of w has dropout"):
        drops.params(values)
    mask = np.zeros((3, 5, 8), np.float32)
    assert drops.params(values, {**op_batch(), "w.dropout": mask})["w"].low_rank.dropout is mask


def test_an_adapter_file_has_one_alpha():
    pairs = [PlanTensor(f"p.lora_{x}", shape, Constant(0.5)) for x, shape in (("a", (4, 8)), ("b", (8, 4)))]
    tensors = (*TENSORS, *PAIR, *pairs)
    equal, unequal = (plan(tensors=tensors, adapters=(LoraAdapter("w", 2.0), LoraAdapter("p", s))) for s in (1.0, 2.0))
    values = {t.name: equal.initial_values(t) for t in equal.tensors}
    assert equal.alphas == {"w": 4.0, "p": 4.0} and unequal.alphas == {"w": 4.0, "p": 8.0}
    for the_plan, factor in ((equal, 1), (unequal, 2)):  # a matrix B whose adapter has another alpha is scaled
        alpha, stored = the_plan.adapter_file(values)
        assert alpha == 4.0 and np.array_equal(stored["p.lora_b"], factor * values["p.lora_b"])
        assert all(stored[name] is values[name] for name in ("p.lora_a", "w.lora_a", "w.lora_b"))


@dataclasses.dataclass(frozen=True)
class Licensed(Constant):
    """Values of a file that says who may use it."""

    licence: str = ""

    def export_metadata(self):
        return {"license": self.licence} if self.licence else {}


@pytest.mark.parametrize(
    ("licences", "said"),
    [
        (("mit", "", "mit"), {"license": "mit"}),
        (("mit", "mit", "gpl"), {}),
        (("", "gpl", "mit"), {}),
        (("", "", ""), {}),
    ],
)
def test_a_licence_is_inherited_only_if_all_files_agree(licences, said):
    tensors = [PlanTensor(t.name, t.shape, Licensed(0.5, said)) for t, said in zip(TENSORS, licences, strict=True)]
    assert inherited_metadata(plan(tensors=tuple(tensors))) == said


def test_a_snapshot_of_another_optimiser_is_rejected_with_both_states():
    expected = plan()
    arrays = {name: np.zeros(shape) for name, shape in state_shapes(expected).items()}
    assert state_misfit(expected, arrays) is None
    other = {(n.removesuffix("@m") + "@u" if n.endswith("@m") else n): a for n, a in arrays.items()}
    assert str(state_misfit(expected, other)).startswith("the optimiser state of p must be m, v, got u, v;")
    del arrays["p"]
    assert state_misfit(expected, arrays) == "the snapshot lacks p, unlike the plan"
