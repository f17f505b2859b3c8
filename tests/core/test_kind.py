"""Kinds of data: which fit together, and the metrics of each kind."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from toyexp import IMAGES, TOKENS, InputSpec, Kind, PlanTensor, Setup, TokenDataset
from toyexp.batching.tokens import Dropout
from toyexp.cli.bench import row_positions
from toyexp.inference.evaluate import Evaluation
from toyexp.plugins.compatibility import incompatibility, kind_mismatch, matching_data
from toyexp.plugins.discovery import load
from toyexp.reference.opmodel import OpModel, op_plan
from toyexp.testing import image_dataset
from toyexp.tokenizers.byte_level import Bytes
from toyexp_data.images import Digits
from toyexp_models.vit import Patches
from toyexp_recipes.scratch import Scratch, VitTiny

SOUNDS = Kind("sounds", "clip")


@dataclass
class Hears(OpModel):
    """Reads sounds."""

    reads: ClassVar[Kind] = SOUNDS


@dataclass
class Listens(Scratch):
    """Trains models of sounds alone, a kind that another package made of the same name."""

    reads: ClassVar[tuple[Kind, ...]] = (Kind("sounds", "second"),)


def test_kinds_are_equal_if_their_names_are():
    assert incompatibility(Listens(), Hears("rows")) is None
    assert incompatibility(Scratch(), Hears("rows")) == (
        "recipe=scratch trains models that read tokens or images or vectors; model=op reads sounds"
    )
    assert "read images; model=op reads sounds" in incompatibility(VitTiny(), Hears("rows"))
    assert kind_mismatch("model=vit", IMAGES, Digits()) is None
    assert kind_mismatch("x.gguf", SOUNDS, Digits) == "x.gguf reads sounds; data=digits gives images"


def test_the_default_data_is_the_first_registered_of_the_models_kind():
    registry = load()
    assert matching_data(TOKENS, registry)[0] == "stdlib"
    assert matching_data(IMAGES, registry) == ["digits", "images"]
    assert matching_data(SOUNDS, registry) == []


@pytest.mark.parametrize(("tokenizer", "bits"), [(Bytes(), 2.0), (None, None)])
def test_text_has_perplexity_and_bits_per_byte(tokenizer, bits):
    dataset = TokenDataset(np.arange(9), np.arange(9), tokenizer, 257, 1, {})
    batch = {"targets": np.array([[97, 98, 99]]), "weights": np.array([[1, 0, 1]])}  # one byte each, of which two count
    figures = TOKENS.derived_metrics(2 * math.log(2), [batch], dataset)
    values = {figure.name: figure.value for figure in figures}
    assert values == {"perplexity": pytest.approx(4), "bits_per_byte": bits and pytest.approx(bits)}
    assert TOKENS.derived_metrics(1e6, [batch], dataset)[0].value < math.inf
    assert IMAGES.derived_metrics(2.0, [batch], dataset) == SOUNDS.derived_metrics(2.0, [batch], dataset) == []
    evaluation = Evaluation("f", "m", None, "e", "d", None, [], {}, True, 2, 1.0, figures, {})
    assert "perplexity 4.00" in evaluation.lines()[-1] and ("2.000 bits per byte" in evaluation.lines()[-1]) is bool(
        bits
    )
    assert evaluation.plain()["perplexity"] == pytest.approx(4) and "figures" not in evaluation.plain()


def test_ids_are_bounded_by_the_data_or_the_vocabulary():
    inputs = TOKENS.inputs(4)
    inputs["targets"] = InputSpec((4,), "int32", below=3)
    assert {n: spec.below for n, spec in TOKENS.with_bounds(inputs, 9).items()} == {
        "tokens": 9, "targets": 3, "weights": None,
    }  # fmt: skip


def test_a_row_of_a_kind_without_positions_counts_as_one():
    """So that its operations are not counted for each number of it; an image's patches and a text's tokens are many."""
    ends = {"targets": InputSpec((), "int32"), "weights": InputSpec((), "float32")}
    tensors = [PlanTensor(t.name, t.shape, t.init) for t in OpModel("rows").tensors()]
    for inputs, model, count in [
        ({"waves": InputSpec((32,), "float32"), **ends}, Hears("rows"), 1),
        ({"frames": InputSpec((7, 32), "float32"), **ends}, Hears("rows"), 7),
        (TOKENS.inputs(9), OpModel("rows"), 9),
    ]:
        assert row_positions(Setup(inputs, rows=2).plan(model, tensors)) == count


def test_wrapped_batches_report_the_omissions_of_the_inner_ones():
    inner = image_dataset().batches(0, 4, 0)
    inner.facts, inner.omissions = {"too_dark": 2}, ["2 of 60 images, too dark"]
    for outer in (Patches(inner, 2), Dropout(inner, op_plan("matmul"))):
        assert (outer.facts, outer.omissions) == (inner.facts, inner.omissions)
