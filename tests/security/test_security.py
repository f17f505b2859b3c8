"""Claims of SECURITY.md: input files cannot run code, access other files or exhaust the machine."""

import ast
import gc
import json
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from toyexp.base.errors import UserError
from toyexp.base.files import NODE_LIMIT
from toyexp.base.signals import Interrupted
from toyexp.cli.main import main
from toyexp.config.safe_yaml import check_file
from toyexp.training.rundir import escape_interpolations

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "toyexp").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")])
NOOP = ["plugins=[toyexp.testing.null]", "engine=noop", "data=text", "data.path=book.txt", "data.tokenizer=byte",
        "steps=3", "model.context=16", "model.d_model=16", "model.d_ff=16", "model.n_layers=1"]  # fmt: skip
PARTS = "schema, {model: nano}, {data: text}, {recipe: scratch}, {engine: noop}, {optim: adamw}, {callbacks: [default]}"


@pytest.fixture(autouse=True)
def _work_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKEN", "hunter2-secret")
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 300)


def write_config_dir(text, name="theirs", parts=PARTS):
    """Write a configuration directory as if received from someone else."""
    Path(name, "experiment").mkdir(parents=True)
    Path(name, "config.yaml").write_text(f"defaults: [{parts}, _self_]\n{text}\n")


def run_rejected(capsys, *words):
    """Run a command line that must be rejected without writing a file; return its one-line error."""
    before = {p for p in Path().rglob("*") if p.name != "__pycache__"}
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert err.startswith("toyexp: error: ") and err.count("\n") == 1, err
    assert "hunter2" not in out + err
    assert {p for p in Path().rglob("*") if p.name != "__pycache__"} == before
    return err


# -- configuration files ----------------------------------------------------------------------------------------------

TOUCH = "{_target_: builtins.open, file: touched, mode: w}"
BAD = {
    f"model: {TOUCH}": "line 2: _target_ names code",
    f"callbacks: {{cosine: {TOUCH}}}": "line 2: _target_ names code",
    "data: {path: {deep: [{_partial_: true}]}}": "line 2: _partial_ names code",
    "recipe: {target: os.system}": "line 2: target names code",
    f"hydra: {{callbacks: {{x: {TOUCH}}}}}": "_target_ names code",
    "hydra: {job_logging: {handlers: {x: {class: logging.FileHandler}}}}": "hydra.job_logging is not allowed in a file",
    "hydra: {hydra_logging: {version: 1}}": "hydra.hydra_logging is not allowed in a file",
    "hydra: {launcher: {n: 1}}": "hydra.launcher is not allowed in a file",
    "hydra: {sweeper: {max_batch_size: 1}}": "only hydra.sweeper.params",
    "hydra: {searchpath: ['pkg://tempting']}": "hydra.searchpath loads a Python package",
    "hydra: {job: {env_set: {LD_PRELOAD: x.so}}}": "hydra.job is not allowed in a file",
    "name: !!python/object/apply:os.system ['touch touched']": "YAML tag",
    "name: !!python/name:os.system": "YAML tag",
    "name: !custom x": "YAML tag",
    "seed: 1:30": "YAML reads 1:30 as a number in base 60",
    "lr: 1:30.5": "YAML reads 1:30.5 as a number in base 60",
    "name: ${oc.env:TOKEN}": "key=$NAME",
    "name: a-${oc.env:TOKEN,none}": "key=$NAME",
    "data: {path: '${oc.decode:${oc.env:TOKEN}}'}": "is not allowed in a file",
    "name: '${oc.${steps}:TOKEN}'": "is not allowed in a file",
    "name: '${ oc.env:TOKEN}'": "key=$NAME",
    r"name: '\\${oc.env:TOKEN}'": "key=$NAME",
    "name: ${oc.create:x}": "is not allowed in a file",
    "a: &a [1, *a]": "contains itself",
    "a: &a " + "[" * 1100 + "]" * 1100: "nested too deeply",
    "a: 1\n" + "# " + "x" * 300_000: "larger than the limit of 256 KiB",
}


@pytest.mark.parametrize("text", BAD, ids=lambda t: t[:50])
def test_a_config_file_with_code_or_hydra_settings_is_rejected(text, capsys):
    write_config_dir(text)
    assert BAD[text] in run_rejected(capsys, "--config-path", "theirs", *NOOP)


