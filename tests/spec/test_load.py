"""Reading a run file: values, origins, and every error at its place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.spec import UserError, load, resolve, write
from steelyard.spec.errors import CATALOGUE
from steelyard.spec.load import key_lines

T1 = """name = "t1"
[model]
num_layers = 4
hidden_size = 64
num_attention_heads = 4
seq_length = 64
vocab_size = 257
[batch]
global_batch_size = 8
[length]
steps = 10
"""


def codes(failure):
    return [p.code for p in failure.value.problems]


def refuse(path, *overrides, world=None):
    with pytest.raises(UserError) as failure:
        load(path, overrides, world)
    return failure


def test_defaults_follow_the_kind():
    gpt2, llama = resolve({}).run.model, resolve({"model": {"kind": "llama"}}).run.model
    assert (gpt2.position, gpt2.norm, gpt2.activation, gpt2.bias, gpt2.tied_embeddings) == (
        "learned", "layernorm", "gelu", True, True,
    )  # fmt: skip
    assert (llama.position, llama.norm, llama.activation, llama.bias, llama.tied_embeddings) == (
        "rotary", "rmsnorm", "swiglu", False, False,
    )  # fmt: skip
    assert (
        resolve({"model": {"kind": "llama", "hidden_size": 4096, "num_attention_heads": 32}}).run.model.ffn_hidden_size
        == 11008
    )


def test_every_value_knows_where_it_came_from(run_file):
    path = run_file(T1)
    loaded = load(path, ["model.num_layers=2", "learning_rate.peak=1e-3"], world=2)
    assert loaded.run.model.num_layers == 2
    assert str(loaded.origin("model.num_layers")) == f"command line, overriding {path}:3"
    assert str(loaded.origin("model.hidden_size")) == f"{path}:4"
    assert str(loaded.origin("learning_rate.peak")) == "command line"
    assert str(loaded.origin("parallel.data")) == "--world 2"
    assert str(loaded.origin("seed")) == "default"


def test_the_written_file_reads_back_equal(run_file, tmp_path):
    loaded = load(run_file(T1 + '[precision]\ncompute = "fp16"\nloss_scale = { static = 1024.0 }\n'), world=2)
    again = tmp_path / "again.toml"
    again.write_text(write.dumps(loaded.run, lambda key: str(loaded.origin(key))))
    assert load(again).run == loaded.run


def test_all_errors_at_once(run_file):
    path = run_file(T1.replace("num_layers = 4", 'num_layer = 4\nbias = "yes"') + '[precision]\ncompute = "fp8"\n')
    failure = refuse(path)
    assert sorted(codes(failure)) == ["S003", "S004", "S005"]
    text = str(failure.value)
    assert f"{path}:3  model.num_layer = 4" in text and "did you mean num_layers?" in text
    assert f'{path}:4  model.bias = "yes"' in text
    assert f'{path}:14  precision.compute = "fp8"' in text


def test_the_design_example(run_file):
    path = run_file("[model]\nnum_attention_heads = 16\nhidden_size = 1024\n\n[parallel]\ntensor = 2\n")
    failure = refuse(path, "parallel.tensor=3")
    first = failure.value.problems[0].render().splitlines()
    assert first[0] == "error[S104]: 16 attention heads do not divide over tensor = 3"
    assert first[1] == f"  --> {path}:6  parallel.tensor = 3  (overridden on the command line)"
    assert first[2] == "  hint: legal values here are 1, 2, 4, 8, 16"


@pytest.mark.parametrize(
    ("text", "line"),
    [("a = ", 1), ("[model]\nbias = True\n", 2), ("[model]\n[model]\n", 2), ("x = 'a\n", 1)],
)
def test_broken_toml_names_the_line(run_file, text, line):
    path = run_file(text)
    failure = refuse(path)
    assert codes(failure) == ["S001"] and failure.value.problems[0].place == f"{path}:{line}"


def test_unreadable_files(tmp_path):
    assert codes(refuse(tmp_path / "none.toml")) == ["S002"]
    assert codes(refuse(tmp_path)) == ["S002"]
    (tmp_path / "latin").write_bytes(b'name = "\xe9"')
    assert codes(refuse(tmp_path / "latin")) == ["S002"]


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("model.num_layers", "S006"), ("=3", "S006"), ("model..x=1", "S006"), ("name.x=1", "S007"),
        ("model=3", "S007"), ("foo.bar=1", "S003"), ("foo=1", "S003"), ("seed=-1", "S005"), ("seed='1'", "S004"),
        ("name=a b", "S005"), ("model.num_layers=0", "S005"), ("model.num_layers=2.0", "S004"),
        ("model.num_layers=true", "S004"), ("optimizer.betas=[0.9]", "S005"), ("optimizer.eps=nan", "S005"),
        ("precision.loss_scale.windows=3", "S003"), ("parallel.data=x", "S004"), ("parallel.tensor=x", "S004"),
        ("batch.micro_batch_size=-1", "S005"), ("batch.ramp=[1,2]", "S005"), ("data.split=a,b", "S306"),
        ("hardware=1", "S007"), ("parallel=1", "S007"), ("batch=1", "S007"), ("record=1", "S007"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_with_their_place(run_file, override, code):
    failure = refuse(run_file(T1), override)
    assert code in codes(failure)
    assert all(p.place for p in failure.value.problems)


def test_key_lines_pass_over_multi_line_values():
    text = '[data]\ntrain = [\n  "a",  # ]\n  "b = 1",\n]\nsplit = """x\ny = 2\n"""\ncache = "c"\n[a.b]\n"k" = 1\n'
    assert dict(key_lines(text)) == {
        "data": 1, "data.train": 2, "data.split": 6, "data.cache": 9, "a.b": 10, "a.b.k": 11,
    }  # fmt: skip


def test_every_code_renders_and_is_explained():
    for code, wording in CATALOGUE.items():
        assert wording.rule and wording.why.endswith("."), code


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_a_run_or_a_user_error(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "run.toml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        load(path)
    except UserError as failure:
        assert failure.problems


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()), st.just({})
)
SECTION = st.sampled_from(
    ["model", "parallel", "batch", "length", "learning_rate", "recompute", "data", "record", "seed"]
)
KEY = st.sampled_from(
    ["num_layers", "hidden_size", "head_dim", "tensor", "pipeline", "data", "stages", "global_batch_size", "ramp"]
    + ["accumulation", "micro_batch_size", "steps", "samples", "warmup_steps", "decay_steps", "split", "kind"]
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(SECTION, st.one_of(VALUES, st.dictionaries(KEY, VALUES))), st.none() | st.integers(-2, 9))
def test_any_values_are_a_run_or_a_user_error(values, world):
    try:
        resolve(values, world=world)
    except UserError as failure:
        assert failure.problems
