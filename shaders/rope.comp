#version 450
#extension GL_GOOGLE_include_directive : require
// Rotates pairs of the first n_rot dimensions of each head by angles whose cos and sin the host computed; copies the
// rest. One thread per pair.
#include "lib/types.glsl"

layout(constant_id = 1) const uint HALF_SPLIT = 0; // 0: pairs (2i, 2i + 1), 1: pairs (i, i + n_rot / 2)

layout(push_constant) uniform Push {
    uint x_off, cos_sin_off, y_off;
    uint n_heads, head_dim, n_rot, n_rows;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer CosSin { float cos_sin[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

void main() {
    const uint row = gl_WorkGroupID.z;
    const uint pairs = head_dim / 2;
    const uint index = global_index();
    if (index >= n_heads * pairs) return;
    const uint pair = index % pairs;
    const uint base = (row * n_heads + index / pairs) * head_dim;
    const bool rotated = pair < n_rot / 2;
    const bool split = rotated && HALF_SPLIT != 0;
    const uint first = base + (split ? pair : 2 * pair);
    const uint second = split ? first + n_rot / 2 : first + 1;
    vec2 value = vec2(x[x_off + first], x[x_off + second]);
    if (rotated) {
        const uint at = cos_sin_off + row * n_rot + 2 * pair;
        const float c = cos_sin[at];
        const float s = cos_sin[at + 1];
        value = vec2(value.x * c - value.y * s, value.x * s + value.y * c);
    }
    y[y_off + first] = value.x;
    y[y_off + second] = value.y;
}
