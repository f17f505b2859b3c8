"""The sources of a run: recorded at its start, and compared by every command that uses the run later."""

import hashlib
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import write_base

import toyexp
from toyexp.base.ownership import fingerprint
from toyexp.cli.main import main
from toyexp.config.build import resolve_paths
from toyexp.config.request import Request
from toyexp.inference.evaluate import TrainedRun
from toyexp.plugins.discovery import load
from toyexp.results.comparison import Comparison
from toyexp.results.report import report_command
from toyexp.results.run_dirs import read_run
from toyexp.tokenizers.byte_level import Bytes
from toyexp.training.experiment import prepare
from toyexp.training.provenance import MOVED, Origin, data_digests, parse_origin, source_digests
from toyexp_data.text import Text

BOOK = "It was a bright cold day in April, and the clocks were striking. " * 60
QUICK = ["data=text", "data.path=book.txt", "engine=ggml", "engine.threads=1", "batch_size=2", "model.context=12",
         "steps=2", "eval_every=2", "checkpoint_every=1", "lr=0.05"]  # fmt: skip
NANO = ["model.d_model=16", "model.n_layers=1", "model.n_heads=2"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Create two bases of one shape, and runs from scratch, of an adapter and of all weights."""
    root = tmp_path_factory.mktemp("home")
    (root / "book.txt").write_text(BOOK)
    write_base(root / "base.gguf", "llama", tokenizer=Bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main([*QUICK, *NANO, "hydra.run.dir=plain"]) == 0
        assert main([*QUICK, "recipe=lora", "recipe.base=base.gguf", "callbacks=[default,hf_export]",
                     "hydra.run.dir=lora"]) == 0  # fmt: skip
        assert main([*QUICK, "recipe=full", "recipe.base=base.gguf", "hydra.run.dir=full"]) == 0
    shutil.copy(root / "full/model.gguf", root / "other.gguf")  # the same shape, other values
    return root


@pytest.fixture(autouse=True)
def working_directory(home, tmp_path, monkeypatch):
    """Change to a new directory, which does not contain the runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_json(run, name="result.json"):
    text = Path(run, name).read_text()
    return json.loads(text.splitlines()[0] if name.endswith("l") else text)


# -- the record -------------------------------------------------------------------------------------------------------


def test_a_run_records_its_working_directory_and_digests_of_its_files(home):
    for run, role, file in (("lora", "base", "base.gguf"), ("full", "base", "base.gguf")):
        names = ("result.json", "events.jsonl", "checkpoints/step-2/state.json")
        result, begin, state = (read_json(home / run, name) for name in names)
        assert result["cwd"] == begin["cwd"] == state["cwd"] == str(home)
        assert result["sources"] == begin["sources"]
        assert result["sources"][role] == fingerprint(home / file)
        assert result["sources"]["text"] == begin["data"]["text_sha256"][:16]
        assert str(home) not in (home / run / "config.yaml").read_text()  # config.yaml holds paths as typed


def test_the_typed_settings_of_a_run_and_of_a_job_repeat_it(home, monkeypatch):
    monkeypatch.chdir(home)
    assert main(["-m", *QUICK, *NANO, "seed=0,1", "sweep.isolate=false", "hydra.sweep.dir=sweep"]) == 0
    for run, words in (("plain", [*QUICK, *NANO]), (next(Path("sweep").glob("1-*")), [*QUICK, *NANO, "seed=1"])):
        typed = read_json(run)["typed"]
        assert typed == read_json(run, "events.jsonl")["typed"] == words
        (entry,) = Comparison.build([read_run(Path(run))]).entries
        assert report_command(entry, str(run)) == shlex.join(["toyexp", *words])
        assert main([*typed, f"hydra.run.dir=again-{len(words)}"]) == 0
        assert read_json(f"again-{len(words)}")["eval_loss"] == read_json(run)["eval_loss"]
    assert main(["--config-path", "plain", "--config-name", "config", "seed=2", "hydra.run.dir=other"]) == 0
    assert "typed" not in read_json("other")  # the words alone do not repeat it
    (entry,) = Comparison.build([read_run(Path("other"))]).entries
    assert report_command(entry, "other") == "toyexp --config-path other --config-name config"


@pytest.mark.parametrize(
    ("overrides", "changed_roles"),
    [
        (
            ["recipe=warm", "recipe.donor={home}/other.gguf", "model.tied=false"],
            {"donor", "data", "tokenizer", "tokens"},
        ),
        (["data.val_fraction=0.2"], {"data", "tokens"}),
        (["data.tokenizer=char"], {"data", "tokenizer", "tokens"}),
        (["data.path=moved.txt"], set()),
        (["data.path=edited.txt"], {"data", "text", "tokens"}),
    ],
)
def test_changed_data_or_files_change_the_recorded_digests(home, overrides, changed_roles):
    Path("moved.txt").write_text(BOOK)
    Path("edited.txt").write_text(BOOK.replace("April", "March"))
    words = [*QUICK, *NANO, "steps=1", "eval_every=0", "checkpoint_every=0", "hydra.run.dir=run"]
    assert main([*words, f"data.path={home}/book.txt", *(word.format(home=home) for word in overrides)]) == 0
    recorded, sources = read_json(home / "plain")["sources"], read_json("run")["sources"]
    assert {role for role in recorded.keys() | sources.keys() if recorded.get(role) != sources.get(role)} - {
        "vocabulary"
    } == changed_roles


@pytest.mark.parametrize(
    ("changed", "role"),
    [({"train_images": 7}, "data"), ({"held_out_images": 3}, "data"), ({"classes_digest": "c2"}, "classes")],
)
def test_the_digest_of_data_covers_its_split_and_not_the_names_of_classes(changed, role):
    facts = {"images_sha256": "ab", "classes_digest": "c1", "train_images": 8, "held_out_images": 2}
    before, after = data_digests(facts), data_digests({**facts, **changed})
    assert {key for key in before if before[key] != after[key]} == {role}


def test_a_loss_other_than_a_cross_entropy_has_a_digest_of_its_settings():
    Path("pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 40)
    Path("book.txt").write_text(BOOK)
    pairs = ["data=preference", "data.path=pairs.jsonl", "objective=preference"]

    def digest(*words):
        config = Request([], load(), ()).build_config("engine=ggml", "model=qwen3moe", "model.context=12", *words)
        return source_digests(prepare(config)).get("loss")

    assert digest(*pairs) == digest(*pairs, "objective.auxiliary=0.1")  # no part of the held-out loss
    others = ("objective.kind=dpo", "objective.kind=ipo", "objective.beta=0.3", "objective.beta=0.4")
    assert len({digest(*pairs, word) for word in others} - {None}) == 4
    assert digest("data=text", "data.path=book.txt", "objective.smoothing=0.1") is None


def test_a_record_resolves_paths_from_the_runs_working_directory(working_directory):
    Path("there").mkdir()
    Path("book.txt").write_text(BOOK)
    Path("there/book.txt").symlink_to(working_directory / "book.txt")  # the same file from both directories
    Path("there/a.jsonl").write_text("{}")
    resolve = Origin(working_directory / "there").resolve
    assert resolve("book.txt") == "book.txt" and resolve("a.jsonl") == f"{working_directory}/there/a.jsonl"
    assert resolve("*.jsonl") == f"{working_directory}/there/*.jsonl" and resolve("*.csv") == "*.csv"
    assert resolve(f"{working_directory}/x") == f"{working_directory}/x" and resolve("") == ""


def test_a_record_ignores_a_relative_working_directory():
    assert parse_origin({"cwd": "/home"}).cwd == Path("/home")
    assert parse_origin({"cwd": "outputs"}).cwd is parse_origin({}).cwd is None  # a relative path has no known base


@pytest.mark.parametrize("first_exists", [True, False])
def test_errors_name_the_directory_where_a_run_was_started(working_directory, home, capsys, monkeypatch, first_exists):
    (working_directory / "first").mkdir()
    (working_directory / "second").mkdir()
    shutil.copy(home / "book.txt", "first/book.txt")
    monkeypatch.chdir("first")
    assert main([*QUICK, *NANO, "hydra.run.dir=../run"]) == 0
    Path("book.txt").rename(working_directory / "second/book.txt")
    monkeypatch.chdir("../second")
    if not first_exists:
        Path("../first").rmdir()
    assert main(["resume=../run", "steps=3"]) == 0 and read_json("../run")["cwd"] == str(working_directory / "first")
    Path("book.txt").unlink()
    for words in (["resume=../run", "steps=4"], ["eval", "../run"]):
        output = run_cli(capsys, *words, code=2)
        missing = "" if first_exists else ", which no longer exists"
        message = f"the run was started in {working_directory / 'first'}{missing}; cd to "
        assert message in output and "if it was moved, type data.path=PATH" in output


def test_moved_data_and_a_moved_base_are_recognised_by_their_digests(working_directory, home, capsys, monkeypatch):
    shutil.copytree(home / "full", "run")
    (working_directory / "moved").mkdir()
    monkeypatch.chdir("moved")
    shutil.copy(home / "book.txt", "text.txt")
    shutil.copy(home / "base.gguf", "b.gguf")
    words = ["resume=../run", "steps=3", "data.path=text.txt", "recipe.base=b.gguf"]
    Path("other.txt").write_text(BOOK.replace("April", "March"))
    assert "contents of the text changed" in run_cli(capsys, *words[:2], "data.path=other.txt", code=2)
    assert "contents of the base changed" in run_cli(capsys, *words[:2], f"recipe.base={home}/other.gguf", code=2)
    output = run_cli(capsys, *words)
    assert (
        "data.path book.txt -> /" in output
        and "recipe.base base.gguf -> /" in output
        and "takes its place" not in output
    )
    assert read_json("../run")["sources"] == read_json(home / "full")["sources"]
    monkeypatch.chdir("..")  # the recorded paths must not depend on the working directory
    assert ", the run's own," in run_cli(capsys, "eval", "run", "engine=ggml")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("recipe.donor", ["recipe=warm", "recipe.donor=first.gguf", "model.tied=false"]),
        ("objective.teacher", ["data.tokenizer=byte", "objective=distil", "objective.teacher=first.gguf"]),
    ],
)
def test_a_moved_donor_or_teacher_is_recognised_by_its_digest(home, capsys, key, words):
    shutil.copy(home / "base.gguf", "first.gguf")
    assert main([*QUICK, *NANO, f"data.path={home}/book.txt", *words, "hydra.run.dir=run"]) == 0
    Path("first.gguf").rename("moved.gguf")
    error = run_cli(capsys, "resume=run", "steps=3", code=2)
    assert f"{key}=first.gguf: not found" in error and f"; if it was moved, type {key}=PATH" in error
    error = run_cli(capsys, "resume=run", "steps=3", f"{key}={home}/other.gguf", code=2)
    assert f"resume=run: the contents of the {key[key.index('.') + 1 :]} changed since the run started; " in error
    output = run_cli(capsys, "resume=run", "steps=3", f"{key}=moved.gguf")
    assert f"{key} first.gguf -> moved.gguf" in output


