// Quantize activations to 8 bits (lib/q8.glsl), with the same bits on every driver. In each block of 32, code
// = round(x / d), where d = max |x| / 127. Eight neighbouring threads share a block. The including file
// declares y as words. The file defines Q8_QUADS, the number of groups of four elements that a thread stores
// per call.
#include "lib/exact.glsl"
#include "lib/q8.glsl"

shared uint q8_tops[Q8_QUADS * LOCAL];
shared int q8_sums[Q8_QUADS * LOCAL];

// Store elements of an n-element row, which begins at word `row` of y. In `value`, entry q holds the four
// elements that begin at i + 4 * q * LOCAL. Elements >= `end` are not stored. All threads must call this
// function.
void put_q8(vec4 value[Q8_QUADS], uint row, uint n, uint i, uint end) {
    const uint thread = gl_LocalInvocationID.x;
    const uint lane = thread % 8;
    [[unroll]] for (uint q = 0; q < Q8_QUADS; ++q) {
        const uvec4 bits = floatBitsToUint(value[q]) & 0x7fffffffu;
        q8_tops[q * LOCAL + thread] = max(max(bits.x, bits.y), max(bits.z, bits.w));
    }
    barrier();
    [[unroll]] for (uint q = 0; q < Q8_QUADS; ++q) {
        const uint block = q * LOCAL + thread - lane;
        uint top = 0;
        [[unroll]] for (uint t = 0; t < 8; ++t) top = max(top, q8_tops[block + t]);
        const float d = exact_mul(uintBitsToFloat(top), 1.0 / 127.0);
        const vec4 scaled = q8_usable(top) ? value[q] * exact_reciprocal(d) : vec4(0.0);
        const ivec4 code = ivec4(roundEven(scaled));
        q8_sums[block + lane] = code.x + code.y + code.z + code.w;
        const uint at = i + 4 * q * LOCAL;
        const uvec4 bytes = uvec4(code) & 0xFFu;
        if (at < end) {
            y[row + at / 4] = bytes.x | (bytes.y << 8) | (bytes.z << 16) | (bytes.w << 24);
            if (lane == 0) y[row + q8_block(n, at)] = q8_scale(top, d);
        }
    }
    barrier();
    [[unroll]] for (uint q = 0; q < Q8_QUADS; ++q) {
        const uint block = q * LOCAL + thread - lane;
        ivec2 sum = ivec2(0);
        [[unroll]] for (uint t = 0; t < 4; ++t) sum += ivec2(q8_sums[block + t], q8_sums[block + 4 + t]);
        const uint at = i + 4 * q * LOCAL;
        if (lane == 0 && at < end) y[row + q8_block(n, at) + 1] = (uint(sum.x) & 0xFFFFu) | (uint(sum.y) << 16);
    }
}
