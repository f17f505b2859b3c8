"""Files of conf/ compose, build and contain only values that differ from defaults; a saved run can be repeated."""

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

# Avoids training a tokenizer and reading a donor.
SMALL = ["data=text", "data.path=book.txt", "data.tokenizer=byte"]


def presets(group: str) -> list[str]:
    return sorted(p.stem for p in (CONF / group).glob("*.yaml"))


@pytest.fixture(scope="module")
def registry():
    return load()


@pytest.fixture
def empty_request(registry):
    return Request([], registry)


@pytest.fixture(autouse=True)
def _work_in_tmp_path(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 200)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize("name", presets("experiment"))
def test_every_experiment_composes_and_builds(empty_request, name):
    body = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text())
    lists = empty_request.compose(f"experiment={name}").sweeps
    swept = [f"{key}={values.split(',')[0]}" for key, values in lists.items()]
    if body.get("recipe", {}).get("targets"):  # the experiment needs a base
        swept.append(f"recipe.base={DONOR}")
    composed = empty_request.compose(f"experiment={name}", *swept)
    cfg = composed.cfg
    assert cfg.steps == body.get("steps", cfg.steps) and cfg.name == body.get("name", cfg.name)
    try:
        config = composed.build_config()
    except Unavailable as reason:  # devices are checked last, after all settings
        assert str(reason).startswith(f"engine={cfg.engine.name}: ")
    else:
        assert config.model.parameters() > 0


@pytest.mark.parametrize("name", presets("model"))
def test_every_model_preset_composes_and_builds_with_its_sizes(empty_request, name):
    model = empty_request.build_config(f"model={name}", *SMALL).model
    body = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    body.pop("defaults")
    assert body.items() <= model.settings().items()


@pytest.mark.parametrize("threads", [0, 1])
def test_engine_auto_passes_threads_to_the_chosen_engine(empty_request, threads):
    words = [*SMALL, *([f"engine.threads={threads}"] if threads else [])]
    config = empty_request.build_config(*words)
    assert getattr(config.engine, "threads", threads) == threads


def leaves(node: dict, prefix: str = "") -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in node.items():
        values |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


@pytest.mark.parametrize("name", presets("model"))
def test_a_model_preset_has_only_values_that_differ_from_defaults(registry, name):
    body = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    base = next(part for part in body.pop("defaults") if part != "_self_")
    defaults = {s.name: s.default for s in list_settings(registry.get("model", base))}
    assert {key: value for key, value in body.items() if defaults[key] == value} == {}


@pytest.mark.parametrize("name", presets("experiment"))
def test_an_experiment_has_only_values_that_differ_from_defaults(registry, name):
    body = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text())
    chosen = [f"{key.removeprefix('override /')}={value}" for part in body.pop("defaults", []) if isinstance(part, dict)
              for key, value in part.items()]  # fmt: skip
    body.pop("hydra", None)  # sweep values always differ
    defaults = Request([], registry).compose(*(c.replace("'", "").replace(" ", "") for c in chosen)).cfg
    same = {key: value for key, value in leaves(body).items() if value == select(defaults, key)}
    assert same == {}


def select(cfg, key: str) -> object:
    for part in key.split("."):
        cfg = cfg[part]
    return cfg


def test_config_yaml_and_the_schema_have_the_same_defaults():
    shipped = yaml.safe_load((CONF / "config.yaml").read_text())
    for part in ("defaults", "hydra"):
        shipped.pop(part)
    schema_defaults = leaves({key: value for key, value in asdict(Root()).items() if key not in (*PARTS, "callbacks")})
    assert leaves(shipped) == schema_defaults
    assert {"lr", "sweep.submitit.timeout_min", "plugins"} <= schema_defaults.keys()


