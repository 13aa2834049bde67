#version 450
#extension GL_GOOGLE_include_directive : require
// cache[cell of the row's position] = x[row]. A thread stores a pair of elements (an f16 pair is one word with one
// writer), rotated as rope does where n_rot says so, and normed with NORM, a workgroup per head then. Or it quantizes a
// block of 32 as ggml's reference does: d = max|x| / 127, or the x of the largest magnitude / -8. Blocks have an odd
// number of halves, so neighbours may share a word: its halves are set by atomics.
#include "lib/types.glsl"
#include "lib/reduce.glsl"
#include "lib/half.glsl"
#include "lib/bf16.glsl"
#include "lib/cache_types.glsl"
#include "lib/divide.glsl"

layout(constant_id = 1) const uint TYPE = 1;
layout(constant_id = 2) const uint NORM = 0; // 1: each head is divided by its RMS, 2: and multiplied by w

layout(push_constant) uniform Push {
    uint x_off, w_off, cos_sin_off, cells_off, cache_off;
    uint width, n_rows, blocks_per_slot, head_dim, n_rot, half_split;
    float eps;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer W { float w[]; };
layout(set = 0, binding = 2) readonly buffer CosSin { float cos_sin[]; };
layout(set = 0, binding = 3) readonly buffer Cells { uint cells[]; };
layout(set = 0, binding = 4) buffer Cache { uint cache[]; };

#define STEP_BINDING 5
#include "lib/step.glsl"
#include "lib/cells.glsl"
#include "lib/head.glsl"

const bool QUANTIZED = TYPE == CACHE_Q8_0 || TYPE == CACHE_Q4_0;
const uint UNIT = QUANTIZED ? BLOCK : 2; // elements of a thread
const uint N_CODES = TYPE == CACHE_Q8_0 ? 8 : 4; // words of codes in a block

// Element e of the row, as it goes into the cache; blocks would need each twice.
float element(uint e) {
    const uint row = gl_WorkGroupID.z;
    const uint i = e % head_dim;
    const uint head = x_off + row * width + e - i;
    const uint gap = half_split != 0 ? n_rot / 2 : 1; // from the first of a pair to the second
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

uint code8(float value, float inverse) {
    precise float scaled = value * inverse;
    precise float mag = abs(scaled);
    precise float whole = floor(mag);
    precise float rounded = whole + floor(2.0 * (mag - whole)); // half away from zero
    return uint(int(scaled < 0.0 ? -rounded : rounded)) & 0xffu;
}

uint code4(float value, float inverse) {
    precise float scaled = value * inverse;
    precise float shifted = scaled + 8.5;
    return uint(min(int(shifted), 15));
}

void put_half(uint h, uint bits) {
    const uint shift = (h & 1u) << 4;
    atomicAnd(cache[h >> 1], ~(0xffffu << shift));
    atomicOr(cache[h >> 1], bits << shift);
}

void put_block(uint h, uint from) {
    float top = 0.0; // of the largest magnitude, the first of equals
    for (uint i = 0; i < BLOCK; ++i) {
        const float value = x[from + i];
        if (abs(value) > abs(top)) top = value;
    }
    float d = TYPE == CACHE_Q8_0 ? abs(top) : top * -0.125;
    const bool is_zero = abs(d) < 1.0e-30; // far below what a half can say
    if (TYPE == CACHE_Q8_0 && !is_zero) d = divide(d, 127.0);
    float inverse = is_zero ? 0.0 : divide(1.0, abs(d));
    if (d < 0.0) inverse = -inverse;

    uint words[N_CODES];
    for (uint i = 0; i < N_CODES; ++i) {
        words[i] = 0u;
        for (uint j = 0; j < 4; ++j) {
            const uint at = from + 4 * i + j;
            uint code;
            if (TYPE == CACHE_Q8_0) {
                code = code8(x[at], inverse);
            } else {
                code = code4(x[at], inverse) | (code4(x[at + BLOCK / 2], inverse) << 4);
            }
            words[i] |= code << (8 * j);
        }
    }
    const uint bits = half_bits(d);
    const uint first = h >> 1;
    if ((h & 1u) != 0u) {
        put_half(h, bits);
        for (uint i = 0; i < N_CODES; ++i) cache[first + 1 + i] = words[i];
    } else {
        cache[first] = bits | (words[0] << 16);
        for (uint i = 1; i < N_CODES; ++i) cache[first + i] = (words[i - 1] >> 16) | (words[i] << 16);
        put_half(h + 2 * N_CODES, words[N_CODES - 1] >> 16);
    }
}

void put(uint cell, uint unit) {
    if (QUANTIZED) {
        const uint halves = TYPE == CACHE_Q8_0 ? Q8_0_HALVES : Q4_0_HALVES;
        put_block(2 * cache_off + (cell * (width / BLOCK) + unit) * halves, x_off + gl_WorkGroupID.z * width + BLOCK * unit);
        return;
    }
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
    if (row >= step_n_rows()) return;
    const uint pos = step_params.rows[row].x;
    const uint cell = block_cell(step_params.rows[row].y, pos / CELL_BLOCK) + pos % CELL_BLOCK;
    uint e = UNIT * global_index(), end = width, stride = width;
    if (NORM != 0) {
        const uint first = group_index() * head_dim;
        if (first >= width) return;
        measure(x_off + row * width + first);
        e = first + UNIT * gl_LocalInvocationID.x;
        end = first + head_dim;
        stride = UNIT * LOCAL;
    }
    for (; e < end; e += stride) put(cell, e / UNIT);
}
