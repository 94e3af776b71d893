"""Runs every `$ steelyard ...` line in the documentation and writes what it prints below it.

`python docs/refresh.py` after a change that moves a number; `--check` exits 1 where a page is out of date. Commands run
from the repository's root; only console blocks of pages that say so in their first line are touched.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent
MARK = "<!-- console blocks are printed by docs/refresh.py -->"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def pages() -> list[Path]:
    every = [DOCS.parent / "README.md", *DOCS.glob("*.md")]
    return sorted(page for page in every if page.read_text("utf-8").startswith(MARK))


def refreshed(text: str) -> str:
    return BLOCK.sub(lambda block: "```console\n" + "\n".join(_outputs(block.group(1))) + "\n```", text)


def _outputs(block: str) -> list[str]:
    return [f"$ {command}\n{_run(command)}" for command in re.findall(r"^\$ (.*)$", block, re.MULTILINE)]


def _run(command: str) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=DOCS.parent, env=environment, capture_output=True, text=True
    )
    if done.returncode not in (0, 1, 2) or "Traceback" in done.stderr:
        raise SystemExit(f"{command}\n{done.stderr}")
    return "\n".join(line.rstrip() for line in (done.stdout + done.stderr).rstrip("\n").splitlines())


def main() -> int:
    stale = []
    for page in pages():
        text = page.read_text("utf-8")
        new = refreshed(text)
        if new != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(new, "utf-8")
    print(
        "\n".join(f"{name}: {'out of date' if '--check' in sys.argv else 'written'}" for name in stale) or "up to date"
    )
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