@pytest.mark.parametrize("flag", ["--cfg=job", "--info=config", "-m"])
def test_a_config_file_with_code_is_rejected_for_display_and_sweeps(flag, capsys):
    write_config_dir(f"hydra: {{callbacks: {{x: {TOUCH}}}}}")
    assert "_target_ names code" in run_rejected(capsys, "--config-path", "theirs", flag, *NOOP)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"model: {TOUCH}", "_target_ names code"),
        ("# @package hydra\ncallbacks: {x: {a: 1}}", "by '@package hydra'"),
        ("# @package hydra.job_logging\nhandlers: {}", "by '@package hydra.job_logging'"),
        ("# @package _global_.hydra\njob_logging: {}", "by '@package _global_.hydra'"),
        ("# A fast one.\n# @package hydra\ncallbacks: {x: {a: 1}}", "by '@package hydra'"),
        ("defaults: [/evil@hydra: x]\nsteps: 3", "/evil@hydra sets Hydra's own settings"),
        ("defaults: [{/evil@_global_.hydra.run: x}]", "/evil@_global_.hydra.run sets Hydra's own settings"),
        ("defaults: [/../secret]\nsteps: 3", "may include only files of this directory"),
        ("name: ${oc.env:TOKEN}", "key=$NAME"),
    ],
)
def test_a_preset_with_code_or_hydra_settings_is_rejected(text, message, capsys):
    Path("presets", "experiment").mkdir(parents=True)
    Path("secret.yaml").write_text("name: hunter2\n")
    Path("presets", "experiment", "evil.yaml").write_text(text if text[0] == "#" else "# @package _global_\n" + text)
    assert message in run_rejected(capsys, "--config-dir", "presets", "experiment=evil", *NOOP)


def test_config_files_of_hydra_groups_are_rejected_in_a_users_directory(capsys):
    write_config_dir("hydra: {run: {dir: run}}", parts=PARTS + ", {override hydra/job_logging: evil}")
    Path("theirs", "hydra", "job_logging").mkdir(parents=True)
    Path("theirs", "hydra", "job_logging", "evil.yaml").write_text("version: 1\n")
    assert "hydra/job_logging/evil" in run_rejected(capsys, "--config-path", "theirs", *NOOP)


def test_yaml_aliases_cannot_exhaust_memory():
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    began = time.process_time()
    with pytest.raises(UserError, match=f"more than the limit of {NODE_LIMIT} values"):
        check_file(Path("bomb.yaml"), bomb)
    assert time.process_time() - began < 1
    check_file(Path("fine.yaml"), "a: &a {lr: 1}\nb: {<<: *a, steps: 3}")


@pytest.mark.parametrize(
    "word",
    ["+model._target_=os.system", "+hydra.callbacks.x._target_=os.system", "++data._partial_=true", "+target=os.system",
     "+data.x={_target_: os.system}", "+data.x=[{a: {_args_: [1]}}]", "~_target_"],
)  # fmt: skip
def test_an_override_that_names_code_is_rejected(word, capsys):
    assert re.search("unknown key|only callbacks can be removed|that key is there", run_rejected(capsys, *NOOP, word))


def test_interpolations_of_keys_time_and_environment_still_work(capsys, monkeypatch):
    """Files may use their own keys, interpolations and the time; the command line may also use the environment."""
    write_config_dir("name: mine-${steps}\nhydra: {run: {dir: 'out/${now:%Y}/${name}'}, sweeper: {params: {}}}\n"
           "callbacks: {sample: {prompt: 'a \\${HOME} b'}}",
           parts=PARTS.replace("[default]", "[default, sample]"))  # fmt: skip
    assert (
        main(["--config-path", "theirs", *NOOP, "callbacks.sample.tokens=1", "seed=${oc.decode:${oc.env:SEED}}"]) == 2
    )
    os.environ["SEED"] = "7"
    try:
        line = [w for w in NOOP if "plugins" not in w]
        words = ["--config-path", "theirs", NOOP[0], *line, "callbacks.sample.tokens=1", "seed=${oc.env:SEED}"]
        assert main(words) == 0, capsys.readouterr().err
    finally:
        del os.environ["SEED"]
    (run,) = Path("out").glob("*/mine-3")
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert (saved["seed"], saved["name"]) == (7, "mine-3")


