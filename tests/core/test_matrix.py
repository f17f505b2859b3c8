"""Which parts fit together: each kind of mismatch, and the table of `toyexp plugins --matrix`."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from toyexp import IMAGES, Kind, Recipe, UserError
from toyexp.plugins.compatibility import cells, incompatibility, table
from toyexp.plugins.registry import Offer, Registry
from toyexp.reference.opmodel import OpModel


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
    """Needs a file."""

    name: ClassVar[str] = "in_place"

    def plan(self, model, setup):
        raise UserError("recipe=in_place needs a file: recipe.file=...")


MODEL = OpModel("rows")


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (Plain(), None),
        (OfImages(), "recipe=of_images trains models that read images or sounds; model=op reads tokens"),
        (OfHeads(), "recipe=of_heads needs head.weight, which model=op does not have"),
        (InPlace(), None),
    ],
)
def test_a_mismatch_of_parts_names_what_is_missing(recipe, reason):
    assert incompatibility(recipe, MODEL) == reason


@dataclass
class Other(OpModel):
    """Another model."""

    name: ClassVar[str] = "other"


def test_the_table_has_every_cell_and_every_reason_once():
    offers = {"recipe": [Plain, OfImages, InPlace], "model": [OpModel, Other]}
    registry = Registry({k: {c.name: Offer(k, c.name, c, "p", "p") for c in v} for k, v in offers.items()})
    lines = table(registry)
    assert len(list(cells(registry))) == 6
    assert [line.split() for line in lines[:4]] == [
        ["recipe", "op", "other"],
        ["in_place", "set", "set"],
        ["of_images", "no", "no"],
        ["plain", "yes", "yes"],
    ]
    assert lines[5:9] == [
        "no   recipe=of_images trains models that read images or sounds; model=op reads tokens",
        "no   recipe=of_images trains models that read images or sounds; model=other reads tokens",
        "set  recipe=in_place model=op: recipe=in_place needs a file: recipe.file=...",
        "set  recipe=in_place model=other: recipe=in_place needs a file: recipe.file=...",
    ]
