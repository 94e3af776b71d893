"""What other systems print about parameters, against their logs and their issue threads."""

import json
from math import prod
from pathlib import Path

import pytest

from steelyard.frameworks import counting
from steelyard.frameworks.deepspeed import counts as deepspeed
from steelyard.frameworks.megatron.counts import line, network
from steelyard.predict import parameters
from steelyard.spec import UserError, resolve

GOLDEN = Path(__file__).parent.parent / "golden"
PUBLISHED = json.loads((GOLDEN / "parameter_counts.json").read_text())["configurations"]
LOGS = json.loads((GOLDEN / "log_counts.json").read_text())
RECORDED = json.loads((GOLDEN / "megatron_parameters.json").read_text())


def plan(model, precision=None, **parallel):
    config = {"model": model, "parallel": parallel, "precision": precision or {"compute": "fp16"}}
    return resolve(config).run


def printed(run):
    return {key: entry.value for key, entry in counting.printed(run).items()}


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda entry: entry["name"])
def test_published_configurations(published):
    model = plan(published["model"]).model
    assert parameters.unique(model) == published["unique"]
    assert parameters.unique_unpadded(model) == published["unique_unpadded"]
    assert parameters.without_embeddings(model) == published["without_embeddings"]
    if published["stated"].endswith("hub"):  # a count published with the released weights
        assert f"{published['unique']:,}" in published["stated"]


# 8 layers x 512 of Megatron-DeepSpeed pull request 204, as Megatron pads it.
SMALL = {
    "num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 1024,
    "vocab_multiple": "megatron",
}


@pytest.mark.parametrize(("tensor", "unique"), [(1, 51_500_032), (2, 51_565_568)])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_one_true_count_on_every_layout(tensor, pipeline, unique):
    """Field report A01."""
    run = plan(SMALL, tensor=tensor, pipeline=pipeline)
    assert parameters.unique(run.model, tensor) == unique
    assert parameters.unique_unpadded(run.model) == 51_475_968
    assert parameters.padding(run.model, tensor) == unique - 51_475_968


@pytest.mark.parametrize(
    ("tensor", "pipeline", "stage", "total", "unique", "billions"),
    [
        (1, 1, [51_500_032], 51_500_032, 51_500_032, 0.051500032),
        (2, 1, [26_057_728], 52_115_456, 52_115_456, 0.052115456),
        (1, 2, [38_889_472, 38_890_496], 77_779_968, 51_500_032, 0.077778944),
    ],
)
@pytest.mark.parametrize("multiple", ["megatron", 128])
def test_the_seed_of_it_all(tensor, pipeline, stage, total, unique, billions, multiple):
    """Megatron-DeepSpeed pull request 204: one model, three sizes. Megatron pads to 128 x tensor either way."""
    found = printed(plan({**SMALL, "vocab_multiple": multiple}, tensor=tensor, pipeline=pipeline))
    assert found["deepspeed_stage"] == stage
    assert (found["deepspeed_total"], found["deepspeed_unique"]) == (total, unique)
    assert found["megatron_deepspeed_estimated_billions"] == billions


def test_the_lines_of_deepspeed():
    run = plan(SMALL, pipeline=2)
    assert counting.printed(run)["deepspeed_stage"].lines == (
        "RANK=0 STAGE=0 LAYERS=7 [0, 7) STAGE_PARAMS=38889472 (38.889M) TOTAL_PARAMS=77779968 (77.780M) "
        "UNIQUE_PARAMS=51500032 (51.500M)",
        "RANK=1 STAGE=1 LAYERS=8 [7, 15) STAGE_PARAMS=38890496 (38.890M) TOTAL_PARAMS=77779968 (77.780M) "
        "UNIQUE_PARAMS=51500032 (51.500M)",
    )


def test_pipeline_layers_of_spring_2021():
    """The 2021 branch had no cast in front: [0,6) [34,38) [50,54) for 64 layers on 16 stages."""
    old = deepspeed.ranges((4,) * 16, half=True, spring_2021=True)
    assert [old[stage] for stage in (0, 8, 12)] == [(0, 6), (34, 38), (50, 54)]
    assert old[-1][1] == deepspeed.ranges((4,) * 16, half=False)[-1][1] == 64 + 6


def test_replicas_explain_the_difference():
    """The 615,424 parameters that two tensor ranks add: 128 rows of padding, and replicated tensors."""
    run = plan(SMALL, tensor=2)
    replicated = parameters.counts(parameters.rank_tensors(run.model, run.parallel, 0), 2)[0].replicated
    assert replicated == 524_288 + 1_024 + 8 * 6 * 512
    assert 128 * 512 + replicated == 52_115_456 - 51_500_032


