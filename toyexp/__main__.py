"""`python -m toyexp`."""

import sys

from toyexp.cli import main

sys.exit(main())
