#version 450
#extension GL_GOOGLE_include_directive : require
// Compute, for all chunks of C rows at once, the intermediate results of a gated delta net that do not depend
// on the state. The shader delta_scan computes the outputs from them. The workgroup ID is (chunk, head). Let
// c_t be the sum of g up to row t of the chunk, and D_ts = e^(c_t - c_s). All exponents are at most 0,
// because g <= 0.
//   L_ts = beta_t k_t D_ts k_s, s < t;  u = (I + L)^-1 beta v;  w = (I + L)^-1 beta e^c k
//   q' = scale e^c q;  k' = e^(c_last - c) k;  P_ts = scale q_t D_ts k_s, s <= t.
// A row of `work` holds u, w, q', k' and e^c_last of S values each, then C products P. Only the chunk's first
// row holds e^c_last. The shader takes at most 10.6 KiB of shared memory.
#include "lib/types.glsl"

layout(constant_id = 1) const uint S = 128; // head size
layout(constant_id = 2) const uint KDA = 0; // 1: one g per key channel
layout(constant_id = 3) const uint C = 64; // rows of a chunk

layout(push_constant) uniform Push {
    uint q_off, k_off, v_off, g_off, beta_off, work_off;
    uint n_heads, n_k, tiled, q_stride, v_stride, n_rows;
    float scale;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer K { float k[]; };
layout(set = 0, binding = 2) readonly buffer V { float v[]; };
layout(set = 0, binding = 3) readonly buffer G { float g[]; };
layout(set = 0, binding = 4) readonly buffer Beta { float beta[]; };
layout(set = 0, binding = 5) writeonly buffer Work { float work[]; };

#define STEP_BINDING 6
#include "lib/step.glsl"
#include "lib/runs.glsl"
#include "lib/delta.glsl"

const uint GATES = KDA != 0 ? S : 1;
const uint STRIDE = 5 * S + C;

shared float sums[C * GATES];
shared float lower[C * (C - 1) / 2]; // row t of L begins at t * (t - 1) / 2

float gate_sum(uint t, uint i) { return sums[t * GATES + (KDA != 0 ? i : 0)]; }

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint h = gl_WorkGroupID.y;
    const Tile chunk = find_tile(gl_WorkGroupID.x, C);
    if (chunk.n == 0) return;
    const uint n = chunk.n;
    const uint first = chunk.run.y + chunk.first;
    const uint k_at = k_off + first * q_stride + key_head(h) * S;
    const uint q_at = q_off + first * q_stride + key_head(h) * S;
    const uint v_at = v_off + first * v_stride + h * S;
    const uint beta_at = beta_off + first * n_heads + h;
    const uint work_at = work_off + (first * n_heads + h) * STRIDE;
    const uint next = n_heads * STRIDE;

    for (uint i = thread; i < GATES; i += LOCAL) {
        float sum = 0.0;
        for (uint t = 0; t < n; ++t) {
            sum += g[gate_at(first + t, h) + i];
            sums[t * GATES + i] = sum;
        }
    }
    barrier();

    for (uint pair = thread; pair < n * n; pair += LOCAL) {
        const uint t = pair / n;
        const uint s = pair % n;
        if (s > t) continue;
        float kk = 0.0;
        float qk = 0.0;
        for (uint i = 0; i < S; ++i) {
            float value = k[k_at + s * q_stride + i];
            if (KDA != 0) value *= exp(gate_sum(t, i) - gate_sum(s, i));
            kk += k[k_at + t * q_stride + i] * value;
            qk += q[q_at + t * q_stride + i] * value;
        }
        const float decay = KDA != 0 ? 1.0 : exp(gate_sum(t, 0) - gate_sum(s, 0));
        work[work_at + t * next + 5 * S + s] = scale * decay * qk;
        if (s < t) lower[t * (t - 1) / 2 + s] = beta[beta_at + t * n_heads] * decay * kk;
    }
    barrier();

    for (uint column = thread; column < 2 * S; column += LOCAL) { // u, then w
        const bool is_u = column < S;
        const uint i = is_u ? column : column - S;
        float solved[C];
        for (uint t = 0; t < n; ++t) {
            float value = is_u ? v[v_at + t * v_stride + i] : k[k_at + t * q_stride + i] * exp(gate_sum(t, i));
            value *= beta[beta_at + t * n_heads];
            const uint row = t * (t - 1) / 2; // 0 for t = 0
            for (uint s = 0; s < t; ++s) value -= lower[row + s] * solved[s];
            solved[t] = value;
            work[work_at + t * next + column] = value;
        }
    }
    for (uint e = thread; e < n * S; e += LOCAL) {
        const uint t = e / S;
        const uint i = e % S;
        work[work_at + t * next + 2 * S + i] = scale * q[q_at + t * q_stride + i] * exp(gate_sum(t, i));
        work[work_at + t * next + 3 * S + i] = k[k_at + t * q_stride + i] * exp(gate_sum(n - 1, i) - gate_sum(t, i));
        if (t == 0) work[work_at + 4 * S + i] = exp(gate_sum(n - 1, i));
    }
}
