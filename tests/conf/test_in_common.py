"""Jobs of one process share caches, and each gets the same result as in its own process."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf
from tiny import plan

from toyexp import program_difference
from toyexp.base.ownership import cached_fingerprint, fingerprint
from toyexp.config import build
from toyexp.config.request import Request
from toyexp.interfaces.plan import apply_optimiser
from toyexp.training.provenance import Origin
from toyexp.training.rundir import runnable_yaml
from toyexp_optimisers.sgd import SGD

WORDS = [
    [],
    ["lr=1", "steps=${batch_size}", "epochs=null"],  # an int for a float setting
    ["model=gpt2", "model.context=${batch_size}", "optim.beta1=0", "data=digits"],
    ["optim.groups={token_embd.weight: {lr: 1}}", "callbacks.cosine.warmup=3", "engine=ggml", "engine.threads=1"],
    ["callbacks=[cosine,early_stop]", "callbacks.early_stop.patience=2", "name='???x'", "sweep.ray.gpus=1"],
    ["model=mlp", "data=digits", "optim=muon", "callbacks=[default,plots]"],
]


@pytest.mark.parametrize("words", WORDS, ids=repr)
def test_settings_that_hydra_typed_equal_settings_that_are_typed_afterwards(words):
    composed = Request.parse(words).compose()
    untyped = OmegaConf.create(OmegaConf.to_container(build.drop_hydra_keys(composed.cfg)))
    typed, retyped = (
        build.build_parts(cfg, composed.all_keys.restrict(cfg), Origin())["plain"] for cfg in (composed.cfg, untyped)
    )
    assert repr(typed) == repr(retyped)


def test_changes_of_a_jobs_settings_do_not_affect_other_jobs():
    request = Request.parse(["optim.groups={a: {lr: 1}}", "engine=ggml"])
    for _ in range(3):
        composed = request.compose()
        plain = build.build_parts(composed.cfg, composed.all_keys.restrict(composed.cfg), Origin())["plain"]
        assert list(plain["optim"]["groups"]) == ["a"] and plain["steps"] == 200
        plain["optim"]["groups"]["b"] = {}
        plain["steps"] = 9


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
