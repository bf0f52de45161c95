"""Pictures of the report; matplotlib is loaded when one is drawn, and comes with the dev extra."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

from tpla.convert.sliced_attention import CoreValues
from tpla.convert.spectrum import Spectrum
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import describe_core


def draw_spectrum(spectrum: Spectrum, picture: Path) -> None:
    """Share of each layer's latent energy in the leading dims; bounds of the slices dotted.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for layer, shares in enumerate(spectrum.shares):
        axes.plot(range(1, len(shares) + 1), list(accumulate(shares)), label=f"layer {layer}")
    plan = spectrum.plan
    shards = {plan.layer(layer) for layer in range(plan.num_layers)}
    starts = {shard.slice_bounds(group)[0] for shard in shards for group in range(plan.groups)}
    for start in sorted(starts):
        axes.axvline(start, color="grey", linestyle=":", linewidth=1)
    axes.set(
        xlabel=f"leading dims ({spectrum.method})", ylabel="share of the latent's energy",
        ylim=(None, 1.0),
    )  # fmt: skip
    if plan.num_layers <= 12:
        axes.legend(fontsize=8)
    _save(figure, picture)


def draw_error_against_bytes(rows: Sequence[dict[str, Any]], picture: Path) -> None:
    """KL over the share of a row, one mark for each method, alignment and ``core_values``.

    Args:
        rows: with ``groups``, ``core_dims``, ``method``, ``alignment``, ``row_share`` and ``kl``.
        picture: file to write.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for variant, mark in zip(sorted({_variant(row) for row in rows}), cycle("o^sDv"), strict=False):
        chosen = [row for row in rows if _variant(row) == variant]
        axes.plot([row["row_share"] for row in chosen], [row["kl"] for row in chosen], mark,
                  label=variant)  # fmt: skip
    highest = {
        (row["groups"], describe_core(row["core_dims"]), row["row_bytes"]): row
        for row in sorted(rows, key=_kl)
    }
    for (groups, core_dims, _), row in highest.items():
        axes.annotate(f"g={groups}, core {core_dims}", (row["row_share"], row["kl"]), (4, 4),
                      fontsize=7, textcoords="offset points")  # fmt: skip
    axes.set(yscale="log", xlabel="bytes of a rank's FP8 row / of the whole latent's",
             ylabel="KL to exact MLA")  # fmt: skip
    axes.legend(fontsize=8)
    _save(figure, picture)


def _variant(row: dict[str, Any]) -> str:
    averaged = row.get("core_values") == CoreValues.AVERAGED.value
    core = ", core's values averaged" if averaged else ""
    return f"{row['method']}, alignment: {row['alignment']}{core}"


def _kl(row: dict[str, Any]) -> float:
    return float(row["kl"])


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"{error}: pictures need it; pip install 'tpla[dev]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, picture: Path) -> None:
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    _pyplot().close(figure)
