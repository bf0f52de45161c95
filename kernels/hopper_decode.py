"""Decode attention over whole FP8 pages on Hopper, in Gluon: :mod:`tpla.kernels.latent_decode`.

Latents of more than 256 columns go to :mod:`tpla.kernels.hopper_wide`, narrower ones to the kernel
here. Either has tiles of one of a few widths; a latent between them leaves the last columns of its
tiles zero, which costs their share of the products and of nothing that is read. A program is five
groups of warps (:mod:`tpla.kernels.hopper_partitions`) that meet at barriers in shared memory
only::

    prepare   1 warp    queries of a request             -> one buffer        (bulk copy)
                        log2(sigma / RANGE) of a tile     -> ``STAGES`` words
    rows      1 warp    a tile of 64 cached rows          -> ``STAGES`` buffers (bulk copies)
    convert   2 warps   its latents in the form P V takes -> ``SLOTS`` buffers
    consume   4 warps   Q K of a tile and P V of the one before, then softmax; twice

Values become FP16 (exact), or FP8 with tokens along the rows, which the FP8 product needs: Hopper
cannot transpose bytes, but pairs of them, so ldmatrix transposes pairs of columns, a byte
permutation separates them, and stmatrix stores them (FlashAttention-3). Within 16 tokens they lie
in the order in which the registers of the logits hold them, so P enters its product as it lies.

The two consumers divide (``SHARE``): the *rows*, 64 of 128 each; or the *tiles*, every other one of
the same 64 rows, joined after the last tile. With *rows* a consumer tells of a tile and of the
values of the one before it at once, since each barrier that it tells costs two among its warps.

Each block of tokens is weighted relative to its own largest logit and token scale, not to the
running ones (SnapMLA, dynamic P quantisation per block)::

    level  = largest logit of the block + log2(sigma / RANGE)             base 2
    r      = max(level, largest level so far - 40)                        see below
    P'     = exp2(logit - r) s_k, at most RANGE; rounded to FP16 or FP8
    total  = total exp2(r_old - r) + sum of exp2(logit - r)
    acc    = acc exp2(r_old - r) + P' v8                                  output: acc / total

``sigma`` is the block's largest s_k, at least 2^-50, and for FP16 the power of two above it: FP8
rounds the weight of the largest token exactly only with sigma itself. The floors keep ``acc`` and
``total`` below 2^120 whatever the order of blocks. Where that was faster, with P V in FP8 and with
wide latents, ``r`` is held so that most tiles rescale nothing: it stays while ``level`` is 0 to 10
below it, and is set 3 above ``level`` where not. FP8 numbers keep their precision over 14 octaves.

Shape suffixes: M query rows (Q H), K tokens of a tile, L latent elements, D RoPE dims.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpla.core.errors import ConfigError
from tpla.core.latent_layout import LatentLayout
from tpla.kernels.decode_call import DecodeCall
from tpla.kernels.decode_workspace import DecodeTiling
from tpla.kernels.hopper_partitions import consume, convert
from tpla.kernels.hopper_tiles import prepare, produce
from tpla.kernels.hopper_wide import wide_decode_kernel

_LN2 = 0.6931471805599453
_BLOCK_TOKENS = 64
_SHARED_BYTES = 227 * 1024
_RESERVED_BYTES = 5 * 1024
"""For barriers and what the compiler exchanges between threads."""
_WIDTHS = (64, 128, 256, 512)
"""Columns of a tile."""
_ROPES = (32, 64)
_NARROW = 256
"""Widest latent that a consumer's registers hold 64 rows of."""


