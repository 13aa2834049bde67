#version 450
#extension GL_GOOGLE_include_directive : require
// For each list, choose the n_chosen blocks with the largest scores among the blocks of `block_size`
// positions up to pos. Write their indices in ascending order. A row has n_lists lists. Among equal scores
// the lowest blocks are chosen. NaN counts as the largest score. With `tail`, n_chosen - 1 complete blocks
// are chosen, and the row's own block follows if it is incomplete. One workgroup per list determines the
// smallest chosen score byte by byte, the highest byte first. For each byte the workgroup builds a histogram
// of the scores with the same higher bytes. For up to FEW blocks, each thread counts the scores above its own.
#include "lib/types.glsl"
#include "lib/order.glsl"

layout(constant_id = 1) const uint BATCH = 1; // scores in flight

layout(push_constant) uniform Push {
    uint x_off, ids_off;
    uint n_positions, n_rows, first_row, n_chosen, n_lists, block_size, tail;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Ids { uint ids[]; };

#define STEP_BINDING 2
#include "lib/step.glsl"
#include "lib/step_rows.glsl"

const uint N_GROUPS = 16; // groups of counters
const uint SPAN = 32; // A thread adds at most 2 * SPAN counts of LOCAL earlier threads.
const uint FEW = LOCAL < 64 ? LOCAL : 64;

shared uint count[N_GROUPS * N_GROUPS];
shared uint group_count[N_GROUPS];
shared uint found; // the current byte of the smallest chosen score
shared uint left; // how many scores with this byte are still to choose
shared uint above_of[LOCAL];
shared uint equal_of[LOCAL];
shared uint above_in[LOCAL / SPAN]; // of SPAN threads
shared uint equal_in[LOCAL / SPAN];
shared uvec4 few[FEW / 4]; // keys, then zeros

// Choose n_best of n <= FEW scores.
void choose_of_few(uint base, uint n, uint n_best, uint to) {
    const uint thread = gl_LocalInvocationID.x;
    const uint own = thread < n ? order_key(x[base + thread]) : 0;
    if (thread < FEW) few[thread / 4][thread % 4] = own;
    if (thread < FEW / 32) count[thread] = 0;
    barrier();
    uint above = 0; // scores that are chosen before the thread's own
    for (uint i = 0; i < n; i += 4) {
        const uvec4 key = few[i / 4];
        [[unroll]] for (uint j = 0; j < 4; ++j) above += uint(key[j] > own || (key[j] == own && i + j < thread));
    }
    const bool is_chosen = thread < n && above < n_best;
    if (is_chosen) atomicOr(count[thread / 32], 1u << thread % 32);
    barrier();
    if (!is_chosen) return;
    uint place = bitCount(count[thread / 32] & ((1u << thread % 32) - 1));
    if (thread >= 32) place += bitCount(count[0]);
    ids[to + place] = thread;
}

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint row = gl_WorkGroupID.z;
    if (first_row + row / n_lists >= step_n_rows_from_buffer()) return;
    const uint pos = step_position(first_row + row / n_lists);
    const uint n = tail != 0 ? (pos + 1) / block_size : pos / block_size + 1;
    const bool has_tail = tail != 0 && (pos + 1) % block_size != 0;
    const uint n_best = n_chosen - tail;
    const uint base = x_off + row * n_positions;
    const uint to = ids_off + row * n_chosen;
    if (n <= n_best) {
        for (uint i = thread; i < n + uint(has_tail); i += LOCAL) ids[to + i] = i;
        return;
    }
    if (has_tail && thread == 0) ids[to + n_best] = n;
    if (n <= FEW) {
        choose_of_few(base, n, n_best, to);
        return;
    }

    uint least = 0; // the bytes of the smallest chosen score that are known so far
    uint known = 0;
    uint need = n_best; // scores still to choose
    for (uint shift = 32; shift > 0;) {
        shift -= 8;
        for (uint i = thread; i < N_GROUPS * N_GROUPS; i += LOCAL) count[i] = 0;
        barrier();
        for (uint first = thread; first < n; first += BATCH * LOCAL) {
            uint key[BATCH];
            [[unroll]] for (uint i = 0; i < BATCH; ++i) key[i] = order_key(x[base + min(first + i * LOCAL, n - 1)]);
            [[unroll]] for (uint i = 0; i < BATCH; ++i) {
                if (first + i * LOCAL < n && (key[i] & known) == least) atomicAdd(count[key[i] >> shift & 0xffu], 1);
            }
        }
        barrier();
        if (thread < N_GROUPS) {
            uint total = 0;
            for (uint i = 0; i < N_GROUPS; ++i) total += count[thread * N_GROUPS + i];
            group_count[thread] = total;
        }
        barrier();
        if (thread == 0) {
            uint group = N_GROUPS - 1;
            for (; need > group_count[group]; --group) need -= group_count[group];
            uint byte = group * N_GROUPS + N_GROUPS - 1;
            for (; need > count[byte]; --byte) need -= count[byte];
            found = byte;
            left = need;
        }
        barrier();
        least |= found << shift;
        known |= 0xffu << shift;
        need = left;
    }

    const uint stretch = (n + LOCAL - 1) / LOCAL;
    const uint begin = min(thread * stretch, n);
    const uint end = min(begin + stretch, n);
    uint above = 0, equal = 0;
    for (uint first = begin; first < end; first += BATCH) {
        uint key[BATCH];
        [[unroll]] for (uint i = 0; i < BATCH; ++i) key[i] = order_key(x[base + min(first + i, n - 1)]);
        [[unroll]] for (uint i = 0; i < BATCH; ++i) {
            above += uint(first + i < end && key[i] > least);
            equal += uint(first + i < end && key[i] == least);
        }
    }
    above_of[thread] = above;
    equal_of[thread] = equal;
    barrier();
    for (uint span = thread; span < LOCAL / SPAN; span += LOCAL) {
        above = 0;
        equal = 0;
        for (uint t = span * SPAN; t < (span + 1) * SPAN; ++t) {
            above += above_of[t];
            equal += equal_of[t];
        }
        above_in[span] = above;
        equal_in[span] = equal;
    }
    barrier();
    above = 0;
    equal = 0; // now the counts of all earlier threads
    [[dont_unroll]] for (uint span = 0; span < thread / SPAN; ++span) { // unrolled, RADV would spill registers
        above += above_in[span];
        equal += equal_in[span];
    }
    for (uint t = thread / SPAN * SPAN; t < thread; ++t) {
        above += above_of[t];
        equal += equal_of[t];
    }
    uint place = to + above + min(equal, need);
    for (uint first = begin; first < end; first += BATCH) {
        uint key[BATCH];
        [[unroll]] for (uint i = 0; i < BATCH; ++i) key[i] = order_key(x[base + min(first + i, n - 1)]);
        [[unroll]] for (uint i = 0; i < BATCH; ++i) {
            if (first + i >= end || key[i] < least) continue;
            if (key[i] == least && equal++ >= need) continue;
            ids[place++] = first + i;
        }
    }
}
