#version 450
#extension GL_GOOGLE_include_directive : require
// Combine the splits s of attn_decode: y = sum of exp(m_s - m) * acc_s / sum of exp(m_s - m) * l_s. A row
// without keys gets zeros.
#include "lib/types.glsl"

layout(constant_id = 1) const uint HEAD_V = 64;
layout(constant_id = 2) const uint HAS_SINKS = 0;
layout(constant_id = 3) const uint MAX_SPLITS = 64; // a multiple of BATCH

layout(push_constant) uniform Push {
    uint part_off, sinks_off, y_off;
    uint n_heads, n_rows, n_splits;
};
layout(set = 0, binding = 0) readonly buffer Part { float part[]; };
layout(set = 0, binding = 1) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

const uint BATCH = 8; // splits in flight
shared float maxima[MAX_SPLITS];
shared float sums[MAX_SPLITS];
shared float factors[MAX_SPLITS];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint head = gl_WorkGroupID.x;
    const uint index = gl_WorkGroupID.z * n_heads + head;
    const uint base = part_off + index * n_splits * (HEAD_V + 2);
    for (uint s = thread; s < MAX_SPLITS; s += LOCAL) {
        const uint at = base + min(s, n_splits - 1) * (HEAD_V + 2) + HEAD_V;
        const vec2 found = vec2(part[at], part[at + 1]);
        maxima[s] = s < n_splits ? found.x : NEG_LARGE;
        sums[s] = s < n_splits ? found.y : 0.0;
    }
    barrier();

    const float sink = HAS_SINKS != 0 ? sinks[sinks_off + head] : NEG_LARGE;
    float m = sink;
    uint n_used = 0; // The number of splits up to the last one with keys.
    // Mesa knows the arrays' size, so it would unroll the loops over splits, and compile for 20 s.
    [[dont_unroll]] for (uint first = 0; first < n_splits; first += BATCH) {
        [[unroll]] for (uint u = 0; u < BATCH; ++u) {
            m = max(m, maxima[first + u]);
            n_used = sums[first + u] != 0.0 ? first + u + 1 : n_used;
        }
    }
    for (uint s = thread; s < MAX_SPLITS; s += LOCAL) factors[s] = s < n_used ? exp(maxima[s] - m) : 0.0;
    barrier();

    for (uint d = thread; d < HEAD_V; d += LOCAL) {
        float acc = 0.0;
        float l = HAS_SINKS != 0 ? exp(sink - m) : 0.0;
        [[dont_unroll]] for (uint first = 0; first < n_used; first += BATCH) {
            float value[BATCH];
            [[unroll]] for (uint u = 0; u < BATCH; ++u) {
                value[u] = part[base + min(first + u, n_used - 1) * (HEAD_V + 2) + d];
            }
            [[unroll]] for (uint u = 0; u < BATCH; ++u) {
                acc += factors[first + u] * value[u];
                l += factors[first + u] * sums[first + u];
            }
        }
        y[y_off + index * HEAD_V + d] = l != 0.0 ? acc / l : 0.0;
    }
}
