"""Canvas steps as captured CUDA graphs, one a padded number of canvases; text is encoded eagerly."""

import numpy as np
import torch

from .canvas_forward import Arrays, CanvasCache, Floats
from .canvas_model import CanvasModel
from .graphs import Captured, Graphs, Recorder

MOST = 64  # canvases of a graph; larger steps hide their launches
BY_POSITION = ("positions", "uniform", "noise", "places True", "places False")  # all others are by canvas


def padded(num: int) -> int:
    """Canvases of a graph for `num`: as many up to 8, then at most a quarter more."""
    step = 1 << max(0, (num - 1).bit_length() - 3)
    return -(-num // step) * step


class GraphCanvasCache(CanvasCache):
    """Replays a graph for steps of at most `max_canvases` canvases, captured on first use or in `prepare`."""

    def __init__(
        self,
        model: CanvasModel,
        num_pages: tuple[int, int],
        page_size: int,
        device: str,
        dtype: torch.dtype,
        longest: int,
        record: Recorder | None = None,
    ) -> None:
        """longest: most tokens of a sequence, its last canvas included."""
        super().__init__(model, num_pages, page_size, device, dtype)
        self.pages = -(-longest // page_size)
        self.max_canvases = MOST
        self.graphs = Graphs(self._device, record)

    @torch.inference_mode()
    def prepare(self, max_canvases: int) -> None:
        """Capture graphs for up to `max_canvases` canvases, largest first."""
        self._make_room(max_canvases)
        for size in sorted({padded(n) for n in range(1, min(max_canvases, self.max_canvases) + 1)}, reverse=True):
            self._graph(self._arrays({}), size)

    def _run(self, arrays: Arrays) -> Floats:
        num = len(arrays["slots"])
        tables = [x for name, x in arrays.items() if name.startswith("table")]
        if num > self.max_canvases or tables[0].shape[1] > self.pages:
            return super()._run(arrays)
        if (padded(num),) not in self.graphs.by_key:
            self._graph(self._arrays({}), padded(num))  # recording computes, so on no canvas
        graph = self._graph(arrays, padded(num))
        graph.replay()
        answers: Floats = graph.answer[:num].cpu().numpy()
        return answers

    def _graph(self, arrays: Arrays, size: int) -> Captured:
        return self.graphs.captured((size,), self._pad(arrays, size), self._step)

    def _make_room(self, slots: int) -> None:
        have = self._tokens
        super()._make_room(slots)
        if have is not self._tokens:
            self.graphs.by_key.clear()  # they read the old canvases

    def _pad(self, arrays: Arrays, size: int) -> Arrays:
        """Pad to `size` canvases, which see nothing and write to no slot's canvas."""
        length, missing = self.model.config.canvas_length, size - len(arrays["slots"])
        fills = {"slots": len(self._tokens) - 1, "temperature": 1.0}
        fills |= {f"{name} {kind}": -1 for kind in self.caches for name in ("places", "table")}
        result: Arrays = {}
        for name, x in arrays.items():
            after = missing
            if name in BY_POSITION:
                after *= length
            shape = [(0, after), (0, 0)]
            if name.startswith("table"):
                shape[1] = 0, self.pages - x.shape[1]
            result[name] = np.pad(x, shape[: x.ndim], constant_values=fills.get(name, 0))
        result["query_start"] = np.arange(size + 1) * length
        return result
