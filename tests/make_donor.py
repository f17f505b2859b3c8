"""Train the default donor of recipe=warm and copy it into the package: `make donor`.

The file is reproducible on any machine with the same PyTorch and the same Python, whose standard library is the text.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from toyexp.cli.main import main

ASSET = Path(__file__).parent.parent / "plugins" / "toyexp_recipes" / "assets" / "donor.gguf"
LIMIT = 400_000  # bytes, maximum size in the package


def make(destination: Path, *overrides: str) -> int:
    """Run conf/experiment/donor.yaml, copy its GGUF to `destination` and return the exit code."""
    with tempfile.TemporaryDirectory() as directory:
        code = main(["experiment=donor", *overrides, f"hydra.run.dir={directory}/run"])
        if code == 0:
            size = (Path(directory) / "run" / "model.gguf").stat().st_size
            assert size <= LIMIT, f"the donor has {size} bytes, at most {LIMIT} may travel in the package"
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(directory) / "run" / "model.gguf", destination)
        return code


if __name__ == "__main__":
    sys.exit(make(ASSET, *sys.argv[1:]))
