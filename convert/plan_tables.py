"""Tables of ``tpla plan``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from tpla.convert.division import Choice
from tpla.convert.planning import Candidate
from tpla.core.latent_layout import describe_core


def print_candidates(candidates: Sequence[Candidate]) -> None:
    """Cost of every plan; what it loses, and where, if that was measured."""
    costs = ("core dims", "bytes/token", "of the latent")
    losses = ("KL", "ppl ratio", "top-1") if candidates[0].measure else ()
    table = Table(*costs, *losses, box=SIMPLE)
    for candidate in candidates:
        cells = [describe_core(candidate.plan.core_dims), f"{candidate.row_bytes:g}"]
        cells.append(f"{candidate.plan.latent_share:.1%}")
        if candidate.measure is not None:
            cells.append(f"{candidate.measure.kl:.6f}")
            cells += [f"{candidate.measure.ppl_ratio:.5f}", f"{candidate.measure.top1:.2%}"]
        table.add_row(*cells)
    Console().print(table)
    if candidates[0].measure is not None:
        _print_layers(candidates)


def print_choice(choice: Choice) -> None:
    """The plan that a budget chose, beside what else was measured for it."""
    chosen, uniform = choice.chosen, choice.uniform
    plan = chosen.plan
    core_dims = str(plan.core) if plan.is_uniform else ",".join(map(str, plan.core_dims))
    print(
        f"chosen: --groups {plan.groups} --core-dims {core_dims}, {chosen.row_bytes:g} bytes a "
        f"token and layer on each rank, {plan.latent_share:.1%} of the latent"
    )
    if chosen.measure is not None:
        print(f"measured KL to the exact model: {chosen.kl:.6f}")
    if chosen is not uniform:
        print(
            f"one core for all layers: {uniform.plan.core} dims, {uniform.row_bytes:g} bytes, KL "
            f"{uniform.kl:.6f}"
        )
    elif choice.divisions:
        least = min(choice.divisions, key=lambda candidate: candidate.kl)
        print(
            f"one core for all layers it stays: divided by layer, {least.row_bytes:g} bytes lose "
            f"{least.kl:.6f}"
        )


def _print_layers(candidates: Sequence[Candidate]) -> None:
    """Error of each layer's attention output alone, in thousandths of its energy."""
    errors = [c.measure.layer_errors for c in candidates if c.measure is not None]
    table = Table("layer", *(f"core {c.plan.core}" for c in candidates), box=SIMPLE)
    table.title = "error of attention's output, layer by layer, thousandths of its energy"
    for layer, row in enumerate(zip(*errors, strict=True)):
        table.add_row(str(layer), *(f"{1000 * error:.3f}" for error in row))
    Console().print(table)
