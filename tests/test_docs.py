"""The documentation matches the code: its plugins are installed and run, its commands work, its tables are complete."""

import inspect
import json
import math
import re
import sys
from pathlib import Path

import environments
import make_speeds
import numpy as np
import pytest
from cells import CELLS, ticked_cells
from structure import PUBLIC
from tiny import write_base

from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.interfaces.hooks import Registration, RunHooks
from toyexp.interfaces.ops import Ops
from toyexp.tokenizers.byte_level import Bytes

ROOT = Path(__file__).parent.parent
PAGES = {str(path.relative_to(ROOT / "docs" / "pages")): path.read_text() for path in ROOT.glob("docs/pages/*/*.md")}
README = (ROOT / "README.md").read_text()
ALL = README + "".join(PAGES.values())


def shown_file(name):
    """Return the code block that begins with `# <name>`."""
    return re.search(rf"```\w+\n(# {re.escape(name)}\n.*?)```", ALL, re.DOTALL)[1]


def install_plugin(root, project, module):
    """Install a plugin from the documentation into a new virtual environment; return its directory and its python."""
    (root / "pyproject.toml").write_text(shown_file(project))
    for name in (f"{module}.py", f"test_{module}.py"):
        (root / name).write_text(shown_file(name))
    python = environments.make_environment(root / "env", install=root)
    (root / f"{module}.py").unlink()  # only the installed copy is left
    return root, python


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return install_plugin(tmp_path_factory.mktemp("demo"), "pyproject.toml", "toyexp_demo")


@pytest.fixture(scope="module")
def signals(tmp_path_factory):
    root, python = install_plugin(
        tmp_path_factory.mktemp("signals"), "pyproject.toml of toyexp-signals", "toyexp_signals"
    )
    (root / "elsewhere").mkdir()
    (root / "elsewhere" / "genome.fa").write_text("> one\n" + "GATTACA\n" * 400)
    return root, python


def run(environment, *words):
    root, python = environment
    (root / "elsewhere").mkdir(exist_ok=True)
    return environments.run(python, *words, cwd=root / "elsewhere")


@pytest.mark.release
def test_plugins_lists_the_documented_plugin(environment):
    listed = run(environment, "-m", "toyexp", "plugins")
    assert re.search(r"head_only +Train only the embedding .*\[demo, toyexp-demo 0\.1\]", listed.stdout)
    assert "good_enough" in listed.stdout


@pytest.mark.release
def test_the_documented_plugin_runs_an_experiment(environment):
    done = run(
        environment, "-m", "toyexp", "engine=ggml", "recipe=head_only", "callbacks=[default,good_enough]",
        "callbacks.good_enough.loss=6", "steps=40", "eval_every=5", "data.max_mb=0.1", "model.d_model=16",
        "model.d_ff=16", "model.context=16", "lr=0.02",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "stopped because good_enough: below 6.0 after" in done.stdout
    assert re.search(r"model\.gguf", done.stdout)


@pytest.mark.release
def test_the_plugins_command_has_help_errors_and_completion_like_built_in_ones(environment):
    root, _ = environment
    results = {name: run(environment, "-m", "toyexp", *line.split()) for name, line in {
        "all": "--help", "losses": "losses --help", "none": "losses nowhere", "typo": "losses --tob 1",
        "near": "lossse", "many": "losses --top many", "two": "losses a b",
    }.items()}  # fmt: skip
    assert "Print the last held-out loss of every run in a directory, best first  [demo, toyexp-demo 0.1]" in (
        results["all"].stdout
    )
    assert results["losses"].returncode == 0 and "usage: toyexp losses [options]" in results["losses"].stdout
    assert "\n  --top 5  print only the best 5" in results["losses"].stdout
    for name, part in (
        ("none", "losses nowhere: holds no run"), ("typo", "--top?"), ("near", "did you mean losses?"),
        ("many", "--top many: must be a whole number"), ("two", "losses a b: takes one directory"),
    ):  # fmt: skip
        assert results[name].returncode == 2 and len(results[name].stderr.splitlines()) == 1
        assert part in results[name].stderr
    for name, loss in (("good", 1.5), ("bad", 3.0), ("better", 1.25)):
        folder = root / "elsewhere" / "runs" / name
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"eval_loss": loss}))
    assert run(environment, "-m", "toyexp", "losses", "runs", "--top=2").stdout == (
        "1.2500  runs/better\n1.5000  runs/good\n"
    )
    completions = run(environment, "-m", "toyexp", "completion", "--for", "bash", "toyexp losses --", " ")
    colours = ["--color=always", "--color=auto", "--color=never"]
    assert completions.stdout.split() == [*colours, "--help", "--top"]


