#version 450
#extension GL_GOOGLE_include_directive : require
// Compute the selective scan of Mamba-1 row by row (Gu and Dao 2023, arXiv:2312.00752). Each channel has a
// state m [N], and each value of m has its own decay a. With t = softplus(dt), a row computes m = e^(t a) m +
// t B x and y = C m + d x. All channels share B and C. The workgroup ID is (channels, 1, run). A thread keeps
// a part of a channel's state in registers during the run, so the state may change in place. Per row and
// channel, this takes N exponentials and 6 * N other operations. The shader takes at most 16 KiB of shared
// memory.
#include "lib/types.glsl"

layout(constant_id = 1) const uint N = 16; // size of B and C, a multiple of 4
layout(constant_id = 2) const uint COLUMNS = 32; // channels per workgroup
layout(constant_id = 3) const uint ROWS = 8; // per tile
layout(constant_id = 4) const uint ROW_STATES = 0; // 1: write the state after each row, to the row's cell

layout(push_constant) uniform Push {
    uint x_off, dt_off, b_off, c_off, a_off, d_off, state_off, y_off;
    uint width, n_rows;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer Dt { float dt[]; };
layout(set = 0, binding = 2) readonly buffer B { float b[]; };
layout(set = 0, binding = 3) readonly buffer C { float c[]; };
layout(set = 0, binding = 4) readonly buffer A { float a[]; };
layout(set = 0, binding = 5) readonly buffer D { float d[]; };
layout(set = 0, binding = 6) buffer State { float state[]; };
layout(set = 0, binding = 7) writeonly buffer Y { float y[]; };

#define STEP_BINDING 8
#include "lib/step.glsl"
#include "lib/runs.glsl"
#include "lib/softplus.glsl"

const uint PARTS = LOCAL / COLUMNS; // parts of a channel's state, one per thread
const uint QUADS = N / 4 / PARTS; // per part

shared vec4 row_b[ROWS * N / 4];
shared vec4 row_c[ROWS * N / 4];
shared float own_x[ROWS * COLUMNS];
shared float steps[ROWS * COLUMNS];
shared float sums[ROWS * LOCAL];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint column = thread % COLUMNS;
    const uint part = thread / COLUMNS;
    const uint j0 = (gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x) * COLUMNS;
    const bool is_inside = j0 + column < width;
    if (gl_WorkGroupID.z == 0 && is_inside) {
        for (uint row = step_n_rows() + part; row < n_rows; row += PARTS) {
            y[y_off + row * width + j0 + column] = 0.0;
        }
    }
    if (gl_WorkGroupID.z >= step_n_runs()) return;
    const uvec4 run = step_params.runs[gl_WorkGroupID.z];
    const uint own = min(j0 + column, width - 1) * N + 4 * part * QUADS;
    const uint from = state_off + cell_from(gl_WorkGroupID.z) * width * N + own;
    const uint to = state_off + cell_to(gl_WorkGroupID.z) * width * N + own;

    vec4 m[QUADS];
    vec4 decay[QUADS];
    [[unroll]] for (uint q = 0; q < QUADS; ++q) {
        [[unroll]] for (uint i = 0; i < 4; ++i) {
            m[q][i] = is_fresh(run) ? 0.0 : state[from + 4 * q + i];
            decay[q][i] = a[a_off + own + 4 * q + i];
        }
    }
    for (uint tile = 0; tile < run.z; tile += ROWS) {
        const uint n = min(run.z - tile, ROWS);
        const uint row = run.y + tile;
        for (uint i = thread; i < n * N; i += LOCAL) {
            row_b[i / 4][i % 4] = b[b_off + row * N + i];
            row_c[i / 4][i % 4] = c[c_off + row * N + i];
        }
        for (uint i = thread; i < n * COLUMNS; i += LOCAL) {
            const uint at = (row + i / COLUMNS) * width + min(j0 + i % COLUMNS, width - 1);
            own_x[i] = x[x_off + at];
            steps[i] = softplus(dt[dt_off + at]);
        }
        barrier();
        for (uint t = 0; t < n; ++t) {
            const float time = steps[t * COLUMNS + column];
            const float add = time * own_x[t * COLUMNS + column];
            const uint at = t * (N / 4) + part * QUADS;
            float sum = 0.0;
            [[unroll]] for (uint q = 0; q < QUADS; ++q) {
                m[q] = exp(time * decay[q]) * m[q] + add * row_b[at + q];
                sum += dot(m[q], row_c[at + q]);
            }
            sums[t * LOCAL + thread] = sum;
            const uint cell = ROW_STATES != 0 ? cell_after(row + t) : 0;
            if (ROW_STATES != 0 && is_inside && (tile + t + 1 == run.z || cell != cell_after(row + t + 1))) {
                const uint after = state_off + cell * width * N + own;
                [[unroll]] for (uint q = 0; q < QUADS; ++q) {
                    [[unroll]] for (uint i = 0; i < 4; ++i) state[after + 4 * q + i] = m[q][i];
                }
            }
        }
        barrier();
        for (uint i = thread; i < n * COLUMNS; i += LOCAL) {
            const uint channel = j0 + i % COLUMNS;
            if (channel < width) {
                float sum = d[d_off + channel] * own_x[i];
                for (uint p = 0; p < PARTS; ++p) sum += sums[i / COLUMNS * LOCAL + p * COLUMNS + i % COLUMNS];
                y[y_off + (row + i / COLUMNS) * width + channel] = sum;
            }
        }
        barrier();
    }
    if (ROW_STATES != 0 || !is_inside) return;
    [[unroll]] for (uint q = 0; q < QUADS; ++q) {
        [[unroll]] for (uint i = 0; i < 4; ++i) state[to + 4 * q + i] = m[q][i];
    }
}
