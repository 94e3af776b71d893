"""Megatron-LM's legacy checkpoints as one model: `mp_rank_TT[_PPP]/model_optim_rng.pt` of any tensor and pipeline size.

Source: Megatron-LM `checkpointing.py` (folders, versions) and its model parallel layers (what is cut how). Tensors are
joined by how each kind of layer is cut; what every tensor rank holds whole must be bit-equal on all of them.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steelyard.checkpoint.convert.megatron import put
from steelyard.spec.errors import error
from steelyard.spec.model import Model

FILE = "model_optim_rng.pt"

# Legacy module names -> Megatron core's, which `megatron.our_name` knows.
_RENAMED = (
    (r"^(language_model|model)\.", ""),
    (r"^embedding\.(word|position)_embeddings\.", r"embedding.\1_embeddings."),
    (r"^(encoder|transformer|decoder)\.layers\.", "decoder.layers."),
    (r"^(encoder|transformer|decoder)\.final_(layernorm|norm)\.", "decoder.final_layernorm."),
    (r"\.(self_)?attention\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.(self_)?attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.(post_attention_layernorm|post_attention_norm)\.", ".pre_mlp_layernorm."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
)
_BY_ROWS = (
    "word_embeddings.weight", "word_embeddings_for_head.weight", "output_layer.weight", "linear_qkv.weight",
    "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias",
)  # fmt: skip
_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_HEADS = ("word_embeddings_for_head.weight", "word_embeddings.weight")  # a tied table's copy on the last stage


@dataclass(frozen=True)
class _Rank:
    """One rank's file: where it stands, and its model chunks (one, or one per virtual stage)."""

    tensor: int
    pipeline: int
    path: Path
    version: float
    chunks: list[dict[str, Tensor]]


def is_legacy(path: Path) -> bool:
    return path.is_dir() and any(_folder(path).glob(f"mp_rank_*/{FILE}"))


def read(path: Path, model: Model) -> dict[str, Tensor]:
    """The whole model under our names, padding rows as they are. `path` is the folder with the iterations or one
    iteration. Raises UserError C005, C009, C011."""
    ranks = [_rank(file) for file in sorted(_folder(path).glob(f"mp_rank_*/{FILE}"))]
    tensor, pipeline = 1 + max(r.tensor for r in ranks), 1 + max(r.pipeline for r in ranks)
    grid = {(r.tensor, r.pipeline): r for r in ranks}
    if missing := [(t, p) for t in range(tensor) for p in range(pipeline) if (t, p) not in grid]:
        detail = "it has no file of tensor rank {}, pipeline rank {}".format(*missing[0])
        raise error("C011", place=str(path), path=path, detail=detail, advice="copy all mp_rank_* folders")
    found: dict[str, Tensor] = {}
    first_layer = 0
    for chunk in range(len(ranks[0].chunks)):  # virtual stages run through the pipeline one after another
        for stage in range(pipeline):
            held = [grid[t, stage] for t in range(tensor)]
            merged = _merged([r.chunks[chunk] for r in held], held, model)
            layers = {int(m[1]) for name in merged if (m := re.match(r"decoder\.layers\.(\d+)\.", name))}
            for name, whole in merged.items():
                _place(found, _numbered(name, first_layer), whole, model)
            first_layer += len(layers)
    return found


def _folder(path: Path) -> Path:
    """The newest iteration, as the tracker file says; `path` itself where it holds the ranks."""
    tracker = path / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return path
    said = tracker.read_text(errors="replace").strip()
    return path / (said if said == "release" else f"iter_{int(said):07d}" if said.isdecimal() else said)


def _rank(file: Path) -> _Rank:
    place = re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?(?:_\d+)?", file.parent.name)
    content = _loaded(file)
    chunks = [content[key] for key in sorted(content) if re.fullmatch(r"model\d*", key)]
    if place is None or not chunks or not all(isinstance(chunk, Mapping) for chunk in chunks):
        advice = "give a folder that Megatron-LM's --ckpt-format torch wrote"
        raise error("C011", place=str(file), path=file, detail="it holds no model", advice=advice)
    version = float(content.get("checkpoint_version", 0))
    return _Rank(int(place[1]), int(place[2] or 0), file, version, [dict(_flat(chunk)) for chunk in chunks])


