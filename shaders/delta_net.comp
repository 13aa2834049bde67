#version 450
#extension GL_GOOGLE_include_directive : require
// Compute the gated delta rule row by row, for short runs. Only one invocation reads and writes column j of
// the state M [key i, value j], so M may change in place. With d = beta (v - (e^g M)^T k), the new state is
// M' = e^g M + k d^T and the output is o = scale M'^T q.
#include "lib/types.glsl"

layout(constant_id = 1) const uint S = 128; // head size
layout(constant_id = 2) const uint KDA = 0; // 1: one g per key channel
layout(constant_id = 3) const uint ROW_STATES = 0; // 1: write the state after each row, to the row's cell

layout(push_constant) uniform Push {
    uint q_off, k_off, v_off, g_off, beta_off, state_off, y_off;
    uint n_heads, n_k, tiled, q_stride, v_stride, n_rows;
    float scale;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer K { float k[]; };
layout(set = 0, binding = 2) readonly buffer V { float v[]; };
layout(set = 0, binding = 3) readonly buffer G { float g[]; };
layout(set = 0, binding = 4) readonly buffer Beta { float beta[]; };
layout(set = 0, binding = 5) buffer State { float state[]; };
layout(set = 0, binding = 6) writeonly buffer Y { float y[]; };

#define STEP_BINDING 7
#include "lib/step.glsl"
#include "lib/runs.glsl"
#include "lib/delta.glsl"

shared float decay[S];
shared float key[S];
shared float query[S];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint j = gl_WorkGroupID.x * LOCAL + thread;
    const uint h = gl_WorkGroupID.y;
    if (gl_WorkGroupID.z >= step_n_runs()) {
        // Workgroups after the last run clear the rows outside all runs.
        const uint row = step_n_rows() + gl_WorkGroupID.z - step_n_runs();
        if (row < n_rows) y[y_off + (row * n_heads + h) * S + j] = 0.0;
        return;
    }
    const uvec4 run = step_params.runs[gl_WorkGroupID.z];
    uint to = state_off + (cell_to(gl_WorkGroupID.z) * n_heads + h) * S * S + j;
    uint from = state_off + (cell_from(gl_WorkGroupID.z) * n_heads + h) * S * S + j;
    bool is_zero = is_fresh(run);

    for (uint row = run.y; row < run.y + run.z; ++row) {
        barrier(); // all threads have used the row before
        for (uint i = thread; i < S; i += LOCAL) {
            const uint at = row * q_stride + key_head(h) * S + i;
            decay[i] = exp(g[gate_at(row, h) + (KDA != 0 ? i : 0)]);
            key[i] = k[k_off + at];
            query[i] = q[q_off + at];
        }
        barrier();
        if (ROW_STATES != 0) to = state_off + (cell_after(row) * n_heads + h) * S * S + j;
        float mk = 0.0;
        float mq = 0.0;
        float kq = 0.0;
        for (uint i = 0; i < S; ++i) {
            const float m = is_zero ? 0.0 : decay[i] * state[from + i * S];
            mk += m * key[i];
            mq += m * query[i];
            kq += key[i] * query[i];
        }
        const float d = beta[beta_off + row * n_heads + h] * (v[v_off + row * v_stride + h * S + j] - mk);
        for (uint i = 0; i < S; ++i) {
            const float m = is_zero ? 0.0 : decay[i] * state[from + i * S];
            state[to + i * S] = m + key[i] * d;
        }
        y[y_off + (row * n_heads + h) * S + j] = scale * (mq + kq * d);
        from = to;
        is_zero = false;
    }
}
