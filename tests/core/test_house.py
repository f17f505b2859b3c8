"""The rooms of toyexp/ and the imports between them: one way, and never in a circle. And who writes files.

Also the check of prose, which `make check` runs.
"""

import ast

import prose
import pytest
from structure import ROOT, import_cycles, module_graph

BASE = {"base"}
TOKENIZERS = BASE | {"tokenizers"}
INTERFACES = TOKENIZERS | {"interfaces"}
PLUGINS = INTERFACES | {"plugins"}
BELOW = PLUGINS | {"batching", "formats", "reference"}
MAY_IMPORT = {
    "base": BASE,
    "tokenizers": TOKENIZERS,
    "interfaces": INTERFACES,
    "plugins": PLUGINS,
    "batching": INTERFACES | {"batching"},
    "formats": PLUGINS | {"formats"},
    "reference": INTERFACES | {"reference"},
    "training": BELOW | {"training"},
    "config": BELOW | {"training", "config"},
    "results": BELOW | {"training", "results"},
    "inference": BELOW | {"training", "config", "results", "inference"},
    "runner": BELOW | {"training", "config", "runner"},
    "sweeps": BELOW | {"training", "config", "results", "runner", "sweeps"},
    "testing": BELOW | {"training", "testing"},
    "cli": BELOW | {"training", "config", "results", "runner", "inference", "sweeps", "testing", "cli"},
    "api": BELOW | {"training", "config", "results", "runner", "inference", "sweeps", "api"},
    "__main__": BASE | {"cli", "sweeps"},
}
GRAPH = module_graph()


def room(module):
    return module.split(".")[1]


@pytest.mark.parametrize("name", sorted({room(module) for module in GRAPH}))
def test_a_package_imports_only_packages_below_it(name):
    """At the head of a file, inside functions and for type checkers alike."""
    for module, targets in GRAPH.items():
        if room(module) == name:
            assert {t for t in targets if room(t) not in MAY_IMPORT[name]} == set(), module


@pytest.mark.parametrize("package", ["toyexp", *sorted(p.name for p in (ROOT / "plugins").glob("*/"))])
def test_there_are_no_import_cycles(package):
    assert import_cycles(module_graph(package)) == []


# Writers besides base/writing.py, whose functions follow no link, and why that is safe.
FRESH = "into a folder or under a name that write_atomically or Ledger.output has just made"
ELSEWHERE = "outside of any run or sweep"
WRITERS = {
    ("toyexp/base/drawing.py", "write_bytes"): FRESH,
    ("toyexp/cli/new.py", "mkdir"): ELSEWHERE,
    ("toyexp/cli/new.py", "write_text"): FRESH,
    ("toyexp/cli/plugin_check.py", "write_text"): ELSEWHERE,
    ("toyexp/cli/bench_stepper.py", "write_text"): "to /proc",
    ("toyexp/cli/files.py", "write_text"): FRESH,
    ("toyexp/config/schema.py", "write_text"): ELSEWHERE,
    ("toyexp/formats/gguf/write.py", "open"): FRESH,
    ("toyexp/formats/huggingface.py", "mkdir"): FRESH,
    ("toyexp/formats/safetensors.py", "open"): FRESH,
    ("toyexp/results/report.py", "write_bytes"): FRESH,
    ("toyexp/sweeps/directory.py", "mkdir"): "the directory itself, which links above it may lead to",
    ("toyexp/sweeps/directory.py", "write_bytes"): FRESH,
    ("toyexp/sweeps/launchers/on_submitit.py", "touch"): "in a folder that mkdtemp has made",
    ("toyexp/sweeps/search/searcher.py", "write_text"): FRESH,
    ("toyexp/sweeps/launchers/stack_process.py", "open"): "a pipe that the sweep has made",
    ("toyexp/sweeps/launchers/stacks.py", "write_text"): "in a folder that TemporaryDirectory has made",
    ("toyexp/base/terminal.py", "open"): "/dev/null",
    ("toyexp/training/checkpoint.py", "open"): "what save_file has just written",
    ("toyexp/training/checkpoint.py", "save_file"): "into a folder that make_fresh has made",
    ("toyexp/training/precompute.py", "mkdir"): ELSEWHERE,
    ("toyexp/training/precompute.py", "savez"): FRESH,
    ("toyexp/training/rundir.py", "FileHandler"): "its _open calls open_for_writing",
    ("toyexp/training/rundir.py", "mkdir"): "the directory itself, which links above it may lead to",
    ("plugins/toyexp_callbacks/plots.py", "write_bytes"): FRESH,
    ("plugins/toyexp_callbacks/dashboard.py", "touch"): "a new file, in a folder that make_folder has checked",
    ("plugins/toyexp_callbacks/dashboard.py", "RecordWriter"): "fills that new file",
    ("plugins/toyexp_data/cache.py", "open"): "a new file of the cache (mode x)",
    ("plugins/toyexp_data/cache.py", "mkdir"): ELSEWHERE,
    ("plugins/toyexp_ggml/native.py", "mkdir"): ELSEWHERE,
    ("plugins/toyexp_ggml/native.py", "write_bytes"): FRESH,
}
NAMES = ("write_text", "write_bytes", "touch", "mkdir", "makedirs", "symlink_to", "symlink", "link", "hardlink_to",
         "savez", "save_file", "FileHandler", "RecordWriter", "copyfile", "copytree", "copy2")  # fmt: skip


