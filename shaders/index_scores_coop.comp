#version 450
#extension GL_GOOGLE_include_directive : require
// Compute index_scores on matrix units. q and keys are F16, and sums are F32. The workgroup ID is (KEYS blocks,
// -, ROWS rows). KEY_GROUPS * HEAD_GROUPS subgroups multiply FH * M heads by FN * N keys each. Consecutive rows
// of a slot read the keys once. A head's weight is an element of a matrix, so the layout of the sums does not
// matter until all heads are added.
#include "lib/types.glsl"

layout(constant_id = 1) const uint UNIT_M = 16; // see attn_decode_coop.comp
layout(constant_id = 2) const uint UNIT_N = 16;
layout(constant_id = 3) const uint UNIT_K = 16;
layout(constant_id = 4) const uint LANES = 32; // The pipeline's subgroup size.
layout(constant_id = 5) const uint KEY_GROUPS = 2;
layout(constant_id = 6) const uint HEAD_GROUPS = 2;
layout(constant_id = 7) const uint FN = 2; // matrices of keys per subgroup
layout(constant_id = 8) const uint FH = 2; // matrices of heads per subgroup
layout(constant_id = 9) const uint HEAD = 128; // values of a key: a multiple of UNIT_K
layout(constant_id = 10) const uint K_TYPE = 1;
layout(constant_id = 11) const uint HAS_W = 1; // 0: all weights are 1
layout(constant_id = 12) const uint ROWS = 1;
#define M UNIT_M
#define N UNIT_N
#define K UNIT_K
#include "lib/coop.glsl"

layout(push_constant) uniform Push {
    uint q_off, w_off, k_off, cells_off, y_off;
    uint n_heads, n_rows, first_row, blocks_per_slot, n_positions, block_size, cells_per_block, n_best;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer W { float w[]; };
layout(set = 0, binding = 2) readonly buffer KCache { uint k[]; };
layout(set = 0, binding = 2) buffer KCache4 { uvec4 k4[]; }; // see attn_decode_coop.comp
layout(set = 0, binding = 3) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 4) writeonly buffer Y { float y[]; };

#define STEP_BINDING 5
#include "lib/step.glsl"
#include "lib/step_rows.glsl"
#include "lib/cells.glsl"
#include "lib/cache_types.glsl"
#include "lib/iq4_values.glsl"
#define CACHE(i) k[i]
#define CACHE_OFF k_off
#define CACHE_TYPE K_TYPE
#define CACHE_QUAD k_quad
#define CACHE_BLOCK_QUAD k_block_quad
#include "lib/cache.glsl"

const uint QUADS = HEAD / 4;
const uint PIECES = HEAD / 8; // A thread copies pieces of eight elements.
const uint STRIDE = QUADS + 2; // of rows in QUADs, as in unit_attention.glsl
const uint UNROLL = N < 16 ? 1 : HEAD % (4 * K) == 0 ? 4 : 1; // with N = 8, DG2 would spill registers
const uint KEYS = KEY_GROUPS * FN * N;
const uint HEADS = HEAD_GROUPS * FH * M;
const uint BATCH = K_TYPE == CACHE_F16 ? 4 : 2; // loads in flight per invocation

shared QUAD k_tile[KEYS * STRIDE];
shared QUAD q_tile[HEADS * STRIDE];
shared uint key_cells[KEYS];
shared float w_tile[HEADS * N]; // [head][key]: a head's weight is repeated
shared float sums[HEAD_GROUPS * KEYS * M]; // of each subgroup and matrix: [head][key]

QUAD half_quad(vec4 value) { return quad_of(clamp(value, -65504.0, 65504.0)); }

uvec4 k_piece(uint at) {
    if (K_TYPE == CACHE_F16) return k4[k_off / 4 + at];
    return uvec4(words_of(half_quad(k_quad(2 * at))), words_of(half_quad(k_quad(2 * at + 1))));
}

// Load the keys of blocks from `first` on. The last of n keys replaces later ones, whose cells may be
// uninitialised.
void load_keys(uint slot, uint first, uint n) {
    barrier(); // all threads have used the keys
    for (uint key = gl_LocalInvocationID.x; key < KEYS; key += LOCAL) {
        const uint seen = min(first + key + 1, n) * block_size - 1;
        const uint block = block_cell(slot, seen / CELL_BLOCK) / CELL_BLOCK;
        key_cells[key] = cell_in_block(block, seen, block_size, cells_per_block);
    }
    barrier();
    for (uint begin = gl_LocalInvocationID.x; begin < KEYS * PIECES; begin += BATCH * LOCAL) {
        uvec4 held[BATCH];
        [[unroll]] for (uint j = 0; j < BATCH; ++j) {
            const uint e = min(begin + j * LOCAL, KEYS * PIECES - 1);
            held[j] = k_piece(key_cells[e / PIECES] * PIECES + e % PIECES);
        }
        [[unroll]] for (uint j = 0; j < BATCH; ++j) {
            const uint e = min(begin + j * LOCAL, KEYS * PIECES - 1);
            const uint at = e / PIECES * STRIDE + 2 * (e % PIECES);
            k_tile[at] = quad_of(held[j].xy);
            k_tile[at + 1] = quad_of(held[j].zw);
        }
    }
}

