"""Which shapes of attention are checked: models in use and edges, on the device and, tiny, in the interpreter."""

from dataclasses import dataclass, replace

from kernels.kv_layout import KvLayout


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """A pool, sequences in it and one step of them."""

    name: str
    dtype: str
    """Of queries and outputs."""
    kv_dtype: str = ""
    """Of the pool; that of the queries when empty."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    steps: tuple[tuple[int, int], ...]
    """(new tokens, context after them) of each sequence; those with one new token first."""
    sliding_window: int | None = None
    soft_cap: float | None = None
    num_layers: int = 2
    pool_bytes: int = 0
    """Size of the pool, if more than the sequences need; block ids are drawn from all of it."""
    shared_blocks: int | None = None
    """So many blocks of context are common to all decodes."""
    graph: bool = False
    """As in a captured graph: two rows are padding, and the host's lengths are bounds, not lengths."""

    @property
    def layout(self) -> KvLayout:
        """Of the pool."""
        return KvLayout(self.num_layers, self.num_kv_heads, self.block_size, self.head_dim, self.kv_dtype or self.dtype)


_MIXED = ((1, 1), (1, 17), (1, 1000), (1, 2049), (7, 7), (130, 130), (64, 1111))
_DECODES = tuple((1, 1 + 97 * i % 1500) for i in range(24))
_LLAMA = AttentionCase(name="Llama-8B", dtype="bfloat16", num_heads=32, num_kv_heads=8, head_dim=128, steps=_MIXED)
_TINY = AttentionCase(
    name="float32",
    dtype="float32",
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_layers=1,
    steps=((1, 1), (1, 35), (3, 3), (5, 40)),
)
_ODD = ((1, 80, 8), (5, 96, 16), (6, 128, 32), (7, 256, 64), (8, 128, 128), (3, 80, 16))
"""Group, head_dim and block size."""


def _on_device() -> list[AttentionCase]:
    return [
        _LLAMA,
        replace(_LLAMA, name="Llama-8B decodes", steps=_DECODES),
        replace(_LLAMA, name="captured graph", steps=_DECODES, graph=True),
        replace(_LLAMA, name="one long sequence", steps=((1, 32_768),)),
        replace(_LLAMA, name="offsets past 2^31 elements", num_layers=32, pool_bytes=6 << 30),
        replace(_LLAMA, name="fp8 KV", kv_dtype="float8_e4m3fn"),
        replace(_LLAMA, name="shared prefix", steps=((1, 800), (1, 700), (1, 1500)) * 5, shared_blocks=40),
        replace(_LLAMA, name="float16", dtype="float16"),
        replace(_LLAMA, name="float32", dtype="float32"),
        replace(_LLAMA, name="sliding window", sliding_window=100),
        replace(_LLAMA, name="soft cap", soft_cap=20.0),
        replace(_LLAMA, name="SmolLM2-135M", num_heads=9, num_kv_heads=3, head_dim=64),
        replace(_LLAMA, name="Qwen2-0.5B", num_heads=14, num_kv_heads=2, head_dim=64, block_size=32),
        *(
            replace(
                _LLAMA,
                name=f"group {group}, head_dim {head_dim}, block {block_size}",
                num_heads=2 * group,
                num_kv_heads=2,
                head_dim=head_dim,
                block_size=block_size,
            )
            for group, head_dim, block_size in _ODD
        ),
    ]


def _in_interpreter() -> list[AttentionCase]:
    decodes = ((1, 20), (1, 33))
    both = ((1, 35), (5, 40))
    return [
        _TINY,
        replace(_TINY, name="float16", dtype="float16"),
        replace(_TINY, name="fp8 KV", dtype="float16", kv_dtype="float8_e4m3fn"),
        replace(_TINY, name="captured graph", steps=decodes, graph=True),
        replace(_TINY, name="shared prefix", steps=((1, 40), (1, 55)), shared_blocks=2),
        replace(_TINY, name="window and soft cap", steps=both, sliding_window=9, soft_cap=5.0),
        # Memory that nobody touches costs nothing, so that the offsets are real here, too.
        replace(_TINY, name="offsets past 2^31 elements", dtype="float16", steps=both, pool_bytes=5 << 30),
    ]


def attention_cases(dry_run: bool) -> list[AttentionCase]:
    """The cases, those of most value first."""
    return _in_interpreter() if dry_run else _on_device()
