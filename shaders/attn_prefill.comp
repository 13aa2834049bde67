#version 450
#extension GL_GOOGLE_include_directive : require
// Causal attention of a tile of TQ rows of one run over blocks of 32 keys, by online softmax.
// Workgroup (tile, head - first_head): several dispatches may share out the heads. A workgroup finds its tile by
// walking the run table; workgroups after the last tile write zeros to the rows that belong to no run. Shared memory: q
// tile, scores and a piece of the keys, at most 15.6 KiB by the choice of TQ.
#include "lib/types.glsl"

layout(constant_id = 1) const uint TQ = 4; // 4, 8 or 16
layout(constant_id = 2) const uint HEAD_K = 64;
layout(constant_id = 3) const uint HEAD_V = 64;
layout(constant_id = 4) const uint HAS_SINKS = 0;
layout(constant_id = 5) const uint K_TYPE = 1;
layout(constant_id = 6) const uint V_TYPE = 1;
layout(constant_id = 7) const uint HAS_SOFTCAP = 0;
layout(constant_id = 8) const uint BATCH = 1; // quads that a thread reads before it uses one: latencies overlap

layout(push_constant) uniform Push {
    uint q_off, k_off, v_off, cells_off, sinks_off, y_off;
    uint n_heads, n_kv, group, q_first, n_rows, blocks_per_slot, window, chunk, first_head;
    float scale, softcap;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer K { uint k[]; };
layout(set = 0, binding = 2) readonly buffer V { uint v[]; };
layout(set = 0, binding = 3) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 4) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = 5) writeonly buffer Y { float y[]; };

#define STEP_BINDING 6
#include "lib/step.glsl"
#include "lib/cells.glsl"
#include "lib/kv_quads.glsl"
#include "lib/query_tiles.glsl"
#include "lib/tanh.glsl"

const uint K_QUADS = HEAD_K / 4;
const uint V_QUADS = HEAD_V / 4;
const uint S_GROUPS = LOCAL / CELL_BLOCK; // sets of 32 threads that share out the rows when scoring (1, 2 or 4)
const uint S_ROWS = TQ / S_GROUPS;
// sets of V_QUADS threads that share out the rows when summing V
const uint V_GROUPS = LOCAL / V_QUADS >= 4 ? 4 : (LOCAL / V_QUADS >= 2 ? 2 : 1);
const uint V_ROWS = TQ / V_GROUPS;
const uint V_ROUNDS = (V_QUADS + LOCAL - 1) / LOCAL; // quads of dimensions per thread
const uint K_PIECE = BATCH > S_GROUPS ? BATCH : S_GROUPS; // quads of each key that lie in shared memory at a time
const uint K_READS = K_PIECE / S_GROUPS; // quads that a thread reads of a piece
// As in attn_decode: where a thread's quads of K lie in a pair of quantized blocks is the same for all threads of a set.
const bool K_WORDS = K_TYPE >= CACHE_Q8_0 && K_QUADS % 16 + K_PIECE % 8 + 8 % S_GROUPS == 0;
// A thread's quad of V lies at the same place of a pair of quantized blocks for every key.
const bool V_WORDS = V_TYPE >= CACHE_Q8_0 && V_QUADS % 16 + LOCAL % V_QUADS == 0;
const uint V_BATCH = BATCH > V_ROUNDS ? BATCH / V_ROUNDS : 1; // keys whose V a thread reads before it uses one

