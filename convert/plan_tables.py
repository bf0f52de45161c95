"""Tables of ``tpla plan``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from tpla.convert.planning import Candidate, divide_by_layer


def print_candidates(candidates: Sequence[Candidate]) -> None:
    """Cost of every plan; what it loses, and where, if that was measured."""
    costs = ("core dims", "bytes/token", "of the latent")
    losses = ("KL", "ppl ratio", "top-1") if candidates[0].measure else ()
    table = Table(*costs, *losses, box=SIMPLE)
    for candidate in candidates:
        cells = [str(candidate.plan.core_dims), str(candidate.row_bytes)]
        cells.append(f"{candidate.latent_share:.1%}")
        if candidate.measure is not None:
            cells.append(f"{candidate.measure.kl:.6f}")
            cells += [f"{candidate.measure.ppl_ratio:.5f}", f"{candidate.measure.top1:.2%}"]
        table.add_row(*cells)
    Console().print(table)
    if candidates[0].measure is not None:
        _print_layers(candidates)


def print_choice(candidates: Sequence[Candidate], chosen: Candidate) -> None:
    """The plan that a budget chose, and what a plan for each layer would buy beyond it."""
    plan = chosen.plan
    print(
        f"chosen: --groups {plan.groups} --core-dims {plan.core_dims}, {chosen.row_bytes} bytes a "
        f"token and layer on each rank, {chosen.latent_share:.1%} of the latent"
    )
    if chosen.measure is None:
        return
    print(f"measured KL to the exact model: {chosen.measure.kl:.6f}")
    uniform, divided = divide_by_layer(candidates, chosen)
    print(
        f"summed layer errors: {uniform:.2e}; the same bytes divided by layer: {divided:.2e} "
        "(not served: all layers share one plan)"
    )


def _print_layers(candidates: Sequence[Candidate]) -> None:
    """Error of each layer's attention output alone, in thousandths of its energy."""
    errors = [c.measure.layer_errors for c in candidates if c.measure is not None]
    table = Table("layer", *(f"core {c.plan.core_dims}" for c in candidates), box=SIMPLE)
    table.title = "error of attention's output, layer by layer, thousandths of its energy"
    for layer, row in enumerate(zip(*errors, strict=True)):
        table.add_row(str(layer), *(f"{1000 * error:.3f}" for error in row))
    Console().print(table)