def test_every_comment_of_config_yaml_is_the_help_of_its_key():
    path, comments = [], {}
    for line in (CONF / "config.yaml").read_text().splitlines():
        if match := re.fullmatch(r"( *)(\w+):( .+?)? # (.+)", line):
            path[len(match[1]) // 2 :] = [match[2]]
            comments[".".join(path)] = match[4]
    help_texts = {key: setting.comment for key, setting in top_level_settings()}
    assert {key: text for key, text in comments.items() if key in help_texts} == help_texts
    assert comments.keys() - help_texts.keys() == {"sweep", "sweep.submitit", "sweep.ray"}


def test_a_config_file_that_leaves_keys_out_gets_the_shipped_defaults(registry, tmp_path):
    parts = "{model: nano}, {data: random}, {recipe: scratch}, {engine: auto}, {optim: adamw}, {callbacks: []}"
    (tmp_path / "config.yaml").write_text(f"defaults: [{parts}, _self_]\nseed: 3\n")
    sources = Source.from_flags(str(tmp_path)), Source.from_flags()
    user_config, shipped = (Request([], registry, (), source).compose().cfg for source in sources)
    keys = {f.name for f in fields(Root)} - {*PARTS, "callbacks", "seed"}
    assert {k: user_config[k] for k in keys} == {k: shipped[k] for k in keys} and user_config.seed == 3


def test_no_file_in_conf_has_a_target():
    for path in CONF.rglob("*.yaml"):
        assert "_target_" not in path.read_text(), path


def run_once(*words: str) -> tuple[Path, dict]:
    """Run a command line; return its new run directory and its losses."""
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
    assert again.parent == first.parent and again != first  # next to the first run, not inside it
    assert yaml.safe_load((again / "config.yaml").read_text()) == yaml.safe_load((first / "config.yaml").read_text())
    _, other = run_once("--config-path", str(first), "seed=8")
    assert other != losses


def test_a_config_path_leaves_no_hydra_files(tmp_path, capsys):
    first, _ = run_once(*SMALL, "steps=1", "engine=cpu", "callbacks=[events]")
    run_once("--config-path", str(first))
    assert {p.name for p in tmp_path.iterdir()} == {"book.txt", "outputs"}
    assert not list(tmp_path.rglob(".hydra")) and not list(tmp_path.rglob("*.log"))


def test_a_users_directory_of_presets_adds_to_the_shipped_ones(tmp_path, capsys):
    (tmp_path / "my presets" / "model").mkdir(parents=True)
    (tmp_path / "my presets" / "model" / "tiny.yaml").write_text("defaults: [llama, _self_]\nd_model: 16\n")
    words = ["--config-dir", "my presets", "model=tiny", *SMALL, "steps=1", "engine=cpu", "callbacks=[]"]
    run, _ = run_once(*words, "resume=auto")  # starts anew, since there is no run to resume
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["d_model"] == 16


def test_cfg_job_shows_the_composed_configuration_and_writes_nothing(tmp_path, capsys):
    assert main(["--cfg", "job", "steps=7", "model=gpt2"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["steps"], shown["model"]["name"]) == (7, "gpt2")
    assert [p.name for p in tmp_path.iterdir()] == ["book.txt"]


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_mappings_may_be_set_with_hydras_plus_signs(capsys, plus):
    assert main(["--cfg", "job", "--package", "optim.groups", plus + "optim.groups={ours: {lr: 0.5}}"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {"ours": {"lr": 0.5}}


@pytest.mark.parametrize("value", [None, "0"])
def test_hydras_info_restores_the_process_state(monkeypatch, capsys, value):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    if value is not None:
        monkeypatch.setenv("HYDRA_FULL_ERROR", value)
    root = logging.getLogger()
    before = list(sys.argv), list(root.handlers), root.level
    assert main(["--info", "defaults"]) == 0
    assert (list(sys.argv), root.handlers, root.level) == before
    assert os.environ.get("HYDRA_FULL_ERROR") == value


def test_group_patterns_of_the_command_line_precede_those_of_a_file(tmp_path, capsys):
    """Patterns of the command line come first and so match first; settings of a file with the same pattern are kept."""
    (tmp_path / "own/experiment").mkdir(parents=True)
    groups = "optim: {groups: {'*attn*': {lr: 1}, '*': {weight_decay: 0.5}}}\n"
    (tmp_path / "own/experiment/mine.yaml").write_text("# @package _global_\n" + groups)
    words = ["--config-dir", "own", "experiment=mine", "optim.groups={*: {lr: 0.5}, blk.0.*: {frozen: true}}"]
    run, _ = run_once(*words, *SMALL, "steps=1", "engine=cpu", "callbacks=[]")
    capsys.readouterr()
    assert main(["--cfg", "job", "--package", "optim.groups", *words]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    for groups_config in (yaml.safe_load((run / "config.yaml").read_text())["optim"]["groups"], shown):
        assert list(groups_config) == ["*", "blk.0.*", "*attn*"] and groups_config["*"] == {
            "weight_decay": 0.5,
            "lr": 0.5,
        }


@pytest.mark.parametrize("typed", ["2024_01", "1e3", "1.50", "007", "true", "0x1f"])
def test_a_text_setting_that_looks_like_a_number_stays_text(tmp_path, capsys, typed):
    """Names of runs and paths stay text; numeric settings become numbers."""
    settings = [f"name={typed}", f"data.path={typed}", f"hydra.run.dir={typed}", "steps=1_000", "lr=1e-3"]
    composed = Request.parse(["data=text", *settings]).compose()
    assert (composed.cfg.name, composed.cfg.data.path, composed.cfg.hydra.run.dir) == (typed, typed, typed)
    assert (composed.cfg.steps, composed.cfg.lr) == (1000, 0.001)


def test_swept_names_with_underscores_stay_text(tmp_path, capsys):
    tiny = ["data=random", "model.d_model=16", "model.n_layers=1", "model.context=8", "engine=noop", "steps=1"]
    words = [*tiny, "plugins=[toyexp.testing.null]", "callbacks=[]", "name=2024_01,2024_02", "seed=1,2"]
    tmp_path = tmp_path / "sweep"
    assert main(["-m", *words, f"hydra.sweep.dir={tmp_path}"]) == 0
    names = [yaml.safe_load(path.read_text())["name"] for path in sorted(tmp_path.glob("*/config.yaml"))]
    assert names == ["2024_01", "2024_01", "2024_02", "2024_02"], capsys.readouterr()


def test_a_sweep_varies_the_last_key_fastest_and_has_one_directory(tmp_path, capsys):
    line = ["-m", "sweep.isolate=false", *SMALL, "engine=cpu", "steps=1", "callbacks=[]"]
    assert main([*line, "model.n_layers=1,2", "seed=3,4"]) == 0
    jobs = sorted(tmp_path.glob("outputs/sweeps/*/*/config.yaml"))
    configs = [yaml.safe_load(p.read_text()) for p in jobs]
    assert [(c["model"]["n_layers"], c["seed"]) for c in configs] == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert len({p.parent.parent for p in jobs}) == 1


@pytest.fixture
def tiny_sweep(tmp_path):
    """Write an experiment with a sweep to a user's directory; return the overrides that select it."""
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "sweeping.yaml").write_text(
        "# @package _global_\nsteps: 1\nbatch_size: 4\nmodel: {d_model: 16, context: 16}\n"
        "hydra: {sweeper: {params: {seed: '3,4', model.n_layers: [1, 2], lr: 0.5}}}\n"
    )
    return ["--config-dir", "own", "experiment=sweeping", *SMALL, "engine=ggml", "engine.threads=1", "callbacks=[]"]


def sweep_configs(tmp_path):
    return [yaml.safe_load(p.read_text()) for p in sorted(tmp_path.glob("outputs/sweeps/*/*/config.yaml"))]


def test_an_experiment_may_define_a_sweep(tiny_sweep, tmp_path, capsys):
    assert main(["-m", "sweep.isolate=false", *tiny_sweep]) == 0
    jobs = [(c["seed"], c["model"]["n_layers"], c["lr"], c["steps"]) for c in sweep_configs(tmp_path)]
    assert jobs == [(3, 1, 0.5, 1), (3, 2, 0.5, 1), (4, 1, 0.5, 1), (4, 2, 0.5, 1)]
    assert "  3  seed=4 model.n_layers=2 " in capsys.readouterr().out


def test_cached_overrides_are_parsed_into_independent_values():
    words = ["model.x=[1,{a: b}]", "lr=0.1,0.2", "seed=range(3)"]
    for _ in range(2):
        given, rates, seeds = parse(words)
        assert given.value() == [1, {"a": "b"}]
        assert [*rates.sweep_iterator()] == [0.1, 0.2] and [*seeds.sweep_iterator()] == [0, 1, 2]
        given.value()[1]["a"] = given.value()[0] = given.key_or_group = "changed"
        with pytest.raises(UserError, match=r"a=\["):
            parse(["a=["])


def test_a_job_configuration_has_one_value_per_swept_key_of_the_experiment(tiny_sweep):
    flags, settings = split_flags(tiny_sweep)
    ahead = JobConfigs(Request.parse(settings, Source.from_flags(extra=flags["--config-dir"])))
    for number, words in enumerate(
        (["seed=3", "model.n_layers=1", "lr=0.5"], ["seed=4", "model.n_layers=2", "lr=0.5"])
    ):
        settings = ahead.run_config(Job(number, words)).build_config().settings
        assert (settings.seed, settings.lr) == (3 + number, 0.5)


def test_command_line_values_replace_those_of_the_experiments_sweep(tiny_sweep, tmp_path, capsys):
    assert main(["-m", "sweep.isolate=false", *tiny_sweep, "model.n_layers=1", "lr=0.1,0.2", "seed=5"]) == 0
    jobs = [(c["seed"], c["model"]["n_layers"], c["lr"]) for c in sweep_configs(tmp_path)]
    assert jobs == [(5, 1, 0.1), (5, 1, 0.2)]


MORE = " (more: toyexp help sweeps)\n"


def test_an_experiment_with_a_sweep_needs_one_value_per_key_for_a_single_run(tiny_sweep, tmp_path, capsys):
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


def test_an_invalid_sweep_in_an_experiment_is_rejected_with_one_line(tiny_sweep, tmp_path, capsys):
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
