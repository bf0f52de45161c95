"""Train the reference model from generated text, export it, and score it.

Run `python -m tpla.convert.reference.train --out FOLDER --report FILE --minutes 8`. A larger model
for figures, which takes a GPU: `--size large --no-score`.
"""

import hashlib
import json
import subprocess
import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer
from torch import Tensor

from tpla.convert.reference.checkpoint import save_checkpoint
from tpla.convert.reference.conversations import draw_conversation
from tpla.convert.reference.model import (
    LARGE_SHAPE,
    ModelShape,
    ReferenceModel,
    weighted_loss,
)
from tpla.convert.reference.score import score
from tpla.convert.reference.stream import Batch, BatchStream
from tpla.convert.reference.tokenizer import train_tokenizer

PRINT_EVERY = 100  # steps
TOKENIZER_CHATS = 4000


class Size(StrEnum):
    """Which reference model."""

    EMBEDDED = "embedded"
    LARGE = "large"

    @property
    def shape(self) -> ModelShape:
        """Sizes of its parts."""
        return LARGE_SHAPE if self is Size.LARGE else ModelShape()


class MatrixOptimizer(StrEnum):
    """What updates the matrices of the layers."""

    MUON = "muon"
    ADAMW = "adamw"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the model is trained; times are shares of the time limit."""

    minutes: float = 8.0
    batch_tokens: int = 65_536
    longest_chat: int = 4096
    max_chats: int = 2048
    optimizer: MatrixOptimizer = MatrixOptimizer.MUON
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup: float = 0.02
    decay: float = 0.5
    clip: float = 1.0
    workers: int = 14
    seed: int = 1


def learning_rate_share(recipe: Recipe, progress: float) -> float:
    """Linear warm-up, constant, linear decay to zero; `progress` runs from 0 to 1."""
    return max(0.0, min(1.0, progress / recipe.warmup, (1.0 - progress) / recipe.decay))


def make_optimizers(
    model: ReferenceModel, recipe: Recipe, fused: bool
) -> list[torch.optim.Optimizer]:
    """Muon on the layers' matrices (or AdamW, with weight decay), AdamW on the rest."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, p in model.named_parameters():
        (matrices if p.dim() == 2 and ".layers." in name else others).append(p)
    lr, decay = recipe.learning_rate, recipe.weight_decay
    rest = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    if recipe.optimizer is MatrixOptimizer.MUON:
        muon = torch.optim.Muon(matrices, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        return [rest, muon]
    adamw = torch.optim.AdamW(matrices, lr=lr, betas=(0.9, 0.95), weight_decay=decay, fused=fused)
    return [rest, adamw]


def to_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The batch as tensors of the dtypes that the model takes."""

    def move(array: object, dtype: torch.dtype) -> Tensor:
        tensor = torch.as_tensor(array)
        if device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True).to(dtype)

    return {
        "tokens": move(batch.tokens.view("int16"), torch.int64),
        "targets": move(batch.targets.view("int16"), torch.int64),
        "weights": move(batch.weights, torch.float32),
        "positions": move(batch.positions.view("int16"), torch.int64),
        "bounds": move(batch.bounds, torch.int32),
    }


def compile_for_speed(model: ReferenceModel) -> None:
    """Compile one layer's code for all layers; the rest is little work."""
    for layer in model.model.layers:
        layer.compile()


@dataclass(slots=True)
class TrainingLog:
    """What happened during training."""

    steps: int
    tokens: int
    seconds: float
    fresh_batches: int
    repeated_batches: int
    curve: list[dict[str, float]]


def train(
    model: ReferenceModel, tokenizer: Tokenizer, recipe: Recipe, device: torch.device
) -> TrainingLog:
    """Train in place until the time limit; compilation counts as time too."""
    optimizers = make_optimizers(model, recipe, fused=device.type == "cuda")
    stream = BatchStream(
        tokenizer,
        recipe.workers,
        recipe.batch_tokens,
        recipe.max_chats,
        recipe.longest_chat,
        recipe.seed,
    )
    loss_fn = torch.compile(weighted_loss) if device.type == "cuda" else weighted_loss
    started, step, progress = time.monotonic(), 0, 0.0
    curve: list[dict[str, float]] = []
    recent, counted = torch.zeros((), device=device), 0
    while progress < 1.0:
        for group in (g for optimizer in optimizers for g in optimizer.param_groups):
            group["lr"] = recipe.learning_rate * learning_rate_share(recipe, progress)
        batch = to_device(stream.next(), device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(
                batch["tokens"], batch["positions"], batch["bounds"], recipe.longest_chat
            )
            loss = loss_fn(logits, batch["targets"], batch["weights"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        recent += loss.detach()
        step, counted = step + 1, counted + 1
        if step % PRINT_EVERY == 0:
            curve.append(_log_point(step, recent.item() / counted, started, recipe, stream))
            recent.zero_()
            counted = 0
        progress = (time.monotonic() - started) / (60 * recipe.minutes)
    stream.close()
    seconds = round(time.monotonic() - started, 1)
    tokens = step * recipe.batch_tokens
    return TrainingLog(step, tokens, seconds, stream.fresh, stream.repeated, curve)


def _log_point(
    step: int, loss: float, started: float, recipe: Recipe, stream: BatchStream
) -> dict[str, float]:
    """Print progress; the reading of the loss before this call waited for the device."""
    seconds = time.monotonic() - started
    rate = step * recipe.batch_tokens / seconds
    typer.echo(
        f"step {step} loss {loss:.4f} {seconds:.0f} s {rate / 1e6:.2f} Mtok/s "
        f"repeated {stream.repeated}"
    )
    return {"step": step, "seconds": round(seconds, 1), "loss": round(loss, 4)}


def learn_tokenizer(shape: ModelShape, seed: int) -> Tokenizer:
    """The tokenizer of the message texts of a few thousand training chats."""
    rng = Random(f"{seed}/tokenizer")
    chats = (draw_conversation(rng) for _ in range(TOKENIZER_CHATS))
    return train_tokenizer((m.content for chat in chats for m in chat), shape.vocabulary)


def provenance() -> dict[str, str]:
    """Commit and a hash of this package's sources, which also covers uncommitted changes."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {"commit": commit, "sources_sha256": digest.hexdigest()}


def main(
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint.")],
    report: Annotated[Path | None, typer.Option(help="Where to write the figures (JSON).")] = None,
    minutes: Annotated[float, typer.Option(help="Time limit of training.")] = 8.0,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = 65_536,
    workers: Annotated[int, typer.Option(help="Processes that write text.")] = 14,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    optimizer: Annotated[
        MatrixOptimizer, typer.Option(help="What updates the layers' matrices.")
    ] = MatrixOptimizer.MUON,
    size: Annotated[Size, typer.Option(help="Which model.")] = Size.EMBEDDED,
    latent: Annotated[
        int | None, typer.Option(help="Dims of the latent (kv_lora_rank), if not the size's.")
    ] = None,
    scored: Annotated[bool, typer.Option("--score/--no-score", help="Ask it questions.")] = True,
    questions: Annotated[int, typer.Option(help="Held-out questions of each kind.")] = 200,
    latent_chats: Annotated[int, typer.Option(help="Chats for sliced perplexities.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of text and weights.")] = 1,
) -> None:
    """Train, export and score the reference model."""
    shape = size.shape if latent is None else replace(size.shape, latent=latent)
    recipe = Recipe(
        minutes=minutes,
        batch_tokens=batch_tokens,
        longest_chat=shape.context,
        workers=workers,
        optimizer=optimizer,
        learning_rate=learning_rate,
        seed=seed,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    tokenizer = learn_tokenizer(shape, seed)
    model = ReferenceModel(shape).to(device)
    if device.type == "cuda":
        compile_for_speed(model)
    parameters = sum(p.numel() for p in model.parameters())
    typer.echo(f"{parameters / 1e6:.2f}M parameters on {device}")
    log = train(model, tokenizer, recipe, device)
    save_checkpoint(model, tokenizer, out)
    typer.echo(f"{log.steps} steps, {log.tokens / 1e6:.0f}M tokens")
    figures: dict[str, object] = {
        "parameters": parameters,
        "recipe": asdict(recipe),
        "provenance": provenance(),
        "training": asdict(log),
    }
    if scored:
        figures["score"] = score(out, device, questions, 50, latent_chats)
    if report is not None:
        report.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
