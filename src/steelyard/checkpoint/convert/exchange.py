"""Checkpoints as Hugging Face folders and back: the files, and the check that both sides compute the same logits."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.checkpoint import shards, store
from steelyard.checkpoint.convert import huggingface
from steelyard.checkpoint.weights import load_model
from steelyard.data import tokenizer
from steelyard.model.init import initial
from steelyard.parallel.shard import DTYPES
from steelyard.spec import Run, UserError, error, load

LIMIT = 1e-5  # of the logits' difference, where they are of the size of 1; in proportion where they are larger
PROBE = (2, 32)  # random tokens [batch, sequence] that go through both models
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def export(source: Path, folder: Path, dtype: str) -> list[str]:
    """Write the model of a run folder or checkpoint as a Hugging Face folder; what was done, in words.

    Raises UserError C001, C002, C004, C008, C009, C010.
    """
    from safetensors.torch import save_file

    path = store.found(source)
    run = load(path / "run.toml").run
    model = run.model
    huggingface.kind_of(model)
    if differing := store.unequal(path):
        name, _, ranks = differing[0].partition(": ")
        raise error("C009", place=str(path), name=name, first=ranks.split(" and ")[0], second=ranks.split(" and ")[1])
    tensors = {
        theirs: value.to(DTYPES[dtype]).contiguous()
        for name, whole in shards.read_whole(path, "weights.")
        for theirs, value in huggingface.to_theirs(name.removeprefix("weights."), whole, model)
    }
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        said = _write_tokenizer(run.data.tokenizer, folder)
        eod = _eod(run.data.tokenizer)
        _write_json(folder / "config.json", huggingface.config(model, NAMES[dtype], eod))
        ends = {} if eod is None else {"bos_token_id": eod, "eos_token_id": eod, "pad_token_id": eod}
        _write_json(folder / "generation_config.json", {"do_sample": True, **ends})
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except OSError as failure:
        raise error("C004", place=str(folder), path=folder, detail=failure.strerror or failure, bytes=size) from None
    said.append(f"wrote {folder}: {len(tensors)} tensors, {size:,} bytes in {NAMES[dtype]}, from {path}")
    if model.padding_in_softmax and run.padded_vocab_size > model.vocab_size:
        said.append("note: the padding rows, which took part in this model's softmax, are left out")
    return [*said, _checked(path, folder, DTYPES[dtype])]


def read(folder: Path, run: Run) -> dict[str, Tensor]:
    """A Hugging Face folder's weights under our names, with padding rows as the run has them.

    Padding rows are those a new run would have. Raises UserError C005, C009, C011, and F002 for rescaled rotary
    frequencies, which no tensor shows.
    """
    rotary = _json(folder / "config.json") if (folder / "config.json").is_file() else {}
    rotary = rotary.get("rope_scaling") or rotary.get("rope_parameters") or {}
    scaling = rotary.get("rope_type", rotary.get("type", "default"))
    if scaling != "default":
        raise error("F002", place=str(folder / "config.json"), kind="llama", key_name="rope_type", value=scaling,
                    advice="only rotary frequencies that are not rescaled can be trained")  # fmt: skip
    found = huggingface.to_ours(_tensors(folder), run.model)
    return {name: with_padding(name, tensor, run) for name, tensor in found.items()}


def with_padding(name: str, table: Tensor, run: Run) -> Tensor:
    """A vocabulary table with the run's number of padding rows: rows beyond are left out, missing ones are a new
    run's. Any other tensor as it is."""
    rows = run.padded_vocab_size
    if name not in shards.TABLES or not run.model.vocab_size <= table.shape[0] != rows:
        return table
    fresh = initial(run.model, name, (rows, *table.shape[1:]), run.seed).to(table.dtype)
    kept = min(rows, table.shape[0])
    return torch.cat([table[:kept], fresh[kept:]])


def check_import(path: Path, folder: Path) -> str:
    """That the checkpoint `path`, made from the Hugging Face folder, computes what that does. One that does not is
    removed: nothing may begin from it. Raises UserError C010."""
    try:
        return _checked(path, folder, torch.float32)
    except UserError:
        shutil.rmtree(path)
        raise


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        advice = "save the model with save_pretrained(safe_serialization=True)"
        raise error("C011", place=str(folder), path=folder, detail="it has no model*.safetensors", advice=advice)
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found |= load_file(file)
        except (OSError, SafetensorError) as failure:
            detail = f"{file.name}: {failure}"
            raise error("C011", place=str(file), path=folder, detail=detail, advice="copy it again") from None
    index = folder / "model.safetensors.index.json"
    if index.is_file() and (missing := set(_json(index).get("weight_map", {})) - set(found)):
        detail = f"{min(missing)} of {index.name} is in no file"
        raise error("C011", place=str(folder), path=folder, detail=detail, advice="copy all of its files")
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError, RecursionError):
        raise error("C011", place=str(path), path=path, detail="it is not JSON", advice="copy it again") from None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# --- tokenizers ------------------------------------------------------------------------------------------------------


