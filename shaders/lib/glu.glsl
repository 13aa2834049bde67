// An activation's number is its index in ACTS of vkbackend/ops/elementwise.py.

const uint NONE = 0, SILU = 1, GELU = 2, SIGMOID = 3, SWIGLU_OAI = 4, GELU_ALONE = 5, RELU2_ALONE = 6;
const uint SILU_ALONE = 7, GELU_ERF_ALONE = 8, GELU_QUICK_ALONE = 9, RELU = 10, SIGMOID_ALONE = 11;
const float OAI_ALPHA = 1.702, OAI_LIMIT = 7.0;
const float GELU_SCALE = 0.7978845608028654; // sqrt(2 / pi)

// Return x * (1 + erf(x / sqrt(2))) / 2. Abramowitz and Stegun 1964, formula 7.1.26, gives 1 - erf(z) for z >= 0
// with an error of 1.5e-7.
float gelu_erf(float x) {
    const float z = abs(x) * 0.7071067811865476;
    const float t = 1.0 / (1.0 + 0.3275911 * z);
    const float poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
    const float tail = 0.5 * poly * exp(-z * z);
    return x * (x < 0.0 ? tail : 1.0 - tail);
}

// For GELU, 0.5 * (1 + tanh(z)) is computed as sigmoid(2 z), which avoids cancellation.
float glu_value(uint act, float g, float u) {
    if (act == NONE) return g * u;
    if (act == RELU) return max(g, 0.0) * u;
    if (act == RELU2_ALONE) return max(g, 0.0) * max(g, 0.0);
    if (act == SWIGLU_OAI) {
        g = min(g, OAI_LIMIT);
        u = clamp(u, -OAI_LIMIT, OAI_LIMIT) + 1.0;
    }
    if (act == GELU_ERF_ALONE) return gelu_erf(g);
    if (act == GELU_ALONE || act == SILU_ALONE || act == GELU_QUICK_ALONE || act == SIGMOID_ALONE) u = 1.0;
    float z = g;
    if (act == GELU_QUICK_ALONE) z = 1.702 * g;
    if (act == GELU || act == GELU_ALONE) z = 2.0 * GELU_SCALE * g * (1.0 + 0.044715 * g * g);
    if (act == SWIGLU_OAI) z = OAI_ALPHA * g;
    return (act == SIGMOID || act == SIGMOID_ALONE ? 1.0 : g) / (1.0 + exp(min(-z, 87.0))) * u; // exp(88.8) overflows F32
}