def test_a_path_typed_as_in_the_run_means_the_same_file_from_another_directory(home, capsys):
    shutil.copytree(home / "plain", "run")
    output = run_cli(capsys, "resume=run", "steps=3", "data.path=book.txt")
    assert "data.path" not in output and read_json("run")["steps"] == 3


def test_data_without_a_digest_of_its_bytes_cannot_be_moved(capsys, monkeypatch):
    facts = {"name": "text", "train_tokens": 9}
    monkeypatch.setattr("toyexp.batching.tokens.TokenDataset.describe", lambda data: facts)
    Path("book.txt").write_text(BOOK)
    assert main([*QUICK, *NANO, "hydra.run.dir=run"]) == 0
    Path("book.txt").rename("moved.txt")
    error = run_cli(capsys, "resume=run", "steps=3", "data.path=moved.txt", code=2)
    assert "other settings or data: data.path was book.txt and is moved.txt" in error


@pytest.mark.parametrize("cause", ["not found", "matches no file"])
@pytest.mark.parametrize(("key", "may_move"), [("data.path", True), ("data.tokenizer", False)])
def test_only_settings_that_may_move_are_suggested_for_a_missing_path(working_directory, key, may_move, cause):
    for start, path in ((working_directory.parent, "*.txt"), (working_directory, "*.txt"), (Path("/x"), "/*.txt")):
        with pytest.raises(toyexp.UserError) as error, Origin(start).explain_missing_paths(MOVED):
            raise toyexp.UserError(f"{key}={path}: {cause}; more: x")
        is_elsewhere = start == working_directory.parent
        assert (f"; the run was started in {start}; cd to " in str(error.value)) is is_elsewhere
        assert str(error.value).endswith(f"; if it was moved, type {key}=PATH") is may_move


