"""Canvas steps as captured CUDA graphs, one a padded number of canvases; text is encoded eagerly."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from .canvas import CanvasCache
from .canvas_model import CanvasModel
from .forward import flattened
from .graphs import Captured, Graphs, Recorder

MOST = 64  # canvases of a graph; larger steps hide their launches
Arrays = Mapping[str, npt.NDArray[np.generic]]
# Inputs by position; tables are by page, all others by canvas.
ROWS = ("positions", "uniform", "noise", "places True", "places False")


def padded(num: int) -> int:
    """Canvases of a graph for `num`: as many up to 8, then at most a quarter more."""
    step = 1 << max(0, (num - 1).bit_length() - 3)
    return -(-num // step) * step


class GraphCanvasCache(CanvasCache):
    """Replays a graph for steps of at most `max_canvases` canvases, captured on first use or in `prepare`."""

    def __init__(
        self, model: CanvasModel, num_pages: tuple[int, int], page_size: int, device: str, dtype: torch.dtype,
        longest: int, record: Recorder | None = None,
    ) -> None:  # fmt: skip
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
            self._graph(size)

    def _run(self, arrays: Arrays) -> npt.NDArray[np.float64]:
        num = len(arrays["slots"])
        pages = next(arrays[name] for name in arrays if name.startswith("table")).shape[1]
        if num > self.max_canvases or pages > self.pages:
            return super()._run(arrays)
        graph = self._graph(padded(num))
        self.graphs.bring(flattened(self._pad(arrays, padded(num)))[0])
        graph.replay()
        answers: npt.NDArray[np.float64] = graph.answers[0][:num].cpu().numpy()
        return answers

    def _make_room(self, slots: int) -> None:
        have = self._tokens
        super()._make_room(slots)
        if have is not self._tokens:
            self.graphs.by_key.clear()  # they read the old canvases

    def _graph(self, size: int) -> Captured:
        return self.graphs.captured(
            (size,),
            lambda: self._pad({}, size),
            lambda shapes: (self._step(self.graphs.inputs(shapes)),),
        )

    def _pad(self, arrays: Arrays, size: int) -> dict[str, npt.NDArray[np.generic]]:
        """Pad to `size` canvases, which see nothing and write to no slot's canvas."""
        length = self.model.config.canvas_length
        fills = {
            **dict.fromkeys(("positions", "lengths", "noise"), 0), "slots": len(self._tokens) - 1,
            "temperature": 1.0, "uniform": 0.0,
            **dict.fromkeys((f"{name} {kind}" for kind in self.caches for name in ("places", "table")), -1),
        }  # fmt: skip
        padded: dict[str, npt.NDArray[np.generic]] = {"starts": np.arange(size + 1) * length}
        for name, fill in fills.items():
            shape: tuple[int, ...] = (size * length if name in ROWS else size,)
            if name.startswith("table"):
                shape = size, self.pages
            padded[name] = np.full(shape, fill)
            if (x := arrays.get(name)) is not None:
                padded[name][tuple(slice(n) for n in x.shape)] = x
        return padded