TEXTS = ["${oc.env:TOKEN}", r"\${a}", r"\\${a} ${b}", "a $ {b} $${c}", "plain", r"C:\dir\${x}"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_looks_like_an_interpolation_is_saved_literally(text):
    saved = yaml.safe_load(yaml.safe_dump(escape_interpolations({"a": [text], "b": 1})))
    assert OmegaConf.to_container(OmegaConf.create(saved), resolve=True) == {"a": [text], "b": 1}


def test_a_resumed_or_repeated_run_resolves_no_interpolations(capsys):
    """Saved configurations have plain values only, and modified ones with interpolations or types are rejected."""
    words = [*NOOP, "hydra.run.dir=run", "callbacks=[default,sample]", "callbacks.sample.tokens=1"]
    assert main([*words, r"callbacks.sample.prompt='\${oc.env:TOKEN}'"]) == 0
    again = ["--config-path", "run", NOOP[0], "hydra.run.dir=again"]
    assert main(again) == 0, capsys.readouterr().err
    for run in ("run", "again"):
        sample = next(json.loads(s) for s in Path(run, "events.jsonl").read_text().splitlines() if '"sample"' in s)
        assert sample["prompt"] == "${oc.env:TOKEN}"
    assert main(["resume=run", NOOP[0], "steps=5"]) == 0, capsys.readouterr().err
    text = Path("run/config.yaml").read_text()
    for old, new, message in (
        ("name: scratch-llama", "name: ${oc.env:TOKEN}", "key=$NAME"),
        ("recipe:\n", "recipe:\n  _target_: os.system\n", "_target_ names code"),
        ("name: scratch-llama", "name: !!python/name:os.system", "YAML tag"),
    ):
        assert old in text
        Path("run/config.yaml").write_text(text.replace(old, new))
        for line in (["resume=run", "steps=9"], ["resume=run", "steps=9", "engine=noop"], again[:2]):
            assert message in run_rejected(capsys, NOOP[0], *line)
    # A plugin is never loaded because the configuration of a run names it.
    Path("run/config.yaml").write_text(text)
    assert "plugins=[toyexp.testing.null]" in run_rejected(capsys, "resume=run", "steps=9", "engine=ggml")


# -- data -------------------------------------------------------------------------------------------------------------


def png(width, height, body=b""):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("huge.png", png(100_000, 100_000)),
        ("large.png", png(12_000, 9_000)),  # above the size where Pillow warns
        ("huge.bmp", b"BM" + struct.pack("<IHHIIiiHHIIiiII", 60, 0, 0, 54, 40, 60000, 60000, 1, 24, 0, 0, 1, 1, 0, 0)),
        ("huge.gif", b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 128, 0, 0) + bytes(10) + b"\xff" * 4 + b"\0\2"),
        ("text.png", png(4, 4)[:33] + struct.pack(">I", 20_000) + b"zTXtk\0\0" + zlib.compress(bytes(20_000_000))),
        ("disk.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(touched) (w) file"),
        ("page.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(touched) (w) file"),
    ],
)  # fmt: skip
def test_an_image_that_exhausts_memory_or_runs_a_program_is_rejected(name, content, capsys):
    for place in ("a/one.png", "a/two.png", "b/one.png", "b/two.png"):
        file = Path("all", place)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(4, 4, bytes([0, *bytes(12)] * 4)))
    Path("all", "a", name).write_bytes(content)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    words = [
        "model=vit",
        "recipe=vit_tiny",
        "data=images",
        "data.path=all",
        "data.image_size=4",
        "data.val_fraction=0.5",
    ]
    code = main([NOOP[0], "engine=noop", *words, "model.patch=2", "steps=1", "hydra.run.dir=run"])
    assert time.process_time() - began < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB
    if name == "disk.eps":
        assert code == 0, "not an image suffix, so never opened"
    else:
        assert code == 2 and name in capsys.readouterr().err
    assert not Path("touched").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("../secret.png,0", "lies outside of data.path=all"),
        ("/etc/passwd,0", "lies outside of data.path=all"),
        ("a/../../secret.png,0", "lies outside of data.path=all"),
        ("one.png,999999999999", "need an image each, but the file lists 3"),
        ("x" * 200_000 + ",0", "cannot be read"),
    ],
)
def test_a_list_of_labels_cannot_name_files_outside_the_data_directory(line, message, capsys):
    Path("all").mkdir()
    for place in ("all/one.png", "all/two.png", "secret.png"):
        Path(place).write_bytes(png(4, 4, bytes([0, *bytes(12)] * 4)))
    Path("labels.csv").write_text(f"one.png,0\ntwo.png,1\n{line}\n")
    words = ["model=vit", "recipe=vit_tiny", "data=images", "data.path=all", "data.labels=labels.csv"]
    assert message in run_rejected(capsys, NOOP[0], "engine=noop", *words, "data.image_size=4", "model.patch=2")


