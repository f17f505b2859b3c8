"""What goes with what: each kind of refusal, and the table that `toyexp plugins --matrix` prints."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from toyexp import IMAGES, Kind, Recipe, UserError
from toyexp.contract.compatibility import cells, refusal, table
from toyexp.contract.registry import Offer, Registry
from toyexp.reference.opmodel import OpModel
from toyexp.testing import NullEngine


@dataclass
class Plain(Recipe):
    """Takes any model of tokens."""

    name: ClassVar[str] = "plain"

    def plan(self, model, setup):
        return None


@dataclass
class OfImages(Plain):
    """Reads only images."""

    name: ClassVar[str] = "of_images"
    reads: ClassVar[tuple[Kind, ...]] = (IMAGES, Kind("sounds", "second"))


@dataclass
class OfHeads(Plain):
    """Needs a tensor that is not there."""

    name: ClassVar[str] = "of_heads"
    needs_tensors: ClassVar[tuple[str, ...]] = ("rows", "head.weight")


@dataclass
class InPlace(Plain):
    """Needs a feature of the engine, and a file."""

    name: ClassVar[str] = "in_place"
    needs_features: ClassVar[tuple[str, ...]] = ("mapped weights",)

    def plan(self, model, setup):
        raise UserError("recipe=in_place needs a file: recipe.file=...")


@dataclass
class Mapping(NullEngine):
    """Has that feature."""

    name: ClassVar[str] = "mapping"
    features: ClassVar[tuple[str, ...]] = ("mapped weights", "another")


MODEL = OpModel("rows")


@pytest.mark.parametrize(
    ("recipe", "engine", "reason"),
    [
        (Plain(), NullEngine(), None),
        (OfImages(), NullEngine(), "recipe=of_images trains models that read images or sounds; model=op reads tokens"),
        (OfHeads(), NullEngine(), "recipe=of_heads needs head.weight, which model=op does not have"),
        (InPlace(), NullEngine(), "recipe=in_place needs mapped weights, which engine=noop does not have"),
        (InPlace(), Mapping(), None),
    ],
)
def test_a_refusal_says_what_is_missing(recipe, engine, reason):
    assert refusal(recipe, MODEL, engine) == reason


@pytest.fixture
def registry():
    offers = {"engine": [NullEngine, Mapping], "recipe": [Plain, OfImages, InPlace], "model": [OpModel]}
    return Registry({k: {c.name: Offer(k, c.name, c, "p", "p") for c in v} for k, v in offers.items()})


def test_the_table_has_every_cell_and_every_reason_once(registry):
    lines = table(registry)
    assert len(list(cells(registry))) == 6
    assert [line.split() for line in lines[:4]] == [
        ["recipe", "model", "mapping", "noop"],
        ["in_place", "op", "set", "no"],
        ["of_images", "op", "no", "no"],
        ["plain", "op", "yes", "yes"],
    ]
    assert lines[5:8] == [
        "no   recipe=in_place needs mapped weights, which engine=noop does not have",
        "no   recipe=of_images trains models that read images or sounds; model=op reads tokens",
        "set  recipe=in_place model=op: recipe=in_place needs a file: recipe.file=...",
    ]
