#version 450
#extension GL_GOOGLE_include_directive : require
// For each row and indexer's head, compute the largest score q . k of each block of `block_size` positions,
// only up to pos (MiniMax 2026). Rows with at most n_best blocks get no scores. The row's own block and the n_local - 1 blocks before it get LARGEST. The
// workgroup ID is (block, HEADS heads, row). A thread reads a key once for HEADS heads.
#include "lib/types.glsl"
#include "lib/cache_types.glsl"
#include "lib/iq4_values.glsl"

layout(constant_id = 1) const uint HEAD = 128; // values of a key
layout(constant_id = 2) const uint HEADS = 4;
layout(constant_id = 3) const uint K_TYPE = 1;
layout(constant_id = 4) const uint BATCH = 1; // quads in flight

layout(push_constant) uniform Push {
    uint q_off, k_off, cells_off, y_off;
    uint n_heads, n_rows, first_row, blocks_per_slot, n_blocks, block_size, n_local, n_best;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer K { uint k[]; };
layout(set = 0, binding = 2) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };

#define STEP_BINDING 4
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
const float LARGEST = 3.402823466e38;
const uint PARTS = 16; // Each is the maximum of LOCAL / PARTS threads.

shared vec4 q_tile[HEADS * QUADS];
shared float best[HEADS * LOCAL];
shared float best_of_part[HEADS * PARTS];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint block = gl_WorkGroupID.x;
    const uint first = gl_WorkGroupID.y * HEADS;
    const uint row = gl_WorkGroupID.z;
    if (first_row + row >= step_n_rows_from_buffer()) return;
    const uvec2 place = step_place(first_row + row);
    const uint pos = place.x;
    const uint slot = place.y;
    if (block > pos / block_size || pos / block_size < n_best) return;
    const bool is_local = block + n_local > pos / block_size;
    const uint end = min((block + 1) * block_size, pos + 1);

    for (uint e = thread; e < HEADS * QUADS; e += LOCAL) {
        const uint head = min(first + e / QUADS, n_heads - 1);
        const uint at = q_off + (row * n_heads + head) * HEAD + 4 * (e % QUADS);
        q_tile[e] = vec4(q[at], q[at + 1], q[at + 2], q[at + 3]);
    }
    float top[HEADS];
    [[unroll]] for (uint a = 0; a < HEADS; ++a) top[a] = -LARGEST;
    barrier();
    for (uint own = block * block_size + thread; own < end && !is_local; own += LOCAL) {
        const uint base = (block_cell(slot, own / CELL_BLOCK) + own % CELL_BLOCK) * QUADS;
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
        [[unroll]] for (uint a = 0; a < HEADS; ++a) top[a] = max(top[a], s[a]);
    }
    [[unroll]] for (uint a = 0; a < HEADS; ++a) best[a * LOCAL + thread] = top[a];
    barrier();
    for (uint e = thread; e < HEADS * PARTS; e += LOCAL) {
        float largest = -LARGEST;
        for (uint i = e % PARTS; i < LOCAL; i += PARTS) largest = max(largest, best[e / PARTS * LOCAL + i]);
        best_of_part[e] = largest;
    }
    barrier();
    for (uint a = thread; a < HEADS; a += LOCAL) {
        float largest = is_local ? LARGEST : -LARGEST;
        for (uint i = 0; i < PARTS; ++i) largest = max(largest, best_of_part[a * PARTS + i]);
        if (first + a < n_heads) y[y_off + (row * n_heads + first + a) * n_blocks + block] = largest;
    }
}