shared vec4 q_tile[TQ * K_QUADS];
shared float score[TQ * CELL_BLOCK]; // then the probabilities
shared float row_max[TQ];
shared float row_rescale[TQ];
shared vec4 k_tile[CELL_BLOCK * (K_PIECE + 1)]; // [key][quad]; the odd stride spreads the keys over the banks

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint head = first_head + gl_WorkGroupID.y;
    const uint kv_head = (q_first + head) / group;

    const QueryTile tile = find_query_tile(gl_WorkGroupID.x);
    if (tile.n == 0) {
        zero_rows(tile.first_row, head);
        return;
    }
    const uint first_row = tile.first_row;
    const uint first_pos = tile.first_pos;
    const uint n_tile = tile.n;
    const uint n_keys = first_pos + n_tile;
    const uint first_key = first_key_of(first_pos);

    for (uint e = thread; e < TQ * K_QUADS; e += LOCAL) {
        vec4 value = vec4(0.0);
        if (e / K_QUADS < n_tile) {
            const uint at = q_off + ((first_row + e / K_QUADS) * n_heads + head) * HEAD_K + 4 * (e % K_QUADS);
            value = vec4(q[at], q[at + 1], q[at + 2], q[at + 3]) * scale;
        }
        q_tile[e] = value;
    }
    barrier();

    const uint key = thread % CELL_BLOCK;
    const uint s_row0 = thread / CELL_BLOCK * S_ROWS;
    const uint v_row0 = min(thread / V_QUADS, V_GROUPS - 1) * V_ROWS; // surplus threads' sums are not kept
    const uint v_quad0 = thread % V_QUADS;
    const bool sums_v = thread / V_QUADS < V_GROUPS;
    float m = NEG_LARGE; // the maximum of row `thread`
    float s[S_ROWS];
    float l[V_ROWS];
    vec4 acc[V_ROWS * V_ROUNDS];
    [[unroll]] for (uint a = 0; a < V_ROWS; ++a) l[a] = 0.0;
    [[unroll]] for (uint a = 0; a < V_ROWS * V_ROUNDS; ++a) acc[a] = vec4(0.0);

    for (uint block = first_key / CELL_BLOCK; block * CELL_BLOCK < n_keys; ++block) {
        const uint cell = block_cell(tile.slot, block);
        const uint block_pos = block * CELL_BLOCK;
        const uint n_valid = min(n_keys - block_pos, CELL_BLOCK);
        const uint first_valid = max(first_key, block_pos) - block_pos;

        [[unroll]] for (uint a = 0; a < S_ROWS; ++a) s[a] = 0.0;
        const bool valid = key >= first_valid && key < n_valid;
        // The bounds of both loops are no constants, or drivers unroll all of it and take seconds to compile.
        if (S_GROUPS == 1) {
            const uint base = ((cell + key) * n_kv + kv_head) * K_QUADS;
            for (uint at = base; valid && at < base + K_QUADS; ++at) {
                const vec4 kv = k_quad(at);
                [[unroll]] for (uint a = 0; a < S_ROWS; ++a) s[a] += dot(kv, q_tile[(s_row0 + a) * K_QUADS + at - base]);
            }
        } else {
            // K goes through shared memory. If each thread read the key that it scores, 32 threads would read from 32
            // cache lines at a time, and every set of 32 threads would read all keys.
            const uint own = thread / S_GROUPS;
            const uint quad = thread % S_GROUPS;
            const uint base = (cell * n_kv + kv_head) * K_QUADS;
            // cells of keys that are not valid can be read: a block is whole
            const uint own_base = base + own * n_kv * K_QUADS;
            for (uint at = base; at < base + K_QUADS; at += K_PIECE) {
                const uint first = at - base;
                vec4 read[K_READS];
                [[unroll]] for (uint i = 0; i < K_READS; ++i) {
                    if (K_WORDS) {
                        const uint behind = (first / 8 + i * S_GROUPS / 8) * halves_of(K_TYPE);
                        read[i] = k_block_quad(k_off + own_base / 16 * halves_of(K_TYPE), behind, quad + i * S_GROUPS % 8);
                    } else {
                        read[i] = k_quad(own_base + min(first + quad + i * S_GROUPS, K_QUADS - 1));
                    }
                }
                [[unroll]] for (uint i = 0; i < K_READS; ++i) k_tile[own * (K_PIECE + 1) + quad + i * S_GROUPS] = read[i];
                barrier();
                for (uint c = 0; valid && c < min(K_PIECE, K_QUADS - first); ++c) {
                    const vec4 kv = k_tile[key * (K_PIECE + 1) + c];
                    [[unroll]] for (uint a = 0; a < S_ROWS; ++a) s[a] += dot(kv, q_tile[(s_row0 + a) * K_QUADS + first + c]);
                }
                barrier();
            }
        }
        [[unroll]] for (uint a = 0; a < S_ROWS; ++a) {
            // While all keys of a row so far are masked, its maximum is NEG_LARGE, and each of them is summed with
            // exp(0) = 1. The first key that is not masked clears these sums, because exp(NEG_LARGE - m) is 0.
            const uint row_pos = first_pos + s_row0 + a;
            const uint key_pos = block_pos + key;
            const bool masked = key_pos > row_pos || key_pos < first_key_of(row_pos);
            if (HAS_SOFTCAP != 0) s[a] = soft_cap(s[a], softcap);
            if (masked) s[a] = NEG_LARGE;
            score[(s_row0 + a) * CELL_BLOCK + key] = s[a];
        }
        barrier();

        if (thread < TQ) {
            float m_new = m;
            for (uint first = 0; first < n_valid; first += 4 * BATCH) {
                [[unroll]] for (uint j = 0; j < 4 * BATCH; ++j) m_new = max(m_new, score[thread * CELL_BLOCK + first + j]);
            }
            row_rescale[thread] = exp(m - m_new);
            row_max[thread] = m_new;
            m = m_new;
        }
        barrier();
        [[unroll]] for (uint a = 0; a < S_ROWS; ++a) score[(s_row0 + a) * CELL_BLOCK + key] = exp(s[a] - row_max[s_row0 + a]);
        barrier();

        [[unroll]] for (uint a = 0; a < V_ROWS; ++a) {
            l[a] *= row_rescale[v_row0 + a];
            [[unroll]] for (uint i = 0; i < V_ROUNDS; ++i) acc[a * V_ROUNDS + i] *= row_rescale[v_row0 + a];
        }
        for (uint first = BATCH > 1 ? 0 : first_valid; first < n_valid; first += V_BATCH) {
            vec4 value[V_BATCH * V_ROUNDS]; // where a key is not seen, one that is seen is read
            [[unroll]] for (uint u = 0; u < V_BATCH; ++u) {
                const uint base = ((cell + clamp(first + u, first_valid, n_valid - 1)) * n_kv + kv_head) * V_QUADS;
                [[unroll]] for (uint i = 0; i < V_ROUNDS; ++i) {
                    const uint at = u * V_ROUNDS + i;
                    if (V_WORDS) {
                        const uint behind = v_quad0 / 8 * halves_of(V_TYPE);
                        value[at] = v_block_quad(v_off + base / 16 * halves_of(V_TYPE), behind, v_quad0 % 8);
                    } else {
                        value[at] = v_quad(base + min(v_quad0 + i * LOCAL, V_QUADS - 1));
                    }
                }
            }
            [[unroll]] for (uint u = 0; u < V_BATCH; ++u) {
                [[unroll]] for (uint a = 0; a < V_ROWS; ++a) {
                    const float p = score[(v_row0 + a) * CELL_BLOCK + first + u]; // zero for keys not seen
                    l[a] += p;
                    [[unroll]] for (uint i = 0; i < V_ROUNDS; ++i) acc[a * V_ROUNDS + i] += p * value[u * V_ROUNDS + i];
                }
            }
        }
        // with more sets, the loop over K's pieces has barriers before scores are written again
        if (S_GROUPS == 1) barrier();
    }

    if (!sums_v) return;
    [[unroll]] for (uint a = 0; a < V_ROWS; ++a) {
        if (v_row0 + a >= n_tile) break;
        const uint base = y_off + ((first_row + v_row0 + a) * n_heads + head) * HEAD_V;
        float factor = 1.0 / l[a];
        if (HAS_SINKS != 0) { // one more logit, in the denominator alone
            const float m_row = row_max[v_row0 + a];
            const float sink = sinks[sinks_off + head];
            const float m_all = max(m_row, sink);
            factor = exp(m_row - m_all) / (l[a] * exp(m_row - m_all) + exp(sink - m_all));
        }
        [[unroll]] for (uint i = 0; i < V_ROUNDS; ++i) {
            const uint quad = v_quad0 + i * LOCAL;
            if (quad >= V_QUADS) continue;
            for (uint c = 0; c < 4; ++c) y[base + 4 * quad + c] = acc[a * V_ROUNDS + i][c] * factor;
        }
    }
}
