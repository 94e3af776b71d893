"""config.json of Hugging Face models: the published sizes, Hugging Face's own modules, and refusals."""

import json

import pytest
import torch

from steelyard.frameworks.huggingface import config
from steelyard.predict import parameters
from steelyard.spec import UserError, resolve

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
LLAMA2 = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32000,
    "rope_scaling": None,
}
LLAMA3 = {
    **LLAMA2,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_parameters": {"rope_theta": 500000.0},
}


def read(tmp_path, values, name="model"):
    folder = tmp_path / name
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return resolve(config.read(path)).run


@pytest.mark.parametrize(
    ("values", "unique"),
    [
        (GPT2, 124_439_808),
        ({**GPT2, "n_embd": 1600, "n_head": 25, "n_layer": 48}, 1_557_611_200),
        (LLAMA2, 6_738_415_616),
        (LLAMA3, 8_030_261_248),
        (
            {
                **LLAMA3,
                "hidden_size": 8192,
                "intermediate_size": 28672,
                "num_attention_heads": 64,
                "num_hidden_layers": 80,
            },
            70_553_706_496,
        ),
    ],
)
def test_published_sizes(tmp_path, values, unique):
    run = read(tmp_path, values)
    assert parameters.unique(run.model) == parameters.unique_unpadded(run.model) == unique


@pytest.mark.parametrize(
    "values",
    [
        {**GPT2, "n_embd": 48, "n_head": 4, "n_layer": 2, "n_inner": 100, "vocab_size": 77, "n_positions": 20},
        {**GPT2, "n_embd": 48, "n_head": 4, "n_layer": 2, "tie_word_embeddings": False, "vocab_size": 77},
        {**LLAMA3, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
        {**LLAMA2, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 20,
         "num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ],
    ids=["gpt2", "gpt2 untied", "llama grouped", "llama biased and tied"],
)  # fmt: skip
def test_against_hugging_face_itself(tmp_path, values):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    build, settings = (
        (GPT2LMHeadModel, GPT2Config) if values["model_type"] == "gpt2" else (LlamaForCausalLM, LlamaConfig)
    )
    with torch.device("meta"):
        theirs = build(settings(**{key: value for key, value in values.items() if key != "model_type"}))
    run = read(tmp_path, values)
    assert parameters.unique(run.model) == sum(p.numel() for p in theirs.parameters())


def test_what_a_configuration_says(tmp_path):
    run = read(tmp_path, LLAMA3, "Llama-3 8B")
    assert run.name == "Llama-3-8B"
    assert (run.model.rotary_base, run.model.activation, run.model.norm_eps) == (500000.0, "swiglu", 1e-5)
    assert (run.model.seq_length, run.model.num_query_groups) == (4096, 8)
    run = read(tmp_path, GPT2, "gpt2")
    assert (run.model.activation, run.model.hidden_dropout, run.model.padded_vocab_size()) == ("gelu_tanh", 0.1, 50257)


@pytest.mark.parametrize(
    ("values", "code", "words"),
    [
        ("{", "F001", "not JSON"),
        ("[]", "F001", "model_type None"),
        ({"model_type": "bert"}, "F001", "gpt2 and llama"),
        ({"model_type": "llama", "vocab_size": 5}, "F001", "num_hidden_layers is missing"),
        ({**GPT2, "activation_function": "mish"}, "F002", "activation_function = 'mish'"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "F002", "scale_attn_by_inverse_layer_idx"),
        ({**GPT2, "scale_attn_weights": False}, "F002", "scale_attn_weights"),
        ({**LLAMA2, "attention_bias": True}, "F002", "attention_bias"),
        ({**GPT2, "n_layer": "twelve"}, "S004", "num_layers must be a whole number"),
        ({**GPT2, "n_head": 7}, "S101", "does not divide over 7"),
    ],
)
def test_refusals(tmp_path, values, code, words):
    with pytest.raises(UserError) as refused:
        read(tmp_path, values)
    assert code in str(refused.value)
    assert words in str(refused.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="F001"):
        config.read(tmp_path / "config.json")
