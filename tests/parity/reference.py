"""A plain GPT in float64 on one process: no chunks, no micro-batches, no mesh. What every layout must equal.

Only the initial weights and the dropout hash are shared with the code under test; both have tests of their own.
"""

import math

import torch
from torch.nn import functional as F

from steelyard.model.dropout import keep_mask
from steelyard.model.init import initial
from steelyard.model.position import Place


class Reference:
    def __init__(self, run, shapes):
        self.run, self.m = run, run.model
        self.w = {n: initial(self.m, n, s, run.seed).double().requires_grad_() for n, s in shapes.items()}
        self.mean = {n: torch.zeros_like(p) for n, p in self.w.items()}
        self.variance = {n: torch.zeros_like(p) for n, p in self.w.items()}
        self.updates = 0

    def linear(self, x, name):
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, x, name):
        if self.m.norm == "layernorm":
            centred = x - x.mean(-1, keepdim=True)
            y = centred / (centred.square().mean(-1, keepdim=True) + self.m.norm_eps).sqrt()
            return y * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]
        return x / (x.square().mean(-1, keepdim=True) + self.m.norm_eps).sqrt() * self.w[f"{name}.weight"]

    def drop(self, x, p, site, place, axes):
        return x * keep_mask(p, self.run.seed, site, place, axes) / (1 - p) if p else x

    def hidden_drop(self, x, site, place):
        positions, channels = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[2])[None, :]
        return self.drop(x, self.m.hidden_dropout, site, place, (positions, channels))

    def rotate(self, x, positions):
        r = int(self.m.head_dim * self.m.rotary_fraction)
        angle = positions[:, None, :, None] * self.m.rotary_base ** (-torch.arange(0, r, 2).double() / r)
        a, b = x[..., : r // 2], x[..., r // 2 : r]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), x[..., r:]], -1)

    def attention(self, x, layer, batch, place):
        m, name = self.m, f"layers.{layer}.attention"
        b, s, per = x.shape[0], x.shape[1], m.heads_per_group
        qkv = self.linear(x, f"{name}.qkv").view(b, s, m.num_query_groups, per + 2, m.head_dim)
        q = qkv[..., :per, :].reshape(b, s, -1, m.head_dim).transpose(1, 2)
        k, v = (qkv[..., per + i, :].transpose(1, 2) for i in (0, 1))
        if m.qk_norm:
            q, k = self.norm(q, f"{name}.query_norm"), self.norm(k, f"{name}.key_norm")
        if m.position == "rotary":
            positions = batch.positions if batch.positions is not None else torch.arange(s)[None]
            q, k = self.rotate(q, positions), self.rotate(k, positions)
        k, v = (t.repeat_interleave(per, 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(m.head_dim)
        steps = torch.arange(s)
        if m.position == "alibi":
            slopes = 2.0 ** (-8.0 / m.num_attention_heads * torch.arange(1, m.num_attention_heads + 1).double())
            scores = scores + slopes[:, None, None] * (steps[None, :] - steps[:, None])
        allowed = (steps[:, None] >= steps[None, :])[None, None]
        if batch.documents is not None:
            allowed = allowed & (batch.documents[:, None, :, None] == batch.documents[:, None, None, :])
        p = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        heads = torch.arange(m.num_attention_heads)
        axes = (heads[:, None, None], steps[None, :, None], steps[None, None, :])
        p = self.drop(p, m.attention_dropout, f"{layer}/attention", place, axes)
        return self.linear((p @ v).transpose(1, 2).reshape(b, s, -1), f"{name}.out")

    def mlp(self, x, layer):
        name = f"layers.{layer}.mlp"
        up = self.linear(x, f"{name}.up")
        gate = self.linear(x, f"{name}.gate") if self.m.gated else up
        act = {
            "gelu": F.gelu, "geglu": F.gelu, "swiglu": F.silu, "relu": F.relu, "relu2": lambda t: F.relu(t) ** 2,
            "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        }[self.m.activation](gate)  # fmt: skip
        return self.linear(act * up if self.m.gated else act, f"{name}.down")

    def losses(self, batch, step):
        """Token losses [batch, sequence]."""
        m, place = self.m, Place(samples=batch.samples, step=step)
        x = self.w["embedding.word.weight"][batch.tokens]
        if m.position == "learned":
            positions = batch.positions if batch.positions is not None else torch.arange(x.shape[1])
            x = x + self.w["embedding.position.weight"][positions]
        if m.embedding_norm:
            x = self.norm(x, "embedding.norm")
        x = self.hidden_drop(x, "embedding", place)
        for layer in range(m.num_layers):
            attended = self.attention(self.norm(x, f"layers.{layer}.attention_norm"), layer, batch, place)
            x = x + self.hidden_drop(attended, f"{layer}/attention_out", place)
            inner = self.mlp(self.norm(x, f"layers.{layer}.mlp_norm"), layer)
            x = x + self.hidden_drop(inner, f"{layer}/mlp_out", place)
        head = self.w["embedding.word.weight" if m.tied_embeddings else "head.weight"]
        logits = self.norm(x, "norm") @ head.T
        logits = logits if m.padding_in_softmax else logits[..., : m.vocab_size]
        return -logits.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]

    def step(self, batch, rate, number):
        """One AdamW update on a whole global batch: (loss, gradient norm)."""
        losses, mask = self.losses(batch, number), batch.loss_mask
        mean = (losses * mask).sum() / mask.sum()
        objective = mean
        if self.run.batch.loss_mean == "micro_batches":
            micro = self.run.batch.micro_batch_size
            pairs = zip((losses * mask).split(micro), mask.split(micro), strict=True)
            objective = torch.stack([lo.sum() / mk.sum() for lo, mk in pairs]).mean()
        grads = dict(zip(self.w, torch.autograd.grad(objective, list(self.w.values()), allow_unused=True), strict=True))
        grads = {n: g for n, g in grads.items() if g is not None}
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        rule = self.run.optimizer
        factor = min(1.0, rule.clip_grad / (norm.item() + 1e-6)) if rule.clip_grad else 1.0
        self.updates += 1
        (b1, b2), t = rule.betas, self.updates
        with torch.no_grad():
            for n, g in grads.items():
                p, g = self.w[n], g * factor
                self.mean[n] = b1 * self.mean[n] + (1 - b1) * g
                self.variance[n] = b2 * self.variance[n] + (1 - b2) * g * g
                if p.dim() > 1:
                    p -= rate * rule.weight_decay * p
                p -= rate / (1 - b1**t) * self.mean[n] / ((self.variance[n] / (1 - b2**t)).sqrt() + rule.eps)
        return mean.item(), norm.item()
