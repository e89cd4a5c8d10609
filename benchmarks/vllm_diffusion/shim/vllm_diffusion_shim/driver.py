"""The driver of Triton's backend named cpu."""

from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_device_capability(self, device=None):
        return (0, 0)

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_benchmarker(self):
        raise NotImplementedError("nothing is compiled, so nothing is tuned")
