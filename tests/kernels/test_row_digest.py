"""The digest of rows: the same on every device, and another when any byte is another.

Runs under ``TRITON_INTERPRET=1`` (see test_interpreter.py) or on a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.kernels.decode_cases import DEVICE
from tpla.kernels.ref.row_digest import row_digest as reference
from tpla.kernels.row_digest import prepare_row_digest, row_digest

if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_interpreter.py", allow_module_level=True)

MASK = (1 << 64) - 1


def words(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (count,), generator=generator)


def plain(values: list[int]) -> int:
    """SplitMix64 of each word and its place, summed, in Python's integers."""
    total = 0
    for index, value in enumerate(values):
        mixed = (value + (index + 1) * 0x9E3779B97F4A7C15) & MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        total += mixed ^ (mixed >> 31)
    return total & MASK


@pytest.mark.parametrize("count", [0, 1, 2, 4095, 4096, 4097, 20_000])
def test_kernel_reference_and_plain_integers_agree(count: int) -> None:
    word_W = words(count)
    expected = plain([value & MASK for value in word_W.tolist()])
    assert int(reference(word_W)) & MASK == expected
    assert int(row_digest(word_W.to(DEVICE))) & MASK == expected


def test_any_flipped_bit_and_any_exchange_of_words_shows() -> None:
    word_W = words(300, seed=1).to(DEVICE)
    word_W[7] = 0
    intact = int(row_digest(word_W))
    for index, bit in ((0, 0), (7, 63), (150, 62), (299, 31)):
        changed_W = word_W.clone()
        changed_W[index] ^= -(1 << 63) if bit == 63 else 1 << bit
        assert int(row_digest(changed_W)) != intact
    changed_W = word_W.clone()
    changed_W[[3, 200]] = word_W[[200, 3]]
    assert int(row_digest(changed_W)) != intact
    changed_W = word_W.clone()
    changed_W[[3, 200]] ^= -(1 << 63)
    assert int(row_digest(changed_W)) != intact


@pytest.mark.parametrize("subtract", [False, True], ids=["add", "subtract"])
def test_a_prepared_launch_tells_the_digest_of_what_the_words_are_then(subtract: bool) -> None:
    count, pinned = 9000, DEVICE != "cpu"
    word_W = words(count).to(DEVICE)
    start_1, result_1 = (
        torch.empty(1, dtype=torch.int64, pin_memory=pinned) for _ in ("start", "result")
    )
    tally_2 = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    launch = prepare_row_digest(word_W, start_1, tally_2, result_1, subtract)
    for seed in (1, 2, 3):
        changed_W = words(count, seed)
        word_W.copy_(changed_W)
        start_1[0] = seed << 40
        launch()
        if pinned:
            torch.cuda.synchronize()
        digest = int(reference(changed_W))
        expected = (seed << 40) + (-digest if subtract else digest)
        assert int(result_1) & MASK == expected & MASK
        assert tally_2.tolist() == [0, 0]


def test_other_than_contiguous_words_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        row_digest(words(10).to(DEVICE)[::2])
    with pytest.raises(ValueError, match="int64"):
        row_digest(words(10).to(DEVICE).view(torch.int32))
