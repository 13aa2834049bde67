#version 450
#extension GL_GOOGLE_include_directive : require
// Compute index_maxima on matrix units, for blocks of whole tiles of KEYS positions. q and keys are F16, and sums
// are F32. The workgroup ID is (block, HEADS heads, ROWS rows). A workgroup is one subgroup. It multiplies the
// heads of rows of one slot by FN * N keys. F16 keys are read as matrices, and other types pass through shared
// memory. The row's own block must be local (n_local > 0), so all positions of a scored block are complete.
#include "lib/types.glsl"

layout(constant_id = 1) const uint UNIT_M = 16; // see attn_decode_coop.comp
layout(constant_id = 2) const uint UNIT_N = 16;
layout(constant_id = 3) const uint UNIT_K = 16;
layout(constant_id = 4) const uint LANES = 32; // The pipeline's subgroup size.
layout(constant_id = 5) const uint FN = 2; // matrices of keys
layout(constant_id = 6) const uint HEAD = 128; // values of a key: a multiple of UNIT_K
layout(constant_id = 7) const uint HEADS = 4;
layout(constant_id = 8) const uint K_TYPE = 1;
layout(constant_id = 9) const uint ROWS = 1; // at most UNIT_M / HEADS
#define M UNIT_M
#define N UNIT_N
#define K UNIT_K
#include "lib/coop.glsl"

layout(push_constant) uniform Push {
    uint q_off, k_off, cells_off, y_off;
    uint n_heads, n_rows, first_row, blocks_per_slot, n_blocks, block_size, n_local, n_best;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer KCache { uint k[]; };
layout(set = 0, binding = 1) buffer KCache4 { uvec4 k4[]; }; // see attn_decode_coop.comp
layout(set = 0, binding = 2) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };

#define STEP_BINDING 4
#include "lib/step.glsl"
#include "lib/step_rows.glsl"
#include "lib/cache_types.glsl"
#include "lib/iq4_values.glsl"
#define CACHE(i) k[i]
#define CACHE_OFF k_off
#define CACHE_TYPE K_TYPE
#define CACHE_QUAD k_quad
#define CACHE_BLOCK_QUAD k_block_quad
#include "lib/cache.glsl"

const float LARGEST = 3.402823466e38;
const uint QUADS = HEAD / 4;
const uint PIECES = HEAD / 8; // A thread copies pieces of eight elements.
const uint STRIDE = QUADS + 2; // of rows in QUADs, as in unit_attention.glsl
const uint KEYS = FN * N;
const uint UNROLL = HEAD % (4 * K) == 0 && N >= 16 ? 4 : 1; // as in index_scores_coop.comp
const bool DIRECT = K_TYPE == CACHE_F16;
const uint HEAD_ROUNDS = (ROWS * HEADS * QUADS + LOCAL - 1) / LOCAL;
const uint KEY_ROUNDS = (CELL_BLOCK * PIECES + LOCAL - 1) / LOCAL;
const uint BATCH = 4; // loads in flight per invocation

shared QUAD k_tile[DIRECT ? 1 : KEYS * STRIDE];
shared QUAD q_tile[M * STRIDE]; // [row * HEADS + head][dimension]; surplus rows are not used
shared float best[M * N];

QUAD half_quad(vec4 value) { return quad_of(clamp(value, -65504.0, 65504.0)); }

// Surplus loads repeat the last quad.
void load_heads(uint row, uint first) {
    for (uint round = 0; round < HEAD_ROUNDS; round += BATCH) {
        vec4 held[BATCH];
        [[unroll]] for (uint j = 0; j < BATCH; ++j) {
            const uint e = min((round + j) * LOCAL + gl_LocalInvocationID.x, ROWS * HEADS * QUADS - 1);
            const uint own_row = min(row + e / QUADS / HEADS, n_rows - 1), head = min(first + e / QUADS % HEADS, n_heads - 1);
            const uint at = q_off + (own_row * n_heads + head) * HEAD + 4 * (e % QUADS);
            held[j] = vec4(q[at], q[at + 1], q[at + 2], q[at + 3]);
        }
        [[unroll]] for (uint j = 0; j < BATCH; ++j) {
            const uint e = min((round + j) * LOCAL + gl_LocalInvocationID.x, ROWS * HEADS * QUADS - 1);
            q_tile[e / QUADS * STRIDE + e % QUADS] = half_quad(held[j]);
        }
    }
}