GIANT = {
    "num_layers": 64,
    "hidden_size": 11600,
    "num_attention_heads": 80,
    "seq_length": 2048,
    "embedding_norm": True,
    "vocab_multiple": "megatron",
}


def test_104_billion_called_125():
    run = plan(GIANT, tensor=4, pipeline=32)
    found = printed(run)
    assert found["megatron_deepspeed_estimated_billions"] == 125.22432
    assert found["megatron_deepspeed_without_embeddings_billions"] == 103.368064
    assert found["deepspeed_stage"][0] == 978_315_000
    assert parameters.unique_unpadded(run.model) == 103_958_515_600
    assert parameters.unique(run.model, 4) == 103_963_515_200
    old = deepspeed.params(run, (2,) * 32, before_pull_261=True)
    assert (old.total, old.unique) == (104_731_388_800, 104_048_288_000)
    plain = plan({**GIANT, "embedding_norm": False}, tensor=4, pipeline=32)
    assert printed(plain)["megatron_deepspeed_without_embeddings_billions"] == 103.3650944


def test_bloom():
    bloom = {
        "num_layers": 70,
        "hidden_size": 14336,
        "num_attention_heads": 112,
        "seq_length": 2048,
        "vocab_size": 250680,
        "vocab_multiple": "megatron",
        "position": "alibi",
        "embedding_norm": True,
    }
    run = plan(bloom, tensor=4, pipeline=12, stages=[5] + [6] * 10 + [5])
    found = printed(run)
    assert parameters.unique(run.model, 4) == 176_247_271_424
    assert parameters.unique_unpadded(run.model) == 176_244_404_224
    assert parameters.without_embeddings(run.model) == 172_650_655_744
    assert (found["deepspeed_total"], found["deepspeed_unique"]) == (179_862_122_496, 176_265_506_816)
    assert found["megatron_deepspeed_estimated_billions"] == pytest.approx(191.162474, abs=1e-6)
    assert found["megatron_deepspeed_without_embeddings_billions"] == pytest.approx(148.003086, abs=1e-6)


def from_log(entry):
    sizes = {"num_layers": entry["layers"], "hidden_size": entry["hidden"], "num_attention_heads": 64}
    return plan({**sizes, "seq_length": 1024, "vocab_multiple": "megatron"}, tensor=4, pipeline=entry["pipeline"])


@pytest.mark.parametrize("entry", LOGS["megatron"], ids=lambda entry: entry["source"])
def test_megatron_logs(entry):
    ranks = printed(from_log(entry))["megatron_ranks"]
    stages = [ranks[4 * stage : 4 * stage + 4] for stage in range(entry["pipeline"])]
    assert stages[0] == [entry["first"]] * 4
    assert stages[-1] == [entry["last"]] * 4
    assert all(stage == [entry["middle"]] * 4 for stage in stages[1:-1])


@pytest.mark.parametrize("entry", LOGS["deepspeed"], ids=lambda entry: entry["source"])
def test_deepspeed_logs(entry):
    run = from_log(entry)
    found = counting.printed(run)
    stage = found["deepspeed_stage"]
    assert (stage.value[0], stage.value[-1]) == (entry["first"], entry["last"])
    assert set(stage.value[1:-1]) == {entry["middle"]}
    assert (found["deepspeed_total"].value, found["deepspeed_unique"].value) == (entry["total"], entry["unique"])
    for number, layers in entry["ranges"].items():
        assert layers in stage.lines[int(number)]


def test_spring_2021_billions():
    """`52.005 Billion` of the ZeRO-3 logs, tensor 4, no pipeline."""
    run = plan({"num_layers": 64, "hidden_size": 8192, "num_attention_heads": 64, "seq_length": 1024}, tensor=4)
    line = counting.printed(run)["megatron_deepspeed_2021_billions"].lines[2]
    assert line == " > number of parameters on model parallel rank 2            52.005 Billion"
    assert parameters.unique(network(run), 4) == 51_970_064_384
    assert parameters.unique_unpadded(run.model) == 51_966_533_632


