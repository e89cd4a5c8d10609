"""NumPy in place of the Triton kernels of a diffusion step, which only move numbers.

Triton's interpreter takes 20 to 100 ms for each, 97 % of a step of the tiny model. Kernels that read tables by address
are replaced together with the method that launches them.
"""

import functools

import numpy as np


class Kernel:
    """Stands in for a Triton kernel: `kernel[grid](...)` calls `function(grid, ...)`."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        return functools.partial(self.function, grid)


def gather_block_tables(self, idx_mapping, num_reqs_padded, out=None, out_ptrs=None):
    """BlockTables.gather_block_tables: each row's blocks, in batch order."""
    out, rows = self.input_block_tables if out is None else out, idx_mapping.numpy()
    for source, target, counts in zip(self.block_tables, out, self.num_blocks.np, strict=True):
        to, blocks = target.numpy(), source.gpu.numpy()
        for i, row in enumerate(rows):
            to[i, : counts[row]] = blocks[row, : counts[row]]
        to[len(rows) : num_reqs_padded] = 0
    return tuple(table[:num_reqs_padded] for table in out)


def compute_slot_mappings(self, idx_mapping, query_start_loc, positions, num_tokens_padded, out=None):
    """BlockTables.compute_slot_mappings: where each token's keys and values go, by group of layers."""
    from vllm.v1.attention.backends.utils import PAD_SLOT_ID

    assert self.cp_size == 1
    mappings = self.slot_mappings if out is None else out
    slots, starts, where = mappings.numpy(), query_start_loc.numpy(), positions.numpy()
    rows = idx_mapping.numpy()
    for group, size in enumerate(self.block_sizes):
        slots[group, starts[len(rows)] :] = PAD_SLOT_ID
        table = self.block_tables[group].gpu.numpy()
        for i, row in enumerate(rows):
            span = slice(starts[i], starts[i + 1])
            if row < 0 or not self._slot_mapping_enabled[group]:
                slots[group, span] = PAD_SLOT_ID
            else:
                blocks, offsets = np.divmod(where[span], size)
                slots[group, span] = table[row, blocks].astype(np.int64) * size + offsets
    return mappings[:, :num_tokens_padded]


def apply_write(self):
    """StagedWriteTensor.apply_write: copy staged rows into the tensor."""
    begin = 0
    for row, start, end in zip(
        self._staged_write_indices, self._staged_write_starts, self._staged_write_cu_lens, strict=True
    ):
        # Rows of a one-dimensional tensor have one element.
        into = self.gpu[row] if self.gpu.dim() > 1 else self.gpu[row : row + 1]
        into[start : start + end - begin] = self.gpu.new_tensor(self._staged_write_contents[begin:end])
        begin = end
    self.clear_staged_writes()


def apply_writes(self, tensors, output_ptrs, output_strides):
    """FusedStagedWriter.apply: the same for several tensors."""
    for tensor in tensors:
        apply_write(tensor)


def prepare_prefill_inputs(
    grid, ids, coming, coming_stride, num_lookahead, mapping, starts, known, known_stride, prefill_lens, num_computed,
    **_,
):  # fmt: skip
    """The known tokens that each prefilling row computes, and the next ones."""
    for i in range(grid[0]):
        row = int(mapping[i])
        length, done = int(prefill_lens[row]), int(num_computed[row])
        if done < length:
            begin, end = int(starts[i]), int(starts[i + 1])
            ids[begin:end] = known[row, done : done + end - begin]
            for k in range(num_lookahead):
                at = done + end - begin + k
                coming[k, row] = known[row, at] if at < length else 0


def prepare_pos_seq_lens(grid, positions, lengths, mapping, starts, num_computed, max_num_reqs, **_):
    """Each token's position, and each row's length including what it computes now."""
    num, where = grid[0] - 1, positions.numpy()
    lengths[num:max_num_reqs] = 0
    for i in range(num):
        done, begin, end = int(num_computed[int(mapping[i])]), int(starts[i]), int(starts[i + 1])
        lengths[i] = done + end - begin
        where[begin:end] = np.arange(done, done + end - begin)


def combine_sampled_and_draft_tokens(
    grid, ids, mapping, last_sampled, starts, lengths, prefill_lens, drafts, drafts_stride, num_logits, indices,
    NUM_NEW_SAMPLED_TOKENS=1, **_,  # noqa: N803 - as the kernel has it
):  # fmt: skip
    """The rows of logits; in decoding rows also the last sampled token and the drafts (a canvas)."""
    logits = indices.numpy()
    for i in range(grid[0]):
        row, begin, end = int(mapping[i]), int(num_logits[i]), int(num_logits[i + 1])
        n, over = end - begin, int(starts[i + 1])
        logits[begin:end] = np.arange(over - n, over)
        length, prefill = int(lengths[i]), int(prefill_lens[row])
        if length > prefill:
            if NUM_NEW_SAMPLED_TOKENS and length - n >= prefill:
                ids[over - n] = last_sampled[row]
            k = n - NUM_NEW_SAMPLED_TOKENS
            if k > 0:
                ids[over - k : over] = drafts[row, :k]


def post_update(
    grid, mapping, num_computed, last_sampled, bins, bins_stride, sampled, sampled_stride, num_sampled, num_rejected,
    starts, known, known_stride, total, **_,
):  # fmt: skip
    """A step's samples become known, and what it computed counts as computed."""
    assert bins is None
    for i in range(grid[0]):
        row, n = int(mapping[i]), int(num_sampled[i])
        if row < 0:
            continue
        if n:
            had = int(total[row])
            last_sampled[row] = sampled[i, n - 1]
            known[row, had : had + n] = sampled[i, :n]
            total[row] = had + n
        length = 0 if starts is None else int(starts[i + 1] - starts[i])
        num_computed[row] += length - int(num_rejected[i])


def register():
    """Called by vLLM in each of its processes."""
    import vllm.v1.worker.cpu.shm  # noqa: F401 - replaces torch's CUDA streams before the next three import them
    import vllm.v1.worker.gpu.block_table as block_table
    import vllm.v1.worker.gpu.buffer_utils as buffer_utils
    import vllm.v1.worker.gpu.input_batch as input_batch

    block_table.BlockTables.gather_block_tables = gather_block_tables
    block_table.BlockTables.compute_slot_mappings = compute_slot_mappings
    buffer_utils.StagedWriteTensor.apply_write = apply_write
    buffer_utils.FusedStagedWriter.apply = apply_writes
    for function in (prepare_prefill_inputs, prepare_pos_seq_lens, combine_sampled_and_draft_tokens, post_update):
        setattr(input_batch, f"_{function.__name__}_kernel", Kernel(function))
