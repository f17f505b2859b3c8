"""What conf/ holds composes, builds, holds only differences, and a saved run repeats itself."""

import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml

from toyexp import Unavailable, UserError
from toyexp.cli.main import main
from toyexp.config.flags import split_flags
from toyexp.config.keys import choices
from toyexp.config.paths import CONF
from toyexp.config.request import Request
from toyexp.config.schema import Root, Source
from toyexp.config.top_level import GROUPS, PARTS, top_level_settings
from toyexp.config.words import parse
from toyexp.plugins.discovery import load
from toyexp.plugins.settings import list_settings
from toyexp.sweeps.directory import Job
from toyexp.sweeps.job_configs import JobConfigs
from toyexp_recipes.scratch import DONOR

# Neither tokenizer nor donor is the point here.
SMALL = ["data=text", "data.path=book.txt", "data.tokenizer=byte"]


def presets(group: str) -> list[str]:
    return sorted(p.stem for p in (CONF / group).glob("*.yaml"))


@pytest.fixture(scope="module")
def registry():
    return load()


@pytest.fixture
def request_of_nothing(registry):
    return Request([], registry)


@pytest.fixture(autouse=True)
def _work_in_tmp_path(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 200)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize("name", presets("experiment"))
def test_every_experiment_composes_and_builds(request_of_nothing, name):
    body = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text())
    lists = request_of_nothing.compose(f"experiment={name}").sweeps
    swept = [f"{key}={values.split(',')[0]}" for key, values in lists.items()]
    if body.get("recipe", {}).get("targets"):  # an experiment on a base of the user's
        swept.append(f"recipe.base={DONOR}")
    composed = request_of_nothing.compose(f"experiment={name}", *swept)
    cfg = composed.cfg
    assert cfg.steps == body.get("steps", cfg.steps) and cfg.name == body.get("name", cfg.name)
    try:
        built = composed.build_config()
    except Unavailable as reason:  # the device comes last: all else was checked before
        assert str(reason).startswith(f"engine={cfg.engine.name}: ")
    else:
        assert built.model.parameters() > 0


@pytest.mark.parametrize("name", presets("model"))
def test_every_model_preset_composes_and_builds_with_its_sizes(request_of_nothing, name):
    model = request_of_nothing.build_config(f"model={name}", *SMALL).model
    body = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    body.pop("defaults")
    assert body.items() <= model.settings().items()


@pytest.mark.parametrize("threads", [0, 1])
def test_auto_hands_its_threads_to_the_engine_that_it_takes(request_of_nothing, threads):
    words = [*SMALL, *([f"engine.threads={threads}"] if threads else [])]
    built = request_of_nothing.build_config(*words)
    assert getattr(built.engine, "threads", threads) == threads


def leaves(node: dict, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in node.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


@pytest.mark.parametrize("name", presets("model"))
def test_a_model_preset_holds_only_differences(registry, name):
    body = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    base = next(part for part in body.pop("defaults") if part != "_self_")
    defaults = {s.name: s.default for s in list_settings(registry.get("model", base))}
    assert {key: value for key, value in body.items() if defaults[key] == value} == {}


@pytest.mark.parametrize("name", presets("experiment"))
def test_an_experiment_holds_only_differences(registry, name):
    body = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text())
    chosen = [f"{key.removeprefix('override /')}={value}" for part in body.pop("defaults", []) if isinstance(part, dict)
              for key, value in part.items()]  # fmt: skip
    body.pop("hydra", None)  # the values of a sweep, each of which is another difference
    without = Request([], registry).compose(*(c.replace("'", "").replace(" ", "") for c in chosen)).cfg
    same = {key: value for key, value in leaves(body).items() if value == select(without, key)}
    assert same == {}


def select(cfg, key: str) -> object:
    for part in key.split("."):
        cfg = cfg[part]
    return cfg


def test_every_default_of_config_yaml_is_that_of_the_schema_and_the_other_way_round():
    shipped = yaml.safe_load((CONF / "config.yaml").read_text())
    for part in ("defaults", "hydra"):
        shipped.pop(part)
    own = leaves({key: value for key, value in asdict(Root()).items() if key not in (*PARTS, "callbacks")})
    assert leaves(shipped) == own
    assert {"lr", "sweep.submitit.timeout_min", "plugins"} <= own.keys()