def test_a_tokenizer_in_a_directory_without_a_dot_is_a_path_and_the_name_of_a_kind_is_not(tmp_path):
    for name in ("base", "byte"):
        (tmp_path / "start" / name).mkdir(parents=True)
    origin = Origin(tmp_path / "start")
    for typed, resolved in (("base", str(tmp_path / "start" / "base")), ("byte", "byte")):
        assert resolve_paths(Text, {"name": "text", "tokenizer": typed}, origin)["tokenizer"] == resolved


def test_a_resumed_run_keeps_its_recorded_working_directory(home, monkeypatch):
    shutil.copytree(home / "plain", "kept")
    Path("book.txt").write_text(BOOK)
    assert main(["resume=kept", "steps=3"]) == 0
    assert read_json("kept")["cwd"] == str(home) and read_json("kept")["steps"] == 3


# -- commands that use a run later -------------------------------------------------------------------------------------


def copy_home(home):
    """Copy the files and runs to the working directory and change recorded paths, as if all had been moved."""
    shutil.copytree(home, "home")
    for path in Path("home").glob("*/**/*.json*"):
        if path.suffix == ".jsonl" or path.name == "result.json":
            path.write_text(path.read_text().replace(str(home), str(Path("home").absolute())))
    return Path("home").absolute()


