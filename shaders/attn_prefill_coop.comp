#version 450
#extension GL_GOOGLE_include_directive : require
// As attn_prefill, on matrix units: q, k, v and the probabilities become halves, sums are floats. A tile has
// ROW_GROUPS groups of M rows, and each group has V_PARTS subgroups. To score a block, these divide its keys
// among them; to sum p * v, the dimensions of V. Scores meet in shared memory, where a row's invocations
// scale and mask them and find the maximum. The output stays in matrices; a matrix of the rows' factors
// rescales them. Workgroup (tile, head).
// For heads of 128 and 4 groups of 16 rows: 43 KiB of shared memory, and 64 products of matrices of 16 for 64 keys and 16
// rows.
#include "lib/types.glsl"

layout(constant_id = 1) const uint UNIT_M = 16; // of the device's matrices: [M, K] by [K, N]
layout(constant_id = 2) const uint UNIT_N = 16;
layout(constant_id = 3) const uint UNIT_K = 16;
layout(constant_id = 4) const uint LANES = 32; // invocations of a subgroup
layout(constant_id = 5) const uint ROW_GROUPS = 4;
layout(constant_id = 6) const uint V_PARTS = 1; // as many as leave a subgroup's part of the output in registers
layout(constant_id = 7) const uint UNROLL = 1; // matrices of q in a round of the loop, and of probabilities
layout(constant_id = 8) const uint HEAD_K = 64; // whole rounds
layout(constant_id = 9) const uint HEAD_V = 64; // whole matrices for each of V_PARTS
layout(constant_id = 10) const uint HAS_SINKS = 0;
layout(constant_id = 11) const uint K_TYPE = 1;
layout(constant_id = 12) const uint V_TYPE = 1;
layout(constant_id = 13) const uint HAS_SOFTCAP = 0;
#define M UNIT_M
#define N UNIT_N
#define K UNIT_K
#include "lib/coop.glsl"

layout(push_constant) uniform Push {
    uint q_off, k_off, v_off, cells_off, sinks_off, y_off;
    uint n_heads, n_kv, group, q_first, n_rows, blocks_per_slot, window, chunk;
    float scale, softcap;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer KCache { uint k[]; };
layout(set = 0, binding = 2) readonly buffer VCache { uint v[]; };
layout(set = 0, binding = 3) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 4) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 5) writeonly buffer Y { float y[]; };

const uint TQ = M * ROW_GROUPS; // rows of a tile
#define STEP_BINDING 6
#include "lib/step.glsl"
#include "lib/cells.glsl"
#include "lib/kv_quads.glsl"
#include "lib/query_tiles.glsl"
#include "lib/tanh.glsl"

const uint K_QUADS = HEAD_K / 4;
const uint V_QUADS = HEAD_V / 4;
const uint PARTS = V_PARTS * (LANES / M); // invocations of a row
const uint FK = CELL_BLOCK / N / V_PARTS; // matrices of scores of a subgroup
const uint FV = HEAD_V / N / V_PARTS; // and of its output
const uint EACH = CELL_BLOCK / PARTS; // keys of an invocation
const uint BATCH = 4; // quads that an invocation reads before it stores one
// Rows in QUADs, an odd number of 16 bytes apart: eight of them begin at different banks.
const uint Q_STRIDE = K_QUADS + 2;
const uint K_STRIDE = K_QUADS + 2;
const uint P_STRIDE = CELL_BLOCK / 4 + 2; // of probabilities, and of V
const uint K_SIZE = CELL_BLOCK * K_STRIDE;
const uint V_SIZE = HEAD_V * P_STRIDE;
const uint S_STRIDE = CELL_BLOCK + 4; // floats

shared QUAD q_tile[TQ * Q_STRIDE]; // [row][dimension]
shared QUAD kv_tile[K_SIZE > V_SIZE ? K_SIZE : V_SIZE]; // K as [key][dimension], then V as [dimension][key]
shared QUAD p_tile[TQ * P_STRIDE]; // [row][key]
shared float s_tile[TQ * S_STRIDE]; // [row][key]; then a matrix of factors, or of results, [row][N] of each subgroup
shared float part_of[LOCAL];

QUAD half_quad(vec4 value) { return quad_of(clamp(value, -65504.0, 65504.0)); }

QUAD k_halves(uint i) {
    if (K_TYPE != CACHE_F16) return half_quad(k_quad(i));
    return quad_of(uvec2(k[k_off + 2 * i], k[k_off + 2 * i + 1]));
}