@gluon.jit
def decode_kernel(
    q_desc, q_rope_desc, q_scale_ptr, latent_desc, rope_desc, scale_desc, table_ptr, table_stride,
    length_ptr, part_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, rows, heads,
    queries, softmax_scale_log2, WIDTH: gl.constexpr, ROPE: gl.constexpr,
    ROPE_COLUMN: gl.constexpr, SCALE_COLUMN: gl.constexpr, COLUMNS: gl.constexpr,
    PAGE: gl.constexpr, SHARE: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    FP8_VALUES: gl.constexpr, LN2: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Allocate the buffers and barriers of one part and start its five groups of warps.

    ``COLUMNS`` of a tile's ``WIDTH`` are the row's latent; bulk copies bring zeros for the others.
    """
    # The programs that combine splits may be launched as soon as these all run.
    tl.extra.cuda.gdc_launch_dependents()
    M: gl.constexpr = 64
    K: gl.constexpr = 64
    gl.static_assert(num_warps == 4)
    QUERY_BLOCKS: gl.constexpr = 2 if SHARE == "rows" else 1
    # The converter waits for the turn of a tile's buffer: an earlier tile's it could miss.
    gl.static_assert((SHARE == "tiles") | (SLOTS <= STAGES + 1))
    READERS: gl.constexpr = 1 if SHARE == "tiles" else 2
    value_dtype: gl.constexpr = gl.float8e4nv if FP8_VALUES else gl.float16
    value_layout: gl.constexpr = (
        gl.NVMMASharedLayout(64, 8, 2, transposed=True)
        if FP8_VALUES
        else gl.NVMMASharedLayout(128, 16, 2)
    )
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_buf = gl.allocate_shared_memory(gl.float8e4nv, [QUERY_BLOCKS, M, WIDTH], q_desc.layout)
    q_rope_buf = gl.allocate_shared_memory(gl.bfloat16, [QUERY_BLOCKS, M, ROPE], q_rope_desc.layout)
    latent_buf = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, K, WIDTH], latent_desc.layout)
    rope_buf = gl.allocate_shared_memory(gl.bfloat16, [STAGES, K, ROPE], rope_desc.layout)
    scale_buf = gl.allocate_shared_memory(gl.float32, [STAGES, K, 4], scale_desc.layout)
    value_buf = gl.allocate_shared_memory(value_dtype, [SLOTS, K, WIDTH], value_layout)
    level_buf = gl.allocate_shared_memory(
        gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    lse_buf = gl.allocate_shared_memory(gl.float32, [2, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    level_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    value_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    value_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    met = gl.allocate_shared_memory(gl.int64, [3, 1], barrier)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS + 1)
        mbarrier.init(level_full.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(value_full.index(i), count=1)
        mbarrier.init(value_empty.index(i), count=READERS)
    for i in gl.static_range(3):
        mbarrier.init(met.index(i), count=2)
    fence_async_shared()
    if SHARE == "tiles":
        half_buf = value_buf._reinterpret(
            gl.float32,
            [SLOTS // 2 if FP8_VALUES else SLOTS, M, WIDTH // 2],
            gl.SwizzledSharedLayout(8, 1, 4, [1, 0]),
        )
        merge_bufs = (lse_buf, half_buf, met)
    else:
        merge_bufs = (lse_buf, lse_buf, met)
    query_bufs = (q_buf, q_rope_buf, q_full, q_empty)
    tile_bufs = (latent_buf, rope_buf, scale_buf, full, empty)
    value_bufs = (value_buf, value_full, value_empty)
    level_bufs = (scale_buf, level_buf, full, level_full)
    buffers = (query_bufs, tile_bufs, level_bufs, value_bufs, merge_bufs)
    if FP8_VALUES:  # the converter sees pairs of columns, then pairs of tokens
        staged_buf = latent_buf._reinterpret(
            gl.int16, [STAGES, K, WIDTH // 2], gl.NVMMASharedLayout(min(WIDTH, 128), 16, 2)
        )
        turned_buf = value_buf._reinterpret(
            gl.int16, [SLOTS, WIDTH, K // 2], gl.NVMMASharedLayout(64, 16, 2)
        )
    else:
        staged_buf = latent_buf
        turned_buf = value_buf
    convert_bufs = (staged_buf, turned_buf, full, empty, value_full, value_empty, met.index(2))
    schedule = (length_ptr, part_ptr)
    results = (out_ptr, lse_ptr, partial_ptr, partial_lse_ptr)
    shape = (rows, heads, queries, softmax_scale_log2)
    rows_in = (latent_desc, rope_desc, scale_desc, table_ptr, table_stride)
    # Constants stay constant only in a tuple that is written at the call.
    gl.warp_specialize(
        [
            (consume, (0, buffers, q_scale_ptr, schedule, results, shape, STAGES, SLOTS, SHARE,
                       FP8_VALUES, COLUMNS, LN2)),
            (consume, (1, buffers, q_scale_ptr, schedule, results, shape, STAGES, SLOTS, SHARE,
                       FP8_VALUES, COLUMNS, LN2)),
            (convert, (convert_bufs, schedule, STAGES, SLOTS, SHARE, FP8_VALUES)),
            (produce, (tile_bufs, rows_in, schedule, ROPE_COLUMN, SCALE_COLUMN, PAGE, STAGES)),
            (prepare, (query_bufs, level_bufs, (q_desc, q_rope_desc), schedule, rows, QUERY_BLOCKS,
                       STAGES, FP8_VALUES)),
        ],
        [4, 2, 1, 1],
        [224, 56, 56, 56],
    )  # fmt: skip


def reads_on_hopper(call: DecodeCall) -> bool:
    """Whether :func:`hopper_decode` can serve the call as its workspace asks for it."""
    tiling, layout = call.workspace.tiling, call.layout
    return (
        tiling.hopper
        and tiling.block_tokens == _BLOCK_TOKENS
        and tiling.block_rows in (64, 128)
        and (layout.latent_width <= _NARROW or tiling.block_rows == 64)
        and call.q_scale_BQH is not None
        and call.allows_bulk_copies
        and call.q_latent_BQHL.data_ptr() % 16 == 0
        and call.q_rope_BQHD.data_ptr() % 16 == 0
        and _reads_rows(layout, call.page_size, call.rows_SB.device)
    )


def require_fp8_values(layout: LatentLayout, page_size: int, device: torch.device) -> None:
    """Refuse P V in FP8 for rows that only the Triton kernel could read, which has none.

    Raises:
        ConfigError: rows, pages or device are not those of the Hopper kernels.
    """
    if not _reads_rows(layout, page_size, device):
        raise ConfigError(
            f"P V in fp8 needs a Hopper GPU, pages of a multiple of {_BLOCK_TOKENS} tokens, and "
            f"fp8 rows of at most {_WIDTHS[-1]} latent dims, a multiple of 16, and {_ROPES[0]} or "
            f"{_ROPES[1]} RoPE dims; these have {layout.latent_width} and "
            f"{layout.qk_rope_head_dim}, pages of {page_size}, on {device}: use --pv-format fp16"
        )


def _reads_rows(layout: LatentLayout, page_size: int, device: torch.device) -> bool:
    starts = (layout.row_bytes, layout.rope_offset, layout.scale_offset)
    return (
        layout.has_scale
        and layout.latent_width <= _WIDTHS[-1]
        and layout.qk_rope_head_dim in _ROPES
        and not any(start % 16 for start in starts)
        and page_size % _BLOCK_TOKENS == 0
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def hopper_decode(call: DecodeCall) -> None:
    """Write outputs of unsplit requests, and partial results of the others."""
    layout, workspace, tiling = call.layout, call.workspace, call.workspace.tiling
    _, queries, heads, width = call.q_latent_BQHL.shape
    rope = layout.qk_rope_head_dim
    latent_rows = call.rows_SB.view(torch.float8_e4m3fn)
    rope_rows = call.rows_SB.view(torch.bfloat16)
    scale_rows = call.rows_SB.view(torch.float32)
    rope_end = (layout.rope_offset + layout.rope_bytes) // 2
    wide, padded = width > _NARROW, _padded(width)
    kernel = wide_decode_kernel if wide else decode_kernel
    kernel[(workspace.row_blocks, workspace.parts)](
        _descriptor(call.q_latent_BQHL.view(-1, width), width, padded, min(padded, 128), 8),
        _descriptor(call.q_rope_BQHD.view(-1, rope), rope, rope, 2 * rope, 16),
        call.q_scale_BQH,
        _descriptor(latent_rows, width, padded, min(padded, 128), 8),
        _descriptor(rope_rows, rope_end, rope, 2 * rope, 16),
        _descriptor(scale_rows, scale_rows.shape[1], 4, 0, 32),
        call.table_BN,
        call.table_BN.stride(0),
        call.length_B,
        workspace.part_P2,
        call.out_BQHL,
        call.lse_BQH,
        workspace.partial_SML,
        workspace.partial_lse_SM,
        workspace.rows,
        heads,
        queries,
        call.softmax_scale_log2,
        WIDTH=padded,
        ROPE=rope,
        ROPE_COLUMN=layout.rope_offset // 2,
        SCALE_COLUMN=layout.scale_offset // 4,
        COLUMNS=width,
        PAGE=call.page_size,
        FP8_VALUES=tiling.fp8_values,
        LN2=_LN2,
        num_warps=4,
        **(_wide_plan if wide else _narrow_plan)(padded, rope, tiling),
    )


def _padded(width: int) -> int:
    """Columns of a tile in shared memory that holds ``width`` of a row."""
    return next(columns for columns in _WIDTHS if columns >= width)


def _narrow_plan(width: int, rope: int, tiling: DecodeTiling) -> dict[str, str | int]:
    """What the consumers divide, and how many tiles and staged values shared memory holds."""
    share = "rows" if tiling.block_rows == 128 else "tiles"
    queries = (2 if share == "rows" else 1) * 64 * (width + 2 * rope)
    itemsize = 1 if tiling.fp8_values else 2
    slots = 3 if itemsize == 2 else 4 if share == "rows" else 6
    values = slots * _BLOCK_TOKENS * itemsize * width
    return {"SHARE": share, "SLOTS": slots, "STAGES": _stages(width, rope, queries + values)}


def _wide_plan(width: int, rope: int, tiling: DecodeTiling) -> dict[str, str | int]:
    """How many tiles and tiles' weights shared memory holds."""
    slots, itemsize = 2, 1 if tiling.fp8_values else 2
    queries = 64 * (width + 2 * rope)
    weights = slots * 64 * (_BLOCK_TOKENS * itemsize + 4)
    return {"SLOTS": slots, "STAGES": _stages(width, rope, queries + weights)}


def _stages(width: int, rope: int, others: int) -> int:
    """Tiles that shared memory holds beside ``others`` bytes and what is reserved."""
    tile = _BLOCK_TOKENS * (width + 2 * rope + 16)
    return min((_SHARED_BYTES - others - _RESERVED_BYTES) // tile, 8)


def _descriptor(
    rows: torch.Tensor, columns: int, box: int, swizzle: int, bits: int
) -> TensorDescriptor:
    """Bulk copy of 64 rows and ``box`` of the leading ``columns``; beyond them it reads zeros."""
    shared = gl.NVMMASharedLayout(swizzle, bits, 2)
    shape, strides = [rows.shape[0], columns], [rows.stride(0), 1]
    return TensorDescriptor(rows, shape, strides, [_BLOCK_TOKENS, box], shared)
