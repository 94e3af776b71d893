"""The command line as a process: exit codes, no tracebacks."""

import json
import subprocess
import sys


def steelyard(*arguments, **options):
    command = [sys.executable, "-m", "steelyard.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_check_prints_a_file_that_loads(run_file, tmp_path):
    path = run_file(
        "[batch]\nglobal_batch_size = 16\nmicro_batch_size = 1\nramp = [2, 2, 1_000]\n[length]\nsamples = 100\n"
    )
    done = steelyard("check", path)
    assert done.returncode == 0 and f"ramp = [2, 2, 1000] # {path}:4" in done.stdout
    assert "# ramp: global batch      2: 50 steps from sample 0" in done.stdout
    assert done.stdout.count("# ramp:") == 8
    again = tmp_path / "again.toml"
    again.write_text(done.stdout)
    assert steelyard("check", again, "--json").returncode == 0


def test_check_json(run_file):
    done = steelyard("check", run_file("seed = 7\n"), "--json")
    assert json.loads(done.stdout)["config"]["seed"] == 7


def test_errors_go_to_stderr_with_exit_code_2(run_file):
    done = steelyard("check", run_file("[model]\nnum_layer = 3\n"))
    assert done.returncode == 2 and done.stdout == "" and "error[S003]" in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_chip_is_refused(run_file):
    done = steelyard("check", run_file('[hardware]\nchip = "H1000"\n'))
    assert done.returncode == 2 and "error[H001]" in done.stderr


def test_explain():
    assert "whole attention heads" in steelyard("explain", "s104").stdout
    assert steelyard("explain", "Z9").returncode == 2


def test_help_and_version():
    assert "check" in steelyard("--help").stdout
    assert steelyard("--version").stdout.startswith("steelyard ")
    assert steelyard("nonsense").returncode == 2
