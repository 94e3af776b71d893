"""The arrows between the rooms go one way, and the rooms marked torch-free never load it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "steelyard"

# room -> rooms it may import. A room is free to import itself.
ALLOWED = {
    "spec": set(),
    "hardware": {"spec"},
    "record": {"spec"},
    "predict": {"spec", "hardware", "record"},
    "frameworks": {"spec", "hardware", "record", "predict"},
    "plan": {"spec", "hardware", "record", "predict", "frameworks"},
    "translate": {"spec", "hardware", "record", "predict", "frameworks"},
    "compare": {"spec", "hardware", "record", "predict", "frameworks"},
    "data": {"spec"},
    "model": {"spec", "data"},
    "parallel": {"spec", "data", "model", "predict"},
    "checkpoint": {"spec", "data", "model", "parallel", "predict"},
    "train": {"spec", "hardware", "record", "predict", "plan", "data", "model", "parallel", "checkpoint"},
    "bench": {"spec", "hardware", "record", "predict", "frameworks", "plan", "train"},
    "report": {"spec", "record", "predict", "frameworks", "plan", "compare"},
}
TORCH = {"model", "parallel", "checkpoint", "train", "bench"}
TORCH_FILES = {"data/loader.py"}


def rooms():
    return sorted(p.name for p in SOURCE.iterdir() if p.is_dir() and not p.name.startswith("__"))


def imports(path: Path):
    """Every imported module of a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", rooms())
def test_arrows_go_one_way(room):
    if room == "cli":
        return
    assert room in ALLOWED, f"{room} is not in the drawing: add it to the house, or put its files where they belong"
    for path in (SOURCE / room).rglob("*.py"):
        for module in imports(path):
            parts = module.split(".")
            if parts[0] == "steelyard" and len(parts) > 1 and (SOURCE / parts[1]).is_dir():
                assert parts[1] in ALLOWED[room] | {room}, f"{path} imports {module}"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_torch_stays_in_its_rooms(path):
    room, name = path.relative_to(SOURCE).parts[0], str(path.relative_to(SOURCE))
    if room in TORCH or name in TORCH_FILES or room == "cli":
        return
    assert not [m for m in imports(path) if m.split(".")[0] == "torch"]


def test_only_cli_imports_report():
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] not in ("cli", "report"):
            assert not [m for m in imports(path) if m.startswith("steelyard.report")], path


def test_cli_imports_lazily():
    """Only typer and cli itself at the top of a verb: everything else inside the function."""
    for path in (SOURCE / "cli").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                name = getattr(node, "module", None) or node.names[0].name
                assert name.split(".")[0] != "steelyard" or name.startswith("steelyard.cli"), f"{path}: {name}"


def test_no_room_for_leftovers():
    names = {p.stem for p in SOURCE.rglob("*")}
    assert not names & {"utils", "util", "common", "helpers", "misc"}


VERBS_WITHOUT_TORCH = [["--help"], ["check", "--help"], ["explain", "S104"], ["check", "no-such-file.toml"]]


@pytest.mark.parametrize("arguments", VERBS_WITHOUT_TORCH, ids=" ".join)
def test_verb_loads_no_torch(arguments):
    code = (
        "import sys\nfrom steelyard.cli.main import main\nsys.argv = ['steelyard', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nsys.exit(77 if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_empty_parametrised_test_fails(tmp_path):
    """A test whose cases vanished must not pass."""
    (tmp_path / "test_none.py").write_text(
        "import pytest\n@pytest.mark.parametrize('case', [])\ndef test_case(case): pass\n"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(root / "pyproject.toml"), "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