def writes(node):
    """The name under which a node of a syntax tree opens, makes or fills a file, if it does."""
    if isinstance(node, ast.ClassDef):
        return next((name for base in node.bases if (name := ast.unparse(base).split(".")[-1]) in NAMES), None)
    if not isinstance(node, ast.Call):
        return None
    attribute = isinstance(node.func, ast.Attribute)
    name = node.func.attr if attribute else getattr(node.func, "id", "")
    if name not in (*NAMES, "open", "fdopen"):
        return None
    called = ast.unparse(node.func)
    if name in NAMES and (attribute or name[0].isupper() or name == "save_file"):
        return name
    words = [ast.unparse(word) for word in (*node.args, *(k.value for k in node.keywords))]
    if called == "os.open":
        return "open" if any(f"O_{flag}" in word for word in words for flag in ("WRONLY", "RDWR", "CREAT")) else None
    if name not in ("open", "fdopen") or "open_for_writing" in "".join(words):
        return None
    return "open" if any(set(w.strip("'")) & set("wax+") for w in words if w[:1] == "'" and len(w) < 6) else None


def test_files_are_written_only_by_functions_that_do_not_follow_links():
    writers = set()
    for path in [*(ROOT / "toyexp").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]:
        name = path.relative_to(ROOT).as_posix()
        if name != "toyexp/base/writing.py" and not name.startswith("toyexp/testing/"):
            writers |= {(name, word) for node in ast.walk(ast.parse(path.read_text())) if (word := writes(node))}
    assert writers == set(WRITERS)


CLEAR = '"""Load files."""\n\n\ndef load_file(path):\n    """Return the text of a file."""\n'
PAGE, WORD = "This page lists the files of a run.", "word "


@pytest.fixture
def check_prose(tmp_path, monkeypatch, capsys):
    """Check a module and a page; return True if they pass, and the printed lines."""

    def run(module: str = CLEAR, page: str = PAGE, *options: str):
        for name, text in (("code.py", module), ("page.md", page)):
            (tmp_path / name).write_text(text)
        for name, roots in (("ROOT", tmp_path), ("CODE", ("code.py",)), ("PAGES", ("page.md",))):
            monkeypatch.setattr(prose, name, roots)
        monkeypatch.setattr("sys.argv", ["prose.py", *options])
        return prose.main() == 0, capsys.readouterr().out

    return run


UNCLEAR = {
    "docstring": (CLEAR.replace("Return the text of a", "Those of a"), PAGE, "code.py:4: Those of a file"),
    "comment": (CLEAR + "# Whoever asks for a file is told.\n", PAGE, "code.py:6: Whoever asks"),
    "page": (CLEAR, f"# Files\n\nThis is what the run writes. {200 * WORD}", "page.md:3: This is what the run"),
    "name": (CLEAR.replace("load_file", "_loaded"), PAGE, "code.py:4: _loaded"),
}


@pytest.mark.parametrize("unclear", UNCLEAR)
def test_the_check_of_prose_lists_an_unclear_text_or_name_and_fails(check_prose, unclear):
    module, page, line = UNCLEAR[unclear]
    passed, out = check_prose(module, page)
    assert not passed and f"\n  {line}" in out


def test_the_check_of_prose_passes_up_to_its_limits(check_prose):
    """At most 3 hits per thousand words of a page; a list of hits is printed on request."""
    page = "Whoever asks. " * 3 + WORD * 994
    assert check_prose(page=page)[0] and not check_prose(page=f"Whoever {page}")[0]
    assert "page.md:1: Whoever" not in check_prose(page=page)[1]
    assert "page.md:1: Whoever" in check_prose(CLEAR, page, "--list")[1]


def test_the_check_of_prose_reads_no_tables_code_or_openings_of_pages(check_prose):
    page = "| before | Whoever is told |\n\n```\nwhat is told\n```\n\nThose of a run are its files."
    assert check_prose(page=page)[0]
    assert check_prose(CLEAR + "# Those of a run are its files.\n")[0], "an opening counts in docstrings only"


def test_the_check_of_prose_reads_no_names_of_tests(check_prose):
    assert check_prose(f"{CLEAR}\n\ndef test_a_file_is_loaded():\n    pass\n")[0]
