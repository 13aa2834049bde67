#version 450
#extension GL_GOOGLE_include_directive : require
// Compute the router's logits[r, e] = sum over k of h[r, k] * (w_norm[k] * w[e, k]). One workgroup computes N
// rows of one expert. All devices must choose the same experts, so logits have the same bits on all devices.
// Therefore 32 lanes sum in a fixed order, a tree adds their sums, and each product is rounded before it is
// added. The row h is not normalised, because drivers round the norm's factor differently, and the factor
// does not change the logits' order. Some drivers flush subnormal products to zero, but these products do not
// change a rounded sum above 2^-100.
#include "lib/types.glsl"

layout(constant_id = 1) const uint N = 1; // rows per workgroup, which reads w once for all; at most 32

layout(push_constant) uniform Push {
    uint h_off, w_norm_off, w_off, logits_off;
    uint n_embd, n_experts, n_rows;
};
layout(set = 0, binding = 0) readonly buffer H { float h[]; };
layout(set = 0, binding = 1) readonly buffer WNorm { float w_norm[]; };
layout(set = 0, binding = 2) readonly buffer W { float w[]; };
layout(set = 0, binding = 3) writeonly buffer Logits { float logits[]; };

shared float tree[N * LOCAL];

void main() {
    const uint lane = gl_LocalInvocationID.x;
    const uint expert = group_index();
    const uint first_row = gl_WorkGroupID.z * N;
    if (expert >= n_experts) return;

    precise float sum[N];
    for (uint r = 0; r < N; ++r) sum[r] = 0.0;
    for (uint k = lane; k < n_embd; k += LOCAL) {
        precise const float weight = w_norm[w_norm_off + k] * w[w_off + expert * n_embd + k];
        for (uint r = 0; r < N; ++r) {
            const uint row = min(first_row + r, n_rows - 1); // surplus rows repeat the last row
            precise const float product = h[h_off + row * n_embd + k] * weight;
            sum[r] = sum[r] + product;
        }
    }

    for (uint r = 0; r < N; ++r) tree[r * LOCAL + lane] = sum[r];
    barrier();
    for (uint s = LOCAL / 2; s > 0; s >>= 1) {
        if (lane < s) {
            for (uint r = 0; r < N; ++r) {
                precise const float joined = tree[r * LOCAL + lane] + tree[r * LOCAL + lane + s];
                tree[r * LOCAL + lane] = joined;
            }
        }
        barrier();
    }
    if (lane < N && first_row + lane < n_rows) {
        logits[logits_off + (first_row + lane) * n_experts + expert] = tree[lane * LOCAL];
    }
}