def check_conformance(environment, module):
    root, _ = environment
    done = run(environment, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(root / f"test_{module}.py"))
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.release
def test_the_documented_plugin_passes_the_conformance_kit(environment):
    assert "skipped" not in check_conformance(environment, "toyexp_demo")


@pytest.mark.release
def test_the_documented_data_and_kind_pass_the_conformance_kit(signals):
    output = check_conformance(signals, "toyexp_signals")
    assert re.search(r"SKIPPED \[1\].*examples may be equal", output) and output.count("SKIPPED") == 1


@pytest.mark.release
@pytest.mark.parametrize("engine", ["cpu", "ggml"])
def test_a_model_of_a_plugins_kind_of_data_trains_and_can_be_evaluated_and_described(signals, engine):
    words = ["data=tones", "recipe=listen", "model=listener", f"engine={engine}"]
    directory = f"outputs/{engine}"
    done = run(signals, "-m", "toyexp", *words, "steps=60", "lr=0.01", f"hydra.run.dir={directory}")
    assert done.returncode == 0, done.stderr
    first, last = re.search(r"held-out loss ([\d.]+) -> ([\d.]+)", done.stdout).groups()
    assert float(last) < 0.1 < 0.6 < float(first) and " clips/s" in done.stdout
    evaluation = run(signals, "-m", "toyexp", "eval", f"{directory}/model.gguf", f"engine={engine}")
    assert re.search(
        rf"^data +tones, 200 held-out targets$.*^loss {last}$", evaluation.stdout, re.DOTALL | re.MULTILINE
    )
    description = run(signals, "-m", "toyexp", "describe", f"{directory}/model.gguf").stdout
    assert "operations a clip" in description and f"eval      toyexp eval {directory}/model.gguf\n" in description
    assert re.search(r"listener +[\d.k]+ +F32 .* signals  ", run(signals, "-m", "toyexp", "models", directory).stdout)
    mute = run(signals, "-m", "toyexp", "generate", f"{directory}/model.gguf", "--prompt", "x")
    assert mute.returncode == 2 and "reads signals and cannot generate text" in mute.stderr


@pytest.mark.release
def test_mismatched_kinds_of_data_give_a_one_line_error_that_suggests_matching_parts(signals):
    for words, reason in [
        (
            ["recipe=listen"],
            "read signals; model=llama reads tokens; try: toyexp recipe=listen model=listener data=tones",
        ),
        (["data=tones"], "data=tones gives signals; try: toyexp recipe=listen model=listener data=tones"),
        (["recipe=listen", "model=listener", "data=dna", "data.path=genome.fa"], "data=dna gives tokens; try: toyexp "),
        (["data=dna", "data.path=none.fa"], "data.path=none.fa: there is no such file"),
    ]:
        done = run(signals, "-m", "toyexp", *words, "engine=ggml")
        assert done.returncode == 2 and reason in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.release
