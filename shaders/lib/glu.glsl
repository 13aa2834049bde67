// An activation's number is its index in ACTS of vkbackend/ops/elementwise.py.

const uint NONE = 0, SILU = 1, GELU = 2, SIGMOID = 3, SWIGLU_OAI = 4, GELU_ALONE = 5, RELU2_ALONE = 6;
const float OAI_ALPHA = 1.702, OAI_LIMIT = 7.0;
const float GELU_SCALE = 0.7978845608028654; // sqrt(2 / pi)

// For GELU, 0.5 * (1 + tanh(z)) is computed as sigmoid(2 z), which avoids cancellation.
float glu_value(uint act, float g, float u) {
    if (act == NONE) return g * u;
    if (act == RELU2_ALONE) return max(g, 0.0) * max(g, 0.0);
    if (act == SWIGLU_OAI) {
        g = min(g, OAI_LIMIT);
        u = clamp(u, -OAI_LIMIT, OAI_LIMIT) + 1.0;
    }
    if (act == GELU_ALONE) u = 1.0;
    float z = g;
    if (act == GELU || act == GELU_ALONE) z = 2.0 * GELU_SCALE * g * (1.0 + 0.044715 * g * g);
    if (act == SWIGLU_OAI) z = OAI_ALPHA * g;
    return (act == SIGMOID ? 1.0 : g) / (1.0 + exp(min(-z, 87.0))) * u; // exp(88.8) overflows F32
}
