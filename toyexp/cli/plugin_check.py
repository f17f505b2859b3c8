"""Whether a plugin keeps what its kind promises: `toyexp plugins --check PATH`, of one that need not be installed."""

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

TRIAL_ENGINES = ("ggml", "cpu")  # engines on which parts of other kinds are tried, where they work
PACKAGE = "the plugin under test"


@dataclass
class Line:
    """What one suite found of one part, or other tests of the package."""

    part: str  # optim=sgdr
    suite: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    note: str = ""  # why it was not run, or skipped

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.failures:
            return "FAIL"
        return "PASS" if self.counts["passed"] else "skipped" if self.counts["skipped"] else "not run"

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        counts = {name: self.counts[name] for name in ("passed", "failed", "skipped")}
        return {"part": self.part, "suite": self.suite, "verdict": self.verdict, **counts,
                "failures": self.failures, "note": self.note}  # fmt: skip


@dataclass
class CheckReport(Answer):
    """All of it."""

    path: str
    checked: list[Line]

    @property
    def has_passed(self) -> bool:
        """Whether every part was held against its suite, where its device is here, and nothing failed."""
        return all(line.verdict in ("PASS", "skipped") for line in self.checked)

    def plain(self) -> dict[str, Any]:
        """The lines, and whether all is good."""
        return {"path": self.path, "good": self.has_passed, "checked": [line.plain() for line in self.checked]}

    def lines(self) -> list[str]:
        """A table, and then each failure in a line."""
        rows = []
        for line in self.checked:
            told = ", ".join(f"{n} {word}" for word in ("passed", "failed", "skipped") if (n := line.counts[word]))
            rows.append([line.part, line.suite, line.verdict, "; ".join(filter(None, [told, line.note]))])
        failures = [f"  {line.part or line.suite}: {failure}" for line in self.checked for failure in line.failures]
        return [*align_columns(rows), *(["", *failures] if failures else [])]


def check(path: str) -> CheckReport:
    """Runs the tests that lie with a plugin, and a suite for each part that none of them is about.

    Raises UserError where there is no plugin, or no pytest.
    """
    with require_package("pytest", "pip install pytest"):  # first, so that what a suite asserts is told with its values
        import pytest  # noqa: F401
    with contextlib.suppress(OSError):  # standard error has no file, as in a notebook
        faulthandler.enable()  # which names the line of a plugin whose native code ends the process
    place = Path(path)
    modules, folders = _find_modules(place)
    for folder in reversed(folders):
        sys.path.insert(0, str(folder))
    registry = load_package([EntryPoint(name, module, GROUP) for name, module in modules.items()], PACKAGE)
    broken = [p for p in registry.problems if p.package == PACKAGE]
    if broken:
        return CheckReport(path, [Line(p.plugin, "rules", Counter(failed=1), [p.reason]) for p in broken])
    offers = [o for known in registry.offers.values() for o in known.values() if o.package == PACKAGE]
    offers = [o for o in offers if not issubclass(o.cls, Exporter)]  # which a format's own suite is about
    beside = [place.with_name(f"test_{place.name}")] if place.is_file() else []
    tests = [*beside, *sorted(file for folder in (place, place / "tests") for file in folder.glob("test_*.py"))]
    found = _PytestResults(offers)
    if tests := [file for file in tests if file.is_file()]:
        _run_pytest(tests, found)
    return CheckReport(path, [*found.sorted_lines(), *_check_defaults(offers, found, registry)])


def _find_modules(place: Path) -> tuple[dict[str, str], list[Path]]:
    """The plugin modules of a package or a file, by the names of their entry points, and where they are imported from.

    Raises UserError where there are none.
    """
    whole, asked = place.resolve(), f"plugins --check {place}"
    if place.is_file() and place.suffix == ".py":
        return {place.stem: place.stem}, [whole.parent]
    project = whole / "pyproject.toml"
    if not project.is_file() and (whole / "__init__.py").is_file():
        return {whole.name: whole.name}, [whole.parent]
    if not project.is_file():
        what = "holds neither a pyproject.toml nor an __init__.py" if place.is_dir() else "is no Python file"
        what = what if os.path.lexists(place) else "there is no such file or directory"
        raise UserError(f"{asked}: {what}; it takes a plugin's directory, or my_module.py")
    try:
        points = dict(tomllib.loads(project.read_text())["project"]["entry-points"][GROUP])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{asked}: its pyproject.toml cannot be read: {error}") from None
    except (KeyError, TypeError, ValueError):
        points = {}
    if not points or not all(isinstance(module, str) for module in points.values()):
        line = f"{whole.name.replace('-', '_')} = {whole.name.replace('-', '_')!r}"
        what = f"[project.entry-points.{GROUP}] with a line such as {line}"
        raise UserError(f"{asked}: its pyproject.toml names no plugin: {what}")
    return points, [whole, *(p for p in [whole / "src"] if p.is_dir())]


