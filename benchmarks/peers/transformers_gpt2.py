"""transformers' GPT-2 with torch.optim.AdamW in a plain loop, as an arm of `steelyard bench`.

    python benchmarks/peers/transformers_gpt2.py --layers 4 --hidden 192 --heads 6 --length 256 --batch 16 --steps 25

Random tokens, one process, float32, gradients clipped to 1. It says its settings and every step in the words of
nanoGPT's train.py, whose loop it is, so that its log can be read like any other.
"""

import argparse
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("hidden", 192), ("heads", 6), ("length", 256), ("vocabulary", 2048),
                          ("batch", 16), ("steps", 25)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    logging.set_verbosity_error()
    torch.manual_seed(1234)
    settings = {"n_layer": given.layers, "n_embd": given.hidden, "n_head": given.heads, "block_size": given.length,
                "batch_size": given.batch, "max_iters": given.steps, "dropout": 0.0, "bias": True,
                "dtype": "'float32'", "grad_clip": 1.0}  # fmt: skip
    for name, value in settings.items():
        print(f"Overriding: {name} = {value}")
    print(f"defaulting to vocab_size of GPT-2 to {given.vocabulary}")
    print(f"tokens per iteration will be: {given.batch * given.length:,}")
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=given.vocabulary, n_positions=given.length, n_embd=given.hidden, n_layer=given.layers,
            n_head=given.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(given.steps):
        tokens = torch.randint(0, given.vocabulary, (given.batch, given.length))
        began = time.perf_counter()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        print(f"iter {step}: loss {value:.4f}, time {(time.perf_counter() - began) * 1e3:.2f}ms", flush=True)


if __name__ == "__main__":
    main()
