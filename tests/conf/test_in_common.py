"""Jobs of one process share caches, and each gets the same result as in its own process."""

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
    """A part with one setting of each type."""

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
    ALL | {"rate": 1},  # an int for a float setting
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
    {"name": "part", "size": 5},  # other settings have defaults
    ALL | {"name": "other", "size": 5},
    ALL | {"text": "~/there"},
]


def result_or_error(typed, node):
    try:
        return repr(typed(Part, node, "data"))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("first_node", NODES[:4] + NODES[-4:], ids=repr)
def test_cached_typing_of_settings_equals_typing_without_cache(first_node, monkeypatch):
    for node in NODES:
        monkeypatch.setattr(build, "_typed_cache", {})
        result_or_error(build._apply_types_cached, first_node)
        assert result_or_error(build._apply_types_cached, node) == result_or_error(build.apply_types, node)


def test_changes_of_a_jobs_settings_do_not_affect_other_jobs(monkeypatch):
    monkeypatch.setattr(build, "_typed_cache", {})
    for _ in range(3):
        settings = build._apply_types_cached(Part, ALL, "data")
        assert settings["names"] == ["a", "b"]
        settings["names"].append("c")
        settings["size"] = 9


STRANGE = ["é", "😀", "a: b", "- x", "'q'", '"d"', "a\nb", "\t", "word " * 40, "", "null", "1e3", "0x10", "~", "@a",
           "yes", "a #b", "\x07", "\u2028", "\ufeff", "12:30", "1_000", "!a", "&a", "*b", "{a}",
           "a\\b", "\x7f", " lead "]  # fmt: skip


def test_a_saved_configuration_keeps_unicode_and_special_strings():
    plain = Request.parse([]).build_config().plain | {"name": "😀 naïve"}
    text = runnable_yaml(plain)
    assert "😀 naïve" in text and runnable_yaml(plain | {"name": "naïve"}).count("naïve") == 1
    for name in STRANGE:
        assert yaml.safe_load(runnable_yaml(plain | {"name": name}))["name"] == name


@pytest.mark.parametrize("method", ["written", "replaced"])
def test_a_file_changed_between_two_jobs_gets_a_new_fingerprint(tmp_path, method):
    path = tmp_path / "base.gguf"
    path.write_bytes(b"a" * 100)
    stat = path.stat()
    assert cached_fingerprint(path) == fingerprint(path)
    before, new_path = cached_fingerprint(path), path if method == "written" else tmp_path / "new"
    new_path.write_bytes(b"b" * 100)
    os.utime(new_path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    new_path.replace(path)
    assert cached_fingerprint(path) == fingerprint(path) != before


@dataclass
class SGDWithValue(SGD):
    """A rule with a setting that cannot be compared with ==."""

    value: Any = None


def test_rules_are_compared_by_formula_if_their_settings_cannot_be_compared(monkeypatch):
    def make_plan(value, **settings):
        return apply_optimiser(plan("llama"), SGDWithValue(value=value, **settings), 0.1)

    for value in (np.ones(3), 1):
        assert (
            program_difference([make_plan(value), make_plan(value)])
            == program_difference([make_plan(value), make_plan(value + 1)])
            == ""
        )
        assert "another formula" in program_difference([make_plan(value), make_plan(value, nesterov=True)])
    monkeypatch.delattr("toyexp.interfaces.stack._formula")
    assert program_difference([make_plan(1), make_plan(1)]) == ""  # without comparing formulas
