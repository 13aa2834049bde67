// Functions that convert weights to floats. Each format has a block description and a function decode4, in
// one of the files included below.
//
// - `uint row_start(uint row, uint n)` returns the address of a row of n elements.
// - The length of every row is a multiple of `ROW_UNIT`.
// - `vec4 dequant4(uint start, uint k)` returns elements k..k+3 of a row, where k is a multiple of 4.
// - `vec4 dequant4_tail(start, k, n)` returns the same, with zeros for elements >= n.
// - `mat2x4 dequant8(uint start, uint k)` returns elements k..k+7, where k is a multiple of 8. It unpacks the
// bits that several elements share only once.
//
// Addresses count bytes, because an MXFP4 block has 17 bytes. Addresses have 32 bits, because a binding is
// smaller than 4 GiB. The functions read only words with requested bytes.

uint u32_at(uint at); // If BLOCK_NBYTES is a multiple of 4, so is `at`.
uint u16_at(uint at); // `at` is even
uint u8_at(uint at);
float f16_at(uint at); // `at` is even
uvec4 words4_at(uint i); // 16 bytes at word i

// Shift each of the four bytes of a word right and mask it. `mask` must clear the next byte's bits. Compilers
// recognise this expression and use the GPU's byte-to-float instruction.
uvec4 codes4(uint word, uint shift, uint mask) {
    const uint codes = (word >> shift) & (mask * 0x01010101u);
    return uvec4(codes, codes >> 8, codes >> 16, codes >> 24) & 0xFFu;
}

// vec4 decode4(uint b, uint k, uint part) returns elements k + part..k + part + 3 of the block at address b.
// The argument k is a multiple of 8, and part is 0 or 4. As few expressions as possible should depend on
// `part`, because compilers compute the others once for both parts.

#if defined(TYPE_F32)
#define ROW_UNIT 1u
#define BLOCK_NBYTES 4u
#define HAS_TAIL // a row may have any length

float decode1(uint b) { return uintBitsToFloat(u32_at(b)); }

vec4 decode4(uint b, uint k, uint part) {
    return uintBitsToFloat(uvec4(u32_at(b), u32_at(b + 4), u32_at(b + 8), u32_at(b + 12)));
}

#elif defined(TYPE_F16)
#define ROW_UNIT 1u
#define BLOCK_NBYTES 2u
#define HAS_TAIL

float decode1(uint b) { return f16_at(b); }

vec4 floats_of(uvec2 pairs) { return vec4(unpackHalf2x16(pairs.x), unpackHalf2x16(pairs.y)); }

vec4 decode4(uint b, uint k, uint part) { return floats_of(uvec2(u32_at(b), u32_at(b + 4))); }

#elif defined(TYPE_BF16)
#define ROW_UNIT 1u
#define BLOCK_NBYTES 2u
#define HAS_TAIL

float decode1(uint b) { return uintBitsToFloat(u16_at(b) << 16); }

vec4 floats_of(uvec2 pairs) {
    return uintBitsToFloat(uvec4(pairs.x << 16, pairs.x, pairs.y << 16, pairs.y) & 0xFFFF0000u);
}

vec4 decode4(uint b, uint k, uint part) { return floats_of(uvec2(u32_at(b), u32_at(b + 4))); }
#endif

#include "lib/dequant_32.glsl"
#include "lib/dequant_k.glsl"
#include "lib/dequant_iq.glsl"
#include "lib/dequant_tq.glsl"

#ifndef BLOCK_NBYTES
#error unknown TYPE has no block description and no decode4 in dequant.glsl or the file of its family
#endif

// WHOLE_FOURS: row lengths are multiples of 4, so four elements of 2 bytes are two words of the same row.
#ifndef WHOLE_FOURS
#define WHOLE_FOURS false
#endif

#ifdef HOLD
// HOLD: hold(address) copies HELD elements to registers, and reads each word once. All other functions then
// read this copy, which begins at address 0. The including file declares w as an address
// (lib/addresses.glsl).
const uint w_off = 0;
const uint HELD = ROW_UNIT == 1 ? 32 : ROW_UNIT;
const uint HELD_NBYTES = HELD / ROW_UNIT * BLOCK_NBYTES;
uint held[(HELD_NBYTES + 3) / 4];

