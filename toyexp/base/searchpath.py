"""Keep the working directory off the module search path when toyexp is started as `python -m toyexp`.

A file such as random.py in the working directory would otherwise shadow the standard library. toyexp/__init__.py
imports this module first.
"""

from __future__ import annotations

import os
import sys


def drop_working_directory() -> None:
    """Remove the working directory, which `python -m` puts first on sys.path; do nothing if it is not there."""
    if sys.argv[:1] != ["-m"] or sys.flags.safe_path:  # `-m` is Python's placeholder until it has found the module
        return
    try:
        here = os.getcwd()  # noqa: PTH109 - importing pathlib would search this directory
    except OSError:  # the directory was deleted
        return
    if sys.path[:1] in ([""], [here]):
        del sys.path[0]


drop_working_directory()
