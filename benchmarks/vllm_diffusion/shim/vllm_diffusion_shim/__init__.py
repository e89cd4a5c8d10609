"""What vLLM 0.32's CPU build lacks to serve a diffusion model. No file of vLLM changes.

A diffusion model needs model runner V2, and the CPU build takes that only where Triton has a backend named cpu. This
package is one; it compiles nothing, and with TRITON_INTERPRET=1 Triton's interpreter runs the kernels.
"""
