#version 450
#extension GL_GOOGLE_include_directive : require
// y = act(gate) * up, the product in gated linear units and output gates
#include "lib/types.glsl"

layout(constant_id = 1) const uint ACT = 1;

layout(push_constant) uniform Push {
    uint gate_off, up_off, y_off;
    uint n;
};
layout(set = 0, binding = 0) readonly buffer Gate { float gate[]; };
layout(set = 0, binding = 1) readonly buffer Up { float up[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

const uint NONE = 0, SILU = 1, GELU = 2, SIGMOID = 3, SWIGLU_OAI = 4;
const float OAI_ALPHA = 1.702, OAI_LIMIT = 7.0;
const float GELU_SCALE = 0.7978845608028654; // sqrt(2 / pi)

float inverse_sigmoid(float x) { return 1.0 + exp(min(-x, 87.0)); } // exp(88.8) is beyond F32

void main() {
    const uint i = global_index();
    if (i >= n) return;
    const float g = gate[gate_off + i];
    const float u = up[up_off + i];
    float value = g * u;
    if (ACT == SILU) {
        value = g / inverse_sigmoid(g) * u;
    } else if (ACT == GELU) { // 0.5 * (1 + tanh(z)) is sigmoid(2 z), without the cancellation
        value = g / inverse_sigmoid(2.0 * GELU_SCALE * g * (1.0 + 0.044715 * g * g)) * u;
    } else if (ACT == SIGMOID) {
        value = u / inverse_sigmoid(g);
    } else if (ACT == SWIGLU_OAI) {
        const float x = min(g, OAI_LIMIT);
        value = x / inverse_sigmoid(OAI_ALPHA * x) * (clamp(u, -OAI_LIMIT, OAI_LIMIT) + 1.0);
    }
    y[y_off + i] = value;
}
