"""A general plug-in of vLLM: asynchronous scheduling as configured, and linear layers of no rows."""

import functools


@functools.cache
def register():
    """Called by vLLM in each of its processes, perhaps more than once."""
    import vllm._custom_ops as operators
    from vllm.platforms.cpu import CpuPlatform

    usual = CpuPlatform.check_and_update_config.__func__

    def check(cls, config):
        # The CPU platform turns asynchronous scheduling off; on GPUs it is the default.
        asynchronous = config.scheduler_config.async_scheduling
        usual(cls, config)
        config.scheduler_config.async_scheduling = asynchronous

    CpuPlatform.check_and_update_config = classmethod(check)
    linear = operators.weight_packed_linear_cpu

    def linear_of_rows(x, weight, num_columns, bias):
        # A prompt before a canvas has no rows of logits, and the kernel of CPUs with AMX divides by their number.
        return linear(x, weight, num_columns, bias) if x.numel() else x.new_empty(*x.shape[:-1], num_columns)

    operators.weight_packed_linear_cpu = linear_of_rows