def run_cli(capsys, *words, code=0):
    capsys.readouterr()
    assert main([*words]) == code
    return "".join(capsys.readouterr())


def test_eval_reads_the_runs_data_from_the_runs_working_directory(home, capsys):
    Path("book.txt").write_text(BOOK.upper())  # a file of the same name in the directory of the eval command
    for model in ("plain", "full/checkpoints/step-2", "lora"):
        report = json.loads(run_cli(capsys, "eval", str(home / model), "engine=ggml", "--json"))
        assert report["own"] and report["path"] == str(home / "book.txt")
        assert report["loss"] == pytest.approx(read_json(home / model.split("/")[0])["eval_loss"], abs=2e-5)
    Path("moved.txt").write_text(BOOK)
    words = ["eval", str(home / "plain"), "engine=ggml", "--data", "moved.txt"]  # --data evaluates all of it
    assert ", part of which the run was trained on," in run_cli(capsys, *words)
    assert ", the run's own," in run_cli(capsys, *words, "data.val_fraction=0.05")
    assert ", not the run's own," in run_cli(capsys, "eval", str(home / "plain"), "engine=ggml", "--data", "book.txt")


@pytest.mark.parametrize("path", ["photos/val", ".", "others"])
def test_data_in_the_directory_of_the_runs_data_may_have_been_trained_on(path):
    record = Origin(Path.cwd(), {"data": "1", "images": "1"})
    trained = TrainedRun(Path("run"), {"name": "images", "path": "photos"}, 8, None, record)
    dataset = SimpleNamespace(describe=lambda: {"images_sha256": "2"})
    note = ", not the run's own" if path == "others" else ", some of which the run may have been trained on"
    assert trained.compare(dataset, ["data.path"], path) == (False, note)


