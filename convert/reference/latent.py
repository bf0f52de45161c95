"""Is the latent used in full? Perplexity with sliced latents, spectra and logit gaps.

Slicing here applies to every position, prompt included, so it is a harsher test than serving,
where the prompt is prefilled exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from tpla.convert.reference.model import Attention, ReferenceModel


class Rotation(StrEnum):
    """The basis in which the latent is sliced."""

    NONE = "identity"
    PCA = "pca"


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """tokens int64 [T]; weights float32 [T], 1 where the token belongs to an answer."""

    tokens: Tensor
    weights: Tensor


def unit_latent(attention: Attention, latent: Tensor) -> Tensor:
    """The normalised latent before the norm's weight. [T, C] -> [T, C]."""
    return F.rms_norm(latent, (latent.shape[-1],), eps=attention.shape.eps)


def sliced_attention(
    attention: Attention, x: Tensor, cos: Tensor, sin: Tensor, basis: Tensor, groups: int
) -> Tensor:
    """Attention with one softmax for each slice of the rotated latent. x [T, hidden] -> same.

    basis [C, C] is orthogonal. Without a rotation the slice's logits are scaled by `groups`;
    with PCA they are not, because the leading slice holds nearly all of the score.
    """
    s = attention.shape
    q_nope, q_rope, latent, k_rope = attention.queries_and_cache(x, cos, sin)
    rotated = unit_latent(attention, latent) @ basis
    weight = (attention.kv_b_proj.weight * attention.kv_a_layernorm.weight) @ basis
    rope_scores = torch.einsum("qhr,kr->hqk", q_rope, k_rope[:, 0])
    mask = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).tril()
    identity = torch.equal(basis, torch.eye(s.latent, device=x.device))
    scale = float(groups) if identity else 1.0
    out = x.new_zeros(len(x), s.heads, s.value)
    for part in torch.arange(s.latent, device=x.device).chunk(groups):
        kv = F.linear(rotated[:, part], weight[:, part]).unflatten(-1, (s.heads, -1))
        k, v = kv.split([s.nope, s.value], -1)
        scores = scale * torch.einsum("qhn,khn->hqk", q_nope, k) + rope_scores
        scores = (scores * (s.nope + s.rope) ** -0.5).masked_fill(~mask, -math.inf)
        out = out + torch.einsum("hqk,khv->qhv", scores.softmax(-1), v)
    return attention.o_proj(out.flatten(-2))


@torch.no_grad()
def run(
    model: ReferenceModel,
    tokens: Tensor,
    bases: Sequence[Tensor],
    groups: int,
    latents: list[list[Tensor]] | None = None,
) -> Tensor:
    """Logits [T, vocabulary] of one chat; `latents[layer]` collects normalised latents [T, C]."""
    cos, sin = model.cos[: len(tokens)], model.sin[: len(tokens)]
    x = model.model.embed_tokens(tokens)
    for index, layer in enumerate(model.model.blocks()):
        normed = layer.input_layernorm(x)
        if latents is not None:
            raw = layer.self_attn.queries_and_cache(normed, cos, sin)[2]
            latents[index].append(unit_latent(layer.self_attn, raw))
        x = x + sliced_attention(layer.self_attn, normed, cos, sin, bases[index], groups)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    logits: Tensor = model.lm_head(model.model.norm(x))
    return logits


def perplexities(
    model: ReferenceModel, chats: Sequence[EncodedChat], bases: Sequence[Tensor], groups: int
) -> dict[str, float]:
    """Perplexity over all tokens and over answer tokens."""
    all_sum = answer_sum = torch.zeros((), dtype=torch.float64)
    all_count = answer_count = 0.0
    for chat in chats:
        logits = run(model, chat.tokens, bases, groups)[:-1]
        losses = F.cross_entropy(logits, chat.tokens[1:], reduction="none").double().cpu()
        weights = chat.weights[1:].double().cpu()
        all_sum = all_sum + losses.sum()
        answer_sum = answer_sum + (losses * weights).sum()
        all_count += len(losses)
        answer_count += float(weights.sum())
    return {
        "all_tokens": round(math.exp(all_sum.item() / all_count), 5),
        "answer_tokens": round(math.exp(answer_sum.item() / answer_count), 5),
    }


def exact_answers(
    model: ReferenceModel, chats: Sequence[EncodedChat], bases: Sequence[Tensor], groups: int
) -> float:
    """Share of chats whose weighted tokens are all the most likely ones (greedy is exact)."""
    right = 0
    for chat in chats:
        guessed = run(model, chat.tokens, bases, groups)[:-1].argmax(-1)
        right += bool((guessed == chat.tokens[1:])[chat.weights[1:] > 0].all())
    return round(right / len(chats), 4)


def principal_bases(
    latents: Sequence[Sequence[Tensor]],
) -> tuple[list[Tensor], list[dict[str, float]]]:
    """Per layer the eigenvectors of the latent's second moment, largest first, and its spectrum."""
    bases, spectra = [], []
    for parts in latents:
        stacked = torch.cat(list(parts)).double()
        values, vectors = torch.linalg.eigh(stacked.T @ stacked / len(stacked))
        values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
        share = values / values.sum()
        bases.append(vectors.to(parts[0].dtype))
        spectra.append(
            {
                "effective_rank": round(float(1 / share.square().sum()), 1),
                "share_of_first_half": round(float(share[: len(share) // 2].sum()), 4),
                "share_of_first_quarter": round(float(share[: len(share) // 4].sum()), 4),
            }
        )
    return bases, spectra


def top_two_gaps(
    model: ReferenceModel, chats: Sequence[EncodedChat], bases: Sequence[Tensor]
) -> dict[str, float]:
    """Gap between the two largest logits where the next token belongs to an answer."""
    gaps = []
    for chat in chats:
        top = run(model, chat.tokens, bases, 1)[:-1].topk(2, dim=-1).values
        gaps.append((top[:, 0] - top[:, 1])[chat.weights[1:] > 0])
    joined = torch.cat(gaps).float()
    points = torch.tensor([0.001, 0.01, 0.1, 0.5], device=joined.device)
    values = torch.quantile(joined, points).tolist()
    return dict(zip(("p0.1", "p1", "p10", "p50"), (round(v, 3) for v in values), strict=True))


def report(
    model: ReferenceModel,
    calibration: Sequence[EncodedChat],
    test: Sequence[EncodedChat],
    recall: Sequence[EncodedChat],
) -> dict[str, object]:
    """Sliced perplexities on `test` and exact answers on `recall`; PCA fits `calibration`."""
    device = next(model.parameters()).device
    identity = [torch.eye(model.shape.latent, device=device)] * model.shape.layers
    latents: list[list[Tensor]] = [[] for _ in range(model.shape.layers)]
    for chat in calibration:
        run(model, chat.tokens, identity, 1, latents)
    pca, spectra = principal_bases(latents)
    cases = {"exact": (identity, 1)}
    for groups in (2, 4):
        cases[f"{Rotation.NONE}_g{groups}"] = (identity, groups)
        cases[f"{Rotation.PCA}_g{groups}"] = (pca, groups)
    return {
        "chats": len(test),
        "recall_questions": len(recall),
        "perplexity": {
            name: {
                **perplexities(model, test, *case),
                "recall_answers": perplexities(model, recall, *case)["answer_tokens"],
            }
            for name, case in cases.items()
        },
        "exact_recall_answers": {
            name: exact_answers(model, recall, *case) for name, case in cases.items()
        },
        "top_two_logit_gap": top_two_gaps(model, test, identity),
        "layers": spectra,
    }