def test_table_of_pull_202():
    """13B, tensor 2, pipeline 4: vocabulary and sequence are inferred from the printed figures."""
    model = {"num_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "seq_length": 1024, "vocab_size": 32256}
    run = plan({**model, "vocab_multiple": 1}, tensor=2, pipeline=4)
    lines = counting.printed(run)["megatron_deepspeed_table_billions"].lines
    assert lines[0] == "[000-000] 13.2893B / 12.5868B"
    assert lines[2] == "[000-001] 12.5868B / 12.5868B"
    assert lines[6] == "[000-003] 13.2894B / 12.5869B"


def test_profiler_of_deepspeed_issue_2565():
    """18.4B on 8 tensor ranks: the profiler's 2318.53 M a GPU times 8 is 98,488,320 above the truth."""
    model = {"num_layers": 40, "hidden_size": 6144, "num_attention_heads": 48, "seq_length": 2048, "vocab_size": 51200}
    run = plan(model, tensor=8)
    rank = parameters.ranks(run.model, run.parallel)[0].held.total
    assert f"{rank / 1e6:.2f}" == "2318.53"
    assert 8 * rank - parameters.unique(run.model, 8) == 98_488_320
    assert parameters.unique(run.model, 8) == 18_449_756_160


def test_parts_of_deepspeed_pull_682():
    """4 layers of 512: model 38.89 M, word 25.76 M, positions 524.29 k, transformer 12.61 M."""
    run = plan({"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 1024})
    held = parameters.ranks(run.model, run.parallel)[0].held
    assert [f"{n / 1e6:.2f}" for n in (held.total, held.embedding, held.embedding + held.position)] == [
        "38.89",
        "25.76",
        "26.28",
    ]
    assert held.position == 524_288
    assert f"{(held.total - held.embedding - held.position) / 1e6:.2f}" == "12.61"


def test_a_layer_and_the_embedding_of_bloom():
    layer = {"num_layers": 1, "hidden_size": 14336, "num_attention_heads": 112, "seq_length": 2048, "position": "alibi"}
    tensors = parameters.tensors(plan({**layer, "vocab_size": 250880}).model)
    assert sum(entry.numel for entry in tensors if entry.name.startswith("layers.0.")) == 2_466_437_120
    assert tensors[0].numel == 3_596_615_680


def test_a_wrong_ffn_shows_before_launch():
    """The 104B run that was launched with an MLP of 20480 had 56.7B parameters for weeks."""
    model = {"num_layers": 32, "hidden_size": 16384, "num_attention_heads": 64, "seq_length": 2048}
    assert parameters.unique_unpadded(plan({**model, "ffn_hidden_size": 20480}).model) == 56_696_946_688
    assert parameters.unique_unpadded(plan(model).model) == 103_943_028_736


@pytest.mark.parametrize("name", list(RECORDED["models"]["gpt2"]["layouts"]))
def test_megatron_itself(name):
    """Every rank's line and every tensor's shape, as recorded from Megatron-LM."""
    recorded = RECORDED["models"]["gpt2"]["layouts"][name]
    tensor, pipeline = (int(part[2:]) for part in name.split("_"))
    common = RECORDED["common"]
    model = {
        "num_layers": common["num_layers"],
        "hidden_size": common["hidden_size"],
        "num_attention_heads": common["num_attention_heads"],
        "seq_length": common["sequence_length"],
        "vocab_size": common["vocab_size"],
    }
    layers = common["num_layers"] // pipeline
    run = plan(model, tensor=tensor, pipeline=pipeline, stages=[layers] * pipeline)
    assert network(run).padded_vocab_size(tensor) == recorded["padded_vocab_size"]
    ours = counting.printed(run)["megatron_ranks"]
    assert ours.value == [rank["parameters"] for rank in sorted(recorded["ranks"], key=_position)]
    for rank in recorded["ranks"]:
        where = rank["tensor_rank"], rank["pipeline_rank"]
        assert line(*where, rank["parameters"], since_2026_07=True) == rank["line"]
    for stage, shapes in recorded["tensors_of_tensor_rank_0"].items():
        held = parameters.stage_tensors(network(run), run.parallel, int(stage))
        first = layers * int(stage)
        seen = {entry.name: list(entry.local_shape(tensor)) for entry in held}
        assert {our_name(theirs, first): shape for theirs, shape in shapes.items()} == {
            entry: shape for entry, shape in seen.items() if f"layers.{first}." in entry or "layers" not in entry
        }


def _position(rank):
    return rank["pipeline_rank"], rank["tensor_rank"]


OURS = {
    "embedding.word_embeddings": "embedding.word",
    "embedding.position_embeddings": "embedding.position",
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.out",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
    "decoder.final_layernorm": "norm",
    "output_layer": "head",
}


def our_name(theirs, first_layer):
    for megatron, ours in OURS.items():
        theirs = theirs.replace(megatron, ours)
    return theirs.replace("decoder.layers.0", f"layers.{first_layer}")


def test_megatron_memory_report():
    """GPT-2 345M: 353.6 M reported, 354.9 M true."""
    run = plan({"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024})
    found = counting.printed(run)
    assert found["megatron_theory_most_loaded_billions"].lines == (
        "Number of parameters in most loaded shard in billions: 0.3536",
    )
    assert found["megatron_theory_total_billions"].lines == (
        "Number of parameters in transformer block in billions:  0.30",
        "Total number of parameters in billions: 0.35",
    )


def test_partitioners_on_78_layers():
    """BigScience saw [7 x 11, 1] on 12 stages; since DeepSpeed 0.12.5 it is [7 x 6, 6 x 6]."""
    assert deepspeed.partition(78, 12, before_0_12_5=True) == (7,) * 11 + (1,)
    assert deepspeed.partition(78, 12) == (7,) * 6 + (6,) * 6
    run = plan({"num_layers": 78, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}, pipeline=12)
    found = printed(run)
    layer = 12 * 64**2 + 13 * 64
    assert found["deepspeed_stage"][6] == 6 * layer
    assert found["deepspeed_stage_before_0_12_5"][6] == 7 * layer


@pytest.mark.parametrize("before", [True, False])
def test_partition_minimises_what_it_should(before):
    """Against every partition of small counts: the smallest largest stage, or the smallest difference."""
    for layers in range(1, 13):
        for stages in range(1, layers + 1):
            found = deepspeed.partition(layers, stages, before)
            assert (sum(found), len(found)) == (layers, stages)
            if before:
                assert max(found) == -(-layers // stages)
            else:
                assert max(found) - min(found) == (layers % stages > 0)


def test_virtual_stages():
    """Megatron-LM adds the chunks of a rank up; DeepSpeed has none."""
    run = plan({**SMALL, "vocab_multiple": 128}, pipeline=2, virtual=2, pipeline_schedule="interleaved")
    found = printed(run)
    assert found["megatron_ranks"] == [38_889_472, 38_366_208]
    assert found["deepspeed_total"] is None
    assert found["megatron_deepspeed_estimated_billions"] is None
    assert found["gpt_neox_total"] is None


def test_megatron_refuses_unequal_stages():
    entry = counting.printed(plan(SMALL, pipeline=3))["megatron_ranks"]
    assert entry.value is None
    assert "8 layers over 3" in entry.says


def test_a_translated_run_keeps_its_vocabulary():
    """A run that comes from Megatron says how many rows there are; nothing is padded a second time."""
    config = {"model": {**SMALL, "vocab_multiple": 64}, "parallel": {"tensor": 2}, "engine": {"framework": "megatron"}}
    run = resolve(config).run
    assert network(run).padded_vocab_size(2) == 50304


def test_other_systems():
    """GPT-2 small as each prints it; nanoGPT's default has no biases, GPT-NeoX's sample run unties and rotates."""
    small = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024}
    found = counting.printed(plan(small))
    assert found["huggingface_trainable"].value == 124_439_808
    assert found["llm_c_parameters"].value == 124_475_904
    assert counting.printed(plan({**small, "bias": False}))["nanogpt_without_positions"].lines == (
        "number of parameters: 123.59M",
    )
    assert found["libai"].value is None
    neox = {**small, "position": "rotary", "tied_embeddings": False, "vocab_size": 50304}
    assert printed(plan(neox))["gpt_neox_total"] == 162_322_944


def test_llama_3_as_torchtitan_counts_it():
    model = {
        "kind": "llama",
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "ffn_hidden_size": 14336,
        "seq_length": 8192,
        "vocab_size": 128256,
    }
    assert printed(plan(model))["torchtitan_total"] == 8_030_261_248


def test_every_number_says_what_it_counts():
    run = plan(SMALL, tensor=2, pipeline=2)
    for entry in (*counting.printed(run).values(), *counting.views(run).values()):
        assert entry.says.endswith("."), entry.key


def test_finding_a_framework():
    assert counting.find("Megatron-DeepSpeed").NAME == "Megatron-DeepSpeed"
    assert counting.find("llm.c").NAME == "llm.c"
    with pytest.raises(UserError, match=r"P002[\s\S]*megatron"):
        counting.find("megatrn")


def test_shares_of_a_tensor_rank():
    """Local shapes of all tensor ranks make the whole tensor."""
    run = plan(SMALL, tensor=4)
    for entry in parameters.tensors(run.model, 4):
        local = prod(entry.local_shape(4))
        assert local * (1 if entry.cut is None else 4) == entry.numel
