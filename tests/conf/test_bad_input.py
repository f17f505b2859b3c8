"""Wrong input of a user ends with one or two plain lines and exit code 2, and leaves no files."""

import hashlib
import json
import os
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from toyexp.cli.bench_stepper import RUN_ONLY_KEYS
from toyexp.cli.commands import COMMANDS
from toyexp.cli.main import main
from toyexp.config.keys import Keys
from toyexp.config.mistakes import check_blanks
from toyexp.config.words import parse
from toyexp.plugins.discovery import load
from toyexp.training.checkpoint import MANIFEST, STATE
from toyexp.training.rundir import lock
from toyexp_ggml.engines import GGMLCUDA, GGMLGPU, GGMLVulkan

SMALL = ["data.tokenizer=byte", "data.max_mb=0.05", "steps=2"]
BOOK = ["data=text", "data.path=book.txt", "data.tokenizer=byte", "steps=2"]
# Words of libraries that mean nothing to a user.
JARGON = ("Traceback", "full_key", "object_type", "DictConfig", "ListConfig", "omegaconf", "Config group override",
          "NoneType", "Could not", "not Optional", "of type 'str'")  # fmt: skip


@pytest.fixture(autouse=True)
def _work_in_tmp_path(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 200)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def listing(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if "__pycache__" not in p.parts}


def assert_one_plain_error(err: str, *words: str) -> None:
    lines = err.splitlines()
    assert 1 <= len(lines) <= 2 and lines[0].startswith("toyexp: error: "), err
    for word in words:
        assert word in err, f"{word!r} is missing in: {err}"
    for word in JARGON:
        assert word not in err, f"{word!r} is no word for a newcomer: {err}"


@pytest.fixture
def run_rejected(tmp_path, capsys):
    """Return a function that runs a command line and checks that it is rejected with one plain error."""

    def run(argv: list[str], *words: str) -> str:
        before = listing(tmp_path)
        code = main(argv)
        err = capsys.readouterr().err
        assert_one_plain_error(err, *words)
        assert code == 2, err
        assert listing(tmp_path) == before
        return err

    return run


OWN_CHECK = """
from dataclasses import dataclass
from toyexp import UserError, hookimpl
from toyexp_optimisers.sgd import SGD

@dataclass
class Mine(SGD):
    '''Checks what is its own, and nothing else.'''
    name = "mine"
    pace: float = 1.0  # must be above 0

    def check(self):
        if self.pace <= 0:
            raise UserError(f"optim.pace={self.pace}: must be above 0")

@hookimpl
def register_optimisers(register):
    register(Mine)
"""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optim.pace=0", "optim.pace=0.0: must be above 0"),
        ("optim.grad_clip=-1", "optim.grad_clip=-1.0: must be at least 0"),
        ("optim.groups={blk.*: {lr: '0.1'}}", "lr='0.1': must be a finite number >= 0; it is a string"),
        ("optim.groups={blk.*: {lr: 1e300}}", "lr=1e+300: must be within float32's range"),
        ("optim.groups={blk.*: {lr: 0.1, frozen: true}}", "lr=0.1: has no effect with frozen=true; remove one"),
        ("optim.groups={blk.*: 3}", "optim.groups: blk.*: expected settings in braces"),
    ],
)
def test_common_optimiser_settings_are_checked_even_if_check_is_overridden(setting, words, run_rejected):
    Path("own_check.py").write_text(OWN_CHECK)
    run_rejected(["plugins=[own_check]", "optim=mine", setting, *SMALL], words)


# -- settings on the command line ----------------------------------------------------------------------------------

KEYS = [
    ("step=5", "unknown key step;", "did you mean steps?"),
    ("+step=5", "unknown key step;", "did you mean steps?"),
    ("banana=5", "unknown key banana", "batch_size", "seed"),
    ("d_model=32", "did you mean model.d_model?"),
    ("eval.every=5", "did you mean eval_every?"),
    ("train.steps=5", "did you mean steps?"),
    ("swep.jobs=2", "did you mean sweep.jobs?"),
    ("batch=4", "did you mean batch_size?"),
    ("pretrain=1", "unknown key pretrain; the keys are: "),  # does not suggest train_on
    ("warmup=10", "did you mean callbacks.cosine.warmup?"),
    ("modle.d_model=32", "did you mean model.d_model?"),
    ("model/d_model=32", "did you mean model.d_model?"),
    ("model.d_modle=32", "did you mean model.d_model?"),
    ("+model.d_modle=32", "did you mean model.d_model?"),
    ("model.banana=1", "unknown key model.banana", "model=llama has", "n_layers"),
    (
        "model=gpt2 model.n_kv_heads=2",
        "model.n_kv_heads",
        "model=gpt2",
        "it belongs to model=arcee or gemma or",
    ),
    ("model.d_model.x=1", "model.d_model holds one value"),
    ("data.path=book.txt", "unknown key data.path with data=stdlib", "text or tokens"),
    ("data.val_fracton=0.1", "did you mean data.val_fraction?"),
    ("+data.val_fracton=0.1", "did you mean data.val_fraction?"),
    ("recipe.donor=x.gguf", "recipe.donor with recipe=scratch", "recipe=warm"),
    ("recipe=warm recipe.lense=pca", "did you mean recipe.lens?"),
    ("recipe=warm +recipe.lense=pca", "did you mean recipe.lens?"),
    ("optim=adamw optim.momentum=0.9", "belongs to optim=muon or sgd", "choose that, or leave the key out"),
    ("optim.weight_dacay=0.1", "did you mean optim.weight_decay?"),
    ("+optim.weight_dacay=0.1", "did you mean optim.weight_decay?"),
    ("engine=cpu engine.thread=2", "did you mean engine.threads?"),
    ("engine=cpu +engine.thread=2", "did you mean engine.threads?"),
    ("engine.dtype=float64", "engine=auto", "engine=cpu"),
    ("+engine.dtype=float64", "engine=auto", "engine=cpu"),
    ("engine.threads=-1", "engine.threads=-1: must be from 0"),
    ("engine.thread=1", "did you mean engine.threads?"),
    ("callbacks.cosine.warmpu=3", "did you mean callbacks.cosine.warmup?"),
    ("+callbacks.cosine.warmpu=3", "did you mean callbacks.cosine.warmup?"),
    ("callbacks.cosin.warmup=3", "did you mean callbacks.cosine.warmup?"),
    ("callbacks.sample.every=5", "the run has no callback sample", "callbacks=[default,sample]"),
    ("+callbacks.sample.every=5", "the run has no callback sample", "callbacks=[default,sample]"),
    ("callbacks.cosine=5", "one by one", "callbacks=[default,cosine]"),
    ("+steps=5", "steps", "leave out '+'"),
    ("steps.x=5", "steps has no sub-keys"),
    ("model.name=gpt2", "choose the part instead: model=gpt2"),
    ("hydra.run.dri=x", "unknown key hydra.run.dri", "hydra.run.dir"),
    ("+model._target_=os.system", "unknown key model._target_"),
    ("+_target_=os.system", "unknown key _target_"),
    ("+callbacks.cosine._target_=os.system", "unknown key callbacks.cosine._target_"),
]

