"""The composition of a transformer block, written once for tensors with numbers (`model.decoder`) and without (`schedule.inside`).

A block has four seams, each callable on any run of tokens: `qkv`, `attend`, `out`, `mlp`. What a parallel layout changes goes through
`ops`:

    x ─ norm ─ enter ─ q,k,v ─ attend ─ o ─ leave ─ + ─ norm ─ enter ─ up ─ act ─ down ─ leave ─ + ─
        token shard │     all tokens        │ token shard     │        all tokens      │

Where norms stand after attention and MLP, they come after `leave` and before `+`, and so does the scale of what is added.

Calls are nested where a tensor is not needed again, so that a forward without a graph holds few at one time.
"""

from typing import Any

from longshift.spec.model import ModelSpec


def scaled(x: Any, scale: float) -> Any:
    return x if scale == 1.0 else x * scale


class BlockSeams:
    """A transformer block over primitives that a subclass has."""

    spec: ModelSpec
    unit: int
    norm_of: Any  # (x, role) -> x normalized over its last dim
    norm_of_heads: Any  # (x, role, heads, ops) -> x normalized over these heads, of which its last dim has this rank's
    linear: Any  # (x, role, bias=True) -> x W^T + b
    plus_bias: Any  # (x, role) -> x, plus the bias of this role where there is one
    rotate: Any  # (x_TNH, micro) -> x with rotary embedding
    activation: Any  # (x) -> activation(x)
    gated: Any  # (gate, up) -> activation(gate) * up

    def qkv(self, x_TD: Any, micro: Any, ops: Any) -> tuple[Any, Any, Any]:
        q, k, v = self.projected(ops.enter(self.before(x_TD, "norm1")), ops)
        if self.spec.qk_norm:
            q = self.norm_of(q, "q_norm")
            k = self.norm_of(k, "k_norm")
        if self.spec.rope_of(self.unit):
            q = self.rotate(q, micro)
            k = self.rotate(k, micro)
        return q, k, v

    def attend(self, q: Any, k: Any, v: Any, micro: Any, ops: Any) -> Any:
        return ops.attend(q, k, v, micro, self.spec.window(self.unit))

    def out(self, x_TD: Any, o_TNH: Any, ops: Any) -> Any:
        return x_TD + self.after(self.row_linear(o_TNH.flatten(1), "o", ops), "post1")

    def mlp(self, x_TD: Any, ops: Any) -> Any:
        return x_TD + self.after(self.row_linear(self.hidden(ops.enter(self.before(x_TD, "norm2"))), "down", ops), "post2")

    def before(self, x_TD: Any, role: str) -> Any:
        """What attention or MLP takes of the residual stream."""
        return x_TD if self.spec.norm_place == "after" else self.norm_of(x_TD, role)

    def after(self, y_TD: Any, role: str) -> Any:
        """What is added to the residual stream of what attention or MLP gives."""
        if self.spec.norm_place != "before":
            y_TD = self.norm_of(y_TD, role)
        return scaled(y_TD, self.spec.residual_scale)

    def projected(self, h: Any, ops: Any) -> tuple[Any, Any, Any]:
        """Queries [T, N, H], keys and values [T, K, H] of the normalized residual stream."""
        width = self.spec.head_width
        if self.spec.fused_qkv or self.spec.fused:
            sizes = [len(heads) * width for heads in (ops.heads, ops.kv_heads, ops.kv_heads)]
            q, k, v = self.linear(h, "fused").split(sizes, -1)
        else:
            q, k, v = self.linear(h, "q"), self.linear(h, "k"), self.linear(h, "v")
        if self.spec.qk_norm_whole:
            q = self.norm_of_heads(q, "q_norm", self.spec.heads, ops)
            k = self.norm_of_heads(k, "k_norm", self.spec.kv_heads, ops)
        return q.unflatten(-1, (-1, width)), k.unflatten(-1, (-1, width)), v.unflatten(-1, (-1, width))

    def hidden(self, h: Any) -> Any:
        """The activations [T, F] that `down` takes."""
        if self.spec.fused:
            both = self.linear(h, "gate_up")
            return self.gated(*both.split([both.shape[-1] // 2] * 2, -1))
        return self.gated(self.linear(h, "gate"), self.linear(h, "up")) if self.spec.gated else self.activation(self.linear(h, "up"))

    def row_linear(self, x: Any, role: str, ops: Any) -> Any:
        """As `linear`, for a weight whose input dim may be sliced over ranks: summed by `leave`, the bias added once, after it."""
        return self.plus_bias(ops.leave(self.linear(x, role, bias=False)), role)

    def attention_half(self, x_TD: Any, micro: Any, ops: Any) -> Any:
        return self.out(x_TD, self.attend(*self.qkv(x_TD, micro, ops), micro, ops), ops)

    def mlp_half(self, x_TD: Any, micro: Any, ops: Any) -> Any:
        return self.mlp(x_TD, ops)

    def forward(self, x_TD: Any, micro: Any, ops: Any) -> Any:
        return self.mlp_half(self.attention_half(x_TD, micro, ops), micro, ops)
