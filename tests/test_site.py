"""The documentation as a site: built strictly, with a page for each command and every key of every part in it."""

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
    """Built strictly: every link and every anchor leads somewhere."""
    root = tmp_path_factory.mktemp("site")
    where = ["--config-file", str(ROOT / "docs" / "mkdocs.yml"), "--site-dir", str(root)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        built = environments.run(sys.executable, "-m", "mkdocs", "build", "--quiet", *where, cwd=root)
    assert built.returncode == 0 and not built.stderr, built.stdout + built.stderr
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.html")}


def table_of(page):
    """The rows of all tables of a page, each a list of cells without markup."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [
        [html.unescape(re.sub(r"<[^>]+>", "", c)) for c in re.findall(r"<td.*?>(.*?)</td>", row, re.DOTALL)]
        for row in rows
    ]


def test_the_site_opens_without_a_network(site):
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


def test_every_key_of_every_part_is_in_the_tables_with_its_default_and_its_readers(site):
    registry, keys = load(), 0
    for kind, offers in registry.offers.items():
        if kind == "command":
            continue
        rows = table_of(site[f"reference/settings/{kind}.html"])
        for name in offers:
            prefix = {"callbacks": f"callbacks.{name}.", "format": ""}.get(kind, f"{kind}.")
            for s in list_settings(registry.get(kind, name)):
                told = [prefix + s.name, format_value(s.default) or "empty", s.comment]
                found = [row[4:] for row in rows if len(row) > 3 and [row[0], row[2], row[3]] == told]
                assert [r for r in found if not r or r == ["all"] or name in r[0].split(", ")], (name, s.name)
                keys += 1
    assert keys > 150
    top = {row[0] for row in table_of(site["reference/settings.html"]) if row}
    assert top >= {key for key, _ in top_level_settings()}


def test_the_diagrams_are_drawn_and_name_rooms_and_what_is_handed_on_as_the_code_has_them(site):
    page = (ROOT / "docs" / "pages" / "reference" / "architecture.md").read_text()
    drawn = re.findall(r"```journey\n(.*?)```", page, re.DOTALL)
    assert site["reference/architecture.html"].count('<svg class="journey"') == len(drawn) == 5
    core = "".join(path.read_text() for path in ROOT.joinpath("toyexp").rglob("*.py"))
    for line in "".join(drawn).splitlines():
        room, arrow, handed = re.match(r"(?:([\w/]+): |(-> )(\S+))", line).groups()
        if arrow:
            assert not handed[0].isupper() or re.search(rf"^(class {handed}\b|{handed} = )", core, re.MULTILINE), line
        else:
            assert (ROOT / "toyexp" / f"{room}.py").is_file(), line
    asked = page[page.index("## Where a plugin") :]
    assert set(re.findall(r"^\| (\w+) \| ", asked, re.MULTILINE)) - {"kind"} == {
        {"optim": "optimiser", "callbacks": "callback"}.get(kind, kind) for kind in load().offers
    }