void hold(uint b) {
    const uint first = b >> 2;
    if (BLOCK_NBYTES % 4 == 0) {
        [[unroll]] for (uint i = 0; i < HELD_NBYTES / 4; ++i) held[i] = w.at[first + i];
        return;
    }
    const uint shift = 8 * (b & 3u);
    const uint last = (b + HELD_NBYTES - 1) >> 2;
    uint low = w.at[first];
    [[unroll]] for (uint i = 0; i < (HELD_NBYTES + 3) / 4; ++i) {
        const uint high = w.at[min(first + i + 1, last)];
        held[i] = (low >> shift) | ((high << 1) << (31 - shift));
        low = high;
    }
}

uint word_at(uint i) { return held[i]; }

#ifdef HAS_TAIL
float tail1(uint b) { // an element after the last full group of HELD elements
    held[0] = w.at[b >> 2] >> (8 * (b & 3u));
    return decode1(0);
}
#endif
#else
uint word_at(uint i) { return w[i]; }
#endif

// Compilers for NVIDIA GPUs split 16-byte loads of unknown alignment. If WIDE_W is set, w and its rows are
// aligned to 16 bytes, and w4 is the same buffer as w.
uvec4 words4_at(uint i) {
#ifdef WIDE_W
    if (WIDE_W) return w4[i / 4];
#endif
    return uvec4(word_at(i), word_at(i + 1), word_at(i + 2), word_at(i + 3));
}

// Return 32 bits of two consecutive words, beginning at bit `shift`. There is no branch, with which
// SwiftShader took 30 s instead of 1 s to compile mat_dot.
uint joined(uint low, uint high, uint shift) {
    return mix((low >> shift) | (high << (32 - shift)), low, shift == 0);
}

uint u32_at(uint at) {
    const uint low = word_at(at >> 2);
    if (BLOCK_NBYTES % 4 == 0) return low;
#if defined(TYPE_F16) || defined(TYPE_BF16) // SwiftShader does not remove branches on specialization constants
    if (WHOLE_FOURS) return low;
#endif
    return joined(low, word_at((at + 3) >> 2), 8 * (at & 3u));
}

uint u16_at(uint at) { return (word_at(at >> 2) >> (8 * (at & 2u))) & 0xFFFFu; }

uint u8_at(uint at) { return (word_at(at >> 2) >> (8 * (at & 3u))) & 0xFFu; }

float f16_at(uint at) {
    const vec2 pair = unpackHalf2x16(word_at(at >> 2));
    return (at & 2u) == 0u ? pair.x : pair.y;
}

uint row_start(uint row, uint n) { return 4 * w_off + row * (n / ROW_UNIT) * BLOCK_NBYTES; }

vec4 dequant4(uint start, uint k, uint part) {
    if (ROW_UNIT == 1) return decode4(start + (k + part) * BLOCK_NBYTES, 0, 0);
    return decode4(start + k / ROW_UNIT * BLOCK_NBYTES, k % ROW_UNIT, part);
}

vec4 dequant4(uint start, uint k) { return dequant4(start, k & ~7u, k & 4u); }

mat2x4 dequant8(uint start, uint k) {
#if defined(HAS_TAIL) && defined(WIDE_W)
    if (WIDE_W) {
        const uint first = (start + k * BLOCK_NBYTES) / 4;
#ifdef TYPE_F32
        return mat2x4(uintBitsToFloat(words4_at(first)), uintBitsToFloat(words4_at(first + 4)));
#else
        const uvec4 words = words4_at(first);
        return mat2x4(floats_of(words.xy), floats_of(words.zw));
#endif
    }
#endif
    return mat2x4(dequant4(start, k, 0), dequant4(start, k, 4));
}

#ifdef HAS_TAIL
float dequant1(uint start, uint k) { return decode1(start + k * BLOCK_NBYTES); }

vec4 dequant4_tail(uint start, uint k, uint n) {
    if (WHOLE_FOURS) { // no branch, so that reads overlap
        const vec4 value = dequant4(start, min(k, n - 4));
        return k < n ? value : vec4(0.0);
    }
    if (k + 4 <= n) return dequant4(start, k);
    vec4 value = vec4(0.0);
    for (uint i = 0; i < 3; ++i) {
        if (k + i < n) value[i] = dequant1(start, k + i);
    }
    return value;
}
#else
vec4 dequant4_tail(uint start, uint k, uint n) { return k < n ? dequant4(start, k) : vec4(0.0); }
#endif
