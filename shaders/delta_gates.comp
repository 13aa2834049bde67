#version 450
#extension GL_GOOGLE_include_directive : require
// Compute g = softplus(a + dt) * decay per head (width 1) or key channel, and beta = sigmoid(b) per head. If
// BOUNDED, g = bound * sigmoid(|decay| * (a + dt)).
#include "lib/types.glsl"

layout(constant_id = 1) const uint BOUNDED = 0;

layout(push_constant) uniform Push {
    uint a_off, dt_off, decay_off, b_off, g_off, beta_off;
    uint n_heads, width, n_rows;
    float bound;
};
layout(set = 0, binding = 0) readonly buffer A { float a[]; };
layout(set = 0, binding = 1) readonly buffer Dt { float dt[]; };
layout(set = 0, binding = 2) readonly buffer Decay { float decay[]; };
layout(set = 0, binding = 3) readonly buffer B { float b[]; };
layout(set = 0, binding = 4) writeonly buffer G { float g[]; };
layout(set = 0, binding = 5) writeonly buffer Beta { float beta[]; };

#include "lib/softplus.glsl"

float sigmoid(float x) { return 1.0 / (1.0 + exp(min(-x, 87.0))); }

void main() {
    const uint i = global_index();
    if (i < n_rows * n_heads * width) {
        const uint channel = i % (n_heads * width);
        const float value = a[a_off + i] + dt[dt_off + channel];
        const float rate = decay[decay_off + channel / width];
        g[g_off + i] = BOUNDED == 1 ? bound * sigmoid(abs(rate) * value) : softplus(value) * rate;
    }
    if (i < n_rows * n_heads) beta[beta_off + i] = sigmoid(b[b_off + i]);
}
