#version 450
#extension GL_GOOGLE_include_directive : require
// Multiply blocks of 32 elements of each head by the orthonormal Hadamard matrix, whose element (i, j) is
// (-1)^bitCount(i & j) / sqrt(32). A head of x has `head` elements, padded with zeros. A head of y has
// `head_out` elements. A thread computes four elements from its block's 32.
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint head, head_out, n_heads;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { float y[]; };

void main() {
    const uint quads = (max(head, head_out) + 31) / 32 * 8; // of a head
    const uint own = global_index() % quads;
    const uint number = global_index() / quads;
    if (number >= n_heads || 4 * own >= head_out) return;
    vec4 sum = vec4(0.0);
    for (uint i = 0; i < 8; ++i) {
        const uint e = (own & ~7u) * 4 + 4 * i;
        if (e >= head) break;
        const uint at = x_off + number * head + e;
        const float factor = (bitCount(i & own & 7u) & 1) == 0 ? 1.0 : -1.0;
        sum += factor * vec4(x[at], x[at + 1], x[at + 2], x[at + 3]);
    }
    const vec2 even = sum.xz + sum.yw; // pairs within the quad
    const vec2 odd = sum.xz - sum.yw;
    const float scale = 0.17677669529663687; // 1 / sqrt(32)
    const uint to = y_off + number * head_out + 4 * own;
    y[to] = scale * (even.x + even.y);
    y[to + 1] = scale * (odd.x + odd.y);
    y[to + 2] = scale * (even.x - even.y);
    y[to + 3] = scale * (odd.x - odd.y);
}
