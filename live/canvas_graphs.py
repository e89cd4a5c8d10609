"""Canvas steps as captured CUDA graphs, one a padded number of canvases; text is encoded eagerly."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .canvas import CanvasCache
from .canvas_model import CanvasModel
from .graphs import Captured, CudaRecorder, Recorder, recompute

MOST = 64  # canvases of a graph; larger steps hide their launches
Given = Mapping[str, npt.NDArray[np.generic]]
# Inputs by position; tables are by page, all others by canvas.
ROWS = ("positions", "uniform", "noise", "places True", "places False")
FLOATS = ("temperature", "uniform")


def padded(num: int) -> int:
    """Canvases of a graph for `num`: as many up to 8, then at most a quarter more."""
    step = 1 << max(0, (num - 1).bit_length() - 3)
    return -(-num // step) * step


class GraphCanvasCache(CanvasCache):
    """Replays a graph for steps of at most `most` canvases, captured on first use or in `prepare`."""

    def __init__(
        self, model: CanvasModel, num_pages: tuple[int, int], page_size: int, device: str, dtype: torch.dtype,
        longest: int, record: Recorder | None = None,
    ) -> None:  # fmt: skip
        """longest: most tokens of a sequence, its last canvas included."""
        super().__init__(model, num_pages, page_size, device, dtype)
        self.pages = -(-longest // page_size)
        self.most = MOST
        self.num_captures = 0
        self._record = record or (CudaRecorder() if self._device.type == "cuda" else recompute)
        self._graphs: dict[int, Captured] = {}
        self._held = torch.zeros(0, dtype=torch.int64, device=self._device)  # every graph's inputs
        self._staged = torch.zeros(0, dtype=torch.int64)  # ... on the host

    @torch.inference_mode()
    def prepare(self, most: int) -> None:
        """Capture graphs for up to `most` canvases, largest first."""
        self._make_room(most)
        for size in sorted({padded(n) for n in range(1, min(most, self.most) + 1)}, reverse=True):
            self._graph(size)

    def _run(self, given: Given) -> npt.NDArray[np.float64]:
        num = len(given["slots"])
        pages = next(given[name] for name in given if name.startswith("table")).shape[1]
        if num > self.most or pages > self.pages:
            return super()._run(given)
        graph = self._graph(padded(num))
        self._bring(self._pad(given, padded(num)))
        graph.replay()
        answers: npt.NDArray[np.float64] = graph.answers[0][:num].cpu().numpy()
        return answers

    def _make_room(self, slots: int) -> None:
        have = self._tokens
        super()._make_room(slots)
        if have is not self._tokens:
            self._graphs = {}  # they read the old canvases

    def _graph(self, size: int) -> Captured:
        if size not in self._graphs:
            blank = self._pad(self._blank(), size)
            self._bring(blank)
            shapes = {name: x.shape for name, x in blank.items()}
            self.num_captures += 1
            self._graphs[size] = Captured(*self._record(lambda: (self._step(self._views(shapes)),)))
        return self._graphs[size]

    def _blank(self) -> dict[str, npt.NDArray[np.generic]]:
        none: dict[str, npt.NDArray[np.generic]] = {
            name: np.zeros(0, np.int64) for name in ("slots", "positions", "starts", "lengths", "noise")
        }
        for kind in self.of:
            none |= {f"table {kind}": np.zeros((0, 0), np.int64), f"places {kind}": np.zeros(0, np.int64)}
        return none | {name: np.zeros(0) for name in FLOATS}

    def _pad(self, given: Given, size: int) -> dict[str, npt.NDArray[np.generic]]:
        """Pad to `size` canvases, which see nothing and write to no slot's canvas."""
        length = self.model.config.canvas_length
        filled: dict[str, npt.NDArray[np.generic]] = {}
        for name, x in sorted(given.items()):
            if name == "starts":
                filled[name] = np.arange(size + 1) * length
                continue
            fill = len(self._tokens) - 1 if name == "slots" else 1 if name == "temperature" else 0
            shape: tuple[int, ...] = (size * length if name in ROWS else size,)
            if name.startswith("table"):
                shape = size, self.pages
            if name.startswith(("table", "places")):
                fill = -1
            filled[name] = np.full(shape, fill, np.float64 if name in FLOATS else np.int64)
            filled[name][tuple(slice(n) for n in x.shape)] = x
        return filled

    def _bring(self, given: Given) -> None:
        """Copy inputs to where graphs read them, each aligned to 16 bytes."""
        flat = np.concatenate([_even(x) for x in given.values()])
        if len(flat) > len(self._held):
            self._graphs = {}  # they read the old tensor
            self._held = torch.zeros(len(flat), dtype=torch.int64, device=self._device)
            self._staged = torch.zeros(len(flat), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        # The host has waited for the last copy's step.
        self._staged[: len(flat)] = torch.from_numpy(flat)
        self._held[: len(flat)].copy_(self._staged[: len(flat)], non_blocking=True)

    def _views(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        found, low = {}, 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            part = self._held[low : low + size].view(shape)
            found[name] = part.view(torch.float64) if name in FLOATS else part
            low += size + size % 2
        return found


def _even(x: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The bits of x, padded to 16 bytes."""
    flat = np.ascontiguousarray(x).reshape(-1).view(np.int64)
    return np.append(flat, 0) if len(flat) % 2 else flat
