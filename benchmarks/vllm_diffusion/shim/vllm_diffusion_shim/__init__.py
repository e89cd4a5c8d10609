"""What vLLM 0.32's CPU build lacks to serve a diffusion model. No file of vLLM changes.

A diffusion model needs model runner V2, which the CPU build uses only if Triton has a backend named cpu. This package
is one. It compiles nothing: with TRITON_INTERPRET=1 Triton's interpreter runs the kernels.
"""
