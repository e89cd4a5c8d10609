"""A stand-in for the module flashinfer: the signatures of its paged prefill wrapper, computed by PyTorch on the CPU.

As the real one does, it reads pages by what `plan` left on the device: of a captured step in the caller's arrays.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__version__ = "0.0-fake"


class BatchPrefillWithPagedKVCacheWrapper:
    """Its `plan` and `run`, as far as they are asked for here."""

    off = 0.0  # what is added to all that is read

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None, paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None, paged_kv_last_page_len_buf: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert (kv_layout, float_workspace_buffer.dtype) == ("NHD", torch.uint8)
        self._graph = use_cuda_graph
        self._buffers = [qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf]
        assert all((buffer is not None) == use_cuda_graph for buffer in self._buffers)

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, causal: bool = False,
        q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert not causal
        given = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        assert all(x.dtype == torch.int32 and x.device.type == "cpu" for x in given)
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        if not self._graph:
            self._buffers = [x.clone() for x in given]
        for buffer, x in zip(self._buffers, given, strict=True):
            assert buffer is not None
            assert len(x) == len(buffer) or (x is paged_kv_indices and len(x) < len(buffer))
            buffer[: len(x)].copy_(x)
        self._about = (int(qo_indptr[-1]), num_qo_heads, head_dim_qk), (page_size, num_kv_heads, head_dim_qk)
        self._dtypes = q_data_type, kv_data_type

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert q.is_contiguous()
        assert (tuple(q.shape), tuple(keys.shape[1:]), tuple(values.shape[1:])) == (*self._about, self._about[1])
        assert (q.dtype, keys.dtype) == self._dtypes
        starts, page_starts, pages, last = (x.tolist() for x in self._buffers if x is not None)
        out = torch.empty_like(q)
        for s, num in enumerate(last):
            own = pages[page_starts[s] : page_starts[s + 1]]
            seen = (len(own) - 1) * self._about[1][0] + num
            rows = slice(starts[s], starts[s + 1])
            k, v = (x[own].flatten(0, 1)[:seen].transpose(0, 1)[None] for x in (keys, values))
            read = scaled_dot_product_attention(q[rows].transpose(0, 1)[None], k, v, enable_gqa=True)
            out[rows] = read[0].transpose(0, 1) + self.off
        return out