// Load CELL_BLOCK keys in consecutive cells as keys from `first` on of the tile.
void load_keys(uint cell, uint first) {
    for (uint round = 0; round < KEY_ROUNDS; round += BATCH) {
        [[unroll]] for (uint j = 0; j < BATCH; ++j) {
            const uint e = min((round + j) * LOCAL + gl_LocalInvocationID.x, CELL_BLOCK * PIECES - 1);
            const uint at = (first + e / PIECES) * STRIDE + 2 * (e % PIECES);
            k_tile[at] = half_quad(k_quad(2 * (cell * PIECES + e)));
            k_tile[at + 1] = half_quad(k_quad(2 * (cell * PIECES + e) + 1));
        }
    }
}

// Return the first cell of a block of CELL_BLOCK positions. A slot has cells for all positions, so it is no ring.
uint cell_of(uint slot, uint block) { return cells[cells_off + slot * blocks_per_slot + block] * CELL_BLOCK; }

MATRIX_SUM top;

void score_tile(uint slot, uint begin) {
    uint at[FN]; // the first piece of each matrix of keys
    [[unroll]] for (uint f = 0; f < FN; ++f) {
        at[f] = k_off / 4 + (cell_of(slot, (begin + f * N) / CELL_BLOCK) + f * N % CELL_BLOCK) * PIECES;
    }
    MATRIX_SUM score[FN];
    [[unroll]] for (uint f = 0; f < FN; ++f) score[f] = MATRIX_SUM(0.0);
    // The bounds are variable, as in unit_attention.glsl.
    for (uint from = at[0]; from < at[0] + PIECES; from += UNROLL * K / 8) {
        [[unroll]] for (uint u = 0; u < UNROLL; ++u) {
            const uint piece = from - at[0] + u * K / 8;
            MATRIX_A heads;
            LOAD_ROWS(heads, q_tile, 2 * piece, STRIDE);
            [[unroll]] for (uint f = 0; f < FN; ++f) {
                MATRIX_B keys;
                if (DIRECT) {
                    LOAD_COLUMNS(keys, k4, at[f] + piece, PIECES);
                } else {
                    LOAD_COLUMNS(keys, k_tile, f * N * STRIDE + 2 * piece, STRIDE);
                }
                score[f] = MULTIPLY_ADD(heads, keys, score[f]);
            }
        }
    }
    [[unroll]] for (uint f = 0; f < FN; ++f) {
        for (uint e = 0; e < top.length(); ++e) top[e] = max(top[e], score[f][e]);
    }
}

// Score the block for rows row..row + n - 1 of a slot, of which the last is at last_pos.
void score_block(uint row, uint n, uint slot, uint last_pos, uint first) {
    const uint block = gl_WorkGroupID.x;
    if (block > last_pos / block_size || last_pos / block_size < n_best) return;
    if (block + n_local <= last_pos / block_size) {
        barrier(); // all threads have used the heads
        load_heads(row, first);
        barrier();
        top = MATRIX_SUM(-LARGEST);
        for (uint begin = block * block_size; begin < (block + 1) * block_size; begin += KEYS) {
            if (!DIRECT) {
                barrier(); // all threads have used the keys
                for (uint own = 0; own < KEYS; own += CELL_BLOCK) load_keys(cell_of(slot, (begin + own) / CELL_BLOCK), own);
                barrier();
            }
            score_tile(slot, begin);
        }
        STORE_ROWS(top, best, 0, N);
        barrier();
    }
    for (uint e = gl_LocalInvocationID.x; e < M; e += LOCAL) {
        const uint own = e / HEADS, head = first + e % HEADS;
        if (own >= n || head >= n_heads) continue;
        const uint own_block = step_position(first_row + row + own) / block_size;
        if (block > own_block || own_block < n_best) continue;
        float largest = LARGEST;
        if (block + n_local <= own_block) {
            largest = best[e * N];
            [[unroll]] for (uint i = 1; i < N; ++i) largest = max(largest, best[e * N + i]);
        }
        y[y_off + ((row + own) * n_heads + head) * n_blocks + block] = largest;
    }
}

void main() {
    const uint end = min(min((gl_WorkGroupID.z + 1) * ROWS, n_rows), max(step_n_rows_from_buffer(), first_row) - first_row);
    for (uint row = gl_WorkGroupID.z * ROWS; row < end;) {
        const uvec2 place = step_place(first_row + row); // position, slot
        uint n = 1;
        while (row + n < end && step_place(first_row + row + n) == place + uvec2(n, 0)) ++n;
        score_block(row, n, place.y, place.x + n - 1, gl_WorkGroupID.y * HEADS);
        row += n;
    }
}
