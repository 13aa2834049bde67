#version 450
#extension GL_GOOGLE_include_directive : require
// For each row, compute the indexer's scores of the complete blocks of `block_size` positions up to pos
// (DeepSeek-AI 2025, arXiv:2512.02556). A score is the sum over the indexer's heads of w * max(q . k, 0),
// where k is the key in the block's cell. The workgroup ID is (LOCAL blocks, -, row). Each thread scores one
// block. A thread reads a key once for HEADS heads. Rows with at most n_best complete blocks get no scores.
#include "lib/types.glsl"
#include "lib/cache_types.glsl"
#include "lib/iq4_values.glsl"

layout(constant_id = 1) const uint HEAD = 128; // values of a key
layout(constant_id = 2) const uint HEADS = 8;
layout(constant_id = 3) const uint K_TYPE = 1;
layout(constant_id = 4) const uint BATCH = 1; // quads in flight
layout(constant_id = 5) const uint HAS_W = 1; // 0: all weights are 1

layout(push_constant) uniform Push {
    uint q_off, w_off, k_off, cells_off, y_off;
    uint n_heads, n_rows, first_row, blocks_per_slot, n_positions, block_size, cells_per_block, n_best;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer W { float w[]; };
layout(set = 0, binding = 2) readonly buffer K { uint k[]; };
layout(set = 0, binding = 3) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 4) writeonly buffer Y { float y[]; };

#define STEP_BINDING 5
#include "lib/step.glsl"
#include "lib/step_rows.glsl"
#include "lib/cells.glsl"
#define CACHE(i) k[i]
#define CACHE_OFF k_off
#define CACHE_TYPE K_TYPE
#define CACHE_QUAD k_quad
#define CACHE_BLOCK_QUAD k_block_quad
#include "lib/cache.glsl"

const uint QUADS = HEAD / 4;

shared vec4 q_tile[HEADS * QUADS];
shared float w_tile[HEADS];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint row = gl_WorkGroupID.z;
    if (first_row + row >= step_n_rows_from_buffer()) return;
    const uvec2 place = step_place(first_row + row);
    const uint pos = place.x;
    const uint slot = place.y;
    const uint n = (pos + 1) / block_size;
    if (n <= n_best || gl_WorkGroupID.x * LOCAL >= n) return;
    const uint own = gl_WorkGroupID.x * LOCAL + thread;
    const uint seen = min(own + 1, n) * block_size - 1; // cells of later positions may be uninitialised
    const uint block = block_cell(slot, seen / CELL_BLOCK) / CELL_BLOCK;
    const uint base = cell_in_block(block, seen, block_size, cells_per_block) * QUADS;

    float sum = 0.0;
    for (uint first = 0; first < n_heads; first += HEADS) {
        barrier();
        for (uint e = thread; e < HEADS * QUADS; e += LOCAL) {
            const uint head = first + e / QUADS;
            const uint at = q_off + (row * n_heads + min(head, n_heads - 1)) * HEAD + 4 * (e % QUADS);
            q_tile[e] = vec4(q[at], q[at + 1], q[at + 2], q[at + 3]);
        }
        for (uint a = thread; a < HEADS; a += LOCAL) {
            const bool is_head = first + a < n_heads;
            w_tile[a] = HAS_W == 0 ? float(is_head) : is_head ? w[w_off + row * n_heads + first + a] : 0.0;
        }
        barrier();
        float s[HEADS];
        [[unroll]] for (uint a = 0; a < HEADS; ++a) s[a] = 0.0;
        // The bounds are variable, as in row_attention.glsl.
        for (uint turn = base; turn < base + QUADS; turn += BATCH) {
            vec4 value[BATCH];
            [[unroll]] for (uint i = 0; i < BATCH; ++i) value[i] = k_quad(turn + i);
            [[unroll]] for (uint i = 0; i < BATCH; ++i) {
                [[unroll]] for (uint a = 0; a < HEADS; ++a) s[a] += dot(value[i], q_tile[a * QUADS + turn - base + i]);
            }
        }
        [[unroll]] for (uint a = 0; a < HEADS; ++a) sum += w_tile[a] * max(s[a], 0.0);
    }
    if (own < n) y[y_off + row * n_positions + own] = sum;
}
