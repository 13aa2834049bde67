#version 450
#extension GL_GOOGLE_include_directive : require
// Joins the splits of attn_decode: y = sum of exp(m_s - m) * acc_s / sum of exp(m_s - m) * l_s; zeros for no keys.
// A sink is one more logit per head, in the denominator alone.
#include "lib/types.glsl"

layout(constant_id = 1) const uint HEAD_V = 64;
layout(constant_id = 2) const uint HAS_SINKS = 0;

layout(push_constant) uniform Push {
    uint part_off, sinks_off, y_off;
    uint n_heads, n_rows, n_splits;
};
layout(set = 0, binding = 0) readonly buffer Part { float part[]; };
layout(set = 0, binding = 1) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

void main() {
    const uint head = gl_WorkGroupID.x;
    const uint index = gl_WorkGroupID.z * n_heads + head; // row, head
    const uint base = part_off + index * n_splits * (HEAD_V + 2);
    const float sink = HAS_SINKS != 0 ? sinks[sinks_off + head] : NEG_LARGE;
    float m = sink;
    for (uint s = 0; s < n_splits; ++s) m = max(m, part[base + s * (HEAD_V + 2) + HEAD_V]);
    for (uint d = gl_LocalInvocationID.x; d < HEAD_V; d += LOCAL) {
        float acc = 0.0;
        float l = HAS_SINKS != 0 ? exp(sink - m) : 0.0;
        for (uint s = 0; s < n_splits; ++s) {
            const uint at = base + s * (HEAD_V + 2);
            const float factor = exp(part[at + HEAD_V] - m);
            acc += factor * part[at + d];
            l += factor * part[at + HEAD_V + 1];
        }
        y[y_off + index * HEAD_V + d] = l > 0.0 ? acc / l : 0.0;
    }
}