ATTACKS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('touched', 'w') }}",
    "{{ cycler.__init__.__globals__.os.system('touch touched') }}",
    "{% for i in range(999999999) %}{% endfor %}",
    "{{ messages.append(1) }}",
    "{% include 'book.txt' %}",
    "{% import 'os' as os %}",
    "{{ ''.join(['x' * 1000000] * 20) }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ strftime_now.__self__._template.environment.globals.clear() }}",
    "{{ (strftime_now | attr('__func__')).__globals__['os'] }}",
    "{% generation %}{{ caller.__globals__.x }}{% endgeneration %}",
    "{% generation %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endgeneration %}",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_chat_template_cannot_access_python_and_is_stopped_in_time(attack, monkeypatch):
    pytest.importorskip("jinja2")
    from toyexp.tokenizers import chat_template as chat
    from toyexp.tokenizers.byte_level import Bytes

    monkeypatch.setattr(chat, "SECONDS", 0.3)
    messages = [{"role": "user", "content": "hello"}]
    began = time.process_time()
    with pytest.raises(UserError):  # some raise at once: Jinja evaluates constants when it compiles
        chat.Template(attack, Bytes(), "model.gguf").render(messages, answer=True)
    assert time.process_time() - began < 10 and not Path("touched").exists()
    assert chat.Template("{{ messages[0].content }}", Bytes(), "x").render(messages, True).text == "hello"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ 9 ** (9 ** 8) }}",
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,  # Python allows 20 nested loops
        "{% if 1 %}" * 101 + "{% endif %}" * 101,
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    ],
)
def test_a_chat_template_that_cannot_be_compiled_is_rejected_in_time(attack, monkeypatch):
    pytest.importorskip("jinja2")
    from toyexp.tokenizers import chat_template as chat
    from toyexp.tokenizers.byte_level import Bytes

    monkeypatch.setattr(chat, "SECONDS", 0.3)
    began = time.process_time()
    with pytest.raises(UserError, match=r"model\.gguf: its chat template is not valid \("):
        chat.Template(attack, Bytes(), "model.gguf")
    assert time.process_time() - began < 10


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces the memory limit")
@pytest.mark.parametrize(
    "attack",
    [
        '{{ "x" * 10**10 }}',
        '{{ messages | batch(10**9, "x") | list }}',
        '{{ "a" | center(10**10) }}',
    ],
)
def test_a_chat_template_that_exceeds_the_memory_limit_raises_an_error(attack):
    pytest.importorskip("jinja2")
    from toyexp.tokenizers import chat_template as chat
    from toyexp.tokenizers.byte_level import Bytes

    began = time.monotonic()
    with pytest.raises(UserError, match="takes more than 1 GB of memory"):
        chat.Template(attack, Bytes(), "model.gguf").render([{"role": "user", "content": "hello"}], answer=True)
    assert time.monotonic() - began < 20


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_signal_stops_a_chat_template_at_once_and_others_still_render():
    pytest.importorskip("jinja2")
    from toyexp.tokenizers import chat_template as chat
    from toyexp.tokenizers.byte_level import Bytes

    def handle(number, frame):
        raise Interrupted(number)

    began, before = time.monotonic(), signal.signal(signal.SIGALRM, handle)
    try:
        slow, quick = chat.Template(LOOPS, Bytes(), "x"), chat.Template("{{ messages[0].content }}", Bytes(), "x")
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupted):
            slow.render([], answer=True)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < chat.SECONDS
    assert quick.render([{"content": "hello"}], True).text == "hello"
    process = os.fork()
    if not process:
        os._exit(0 if quick.render([{"content": "of the child"}], True).text == "of the child" else 1)
    assert quick.render([{"content": "of the parent"}], True).text == "of the parent"
    assert os.waitpid(process, 0)[1] == 0, "two processes do not read each other's answers"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_renderer_process_ends_with_the_last_chat_template():
    pytest.importorskip("jinja2")
    from toyexp.tokenizers import chat_template as chat
    from toyexp.tokenizers.byte_level import Bytes

    def children():
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

    gc.collect()  # frees templates of other tests
    before = children()
    one, two = (chat.Template(text, Bytes(), "x") for text in "ab")
    assert len(children()) == len(before) + 1
    del one
    assert two.render([], answer=True).text == "b"
    del two
    assert children() == before


