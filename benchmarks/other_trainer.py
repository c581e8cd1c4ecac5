"""Device bytes of the FPDT talk's trainer, by what its public code keeps: an account of two moments, without allocators and fragmentation.

Its habits, from Megatron-DeepSpeed and DeepSpeed (github.com/microsoft), `megatron/model` and `deepspeed/sequence` where not said:

1. Tensor parallelism is without sequence parallelism: the residual stream, norms' outputs and block inputs lie whole on each rank
   (Korthikanti et al., arXiv 2205.05198, section 4).
2. The loss takes all rows at once, 14 bytes a logit: a bf16 product and three float32 arrays (`gpt_model.py` casts, then
   `core/tensor_parallel/cross_entropy.py` subtracts and exponentiates; `cross_entropy.py` of `deepspeed/sequence` has softmax and its
   logarithm). FPDT takes it in chunks (`fpdt_layer.py`).
3. A block of T' rows keeps, as multiples of T' D: four whole (input, both norms' outputs, the stream between halves), and a share of
   tensor parallelism of queries, keys, values and attention's output, one more of Ulysses, and twice F / D for the feed-forward.
4. The model: no grouped keys (`transformer.py` asserts it under Ulysses), no gate (`FPDT_FFN` has none), GPT-2's vocabulary, tied (example
   scripts of `examples_deepspeed/sequence_parallel`). That all rows were such models is our reading: with Llama 3's vocabulary and habit 2
   the rows of 512K tokens under Ulysses would need over 120 GiB.
5. Weights 2 bytes, Adam 12; gradients come after activations have gone. ZeRO shards them; ZeRO-3 keeps 1e9 gathered elements
   (`stage3_max_live_parameters`). Recomputation keeps a block's whole input, on the host if offloaded.
6. FPDT chunks what is inside attention and the feed-forward. Seven whole arrays of T' D stand where attention's backward ends: the block's
   input, output and its gradient, the gradient between halves, attention's, and the norm's in chunks and end to end (`fpdt_layer.py`).
"""

from longshift.layout.layout import Layout

LAYERS, WIDTH, FFN, VOCABULARY = 32, 4096, 14336, 50304
LOGIT_BYTES = 14
LIVE_ELEMENTS = 10**9
WHOLE_OF_FPDT = 7


def device_bytes(layout: Layout, tokens: int) -> float:
    """Bytes of a device for a sequence of so many tokens: of the loss or of a block's backward, whichever needs more."""
    rows = tokens // layout.ulysses
    whole = 2.0 * rows * WIDTH
    block = whole * (4 + (4 + (layout.ulysses > 1) + 2 * FFN / WIDTH) / layout.tp)
    kept = LAYERS * block if layout.recompute == "none" else LAYERS * whole * (layout.offload == "device")
    state = _state(layout)
    if layout.chunk:
        return state + WHOLE_OF_FPDT * whole
    loss = 2 * whole + LOGIT_BYTES * rows * VOCABULARY / layout.tp
    backward = 2 * whole + block * (layout.recompute != "none")
    return state + kept + max(loss, backward)


def _state(layout: Layout) -> float:
    """Weights and what Adam has of them."""
    elements = (LAYERS * (4 * WIDTH**2 + 2 * WIDTH * FFN) + VOCABULARY * WIDTH) / layout.tp
    shards = layout.ulysses * layout.ring * layout.dp
    weights = elements / shards + LIVE_ELEMENTS if layout.zero == 3 else elements
    return 2 * weights + 12 * (elements / shards if layout.zero else elements)