def test_eval_rejects_edited_data_unless_its_path_is_typed(home, capsys):
    directory = copy_home(home)
    (directory / "book.txt").write_text(BOOK.replace("April", "March"))
    for words in ([], ["data.eval_batches=3"], ["data.val_fraction=0.2"]):
        error = run_cli(capsys, "eval", "home/plain", "engine=ggml", *words, code=2)
        assert (
            "not the data that the run was trained on: the contents of the text changed" in error
            and f"type data.path={directory}/book.txt" in error
        )
    for words in (["--data", f"{directory}/book.txt"], [f"data.path={directory}/book.txt"]):
        assert ", not the run's own," in run_cli(capsys, "eval", "home/plain", "engine=ggml", *words)


@pytest.mark.parametrize(
    ("run", "command"),
    [
        ("full", "eval {} engine=ggml"),
        ("lora", "eval {} engine=ggml"),
        ("lora", "eval other.gguf --adapter {} engine=ggml"),
        ("full", "export {} --type f16"),
        ("full", "generate {} --prompt It --tokens 2 --engine ggml"),
        ("lora", "describe {}"),
        ("lora", "merge other.gguf {} --out m.gguf"),
    ],
)
def test_a_checkpoint_whose_base_was_replaced_is_rejected(home, capsys, monkeypatch, run, command):
    shutil.copytree(home, "home")
    monkeypatch.chdir("home")
    state = Path(run, "checkpoints/step-1/state.json")
    Path("base.gguf").write_bytes(Path("other.gguf").read_bytes())
    monkeypatch.setattr(
        "toyexp.training.provenance.Origin.resolve", lambda self, typed: typed
    )  # paths resolve in this directory
    error = run_cli(capsys, *command.format(state.parent).split(), code=2)
    assert "base.gguf: its contents changed since the run" in error and not Path("m.gguf").exists()


def test_python_opens_an_adapter_only_on_the_base_of_its_run(home, monkeypatch):
    Path("place").mkdir()
    monkeypatch.chdir("place")
    shutil.copy(home / "book.txt", "book.txt")
    shutil.copy(home / "base.gguf", "base.gguf")
    assert main([*QUICK, "recipe=lora", "recipe.base=base.gguf", "callbacks.gguf_export.merged=false",
                 "hydra.run.dir=run"]) == 0  # fmt: skip
    monkeypatch.chdir("..")
    inputs = np.arange(8)
    logits = toyexp.open("place/run").logits(inputs, "ggml")
    assert logits.shape[0] == 8
    shutil.copy(home / "other.gguf", "place/base.gguf")
    with pytest.raises(toyexp.UserError, match="its contents changed since the run"):
        toyexp.open("place/run").logits(inputs, "ggml")


@pytest.mark.parametrize(
    "command",
    [
        "eval {home}/lora --adapter {home}/lora engine=ggml",
        "eval {home}/lora --adapter moved.gguf engine=ggml",
        "eval {home}/lora/checkpoints/step-1 --adapter {home}/lora engine=ggml",
        "eval merged.gguf --adapter moved.gguf engine=ggml",
        "merge {home}/lora {home}/lora --out m.gguf",
        "generate {home}/lora --adapter moved.gguf --prompt It",
        "merge merged.gguf {home}/lora/adapter-hf --out m.gguf",
        "eval {home}/lora/checkpoints/step-1 --adapter {home}/lora/adapter-hf engine=ggml",
        "recipe=lora recipe.base={home}/lora recipe.adapter={home}/lora model.context=12",
    ],
)
def test_an_adapter_is_rejected_on_a_model_that_has_it_merged_in(home, capsys, command):
    shutil.copy(home / "lora/adapter.gguf", "moved.gguf")
    if "merged.gguf" in command:
        assert main(["merge", str(home / "base.gguf"), "moved.gguf", "--out", "merged.gguf"]) == 0
    error = run_cli(capsys, *command.format(home=home).split(), code=2)
    assert "is already merged into" in error and not Path("m.gguf").exists()


