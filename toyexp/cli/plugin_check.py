"""`toyexp plugins --check PATH`: run a plugin's tests and the conformance suites of its parts.

The plugin need not be installed. A part is one class that it registers, such as an optimiser.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import io
import os
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from toyexp.base.errors import Unavailable, UserError
from toyexp.base.formatting import align_columns
from toyexp.base.packages import block_exit, explain_import_error, require_package
from toyexp.interfaces.command import Answer
from toyexp.plugins.discovery import GROUP, load_package
from toyexp.plugins.exporter import Exporter
from toyexp.plugins.registry import Offer, Registry

TRIAL_ENGINES = ("ggml", "cpu")  # engines on which parts of other kinds are tested, if they work here
PACKAGE = "the plugin under test"


@dataclass
class Line:
    """Row of the report of `toyexp plugins --check`.

    The row has the results of one conformance suite for one part. One more row has the results of all other tests.
    """

    part: str  # how users select it, such as optim=sgdr; empty for other tests
    suite: str  # name of the suite's class, such as OptimiserSuite
    counts: Counter[str] = field(default_factory=Counter)  # number of tests: passed, failed and skipped
    failures: list[str] = field(default_factory=list)
    note: str = ""  # for example, why tests were skipped or not run

    @property
    def verdict(self) -> str:
        """FAIL if a test failed, else PASS if one passed, else "skipped" if one was skipped, else "not run"."""
        if self.failures:
            return "FAIL"
        return "PASS" if self.counts["passed"] else "skipped" if self.counts["skipped"] else "not run"

    def plain(self) -> dict[str, Any]:
        """Return the part, suite, verdict, counts, failures and note, for --json."""
        counts = {name: self.counts[name] for name in ("passed", "failed", "skipped")}
        return {"part": self.part, "suite": self.suite, "verdict": self.verdict, **counts,
                "failures": self.failures, "note": self.note}  # fmt: skip


@dataclass
class CheckReport(Answer):
    """Results of checking a plugin: a line for each part and each suite that tested it."""

    path: str  # as typed
    checked: list[Line]

    @property
    def has_passed(self) -> bool:
        """True if no test failed and every part has tests, even if all tests of a part were skipped."""
        return all(line.verdict in ("PASS", "skipped") for line in self.checked)

    def plain(self) -> dict[str, Any]:
        """Return the path, whether the plugin passed, and the data of each line, for --json."""
        return {"path": self.path, "good": self.has_passed, "checked": [line.plain() for line in self.checked]}

    def lines(self) -> list[str]:
        """Return the report as lines of text: a table with a row per part and suite, then a line per failed test."""
        rows = []
        for line in self.checked:
            counts = ", ".join(f"{n} {word}" for word in ("passed", "failed", "skipped") if (n := line.counts[word]))
            rows.append([line.part, line.suite, line.verdict, "; ".join(filter(None, [counts, line.note]))])
        failures = [f"  {line.part or line.suite}: {failure}" for line in self.checked for failure in line.failures]
        return [*align_columns(rows), *(["", *failures] if failures else [])]


def check(path: str) -> CheckReport:
    """Run the tests in a plugin's directory, then the conformance suite of each part that these tests do not cover.

    Return the results. Raise UserError if `path` is not a plugin, and Unavailable if pytest is not installed.
    """
    with require_package("pytest", "pip install pytest"):  # before the suites: it rewrites their assertions
        import pytest  # noqa: F401
    with contextlib.suppress(OSError):  # standard error has no file descriptor in a notebook
        faulthandler.enable()  # prints the Python line if native code crashes
    target = Path(path)
    modules, folders = _find_modules(target)
    for folder in reversed(folders):
        sys.path.insert(0, str(folder))
    registry = load_package([EntryPoint(name, module, GROUP) for name, module in modules.items()], PACKAGE)
    broken = [p for p in registry.problems if p.package == PACKAGE]
    if broken:
        return CheckReport(path, [Line(p.plugin, "rules", Counter(failed=1), [p.reason]) for p in broken])
    offers = [o for by_name in registry.offers.values() for o in by_name.values() if o.package == PACKAGE]
    offers = [o for o in offers if not issubclass(o.cls, Exporter)]  # the suite of its format tests an Exporter
    adjacent = [target.with_name(f"test_{target.name}")] if target.is_file() else []
    tests = [*adjacent, *sorted(file for folder in (target, target / "tests") for file in folder.glob("test_*.py"))]
    results = _PytestResults(offers)
    if tests := [file for file in tests if file.is_file()]:
        _run_pytest(tests, results)
    return CheckReport(path, [*results.sorted_lines(), *_check_defaults(offers, results, registry)])


def _find_modules(target: Path) -> tuple[dict[str, str], list[Path]]:
    """Return the modules of a plugin as {entry point: module}, and the directories to import them from.

    `target` is a Python file, an importable package, or a directory with a pyproject.toml that declares entry points.
    Raise UserError if it is none of these.
    """
    root, command = target.resolve(), f"plugins --check {target}"
    if target.is_file() and target.suffix == ".py":
        return {target.stem: target.stem}, [root.parent]
    project = root / "pyproject.toml"
    if not project.is_file() and (root / "__init__.py").is_file():
        return {root.name: root.name}, [root.parent]
    if not project.is_file():
        problem = "holds neither a pyproject.toml nor an __init__.py" if target.is_dir() else "is not a Python file"
        problem = problem if os.path.lexists(target) else "no such file or directory"
        raise UserError(f"{command}: {problem}; expected a plugin's directory, or my_module.py")
    try:
        points = dict(tomllib.loads(project.read_text())["project"]["entry-points"][GROUP])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{command}: its pyproject.toml cannot be read: {error}") from None
    except (KeyError, TypeError, ValueError):
        points = {}
    if not points or not all(isinstance(module, str) for module in points.values()):
        line = f"{root.name.replace('-', '_')} = {root.name.replace('-', '_')!r}"
        problem = f"[project.entry-points.{GROUP}] with a line such as {line}"
        raise UserError(f"{command}: its pyproject.toml names no plugin; add {problem}")
    return points, [root, *(p for p in [root / "src"] if p.is_dir())]


def _check_defaults(offers: Sequence[Offer], results: _PytestResults, registry: Registry) -> list[Line]:
    """Run the conformance suite with default settings for each part that the plugin's own tests do not cover.

    `offers` are the plugin's parts, and `results` are the results of its own tests. Return a line for each part that
    these tests do not cover. The line has a note if the part needs a test with settings. It also has a note if there is
    no suite for parts of its kind, such as command.
    """
    from toyexp.testing.defaults import SUITES, SuiteParts, make_suite

    engines = []
    for name in TRIAL_ENGINES:
        with contextlib.suppress(KeyError, Unavailable):  # not available on this machine
            engine = registry.classes("engine")[name](threads=1)
            engine.check()
            engines.append(engine)
    other_parts = SuiteParts(engines, registry.models(), [*registry.classes("data").values()])
    suites: dict[str, type] = {}
    lines = []
    for offer in offers:
        if results.is_about(offer):
            continue
        label = _label(offer)
        if offer.kind not in SUITES:
            lines.append(Line(label, "rules", Counter(passed=1), note="this kind has no suite"))
            continue
        name = SUITES[offer.kind].__name__
        try:
            suites[f"Test{offer.cls.__name__}"] = make_suite(offer.kind, offer.cls, other_parts)
        except UserError as error:
            hint = f"write a test: class Test{offer.cls.__name__}({name}): ..."
            lines.append(Line(label, name, note=f"{error}; {hint}"))
        except Exception as error:  # of the plugin
            lines.append(Line(label, name, Counter(failed=1), [explain_import_error(error)]))
    if suites:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "test_with_defaults.py")
            file.write_text(f"from {__name__} import GENERATED_SUITES\n\nglobals().update(GENERATED_SUITES)\n")
            GENERATED_SUITES.clear()
            GENERATED_SUITES.update(suites)
            by_default = _PytestResults(offers, "its defaults")
            _run_pytest([file], by_default)
            lines += by_default.sorted_lines()
    return lines


GENERATED_SUITES: dict[str, type] = {}  # test classes that the temporary test file imports


def _label(offer: Offer) -> str:
    forms = {"callbacks": "callbacks=[{}]", "format": "--type {}", "command": "toyexp {}"}
    return forms.get(offer.kind, f"{offer.kind}={{}}").format(offer.name)


class _PytestResults:
    """Set of pytest hooks that counts the results of tests separately for each part of the plugin under test."""

    def __init__(self, offers: Sequence[Offer], note: str = "") -> None:
        self._offers, self._note = offers, note
        self._lines: dict[tuple[str, str], Line] = {}
        self._test_lines: dict[str, Line] = {}  # keyed by test id
        self._about: set[tuple[str, str | None]] = set()  # (kind, name) of tested parts; the name is None if unknown

    def is_about(self, offer: Offer) -> bool:
        """Return True if the tests include a conformance suite for the part `offer`.

        If it is unknown which part a suite tests, the suite counts for every part of its kind.
        """
        return bool(self._about & {(offer.kind, offer.name), (offer.kind, None)})

    def sorted_lines(self) -> list[Line]:
        """Return the lines of all parts and suites; the line of other tests comes last."""
        return sorted(self._lines.values(), key=lambda line: line.part == "")

    def record_crash(self, why: str) -> None:
        """Record that the tests could not be run, with the reason `why`, as a failure of the line `other tests`."""
        line = self._line("", "other tests")
        line.counts["failed"] += 1
        line.failures.append(f"the tests could not be run: {' '.join(why.split())[:300]}")

    def _line(self, part: str, suite: str) -> Line:
        return self._lines.setdefault((part, suite), Line(part, suite, note=self._note))

    def _suite(self, cls: Any) -> Line:
        from toyexp.testing.suites import PluginSuite

        if not (inspect.isclass(cls) and issubclass(cls, PluginSuite)):
            return self._line("", "other tests")
        subject = inspect.getattr_static(cls, getattr(cls, "part", "callback"), None)
        subject = getattr(subject, "__func__", subject)
        subject = subject if inspect.isclass(subject) else type(subject)
        offer = next((o for o in self._offers if o.kind == cls.kind and o.cls is subject), None)
        same_kind = [o for o in self._offers if o.kind == cls.kind]
        if offer is None and len(same_kind) == 1:
            offer = same_kind[0]
        self._about.add((cls.kind, offer.name if offer else None))
        suite = next((b.__name__ for b in cls.__mro__ if b.__module__.startswith("toyexp.testing.")), cls.__name__)
        return self._line(_label(offer) if offer else cls.kind, suite)

    # -- pytest hooks

    def pytest_collection_modifyitems(self, items: Any) -> None:
        """For each test that pytest has collected, store the line of the report in which its result is counted."""
        for item in items:
            self._test_lines[item.nodeid] = self._suite(getattr(item, "cls", None))

    def pytest_collectreport(self, report: Any) -> None:
        """Count a test file or class that could not be imported, or that was skipped as a whole."""
        if report.outcome != "passed":
            self._count(self._line(report.nodeid.rpartition("::")[2] or report.nodeid, ""), report)

    def pytest_internalerror(self, excinfo: Any) -> bool:
        """Record an exception that ended pytest, such as SystemExit; return True so that pytest does not print it."""
        self.record_crash(explain_import_error(excinfo.value))
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count the result of a test's call, and of its setup and teardown if one of them failed or was skipped."""
        if report.when == "call" or report.outcome != "passed":
            self._count(self._test_lines[report.nodeid], report)

    def _file_line(self, raised: Any) -> str:
        """Return where in the plugin's files a test failed, with a leading blank, such as " (sgdr.py, line 12)".

        This is the innermost line of the traceback `raised` in a file that defines a part. Return an empty string if
        there is no such line.
        """
        files = {Path(source).resolve() for o in self._offers if (source := inspect.getsourcefile(o.cls))}
        entries = getattr(getattr(raised, "reprtraceback", None), "reprentries", [])
        for location in filter(None, (getattr(entry, "reprfileloc", None) for entry in reversed(entries))):
            if Path(location.path).resolve() in files:
                return f" ({Path(location.path).name}, line {location.lineno})"
        return ""

    def _count(self, line: Line, report: Any) -> None:
        line.counts[report.outcome] += 1
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else str(report.longrepr).strip().splitlines()[-1]
            # The name includes the class, because a part may have several suites.
            test = report.nodeid.partition("::")[2] or report.nodeid
            line.failures.append(f"{test}: {' '.join(text.split())[:300]}{self._file_line(report.longrepr)}")
        elif report.outcome == "skipped" and isinstance(report.longrepr, tuple) and not line.note:
            line.note = str(report.longrepr[2]).removeprefix("Skipped: ")


