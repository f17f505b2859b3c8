"""Where modules are looked for: `python -m toyexp` does as the command `toyexp`, and not in the working directory.

There a person's random.py would be taken for the library. toyexp/__init__.py imports this first.
"""

from __future__ import annotations

import os
import sys


def drop_working_directory() -> None:
    """Takes away what `python -m` puts first on the path, while it imports this package; does nothing otherwise."""
    if sys.argv[:1] != ["-m"] or sys.flags.safe_path:  # what Python says there until the module is found
        return
    try:
        here = os.getcwd()  # noqa: PTH109 - pathlib would be looked for first
    except OSError:  # the directory is gone
        return
    if sys.path[:1] in ([""], [here]):
        del sys.path[0]


drop_working_directory()
