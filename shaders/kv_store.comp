#version 450
#extension GL_GOOGLE_include_directive : require
// Write each row of x to the row's cache cell. For F32, F16 and BF16 a thread stores two elements. The first
// n_rot dimensions of a head are rotated. If NORM is set, a workgroup first norms one head. For quantized
// types a thread quantizes two blocks of 32 elements (lib/cache_blocks.glsl). A block of Q4_1 or Q5_1
// consists of whole words. A block of another type has an odd number of 16-bit units, so two neighbouring
// blocks share a word. One thread stores both blocks, even if they belong to different rows. Two threads
// would need atomics, which host memory may lack.
#include "lib/types.glsl"
#include "lib/reduce.glsl"
#include "lib/half.glsl"
#include "lib/bf16.glsl"
#include "lib/cache_types.glsl"
#include "lib/iq4_values.glsl"
#include "lib/divide.glsl"
#include "lib/exact.glsl"

layout(constant_id = 1) const uint TYPE = 1;
layout(constant_id = 2) const uint NORM = 0; // 1: divide each head by its RMS; 2: also multiply it by w
layout(constant_id = 3) const uint BLOCKS = 0; // 1: write only rows at the ends of blocks of block_size positions

layout(push_constant) uniform Push {
    uint x_off, w_off, cos_sin_off, cells_off, cache_off;
    uint width, n_rows, blocks_per_slot, head_dim, n_rot, half_split, block_size, cells_per_block, first_cell;
    float eps;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer W { float w[]; };
layout(set = 0, binding = 2) readonly buffer CosSin { float cos_sin[]; };
layout(set = 0, binding = 3) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 4) buffer Cache { uint cache[]; };

#define STEP_BINDING 5
#include "lib/step.glsl"
#include "lib/step_rows.glsl"
#include "lib/cells.glsl"
#include "lib/head.glsl"

#include "lib/cache_blocks.glsl"

const bool QUANTIZED = TYPE >= CACHE_Q8_0;
uint rows_apart = BLOCKS != 0 ? block_size : 1; // from a row that is written to the row of the next cell

// Return element e of the row after norm and rotation. For quantized caches, earlier ops norm and rotate x,
// because quantizing reads each element twice.
float element(uint e) {
    const uint row = gl_WorkGroupID.z;
    const uint i = e % head_dim;
    const uint head = x_off + row * width + e - i;
    const uint gap = half_split != 0 ? n_rot / 2 : 1;
    const bool is_second = half_split != 0 ? i >= gap : (i & 1u) != 0;
    float value = normed(head, i);
    if (i < n_rot) {
        const uint first = is_second ? i - gap : i;
        const uint at = cos_sin_off + row * n_rot + (half_split != 0 ? 2 * first : first);
        const float other = normed(head, is_second ? first : i + gap);
        value = value * cos_sin[at] + (is_second ? other : -other) * cos_sin[at + 1];
    }
    return value;
}

// Return whether a row has this position, which is in the same 32 positions as `near`.
bool stores(uint row, uint pos, uint slot, uint near) {
    if (pos / CELL_BLOCK != near / CELL_BLOCK) return false;
    return row < step_n_rows_from_buffer() && step_place(row) == uvec2(pos, slot);
}

// Store two adjacent blocks at once. Of the pairs that contain a block of this cell, store pair number
// `unit`. The first pair may begin with the previous cell's last block, and the last pair may end with the
// next cell's first block.
void put_pair(uint cell, uint unit) {
    const uint row = gl_WorkGroupID.z;
    const uvec2 place = step_place(row);
    const uint pos = place.x;
    const uint slot = place.y;
    const uint n = width / BLOCK;
    const uint before = cell & n & 1u; // 1 if the first pair begins in the previous cell
    bool has_first = unit >= before;
    bool has_second = 2 * unit - before + 1 < n;
    uint from = x_off + row * width + BLOCK * (2 * unit - before);
    // a thread of the row before stores both blocks
    if (!has_first && stores(row - rows_apart, pos - rows_apart, slot, pos)) return;
    const bool is_last = !has_second;
    if (is_last) has_second = stores(row + rows_apart, pos + rows_apart, slot, pos);

    const uint first = cache_off + (cell * n / 2 + unit) * (2 * WORDS + 1);
    const uint middle = first + WORDS;
    uint shared_word = has_first && has_second ? 0u : cache[middle];
    for (uint b = 0; b < 2; ++b, from += is_last ? rows_apart * width - (n - 1) * BLOCK : BLOCK) {
        if (b == 0 ? !has_first : !has_second) continue;
        const Scale scale = scale_of(from);
        uint carry = scale.bits;
        for (uint i = 0; i < WORDS; ++i) {
            const uint word = word_of(from, i, scale);
            cache[b == 0 ? first + i : middle + 1 + i] = b == 0 ? carry | (word << 16) : word;
            if (b == 0) carry = word >> 16;
        }
        shared_word = b == 0 ? (shared_word & 0xffff0000u) | carry : (shared_word & 0xffffu) | (carry << 16);
    }
    cache[middle] = shared_word;
}

// Store two blocks of whole words.
void put_two(uint cell, uint unit) {
    const uint n = width / BLOCK;
    for (uint b = 2 * unit; b < min(2 * unit + 2, n); ++b) {
        const uint from = x_off + gl_WorkGroupID.z * width + BLOCK * b;
        const uint first = cache_off + (cell * n + b) * (WORDS + 1);
        const Scale scale = scale_of(from);
        cache[first] = scale.bits;
        for (uint i = 0; i < WORDS; ++i) cache[first + 1 + i] = word_of(from, i, scale);
    }
}

void put(uint cell, uint unit) {
    vec2 pair;
    for (uint i = 0; i < 2; ++i) pair[i] = element(2 * unit + i);
    if (TYPE == CACHE_F32) {
        const uint to = cache_off + cell * width + 2 * unit;
        cache[to] = floatBitsToUint(pair.x);
        cache[to + 1] = floatBitsToUint(pair.y);
    } else if (TYPE == CACHE_F16) {
        cache[cache_off + cell * (width / 2) + unit] = half_bits(pair.x) | (half_bits(pair.y) << 16);
    } else {
        const uvec2 bits = floatBitsToUint(pair);
        cache[cache_off + cell * (width / 2) + unit] = bf16_bits(bits.x) | (bf16_bits(bits.y) << 16);
    }
}

void main() {
    const uint row = gl_WorkGroupID.z;
    if (row >= step_n_rows_from_buffer()) return;
    const uvec2 place = step_place(row);
    uint cell = block_cell(place.y, place.x / CELL_BLOCK) + place.x % CELL_BLOCK;
    if (BLOCKS != 0) {
        if ((place.x + 1) % block_size != 0) return;
        cell = first_cell + cell_in_block(cell / CELL_BLOCK, place.x, block_size, cells_per_block);
    }
    if (QUANTIZED) {
        if (2 * global_index() >= width / BLOCK) return;
        if (HAS_MINIMUM) put_two(cell, global_index());
        else put_pair(cell, global_index());
        return;
    }
    uint e = 2 * global_index(), end = width, stride = width;
    if (NORM != 0) {
        const uint first = group_index() * head_dim;
        if (first >= width) return;
        measure(x_off + row * width + first);
        e = first + 2 * gl_LocalInvocationID.x;
        end = first + head_dim;
        stride = 2 * LOCAL;
    }
    for (; e < end; e += stride) put(cell, e / 2);
}
