"""Elementwise ops: activations, gates, factors and vector addition."""

from __future__ import annotations

from vkbackend.meta import split
from vkbackend.meta.split import Kind
from vkbackend.meta.sums import each, holders_of, latest, whole
from vkbackend.meta.tensor import Tensor, Weight

F32_MAX = 3.4028234663852886e38


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, as in SwiGLU (Shazeer 2020)."""
    return _glu("silu_mul", gate, up, "silu")


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up with the tanh form of GELU, as in GeGLU (Shazeer 2020)."""
    return _glu("gelu_mul", gate, up, "gelu")


def gelu(x: Tensor) -> Tensor:
    """Return the tanh form of gelu(x) (Hendrycks and Gimpel 2016)."""
    return _glu("gelu", x, x, "gelu_alone")


def gelu_erf(x: Tensor) -> Tensor:
    """Return x * (1 + erf(x / sqrt(2))) / 2 (Hendrycks and Gimpel 2016)."""
    return _glu("gelu_erf", x, x, "gelu_erf_alone")


def gelu_quick(x: Tensor) -> Tensor:
    """Return x * sigmoid(1.702 x) (Hendrycks and Gimpel 2016)."""
    return _glu("gelu_quick", x, x, "gelu_quick_alone")


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x) (Elfwing et al. 2017, arXiv:1702.03118)."""
    return _glu("silu", x, x, "silu_alone")


def relu2(x: Tensor) -> Tensor:
    """Return max(x, 0)^2 (So et al. 2021, arXiv:2109.08668)."""
    return _glu("relu2", x, x, "relu2_alone")


def relu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return max(gate, 0) * up, as in ReGLU (Shazeer 2020)."""
    return _glu("relu_mul", gate, up, "relu")


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Return sigmoid(gate) * x."""
    return _glu("sigmoid_mul", gate, x, "sigmoid")


def sigmoid(x: Tensor) -> Tensor:
    return _glu("sigmoid", x, x, "sigmoid_alone")


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """Return g * sigmoid(1.702 g) * (u + 1) with g = min(gate, 7) and u = up clamped to [-7, 7] (gpt-oss)."""
    return _glu("swiglu_oai", gate, up, "swiglu_oai")


def situ_mul(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """Return sigmoid(g) * c(g, beta) * c(u, linear_beta) with the soft-cap c(x, b) = b tanh(x / b) (Kimi K3).
    A `linear_beta` of 0 leaves u as it is."""
    return mul(sigmoid_mul(gate, softcap(gate, beta)), softcap(up, linear_beta) if linear_beta else up)


def silu_mul_clamped(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return min(silu(gate), limit) * u, where u is `up` clamped to [-limit, limit] (Step 3.5)."""
    return mul(clamp(silu(gate), -F32_MAX, limit), clamp(up, -limit, limit))