def _run_pytest(files: Sequence[Path | str], results: _PytestResults) -> None:
    """Run the tests in `files` with pytest in this process, and count their outcomes in `results`.

    Nothing is printed. The pytest settings of a surrounding project do not apply.
    """
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "pytest.ini")
        settings.write_text("[pytest]\n")
        options = ["-c", str(settings), "-p", "no:cacheprovider", "-p", "no:terminal", "--import-mode=importlib",
                   "--basetemp", f"{folder}/tests", "--rootdir", str(Path(files[0]).parent)]  # fmt: skip
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()) as stderr,
                block_exit(),
                pytest.MonkeyPatch.context() as patched,
            ):
                patched.delenv("PYTEST_ADDOPTS", raising=False)  # it may need plugins that are disabled here
                code = pytest.main([*options, *map(str, files)], plugins=[results])
        except pytest.skip.Exception as error:  # of a conftest.py
            code = pytest.ExitCode.OK
            results.record_crash(f"conftest.py: pytest.skip: {error}")
    if code == pytest.ExitCode.USAGE_ERROR:  # for example, a conftest.py cannot be imported
        results.record_crash(stderr.getvalue().strip().rpartition("\n")[2].removeprefix("E "))
    if code == pytest.ExitCode.INTERRUPTED and not any(line.failures for line in results.sorted_lines()):
        raise KeyboardInterrupt
