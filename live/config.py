"""A decoder's dimensions, as in config.json."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    """`num` experts of width `ffn`, `top_k` a token.

    Scores are the router's soft-max or sigmoid, in fp32. With groups, experts come from the `top_groups` whose two best
    scores have the largest sum (DeepSeek-V3, section 2.1.2; LLaDA2.0).
    """

    num: int
    top_k: int
    ffn: int
    shared: int = 0  # experts of every token
    dense_layers: int = 0  # first layers, which are dense
    scoring: str = "softmax"  # or sigmoid
    bias: bool = False  # to choose experts, not to weight them
    groups: int = 1
    top_groups: int = 1
    normed: bool = True  # chosen scores are divided by their sum
    scale: float = 1.0  # ... then multiplied by this

    def params(self, hidden: int) -> int:
        """Parameters of one layer's experts and router."""
        return self.num * (hidden + self.bias) + 3 * hidden * self.ffn * (self.num + self.shared)


@dataclass(frozen=True)
class RopeScaling:
    """RoPE stretched beyond the pretraining context, as in transformers' modeling_rope_utils.

    Components with more than `fast` turns in it keep their angle, those with fewer than `slow` turn `factor` times as
    slowly; between, it is interpolated by index (yarn) or turns (llama3).
    """

    kind: str  # yarn or llama3
    factor: float
    original: int  # positions
    fast: float
    slow: float
    attention: float = 1.0  # multiplies queries and keys


@dataclass(frozen=True)
class ModelConfig:
    """The feed-forward is SwiGLU: three matrices."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of dense layers
    vocab: int
    context_limit: int  # tokens
    block_length: int  # positions decoded together; 1: autoregressive
    mask_token: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    tied: bool = False  # the LM head is the embedding
    qk_norm: bool = True
    qkv_bias: bool = False
    rotary: int | None = None  # leading components of a head that turn; None: all
    scaling: RopeScaling | None = None
    experts: Experts | None = None
    shifted: bool = False  # a row predicts the next position
    by_entropy: bool = False  # steps commit the masks of least entropy (Dream)
    both_ways: bool = False  # full-sequence: positions see each other
    eos: tuple[int, ...] = ()  # tokens that end an answer
    architecture: str = "SDARForCausalLM"  # as in config.json

    @property
    def state_tokens(self) -> int:
        """Tokens whose keys, or values, take one hidden state's memory, rounded up."""
        return -(-self.hidden // (self.kv_heads * self.head_dim))

    @property
    def kv_elements(self) -> int:
        """Numbers in a token's keys and values, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Parameters, norms included."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        attention = 2 * self.hidden * (q + kv) + norms + (q + 2 * kv if self.qkv_bias else 0)
        dense = self.layers if self.experts is None else self.experts.dense_layers
        mixed = 0 if self.experts is None else self.experts.params(self.hidden)
        feed_forward = dense * 3 * self.hidden * self.ffn + (self.layers - dense) * mixed
        embeddings = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.layers * attention + feed_forward + self.hidden + embeddings

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.dense_layers
