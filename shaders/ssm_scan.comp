#version 450
#extension GL_GOOGLE_include_directive : require
// Compute the scan of Mamba-2 row by row (Dao and Gu 2024, arXiv:2405.21060). With the state M [N, P] and t =
// softplus(dt + bias), a row computes M = e^(t a) M + t B x^T and y = M^T C + d x. The workgroup ID is
// (columns of M, head, run). A thread keeps a part of one column in registers during the run, so the state
// may change in place. This scan takes 5 * N * P operations per row and head. A scan in chunks of C rows
// would take 4 * N * P + 2 * C * P operations. The shader takes at most 14 KiB of shared memory.
#include "lib/types.glsl"

layout(constant_id = 1) const uint P = 64; // head size
layout(constant_id = 2) const uint N = 128; // size of B and C, a multiple of 4
layout(constant_id = 3) const uint COLUMNS = 32; // per workgroup; divides P
layout(constant_id = 4) const uint ROWS = 8; // per tile
layout(constant_id = 5) const uint ROW_STATES = 0; // 1: write the state after each row, to the row's cell

layout(push_constant) uniform Push {
    uint x_off, bc_off, dt_off, bias_off, a_off, d_off, state_off, y_off;
    uint n_heads, n_groups, group, first, n_rows;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer BC { float bc[]; };
layout(set = 0, binding = 2) readonly buffer Dt { float dt[]; };
layout(set = 0, binding = 3) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = 4) readonly buffer A { float a[]; };
layout(set = 0, binding = 5) readonly buffer D { float d[]; };
layout(set = 0, binding = 6) buffer State { float state[]; };
layout(set = 0, binding = 7) writeonly buffer Y { float y[]; };

#define STEP_BINDING 8
#include "lib/step.glsl"
#include "lib/runs.glsl"
#include "lib/softplus.glsl"

const uint PARTS = LOCAL / COLUMNS; // parts of a column, one per thread
const uint QUADS = N / 4 / PARTS; // per part

shared vec4 b[ROWS * N / 4];
shared vec4 c[ROWS * N / 4];
shared float own_x[ROWS * COLUMNS];
shared float steps[ROWS];
shared float kept[ROWS];
shared float sums[ROWS * LOCAL];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint h = gl_WorkGroupID.y;
    const uint column = thread % COLUMNS;
    const uint part = thread / COLUMNS;
    const uint j0 = gl_WorkGroupID.x * COLUMNS;
    if (gl_WorkGroupID.z == 0) {
        for (uint row = step_n_rows() + part; row < n_rows; row += PARTS) {
            y[y_off + (row * n_heads + h) * P + j0 + column] = 0.0;
        }
    }
    if (gl_WorkGroupID.z >= step_n_runs()) return;
    const uvec4 run = step_params.runs[gl_WorkGroupID.z];
    const uint g = (h + first) / group;
    const uint own = 4 * part * QUADS * P + j0 + column;
    const uint from = state_off + (cell_from(gl_WorkGroupID.z) * n_heads + h) * N * P + own;
    const uint to = state_off + (cell_to(gl_WorkGroupID.z) * n_heads + h) * N * P + own;

    vec4 m[QUADS];
    [[unroll]] for (uint q = 0; q < QUADS; ++q) {
        [[unroll]] for (uint i = 0; i < 4; ++i) m[q][i] = is_fresh(run) ? 0.0 : state[from + (4 * q + i) * P];
    }
    for (uint tile = 0; tile < run.z; tile += ROWS) {
        const uint n = min(run.z - tile, ROWS);
        const uint row = run.y + tile;
        for (uint i = thread; i < n * N; i += LOCAL) {
            const uint at = bc_off + ((row + i / N) * 2 * n_groups + g) * N + i % N;
            b[i / 4][i % 4] = bc[at];
            c[i / 4][i % 4] = bc[at + n_groups * N];
        }
        for (uint i = thread; i < n * COLUMNS; i += LOCAL) {
            own_x[i] = x[x_off + ((row + i / COLUMNS) * n_heads + h) * P + j0 + i % COLUMNS];
        }
        for (uint i = thread; i < n; i += LOCAL) {
            steps[i] = softplus(dt[dt_off + (row + i) * n_heads + h] + bias[bias_off + h]);
            kept[i] = exp(steps[i] * a[a_off + h]);
        }
        barrier();
        for (uint t = 0; t < n; ++t) {
            const float keep = kept[t];
            const float add = steps[t] * own_x[t * COLUMNS + column];
            const uint at = t * (N / 4) + part * QUADS;
            float sum = 0.0;
            [[unroll]] for (uint q = 0; q < QUADS; ++q) {
                m[q] = keep * m[q] + add * b[at + q];
                sum += dot(m[q], c[at + q]);
            }
            sums[t * LOCAL + thread] = sum;
            const uint cell = ROW_STATES != 0 ? cell_after(row + t) : 0;
            if (ROW_STATES != 0 && (tile + t + 1 == run.z || cell != cell_after(row + t + 1))) {
                const uint after = state_off + (cell * n_heads + h) * N * P + own;
                [[unroll]] for (uint q = 0; q < QUADS; ++q) {
                    [[unroll]] for (uint i = 0; i < 4; ++i) state[after + (4 * q + i) * P] = m[q][i];
                }
            }
        }
        barrier();
        for (uint i = thread; i < n * COLUMNS; i += LOCAL) {
            float sum = d[d_off + h] * own_x[i];
            for (uint p = 0; p < PARTS; ++p) sum += sums[i / COLUMNS * LOCAL + p * COLUMNS + i % COLUMNS];
            y[y_off + ((row + i / COLUMNS) * n_heads + h) * P + j0 + i % COLUMNS] = sum;
        }
        barrier();
    }
    if (ROW_STATES != 0) return;
    [[unroll]] for (uint q = 0; q < QUADS; ++q) {
        [[unroll]] for (uint i = 0; i < 4; ++i) state[to + (4 * q + i) * P] = m[q][i];
    }
}
