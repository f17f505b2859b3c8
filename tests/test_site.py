"""The documentation site builds without warnings and documents every command and every setting."""

import html
import re
import sys
from pathlib import Path

import environments
import pytest

from toyexp.base.formatting import format_value
from toyexp.config.top_level import top_level_settings
from toyexp.plugins.discovery import load
from toyexp.plugins.settings import list_settings

pytestmark = pytest.mark.release
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site; a broken link or anchor is an error."""
    root = tmp_path_factory.mktemp("site")
    options = ["--config-file", str(ROOT / "docs" / "mkdocs.yml"), "--site-dir", str(root)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        build = environments.run(sys.executable, "-m", "mkdocs", "build", "--quiet", *options, cwd=root)
    assert build.returncode == 0 and not build.stderr, build.stdout + build.stderr
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.html")}


def table_rows(page):
    """Return the rows of all tables of a page, each a list of cells without markup."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [
        [html.unescape(re.sub(r"<[^>]+>", "", c)) for c in re.findall(r"<td.*?>(.*?)</td>", row, re.DOTALL)]
        for row in rows
    ]


def test_the_site_loads_nothing_from_the_network(site):
    for name, page in site.items():
        assert not re.search(r"<(script|link|img)[^>]*=.?https?://", page), name


def test_a_page_that_links_to_a_template_shows_it(site):
    page = site["plugins/engine.html"]
    assert "MyEngineSession" in page and "[toyexp_my_engine.py](" not in page


def test_every_command_has_a_page_that_the_table_of_contents_leads_to(site):
    for name, offer in load().offers["command"].items():
        page = site[f"reference/commands/{name}.html"]
        assert offer.help.removesuffix(".") in html.unescape(page) and "Exit codes" in page
        assert f"commands/{name}.html" in site["index.html"], name
    assert "--requantize" in site["reference/commands/export.html"]


def test_every_setting_is_documented_with_its_default_and_the_parts_that_read_it(site):
    registry, keys = load(), 0
    for kind, offers in registry.offers.items():
        if kind == "command":
            continue
        rows = table_rows(site[f"reference/settings/{kind}.html"])
        for name in offers:
            prefix = {"callbacks": f"callbacks.{name}.", "format": ""}.get(kind, f"{kind}.")
            for s in list_settings(registry.get(kind, name)):
                expected = [prefix + s.name, format_value(s.default) or "empty", s.comment]
                readers = [row[4:] for row in rows if len(row) > 3 and [row[0], row[2], row[3]] == expected]
                assert [r for r in readers if not r or r == ["all"] or name in r[0].split(", ")], (name, s.name)
                keys += 1
    assert keys > 150
    top = {row[0] for row in table_rows(site["reference/settings.html"]) if row}
    assert top >= {key for key, _ in top_level_settings()}


def test_the_diagrams_are_drawn_and_name_existing_modules_and_classes(site):
    page = (ROOT / "docs" / "pages" / "reference" / "architecture.md").read_text()
    diagrams = re.findall(r"```journey\n(.*?)```", page, re.DOTALL)
    assert site["reference/architecture.html"].count('<svg class="journey"') == len(diagrams) == 5
    core = "".join(path.read_text() for path in ROOT.joinpath("toyexp").rglob("*.py"))
    for line in "".join(diagrams).splitlines():
        module, arrow, value = re.match(r"(?:([\w/]+): |(-> )(\S+))", line).groups()
        if arrow:
            assert not value[0].isupper() or re.search(rf"^(class {value}\b|{value} = )", core, re.MULTILINE), line
        else:
            assert (ROOT / "toyexp" / f"{module}.py").is_file(), line
    plugin_section = page[page.index("## Where a plugin") :]
    assert set(re.findall(r"^\| (\w+) \| ", plugin_section, re.MULTILINE)) - {"kind"} == {
        {"optim": "optimiser", "callbacks": "callback"}.get(kind, kind) for kind in load().offers
    }