def _loaded(file: Path) -> dict[str, Any]:
    """A file's plain content. Beside tensors it may hold the arguments (a Namespace) and numpy's random state; both are
    rebuilt as data, and any other object is refused."""
    words = np.zeros(1, np.uint32)
    numpy_parts: list[Any] = [words.__reduce__()[0], np.ndarray, np.dtype, type(words.dtype)]
    try:
        with torch.serialization.safe_globals([argparse.Namespace, *numpy_parts]):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as failure:  # the unpickler raises what the file makes it raise
        lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
        named = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0] if lines else "")
        advice = "save it again without that object, or convert it with Megatron-LM's own tools"
        raise error("C011", place=str(file), path=file, detail=named or type(failure).__name__, advice=advice) from None
    return content if isinstance(content, dict) else {}


def _flat(chunk: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors by their dotted name under Megatron core's names; extra states are no tensors of the model."""
    for key, value in chunk.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, Tensor) and not name.endswith(("_extra_state", "rotary_pos_emb.inv_freq")):
            for pattern, replacement in _RENAMED:
                name = re.sub(pattern, replacement, name)
            yield name, value


def _merged(parts: list[dict[str, Tensor]], ranks: list[_Rank], model: Model) -> dict[str, Tensor]:
    """One stage's tensors, joined over its tensor ranks."""
    whole = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts if name in part]
        if len(pieces) < len(parts):
            raise error("C005", name=f"{name}, which some tensor ranks do not hold")
        if "linear_qkv" in name:
            pieces = [_grouped(piece, ranks[0].version, model, len(parts)) for piece in pieces]
        if name.endswith(_BY_ROWS):
            if "linear_fc1" in name and model.gated:  # every rank holds its gate rows, then its up rows
                halves = [piece.chunk(2) for piece in pieces]
                pieces = [half[0] for half in halves] + [half[1] for half in halves]
            whole[name] = torch.cat(pieces)
        elif name.endswith(_BY_COLUMNS):
            whole[name] = torch.cat(pieces, dim=1)
        else:
            for piece, rank in zip(pieces, ranks, strict=True):
                if not torch.equal(piece, pieces[0]):
                    raise error("C009", place=str(rank.path), name=name, first=_named(ranks[0]), second=_named(rank))
            whole[name] = pieces[0]
    return whole


def _named(rank: _Rank) -> str:
    return f"{rank.path.parent.name}/{rank.path.name}"


def _grouped(piece: Tensor, version: float, model: Model, tensor: int) -> Tensor:
    """Fused rows by query group. Before version 2 they lay otherwise: [3, heads, dim] (0), [heads, dim, 3] (1).
    Source: Megatron-LM `fix_query_key_value_ordering`."""
    if version >= 2 or model.heads_per_group != 1:
        return piece
    heads, dim = model.num_attention_heads // tensor, model.head_dim
    if version < 1:
        return piece.unflatten(0, (3, heads, dim)).transpose(0, 1).flatten(0, 2)
    return piece.unflatten(0, (heads, dim, 3)).movedim(2, 1).flatten(0, 2)


def _numbered(name: str, first: int) -> str:
    return re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{int(m[1]) + first}.", name)


def _place(found: dict[str, Tensor], name: str, whole: Tensor, model: Model) -> None:
    """Put a joined tensor under our name, or check that a copy of one is its equal."""
    if name in _HEADS or (name == "output_layer.weight" and model.tied_embeddings):
        table = found.get("embedding.word.weight")
        if table is None or not torch.equal(table, whole):
            raise error("C009", name="the tied word table", first="the first stage", second="the last stage")
        return
    put(found, name, whole, model)
