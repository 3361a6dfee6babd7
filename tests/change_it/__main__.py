"""Write the diffs of docs/change_it.md anew after the code around them has moved."""

import sys
import tempfile
from pathlib import Path

from tests.change_it.page import regenerate

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        sys.exit(0 if regenerate(Path(directory), print) else 1)
