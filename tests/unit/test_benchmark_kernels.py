"""What the kernel benchmarks make of times and of pytest's reports."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from tpla.benchmarks.gpu_tests import summarise
from tpla.benchmarks.kernel_cases import cases
from tpla.benchmarks.kernels import sweep
from tpla.benchmarks.plot_kernels import table


def row(**changes: Any) -> dict[str, Any]:
    return {
        "model": "DeepSeek-V3", "tp": 2, "groups": 2, "heads": 128, "latent": 256,
        "kv_format": "fp8", "pv_format": "fp16", "batch": 32, "context": 32768, "us": 200.4,
        "gb_per_s": 2000.0, "tflops": 700.0, "roofline_pct": 55.5, "peers": {}, **changes,
    }  # fmt: skip


def test_a_table_names_the_format_of_p_v_and_says_which_peer_is_missing() -> None:
    peers = {"flashmla_bf16": {"us": 300.6, "ratio": 1.5}}
    lines = table([row(peers=peers, pv_format="fp8"), row(model="Kimi-K2")], "DeepSeek-V3")
    titles, rule, only = (line.strip("|").split("|") for line in lines.splitlines())
    assert len(titles) == len(rule) == len(only)
    cells = dict(zip((t.strip() for t in titles), (c.strip() for c in only), strict=True))
    assert cells["P V"] == "fp8"
    assert cells["FlashMLA bf16"] == "301 (1.50x)"
    assert cells["FlashMLA fp8"] == "-"


def test_p_v_in_fp8_is_another_shape_than_p_v_in_fp16() -> None:
    chosen = [case for case in cases([(1, 1024)]) if case.model == "DeepSeek-V3" and case.tp == 2]
    formats = {(case.groups, case.kv_format.value, case.pv_format) for case in chosen}
    assert formats == {(g, "fp8", pv) for g in (1, 2) for pv in ("fp8", "fp16")}
    assert len({case.shape for case in chosen}) == len(chosen)


def test_a_sweep_of_p_v_in_fp8_keeps_to_the_kernel_that_has_it() -> None:
    for case in cases([(32, 32768)]):
        tilings = sweep(case)
        assert all(tiling.hopper for tiling in tilings if tiling.fp8_values)
        assert case.fp8_weights == all(tiling.fp8_values for tiling in tilings)


REPORT = """<testsuites><testsuite>
<testcase classname="a" name="one"/>
<testcase classname="a" name="two"><failure message="no"/></testcase>
<testcase classname="b" name="three"><error message="no"/></testcase>
<testcase classname="b" name="four"><skipped message="no"/></testcase>
{errors}
</testsuite></testsuites>"""
ERROR = """<testcase classname="c" name="e"><properties>
<property name="tokens" value="{tokens}"/><property name="pv_format" value="{pv}"/>
<property name="cosine_difference" value="{value}"/></properties></testcase>"""


@pytest.mark.parametrize("order", [1, -1])
def test_a_report_of_gpu_tests_counts_and_lists_errors_by_context(order: int) -> None:
    errors = [(4096, "fp16", 1e-7), (4096, "fp8", 2e-6), (32768, "fp8", 3e-6)][::order]
    text = "".join(ERROR.format(tokens=t, pv=pv, value=value) for t, pv, value in errors)
    root = ElementTree.fromstring(REPORT.format(errors=text))
    summary = summarise(list(root.iter("testcase")))
    assert (summary["passed"], summary["failed"], summary["skipped"]) == (4, 2, 1)
    assert summary["failures"] == ["a::two", "b::three"]
    assert summary["cosine_difference_by_context"] == [
        {"tokens": 4096, "pv_fp16": 1e-7, "pv_fp8": 2e-6},
        {"tokens": 32768, "pv_fp8": 3e-6},
    ]