def test_the_documented_callback_reports_its_metric(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("toyexp_spread.py").write_text(shown_file("toyexp_spread.py"))
    sizes = ["model.context=8", "model.d_model=8", "model.n_heads=2", "model.n_layers=1", "engine=ggml", "steps=4"]
    chosen = ["plugins=[toyexp_spread]", "callbacks=[default,spread]", "data=random", "eval_every=2"]
    assert main([*chosen, *sizes, "hydra.run.dir=run"]) == 0
    events = map(json.loads, Path("run/events.jsonl").read_text().splitlines())
    jumps = np.abs(np.diff([event["loss"] for event in events if event["kind"] == "step"]))
    calm = json.loads(Path("run/result.json").read_text())["eval_scores"]["calm"]
    assert len(jumps) == 3 and calm == pytest.approx(-jumps.mean())


@pytest.mark.release
def test_the_documented_dna_data_trains_and_eval_detects_it_by_file_name(signals):
    sizes = ["model.context=16", "model.d_model=16", "model.d_ff=32", "hydra.run.dir=outputs/dna", "engine=ggml"]
    done = run(signals, "-m", "toyexp", "data=dna", "data.path=genome.fa", "steps=30", "lr=0.01", *sizes)
    assert "data    dna (2.52k tokens to train on)" in done.stdout
    words = ["outputs/dna/model.gguf", "--data", "genome.fa", "engine=ggml", "--json"]
    evaluation = json.loads(run(signals, "-m", "toyexp", "eval", *words).stdout)
    assert (evaluation["data"], evaluation["path"]) == ("dna", "genome.fa") and evaluation[
        "bits_per_byte"
    ] < 2  # of log2(4) bits
    assert evaluation["perplexity"] == pytest.approx(math.exp(evaluation["loss"]))


@pytest.mark.release
def test_the_documented_optimiser_matches_sgd_on_every_engine(tmp_path, monkeypatch, capsys):
    """Load the documented file as a local plugin and compare it with SGD without momentum."""
    for name in ("plain_sgd.py", "test_plain_sgd.py"):
        (tmp_path / name).write_text(shown_file(name))
    monkeypatch.chdir(tmp_path)
    usual = ["-m", "data=random", "data.vocab=32", "model.d_model=16", "model.context=8", "model.d_ff=24", "steps=4",
             "lr=0.5", "optim.weight_decay=0.1", "engine=cpu,ggml", "sweep.isolate=false",
             "callbacks=[gguf_export]", "eval_every=0"]  # fmt: skip
    assert main([*usual, "plugins=[plain_sgd]", "optim=plain_sgd", "hydra.sweep.dir=a"]) == 0, capsys.readouterr().err
    assert main([*usual, "optim=sgd", "optim.momentum=0", "hydra.sweep.dir=b"]) == 0, capsys.readouterr().err
    for path in sorted(tmp_path.glob("a/*/model.gguf")):
        with GGUFFile(path) as one, GGUFFile(tmp_path / "b" / path.parent.name / "model.gguf") as other:
            for name in one.tensors:
                np.testing.assert_allclose(one.read(name), other.read(name), atol=1e-6, err_msg=name)
    kit = environments.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert kit.returncode == 0 and "skipped" not in kit.stdout, kit.stdout[-3000:]


@pytest.mark.release
def test_a_sweep_over_experiment_files_pairs_each_optimiser_with_its_lr(tmp_path, monkeypatch, capsys):
    """Run the documented file for Lion, and a copy of it for Muon."""
    lion = re.search(r"```yaml\n(# @package _global_\n# mine/experiment/by_lion.*?)```", ALL, re.DOTALL)[1]
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "by_lion.yaml").write_text(lion)
    (folder / "by_muon.yaml").write_text(lion.replace("lion", "muon").replace("0.001", "0.006"))
    monkeypatch.chdir(tmp_path)
    words = ["-m", "--config-dir=mine", "experiment=by_lion,by_muon", "seed=0,1", "data=random", "data.vocab=32",
             "model.d_model=16", "model.context=8", "model.d_ff=24", "engine=ggml", "steps=1", "eval_every=0",
             "callbacks=[events]", "sweep.isolate=false", "hydra.sweep.dir=all"]  # fmt: skip
    assert main(words) == 0, capsys.readouterr().err
    events = [json.loads(path.read_text().splitlines()[0]) for path in sorted(tmp_path.glob("all/*/events.jsonl"))]
    assert [(e["optim"]["name"], e["optim"]["lr"], e["config"]["seed"]) for e in events] == [
        ("lion", 0.001, 0), ("lion", 0.001, 1), ("muon", 0.006, 0), ("muon", 0.006, 1),
    ]  # fmt: skip