QUAD v_halves(uint i) {
    if (V_TYPE != CACHE_F16) return half_quad(v_quad(i));
    return quad_of(uvec2(v[v_off + 2 * i], v[v_off + 2 * i + 1]));
}

// The keys of a block that lies at `cell`; in place of a key that nobody sees one that somebody does, since 0 times what
// was never written may be NaN.
void read_k(uint cell, uint kv_head, uint first_valid, uint n_valid) {
    for (uint first = gl_LocalInvocationID.x; first < CELL_BLOCK * K_QUADS; first += BATCH * LOCAL) {
        QUAD value[BATCH];
        [[unroll]] for (uint u = 0; u < BATCH; ++u) {
            const uint e = first + u * LOCAL;
            const uint key = clamp(e / K_QUADS, first_valid, n_valid - 1);
            value[u] = k_halves(((cell + key) * n_kv + kv_head) * K_QUADS + e % K_QUADS);
        }
        [[unroll]] for (uint u = 0; u < BATCH; ++u) {
            const uint e = first + u * LOCAL;
            if (e < CELL_BLOCK * K_QUADS) kv_tile[e / K_QUADS * K_STRIDE + e % K_QUADS] = value[u];
        }
    }
}

// An invocation turns four dimensions of four keys: a column of V then lies in a row, as the units read it.
void read_v(uint cell, uint kv_head, uint first_valid, uint n_valid) {
    for (uint e = gl_LocalInvocationID.x; e < CELL_BLOCK / 4 * V_QUADS; e += LOCAL) {
        const uint keys = e / V_QUADS;
        const uint quad = e % V_QUADS;
        QUAD value[4];
        [[unroll]] for (uint u = 0; u < 4; ++u) {
            const uint key = clamp(4 * keys + u, first_valid, n_valid - 1);
            value[u] = v_halves(((cell + key) * n_kv + kv_head) * V_QUADS + quad);
        }
        [[unroll]] for (uint i = 0; i < 4; ++i) kv_tile[(4 * quad + i) * P_STRIDE + keys] = quad_across(value, i);
    }
}

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint head = gl_WorkGroupID.y;
    const uint kv_head = (q_first + head) / group;
    const QueryTile tile = find_query_tile(gl_WorkGroupID.x);
    if (tile.n == 0) {
        zero_rows(tile.first_row, head);
        return;
    }
    const uint n_keys = tile.first_pos + tile.n;
    const uint first_key = first_key_of(tile.first_pos);

    for (uint e = thread; e < TQ * K_QUADS; e += LOCAL) {
        const uint row = tile.first_row + min(e / K_QUADS, tile.n - 1); // surplus rows repeat the last
        const uint at = q_off + (row * n_heads + head) * HEAD_K + 4 * (e % K_QUADS);
        q_tile[e / K_QUADS * Q_STRIDE + e % K_QUADS] = half_quad(vec4(q[at], q[at + 1], q[at + 2], q[at + 3]));
    }

    const uint v_part = gl_SubgroupID % V_PARTS;
    const uint own = gl_SubgroupID / V_PARTS * M; // where the rows of this subgroup begin
    const uint own_q = own * Q_STRIDE; // and in the tiles
    const uint own_p = own * P_STRIDE;
    const uint own_s = own * S_STRIDE;
    const uint staged = own_s + v_part * M * N; // where its factors are, and its results
    const uint row = gl_SubgroupInvocationID % M;
    const uint lane_part = gl_SubgroupInvocationID / M;
    const uint part = v_part * (LANES / M) + lane_part;
    const uint row_pos = tile.first_pos + own + row;
    const uint parts = gl_SubgroupID / V_PARTS * PARTS * M + row; // what the PARTS of this row say, M apart
    float m = NEG_LARGE;
    float l = 0.0; // of the keys of this invocation
    MATRIX_SUM sum[FV];
    [[unroll]] for (uint g = 0; g < FV; ++g) sum[g] = MATRIX_SUM(0.0);
    MATRIX_SUM factors;

    for (uint block = first_key / CELL_BLOCK; block * CELL_BLOCK < n_keys; ++block) {
        const uint cell = block_cell(tile.slot, block);
        const uint block_pos = block * CELL_BLOCK;
        const uint n_valid = min(n_keys - block_pos, CELL_BLOCK);
        const uint first_valid = max(first_key, block_pos) - block_pos;

        barrier(); // V of the block before was multiplied
        read_k(cell, kv_head, first_valid, n_valid);
        barrier();
        MATRIX_SUM score[FK];
        [[unroll]] for (uint g = 0; g < FK; ++g) score[g] = MATRIX_SUM(0.0);
        // The bounds of this loop and of V's are no constants, or drivers unroll all of it and take minutes to compile.
        for (uint first = own_q; first < own_q + K_QUADS; first += UNROLL * K / 4) {
            [[unroll]] for (uint u = 0; u < UNROLL; ++u) {
                const uint at = first + u * K / 4;
                MATRIX_A rows;
                LOAD_ROWS(rows, q_tile, at, Q_STRIDE);
                [[unroll]] for (uint g = 0; g < FK; ++g) {
                    MATRIX_B columns;
                    LOAD_COLUMNS(columns, kv_tile, (v_part * FK + g) * N * K_STRIDE + at - own_q, K_STRIDE);
                    score[g] = MULTIPLY_ADD(rows, columns, score[g]);
                }
            }
        }
        [[unroll]] for (uint g = 0; g < FK; ++g) STORE_ROWS(score[g], s_tile, own_s + (v_part * FK + g) * N, S_STRIDE);
        barrier();

        read_v(cell, kv_head, first_valid, n_valid);
        float s[EACH];
        float top = NEG_LARGE;
        const uint first_seen = first_key_of(row_pos);
        [[unroll]] for (uint i = 0; i < EACH; ++i) {
            // Where every key so far is masked the maximum is NEG_LARGE and what is summed is finite; the first key
            // that is not wipes it out, because exp(NEG_LARGE - m) is 0.
            const uint key_pos = block_pos + part * EACH + i;
            const bool masked = key_pos > row_pos || key_pos < max(first_key, first_seen);
            s[i] = s_tile[own_s + row * S_STRIDE + part * EACH + i] * scale;
            if (HAS_SOFTCAP != 0) s[i] = soft_cap(s[i], softcap);
            s[i] = masked ? NEG_LARGE : s[i];
            top = max(top, s[i]);
        }
        part_of[parts + part * M] = top;
        barrier();

        float m_new = m;
        [[unroll]] for (uint i = 0; i < PARTS; ++i) m_new = max(m_new, part_of[parts + i * M]);
        const float rescale = exp(m - m_new);
        m = m_new;
        l *= rescale;
        [[unroll]] for (uint i = 0; i < EACH; i += 4) {
            const vec4 p = exp(vec4(s[i], s[i + 1], s[i + 2], s[i + 3]) - m_new);
            l += (p.x + p.y) + (p.z + p.w);
            p_tile[own_p + row * P_STRIDE + (part * EACH + i) / 4] = quad_of(p);
        }
        [[unroll]] for (uint c = 0; c < N; c += LANES / M) s_tile[staged + row * N + c + lane_part] = rescale;
        barrier();

        LOAD_ROWS(factors, s_tile, staged, N);
        [[unroll]] for (uint g = 0; g < FV; ++g) SCALE_BY(sum[g], factors);
        for (uint first = own_p; first < own_p + CELL_BLOCK / 4; first += UNROLL * K / 4) {
            [[unroll]] for (uint u = 0; u < UNROLL; ++u) {
                const uint at = first + u * K / 4;
                MATRIX_A rows;
                LOAD_ROWS(rows, p_tile, at, P_STRIDE);
                [[unroll]] for (uint g = 0; g < FV; ++g) {
                    MATRIX_B columns;
                    LOAD_COLUMNS(columns, kv_tile, (v_part * FV + g) * N * P_STRIDE + at - own_p, P_STRIDE);
                    sum[g] = MULTIPLY_ADD(rows, columns, sum[g]);
                }
            }
        }
    }

    barrier();
    part_of[parts + part * M] = l;
    barrier();
    l = 0.0;
    [[unroll]] for (uint i = 0; i < PARTS; ++i) l += part_of[parts + i * M];
    float factor = 1.0 / l;
    if (HAS_SINKS != 0) { // one more logit, in the denominator alone
        const float sink = sinks[sinks_off + head];
        const float m_all = max(m, sink);
        factor = exp(m - m_all) / (l * exp(m - m_all) + exp(sink - m_all));
    }
    // Which value an invocation holds is the driver's matter: they go through shared memory to get factors and bounds.
    [[unroll]] for (uint g = 0; g < FV; ++g) {
        STORE_ROWS(sum[g], s_tile, staged, N);
        barrier();
        [[unroll]] for (uint c = 0; c < N; c += LANES / M) { // a count that ANV knows, or it keeps all sums in memory
            const uint d = (v_part * FV + g) * N + c + lane_part;
            const uint at = y_off + ((tile.first_row + own + row) * n_heads + head) * HEAD_V + d;
            if (own + row < tile.n) y[at] = s_tile[staged + row * N + c + lane_part] * factor;
        }
        barrier();
    }
}
