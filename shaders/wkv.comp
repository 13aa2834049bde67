#version 450
#extension GL_GOOGLE_include_directive : require
// Compute the scan of RWKV-7 row by row (Peng et al. 2025, arXiv:2503.14456). The state M [S, S] is indexed
// by key, then by value. With w = exp(-e^(-1/2) sigmoid(decay)), a row computes M = diag(w) M - added (M^T
// removed)^T + key v^T and y = M^T r. The workgroup ID is (values of a head, head, run). A thread keeps a
// part of one column of M in registers during the run, so the state may change in place. A row takes 8 * S *
// S operations per head. The shader takes at most 15 KiB of shared memory.
#include "lib/types.glsl"

layout(constant_id = 1) const uint S = 64; // head size, a multiple of 4
layout(constant_id = 2) const uint COLUMNS = 32; // per workgroup; divides S
layout(constant_id = 3) const uint ROWS = 8; // per tile
layout(constant_id = 4) const uint ROW_STATES = 0; // 1: write the state after each row, to the row's cell

layout(push_constant) uniform Push {
    uint r_off, decay_off, key_off, v_off, removed_off, added_off, state_off, y_off;
    uint n_heads, n_rows;
};
layout(set = 0, binding = 0) readonly buffer R { float r[]; };
layout(set = 0, binding = 1) readonly buffer Decay { float decay[]; };
layout(set = 0, binding = 2) readonly buffer Key { float key[]; };
layout(set = 0, binding = 3) readonly buffer V { float v[]; };
layout(set = 0, binding = 4) readonly buffer Removed { float removed[]; };
layout(set = 0, binding = 5) readonly buffer Added { float added[]; };
layout(set = 0, binding = 6) buffer State { float state[]; };
layout(set = 0, binding = 7) writeonly buffer Y { float y[]; };

#define STEP_BINDING 8
#include "lib/step.glsl"
#include "lib/runs.glsl"

const uint PARTS = LOCAL / COLUMNS; // parts of a column, one per thread
const uint QUADS = S / 4 / PARTS; // per part
const float SLOWEST = 0.606531; // e^(-1/2), as in the authors' code

shared vec4 row_r[ROWS * S / 4];
shared vec4 row_w[ROWS * S / 4];
shared vec4 row_key[ROWS * S / 4];
shared vec4 row_removed[ROWS * S / 4];
shared vec4 row_added[ROWS * S / 4];
shared float known[2 * LOCAL]; // rows alternate between halves; threads may still read the row before
shared float sums[ROWS * LOCAL];

float sum_of(vec4 x) { return (x.x + x.y) + (x.z + x.w); }

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint h = gl_WorkGroupID.y;
    const uint column = thread % COLUMNS;
    const uint part = thread / COLUMNS;
    const uint j0 = gl_WorkGroupID.x * COLUMNS;
    if (gl_WorkGroupID.z == 0) {
        for (uint row = step_n_rows() + part; row < n_rows; row += PARTS) {
            y[y_off + (row * n_heads + h) * S + j0 + column] = 0.0;
        }
    }
    if (gl_WorkGroupID.z >= step_n_runs()) return;
    const uvec4 run = step_params.runs[gl_WorkGroupID.z];
    const uint own = (h * S + 4 * part * QUADS) * S + j0 + column;
    const uint from = state_off + cell_from(gl_WorkGroupID.z) * n_heads * S * S + own;
    const uint to = state_off + cell_to(gl_WorkGroupID.z) * n_heads * S * S + own;

    vec4 m[QUADS];
    [[unroll]] for (uint q = 0; q < QUADS; ++q) {
        [[unroll]] for (uint i = 0; i < 4; ++i) m[q][i] = is_fresh(run) ? 0.0 : state[from + (4 * q + i) * S];
    }
    for (uint tile = 0; tile < run.z; tile += ROWS) {
        const uint n = min(run.z - tile, ROWS);
        const uint row = run.y + tile;
        for (uint i = thread; i < n * S; i += LOCAL) {
            const uint at = ((row + i / S) * n_heads + h) * S + i % S;
            row_r[i / 4][i % 4] = r[r_off + at];
            row_w[i / 4][i % 4] = exp(-SLOWEST / (1.0 + exp(min(-decay[decay_off + at], 87.0))));
            row_key[i / 4][i % 4] = key[key_off + at];
            row_removed[i / 4][i % 4] = removed[removed_off + at];
            row_added[i / 4][i % 4] = added[added_off + at];
        }
        barrier();
        for (uint t = 0; t < n; ++t) {
            const uint at = t * (S / 4) + part * QUADS;
            const uint half_at = t % 2 * LOCAL;
            vec4 products = vec4(0.0);
            [[unroll]] for (uint q = 0; q < QUADS; ++q) products += m[q] * row_removed[at + q];
            known[half_at + thread] = sum_of(products);
            barrier();
            float old = 0.0;
            for (uint p = 0; p < PARTS; ++p) old += known[half_at + p * COLUMNS + column];
            const float value = v[v_off + ((row + t) * n_heads + h) * S + j0 + column];
            products = vec4(0.0);
            [[unroll]] for (uint q = 0; q < QUADS; ++q) {
                m[q] = row_w[at + q] * m[q] - old * row_added[at + q] + value * row_key[at + q];
                products += m[q] * row_r[at + q];
            }
            sums[t * LOCAL + thread] = sum_of(products);
            const uint cell = ROW_STATES != 0 ? cell_after(row + t) : 0;
            if (ROW_STATES != 0 && (tile + t + 1 == run.z || cell != cell_after(row + t + 1))) {
                const uint after = state_off + cell * n_heads * S * S + own;
                [[unroll]] for (uint q = 0; q < QUADS; ++q) {
                    [[unroll]] for (uint i = 0; i < 4; ++i) state[after + (4 * q + i) * S] = m[q][i];
                }
            }
        }
        barrier();
        for (uint i = thread; i < n * COLUMNS; i += LOCAL) {
            float sum = 0.0;
            for (uint p = 0; p < PARTS; ++p) sum += sums[i / COLUMNS * LOCAL + p * COLUMNS + i % COLUMNS];
            y[y_off + ((row + i / COLUMNS) * n_heads + h) * S + j0 + i % COLUMNS] = sum;
        }
        barrier();
    }
    if (ROW_STATES != 0) return;
    [[unroll]] for (uint q = 0; q < QUADS; ++q) {
        [[unroll]] for (uint i = 0; i < 4; ++i) state[to + (4 * q + i) * S] = m[q][i];
    }
}
