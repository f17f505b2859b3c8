"""Settings without effect are warned about before the first step; contradictory settings are rejected."""

import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lines import drop_repeated_keys
from tiny import write_base

from toyexp import PlanTensor, RunPreview
from toyexp.cli.main import main
from toyexp.config.request import Request
from toyexp.formats.gguf.open_model import FromGGUF
from toyexp.plugins.discovery import load
from toyexp.tokenizers.byte_level import Bytes
from toyexp.training.experiment import prepare
from toyexp.training.run_config import introduction
from toyexp_ggml.engines import GGMLCPU, GGMLCUDA, GGMLMetal, GGMLVulkan
from toyexp_recipes.lora import Lora
from toyexp_recipes.scratch import DONOR
from toyexp_torch.engines import TorchCPU, TorchCUDA

MODULES = ["toyexp.testing.null"]
TEXT = ["data=text", "data.path=book.txt", "data.tokenizer=byte", "steps=20", "eval_every=10", "engine=noop",
        "model.context=16"]  # fmt: skip


@pytest.fixture(scope="module")
def registry():
    return load(MODULES)


@pytest.fixture(autouse=True)
def _work_in_tmp_path(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 200)
    (tmp_path / "lines.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 40)
    pairs = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
    (tmp_path / "pairs.jsonl").write_text(pairs * 40)
    write_base(tmp_path / "teacher.gguf", "llama", tokenizer=Bytes(), context=16)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def list_warnings(registry):
    """Return a function that lists the warnings of a run on TEXT."""

    def prepare_and_list(*words):
        return list(prepare(Request([], registry, MODULES).build_config(*drop_repeated_keys(*TEXT, *words))).warnings)

    return prepare_and_list


BASE = f"recipe.base={DONOR} data.tokenizer=auto "
# Settings without effect, the beginnings of their warnings in order, and similar settings that have an effect.
IDLE = {
    "longer than the run": (
        "eval_every=21 checkpoint_every=21 callbacks=[default,sample,early_stop] callbacks.events.every=21 "
        "callbacks.progress.every=21 callbacks.sample.every=21 callbacks.gguf_export.every=21 "
        "callbacks.watch.warmup=21 callbacks.watch.patience=21 callbacks.cosine.warmup=40",
        ["eval_every=21: the run has 20 steps", "checkpoint_every=21", "callbacks.cosine.warmup=40",
         "callbacks.progress.every=21", "callbacks.watch.warmup=21", "callbacks.watch.patience=21",
         "callbacks.events.every=21", "callbacks.gguf_export.every=21", "callbacks.sample.every=21",
         "callbacks.early_stop.patience=3"],
        "eval_every=6 checkpoint_every=20 callbacks=[default,sample,early_stop] callbacks.events.every=20 "
        "callbacks.progress.every=20 callbacks.sample.every=20 callbacks.gguf_export.every=20 "
        "callbacks.watch.warmup=20 callbacks.watch.patience=20 callbacks.cosine.warmup=19",
    ),
    "no more than a warm-up by default": (
        "steps=5 eval_every=5", ["callbacks.cosine.warmup=5: the run has 5 steps"], "steps=6 eval_every=5",
    ),
    "groups that change nothing": (
        "optim.groups={*attn*:{lr:1},*attn_k*:{lr:2},*norm*:{weight_decay:1}} "
        "callbacks=[default,linear] callbacks.linear.scales=weight_decay",
        ["callbacks.linear.scales=weight_decay: has no effect with optim.weight_decay=0",
         "optim.groups: *attn_k*: has no effect: *attn* matches its tensors first",
         "optim.groups: *norm*: weight_decay=1 has no effect: norms"],
        "optim.groups={*attn_q*:{frozen:true},*attn_k*:{lr:2},*attn*:{lr:1,weight_decay:1},*norm*:{weight_decay:0}} "
        "callbacks=[default,linear] callbacks.linear.scales=weight_decay",
    ),
    "no rate": ("lr=0", ["lr=0: the weights will not change"], "lr=1e-9"),
    "a momentum that is none": (
        "optim=sgd optim.momentum=0 callbacks=[default,linear] callbacks.linear.scales=momentum",
        ["callbacks.linear.scales=momentum: has no effect with optim.momentum=0"],
        "optim=sgd callbacks=[default,linear] callbacks.linear.scales=momentum",
    ),
    "the rate without its schedule, and a decay of more than all": (
        "callbacks.cosine.scales=weight_decay optim.weight_decay=201 lr=0.01 optim.groups={*ffn*:{weight_decay:1}}",
        ["callbacks.cosine.scales=weight_decay: lr has no schedule",
         "weight_decay=201 at lr=0.01: each step multiplies"],
        "callbacks=[default,linear] callbacks.linear.scales=weight_decay optim.weight_decay=99 lr=0.01",
    ),
    "no plateau, no adapter, no draw": (
        "callbacks=[default,wsd,sample] ~callbacks.cosine callbacks.wsd.warmup=17 callbacks.gguf_export.merged=false "
        "callbacks.sample.temperature=0 callbacks.sample.top_p=0.5",
        ["callbacks.gguf_export.merged=false: has no effect",
         "callbacks.wsd.warmup=17: overlaps",
         "callbacks.sample.top_p=0.5: has no effect with"],
        "callbacks=[default,wsd,sample] ~callbacks.cosine callbacks.wsd.warmup=16 callbacks.sample.top_p=0.5",
    ),
    "a plain text": (
        "checkpoint_every=0 checkpoint_keep=5 data.bpe_vocab=300 data.eval_batches=4 data.suffixes=.txt",
        ["checkpoint_keep=5: has no effect with checkpoint_every=0", "data.bpe_vocab=300: has no effect",
         "data.eval_batches=4: only 3 batches are held out", "data.suffixes=.txt"],
        "checkpoint_every=0 data.bpe_vocab=300 data.tokenizer=bpe data.eval_batches=1 data.suffixes=.txt data.path=.",
    ),
    "examples without conversations": (
        "data=examples data.path=lines.jsonl data.template=plain data.eval_batches=3 eval_every=0 "
        "data.val_path=lines.jsonl",
        ["data.val_path: the held-out loss means little; lines.jsonl is also trained on",
         "data.eval_batches=3: has no effect with eval_every=0", "data.template=plain"],
        "data=examples data.path=lines.jsonl",
    ),
    "another's tokens, from a donor": (
        "recipe=warm", ["data.tokenizer=byte: its token ids differ"], "recipe=warm data.tokenizer=auto",
    ),
    "another's tokens, in a base": (
        f"recipe=full {BASE} data.tokenizer=byte", ["data.tokenizer=byte"], f"recipe=full {BASE}",
    ),
    "an adapter alone": (
        f"recipe=lora {BASE} recipe.rank=1 recipe.rslora=true callbacks.gguf_export.merged=false "
        "callbacks.gguf_export.type=f16",
        ["recipe.rslora=true", "callbacks.gguf_export.type=f16: has no effect with merged=false"],
        f"recipe=lora {BASE} callbacks.gguf_export.merged=false",
    ),
    "callbacks without the usual ones": (
        "callbacks=plots",
        ["callbacks=[plots]: leaves out cosine, progress, watch, events, gguf_export, which are on by default; "
         "to keep them: callbacks=[default,plots]"],
        "callbacks=[]",
    ),
    "switches that are off": (
        "objective=distil objective.teacher=teacher.gguf objective.beta=0.3 objective.kind=reverse model=lab "
        "model.window_period=3 model.experts_used=1 model.experts_normalised=false",
        ["model.experts_used=1: has no effect with model.experts=0",
         "model.experts_normalised=false: has no effect with model.experts=0", "model.window_period=3: has no effect",
         "objective.beta=0.3: has no effect with objective.kind=reverse"],
        "objective=distil objective.teacher=teacher.gguf objective.beta=0.3 objective.kind=jsd model=lab",
    ),
    "RoPE in a model without it": (
        "model=lab model.positions=learned model.rope_base=500 model.rope_scale=2",
        ["model.rope_base=500.0: has no effect with model.positions=learned", "model.rope_scale=2.0: has no effect",
         "model=lab: stock llama.cpp has no"],
        "model=lab model.rope_base=500 model.rope_scale=2",
    ),
    "RoPE in a granite without it": (
        "model=granite model.rope=false model.rope_base=500",
        ["model.rope_base=500.0: has no effect with model.rope=false"],
        "model=granite model.rope_base=500",
    ),
    "only the targets of the data": (
        "objective=distil objective.teacher=teacher.gguf objective.hard=1 objective.beta=0.3",
        ["objective.beta=0.3: has no effect with objective.kind=forward", "objective.hard=1: the teacher has no"],
        "objective=distil objective.teacher=teacher.gguf objective.hard=0.99",
    ),
    "a margin of another kind": (
        "data=preference data.path=pairs.jsonl objective=preference objective.gamma=1",
        ["objective.gamma=1.0: has no effect with objective.kind=dpo"],
        "data=preference data.path=pairs.jsonl objective=preference objective.gamma=1 objective.kind=simpo",
    ),
    "rates for another optimiser": (
        "model.mup=true optim=sgd", ["model.mup=true: with optim=sgd the best lr"], "model.mup=true",
    ),
    "rates for muon": (
        "model.mup=true optim=muon", ["model.mup=true: with optim=muon the best lr"], "model.mup=true optim=adamw",
    ),
    "a schedule without the usual callbacks": (
        "callbacks=[linear]", ["callbacks=[linear]: leaves out progress, watch, events, gguf_export"],
        "callbacks=[default,linear] ~callbacks.cosine",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", IDLE)
def test_settings_without_effect_are_warned_about_and_others_are_not(list_warnings, case):
    idle, words, busy = IDLE[case]
    warnings = list_warnings(*idle.split())
    assert len(warnings) == len(words) and all(map(str.startswith, warnings, words)), warnings
    assert list_warnings(*busy.split()) == []


def test_a_warning_is_printed_logged_and_written_as_an_event(capsys):
    text = "callbacks.cosine.warmup=20: the run has 20 steps"
    assert main([f"plugins=[{MODULES[0]}]", *TEXT, "callbacks.cosine.warmup=20", "hydra.run.dir=run"]) == 0
    out, first = capsys.readouterr().out, "step  0/20"
    assert f"toyexp: warning: {text}" in out and out.index(text) < out.index(first)
    assert f"WARNING {text}" in Path("run/log.txt").read_text()
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert [e["text"].startswith(text) for e in events if e["kind"] == "warning"] == [True]


def test_default_runs_have_no_warnings(registry):
    for words in ([], ["recipe=warm"], ["model=gpt2"]):
        config = Request([], registry, MODULES).build_config(*words, "engine=noop", "data.max_mb=0.1")
        assert prepare(config).warnings == []


def test_parameter_groups_are_printed_before_the_run(registry):
    own = "optim.groups={*attn_q*:{frozen:true},blk.*:{lr:0.1,weight_decay:0}}"
    lines = introduction(prepare(Request([], registry, MODULES).build_config(*TEXT, "model.n_layers=1", own)))
    (frozen,), (rest,) = ([line for line in lines if word in line] for word in ("*attn_q*", "blk.*"))
    assert frozen == "group   *attn_q*: frozen=true; 1 tensor"
    assert re.fullmatch(r"group   blk\.\*: lr=0\.1, weight_decay=0; 8 tensors", rest), rest


def test_more_evaluation_images_than_held_out_is_a_warning(registry):
    pytest.importorskip("sklearn")
    words = ["data=digits", "model=vit", "recipe=vit_tiny", "engine=noop", "data.eval_images=360"]
    prepared = prepare(Request([], registry, MODULES).build_config(*words))
    assert prepared.warnings == ["data.eval_images=360: only 359 images are held out; each evaluation uses all"]
    planned = RunPreview(prepared.config.plain, prepared.dataset, prepared.batches, prepared.plan)
    assert list(replace(prepared.config.data, eval_images=359).warnings(planned)) == []


def test_engines_warn_about_their_settings_without_effect():
    frozen = PlanTensor("blk.0.attn_q.weight", (2, 2), FromGGUF("base.gguf", "blk.0.attn_q.weight"), False)
    bare, packed = (RunPreview({}, None, None, SimpleNamespace(tensors=ts)) for ts in ((), (frozen,)))
    for engine, planned, words in (
        (GGMLCPU(threads=1), bare, None),
        (TorchCPU(packed=True), bare, "engine.packed=true"),
        (TorchCUDA(packed=True), bare, "engine.packed=true"),
        (GGMLMetal(threads=2), bare, "engine.threads=2"),
        (GGMLMetal(threads=2, emulate=True), bare, None),
        (GGMLCUDA(tf32=True, emulate=True), bare, "engine.tf32=true"),
        (GGMLCUDA(tf32=True), bare, None),
        (GGMLVulkan(half=True, emulate=True), bare, "engine.half=true"),
        (GGMLVulkan(half=True), bare, None),
        (TorchCUDA(tf32=True, dtype="float64"), bare, "engine.tf32=true"),
        (TorchCUDA(tf32=True), packed, None),
        (TorchCUDA(bfloat16_attention=True, dtype="bfloat16"), bare, "engine.bfloat16_attention=true"),
        (TorchCUDA(bfloat16_attention=True), bare, None),
    ):
        assert [words in text for text in engine.warnings(planned)] == ([True] if words else []), engine


def test_threads_are_warned_about_if_the_engine_chosen_by_auto_has_no_such_setting(registry, monkeypatch):
    monkeypatch.setattr(registry.get("engine", "noop"), "priority", 1000, raising=False)
    words = [*(w for w in TEXT if w != "engine=noop"), "engine.threads=2"]
    warnings = prepare(Request([], registry, MODULES).build_config(*words)).warnings
    assert warnings == ["engine.threads=2: has no effect: engine=auto chose noop, which has no such setting"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("checkpoint_best=loss checkpoint_every=0", ["checkpoint_best=loss", "checkpoint_every=0"]),
        ("data=tokens data.path=ids.bin data.dtype=uint16", ["data.dtype=uint16", "TOYC", "int32"]),
    ],
)
def test_contradictory_settings_are_rejected(line, words, capsys):
    ids = np.arange(400, dtype="<i4") % 50
    Path("ids.bin").write_bytes(b"TOYC" + struct.pack("<III", 1, 50, 0) + ids.tobytes())
    common = [f"plugins=[{MODULES[0]}]", "engine=noop", "model.context=16", "hydra.run.dir=run"]
    assert main([*common, *line.split()]) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words) and len(err.splitlines()) == 1
    assert not Path("run").exists()


def test_a_single_value_for_a_list_setting_becomes_a_list(registry, capsys):
    words = [*TEXT, "recipe=lora", f"recipe.base={DONOR}", "data.tokenizer=auto", "recipe.targets=q"]
    config = Request([], registry, MODULES).build_config(*words)
    assert isinstance(config.recipe, Lora) and config.recipe.targets == ["q"]
    assert main([f"plugins={MODULES[0]}", *TEXT, "callbacks=plots", "hydra.run.dir=run"]) == 0
    assert sorted(p.name for p in Path("run").iterdir()) == ["checkpoints", "config.yaml", "log.txt", "plots",
                                                             "result.json", "run.lock", "written.json"]  # fmt: skip
    for line, form in (("callbacks=default,plots", "callbacks=[default,plots] is a list"),
                       ("recipe=lora recipe.targets=q,v", "recipe.targets=[q,v] is a list"),
                       ("plugins=a,b", "plugins=[a,b]")):  # fmt: skip
        assert main(line.split()) == 2
        assert form in capsys.readouterr().err


WITHOUT_BLOCKS = """
from dataclasses import dataclass, replace
from typing import ClassVar
from toyexp import TOKENS, Kind, Model, Normal, TensorSpec, hookimpl

@dataclass
class Flat(Model):
    "Two layers, no block."
    name: ClassVar[str] = "flat"
    reads: ClassVar[Kind] = TOKENS

    context: int = 8  # tokens
    vocab: int = 0  # rows of the embedding

    def check(self):
        pass

    def fit(self, dataset):
        return replace(self, vocab=dataset.vocab)

    def tensors(self):
        return [TensorSpec("token_embd.weight", (self.vocab, 4), Normal(0.1)),
                TensorSpec("up.weight", (4, 4), Normal(0.1))]

    def forward(self, ops, p, batch):
        x = ops.silu(ops.linear(ops.embed(p["token_embd.weight"], batch["tokens"]), p["up.weight"]))
        return ops.logits(x, p["token_embd.weight"])

@hookimpl
def register_models(register):
    register(Flat)
"""


@pytest.mark.parametrize("engine", ["cpu", "ggml"])
def test_recompute_without_blocks_is_warned_about_once_and_recorded(engine, capsys):
    Path("flat_model.py").write_text(WITHOUT_BLOCKS)
    usual = [*TEXT[:3], f"engine={engine}", "engine.recompute=true", "model.context=8", "steps=1", "eval_every=0",
             "callbacks=[events]"]  # fmt: skip
    for model, words, blocks in (("flat", ["plugins=[flat_model]"], 0), ("gpt2", ["model.d_model=16"], 2)):
        assert main([*usual, *words, f"model={model}", f"hydra.run.dir={model}"]) == 0
        told = "warning: engine.recompute=true: has no effect; model=flat has no ops.block\n"
        assert capsys.readouterr().out.count(told) == (not blocks)
        start, *events = map(json.loads, Path(model, "events.jsonl").read_text().splitlines())
        assert start["backend"]["recomputed_blocks"] == blocks
        assert [e["text"] in told for e in events if e["kind"] == "warning" and "recompute" in e["text"]] == (
            [] if blocks else [True]
        )
