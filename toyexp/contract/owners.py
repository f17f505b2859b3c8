"""Whose method an error came out of: the classes of the parts that plugins make, each with the word for its kind."""

from __future__ import annotations

from toyexp.contract.arithmetic import Arithmetic
from toyexp.contract.dataset import Batches, Dataset
from toyexp.contract.ops import Ops
from toyexp.contract.rules import KINDS
from toyexp.contract.session import Session

OWNERS: dict[type, str] = {base: kind for kind, (base, _) in KINDS.items()}
OWNERS |= {Session: "engine", Ops: "engine", Arithmetic: "engine", Dataset: "data", Batches: "data"}
