"""The pages say what the program prints."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_console_blocks_are_up_to_date():
    done = subprocess.run([sys.executable, str(DOCS / "refresh.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr + "run: python docs/refresh.py"
