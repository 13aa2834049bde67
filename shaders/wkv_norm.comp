#version 450
#extension GL_GOOGLE_include_directive : require
// Normalise each head of RWKV-7's result and add the row's own value (Peng et al. 2025, arXiv:2503.14456): y =
// (x - mean(x)) / sqrt(var(x) + eps) * w + b + v sum(r key bonus).
#include "lib/types.glsl"
#include "lib/reduce.glsl"

layout(push_constant) uniform Push {
    uint x_off, r_off, key_off, v_off, bonus_off, w_off, b_off, y_off;
    uint size, n_heads, n_rows;
    float eps;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer R { float r[]; };
layout(set = 0, binding = 2) readonly buffer Key { float key[]; };
layout(set = 0, binding = 3) readonly buffer V { float v[]; };
layout(set = 0, binding = 4) readonly buffer Bonus { float bonus[]; };
layout(set = 0, binding = 5) readonly buffer W { float w[]; };
layout(set = 0, binding = 6) readonly buffer B { float b[]; };
layout(set = 0, binding = 7) writeonly buffer Y { float y[]; };

void main() {
    const uint head = group_index();
    if (head >= n_rows * n_heads) return;
    const uint first = head * size;
    const uint channel = head % n_heads * size;
    float sum = 0.0;
    float products = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < size; i += LOCAL) {
        sum += x[x_off + first + i];
        products += r[r_off + first + i] * key[key_off + first + i] * bonus[bonus_off + channel + i];
    }
    const float mean = reduce_sum(sum) / float(size);
    const float own = reduce_sum(products);
    float squares = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < size; i += LOCAL) {
        const float apart = x[x_off + first + i] - mean;
        squares += apart * apart;
    }
    const float scale = 1.0 / sqrt(reduce_sum(squares) / float(size) + eps);
    for (uint i = gl_LocalInvocationID.x; i < size; i += LOCAL) {
        const uint at = channel + i;
        const float normed = (x[x_off + first + i] - mean) * scale * w[w_off + at] + b[b_off + at];
        y[y_off + first + i] = normed + own * v[v_off + first + i];
    }
}
