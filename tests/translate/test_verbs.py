"""The command line: `translate`, and the other verbs on a foreign script."""

import json
import subprocess
import sys

import pytest

from steelyard.record.read import read_folder
from tests.train.conftest import corpus  # noqa: F401
from tests.translate.conftest import SCRIPTS

POSITIONAL, ARGUMENTS = str(SCRIPTS / "positional.sh"), ["--", "8", "2", "2", "4", "64", "100"]


@pytest.fixture
def steelyard(monkeypatch, capsys):
    """Runs a command line in this process: (exit code, standard output, standard error)."""
    from steelyard.cli import main

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["steelyard", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


def test_to_a_run_file_that_says_where_each_value_is_from(steelyard, tmp_path):
    path = tmp_path / "run.toml"
    code, _, err = steelyard("translate", POSITIONAL, "--output", path, *ARGUMENTS)
    text = path.read_text()
    assert code == 0 and "36 flags: 28 translated, 8 irrelevant, 0 refused" in err
    assert "num_layers = 24 # positional.sh:32 --num-layers" in text
    assert "hidden_dropout = 0.1 # default of Megatron-LM" in text
    assert "data = 2 # positional.sh:14 --nproc_per_node" in text and "[engine]" not in text
    code, out, _ = steelyard("check", path)
    assert code == 0 and "tensor = 2" in out


def test_json_holds_everything(steelyard):
    code, out, _ = steelyard("translate", POSITIONAL, "--json", *ARGUMENTS)
    found = json.loads(out)
    assert code == 0 and found["counts"] == {"translated": 28, "irrelevant": 8, "refused": 0}
    assert found["config"]["parallel"]["pipeline"] == 2 and found["engine"]["framework"] == "megatron"
    (row,) = [row for row in found["rows"] if row["flag"] == "--data-impl"]
    assert (row["fate"], row["why"], row["place"]) == ("irrelevant", "how data are read", "positional.sh:46")


def test_refused_flags_are_named_and_the_answer_is_no(steelyard, tmp_path):
    path = tmp_path / "x.sh"
    path.write_text(
        (SCRIPTS / "positional.sh").read_text().replace("--fp16", "--fp16 --no-such-flag 3 --decoupled-lr 1e-3")
    )
    code, _, err = steelyard("translate", path)
    assert (
        code == 1 and "refused: --no-such-flag 3 (x.sh:60)" in err and "refused: --decoupled-lr 1e-3 (x.sh:60)" in err
    )
    code, _, err = steelyard("plan", path)
    assert code == 0 and "refused: --no-such-flag" in err
    code, _, err = steelyard("train", path)
    assert code == 2 and "F019" in err and "--decoupled-lr (x.sh:60)" in err


def test_values_that_only_a_run_would_tell(steelyard, tmp_path):
    path = tmp_path / "x.sh"
    text = (SCRIPTS / "positional.sh").read_text()
    path.write_text(text.replace("--lr 0.00015", "--lr $RATE").replace("--num-layers 24", "--num-layers $(nproc)"))
    code, _, err = steelyard("translate", path)
    assert code == 2 and err.count("F014") == 2
    assert "$(nproc) would have to be run" in err and "--env RATE=..." in err and "x.sh:32" in err
    path.write_text(text.replace("--lr 0.00015", "--lr $RATE"))
    code, out, _ = steelyard("translate", path, "--env", "RATE=3e-4")
    assert code == 0 and "peak = 0.0003 # x.sh:49 --lr" in out


def test_a_group_that_depends_on_a_file(steelyard, tmp_path):
    path = tmp_path / "x.sh"
    test = 'if [ -d "$DATA" ]; then MORE="--load old"; else MORE=""; fi\n'
    text = (SCRIPTS / "positional.sh").read_text().replace("--fp16", "--fp16 $MORE")
    path.write_text(text.replace("python -m", f"{test}python -m"))
    code, _, err = steelyard("translate", path)
    assert code == 0 and "nothing here depends on it" in err
    path.write_text(path.read_text().replace("--load old", "--bf16"))
    code, _, err = steelyard("translate", path)
    assert code == 2 and "F014" in err and "it chooses between `--bf16` and nothing" in err


def test_plan_and_compare(steelyard):
    code, out, _ = steelyard("plan", POSITIONAL, "--json", *ARGUMENTS)
    assert code == 0 and json.loads(out)["parameters"]["unique_unpadded"] == 354_823_168
    code, out, _ = steelyard("compare", f"{POSITIONAL} 8 1 1 8 64", f"{POSITIONAL} 8 2 1 4 64")
    assert "parallel.tensor" in out and "positional.sh:30" in out.replace("...", "")


def test_flag_tables(steelyard):
    for name in ("megatron", "megatron-deepspeed", "deepspeed", "libai"):
        code, out, _ = steelyard("translate", "--flags", name)
        assert not code and out.startswith("translated: ") and "\nrefused: " in out
    assert steelyard("translate", "--flags", "no")[0] == 2


def test_unknown_target(steelyard):
    code, _, err = steelyard("translate", POSITIONAL, "--to", "nemo")
    assert code == 2 and "F021" in err and "megatron-deepspeed" in err


def test_what_a_target_cannot_say(steelyard):
    code, _, err = steelyard("translate", str(SCRIPTS / "heredoc.sh"), "--to", "libai")
    assert code == 2 and "LiBai cannot say batch.ramp" in err
    code, out, err = steelyard("translate", POSITIONAL, "--to", "libai", "--", "8", "1", "1", "8", "64", "320000")
    assert code == 0 and "differs: model.activation" in err and "#   model.activation: " in out


TINY = """#!/bin/bash
STEPS=${{1:-4}}
torchrun --nproc_per_node ${{2:-1}} pretrain_gpt.py \\
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 \\
    --micro-batch-size 2 --global-batch-size 4 --train-iters $STEPS --lr 1e-3 --lr-decay-style cosine \\
    --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257 \\
    --data-path {data} --split 90,10,0 --eval-iters 1 --save-interval 100 --save {folder}/out --load {folder}/out
"""


def test_train(tmp_path, corpus):  # noqa: F811
    """`steelyard train script.sh -- args` trains what the script says."""
    path = tmp_path / "tiny.sh"
    path.write_text(TINY.format(data=corpus, folder=tmp_path))
    command = [sys.executable, "-m", "steelyard.cli.main", "train", str(path), "data.cache=cache", "--", "3", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = read_folder(tmp_path / "runs" / "tiny")
    assert [step.step for step in record.steps] == [1, 2, 3]
    assert record.config["model"]["padding_in_softmax"] is True and record.config["length"]["steps"] == 3
    assert record.steps[0].learning_rate == 1e-3  # no warm-up: the first rate is the peak


def test_nothing_loads_torch():
    code = (
        "import sys\nfrom steelyard.cli.main import main\n"
        f"sys.argv = ['steelyard', 'translate', {POSITIONAL!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nsys.exit(77 if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