// Heads from n_heads on become zeros.
void load_heads(uint row, uint first) {
    for (uint begin = gl_LocalInvocationID.x; begin < HEADS * QUADS; begin += BATCH * LOCAL) {
        vec4 held[BATCH];
        [[unroll]] for (uint j = 0; j < BATCH; ++j) {
            const uint e = min(begin + j * LOCAL, HEADS * QUADS - 1);
            const uint at = q_off + (row * n_heads + min(first + e / QUADS, n_heads - 1)) * HEAD + 4 * (e % QUADS);
            held[j] = vec4(q[at], q[at + 1], q[at + 2], q[at + 3]);
        }
        [[unroll]] for (uint j = 0; j < BATCH; ++j) {
            const uint e = min(begin + j * LOCAL, HEADS * QUADS - 1);
            q_tile[e / QUADS * STRIDE + e % QUADS] = half_quad(first + e / QUADS < n_heads ? held[j] : vec4(0.0));
        }
    }
    if (HAS_W == 0) return;
    for (uint e = gl_LocalInvocationID.x; e < HEADS * N; e += LOCAL) {
        const uint head = first + e / N;
        w_tile[e] = head < n_heads ? w[w_off + row * n_heads + head] : 0.0;
    }
}

void score_row(uint row, uint first_key, uint n) {
    const uint own_keys = gl_SubgroupID % KEY_GROUPS * FN;
    const uint own_heads = gl_SubgroupID / KEY_GROUPS * FH;
    MATRIX_SUM total[FN];
    [[unroll]] for (uint f = 0; f < FN; ++f) total[f] = MATRIX_SUM(0.0);
    for (uint first = 0; first < n_heads; first += HEADS) {
        barrier(); // all threads have used the tile
        load_heads(row, first);
        barrier();
        MATRIX_SUM score[FH * FN];
        [[unroll]] for (uint g = 0; g < FH * FN; ++g) score[g] = MATRIX_SUM(0.0);
        // The bounds are variable, as in unit_attention.glsl.
        for (uint from = own_heads * M * STRIDE; from < own_heads * M * STRIDE + QUADS; from += UNROLL * K / 4) {
            [[unroll]] for (uint u = 0; u < UNROLL; ++u) {
                const uint at = from + u * K / 4;
                MATRIX_A heads[FH];
                [[unroll]] for (uint h = 0; h < FH; ++h) LOAD_ROWS(heads[h], q_tile, at + h * M * STRIDE, STRIDE);
                [[unroll]] for (uint f = 0; f < FN; ++f) {
                    MATRIX_B keys;
                    LOAD_COLUMNS(keys, k_tile, at + ((own_keys + f) * N - own_heads * M) * STRIDE, STRIDE);
                    [[unroll]] for (uint h = 0; h < FH; ++h) {
                        score[h * FN + f] = MULTIPLY_ADD(heads[h], keys, score[h * FN + f]);
                    }
                }
            }
        }
        [[unroll]] for (uint h = 0; h < FH; ++h) {
            MATRIX_SUM weights = MATRIX_SUM(1.0);
            if (HAS_W != 0) LOAD_ROWS(weights, w_tile, (own_heads + h) * M * N, N);
            [[unroll]] for (uint f = 0; f < FN; ++f) {
                for (uint e = 0; e < weights.length(); ++e) total[f][e] += weights[e] * max(score[h * FN + f][e], 0.0);
            }
        }
    }
    [[unroll]] for (uint f = 0; f < FN; ++f) {
        STORE_ROWS(total[f], sums, (gl_SubgroupID / KEY_GROUPS * KEY_GROUPS * FN + own_keys + f) * M * N, N);
    }
    barrier();
    for (uint own = gl_LocalInvocationID.x; own < KEYS; own += LOCAL) {
        float sum = 0.0;
        [[unroll]] for (uint group = 0; group < HEAD_GROUPS; ++group) {
            const uint at = (group * KEYS + own / N * N) * M + own % N;
            [[unroll]] for (uint a = 0; a < M; ++a) sum += sums[at + a * N];
        }
        if (first_key + own < n) y[y_off + row * n_positions + first_key + own] = sum;
    }
}

// Return the number of complete blocks up to the row's position, or 0 if the row needs no scores.
uint n_of(uint row) {
    if (row >= n_rows || first_row + row >= step_n_rows_from_buffer()) return 0;
    const uint n = (step_position(first_row + row) + 1) / block_size;
    return n > n_best ? n : 0;
}

void main() {
    const uint first_key = gl_WorkGroupID.x * KEYS;
    uint held_slot = 0xffffffffu;
    for (uint row = gl_WorkGroupID.z * ROWS; row < (gl_WorkGroupID.z + 1) * ROWS; ++row) {
        const uint n = n_of(row);
        if (first_key >= n) continue;
        const uint slot = step_place(first_row + row).y;
        if (slot != held_slot) {
            uint most = n;
            for (uint later = row + 1; later < (gl_WorkGroupID.z + 1) * ROWS; ++later) {
                const uint n_later = n_of(later);
                if (n_later > most && step_place(first_row + later).y == slot) most = n_later;
            }
            load_keys(slot, first_key, most);
            held_slot = slot;
        }
        score_row(row, first_key, n);
    }
}
