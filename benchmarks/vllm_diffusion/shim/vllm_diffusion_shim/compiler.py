"""The compiler of Triton's backend named cpu; TRITON_INTERPRET=1 needs none."""

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):
    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreted"

    def get_module_map(self):
        return {}

    def _refuse(self, *args):
        raise NotImplementedError("this backend compiles nothing: set TRITON_INTERPRET=1")

    parse_options = add_stages = load_dialects = _refuse