def _eod(name: str) -> int | None:
    try:
        return tokenizer.load(name).eod
    except UserError:
        return None


def _write_tokenizer(name: str, folder: Path) -> list[str]:
    """The run's tokenizer in Hugging Face's files; what could not be written, in words."""
    if name.startswith("ids:"):
        return [f"note: no tokenizer files: the run's tokenizer {name} takes token ids, not text"]
    source = Path(name)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if name == "byte":
        (folder / "tokenizer.json").write_text(_bytes_as_json(), encoding="utf-8")
        settings |= {"eos_token": tokenizer.END_NAMES[0], "bos_token": tokenizer.END_NAMES[0]}
    elif source.is_file():
        shutil.copyfile(source, folder / "tokenizer.json")
        settings |= _end_token(folder / "tokenizer.json")
    elif (source / "tokenizer.json").is_file():
        for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            if (source / file).is_file():
                shutil.copyfile(source / file, folder / file)
        settings |= _end_token(folder / "tokenizer.json")
    elif (source / "vocab.json").is_file() and (source / "merges.txt").is_file():
        for file in ("vocab.json", "merges.txt"):
            shutil.copyfile(source / file, folder / file)
        settings = {"tokenizer_class": "GPT2TokenizerFast"}
    else:
        return [f"note: no tokenizer files: {name} is not here"]
    if not (folder / "tokenizer_config.json").is_file():
        _write_json(folder / "tokenizer_config.json", settings)
    return []


def _end_token(path: Path) -> dict[str, str]:
    """The token that ends a document, as tokenizer_config.json says it."""
    added = [token.get("content") for token in _json(path).get("added_tokens", [])]
    name = next((name for name in tokenizer.END_NAMES if name in added), None)
    return {} if name is None else {"eos_token": name, "bos_token": name}


def _bytes_as_json() -> str:
    """Bytes as their own ids and 256 as the end: a BPE without merges over byte-level characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    engine = Tokenizer(models.BPE({character: byte for byte, character in enumerate(_byte_characters())}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([AddedToken(tokenizer.END_NAMES[0], special=True, normalized=False)])
    return engine.to_str()


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies: printable bytes are themselves, the
    others follow from U+0100 on. Source: Radford et al. 2019, GPT-2's encoder."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


# --- the check -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _checked(path: Path, folder: Path, dtype: torch.dtype) -> str:
    """The largest difference of the two models' logits, in words. Raises UserError C010 where it is too large.

    Our side's weights are rounded to `dtype` first, so that what is compared is the conversion and not the rounding.
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        return _reread(path, folder, dtype)
    ours, saved = load_model(path, torch.device("cpu"))
    for parameter in ours.parameters():
        parameter.copy_(parameter.to(dtype))
    spec = saved.run.model
    length = min(PROBE[1], spec.seq_length)
    tokens = torch.randint(0, spec.vocab_size, (PROBE[0], length), generator=torch.Generator().manual_seed(0))
    expected = ours(tokens)[..., : spec.vocab_size]
    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    found = theirs(tokens).logits
    difference, scale = (found - expected).abs().max().item(), max(1.0, expected.abs().max().item())
    if not difference <= LIMIT * scale:
        raise error("C010", place=str(folder), path=folder, difference=difference, limit=LIMIT * scale)
    return f"logits of transformers and of this model differ by at most {difference:.2g} (of {scale:.3g})"


def _reread(path: Path, folder: Path, dtype: torch.dtype) -> str:
    """Without transformers: the folder's weights, read back, are the checkpoint's bit for bit."""
    run = load(path / "run.toml").run
    there = huggingface.to_ours(_tensors(folder), run.model)
    for name, whole in shards.read_whole(path, "weights."):
        name = name.removeprefix("weights.")
        mine = whole[: run.model.vocab_size] if name in shards.TABLES else whole
        if name not in there or not torch.equal(there[name].to(dtype), mine.to(dtype)):
            raise error("C010", place=str(folder), path=folder, difference=float("nan"), limit=0.0)
    return "read back, every weight is the checkpoint's; logits were not compared: transformers is not installed"
