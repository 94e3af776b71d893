"""The rules that span keys, with the recipes of the field reports that end before launch."""

import pytest

from steelyard.spec import UserError, resolve
from steelyard.spec.check import notes

T1 = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 257}


def run(world=None, model=None, **sections):
    return resolve({"model": {**T1, **(model or {})}, **sections}, world=world).run


def refused(world=None, model=None, **sections):
    with pytest.raises(UserError) as failure:
        run(world, model, **sections)
    return failure.value.problems


def only(problems):
    assert len(problems) == 1, problems
    return problems[0]


# --- H01: shapes that do not divide, with the legal values -----------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "parallel", "code", "legal"),
    [
        ({"num_attention_heads": 5, "hidden_size": 80}, {"tensor": 2}, "S104", "1, 5"),
        ({"num_attention_heads": 25, "hidden_size": 1600}, {"tensor": 4}, "S104", "1, 5, 25"),
        ({"num_query_groups": 1}, {"tensor": 2}, "S105", "legal values here are 1"),
        ({"hidden_size": 66}, {}, "S101", "1, 2, 3, 6, 11, 22, 33, 66"),
        ({"ffn_hidden_size": 255}, {"tensor": 2}, "S106", "1, 3, 5, 15, 17, 51, 85, 255"),
        ({"seq_length": 63}, {"tensor": 2, "sequence": True}, "S107", "1, 3, 7, 9, 21, 63"),
        ({"seq_length": 66}, {"context": 4}, "S122", "1, 2, 3, 6, 11, 22, 33, 66"),
        ({"num_query_groups": 3}, {}, "S102", "1, 2, 4"),
        ({"vocab_multiple": 1}, {"tensor": 2}, "S110", "multiple of 2"),
        ({"num_layers": 3}, {"pipeline": 4}, "S109", "at most 3"),
        ({"num_layers": 4}, {"pipeline": 2, "stages": [3, 2]}, "S108", "[2, 2]"),
        ({"seq_length": 64, "max_position_embeddings": 32}, {}, "S112", "64"),
        ({"position": "rotary", "rotary_fraction": 0.3}, {}, "S103", "even"),
        ({}, {"sequence": True}, "S113", "tensor"),
        ({}, {"pipeline": 2, "virtual": 2}, "S114", "interleaved"),
        ({}, {"pipeline": 2, "zero": 2}, "S117", "zero = 1"),
        ({}, {"pipeline": 2, "virtual": 2, "pipeline_schedule": "zbv", "zero": 3}, "S120", "zero = 1"),
    ],
)
def test_shapes(model, parallel, code, legal):
    found = [p for p in refused(8, model, parallel=parallel) if p.code == code]
    assert found and legal in found[0].hint


def test_what_recompute_names_must_be_there():
    assert only(refused(1, recompute={"mode": "selective", "modules": []})).code == "S121"
    beyond = notes(run(1, recompute={"mode": "full", "layers": 99}))
    assert any(note.key == "recompute.layers" and "all are recomputed" in note.text for note in beyond)


def test_what_our_own_engine_passes_over_is_said():
    given = {"fp8": "hybrid", "attention": "flash"}
    ours, theirs = (notes(run(1, engine={**given, "framework": name})) for name in ("steelyard", "megatron"))
    assert [note.text for note in ours if note.key == "engine"] == [
        "without effect on steelyard's own engine: engine.attention, engine.fp8"
    ]
    assert not any(note.key == "engine" for note in theirs)


def test_zero_bubble_with_zero_3_is_refused_wherever_weights_are_sharded():
    zbv = {"pipeline": 2, "virtual": 2, "pipeline_schedule": "zbv", "zero": 3}
    for world, compute in ((2, "bf16"), (4, "fp32")):
        assert only(refused(world, parallel=zbv, precision={"compute": compute})).code == "S120"
    assert run(2, parallel=zbv, precision={"compute": "fp32"}).parallel.zero == 3


def test_layers_that_do_not_divide_over_stages_are_legal_and_said():
    uneven = run(2, {"num_layers": 3}, parallel={"pipeline": 2})
    assert any("not equal" in note.text for note in notes(uneven))


def test_another_framework_may_cut_query_groups():
    run(4, {"num_query_groups": 2}, parallel={"tensor": 4}, engine={"framework": "megatron"})


def test_zero_bubble_with_full_recompute_is_refused_with_the_reason():
    parallel = {"pipeline": 2, "virtual": 2, "pipeline_schedule": "zbv"}
    assert only(refused(2, parallel=parallel, recompute={"mode": "full"})).code == "S118"


# --- H05: the world ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "parallel", "said"),
    [
        (1, {"tensor": 2}, "tensor 2 x context 1 x pipeline 1 = 2 ranks, or a multiple; 1 were given"),
        (3, {"tensor": 2}, "--world 2 or --world 4"),
        (2, {"tensor": 2, "pipeline": 2}, "= 4 ranks"),
    ],
)
def test_a_world_that_does_not_fit(world, parallel, said):
    found = refused(world, parallel=parallel)
    assert found[0].code == "S111" and said in found[0].render()


