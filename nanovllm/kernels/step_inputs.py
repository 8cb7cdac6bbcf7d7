"""A decode step's inputs, derived from the device-side state of the running sequences in one launch.

So a graph needs nothing from the host but which rows take part. Invariant: each row that takes part counts its new
token once; the padding row counts and stores nothing.
"""

from torch import Tensor

from nanovllm.kernels._triton import by_device, pdl, tl, triton, wait_for_inputs


def decode_inputs_reference(
    rows: Tensor, last_tokens: Tensor, context_lens: Tensor, block_tables: Tensor, block_size: int,
    out_input_ids: Tensor, out_positions: Tensor, out_slot_mapping: Tensor, out_context_lens: Tensor,
) -> None:  # fmt: skip
    """Inputs of batch entry b, whose state is in row r = rows[b]: its last token, at position context_lens[r].

    rows [B] int32, all different except for the padding row S, the last: it gets slot -1, position 0, length 0.
    State: last_tokens [S+1] int64, context_lens [S+1] int32 (tokens in the cache; += 1 for each r < S),
    block_tables [S+1, max_blocks] int32.
    Out, all [B] int32: out_input_ids, out_positions, out_slot_mapping, out_context_lens (keys to attend to, the new
    token's included).
    """
    r = rows.long()
    live = r < last_tokens.shape[0] - 1
    pos = context_lens[r].where(live, 0)
    slots = block_tables[r, pos // block_size] * block_size + pos % block_size
    out_input_ids.copy_(last_tokens[r])
    out_positions.copy_(pos)
    out_slot_mapping.copy_(slots.where(live, -1))
    out_context_lens.copy_((pos + 1).where(live, 0))
    context_lens[r[live]] += 1


@triton.jit(do_not_specialize=["batch", "padding_row"])
def _decode_inputs_kernel(
    rows, last_tokens, context_lens, tables, input_ids, positions, slot_mapping, out_lens, batch, padding_row, stride,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = b < batch
    wait_for_inputs(PDL)
    r = tl.load(rows + b, mask=mask, other=0).to(tl.int64)
    live = mask & (r != padding_row)
    pos = tl.load(context_lens + r, mask=live, other=0)
    block = tl.load(tables + r * stride + pos // BLOCK_SIZE, mask=live, other=0)
    tl.store(input_ids + b, tl.load(last_tokens + r, mask=mask, other=0).to(tl.int32), mask=mask)
    tl.store(positions + b, pos, mask=mask)
    tl.store(slot_mapping + b, tl.where(live, block * BLOCK_SIZE + pos % BLOCK_SIZE, -1), mask=mask)
    tl.store(out_lens + b, tl.where(live, pos + 1, 0), mask=mask)
    tl.store(context_lens + r, pos + 1, mask=live)


def decode_inputs_triton(
    rows: Tensor, last_tokens: Tensor, context_lens: Tensor, block_tables: Tensor, block_size: int,
    out_input_ids: Tensor, out_positions: Tensor, out_slot_mapping: Tensor, out_context_lens: Tensor,
) -> None:  # fmt: skip
    batch, block = rows.shape[0], 128
    _decode_inputs_kernel[(-(-batch // block),)](
        rows, last_tokens, context_lens, block_tables,
        out_input_ids, out_positions, out_slot_mapping, out_context_lens,
        batch, last_tokens.shape[0] - 1, block_tables.stride(0), BLOCK_SIZE=block_size, BLOCK=block, num_warps=4,
        **pdl(rows.device),
    )  # fmt: skip


decode_inputs = by_device(decode_inputs_triton, decode_inputs_reference)
