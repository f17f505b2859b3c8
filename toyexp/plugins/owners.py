"""Whose method an error came out of: the classes of the parts that plugins make, each with the word for its kind."""

from __future__ import annotations

from toyexp.interfaces.arithmetic import Arithmetic
from toyexp.interfaces.dataset import Batches, Dataset
from toyexp.interfaces.ops import Ops
from toyexp.interfaces.session import Session
from toyexp.plugins.rules import KINDS

OWNERS: dict[type, str] = {base: kind for kind, (base, _) in KINDS.items()}
OWNERS |= {Session: "engine", Ops: "engine", Arithmetic: "engine", Dataset: "data", Batches: "data"}