def test_world_zero():
    assert only(refused(0)).code == "E002"


def test_a_given_data_size_must_match_the_world():
    assert only(refused(4, parallel={"data": 2})).code == "S116"
    assert run(None, parallel={"data": 2, "tensor": 2}).parallel.world_size == 4


# --- G02, G05: the batch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "parallel"), [(1, {}), (2, {}), (2, {"tensor": 2})])
def test_the_global_batch_is_the_contract(world, parallel):
    found = run(world, parallel=parallel, batch={"global_batch_size": 8})
    batch = found.batch
    assert found.tokens_per_step == 512
    assert batch.micro_batch_size * batch.accumulation * found.parallel.data == 8


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"micro_batch_size": 3, "global_batch_size": 8}, "3 x 2 x 1 = 6, not 8"),
        ({"micro_batch_size": 16, "global_batch_size": 8}, "16 x 1 x 1 = 16, not 8"),
        ({"micro_batch_size": 2, "global_batch_size": 8, "accumulation": 3}, "2 x 3 x 1 = 6, not 8"),
    ],
)
def test_a_contradiction_prints_the_equation(batch, said):
    found = only(refused(1, batch=batch))
    assert found.code == "S201" and "global = micro x accumulation x data" in found.rule and said in found.rule


def test_divisibility_counts_data_ranks_only():
    found = only(refused(2, batch={"global_batch_size": 7}))
    assert found.code == "S202" and "2 data-parallel ranks" in found.rule and "6, 8, 10" in found.hint
    assert run(2, parallel={"tensor": 2}, batch={"global_batch_size": 7}).batch.global_batch_size == 7


@pytest.mark.parametrize(
    ("batch", "parallel", "expected"),
    [
        ({"micro_batch_size": 2, "accumulation": 3}, {}, (12, 2, 3)),
        ({"global_batch_size": 12, "accumulation": 3}, {}, (12, 2, 3)),
        ({"global_batch_size": 12, "micro_batch_size": 2}, {}, (12, 2, 3)),
        ({"global_batch_size": 12}, {}, (12, 6, 1)),
        ({"global_batch_size": 12}, {"pipeline": 2}, (12, 3, 2)),
        ({"micro_batch_size": 3}, {}, (6, 3, 1)),
    ],
)
def test_any_two_give_the_third(batch, parallel, expected):
    found = run(4 if parallel else 2, parallel=parallel, batch=batch).batch
    assert (found.global_batch_size, found.micro_batch_size, found.accumulation) == expected


# --- G06: the ramp ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("micro", "ramp", "code"), [(1, [2, 3, 1000], "S203"), (4, [2, 2, 1000], "S204"), (1, [16, 2, 1000], "S205")]
)
def test_bad_ramps(micro, ramp, code):
    batch = {"global_batch_size": 16, "micro_batch_size": micro, "ramp": ramp}
    assert only(refused(1, batch=batch, length={"samples": 100})).code == code


def test_every_bad_level_is_listed():
    batch = {"global_batch_size": 16, "micro_batch_size": 4, "ramp": [4, 2, 1000]}
    assert "6, 10, 14" in only(refused(1, batch=batch, length={"samples": 100})).rule


# --- G01: the schedule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "steps", "code", "said"),
    [
        ({"warmup_steps": 2000}, 10, "S304", "warmup_steps = 2000"),
        ({"warmup_steps": 10, "decay_steps": 10}, 10, "S304", "decay_steps = 10"),
        ({"warmup_fraction": 1.0}, 10, "S304", "warmup_fraction = 1"),
        ({"peak": 1e-4, "minimum": 1e-3}, 10, "S305", "0.0001"),
        ({"warmup_steps": 1, "warmup_samples": 8}, 10, "S302", "warmup_steps, warmup_samples"),
        ({"decay_steps": 5, "decay_samples": 40}, 10, "S303", ""),
    ],
)
def test_bad_schedules(rule, steps, code, said):
    found = only(refused(1, learning_rate=rule, length={"steps": steps}, batch={"global_batch_size": 8}))
    assert found.code == code and said in found.render()


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"peak": 0.0}, "nothing will be learned"),
        ({"decay_steps": 320000}, "never decays"),
        ({"decay_steps": 320000, "warmup_fraction": 0.01}, "still warming up"),
        ({"decay_steps": 5}, "the rest runs at 0"),
    ],
)
def test_suspicious_schedules_are_notes(rule, said):
    found = notes(run(1, learning_rate=rule, length={"steps": 100}, batch={"global_batch_size": 8}))
    assert any(said in note.text for note in found), found


def test_lengths():
    assert only(refused(1, length={"steps": 1, "tokens": 10_000})).code == "S301"
    assert only(refused(1, length={"tokens": 10}, batch={"global_batch_size": 8})).code == "S307"