VALUES = [
    ("steps=abc", "steps=abc: must be a whole number"),
    ("steps==3", "'steps==3': write one = sign: steps=3"),
    ("steps=1.5", "steps=1.5: must be a whole number"),
    ("steps=null", "steps=null: cannot be null"),
    ("steps=[1]", "steps=[1]: must be a whole number"),
    ("lr=abc", "lr=abc: must be a number"),
    (f"lr=1{'0' * 400}", "0: is too large for a number"),
    ("recipe=lora recipe.targets={q:1}", "recipe.targets={q:1}: must be a list"),
    ("recipe=lora recipe.targets=[q,null]", "recipe.targets[1]: cannot be null"),
    ("model.tied=maybe", "model.tied=maybe: must be true or false"),
    ("model.d_model=64.5", "model.d_model=64.5: must be a whole number"),
    ("callbacks.cosine.warmup=x", "callbacks.cosine.warmup=x: must be a number"),
    ("name=[a]", "name=[a]: must be a single text"),
    ("name=${nope}", "name", "${nope}, which does not exist"),
    ("name=${name}", "name", "refers to itself"),
    ("steps=0", "steps=0", "from 1"),
    ("steps=-1", "steps=-1", "from 1"),
    ("steps=99999999999999999999", "must be a whole number from 1 to 2^63 - 1"),
    ("lr=-1", "lr=-1.0", ">= 0"),
    ("lr=nan", "lr=nan: must be a finite number"),
    ("lr=inf", "lr=inf: must be a finite number"),
    ("optim.grad_clip=inf", "optim.grad_clip=inf: must be a finite number"),
    ("model.rope_base=inf", "model.rope_base=inf: must be a finite number"),
    ("data.max_mb=inf", "data.max_mb=inf: must be a finite number"),
    ("lr=1e-400", "lr=1e-400: too close to 0"),
    ("optim.eps=0e-5", "optim.eps=0.0"),
    ("model.tied=2", "model.tied=2: must be true or false"),
    ("batch_size=0", "batch_size=0", "from 1"),
    ("seed=-1", "seed=-1", "from 0"),
    ("eval_every=-1", "eval_every=-1", "from 0"),
    ("name=a/b", "name='a/b'", "slash"),
    (f"name={101 * 'a'}", f"name='{57 * 'a'}...': must be 1 to 100 characters"),
    ("name=.hidden", "name='.hidden'", "dot"),
    ("name=''", "name=''"),
    ("model.n_heads=0", "model.n_heads=0", "above 0"),
    ("model.n_heads=5", "model.n_heads=5 does not divide model.d_model=64"),
    ("model.n_kv_heads=3", "model.n_kv_heads=3 does not divide model.n_heads=4"),
    ("model.d_model=12", "heads of 3", "even"),
    ("optim.groups.output.lr=1", "optim.groups.output.lr=1", "in braces: optim.groups={blk.*: {lr: 0.001}}"),
    ("optim.beta1=1", "optim.beta1=1.0", "below 1"),
    ("optim.beta2=2", "optim.beta2=2.0", "below 1"),
    ("optim.eps=0", "optim.eps=0.0: must be above 0"),
    ("optim.mode=foo", "optim.mode=foo", "from_scratch", "lora"),
    ("optim.accumulate=3", "optim.accumulate=3: must divide batch_size=8"),
    ("optim.grad_clip=-1", "optim.grad_clip=-1.0", "at least 0"),
    ("optim.weight_decay=nan", "optim.weight_decay=nan: must be a finite number"),
    ("callbacks=[default,linear]", "cosine and linear both set the learning rate", "'~callbacks.cosine'"),
    ("callbacks.gguf_export.type=q8", "callbacks.gguf_export.type=q8", "q8_0"),
    ("callbacks.gguf_export.every=-1", "callbacks.gguf_export.every=-1"),
    ("callbacks=[default,sample] callbacks.sample.every=-1", "callbacks.sample", "every"),
    ("callbacks.cosine.floor=nan", "callbacks.cosine.floor=nan"),
    ("engine=cpu engine.threads=-1", "engine.threads=-1"),
    ("engine=cpu engine.dtype=float16", "engine.dtype=float16", "bfloat16"),
]

# An unset shell variable leaves an empty value, which must not silently become the default.
EMPTY = [
    *((f"{key}=", f"{key}=: is empty", "leave it out") for key in (
        "steps", "name", "checkpoint_best", "optim.mode", "hydra.run.dir", "sweep.resume", "data.tokenizer",
    )),
    ("recipe=warm recipe.donor=", "recipe.donor=: is empty", "leave it out"),
    ("recipe=warm recipe.donor=''", "recipe.donor='': is empty"),
    ("recipe=lora recipe.base=", "recipe.base=: is empty"),
    ("recipe=lora recipe.base=''", "add recipe.base=model.gguf"),
    ("data=text data.path=", "data.path=: is empty"),
    ("callbacks=[sample] callbacks.sample.prompt=", "callbacks.sample.prompt=: is empty", "sample.prompt=''"),
    ("banana=", "unknown key banana"),
    ("recipe=", "recipe=: must be a name"),
    ("plugins=", "plugins=: takes names"),
    ("--config-path=", "--config-path '': is empty"),
    ("-m seed=1,2 hydra.sweep.subdir=", "hydra.sweep.subdir=: is empty"),
]  # fmt: skip

# Values outside the range of float32 or of a 32-bit GGUF key.
BOUNDS = [
    ("optim=sgd optim.momentum=0 optim.nesterov=true", "optim.nesterov=true", "needs optim.momentum"),
    ("optim=adafactor optim.clip=0", "optim.clip=0", "above 0"),
    ("steps=1e9", "steps=1e9: must be a whole number", "steps=1000000000"),
    ("batch_size=1e12", "batch_size=1e12: must be a whole number", "batch_size=1000000000000"),
    ("batch_size=1000000000000", "1000000000000 rows"),
    ("seed=99999999999999999999", "from 0 to 2^63 - 1"),
    ("lr=1e300", "lr=1e+300", "3.4e+38"),
    ("optim.eps=1e-60", "optim.eps=1e-60", "1.18e-38"),
    ("optim.weight_decay=1e39", "optim.weight_decay=1e+39", "3.4e+38"),
    ("optim.grad_clip=1e39", "optim.grad_clip=1e+39", "3.4e+38"),
    ("model.rope_base=1e308", "model.rope_base=1e+308", "3.4e+38"),
    ("model.rope_base=1e-39", "model.rope_base=1e-39", "1.18e-38"),
    ("model.rope_base=1e-30", "model.rope_base=1e-30", "radians"),
    ("model.rope_scale=1e-30", "model.rope_scale=1e-30", "radians"),
    ("model.rope_scale=1e300", "model.rope_scale=1e+300", "3.4e+38"),
    ("model.rope_factors=[1,1,1,1,1,1,1,1e-20]", "radians"),
    ("model.rope_factors=[1,1,1,1,1,1,1,1e200]", "model.rope_factors=1e+200", "3.4e+38"),
    ("model.norm_eps=1e-50", "model.norm_eps=1e-50", "at least 1e-24 and at most 1"),
    ("model.norm_eps=1e30", "model.norm_eps=1e+30", "at most 1"),
    ("model=gpt2 model.norm_eps=1e-30", "model.norm_eps=1e-30", "at least 1e-24"),
    ("model.d_model=4294967296", "model.d_model=4294967296", "2147483647"),
    ("model.d_model=1000000000", "too little memory"),
    ("model.d_ff=1000000000000", "model.d_ff=1000000000000", "2147483647"),
    ("model.head_dim=1000000000000", "model.head_dim=1000000000000", "2147483647"),
    ("model.n_layers=1000000", "model.n_layers=1000000", "10000"),
    ("model.context=1000000000000", "model.context=1000000000000", "2147483647"),
    ("model.vocab=1000000000000", "model.vocab=1000000000000", "2147483647"),
    ("model.vocab=1000000000", "too little memory"),
    ("engine=ggml engine.threads=100000", "engine.threads=100000", "512"),
    ("engine=cpu engine.threads=4000", "engine.threads=4000", "512"),
    ("engine=metal engine.emulate=true engine.threads=513", "engine.threads=513", "512"),
    ("engine.threads=100000", "engine.threads=100000", "512"),
]

