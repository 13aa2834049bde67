#version 450
#extension GL_GOOGLE_include_directive : require
// Compute the keys of RWKV-7 (Peng et al. 2025, arXiv:2503.14456). With a = sigmoid(rate), each head of SIZE values
// gets removed = k removal / |k removal|, added = removed a, and key = k (1 + (a - 1) replacement).
#include "lib/types.glsl"
#include "lib/reduce.glsl"

layout(push_constant) uniform Push {
    uint k_off, rate_off, removal_off, replacement_off, key_off, removed_off, added_off;
    uint size, n_heads, n_rows;
};
layout(set = 0, binding = 0) readonly buffer K { float k[]; };
layout(set = 0, binding = 1) readonly buffer Rate { float rate[]; };
layout(set = 0, binding = 2) readonly buffer Removal { float removal[]; };
layout(set = 0, binding = 3) readonly buffer Replacement { float replacement[]; };
layout(set = 0, binding = 4) writeonly buffer Key { float key[]; };
layout(set = 0, binding = 5) writeonly buffer Removed { float removed[]; };
layout(set = 0, binding = 6) writeonly buffer Added { float added[]; };

void main() {
    const uint head = group_index();
    if (head >= n_rows * n_heads) return;
    const uint channel = head % n_heads * size;
    float sum = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < size; i += LOCAL) {
        const float value = k[k_off + head * size + i] * removal[removal_off + channel + i];
        sum += value * value;
    }
    const float scale = 1.0 / max(sqrt(reduce_sum(sum)), 1.0e-12);
    for (uint i = gl_LocalInvocationID.x; i < size; i += LOCAL) {
        const uint at = head * size + i;
        const float value = k[k_off + at];
        const float a = 1.0 / (1.0 + exp(min(-rate[rate_off + at], 87.0)));
        const float unit = value * removal[removal_off + channel + i] * scale;
        key[key_off + at] = value * (1.0 + (a - 1.0) * replacement[replacement_off + channel + i]);
        removed[removed_off + at] = unit;
        added[added_off + at] = unit * a;
    }
}