def test_either_of_two_merged_adapters_is_rejected_on_the_merged_model(home, capsys):
    adapters = [str(home / "lora/checkpoints/step-1"), str(home / "lora/adapter.gguf")]
    for base, adapter, out in zip((home / "base.gguf", "one.gguf"), adapters, ("one.gguf", "two.gguf"), strict=True):
        assert main(["merge", str(base), adapter, "--out", out]) == 0
    for adapter in adapters:
        words = ["generate", "two.gguf", "--adapter", adapter, "--prompt", "It", "--tokens", "2", "--engine", "ggml"]
        assert "is already merged into" in run_cli(capsys, *words, code=2)


@pytest.mark.parametrize(
    "command",
    [
        "eval {home}/other.gguf --adapter moved.gguf engine=ggml data=text data.path={home}/book.txt",
        "merge {home}/other.gguf moved.gguf --out m.gguf",
        "merge {home}/other.gguf moved-hf --out m.gguf",
        "generate {home}/other.gguf --adapter moved.gguf --prompt It --tokens 2 --engine ggml",
        "recipe=lora recipe.base={home}/other.gguf recipe.adapter=moved.gguf data=text data.path={home}/book.txt "
        "steps=1 model.context=12 engine=ggml eval_every=0",
    ],
)
def test_a_warning_is_printed_for_an_adapter_on_another_base(home, capsys, command):
    shutil.copy(home / "lora/adapter.gguf", "moved.gguf")
    shutil.copytree(home / "lora/adapter-hf", "moved-hf")
    adapter = "moved-hf" if "moved-hf" in command else "moved.gguf"
    assert f"{adapter}: was trained on another file (base) than " in run_cli(capsys, *command.format(home=home).split())
    same_base_command = command.format(home=home).replace("other.gguf", "base.gguf").replace("m.gguf", "n.gguf")
    assert "trained on another" not in run_cli(capsys, *same_base_command.split())


def test_runs_can_be_resumed_and_generate_text_from_any_directory(home, capsys, monkeypatch):
    shutil.copytree(home / "lora", "runs/lora")
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert run_cli(capsys, "generate", "../runs/lora/checkpoints/step-1", "--prompt", "It", "--tokens", "2")
    assert "run     ../runs/lora" in run_cli(capsys, "resume=../runs/lora", "steps=3").replace(
        str(Path.cwd()) + "/", ""
    )
    assert (
        read_json("../runs/lora")["steps"] == 3
        and read_json("../runs/lora")["sources"] == read_json(home / "lora")["sources"]
    )