CHOICES = [
    ("recipe=vit_tiny", "model=llama reads tokens", "try: toyexp recipe=vit_tiny model=vit data=digits"),
    ("data=stdlib recipe=vit_tiny model=vit", "gives tokens", "try: toyexp recipe=scratch model=llama data=stdlib"),
    ("recipe=warm model=vit", "model=vit reads images", "try: toyexp recipe=warm model=llama data=stdlib"),
    (
        "recipe=warm model=vit plugins=[toyexp.testing.null]",
        "try: toyexp recipe=warm model=llama data=stdlib 'plugins=[toyexp.testing.null]'",
    ),
    ("recipe=wram", "recipe=wram", "did you mean warm?"),
    ("recipe=banana", "unknown name", "scratch, "),
    ("engine=metl", "engine=metl: unknown name"),
    ("model=lama", "did you mean llama?"),
    ("model=transformer", "model=transformer: unknown name", "add 'plugins=[my_module]'"),
    ("model=", "model=: must be a name", "llama"),
    ("model=null", "model=null: must be a name", "llama"),
    ("model=5", "model=5: must be a name", "llama"),
    ("model={d_model:32}", "must be a name", "llama"),
    ("data=txt", "did you mean text?"),
    ("optim=adam", "did you mean adamw?"),
    ("optim=sdg", "did you mean sgd?"),
    ("callbacks=[shampoo]", "callbacks=shampoo", "choose one of: "),  # does not suggest sample
    ("objective=dpo", "did you mean objective=preference objective.kind=dpo?"),
    ("objective=preference objective.beta=0", "objective.beta=0.0: must be at least 0.00001 and at most 1000"),
    ("objective=distil objective.teacher=a objective.beta=1", "objective.beta=1.0: must be above 0 and below 1"),
    ("objective=preference objective.gamma=-1", "objective.gamma=-1.0: must be at least 0 and at most 1000"),
    ("objective=distil objective.teacher=a objective.temperature=2e3", "must be at least 0.001 and at most 1000"),
    ("objective=contrastive objective.temperature=1e30", "temperature=1e+30: must be at least 0.001 and at most 1000"),
    ("objective.class_weights=[1,2]", "must be a mapping in braces: objective.class_weights={0: 2.5}"),
    ("objective.class_weights={a:2}", "keys must be whole numbers, got a"),
    ("objective.class_weights={0:nan}", "must be a finite number at least 0"),
    ("experiment=smoek", "did you mean smoke?"),
    ("experiment=mine/config.yaml", "type: --config-dir DIR experiment=NAME"),
    ("+experiment=smoke", "leave out '+': experiment=smoke"),
    ("++model=llama", "leave out '+': model=llama"),
    ("callbacks=[cosinus]", "did you mean cosine?"),
    ("callbacks=[default,banana]", "callbacks=banana", "early_stop"),
    ("callbacks=[[default]]", "must be a name"),
    ("callbacks=null", "callbacks=null: must be a name"),
    ("model=[llama,gpt2]", "must be one name", "-m model=llama,gpt2"),
    ("recipe=[scratch]", "must be one name, without brackets"),
    ("steps=1,2", "steps=1,2: has several values; add -m"),
    ("model=llama,gpt2", "several values; add -m"),
    ("seed=range(1,3)", "several values; add -m"),
    ("model@x=llama", "write model=llama"),
    ("~callbacks.cosinus", "did you mean cosine?"),
    ("~callbacks.sample", "the run has no such callback"),
    ("~model", "only callbacks can be removed"),
    ("~steps", "only callbacks can be removed"),
    ("hydra/launcher=joblib", "sweep.launcher=processes", "add -m"),
]

SYNTAX = [
    ("=5", "'=5'", "a key before '='", "steps=100"),
    ("steps", "'steps' is neither a command nor a setting", "did you mean steps=...?"),
    ("steps:5", "'steps:5' is neither a command nor a setting", "did you mean steps=5?"),
    ("lr = 0.1", "did you mean lr=0.1?"),
    ("lr =0.1", "did you mean lr=0.1?"),
    ("lr= 0.1", "did you mean lr=0.1?"),
    ("lr 0.1", "did you mean lr=0.1?"),
    ("lr:\t0.1", "did you mean lr=0.1?"),
    ("lr steps=5", "did you mean lr=...?"),
    ("banana", "is neither a command nor a setting", "doctor", "key=value"),
    ("steps=[1", "missing closing bracket"),
    ("name='a", "missing closing quote"),
    ('"steps=5"', "only quote the value"),
    ("lr=1e-3,,1e-2", "empty value next to a comma; did you mean lr=1e-3,1e-2"),
    ("lr=range(1,2", "missing closing parenthesis: lr=range(1,2)"),
    ("lr=logspace(-4,-1,4)", "for several values use interval(0.1, 0.5)"),
    ("steps=5=6", "cannot be parsed", "quote values"),
    ("plugin", "did you mean plugins?"),
    ("doctr", "did you mean doctor?"),
    ("doctor", "the command must come first: toyexp doctor"),
    ("callbacks=[early_stop,patience=3]", "set it separately: callbacks=[early_stop] callbacks.early_stop.patience=3"),
    ("callbacks=[default,watch,watch.every=2]", "separately: callbacks=[default,watch] callbacks.watch.every=2"),
    ("engine=ggml,ggml:products=ggml", "settings of the engine are written separately: engine=ggml"),
    ("engine=ggml:recompute=true", "are written separately: engine=ggml engine.recompute=true"),
    ("engine=ggml:dtype=float16", "engine=ggml has no setting dtype; choose one of: products, recompute"),
    ("model.path=my_net.py:Net", "expected a module name: model.path=my_net:Net"),
    ("engine=ggml:thread=2", "engine=ggml has no setting thread; did you mean threads?"),
    ("engine=ggml:products=ggml:threads=2", "engine=ggml engine.products=ggml engine.threads=2"),
    ("train", "'train' is neither a command nor a setting", "type only settings", "toyexp recipe=warm"),
    ("--steps=5", "settings have no dashes: steps=5"),
    ("--lr 0.1", "--lr: settings have no dashes: lr=0.1"),
    ("--batch-size 4", "settings have no dashes: batch_size=4"),
    ("--data.max_mb 4", "settings have no dashes: data.max_mb=4"),
    ("--learning_rate=0.1", "settings have no dashes: lr=0.1"),
    ("--num-train-epochs 3", "settings have no dashes: epochs=3"),
    ("--bananas", "unknown option", "--cfg", "--color", "--help"),
    ("dry_run=true", "unknown key dry_run; did you mean --dry-run (an option, without =true)?"),
    ("optim.lr=0.1", "unknown key optim.lr; did you mean lr?"),
    ("lerning_rate=0.1", "unknown key lerning_rate; did you mean lr?"),
    ("lr=0,001", "has several values; for a decimal number type lr=0.001; add -m"),
    ("data=a/book.txt", "for this file: data=text data.path=a/book.txt"),
    (
        "recipe=lora recipe.base=org/name",
        "org/name: not found here and in the Hugging Face cache; to get it: hf download org/name; ",
    ),
    ("--multirum", "did you mean --multirun?"),
]


@pytest.mark.parametrize(
    ("line", "words"),
    [(line, words) for line, *words in KEYS + VALUES + EMPTY + BOUNDS + CHOICES + SYNTAX],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_setting_is_one_plain_error(run_rejected, line, words):
    run_rejected([*SMALL, *line.split(" ")], *words)


@pytest.mark.parametrize("text", ["def ", " def"])
def test_a_text_with_significant_blanks_is_rejected_with_the_quoted_form(text, run_rejected):
    setting = f"callbacks.sample.prompt={text}"
    told = (setting, "spaces at the ends are dropped", f"\"callbacks.sample.prompt='{text}'\"")
    run_rejected([*SMALL, "callbacks=[default,sample]", setting], *told)


@pytest.mark.parametrize(
    ("values", "kept"), [("def ,class", "'def ',class"), (" a,b,'c '", "' a',b,'c '"), ("a, b , c", "a,' b ', c")]
)
def test_swept_texts_with_significant_blanks_are_rejected_with_the_quoted_form(values, kept, run_rejected):
    usual, key = ["-m", *SMALL, "callbacks=[default,sample]", "eval_every=0"], "callbacks.sample.prompt"
    run_rejected([*usual, f"{key}={values}"], f"{key}={values}", "are dropped", f'"{key}={kept}"')
    check_blanks(parse([f"{key}={kept}"])[0], Keys.from_registry(load()))  # blanks after a comma are allowed


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("lr = 0.1", ["no spaces are allowed around =: lr=0.1"]),
        ("lr=1e-3 steps=3", ["2 settings in one pair of quotes", "lr=1e-3 steps=3"]),
        ("plugins=[a],[b]", ["plugins=[a,b]"]),
        ("--trainer.max_epochs=3", ["epochs=3"]),
        ("--Trainer.Max_Epochs=3", ["epochs=3"]),
        ("--learning_rate=3", ["lr=3"]),
        ("learning_rate=3", ["did you mean lr?"]),
        ("objective.loss_type=sigmoid", ["did you mean objective.kind=dpo?"]),
        ("objective.loss_type=ipo", ["did you mean objective.kind?"]),
        ("max_iters=3", ["did you mean steps?"]),
        ("bf16=True", ["did you mean engine.dtype=bfloat16?"]),
        ("bf16=False", ["did you mean engine.dtype=float32 (the default: leave it out)?"]),
        ("mixed_precision=no", ["did you mean engine.dtype=float32 (the default: leave it out)?"]),
        ("fp16=True", ["did you mean engine.dtype=bfloat16 (float16 is not supported)?"]),
        ("torch_dtype=float16", ["did you mean engine.dtype=bfloat16 (float16 is not supported)?"]),
        ('precision="bf16-mixed"', ["did you mean engine.dtype=bfloat16?"]),
        ("dtype=bfloat16", ["did you mean engine.dtype?"]),
        ("assistant_only_loss=False", ["did you mean data.train_on=all?"]),
        ("assistant_only_loss=True", ["did you mean data.train_on=answers (the default: leave it out)?"]),
        ("train_on_inputs=false", ["did you mean data.train_on=answers (the default: leave it out)?"]),
        ("+train_on_inputs=false", ["did you mean data.train_on=answers (the default: leave it out)?"]),
        ("data.train_on_inputs=true", ["did you mean data.train_on=all?"]),
        ("load_best_model_at_end=False", ["did you mean checkpoint_best=null (the default: leave it out)?"]),
        ("report_to=none", ["callbacks=[default] (no experiment tracker is on by default: leave it out)?"]),
        ("report_to=tensorboard", ["did you mean callbacks=[default,tensorboard]?"]),
        ("report_to=[wandb]", ["did you mean callbacks=[default,wandb]?"]),
        ("--report-to none", ["callbacks=[default] (no experiment tracker is on by default: leave it out)"]),
        ("init_from=resume", ["did you mean resume=auto (the newest run of this name)?"]),
        ("init_from=model.gguf", ["did you mean recipe.base?"]),
        ("patience=3", ["did you mean callbacks.early_stop.patience?"]),
        ("eta_min=1e-5", ["did you mean callbacks.cosine.floor=... (a fraction of lr)?"]),
        ("layers=2", ["did you mean model.n_layers?"]),
        ("rank=4", ["did you mean recipe.rank?"]),
        ("targets=[q]", ["did you mean recipe.targets?"]),
        ("base=model.gguf", ["did you mean recipe.base?"]),
        ("path=book.txt", ["did you mean data.path?"]),
        ("gpus=2", ["did you mean engine.devices?"]),
        ("LR=0.1", ["did you mean lr?"]),
        ("optim=AdamW", ["did you mean adamw?"]),
        ("--optim.bananas=3", ["have no dashes: optim.bananas=3"]),
    ],
)
def test_syntax_of_other_tools_is_rejected_with_the_equivalent(run_rejected, word, words):
    run_rejected([*SMALL, *(word.split() if word.startswith("--") else [word])], *words)


