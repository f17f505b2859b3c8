"""What the jobs of one process have in common is worked out once, and each has what it would have alone."""

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import yaml
from tiny import plan

from toyexp import program_difference
from toyexp.base.errors import UserError
from toyexp.base.ownership import cached_fingerprint, fingerprint
from toyexp.config import build
from toyexp.config.request import Request
from toyexp.interfaces.plan import apply_optimiser
from toyexp.training.rundir import runnable_yaml
from toyexp_optimisers.sgd import SGD


@dataclass
class Part:
    """A setting of each kind."""

    size: int = 1
    rate: float = 0.1
    on: bool = False
    text: str = "a"
    maybe: float | None = None
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    groups: dict[str, dict[str, float]] = field(default_factory=dict)


ALL = {"name": "part", **vars(Part())}
NODES = [
    ALL,
    ALL | {"size": 2, "rate": 0.2, "on": True},
    ALL | {"rate": 1},  # a number that is whole
    ALL | {"rate": 1.0},
    ALL | {"rate": True},
    ALL | {"size": True},
    ALL | {"size": 2.0},
    ALL | {"rate": float("inf")},
    ALL | {"text": 3},
    ALL | {"text": "${x}"},
    ALL | {"text": "???"},
    ALL | {"maybe": 1},
    ALL | {"maybe": None},
    ALL | {"names": ["c"]},
    ALL | {"groups": {"w": {"lr": 1}}},
    ALL | {"unknown": 1},
    {"name": "part", "size": 5},  # and the rest by default
    ALL | {"name": "other", "size": 5},
    ALL | {"text": "~/there"},
]


def outcome(typed, node):
    try:
        return repr(typed(Part, node, "data"))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("before", NODES[:4] + NODES[-4:], ids=repr)
def test_settings_behind_those_of_another_job_are_typed_as_they_are_alone(before, monkeypatch):
    for node in NODES:
        monkeypatch.setattr(build, "_typed_cache", {})
        outcome(build._apply_types_cached, before)
        assert outcome(build._apply_types_cached, node) == outcome(build.apply_types, node)


def test_what_one_job_does_to_its_settings_reaches_no_other(monkeypatch):
    monkeypatch.setattr(build, "_typed_cache", {})
    for _ in range(3):
        found = build._apply_types_cached(Part, ALL, "data")
        assert found["names"] == ["a", "b"]
        found["names"].append("c")
        found["size"] = 9


STRANGE = ["é", "😀", "a: b", "- x", "'q'", '"d"', "a\nb", "\t", "word " * 40, "", "null", "1e3", "0x10", "~", "@a",
           "yes", "a #b", "\x07", "\u2028", "\ufeff", "12:30", "1_000", "!a", "&a", "*b", "{a}",
           "a\\b", "\x7f", " lead "]  # fmt: skip


def test_a_saved_configuration_is_read_as_it_was_and_has_its_letters():
    plain = Request.parse([]).build_config().plain | {"name": "😀 naïve"}
    text = runnable_yaml(plain)
    assert "😀 naïve" in text and runnable_yaml(plain | {"name": "naïve"}).count("naïve") == 1
    for name in STRANGE:
        assert yaml.safe_load(runnable_yaml(plain | {"name": name}))["name"] == name


@pytest.mark.parametrize("how", ["written", "replaced"])
def test_a_file_that_changes_between_two_jobs_is_read_again(tmp_path, how):
    path = tmp_path / "base.gguf"
    path.write_bytes(b"a" * 100)
    then = path.stat()
    assert cached_fingerprint(path) == fingerprint(path)
    before, place = cached_fingerprint(path), path if how == "written" else tmp_path / "new"
    place.write_bytes(b"b" * 100)
    os.utime(place, ns=(then.st_atime_ns, then.st_mtime_ns))
    place.replace(path)
    assert cached_fingerprint(path) == fingerprint(path) != before


@dataclass
class Along(SGD):
    """A rule that is also set by something that cannot be compared with ==."""

    own: Any = None


def test_rules_are_one_program_by_what_they_do_also_where_their_settings_cannot_be_compared(monkeypatch):
    def of(own, **settings):
        return apply_optimiser(plan("llama"), Along(own=own, **settings), 0.1)

    for own in (np.ones(3), 1):
        assert program_difference([of(own), of(own)]) == program_difference([of(own), of(own + 1)]) == ""
        assert "another formula" in program_difference([of(own), of(own, nesterov=True)])
    monkeypatch.delattr("toyexp.interfaces.stack._formula")
    assert program_difference([of(1), of(1)]) == ""  # and nothing was written out