@pytest.mark.parametrize("command", ["resume={} steps=3", "eval {}", "eval {}/checkpoints/step-1"])
def test_the_error_names_the_working_directory_of_a_run_from_another_machine(home, capsys, command):
    shutil.copytree(home / "lora", "lora")
    if "resume" not in command:  # resume replaces only what the run itself wrote
        result = Path("lora/result.json")
        result.write_text(result.read_text().replace(str(home), "/gone/elsewhere"))
    for state in Path("lora").glob("checkpoints/*/state.json"):
        raw = state.read_text().replace(str(home), "/gone/elsewhere").encode()
        manifest = read_json(state.parent, "manifest.json")
        manifest["files"][state.name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        state.write_bytes(raw)
        state.with_name("manifest.json").write_text(json.dumps(manifest))
    words = command.format("lora").split()
    error = run_cli(capsys, *words, code=2)
    assert "not found" in error and "; the run was started in /gone/elsewhere" in error
    Path("book.txt").write_text(BOOK)
    shutil.copy(home / "base.gguf", "base.gguf")
    run_cli(capsys, *words)  # works with the files that it names in the working directory


def test_a_repeated_run_reports_that_its_data_has_changed(home, capsys):
    Path("book.txt").write_text(BOOK.upper())
    words = ["--config-path", str(home / "plain"), "--config-name", "config", "hydra.run.dir=again"]
    output = run_cli(capsys, *words)
    assert "this run repeats " in output and ", but the contents of the text changed" in output
    assert read_json("again")["cwd"] == str(Path.cwd())


def test_a_sweep_resumed_from_another_directory_uses_the_same_data(home, capsys, monkeypatch):
    Path("there").mkdir()
    monkeypatch.chdir("there")
    shutil.copy(home / "book.txt", "book.txt")
    words = [*QUICK, *NANO, "-m", "seed=0,1", "sweep.isolate=false", "hydra.sweep.dir=sweep"]
    assert main(words) == 0
    sweep = json.loads(Path("sweep/sweep.json").read_text())
    sweep["jobs"][1] |= {"status": "waiting", "directory": None, "code": None, "result": {}}
    shutil.rmtree("sweep/1-scratch-llama")
    Path("sweep/sweep.json").write_text(json.dumps(sweep))
    Path("../here").mkdir()
    monkeypatch.chdir("../here")
    Path("book.txt").write_text(BOOK.upper())
    assert "started in " in run_cli(capsys, "sweep.resume=../there/sweep")
    first, second = (read_json(f"../there/sweep/{number}-scratch-llama") for number in (0, 1))
    assert first["sources"] == second["sources"] and first["cwd"] == second["cwd"] != str(Path.cwd())


def test_swapped_and_renamed_directories_of_images_are_detected(capsys):
    from PIL import Image

    for name, shade in (("cats", 40), ("dogs", 200)):
        for i in range(4):
            Path("pets", name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (shade + i, i, 0)).save(f"pets/{name}/{i}.png")
    assert main(["experiment=vit_digits", "data=images", "data.path=pets", "data.image_size=8", "data.val_fraction=0.3",
                 "model.image_size=8", "model.d_model=16", "model.n_layers=1", "steps=1", "batch_size=2", "engine=cpu",
                 "engine.threads=1", "hydra.run.dir=vit", "eval_every=0", "checkpoint_every=1"]) == 0  # fmt: skip
    assert ", the run's own," in run_cli(capsys, "eval", "vit", "engine=cpu")
    Path("pets/cats").rename("pets/x")
    Path("pets/dogs").rename("pets/cats")
    Path("pets/x").rename("pets/dogs")
    assert "contents of the images changed" in run_cli(capsys, "eval", "vit", "engine=cpu", code=2)
    words = ["predict", "vit/checkpoints/step-1", "pets/cats/0.png"]
    assert "contents of the images changed" in run_cli(capsys, *words, code=2)
    Path("pets/cats").rename("pets/x")
    Path("pets/dogs").rename("pets/cats")
    Path("pets/x").rename("pets/zebras")  # the same images in the same order, with another class name
    assert "contents of the classes changed since the run" in run_cli(capsys, *words, code=2)
    assert "contents of the classes changed since the run" in run_cli(capsys, "resume=vit", "steps=2", code=2)


@pytest.mark.parametrize("launcher", ["serial", "stacked"])
def test_jobs_record_their_working_directory_and_sources(home, launcher):
    data = f"data.path={home}/book.txt"
    words = [*(word for word in QUICK if not word.startswith("data.path")), *NANO, data, "seed=0,1"]
    assert main(["-m", *words, f"sweep.launcher={launcher}", "hydra.sweep.dir=sweep"]) == 0
    for number in (0, 1):
        result = read_json(f"sweep/{number}-scratch-llama")
        assert result["cwd"] == str(Path.cwd()) and result["sources"] == read_json(home / "plain")["sources"]


# -- files of a run that were replaced --------------------------------------------------------------------------------


@pytest.mark.parametrize("replacement", ["copied", "linked"])
@pytest.mark.parametrize("command", ["eval run", "describe run", "export run --type f16 --to out.gguf"])
def test_a_model_file_that_the_run_did_not_write_is_rejected(home, capsys, command, replacement):
    shutil.copytree(home / "plain", "run")
    model = Path("run/model.gguf")
    model.unlink()
    model.symlink_to(home / "full/model.gguf") if replacement == "linked" else shutil.copy(
        home / "full/model.gguf", model
    )
    output = run_cli(capsys, *command.split(), code=2)
    assert (
        "run/model.gguf" in output and "was replaced after the run wrote it" in output and not Path("out.gguf").exists()
    )


def test_eval_reports_that_named_data_was_trained_on(home, capsys):
    output = run_cli(capsys, "eval", str(home / "plain"), "--data", str(home / "book.txt"), "engine=ggml")
    assert "part of which the run was trained on" in output and "not the run's own" not in output


def test_a_named_pipe_instead_of_a_base_is_rejected(home, capsys):
    shutil.copytree(home / "full", "run")
    (home / "base.gguf").rename("kept.gguf")
    try:
        os.mkfifo(home / "base.gguf")
        assert "base.gguf" in run_cli(capsys, "eval", "run/checkpoints/step-2", "engine=ggml", code=2)
    finally:
        (home / "base.gguf").unlink()
        Path("kept.gguf").rename(home / "base.gguf")


@pytest.mark.parametrize("other", ["full", "seed"])
@pytest.mark.parametrize("command", ["resume=run steps=3", "eval run/checkpoints/step-2 engine=ggml"])
def test_a_checkpoint_of_another_run_is_rejected(home, capsys, command, other):
    shutil.copytree(home / "plain", "run")
    if not (home / other).exists():
        assert main([*QUICK, *NANO, f"data.path={home}/book.txt", "seed=5", f"hydra.run.dir={home}/seed"]) == 0
    shutil.rmtree("run/checkpoints/step-2")
    shutil.copytree(home / other / "checkpoints/step-2", "run/checkpoints/step-2")
    assert "another" in run_cli(capsys, *command.split(), code=2)


def test_control_characters_in_a_checkpoints_digest_are_escaped():
    (change,) = Origin(None, {"data": "a\x1b[2J"}).list_changes({"data": "b\x1b[2J"})
    assert change.isprintable()


# -- files that change while a run trains ------------------------------------------------------------------------------

SPOIL_PLUGIN = """
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from toyexp import Callback, hookimpl

@dataclass(eq=False)
class Spoil(Callback):
    "Rewrite the base during training."
    name: ClassVar[str] = "spoil"
    how: str = "in place"

    @hookimpl
    def on_step(self, run, step):
        if step == 1:
            base = Path("mine.gguf")
            content = bytearray(base.read_bytes())
            content[-4:] = bytes(4)
            if self.how == "renamed":
                Path("other.gguf").write_bytes(content)
                Path("other.gguf").replace(base)
            else:
                base.write_bytes(content if self.how == "in place" else base.read_bytes())

@hookimpl
def register_callbacks(register):
    register(Spoil)
"""


@pytest.mark.parametrize(
    ("engine", "how", "code"),
    [("ggml", "in place", 1), ("ggml", "renamed", 0), ("ggml", "as it was", 0), ("cpu", "in place", 0)],
)
def test_a_base_modified_while_ggml_maps_it_fails_the_run(home, capsys, monkeypatch, engine, how, code):
    Path("spoil.py").write_text(SPOIL_PLUGIN)
    monkeypatch.delitem(sys.modules, "spoil", raising=False)
    shutil.copy(home / "base.gguf", "mine.gguf")
    shutil.copy(home / "book.txt", "book.txt")
    words = [word for word in QUICK if word != "engine=ggml"] + ["recipe=lora", "recipe.base=mine.gguf"]
    words += ["plugins=[spoil]", "callbacks=[default,spoil]", f"callbacks.spoil.how={how}", "hydra.run.dir=mine"]
    output = run_cli(capsys, *words, f"engine={engine}", code=code)
    assert ("mine.gguf: was modified while the run read it" in output) == bool(code)
    assert Path("mine/model.gguf").exists() == (not code)


def test_pruning_keeps_a_checkpoint_of_another_run(home):
    shutil.copytree(home / "plain", "run")
    shutil.copytree(home / "full/checkpoints/step-2", "run/checkpoints/step-1", dirs_exist_ok=True)
    before = Path("run/checkpoints/step-1/state.safetensors").read_bytes()
    assert main(["resume=run", "steps=8", "checkpoint_keep=1"]) == 0
    assert [p.name for p in sorted(Path("run/checkpoints").iterdir())] == ["step-1", "step-8"]
    assert Path("run/checkpoints/step-1/state.safetensors").read_bytes() == before