@pytest.mark.release
def test_the_documented_model_trains_alike_on_two_engines_and_generates_the_same_text(tmp_path, monkeypatch, capsys):
    """Load the documented file as a local plugin; run its test file in a separate process."""
    for name in ("toyexp_parallel.py", "test_toyexp_parallel.py"):
        (tmp_path / name).write_text(shown_file(name))
    monkeypatch.chdir(tmp_path)
    words = ["plugins=[toyexp_parallel]", "model=parallel", "model.width=16", "model.heads=2", "model.context=16"]
    parity = ["parity", *words, "engine=cpu:recompute=true,ggml", "data.max_mb=0.1", "steps=6", "--json"]
    assert main(parity) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["engines"][0]["loss"]["largest"] < 1e-4
    usual = [*words, "engine=cpu", "data.max_mb=0.1", "steps=20", "lr=0.02", "eval_every=0", "hydra.run.dir=run"]
    assert main(usual) == 0, capsys.readouterr().err
    capsys.readouterr()
    texts = []
    for engine in ("cpu", "ggml"):
        generate = ["generate", "run/model.gguf", "--prompt", "It was", "--tokens", "8", "--temperature", "0", "--json"]
        assert main([*generate, "--engine", engine, words[0]]) == 0, capsys.readouterr().err
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] and texts[0]
    done = environments.run(sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout


@pytest.mark.release
def test_the_documented_llama_variant_trains_alike_on_two_engines_and_keeps_its_architecture_name(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "gelu_llama.py").write_text(shown_file("gelu_llama.py"))
    monkeypatch.chdir(tmp_path)
    words = ["plugins=[gelu_llama]", "model=gelu_llama", "model.d_model=16", "model.d_ff=16", "model.context=16"]
    parity = ["parity", *words, "engine=cpu,ggml", "data=random", "steps=4", "--json"]
    assert main(parity) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["engines"][0]["loss"]["largest"] < 1e-4
    assert main([*words, "engine=ggml", "data=random", "steps=2", "eval_every=0", "hydra.run.dir=run"]) == 0
    with GGUFFile("run/model.gguf") as file:
        assert file.metadata["general.architecture"] == "gelu_llama"
    assert main(["describe", "run", words[0]]) == 0
    assert "  gelu  " in capsys.readouterr().out
    assert main(["export", "run", "--type", "hf", words[0]]) == 2
    assert "model=gelu_llama" in capsys.readouterr().err


def test_every_op_is_documented():
    for name in vars(Ops):
        if not name.startswith("_") and name not in ("plugin_kind", "positionwise"):
            assert f"`{name}`" in PAGES["plugins/ops.md"] or f"`{name}(" in PAGES["plugins/ops.md"], name


@pytest.mark.release
def test_the_documented_format_is_written_by_export_and_runs_and_passes_the_kit(tmp_path, monkeypatch, capsys):
    """Write the documented files into an empty directory and use them there."""
    for name in ("npz_format.py", "test_npz_format.py"):
        (tmp_path / name).write_text(shown_file(name))
    monkeypatch.chdir(tmp_path)
    words = ["data=random", "data.vocab=32", "model.d_model=16", "model.context=8", "model.d_ff=24", "steps=4",
             "engine=ggml", "eval_every=0", "callbacks=[gguf_export,npz_export]",
             "callbacks.npz_export.compressed=true",
             "hydra.run.dir=run", "plugins=[npz_format]"]  # fmt: skip
    assert main(words) == 0, capsys.readouterr().err
    assert main(["export", "run", "--type", "npz", "--force", "plugins=[npz_format]"]) == 2
    assert "run/model.npz: belongs to the run run; choose another path" in capsys.readouterr().err
    exports = [["--type", "npz", "--to", "plain.npz"], ["--type", "npz", "compressed=true", "--to", "small.npz"]]
    assert [main(["export", "run", *export, "--force", "plugins=[npz_format]"]) for export in exports] == [0, 0]
    assert main(["export", "small.npz", "--type", "gguf", "--to", "back.gguf", "plugins=[npz_format]"]) == 0
    write_base(Path("text.gguf"), "llama", tokenizer=Bytes())
    capsys.readouterr()
    assert main(["export", "text.gguf", "--type", "npz", "plugins=[npz_format]"]) == 0
    assert "note: the tokenizer is not stored" in capsys.readouterr().out
    assert main(["export", "text.npz", "--type", "q8_0", "plugins=[npz_format]"]) == 0
    assert "warning: written without a tokenizer: text.npz: it has no tokenizer" in capsys.readouterr().out
    np.savez("other.npz", a=np.zeros(3))
    assert main(["export", "other.npz", "--type", "gguf", "plugins=[npz_format]"]) == 2
    assert capsys.readouterr().err == "toyexp: error: other.npz: holds no known model\n"
    assert main(["plugins", "npz", "plugins=[npz_format]"]) == 0
    assert "compressed=false" in capsys.readouterr().out
    with GGUFFile("run/model.gguf") as file, np.load("plain.npz") as plain, np.load("small.npz") as small:
        assert all(np.array_equal(GGUFFile("back.gguf").read(n), file.read(n)) for n in file.tensors)
        assert {*plain.files} == {*small.files} == {"model", *file.tensors}
        assert all(np.array_equal(plain[n], file.read(n)) and np.array_equal(small[n], plain[n]) for n in file.tensors)
    kit = environments.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert kit.returncode == 0 and "skipped" not in kit.stdout, kit.stdout[-3000:]


def test_documented_code_imports_only_public_packages():
    code = "\n".join(re.findall(r"```python\n(.*?)```", ALL, re.DOTALL))
    imports = set(re.findall(r"^ *from (toyexp[.\w]*) import", code, re.MULTILINE))
    plugins = {module for module in imports if module.startswith("toyexp_")}
    assert imports - plugins <= set(PUBLIC)


def test_every_hook_is_documented_with_its_signature():
    for spec in (Registration, RunHooks):
        for name, hook in vars(spec).items():
            if not name.startswith("_"):
                signature = str(inspect.signature(hook)).replace("'", "")
                page = "plugins/index.md" if spec is Registration else "plugins/callback.md"
                assert f"{name}{signature}" in PAGES[page], name


def test_every_file_of_the_core_is_in_the_source_tree_page():
    tree = PAGES["reference/house.md"]
    for folder in Path(__file__).parent.parent.joinpath("toyexp").glob("*/"):
        room = re.search(rf"^  {folder.name}/.*?(?=^  \w+/|^plugins)", tree, re.DOTALL | re.MULTILINE)
        assert room or not (folder / "__init__.py").exists(), folder.name
        for path in folder.rglob("*.py"):
            assert path.name.startswith("__") or re.search(rf"\b{path.stem}\b", room[0]), path


def test_the_table_of_files_ticks_all_tested_cells():
    """The figures in the table come from the last `make table`."""
    assert ticked_cells(PAGES["reference/files.md"]) == CELLS


def test_the_tables_of_speeds_are_generated_from_bench_reports():
    """A report changes the table, and all figures are rounded by one rule."""
    machines = json.loads(make_speeds.FIGURES.read_text())
    assert make_speeds.section(PAGES["reference/measured.md"]) == make_speeds.text(machines)
    engine = {
        "name": "ggml",
        "seconds_per_step": 0.0123456,
        "beyond_import_bytes": 7_654_321,
        "rounds": [1],
        "ratio": 1,
    }
    make_speeds.add_report(
        machines, "2 cores", "bench_1m", {"engines": [engine, {**engine, "name": "cpu", "device_bytes": None}]}
    )
    changed = set(make_speeds.text(machines).splitlines()) - set(
        make_speeds.section(PAGES["reference/measured.md"]).splitlines()
    )
    ggml, torch = (next(line for line in changed if title in line) for title in ("AVX-512): `ggml` |", "| `cpu`"))
    assert ggml.split(" | ")[2] == "12.3 ms (1.00)" and torch.split(" | ")[2] == "12.3 ms (1.00)"
    assert any("memory beyond the imports" in line and "| 8, 8 MB |" in line for line in changed)
    with pytest.raises(SystemExit, match="another machine bench_1m: takes one of 2 cores, 2 cores, AVX2, H200"):
        make_speeds.add_report(machines, "another machine", "bench_1m", {"engines": []})


def test_the_documented_fault_figures_are_those_of_the_last_run():
    assert f"```text\n{(Path(__file__).parent / 'faults' / 'figures.txt').read_text()}```\n" in ALL


@pytest.mark.parametrize("page", [README, *PAGES.values()], ids=["README", *PAGES])
def test_relative_links_lead_to_existing_files_and_headings(page):
    folder = ROOT if page is README else ROOT / "docs" / "pages" / next(n for n, text in PAGES.items() if text is page)
    for file, anchor in re.findall(
        r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    ):
        target = ((ROOT if page is README else folder.parent) / file).resolve()
        text = page if not file else target.read_text() if target.suffix == ".md" else ""
        assert not file or target.is_file(), file
        assert not anchor or anchor in _anchors(text), f"{file}#{anchor}"


def _anchors(page):
    """Return the anchors that GitHub makes of headings: lower case, no punctuation, hyphens for blanks."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_the_readme_is_short():
    assert len(README.split()) < 900