def silu_of_clamped(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return silu(min(gate, limit)) * u, where u is `up` clamped to [-limit, limit] (GLM-5.3-Flash)."""
    return silu_mul(clamp(gate, -F32_MAX, limit), clamp(up, -limit, limit))


def mul(a: Tensor, b: Tensor) -> Tensor:
    return _glu("mul", a, b, "none")


def _glu(name: str, gate: Tensor, up: Tensor, act: str) -> Tensor:
    gate, up = whole(gate), whole(up)
    holders = [d for d in holders_of(gate) if up.views[d] is not None]
    y = gate.graph.new(gate.rows, gate.width, split.elementwise(name, gate.state, up.state), name, holders)
    for on, left, right, out in each(y, name, gate, up):
        on.glu(left, right, out, act=act)
    return y


def scale(x: Tensor, c: float) -> Tensor:
    """Return c * x. A PARTIAL sum stays PARTIAL."""
    x = latest(x)
    y = x.graph.new(x.rows, x.width, x.state, "scale", holders_of(x))
    for on, source, out in each(y, "scale", x):
        on.scale(source, out, c=c)
    y.base = scale(x.base, c) if x.base else None
    return y


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """Return min(max(x, low), high)."""
    x = whole(x)
    y = x.graph.new(x.rows, x.width, split.elementwise("clamp", x.state), "clamp", holders_of(x))
    for on, source, out in each(y, "clamp", x):
        on.clamp(source, out, low=low, high=high)
    return y


def mul_vector(x: Tensor, v: Weight) -> Tensor:
    """Multiply each row of x by v [width], which every device has. A PARTIAL sum stays PARTIAL."""
    x = latest(x)
    y = x.graph.new(x.rows, x.width, split.add_bias(x.state, v.state), "mul_vector", holders_of(x))
    for on, source, factor, out in each(y, "mul_vector", x, v):
        on.mul_vector(source, factor, out)
    y.base = mul_vector(x.base, v) if x.base else None
    return y


def softcap(x: Tensor, c: float) -> Tensor:
    """Return c * tanh(x / c)."""
    x = whole(x)
    y = x.graph.new(x.rows, x.width, split.elementwise("softcap", x.state), "softcap", holders_of(x))
    for on, source, out in each(y, "softcap", x):
        on.softcap(source, out, c=c)
    return y


def xielu(x: Tensor, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Tensor:
    """Return xIELU, a parabola above 0 and an exponential plus a line below 0 (Huang and Schlag 2024,
    arXiv:2411.13010)."""
    x = whole(x)
    y = x.graph.new(x.rows, x.width, split.elementwise("xielu", x.state), "xielu", holders_of(x))
    for on, source, out in each(y, "xielu", x):
        on.xielu(source, out, alpha_p=alpha_p, alpha_n=alpha_n, beta=beta, eps=eps)
    return y


def gate_rows(gate: Tensor, x: Tensor) -> Tensor:
    """Return sigmoid(gate) * x, where `gate` is [rows, 1]. A PARTIAL sum stays PARTIAL."""
    gate, x = whole(gate), latest(x)
    y = x.graph.new(x.rows, x.width, split.gate_rows(gate.state, x.state), "gate_rows", holders_of(x))
    for on, factor, source, out in each(y, "gate_rows", gate, x):
        on.gate_rows(factor, source, out)
    y.base = gate_rows(gate, x.base) if x.base else None
    return y


def gate_heads(gate: Tensor, x: Tensor, head_dim: int, *, softplus: bool = False) -> Tensor:
    """Multiply each head of x [rows, heads * head_dim] by sigmoid(gate), or by log(1 + exp(gate)) if
    `softplus`. `gate` is [rows, heads]."""
    gate, x = whole(gate), whole(x)
    state = split.gate_heads(gate.state, x.state, head_dim)
    y = x.graph.new(x.rows, x.width, state, "gate_heads", holders_of(x))
    for on, factor, source, out in each(y, "gate_heads", gate, x):
        heads = source.reshape(source.shape[0] * source.shape[1] // head_dim, head_dim)
        on.gate_rows(factor, heads, out.reshape(*heads.shape), softplus=softplus)
    return y


def add_vector(x: Tensor, v: Weight) -> Tensor:
    """Add the vector v [width], which every device has, to each row of x. If x is PARTIAL, v is added once,
    to x's addend `base` or to one device's share."""
    x, graph = latest(x), x.graph
    state = split.add_bias(x.state, v.state)
    if state.kind is Kind.PARTIAL and x.base:
        return Tensor(graph, x.rows, x.width, state, x.views, add_vector(x.base, v))
    y = graph.new(x.rows, x.width, state, "add_vector", state.writers[:1] or holders_of(x))
    if state.kind is Kind.PARTIAL:
        y.views = [x.views[d] if d != state.writers[0] else out for d, out in enumerate(y.views)]
    for d in state.writers[:1] or holders_of(y):
        graph.on(d, v).add_bias(x.on(d), v.whole(d), y.on(d))
    return y
