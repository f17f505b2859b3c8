"""Files that the documentation shows, for tests that run them."""

import importlib
import sys

import snippets


def shown_text(name):
    """Return the code block of the pages that begins with `# <name>`."""
    pages = (str(path.relative_to(snippets.PAGES)) for path in sorted(snippets.PAGES.rglob("*.md")))
    return next(block.text for page in pages for block in snippets.blocks(page) if block.file == name)


def save_shown(folder, *names):
    """Write files that the documentation shows into `folder`."""
    for name in names:
        (folder / name).write_text(shown_text(name))


def import_shown(name, folder, monkeypatch):
    """Return the module `name`, which the documentation shows as `<name>.py`; it is written into `folder`."""
    save_shown(folder, f"{name}.py")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)
