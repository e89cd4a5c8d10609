"""The dimensions of a decoder for masked block diffusion, by preset or from a config.json."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's dimensions and what it was trained with. The feed-forward is SwiGLU: three matrices."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_limit: int  # tokens
    block_length: int  # positions decoded together; 1: an autoregressive model
    mask_token: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    tied: bool = False  # the LM head is the embedding
    qk_norm: bool = True

    @property
    def state_tokens(self) -> int:
        """Tokens' worth of keys, or of values, that a hidden state takes."""
        return -(-self.hidden // (self.kv_heads * self.head_dim))

    @property
    def num_params(self) -> int:
        """Every parameter, norms included."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        layer = 2 * self.hidden * (q + kv) + 3 * self.hidden * self.ffn + norms
        return self.layers * layer + self.hidden + (1 if self.tied else 2) * self.vocab * self.hidden


def _sdar(name: str, layers: int, hidden: int, heads: int, ffn: int, tied: bool = False) -> ModelConfig:
    # block-diffusion.md section 3; block 32 is the published throughput runs' checkpoint.
    return ModelConfig(name, layers, hidden, heads, 8, 128, ffn, 151936, 32768, 32, 151669, tied=tied)


PRESETS = {
    "sdar-1.7b": _sdar("SDAR-1.7B", 28, 2048, 16, 6144, tied=True),
    "sdar-4b": _sdar("SDAR-4B", 36, 2560, 32, 9728),
    "sdar-8b": _sdar("SDAR-8B", 36, 4096, 32, 12288),
    # The shipped byte-level model's: 256 bytes, the mask, and the end of a text.
    "tiny": ModelConfig("tiny-bytes", 4, 192, 3, 1, 64, 576, 258, 512, 32, 256, rope_theta=1e4, tied=True),
}
