"""The rooms of toyexp/ and the imports between them: one way, and never in a circle."""

import pytest
from structure import ROOT, circles, module_graph

BASE = {"base"}
TEXT = BASE | {"text"}
CONTRACT = TEXT | {"contract"}
BELOW = CONTRACT | {"datasets", "formats", "reference"}
MAY_IMPORT = {
    "base": BASE,
    "text": TEXT,
    "contract": CONTRACT,
    "datasets": CONTRACT | {"datasets"},
    "formats": CONTRACT | {"formats"},
    "reference": CONTRACT | {"reference"},
    "training": BELOW | {"training"},
    "config": BELOW | {"training", "config"},
    "sweep": BELOW | {"training", "config", "sweep"},
    "testing": BELOW | {"training", "testing"},
    "runs": BELOW | {"training", "sweep", "runs"},
    "commands": BELOW | {"training", "config", "sweep", "runs", "testing", "commands"},
    "door": BELOW | {"training", "config", "sweep", "runs", "commands", "door"},
    "__main__": BASE | {"commands"},
}
GRAPH = module_graph()


def room(module):
    return module.split(".")[1]


@pytest.mark.parametrize("name", sorted({room(module) for module in GRAPH}))
def test_a_room_imports_only_those_below_it(name):
    """At the head of a file, inside functions and for type checkers alike."""
    for module, targets in GRAPH.items():
        if room(module) == name:
            assert {t for t in targets if room(t) not in MAY_IMPORT[name]} == set(), module


@pytest.mark.parametrize("package", ["toyexp", *sorted(p.name for p in (ROOT / "plugins").glob("*/"))])
def test_no_two_modules_import_each_other_by_any_way_round(package):
    assert circles(module_graph(package)) == []
