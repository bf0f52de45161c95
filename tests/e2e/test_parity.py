"""Greedy tokens of real prefill and decode workers equal the independent reference's.

A fleet is one prefill worker and decode workers of different kinds that it feeds at the same time.
The fleets together cover every row format, group count, core, rank count and page size, and cores
that differ by layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.e2e.conftest import REFERENCE_MODEL, Conversions, StartWorker, worker_set
from tests.e2e.independent_reference import Reference
from tests.e2e.prompts import STOP, chat_prompts, counting_prompts
from tests.e2e.servers import Worker, ask, idle
from tests.unit.checkpoints import edit_config, make_checkpoint

pytestmark = pytest.mark.e2e

TOKENS = 20
LARGEST = 64
"""Page of a fleet, in tokens."""
NO_SCATTER = ("--no-scatter-output",)
PV_FP8 = ("--pv-format", "fp8")
RESERVE_LITTLE = ("--num-reserved-decode-tokens", "16")


@dataclass(frozen=True)
class Decode:
    """One decode worker; ``core`` as ``tpla convert --core-dims`` takes it."""

    mode: str
    groups: int
    core: str
    kv_format: str
    tp: int
    extra: tuple[str, ...] = ()
    method: str = "pca"

    def __str__(self) -> str:
        core = self.core.replace(",", ".")
        name = f"{self.mode}-g{self.groups}-core{core}-{self.kv_format}-tp{self.tp}"
        return name if self.method == "pca" else f"{name}-{self.method}"


@dataclass(frozen=True)
class Fleet:
    """One prefill worker and the decode workers that it feeds at the same time."""

    prefill_tp: int
    page_size: int
    decodes: tuple[Decode, ...]
    family: str = "reference"
    stages: int = 1

    def __str__(self) -> str:
        decodes = "+".join(map(str, self.decodes))
        stages = f"-pp{self.stages}" if self.stages > 1 else ""
        return f"{self.family}-prefill-tp{self.prefill_tp}{stages}-page{self.page_size}-{decodes}"


FLEETS = (
    Fleet(
        1,
        16,
        (
            Decode("tpla", 2, "0", "fp8", 2),
            # SnapMLA's own P V.
            Decode("snapmla", 1, "0", "fp8", 1, PV_FP8),
            Decode("tpla", 4, "16", "bf16", 4),
        ),
    ),
    Fleet(
        2,
        1,
        (
            # A pool of 1280 tokens cannot hold the test's requests, and admission that reserves
            # little lets them in all the same: some are retracted and resumed.
            Decode("tpla", 2, "16", "fp8", 2, ("--max-total-tokens", "1280", *RESERVE_LITTLE)),
            Decode("mla", 1, "0", "fp32", 1),
            # Two latent groups among four ranks are added up in a group of their own.
            Decode("tpla", 2, "32", "fp32", 4),
        ),
    ),
    # DeepSeek-V3's shape: low-rank queries, mixture of experts, yarn RoPE.
    Fleet(1, 16, (Decode("tpla", 2, "16", "fp8", 2),), "v3"),
    # Every layer a width of its own, and two that share one; keys of decode's own.
    Fleet(1, 16, (Decode("tpla", 2, "0,32,0,64,16,96", "fp8", 2, NO_SCATTER, "learned"),)),
)


def _every_decode() -> list[Decode]:
    found = []
    for kv_format in ("fp32", "bf16", "fp8"):
        whole = "snapmla" if kv_format == "fp8" else "mla"
        found += [Decode(whole, 1, "0", kv_format, tp) for tp in (1, 2, 4)]
        for groups, core in ((2, "0"), (2, "16"), (4, "0"), (4, "16")):
            ranks = [tp for tp in (2, 4) if tp % groups == 0]
            found += [Decode("tpla", groups, core, kv_format, tp) for tp in ranks]
    return found


MATRIX = [
    pytest.param(Fleet(prefill_tp, page, (decode,)), marks=pytest.mark.matrix)
    for prefill_tp, page in ((1, 1), (2, 64))
    for decode in _every_decode()
]
EIGHT_RANKS = pytest.param(
    Fleet(1, 16, (Decode("tpla", 2, "16", "fp8", 8), Decode("tpla", 4, "16", "bf16", 8))),
    marks=pytest.mark.matrix,
)
# Each pipeline stage of prefill feeds decode's of the same layers.
STAGES = pytest.param(
    Fleet(1, 16, (Decode("tpla", 2, "0,32,0,64,16,96", "fp8", 2),), stages=2),
    marks=pytest.mark.matrix,
)


@dataclass
class Started:
    stages: int
    prefill: Worker
    decodes: dict[Decode, Worker]
    models: dict[Decode, Path]
    prompts: Callable[..., list[list[int]]]


def random_prompts(count: int, seed: int = 1, longest: int = 400) -> list[list[int]]:
    """For a model with random weights any bytes do."""
    rng = Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(3, longest))] for _ in range(count)]


@pytest.fixture(scope="module", params=[*FLEETS, *MATRIX, EIGHT_RANKS, STAGES], ids=str)
def fleet(
    request: pytest.FixtureRequest,
    conversions: Conversions,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Started]:
    wanted: Fleet = request.param
    models = _models(wanted, conversions)
    with worker_set(tmp_path_factory.mktemp("logs")) as start_worker:
        yield _start(wanted, models, start_worker)


def _models(wanted: Fleet, conversions: Conversions) -> dict[Decode, Path]:
    source = REFERENCE_MODEL
    if wanted.family != "reference":
        source = conversions.directory / f"tiny-{wanted.family}"
        make_checkpoint(source, wanted.family)
        # Fields that SGLang reads and HuggingFace's config leaves out.
        edit_config(source, moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc")
    return {d: conversions.of(source, max(d.groups, 2), d.core, d.method) for d in wanted.decodes}


def _start(wanted: Fleet, models: dict[Decode, Path], start_worker: StartWorker) -> Started:
    common = ("--page-size", str(wanted.page_size), "--pp-size", str(wanted.stages))
    prefill_tp = ("--tp-size", str(wanted.prefill_tp))
    rotated = next(iter(models.values()))  # whatever the plan, the rotation is the same
    exact = ("--mode", "mla", "--chunked-prefill-size", "128")
    prefill = start_worker("prefill", rotated, *common, *prefill_tp, *exact)
    decodes = {}
    for decode, model in models.items():
        kind = ("--mode", decode.mode, "--kv-format", decode.kv_format)
        tp = ("--tp-size", str(decode.tp))
        decodes[decode] = start_worker("decode", model, *common, *kind, *tp, *decode.extra)
    for worker in (prefill, *decodes.values()):
        worker.wait()
    prompts = chat_prompts if wanted.family == "reference" else random_prompts
    return Started(wanted.stages, prefill, decodes, models, prompts)


def test_greedy_tokens_equal_the_reference(fleet: Started) -> None:
    prompts = fleet.prompts(6)
    for decode, worker in fleet.decodes.items():
        pv_format = "fp8" if decode.extra == PV_FP8 else "fp16"
        reference = Reference(fleet.models[decode], decode.kv_format, decode.groups > 1, pv_format)
        for prompt in prompts:
            expected = reference.generate(prompt, TOKENS, STOP)
            assert ask(fleet.prefill, worker, prompt, TOKENS).ids == expected, str(decode)


def test_concurrent_requests_equal_the_same_requests_one_by_one(fleet: Started) -> None:
    prompts = fleet.prompts(32, seed=5, longest=200)
    decode, worker = next(iter(fleet.decodes.items()))
    alone = [ask(fleet.prefill, worker, prompt, 12).ids for prompt in prompts]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda p: ask(fleet.prefill, worker, p, 12), prompts))
    assert [answer.ids for answer in together] == alone, str(decode)
    # Rows of a cached prefix leave before the forward of what follows it.
    cached = [answer.prefill.json()["meta_info"]["cached_tokens"] for answer in together]
    assert all(tokens for tokens, ids in zip(cached, prompts, strict=True) if len(ids) > LARGEST)


def test_equality_survives_retraction(fleet: Started) -> None:
    small = [d for d in fleet.decodes if RESERVE_LITTLE[0] in d.extra]
    if not small:
        pytest.skip("no worker of this fleet has a small pool")
    worker = fleet.decodes[small[0]]
    prompts = counting_prompts(14)
    alone = [ask(fleet.prefill, worker, prompt, 200).ids for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: ask(fleet.prefill, worker, p, 200), prompts))
    assert [answer.ids for answer in answers] == alone
    assert all(len(ids) > 120 for ids in alone), "too short to fill the pool"
    retractions = [a.decode.json()["meta_info"].get("num_retractions", 0) for a in answers]
    assert sum(retractions) > 0, "the pool was large enough: nothing was retracted"


def test_weights_cannot_be_updated_in_place_which_harms_nothing(fleet: Started) -> None:
    decode, worker = next(iter(fleet.decodes.items()))
    prompt = fleet.prompts(1)[0]
    before = ask(fleet.prefill, worker, prompt, 8).ids
    body = {"model_path": str(fleet.models[decode])}
    for each in (fleet.prefill, worker):
        answer = httpx.post(f"{each.url}/update_weights_from_disk", json=body, timeout=60)
        assert answer.status_code == 400
        assert "start the workers anew" in answer.json()["message"]
    assert ask(fleet.prefill, worker, prompt, 8).ids == before


def test_nothing_is_held_when_idle_and_rows_have_their_true_size(fleet: Started) -> None:
    for decode, worker in fleet.decodes.items():
        ask(fleet.prefill, worker, fleet.prompts(1)[0], 2)
        account = idle(worker)
        config = json.loads((fleet.models[decode] / "config.json").read_text())
        rope, layers = config["qk_rope_head_dim"], config["num_hidden_layers"]
        cores = [int(core) for core in decode.core.split(",")]
        token_bytes = 0
        every_layer = cores if len(cores) > 1 else cores * layers
        for core in every_layer[: layers // fleet.stages]:  # rank 0 is of the first stage
            width = (config["kv_lora_rank"] - core) // decode.groups + core
            expected = {"fp32": 4 * (width + rope), "bf16": 2 * (width + rope)}
            token_bytes += expected.get(decode.kv_format, width + 4 + 2 * rope)
        assert account["token_bytes"] == token_bytes
        wire = account["transfer"]["payload_bytes"] / account["transfer"]["tokens"]
        assert wire == token_bytes
    idle(fleet.prefill)
