#version 450
#extension GL_GOOGLE_include_directive : require
// Process the chunks of each run in order. `work` holds u, w, q', k', e^c_last and the products P from
// delta_chunk. The state is M [key, value]:
//   x = u - w M;  o = q' M + P x;  M = e^c_last M + k'^T x.
// The workgroup ID is (16 columns of M, head, run). The shader takes at most 12 KiB of shared memory.
#include "lib/types.glsl"

layout(constant_id = 1) const uint S = 128; // head size, a multiple of 16
layout(constant_id = 2) const uint C = 64; // rows of a chunk

layout(push_constant) uniform Push {
    uint work_off, state_off, y_off;
    uint n_heads, n_rows;
};
layout(set = 0, binding = 0) readonly buffer Work { float work[]; };
layout(set = 0, binding = 1) buffer State { float state[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

#define STEP_BINDING 3
#include "lib/step.glsl"
#include "lib/runs.glsl"

const uint COLUMNS = 16;
const uint GROUPS = LOCAL / COLUMNS; // groups of threads, with some rows each
const uint ROWS = 4; // rows that share one read of M
const uint STRIDE = 5 * S + C;

shared float m[S * COLUMNS];
shared float x[C * COLUMNS];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint h = gl_WorkGroupID.y;
    const uint column = thread % COLUMNS;
    const uint group = thread / COLUMNS;
    const uint j = gl_WorkGroupID.x * COLUMNS + column;
    if (gl_WorkGroupID.z == 0) {
        for (uint row = step_n_rows() + group; row < n_rows; row += GROUPS) {
            y[y_off + (row * n_heads + h) * S + j] = 0.0;
        }
    }
    if (gl_WorkGroupID.z >= step_n_runs()) return;
    const uvec4 run = step_params.runs[gl_WorkGroupID.z];
    const uint from = state_off + (cell_from(gl_WorkGroupID.z) * n_heads + h) * S * S + j;
    const uint to = state_off + (cell_to(gl_WorkGroupID.z) * n_heads + h) * S * S + j;
    const uint next = n_heads * STRIDE;

    for (uint i = group; i < S; i += GROUPS) m[i * COLUMNS + column] = is_fresh(run) ? 0.0 : state[from + i * S];
    barrier();
    for (uint first = 0; first < run.z; first += C) {
        const uint n = min(run.z - first, C);
        const uint at = work_off + ((run.y + first) * n_heads + h) * STRIDE;
        const uint out_at = y_off + ((run.y + first) * n_heads + h) * S + j;

        for (uint t0 = group * ROWS; t0 < n; t0 += GROUPS * ROWS) {
            float sum[ROWS];
            [[unroll]] for (uint a = 0; a < ROWS; ++a) sum[a] = t0 + a < n ? work[at + (t0 + a) * next + j] : 0.0;
            for (uint i = 0; i < S; ++i) {
                const float value = m[i * COLUMNS + column];
                [[unroll]] for (uint a = 0; a < ROWS; ++a) sum[a] -= work[at + min(t0 + a, n - 1) * next + S + i] * value;
            }
            [[unroll]] for (uint a = 0; a < ROWS; ++a) {
                if (t0 + a < n) x[(t0 + a) * COLUMNS + column] = sum[a];
            }
        }
        barrier();
        for (uint t0 = group * ROWS; t0 < n; t0 += GROUPS * ROWS) {
            float sum[ROWS];
            [[unroll]] for (uint a = 0; a < ROWS; ++a) sum[a] = 0.0;
            for (uint i = 0; i < S; ++i) {
                const float value = m[i * COLUMNS + column];
                [[unroll]] for (uint a = 0; a < ROWS; ++a) sum[a] += work[at + min(t0 + a, n - 1) * next + 2 * S + i] * value;
            }
            for (uint s = 0; s < min(t0 + ROWS, n); ++s) {
                const float value = x[s * COLUMNS + column];
                [[unroll]] for (uint a = 0; a < ROWS; ++a) {
                    if (s <= t0 + a) sum[a] += work[at + min(t0 + a, n - 1) * next + 5 * S + s] * value;
                }
            }
            [[unroll]] for (uint a = 0; a < ROWS; ++a) {
                if (t0 + a < n) y[out_at + (t0 + a) * n_heads * S] = sum[a];
            }
        }
        barrier();
        for (uint i = group; i < S; i += GROUPS) {
            float sum = work[at + 4 * S + i] * m[i * COLUMNS + column];
            for (uint t = 0; t < n; ++t) sum += work[at + t * next + 3 * S + i] * x[t * COLUMNS + column];
            m[i * COLUMNS + column] = sum;
        }
        barrier();
    }
    for (uint i = group; i < S; i += GROUPS) state[to + i * S] = m[i * COLUMNS + column];
}
