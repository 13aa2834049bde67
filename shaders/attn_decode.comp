#version 450
#extension GL_GOOGLE_include_directive : require
// Attention of one row's head over one split of its keys, by online softmax: part = (sum of p * v, max, sum of p).
// A workgroup takes blocks of 32 keys; LOCAL / 32 threads dot a key with q, then each thread owns pairs of V's
// dimensions. Splits without keys give zeros.
#include "lib/types.glsl"

layout(constant_id = 1) const uint HEAD_K = 64;
layout(constant_id = 2) const uint HEAD_V = 64;

layout(push_constant) uniform Push {
    uint q_off, k_off, v_off, cells_off, part_off;
    uint n_heads, n_kv, group, q_first, n_rows, blocks_per_slot, n_splits, window;
    float scale, softcap;
};
layout(set = 0, binding = 0) readonly buffer Q { float q[]; };
layout(set = 0, binding = 1) readonly buffer K { uint k[]; };
layout(set = 0, binding = 2) readonly buffer V { uint v[]; };
layout(set = 0, binding = 3) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 4) writeonly buffer Part { float part[]; };

#define STEP_BINDING 5
#include "lib/step.glsl"
#include "lib/cells.glsl"
#include "lib/cache.glsl"
#include "lib/tanh.glsl"

const uint LANES = LOCAL / CELL_BLOCK; // threads per key
const uint K_PAIRS = HEAD_K / 2;
const uint V_PAIRS = HEAD_V / 2;
const uint V_GROUPS = LOCAL > V_PAIRS ? LOCAL / V_PAIRS : 1; // sets of threads that share out a block's keys
const uint V_ROUNDS = (V_PAIRS + LOCAL - 1) / LOCAL; // pairs per thread

shared vec2 q_row[K_PAIRS];
shared float dots[LOCAL];
shared float score[CELL_BLOCK];
shared float prob[CELL_BLOCK];
shared vec2 group_sum[LOCAL];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint head = gl_WorkGroupID.x;
    const uint split = gl_WorkGroupID.y;
    const uint row = gl_WorkGroupID.z;
    const uint kv_head = (q_first + head) / group;
    const uint slot = step_params.rows[row].y;

    const uint n_keys = row < step_n_rows() ? step_params.rows[row].x + 1 : 0;
    const uint first_key = window > 0 && n_keys > window ? n_keys - window : 0;
    const uint n_blocks = (n_keys + CELL_BLOCK - 1) / CELL_BLOCK;
    const uint per_split = (n_blocks - first_key / CELL_BLOCK + n_splits - 1) / n_splits;
    const uint first_block = first_key / CELL_BLOCK + split * per_split;
    const uint end_block = min(first_block + per_split, n_blocks);

    for (uint i = thread; i < K_PAIRS; i += LOCAL) {
        const uint at = q_off + (row * n_heads + head) * HEAD_K + 2 * i;
        q_row[i] = vec2(q[at], q[at + 1]) * scale;
    }
    barrier();

    const uint key = thread / LANES;
    const uint lane = thread % LANES;
    const uint v_group = thread / V_PAIRS;
    const uint v_pair0 = thread % V_PAIRS;
    float m = NEG_LARGE; // the same in every thread
    float l = 0.0; // of the keys this thread turned into probabilities (threads 0..31)
    vec2 acc[V_ROUNDS];
    for (uint i = 0; i < V_ROUNDS; ++i) acc[i] = vec2(0.0);

    for (uint block = first_block; block < end_block; ++block) {
        const uint cell = block_cell(slot, block);
        const uint n_valid = min(n_keys - block * CELL_BLOCK, CELL_BLOCK);
        const uint first_valid = max(first_key, block * CELL_BLOCK) - block * CELL_BLOCK;

        float s = 0.0;
        if (key >= first_valid && key < n_valid) {
            const uint base = ((cell + key) * n_kv + kv_head) * K_PAIRS;
            for (uint i = lane; i < K_PAIRS; i += LANES) s += dot(k_pair(base + i), q_row[i]);
        }
        if (LANES > 1) {
            dots[thread] = s;
            barrier();
            if (thread < CELL_BLOCK) {
                s = 0.0;
                for (uint i = 0; i < LANES; ++i) s += dots[thread * LANES + i];
            }
        }
        s = soft_cap(s, softcap);
        if (thread < CELL_BLOCK) score[thread] = s;
        barrier();

        float m_new = m;
        for (uint j = first_valid; j < n_valid; ++j) m_new = max(m_new, score[j]);
        const float rescale = exp(m - m_new);
        m = m_new;
        l *= rescale;
        if (thread >= first_valid && thread < n_valid) {
            const float p = exp(s - m);
            prob[thread] = p;
            l += p;
        }
        barrier();

        for (uint i = 0; i < V_ROUNDS; ++i) acc[i] *= rescale;
        if (v_group < V_GROUPS) {
            for (uint j = first_valid + v_group; j < n_valid; j += V_GROUPS) {
                const uint base = ((cell + j) * n_kv + kv_head) * V_PAIRS;
                for (uint i = 0; i < V_ROUNDS; ++i) {
                    const uint pair = v_pair0 + i * LOCAL;
                    if (pair < V_PAIRS) acc[i] += prob[j] * v_pair(base + pair);
                }
            }
        }
    }

    if (thread < CELL_BLOCK) score[thread] = l; // the last reads of score are before the last barrier
    if (V_GROUPS > 1) group_sum[thread] = acc[0];
    barrier();
    const uint base = part_off + ((row * n_heads + head) * n_splits + split) * (HEAD_V + 2);
    if (thread < V_PAIRS) {
        for (uint g = 1; g < V_GROUPS; ++g) acc[0] += group_sum[g * V_PAIRS + thread];
        for (uint i = 0; i < V_ROUNDS; ++i) {
            const uint pair = thread + i * LOCAL;
            if (pair < V_PAIRS) {
                part[base + 2 * pair] = acc[i].x;
                part[base + 2 * pair + 1] = acc[i].y;
            }
        }
    }
    if (thread == 0) {
        float sum = 0.0;
        for (uint j = 0; j < CELL_BLOCK; ++j) sum += score[j];
        part[base + HEAD_V] = m;
        part[base + HEAD_V + 1] = sum;
    }
}
