#version 450
#extension GL_GOOGLE_include_directive : require
// Rotate pairs of the first n_rot dimensions of each head. The host computes the cos and sin of the angles. A
// thread rotates one pair. If NORM is set, a workgroup norms and rotates one head.
#include "lib/types.glsl"
#include "lib/reduce.glsl"

layout(constant_id = 1) const uint HALF_SPLIT = 0; // 0: pairs (2i, 2i + 1); 1: pairs (i, i + n_rot / 2).
layout(constant_id = 2) const uint NORM = 0; // 1: divide each head by its RMS; 2: also multiply it by w.

// The rotated dimensions consist of PARTS equal parts. The elements of a pair are in the same part, and pairs
// are numbered by part.
layout(constant_id = 3) const uint PARTS = 1;

layout(push_constant) uniform Push {
    uint x_off, w_off, cos_sin_off, y_off;
    uint n_heads, head_dim, n_rot, n_rows;
    float eps;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer W { float w[]; };
layout(set = 0, binding = 2) readonly buffer CosSin { float cos_sin[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };
#include "lib/head.glsl"

void turn(uint head, uint pair) {
    const uint base = head * head_dim;
    const bool rotated = pair < n_rot / 2;
    const bool split = rotated && HALF_SPLIT != 0;
    const uint of_part = n_rot / 2 / PARTS;
    const uint first = split ? pair + (PARTS > 1 ? pair / of_part * of_part : 0) : 2 * pair;
    const uint second = split ? first + of_part : first + 1;
    vec2 value = vec2(normed(x_off + base, first), normed(x_off + base, second));
    if (rotated) {
        const uint at = cos_sin_off + gl_WorkGroupID.z * n_rot + 2 * pair;
        const float c = cos_sin[at];
        const float s = cos_sin[at + 1];
        value = vec2(value.x * c - value.y * s, value.x * s + value.y * c);
    }
    y[y_off + base + first] = value.x;
    y[y_off + base + second] = value.y;
}

void main() {
    const uint first_head = gl_WorkGroupID.z * n_heads;
    const uint pairs = head_dim / 2;
    uint index = global_index(), end = n_heads * pairs, stride = end;
    if (NORM != 0) {
        const uint head = group_index();
        if (head >= n_heads) return;
        measure(x_off + (first_head + head) * head_dim);
        index = head * pairs + gl_LocalInvocationID.x;
        end = (head + 1) * pairs;
        stride = LOCAL;
    }
    for (; index < end; index += stride) turn(first_head + index / pairs, index % pairs);
}