@pytest.mark.parametrize("name", ["blk.[0-3].*", "'blk.[0-3].*'", '"blk.[0-3].*"'])
def test_a_pattern_with_brackets_is_rejected_with_the_valid_form(run_rejected, name):
    err = run_rejected([*SMALL, f"optim.groups={{{name}: {{lr: 0.1}}}}"], "a backslash")
    (told,) = re.findall("backslash: '(.*)'", err)
    assert parse([told])[0].value() == {"blk.[0-3].*": {"lr": 0.1}}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("doctor now", ["toyexp doctor --numerics engine=now"]),
        ("doctor --graph engine=nope", ["unknown name"]),
        ("plugins warmm", ["did you mean warm?"]),
        ("plugins imagenet", ["plugins imagenet: unknown name; list all names: toyexp plugins; if it is in"]),
        ("plugins warm scratch", ["takes either one name or --matrix"]),
        ("help dta", ["help dta: unknown page", "did you mean data?"]),
        ("help guides/compare", ["did you mean compare?"]),
        ("help guides/compar.md", ["did you mean compare?"]),
        ("help plugins/optimizer", ["did you mean plugins/optimiser?"]),
        ("help zzzz", ["unknown page; choose one of: after, "]),
        ("help export", ["is a command; see toyexp export --help"]),
        ("help zzzz runs", ["help zzzz runs: unknown page"]),
        ("plugins --matrx", ["did you mean --matrix?"]),
        ("plugins lr=1", ["plugins lr=1: is a setting of a run"]),
        ("plugins plugins=[a-b]", ["takes names of Python modules"]),
        ("doctor --graph lr=1", ["lr=1: has no effect in doctor --graph"]),
        ("doctor --graph steps=5", ["steps=5: has no effect"]),
        ("doctor --numerics lr=1", ["doctor --numerics lr=1"]),
        ("bench eval_every=1", ["eval_every=1: has no effect in bench"]),
        ("bench callbacks=[default,plots]", ["has no effect in bench"]),
        ("bench sweep.jobs=1", ["sweep.jobs=1: has no effect"]),
        ("parity hydra.run.dir=x", ["hydra.run.dir=x: has no effect in parity"]),
        ("parity hydra/launcher=basic", ["hydra/launcher=basic: has no effect in parity; leave it out"]),
        ("parity checkpoint_every=5", ["checkpoint_every=5: has no effect"]),
        ("parity callbacks.gguf_export.type=q8_0", ["callbacks.gguf_export.type=q8_0", "learning rate"]),
        ("block_size=64", ["unknown key block_size; did you mean model.context?"]),
        (
            "--gradient-accumulation-steps 4",
            ["settings have no dashes: optim.accumulate=... (number of micro"],
        ),
        *[
            (f"{command} ", [f"{command.split()[0]} '': is empty (an unset shell variable?)"])
            for command in (
                "models",
                "plugins",
                "doctor",
                "predict",
                "parity",
                "help",
                "export",
                "new model",
                "merge x",
            )
        ],
        ("merge a b --out c --out d", ["--out d: was given already, as c; leave one of them out"]),
        ("export m.gguf --type q8_0 --type=f16", ["--type f16: was given already, as q8_0"]),
        ("recipe.r=8", ["unknown key recipe.r; did you mean recipe.rank?"]),
        ("recipe.lora_alpha=16", ["did you mean recipe.alpha?"]),
        ("load_in_4bit=true", ["recipe.base=... (a quantised GGUF; to make one: toyexp export"]),
        ("packing=true", ["did you mean data.pack?"]),
        ("bf16=true", ["did you mean engine.dtype=bfloat16?"]),
        ("optim=adamw_torch", ["did you mean adamw?"]),
        ("callbacks=[default,EarlyStopping]", ["did you mean early_stop?"]),
        ("model=org/Llama-3.2-1B", ["must be an architecture", "recipe.base=FILE.gguf"]),
        ("generate m.gguf -ngl 99", ["-ngl: unknown option; use --engine ggml_cuda"]),
        ("generate m.gguf -c 2048", ["the model's own context"]),
        ("epochs=2 steps=5", ["epochs=2: sets the number of steps; leave steps=5 out"]),
        ("epochs=0", ["epochs=0.0: must be above 0"]),
        ("callbacks.cosine.warmup=2.5", ["warmup=2.5: must be a whole number of steps, or a fraction"]),
        ("-m lr=1,2 epochs=2 sweep.search=grid sweep.prune=median", ["epochs=2: sweep.prune=median", "steps=..."]),
        ("trainer.precision=bf16", ["did you mean engine.dtype=bfloat16?"]),
        ("optim.warmup_steps=10", ["unknown key optim.warmup_steps"]),
        ("parity --lr 1e-3", ["parity --lr: settings have no dashes: lr=1e-3"]),
        ("parity --epochs=3", ["parity --epochs=3: unknown option"]),
        ("bench --batch-size 4", ["bench --batch-size: settings have no dashes: batch_size=4"]),
        ("bench --epochs 3", ["bench --epochs: unknown option", "--rounds"]),  # does not suggest steps=3
        ("lr=3e-4,", ["'lr=3e-4,': empty value next to a comma; did you mean lr=3e-4"]),
        ("-m lr=3e-4,1e-3,", ["did you mean lr=3e-4,1e-3"]),
        ("parity --csv", ["parity --csv: unknown option"]),
        ("describe book.txt engine=cpu", ["describe engine=cpu: is a setting of a run", "plugins=[...]"]),
        ("models engine=cpu", ["models engine=cpu: is a setting of a run"]),
        ("export book.txt --type f32 lr=1", ["export lr=1: unknown setting of --type f32; choose one of: type"]),
        ("generate book.txt engine=ggml", ["generate engine=ggml: is an option here; type --engine ggml"]),
        ("predict run engine=cpu", ["predict engine=cpu: is an option here; type --engine cpu"]),
        ("generate book.txt --prompt a steps=5", ["generate steps=5: is a setting of a run"]),
        ("generate book.txt --prompt a plugins=[a-b]", ["takes names of Python modules"]),
        ("--cfg", ["--cfg needs a value: job"]),
        ("--cfg banana", ["--cfg banana", "job"]),
        ("--cfg job steps=abc", ["steps=abc: must be a whole number"]),
        ("--cfg job recipe=wram", ["did you mean warm?"]),
        ("--cfg job --package modle", ["did you mean model?"]),
        ("--resolve", ["only has an effect with --cfg"]),
        ("--info defaults recipe=wram", ["did you mean warm?"]),
        ("--cfg job --info all", ["--cfg --info: only one of these is allowed"]),
        ("--cfg job -m seed=1,2", ["--cfg", "leave out -m"]),
        ("--cfg job resume=outputs/x", ["--cfg", "resume=outputs/x", "outputs/x/config.yaml"]),
        ("--config-name a --config-name b", ["--config-name b", "given already, as a"]),
        ("resume=x --config-name config", ["--config-name", "resume=x", "leave --config-name out"]),
        ("hydra.sweep.dir=x", ["hydra.sweep.dir=x", "add -m"]),
        ("-m seed=1,2 hydra.run.dir=x", ["hydra.run.dir=x", "hydra.sweep.dir=..."]),
        ("hydra.verbose=true", ["unknown key hydra.verbose", "hydra.run.dir"]),
        ("hydra/job_logging=stdout", ["unknown key hydra/job_logging"]),
        ("-m seed=1,2 sweep.submitit.gpus=1", ["sweep.submitit.gpus=1: only has an effect"]),
        ("--config-path", ["--config-path needs a value, such as --config-path my_directory"]),
        ("--config-path nowhere", ["--config-path nowhere: not found"]),
        ("--config-dir nowhere", ["--config-dir nowhere: not found"]),
        ("--config-name confg", ["did you mean config?"]),
        ("completion", ["needs the name of one shell", "bash", "fish", "zsh"]),
        ("completion bahs", ["completion bahs", "did you mean bash?"]),
        ("-sc install=powershell", ["powershell", "bash", "zsh"]),
        ("-m lr=interval(0,1)", ["lr=interval(0,1)", "range"]),
        ("-m seed=glob(*)", ["seed=glob(*)", "seed=a,b"]),
        ("-m seed=range(0,1,0)", ["seed=range(0,1,0)", "a step other than 0"]),
        ("-m lr=range(0.0,1.0,0.0)", ["lr=range(0.0,1.0,0.0)", "a step other than 0"]),
        ("-m seed=range(1,0)", ["seed=range(1,0): has no values"]),
        ("-m seed=range(0,9999999999)", ["seed=range(0,9999999999): a sweep has at most 100000 jobs"]),
        ("-m seed=range(0,1000) lr=range(1,1000)", ["999000 combinations", "at most 100000 jobs"]),
        ("-m seed=choice()", ["seed=choice()", "has no value"]),
        ("-m seed=0,1,0", ["seed=0,1,0: lists 0 twice"]),
        ("-m model=llama,llama", ["model=llama,llama: lists llama twice"]),
        ("resume=a resume=b", ["resume=b", "contradicts resume=a"]),
        ("-m seed=1,2 optim.beta1=2", ["optim.beta1=2.0: must be at least 0"]),
        ("-m seed=1,2 stesp=5", ["unknown key stesp;", "did you mean steps?"]),
        ("-m hydra/launcher=ray_aws", ["sweep.launcher=serial, processes, stacked, submitit, ray"]),
        ("-m hydra.sweeper.max_batch_size=5", ["starts the jobs of a sweep itself"]),
        ("-m seed=1,2 sweep.jbos=2", ["did you mean sweep.jobs?"]),
        ("-m seed=1,2 sweep.timeout_min=5", ["did you mean sweep.submitit.timeout_min?"]),
        ("-m seed=1,2 sweep=joblib", ["sweep=joblib: set its keys one by one"]),
        ("-m seed=1,2 sweep.jobs=1,2", ["sweep.jobs=1,2: takes one value"]),
        ("-m seed=1,2 sweep.jobs=x", ["sweep.jobs=x: must be a whole number"]),
        ("-m seed=1,2 sweep.jobs=-1", ["sweep.jobs=-1: must be at least 0"]),
        ("-m seed=1,2 sweep.jobs=2", ["sweep.launcher=processes"]),
        ("-m seed=1,2 sweep.launcher=proceses", ["did you mean processes?"]),
        ("-m seed=1,2 sweep.launcher=processes sweep.isolate=false", ["not with sweep.launcher=processes"]),
        (
            "-m seed=1,2 sweep.launcher=submitit sweep.submitit.gpus=-1",
            ["sweep.submitit.gpus=-1: must be at least 0"],
        ),
        ("-m seed=1,2 sweep.retry=true", ["sweep.retry=true: only has an effect with sweep.resume=DIR"]),
        ("-m seed=1,2 resume=auto", ["to resume a sweep, use sweep.resume=DIR"]),
        ("sweep.jobs=2", ["sweep.jobs=2: applies to sweeps; add -m"]),
        ("jobs=2", ["did you mean sweep.jobs?"]),
        ("sweep.resume=nowhere", ["sweep.resume=nowhere: not found"]),
        ("sweep.resume=.", ["holds no sweep"]),
        ("sweep.resume=book.txt", ["holds no sweep"]),
        ("resume=nowhere", ["resume=nowhere: not found"]),
        ("resume=book.txt", ["resume=book.txt: is not a run directory"]),
        ("resume=", ["resume=: needs the directory of a run, or auto"]),
        ("-m recipe=wram seed=1,2", ["did you mean warm?"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_command_or_flag_is_one_plain_error(run_rejected, line, words, monkeypatch):
    monkeypatch.delenv("COMP_LINE", raising=False)
    run_rejected(line.split(" "), *words)


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [*COMMANDS])
def test_every_command_prints_its_usage(command, flag, capsys):
    assert main([command, flag]) == 0
    out, err = capsys.readouterr()
    assert ("toyexp" if command == "help" else f"usage: toyexp {command}") in out and not err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("engine=cpu", ["engine=cpu: parity needs two or more"]),
        ("engine=", ["engine=: must be a name"]),
        ("engine=ggml,ggml", ["names an engine twice"]),
        ("engine=ggml,gmgl", ["did you mean ggml?"]),
        ("engine=ggml,ggml:productss=1", ["did you mean engine.products?"]),
        ("engine=ggml,ggml:products", ["expected ggml:key=value"]),
        ("engine=ggml,cpu engine=cpu", ["one list"]),
        ("ggml", ["parity ggml: expected key=value"]),
        ("stesp=5", ["did you mean steps?"]),
        ("seed=1,2", ["seed=1,2: parity uses one experiment"]),
        ("lr=[1", ["missing closing bracket"]),
        ("-m seed=1", ["parity -m: unknown option", "--gradient"]),
        ("--los 1", ["did you mean --loss?"]),
        ("--loss", ["--loss needs a value, such as --loss 1e-3"]),
        ("--loss x", ["--loss x: must be a number"]),
        ("--gradient=-1", ["--gradient -1: must be a number from 0"]),
        ("--weights nan", ["--weights nan: must be a number"]),
        ("--json=2", ["--json takes no value"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_argument_of_parity_is_one_plain_error(run_rejected, line, words):
    run_rejected(["parity", *SMALL, *line.split(" ")], *words)


@pytest.mark.skipif(platform.system() == "Darwin", reason="Metal may be here")
def test_parity_on_an_unavailable_engine_says_why(run_rejected):
    run_rejected(["parity", *SMALL, "engine=ggml,metal"], "engine=metal", "macOS")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hydra.run.dir=''", ["hydra.run.dir=: is empty; it must be a directory"]),
        ("hydra.run.dir=${nope}", ["hydra.run.dir", "${nope}, which does not exist"]),
        ("hydra.run.dir=/dev/null/x", ["/dev/null/x", "cannot be written", "hydra.run.dir=..."]),
        ("engine=ggml batch_size=200000", ["12800000 positions times 257 classes", "2^31 - 1", "batch_size"]),
        ("engine=metal engine.emulate=true batch_size=200000", ["engine=metal", "2^31 - 1 logits"]),
        ("engine=ggml model.n_layers=80", ["engine=ggml", "600", "fewer layers"]),
        ("callbacks=[default,quality_gate] eval_every=0", ["callbacks.quality_gate", "eval_every"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_error_that_depends_on_the_data_is_one_plain_error(run_rejected, line, words):
    run_rejected([*BOOK, *line.split(" ")], *words)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ('hydra.run.dir="a\nb"', "hydra.run.dir=a\\nb: contains the invisible character '\\n'"),
        ("name=a\u202eb", "name=a\\u202eb: contains the invisible character '\\u202e'"),
        ("name=a\udc80b", "name=a\\udc80b: is not valid UTF-8"),
        ("data.path=b\udcffk.txt", "data.path=b\\udcffk.txt: is not valid UTF-8"),
    ],
)
def test_names_that_are_not_valid_utf8_are_one_plain_error(run_rejected, word, message):
    Path("b\udcffk.txt").write_text("text " * 1000)
    run_rejected([*BOOK, word], message)


def test_a_locale_without_utf8_is_named(run_rejected, monkeypatch):
    monkeypatch.setattr("toyexp.training.settings.sys", SimpleNamespace(getfilesystemencoding=lambda: "ascii"))
    run_rejected([*BOOK, "name=\udcc3\udca9"], "is not valid ASCII; set LC_ALL=C.UTF-8")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("data=digits", "recipe=vit_tiny model=vit data=digits"),
        ("data.path=. data=images", "recipe=vit_tiny model=vit data=images data.path=."),
        ("data=digits recipe=scratch", "recipe=scratch model=vit data=digits"),
        ("data=digits recipe=vit_tiny model=small", "recipe=vit_tiny model=vit data=digits"),
        ("data=digits recipe=warm model=vit", "recipe=vit_tiny model=vit data=digits"),
        ("data=text data.path=book.txt recipe=vit_tiny model=gpt2", "recipe=scratch model=gpt2 data=text data.path=b"),
    ],
)
def test_a_suggested_command_keeps_the_data_of_the_user(run_rejected, line, words):
    run_rejected(line.split(), f"; try: toyexp {words}")


def test_a_recipe_that_needs_a_base_is_suggested_with_one(run_rejected):
    command = "toyexp recipe=lora recipe.base=MODEL.gguf data=text data.path=book.txt"
    run_rejected([*BOOK, "recipe=lora", "model=mlp"], f"; name a base that reads tokens: {command}")


def test_the_invalid_one_of_two_values_for_a_key_is_named(run_rejected):
    run_rejected([*SMALL, "lr=abc", "lr=0.1"], "lr=abc")
    run_rejected([*SMALL, "lr=0.1", "lr=abc"], "lr=abc")


@pytest.mark.skipif(platform.system() == "Darwin", reason="MPS may be here")
def test_engine_mps_without_a_mac_suggests_another_engine(run_rejected):
    run_rejected([*SMALL, "engine=mps"], "engine=mps", "macOS", "engine=cpu")


def test_engine_cuda_without_a_gpu_suggests_another_engine(run_rejected):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("CUDA is here")
    run_rejected([*SMALL, "engine=cuda"], "engine=cuda", "engine=cpu")


# -- data -----------------------------------------------------------------------------------------------------------

TOYC = struct.Struct("<4sIII")


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (None, "data=text", ["data.path=..."]),
        (None, "data=text data.path=~no-user/x", ["data.path=~no-user/x", "unknown home directory ~no-user"]),
        (None, "data=text data.path=missing.txt", ["data.path=missing.txt: not found", "looked in"]),
        (b"caf\xe9", "data=text data.path=file", ["file: not UTF-8", "byte 3", "0xe9"]),
        (b"", "data=text data.path=file", ["found no text"]),
        (b"abc", "data=text data.path=file", ["a row needs 65 tokens, but the training part has 4"]),
        (b"a" * 9000, "data=text data.path=file model.context=10000", ["a row needs 10001 tokens"]),
        (b"a" * 9000, "data=text data.path=file model.vocab=9", ["model.vocab=9", "(0..256)"]),
        (None, "data.val_fraction=0", ["data.val_fraction=0.0", "above 0 and at most 1"]),
        (None, "data.val_fraction=1", ["data.val_fraction=1.0", "nothing to train on"]),
        (None, "data.max_mb=inf", ["data.max_mb=inf"]),
        (None, "data.max_mb=-1", ["data.max_mb=-1.0"]),
        (None, "data.eval_batches=0", ["data.eval_batches=0"]),
        (None, "data.tokenizer=byt", ["data.tokenizer=byt", "did you mean byte?"]),
        (None, "data.tokenizer=sentencepiece", ["data.tokenizer=sentencepiece", "bpe", "char"]),
        (None, "data.tokenizer=missing.gguf", ["data.tokenizer=missing.gguf: not found"]),
        (None, "data.tokenizer=bpe data.bpe_vocab=100", ["data.bpe_vocab=100", "258"]),
        (None, "data=tokens", ["data.path=..."]),
        (None, "data=tokens data.path=missing.bin", ["data.path=missing.bin: not found"]),
        (b"abcde", "data=tokens data.path=file", ["file", "5 bytes", "4-byte ids"]),
        (b"", "data=tokens data.path=file", ["file: holds no token ids"]),
        (struct.pack("<3i", 1, -2, 3), "data=tokens data.path=file", ["id -2", "for uint16 ids: data.dtype=uint16"]),
        (TOYC.pack(b"TOYC", 2, 300, 0) + b"\0" * 8, "data=tokens data.path=file", ["is a TOYC file of version 2"]),
        (TOYC.pack(b"TOYC", 1, 5, 0) + struct.pack("<i", 7), "data=tokens data.path=file", ["of 5", "the id 7"]),
        (b"TOYC\1", "data=tokens data.path=file", ["a TOYC file has a header of 16 bytes"]),
        (b"\0" * 8, "data=tokens data.path=file data.dtype=int16", ["data.dtype=int16", "did you mean"]),
        (b"\0" * 8, "data=tokens data.path=file data.tokenizer=missing.gguf", ["data.tokenizer=missing.gguf"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_wrong_data_is_one_plain_error(run_rejected, tmp_path, content, line, words):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    base = ["steps=2"] if line.startswith("data=tokens") else SMALL
    run_rejected([*base, *line.split(" ")], *words)


def test_a_flag_with_an_empty_value_is_rejected(run_rejected):
    for flag in ("--config-path", "--config-name", "--config-dir", "--cfg"):
        run_rejected([flag, "", *SMALL], f"{flag} ''", "is empty")


# -- donors of recipe=warm ------------------------------------------------------------------------------------------


def write_donor(path: Path, width: int = 64, rows: int = 257, length: bool = True, table: bool = True) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    if length:
        writer.add_embedding_length(width)
    name = "token_embd.weight" if table else "output_norm.weight"
    writer.add_tensor(name, np.ones((rows, width), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("donor", "settings", "words"),
    [
        ({"width": 32}, "recipe.lens=none", ["width mismatch", "expected 64", "has 32", "model.d_model=32"]),
        ({"width": 32}, "recipe.lens=pca", ["recipe.lens=pca", "width 32", "recipe.lens=random"]),
        ({"length": False}, "", ["no llama.embedding_length"]),
        ({"table": False}, "", ["no token_embd.weight"]),
        ({"rows": 100}, "", ["too few rows", "257", "100"]),
        ({}, "model=gpt2", ["model.tied=false"]),
        ({}, "recipe.lens=pcaa", ["recipe.lens=pcaa", "did you mean pca?"]),
    ],
    ids=lambda v: v if isinstance(v, str) else str(v)[:20],
)
def test_a_donor_that_does_not_fit_is_one_plain_error(run_rejected, tmp_path, donor, settings, words):
    write_donor(tmp_path / "d.gguf", **donor)
    run_rejected([*BOOK, "recipe=warm", "recipe.donor=d.gguf", *settings.split()], *words)


def test_a_donor_that_cannot_be_read_is_one_plain_error(run_rejected, tmp_path):
    write_donor(tmp_path / "whole.gguf")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:-1000])
    (tmp_path / "text.gguf").write_text("This is a text of some length, and no GGUF at all.")
    (tmp_path / "folder").mkdir()
    for donor, word in (
        ("missing.gguf", "not found"),
        ("folder", "is a directory"),
        ("text.gguf", "not a GGUF file"),
        ("cut.gguf", "after the end of the file; if it is incomplete, download or copy it again"),
    ):
        run_rejected([*BOOK, "recipe=warm", f"recipe.donor={donor}"], donor, word)


# -- plugins and foreign config files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("plugins=[no_such_module]", ["there is no module no_such_module"]),
        ("plugins=[raises_at_import]", ["plugins=[raises_at_import]", "out of cheese"]),
        ("plugins=[offers_nothing]", ["plugins=[offers_nothing]", "registers nothing"]),
        ("plugins=[a-b]", ["plugins=[a-b]: takes names of Python modules"]),
        ("plugins=../x", ["takes names of Python modules"]),
        ("plugins=null", ["takes names of Python modules"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_plugin_is_one_plain_error(run_rejected, tmp_path, line, words):
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('out of cheese')\n")
    (tmp_path / "offers_nothing.py").write_text("x = 1\n")
    run_rejected([*SMALL, line], *words)


def config_file(directory: Path, text: str) -> None:
    directory.mkdir()
    parts = "{model: nano}, {data: stdlib}, {recipe: scratch}, {engine: cpu}, {optim: adamw}, {callbacks: [default]}"
    (directory / "config.yaml").write_text(f"defaults: [{parts}, _self_]\n{text}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plugins: [tempting]", ["plugin tempting", "only the command line can load code", "plugins=[tempting]"]),
        ("step: 5", ["unknown key step;", "did you mean steps?"]),
        ("steps: abc", ["steps=abc: must be a whole number"]),
        ("model: {d_modle: 5}", ["did you mean model.d_model?"]),
        ("model: {_target_: os.system}", ["config.yaml, line 2: _target_ names code"]),
        ("callbacks: {sample: {every: 5}}", ["the run has no callback sample"]),
        ("steps: [1\nb: : c", ["config.yaml, line", "not valid YAML"]),
        ("strange: {a: '${nowhere}'}", ["unknown key strange;"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_config_file_is_one_plain_error(run_rejected, tmp_path, text, words):
    (tmp_path / "tempting.py").write_text("open('loaded', 'w').close()\n")
    config_file(tmp_path / "theirs", text)
    run_rejected(["--config-path", "theirs", "data.tokenizer=byte"], *words)


def test_a_config_file_with_wrong_types_is_rejected(run_rejected, tmp_path):
    config_file(tmp_path / "theirs", "steps: abc\n")
    path = tmp_path / "theirs" / "config.yaml"
    path.write_text(path.read_text().replace("[{model", "[schema, {model"))
    run_rejected(["--config-path", "theirs", "data.tokenizer=byte"], "steps=abc: must be a whole number")
    path.write_text(path.read_text().replace("steps: abc", "step: 1"))
    run_rejected(["--config-path", "theirs", "data.tokenizer=byte"], "unknown key step;", "did you mean steps?")


def test_a_config_file_with_an_unknown_choice_is_one_plain_error(run_rejected, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.yaml").write_text("defaults: [{model: lama}]\n")
    (tmp_path / "theirs" / "few.yaml").write_text("steps: 1\n")
    (tmp_path / "theirs" / "list.yaml").write_text("[1, 2]\n")
    run_rejected(["--config-path", "theirs"], "model=lama: unknown name", "did you mean llama?")
    run_rejected(["--config-path", "theirs", "--config-name", "few"], "has no model", "llama")
    run_rejected(["--config-path", "theirs", "--config-name", "list"], "list.yaml", "must contain keys")
    run_rejected(["--config-path", "theirs", "--config-name", "fwe"], "has no fwe.yaml", "did you mean few?")


def test_a_directory_that_holds_a_run_is_rejected_and_unchanged(run_rejected, tmp_path, capsys):
    line = [*BOOK, "engine=cpu", "hydra.run.dir=mine"]
    assert main(line) == 0
    capsys.readouterr()
    written = {p: p.read_bytes() for p in (tmp_path / "mine").rglob("*") if p.is_file()}
    run_rejected(line, "mine already holds a run", "hydra.run.dir=...")
    assert {p: p.read_bytes() for p in (tmp_path / "mine").rglob("*") if p.is_file()} == written


# -- sweeps ---------------------------------------------------------------------------------------------------------


def test_an_invalid_job_of_a_sweep_is_reported_and_the_others_run(tmp_path, capsys):
    code = main(["-m", "sweep.isolate=false", *BOOK, "engine=cpu", "lr=0.1,x,-1", "callbacks=[events]"])
    out, err = capsys.readouterr()
    assert code == 2
    assert err.splitlines() == [
        "toyexp: error in job 1: lr=x: must be a number",
        "toyexp: error in job 2: lr=-1.0: must be a finite number >= 0",
    ]
    assert [p.parent.name for p in tmp_path.glob("outputs/sweeps/*/*/result.json")] == ["0-scratch-llama"]
    table = [line for line in out.splitlines() if re.match(r" +\d+  lr=", line)][-3:]
    assert "lr=0.1" in table[0] and "0-scratch-llama" in table[0]
    assert "lr=x" in table[1] and "refused" in table[1]
    assert "lr=-1" in table[2] and "refused" in table[2]


def test_a_sweep_over_names_runs_the_valid_one(tmp_path, capsys):
    code = main(["-m", "sweep.isolate=false", *BOOK, "engine=cpu", "recipe=wram,scratch", "callbacks=[events]"])
    assert code == 2
    assert "error in job 0: recipe=wram: unknown name; did you mean warm?" in capsys.readouterr().err
    assert [p.parent.name for p in tmp_path.glob("outputs/sweeps/*/*/result.json")] == ["1-scratch-llama"]


def test_a_sweep_of_only_invalid_jobs_leaves_no_files(tmp_path, capsys):
    assert main(["-m", *BOOK, "engine=cpu", "banana=1,2"]) == 2
    assert capsys.readouterr().err.count("unknown key banana") == 1  # an error of every job is printed once
    assert listing(tmp_path) == {"book.txt"}


def test_a_job_that_crashes_makes_the_sweep_exit_1(tmp_path, capsys):
    (tmp_path / "crashing.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from toyexp import Callback, hookimpl\n"
        "@hookimpl\n"
        "def register_callbacks(register):\n"
        "    register(Crash)\n"
        "@dataclass(eq=False)\n"
        "class Crash(Callback):\n"
        "    'Crashes.'\n"
        "    name: ClassVar[str] = 'crash'\n"
        "    @hookimpl\n"
        "    def on_step(self):\n"
        "        raise ZeroDivisionError('on purpose')\n"
    )
    line = ["-m", "sweep.isolate=false", *BOOK, "engine=cpu", "plugins=[crashing]", "steps=0,1", "callbacks=[crash]"]
    assert main(line) == 1
    err = capsys.readouterr().err
    assert "error in job 0: steps=0" in err and "failed at step 1: ZeroDivisionError: on purpose" in err


# -- a real process -------------------------------------------------------------------------------------------------


def process(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toyexp", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env})


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("stesp=5", "did you mean steps?"),
        ("--cfg job model=lama", "did you mean llama?"),
    ],
)
def test_the_process_exits_with_code_2_and_prints_only_the_error(tmp_path, line, word):
    done = process(*line.split(" "))
    assert_one_plain_error(done.stderr, word)
    assert (done.returncode, done.stdout, listing(tmp_path)) == (2, "", {"book.txt"})


@pytest.fixture
def run_of_two_steps(tmp_path, capsys):
    """Train a run of two steps to its end."""
    settings = ["plugins=[toyexp.testing.null]", "engine=noop", *BOOK, "checkpoint_every=1"]
    assert main([*settings, "hydra.run.dir=outputs/tale/1"]) == 0
    capsys.readouterr()
    return settings[:1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("resume=outputs/tale", ["is not a run (no config.yaml); did you mean resume=outputs/tale/1?"]),
        ("resume=outputs/tale/1/model.gguf", ["is not a run directory; did you mean resume=outputs/tale/1?"]),
        (
            "resume=outputs/tale/1/checkpoints/step-2",
            ["is not a run (no config.yaml)", "did you mean resume=outputs/tale/1?"],
        ),
        ("sweep.resume=outputs/tale/1", ["holds no sweep", "it is a run: resume=outputs/tale/1"]),
        (
            "resume=outputs/tale/1 recipe=warm steps=4",
            ["the run has recipe=scratch; leave recipe=warm out"],
        ),
        ("resume=outputs/tale/1 data=stdlib steps=4", ["the run has data=text; leave data=stdlib out"]),
        ("resume=outputs/tale/1 model=gpt2 steps=4", ["the run has model=llama; leave model=gpt2 out"]),
        ("resume=outputs/tale/1 model=small steps=4", ["the run has model=llama", "leave model=small out"]),
        (
            "resume=outputs/tale/1 steps=4 hydra.run.dir=x",
            ["hydra.run.dir=x", "contradicts resume=", "leave out hydra.run.dir"],
        ),
        ("resume=outputs/tale/1 recipe=scratch", ["outputs/tale/1: is complete", "resume=outputs/tale/1 steps=4"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_way_to_resume_is_rejected_with_the_right_one(run_rejected, run_of_two_steps, line, words):
    run_rejected([*run_of_two_steps, *line.split(" ")], *words)


def test_resuming_a_run_with_a_local_plugin_first_asks_for_the_plugin(run_rejected, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom typing import ClassVar\nfrom toyexp import Callback, hookimpl\n"
        "@dataclass(eq=False)\nclass Mine(Callback):\n    'Mine.'\n    name: ClassVar[str] = 'mine'\n"
        "@hookimpl\ndef register_callbacks(register):\n    register(Mine)\n"
    )
    plugins = "plugins=[toyexp.testing.null,mine]"
    assert main([plugins, "engine=noop", *BOOK, "callbacks=[default,mine]", "hydra.run.dir=r"]) == 0
    run_rejected(["resume=r", "steps=4"], "plugins=[toyexp.testing.null,mine]", "toyexp.testing.null")


def test_a_failing_import_of_a_plugin_is_reported_with_its_line(run_rejected, tmp_path):
    (tmp_path / "lacking.py").write_text("import json\nimport nothing_like_this\n")
    run_rejected(["plugins=[lacking]"], "nothing_like_this", "lacking.py, line 2")
    run_rejected(["plugins=[lacking.py]"], "plugins=[lacking]")


def test_a_missing_absolute_path_names_its_existing_part(run_rejected, tmp_path):
    run_rejected(["data=text", f"data.path={tmp_path}/bookz/story.txt"], f"{tmp_path} holds no bookz")


def test_resume_of_a_sweep_directory_suggests_sweep_resume(run_rejected, tmp_path):
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "sweep.json").write_text("{}")
    run_rejected(["resume=many"], "is a sweep; to resume it: sweep.resume=many")


def test_a_file_without_text_or_ids_is_rejected_by_name(run_rejected, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    run_rejected(["data=text", "data.path=empty.txt"], "found no text in empty.txt")
    run_rejected(["data=text", "data.path=folder"], "data.path=folder: contains no file with the suffix .txt .md .py")
    run_rejected(["data=tokens", "data.path=book.txt"], "book.txt: position", "the limit is 16777216", "data.dtype")


def test_a_changed_engine_is_reported_by_name_only(run_of_two_steps, capsys):
    words = ["resume=outputs/tale/1", "steps=3", "engine=ggml", "engine.threads=1"]
    main([*run_of_two_steps, *words])
    output = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed"))
    assert output == "resumed from step 2; changed: steps 2 -> 3, engine.name noop -> ggml"


def test_a_huge_number_in_scientific_notation_is_not_suggested_in_full(run_rejected):
    assert "000000" not in run_rejected([*SMALL, "steps=1e99"], "steps=1e99: must be a whole number")


def test_a_number_with_too_many_digits_for_python_is_one_short_line(run_rejected):
    assert len(run_rejected([*SMALL, "steps=" + 5000 * "9"], "steps=999", "too many digits")) < 200


def test_a_checkpoint_with_unknown_content_is_rejected(run_of_two_steps, run_rejected):
    """Reject it even if the digests in its manifest match."""
    folder = Path("outputs/tale/1/checkpoints/step-2")
    state, manifest = (json.loads((folder / name).read_text()) for name in (STATE, MANIFEST))
    scores = [({"scores": {step: 1.5}}, "scores") for step in ("\u00b2", "-2", "3", 5000 * "1")]
    places = [{**state["callbacks"]["events"], "bytes": size} for size in (-1, 1 << 60, 1e300)]
    events = [({"callbacks": {**state["callbacks"], "events": place}}, "callbacks.events") for place in places]
    for change, told in (*scores, *events, ({"sources": {}}, "")):
        raw = json.dumps({**state, **change}).encode()
        manifest["files"][STATE] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        (folder / STATE).write_bytes(raw)
        (folder / MANIFEST).write_text(json.dumps(manifest))
        words = [f"{folder}/{STATE}", told] if told else [f"{folder}: {STATE} is damaged: it lacks some keys"]
        run_rejected([*run_of_two_steps, "resume=outputs/tale/1", "steps=4"], *words)


def test_a_switch_may_still_be_1_or_0(capsys):
    assert main(["--cfg", "job", "model.tied=1", "lr=0.0"]) == 0
    assert "tied: true" in capsys.readouterr().out


def test_a_setting_given_twice_is_reported_with_the_value_that_applies(capsys):
    words = [*SMALL, "data=random", "model.d_model=16", "engine=ggml", "engine.threads=1", "callbacks=[]"]
    words = [word for word in words if not word.startswith("data.")]
    groups = ["optim.groups={blk.*: {lr: 0.1}}", "optim.groups={output.*: {lr: 0.2}}"]  # both apply
    assert main([*words, *groups, "lr=1e-3", "lr=2e-3", "seed=3", "seed=3", "hydra.run.dir=run"]) == 0
    warnings = [line for line in "".join(capsys.readouterr()).splitlines() if "overridden by" in line]
    assert warnings == ["toyexp: warning: lr=1e-3: overridden by the later lr=2e-3"]
    config = Path("run/config.yaml").read_text()
    assert "lr: 0.002" in config and "blk.*" in config and "output.*" in config


@pytest.mark.parametrize("every", ["50", "0"])
def test_resume_of_a_run_without_checkpoint_names_its_checkpoint_setting(run_rejected, every):
    Path("run").mkdir()
    Path("run/config.yaml").write_text(f"checkpoint_every: {every}\nsteps: 100\n")
    run_rejected(
        ["resume=run"], "resume=run: the run has no checkpoint: its checkpoints/ is ", f"checkpoint_every={every}"
    )
    file = lock(Path("run"))  # the run is still active
    run_rejected(["resume=run"], f"run: is being written by process {os.getpid()} on ", "; wait for it, or stop it")
    os.close(file)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["engine=gpu"],
            "engine=gpu: unknown name; engines on a GPU are cuda, ggml_cuda, metal, mps, vulkan",
        ),
        (["engine=pytorch"], "engine=pytorch: unknown name; choose one of: auto, cpu, cuda, "),
        (["bench", "engine=cpu,GPU"], "engine=GPU: unknown name; engines on a GPU are cuda,"),
        (["engine=cuda:1"], "before the command: CUDA_VISIBLE_DEVICES=1 toyexp engine=cuda"),
        (["parity", "engine=cpu,vulkan:0"], "before the command: GGML_VK_VISIBLE_DEVICES=0 toyexp engine=vulkan"),
        (["engine=mps", "engine.shard=true"], "engine.shard with engine=mps; it belongs to engine=cpu or cuda: choose"),
        (["engine=mps:0"], "engine=mps:0: unknown name; did you mean mps?"),
        (["bench", "engine=:x"], "engine=:x: missing engine name before ':'"),
        (["doctor", "--numerics", "engine=cuda:1"], "CUDA_VISIBLE_DEVICES=1 toyexp engine=cuda"),
    ],
)
def test_a_wrong_way_to_select_a_gpu_is_rejected_with_the_right_one(run_rejected, words, message):
    run_rejected(words, message)


@pytest.mark.parametrize(("name", "own"), [("vulkan", "half=true"), ("ggml_cuda", "tf32=true")])
def test_a_ggml_setting_fixed_per_process_is_rejected_with_a_remedy(run_rejected, monkeypatch, name, own):
    monkeypatch.setattr(GGMLGPU, "check", lambda self: "ggml on a GPU")
    monkeypatch.setattr(GGMLVulkan, "_opened_half", None)
    monkeypatch.setattr(GGMLCUDA, "_tf32_was_allowed", False)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.delenv("GGML_VK_DISABLE_F16", raising=False)
    words = ["parity", f"engine={name},{name}:{own}", "data=random", "model.d_model=16", "model.context=16"]
    run_rejected(words, "once per process", f"one value per command: engine={name} or engine={name}:{own}, not both")


def test_parity_lists_the_run_settings_that_it_rejects(run_rejected, capsys):
    assert main(["parity", "--help"]) == 0
    output = capsys.readouterr().out
    for key in sorted(RUN_ONLY_KEYS - {"sweep", "hydra"}):
        assert key in output
        run_rejected(["parity", f"{key}=1"], f"{key}=1: has no effect in parity")