def _check_defaults(offers: Sequence[Offer], found: _PytestResults, registry: Registry) -> list[Line]:
    """A line about each part that no test was about: what its suite says of its defaults, or why it cannot."""
    from toyexp.testing.defaults import SUITES, SuiteParts, make_suite

    engines = []
    for name in TRIAL_ENGINES:
        with contextlib.suppress(KeyError, Unavailable):  # it is not here
            engine = registry.classes("engine")[name](threads=1)
            engine.check()
            engines.append(engine)
    beside = SuiteParts(engines, registry.models(), [*registry.classes("data").values()])
    suites: dict[str, type] = {}
    told = []
    for offer in offers:
        if found.is_about(offer):
            continue
        label = _label(offer)
        if offer.kind not in SUITES:
            told.append(Line(label, "rules", Counter(passed=1), note="there is no suite for this kind"))
            continue
        name = SUITES[offer.kind].__name__
        try:
            suites[f"Test{offer.cls.__name__}"] = make_suite(offer.kind, offer.cls, beside)
        except UserError as error:
            own = f"in a test of its own: class Test{offer.cls.__name__}({name}): ..."
            told.append(Line(label, name, note=f"{error}; {own}"))
        except Exception as error:  # whatever a plugin raises while it is asked
            told.append(Line(label, name, Counter(failed=1), [explain_import_error(error)]))
    if suites:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "test_with_defaults.py")
            file.write_text(f"from {__name__} import GENERATED_SUITES\n\nglobals().update(GENERATED_SUITES)\n")
            GENERATED_SUITES.clear()
            GENERATED_SUITES.update(suites)
            by_default = _PytestResults(offers, "its defaults")
            _run_pytest([file], by_default)
            told += by_default.sorted_lines()
    return told


GENERATED_SUITES: dict[str, type] = {}  # the suites that the one file of tests above finds


def _label(offer: Offer) -> str:
    forms = {"callbacks": "callbacks=[{}]", "format": "--type {}", "command": "toyexp {}"}
    return forms.get(offer.kind, f"{offer.kind}={{}}").format(offer.name)


class _PytestResults:
    """What pytest tells of its tests, sorted by the part that each is about."""

    def __init__(self, offers: Sequence[Offer], note: str = "") -> None:
        self._offers, self._note = offers, note
        self._lines: dict[tuple[str, str], Line] = {}
        self._of: dict[str, Line] = {}  # by test
        self._about: set[tuple[str, str | None]] = set()  # kinds, and names where a suite says which

    def is_about(self, offer: Offer) -> bool:
        """Whether a suite of its kind names it, or leaves open whom it is about."""
        return bool(self._about & {(offer.kind, offer.name), (offer.kind, None)})

    def sorted_lines(self) -> list[Line]:
        """The lines, suites first."""
        return sorted(self._lines.values(), key=lambda line: line.part == "")

    def record_crash(self, why: str) -> None:
        """The tests could not be run at all."""
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
        alone = [o for o in self._offers if o.kind == cls.kind]
        if offer is None and len(alone) == 1:
            offer = alone[0]
        self._about.add((cls.kind, offer.name if offer else None))
        suite = next((b.__name__ for b in cls.__mro__ if b.__module__.startswith("toyexp.testing.")), cls.__name__)
        return self._line(_label(offer) if offer else cls.kind, suite)

    # -- what pytest calls

    def pytest_collection_modifyitems(self, items: Any) -> None:
        """All tests are known."""
        for item in items:
            self._of[item.nodeid] = self._suite(getattr(item, "cls", None))

    def pytest_collectreport(self, report: Any) -> None:
        """A file or a class could not be collected, or is skipped as one."""
        if report.outcome != "passed":
            self._count(self._line(report.nodeid.rpartition("::")[2] or report.nodeid, ""), report)

    def pytest_internalerror(self, excinfo: Any) -> bool:
        """What a test file raises that pytest does not expect, such as SystemExit; True: it prints nothing of it."""
        self.record_crash(explain_import_error(excinfo.value))
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One part of one test is over."""
        if report.when == "call" or report.outcome != "passed":
            self._count(self._of[report.nodeid], report)

    def _file_line(self, raised: Any) -> str:
        """Where in the parts' own files that came from, the innermost line; nothing where it was outside them."""
        files = {Path(found).resolve() for o in self._offers if (found := inspect.getsourcefile(o.cls))}
        entries = getattr(getattr(raised, "reprtraceback", None), "reprentries", [])
        for place in filter(None, (getattr(entry, "reprfileloc", None) for entry in reversed(entries))):
            if Path(place.path).resolve() in files:
                return f" ({Path(place.path).name}, line {place.lineno})"
        return ""

    def _count(self, line: Line, report: Any) -> None:
        line.counts[report.outcome] += 1
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else str(report.longrepr).strip().splitlines()[-1]
            test = report.nodeid.partition("::")[2] or report.nodeid  # with its class: a part may have several suites
            line.failures.append(f"{test}: {' '.join(text.split())[:300]}{self._file_line(report.longrepr)}")
        elif report.outcome == "skipped" and isinstance(report.longrepr, tuple) and not line.note:
            line.note = str(report.longrepr[2]).removeprefix("Skipped: ")


def _run_pytest(files: Sequence[Path | str], found: _PytestResults) -> None:
    """Runs these tests in this process, silently and without the settings of a project around them."""
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "pytest.ini")
        settings.write_text("[pytest]\n")
        options = ["-c", str(settings), "-p", "no:cacheprovider", "-p", "no:terminal", "--import-mode=importlib",
                   "--basetemp", f"{folder}/tests", "--rootdir", str(Path(files[0]).parent)]  # fmt: skip
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()) as said,
                block_exit(),
                pytest.MonkeyPatch.context() as patched,
            ):
                patched.delenv("PYTEST_ADDOPTS", raising=False)  # which may be about what is switched off here
                code = pytest.main([*options, *map(str, files)], plugins=[found])
        except pytest.skip.Exception as error:  # of a conftest.py
            code = pytest.ExitCode.OK
            found.record_crash(f"conftest.py: pytest.skip: {error}")
    if code == pytest.ExitCode.USAGE_ERROR:  # a conftest.py that cannot be imported is one
        found.record_crash(said.getvalue().strip().rpartition("\n")[2].removeprefix("E "))
    if code == pytest.ExitCode.INTERRUPTED and not any(line.failures for line in found.sorted_lines()):
        raise KeyboardInterrupt