def test_a_chat_template_over_65536_characters_is_rejected():
    pytest.importorskip("jinja2")
    from toyexp.tokenizers.byte_level import Bytes
    from toyexp.tokenizers.chat_template import Template

    with pytest.raises(UserError, match="more than 65536 characters"):
        Template("x" * 70_000, Bytes(), "model.gguf")


# -- secrets ----------------------------------------------------------------------------------------------------------


def test_a_run_writes_no_secret_of_the_environment_or_of_git(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    git = ["git", "-c", "user.name=n", "-c", "user.email=n@example.org"]
    for words in (["init", "-q"], ["remote", "add", "origin", "https://me:hunter2-git@example.org/x.git"],
                  ["commit", "-q", "--allow-empty", "-m", "hunter2-message"]):  # fmt: skip
        subprocess.run([*git, *words], check=True, cwd=tmp_path)
    secrets = {name: f"hunter2-{name}" for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PASSWORD")}
    words = [*NOOP, "callbacks=[default,wandb]", "hydra.run.dir=run"]
    command = [sys.executable, "-m", "toyexp", *words]
    done = subprocess.run(command, env={**os.environ, **secrets}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "hunter2" not in done.stdout + done.stderr
    files = [p for p in Path("run").rglob("*") if p.is_file()]
    assert any(p.suffix == ".wandb" for p in files) and len(files) > 8
    assert [p for p in files if b"hunter2" in p.read_bytes()] == []


def test_wandb_has_no_setting_for_an_api_key():
    from toyexp.plugins.settings import list_settings
    from toyexp_callbacks.dashboard import Wandb

    assert {s.name for s in list_settings(Wandb)} == {
        "mode",
        "project",
        "entity",
        "group",
        "tags",
        "artifacts",
        "every",
    }


# -- the source itself ------------------------------------------------------------------------------------------------


def test_no_source_file_evaluates_unpickles_or_instantiates_input():
    """Search the syntax tree of every file for calls and imports that execute code or unpickle data."""
    forbidden_calls = {"eval", "exec", "compile", "__import__", "popen", "instantiate", "get_class", "get_method",
                       "get_object", "_locate", "unsafe_load", "full_load", "from_code"}  # fmt: skip
    forbidden_imports = ("pickle", "cloudpickle", "dill", "shelve", "marshal", "runpy", "hydra.utils",
                         "hydra._internal.instantiate")  # fmt: skip
    # Optuna stores the state of CMA-ES as a pickle: study.py checks it first and rejects all other names in it.
    # Ranks receive a plan as a pickle and reject all names except dataclasses.
    # bench runs the baseline scripts of its checkout.
    may_import = {
        "toyexp/sweeps/search/study.py": {"pickle"},
        "plugins/toyexp_torch/distributed/rpc.py": {"pickle"},
        "toyexp/cli/bench_stepper.py": {"runpy"},
    }
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names]
                full = (
                    names
                    if isinstance(node, ast.Import)
                    else [node.module or "", *(f"{node.module}.{n}" for n in names)]
                )
                allowed = {"codecs", *may_import.get(path.relative_to(ROOT).as_posix(), ())}
                forbidden = [n for n in full if n.startswith(forbidden_imports)]
                assert not [n for n in forbidden if n.split(".")[0] not in allowed], where
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = getattr(getattr(node.func, "value", None), "id", "")
            arguments = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            if (owner, name) not in {("re", "compile"), ("torch", "compile")}:
                assert name not in forbidden_calls, where
            assert (owner, name) not in {("yaml", "load"), ("os", "system")}, where
            assert not (owner == "torch" and name == "load"), where
            assert arguments.get("shell") in (None, False), where
            assert arguments.get("allow_pickle") in (None, False), where
            if owner in ("np", "numpy") and name == "load":
                assert arguments.get("allow_pickle") is False, where
            if name == "import_module":
                # These import by a variable name: public names, commands, packages of launchers and dashboards.
                by_name = path.name in ("lazy.py", "launcher.py", "commands.py", "dashboard.py")
                assert by_name or isinstance(node.args[0], ast.Constant | ast.JoinedStr), where
            assert name != "Environment", f"{where}: templates run in the sandbox"


def test_security_md_mentions_every_claim():
    text = (ROOT / "SECURITY.md").read_text()
    assert len(text.split()) < 900
    for word in ("plugins=[...]", "_target_", "oc.env", "chat template", "checkpoint", "report"):
        assert word in text, word