def test_every_comment_of_config_yaml_is_the_help_of_its_key():
    under, shown = [], {}
    for line in (CONF / "config.yaml").read_text().splitlines():
        if found := re.fullmatch(r"( *)(\w+):( .+?)? # (.+)", line):
            under[len(found[1]) // 2 :] = [found[2]]
            shown[".".join(under)] = found[4]
    own = {key: setting.comment for key, setting in top_level_settings()}
    assert {key: text for key, text in shown.items() if key in own} == own
    assert shown.keys() - own.keys() == {"sweep", "sweep.submitit", "sweep.ray"}


def test_a_config_file_that_leaves_keys_out_gets_the_shipped_defaults(registry, tmp_path):
    parts = "{model: nano}, {data: random}, {recipe: scratch}, {engine: auto}, {optim: adamw}, {callbacks: []}"
    (tmp_path / "config.yaml").write_text(f"defaults: [{parts}, _self_]\nseed: 3\n")
    sources = Source.from_flags(str(tmp_path)), Source.from_flags()
    own, shipped = (Request([], registry, (), source).compose().cfg for source in sources)
    keys = {f.name for f in fields(Root)} - {*PARTS, "callbacks", "seed"}
    assert {k: own[k] for k in keys} == {k: shipped[k] for k in keys} and own.seed == 3


def test_nothing_in_conf_names_code():
    for path in CONF.rglob("*.yaml"):
        assert "_target_" not in path.read_text(), path


def run_once(*words: str) -> tuple[Path, dict]:
    """Runs, and returns the one new run directory and its losses."""
    before = set(Path.cwd().rglob("result.json"))
    assert main(list(words)) == 0
    (result,) = set(Path.cwd().rglob("result.json")) - before
    losses = json.loads(result.read_text())
    return result.parent, {k: losses[k] for k in ("train_loss", "eval_loss", "first_eval_loss")}


def test_a_saved_config_repeats_the_run(tmp_path, capsys):
    settings = ["steps=3", "seed=7", "lr=0.01", "optim.accumulate=2", "model.n_layers=1", "engine=cpu"]
    first, losses = run_once(*SMALL, *settings, "callbacks=[linear,events]", "callbacks.linear.warmup=1")
    again, repeated = run_once("--config-path", str(first), "--config-name", "config")
    assert repeated == losses
    assert again.parent == first.parent and again != first  # beside it, not inside it
    assert yaml.safe_load((again / "config.yaml").read_text()) == yaml.safe_load((first / "config.yaml").read_text())
    _, other = run_once("--config-path", str(first), "seed=8")
    assert other != losses


def test_a_config_path_leaves_nothing_of_hydra_behind(tmp_path, capsys):
    first, _ = run_once(*SMALL, "steps=1", "engine=cpu", "callbacks=[events]")
    run_once("--config-path", str(first))
    assert {p.name for p in tmp_path.iterdir()} == {"book.txt", "outputs"}
    assert not list(tmp_path.rglob(".hydra")) and not list(tmp_path.rglob("*.log"))


def test_a_directory_of_your_own_presets_stands_beside_ours(tmp_path, capsys):
    (tmp_path / "my presets" / "model").mkdir(parents=True)
    (tmp_path / "my presets" / "model" / "tiny.yaml").write_text("defaults: [llama, _self_]\nd_model: 16\n")
    words = ["--config-dir", "my presets", "model=tiny", *SMALL, "steps=1", "engine=cpu", "callbacks=[]"]
    run, _ = run_once(*words, "resume=auto")  # which begins, where there is none to go on with
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["d_model"] == 16


def test_cfg_job_shows_the_composed_configuration_and_writes_nothing(tmp_path, capsys):
    assert main(["--cfg", "job", "steps=7", "model=gpt2"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["steps"], shown["model"]["name"]) == (7, "gpt2")
    assert [p.name for p in tmp_path.iterdir()] == ["book.txt"]


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_names_with_values_may_be_given_with_hydras_signs(capsys, plus):
    assert main(["--cfg", "job", "--package", "optim.groups", plus + "optim.groups={ours: {lr: 0.5}}"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {"ours": {"lr": 0.5}}


@pytest.mark.parametrize("own", [None, "0"])
def test_what_shows_by_hydra_leaves_the_process_as_it_was(monkeypatch, capsys, own):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    if own is not None:
        monkeypatch.setenv("HYDRA_FULL_ERROR", own)
    root = logging.getLogger()
    before = list(sys.argv), list(root.handlers), root.level
    assert main(["--info", "defaults"]) == 0
    assert (list(sys.argv), root.handlers, root.level) == before
    assert os.environ.get("HYDRA_FULL_ERROR") == own


def test_names_of_the_command_line_stand_before_those_of_a_file(tmp_path, capsys):
    """So that the first pattern that fits is the one that was typed; a file's setting of the same name is kept."""
    (tmp_path / "own/experiment").mkdir(parents=True)
    groups = "optim: {groups: {'*attn*': {lr: 1}, '*': {weight_decay: 0.5}}}\n"
    (tmp_path / "own/experiment/mine.yaml").write_text("# @package _global_\n" + groups)
    words = ["--config-dir", "own", "experiment=mine", "optim.groups={*: {lr: 0.5}, blk.0.*: {frozen: true}}"]
    run, _ = run_once(*words, *SMALL, "steps=1", "engine=cpu", "callbacks=[]")
    capsys.readouterr()
    assert main(["--cfg", "job", "--package", "optim.groups", *words]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    for found in (yaml.safe_load((run / "config.yaml").read_text())["optim"]["groups"], shown):
        assert list(found) == ["*", "blk.0.*", "*attn*"] and found["*"] == {"weight_decay": 0.5, "lr": 0.5}


@pytest.mark.parametrize("typed", ["2024_01", "1e3", "1.50", "007", "true", "0x1f"])
def test_a_text_that_looks_like_a_number_stays_as_it_was_typed(tmp_path, capsys, typed):
    """As the name of a directory does, or of a run; a number stays one."""
    settings = [f"name={typed}", f"data.path={typed}", f"hydra.run.dir={typed}", "steps=1_000", "lr=1e-3"]
    composed = Request.parse(["data=text", *settings]).compose()
    assert (composed.cfg.name, composed.cfg.data.path, composed.cfg.hydra.run.dir) == (typed, typed, typed)
    assert (composed.cfg.steps, composed.cfg.lr) == (1000, 0.001)


def test_names_with_underscores_are_swept_over_as_they_were_typed(tmp_path, capsys):
    tiny = ["data=random", "model.d_model=16", "model.n_layers=1", "model.context=8", "engine=noop", "steps=1"]
    words = [*tiny, "plugins=[toyexp.testing.null]", "callbacks=[]", "name=2024_01,2024_02", "seed=1,2"]
    tmp_path = tmp_path / "sweep"
    assert main(["-m", *words, f"hydra.sweep.dir={tmp_path}"]) == 0
    names = [yaml.safe_load(path.read_text())["name"] for path in sorted(tmp_path.glob("*/config.yaml"))]
    assert names == ["2024_01", "2024_01", "2024_02", "2024_02"], capsys.readouterr()


def test_a_sweep_varies_the_last_key_fastest_and_keeps_its_jobs_together(tmp_path, capsys):
    line = ["-m", "sweep.isolate=false", *SMALL, "engine=cpu", "steps=1", "callbacks=[]"]
    assert main([*line, "model.n_layers=1,2", "seed=3,4"]) == 0
    jobs = sorted(tmp_path.glob("outputs/sweeps/*/*/config.yaml"))
    configs = [yaml.safe_load(p.read_text()) for p in jobs]
    assert [(c["model"]["n_layers"], c["seed"]) for c in configs] == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert len({p.parent.parent for p in jobs}) == 1


@pytest.fixture
def tiny_sweep(tmp_path):
    """An experiment that sweeps, in a directory of one's own."""
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "sweeping.yaml").write_text(
        "# @package _global_\nsteps: 1\nbatch_size: 4\nmodel: {d_model: 16, context: 16}\n"
        "hydra: {sweeper: {params: {seed: '3,4', model.n_layers: [1, 2], lr: 0.5}}}\n"
    )
    return ["--config-dir", "own", "experiment=sweeping", *SMALL, "engine=ggml", "engine.threads=1", "callbacks=[]"]


def sweep_configs(tmp_path):
    return [yaml.safe_load(p.read_text()) for p in sorted(tmp_path.glob("outputs/sweeps/*/*/config.yaml"))]


def test_an_experiment_may_hold_its_sweep(tiny_sweep, tmp_path, capsys):
    assert main(["-m", "sweep.isolate=false", *tiny_sweep]) == 0
    jobs = [(c["seed"], c["model"]["n_layers"], c["lr"], c["steps"]) for c in sweep_configs(tmp_path)]
    assert jobs == [(3, 1, 0.5, 1), (3, 2, 0.5, 1), (4, 1, 0.5, 1), (4, 2, 0.5, 1)]
    assert "  3  seed=4 model.n_layers=2 " in capsys.readouterr().out


def test_a_word_that_was_read_before_is_read_as_new():
    words = ["model.x=[1,{a: b}]", "lr=0.1,0.2", "seed=range(3)"]
    for _ in range(2):
        given, rates, seeds = parse(words)
        assert given.value() == [1, {"a": "b"}]
        assert [*rates.sweep_iterator()] == [0.1, 0.2] and [*seeds.sweep_iterator()] == [0, 1, 2]
        given.value()[1]["a"] = given.value()[0] = given.key_or_group = "changed"
        with pytest.raises(UserError, match=r"a=\["):
            parse(["a=["])


def test_a_job_that_is_made_ready_in_the_process_of_others_is_one_run_of_the_experiments_sweep(tiny_sweep):
    flags, settings = split_flags(tiny_sweep)
    ahead = JobConfigs(Request.parse(settings, Source.from_flags(extra=flags["--config-dir"])), {})
    for number, words in enumerate(
        (["seed=3", "model.n_layers=1", "lr=0.5"], ["seed=4", "model.n_layers=2", "lr=0.5"])
    ):
        settings = ahead.run_config(Job(number, words)).build_config().settings
        assert (settings.seed, settings.lr) == (3 + number, 0.5)


def test_the_command_lines_values_replace_those_of_the_experiments_sweep(tiny_sweep, tmp_path, capsys):
    assert main(["-m", "sweep.isolate=false", *tiny_sweep, "model.n_layers=1", "lr=0.1,0.2", "seed=5"]) == 0
    jobs = [(c["seed"], c["model"]["n_layers"], c["lr"]) for c in sweep_configs(tmp_path)]
    assert jobs == [(5, 1, 0.1), (5, 1, 0.2)]


MORE = " (more: toyexp help sweeps)\n"


def test_an_experiment_with_a_sweep_is_one_run_only_with_one_value_of_each(tiny_sweep, tmp_path, capsys):
    error = "toyexp: error: experiment=sweeping sweeps over {}; run it with -m: toyexp -m experiment=sweeping"
    assert main([*tiny_sweep]) == 2
    assert capsys.readouterr().err == error.format("seed, model.n_layers, lr") + MORE
    assert main([*tiny_sweep, "seed=1", "lr=1"]) == 2
    assert capsys.readouterr().err == error.format("model.n_layers") + MORE
    others = [word for word in tiny_sweep if word != "experiment=sweeping"]
    assert main(["-m", "sweep.isolate=false", *others, "experiment=sweeping,nothing", "seed=1", "lr=1"]) == 2
    assert error.format("model.n_layers").partition("error: ")[2].rstrip() in capsys.readouterr().err
    assert not list(tmp_path.rglob("config.yaml"))
    assert main([*tiny_sweep, "seed=1", "lr=1", "model.n_layers=1"]) == 0
    assert len(list(tmp_path.rglob("config.yaml"))) == 1


def test_a_sweep_of_an_experiment_that_cannot_be_read_is_one_line(tiny_sweep, tmp_path, capsys):
    path = tmp_path / "own" / "experiment" / "sweeping.yaml"
    path.write_text("# @package _global_\nhydra: {sweeper: {params: {seed: '3,[4'}}}\n")
    assert main(["-m", "sweep.isolate=false", *tiny_sweep]) == 2
    assert "'seed=3,[4': missing closing bracket" in capsys.readouterr().err


def test_help_lists_every_choice_and_imports_no_framework(registry):
    code = (
        "import sys; from toyexp.cli.main import main; code = main(['--help']); "
        "print('imported:', *sorted({'torch', 'ggml', 'wandb', 'matplotlib', 'tokenizers'} & set(sys.modules))); "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    words = done.stdout.replace(",", " ").split()
    for kind in GROUPS:
        assert choices(kind, registry) <= set(words), kind
    assert done.stdout.splitlines()[-1] == "imported:"
