"""The verb answers at once: it loads no torch and no numpy."""

import subprocess
import sys

from tests.compare.conftest import LIBAI, MEGATRON


def test_loads_neither_torch_nor_numpy():
    code = (
        "import sys\nfrom steelyard.cli.main import main\nsys.argv = ['steelyard', 'compare', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    code = end.code\n"
        "sys.exit(77 if {'torch', 'numpy'} & set(sys.modules) else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, LIBAI, MEGATRON], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "not comparable" in done.stdout


def test_a_file_that_is_no_log(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("nothing here")
    done = subprocess.run(
        [sys.executable, "-m", "steelyard.cli.main", "compare", path, path], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error[K002]: nothing in ")
