// 8-bit activations as quantize_q8 makes them, by a workgroup that has one element per thread, 32 neighbours a block.
// The including file declares y as words; LOCAL is a multiple of 32.
#include "lib/exact.glsl"
#include "lib/q8.glsl"

shared uint q8_shared[LOCAL];

// Element i of the row of n that begins at word `row` of y; the threads of whole blocks are outside. Uniform control
// flow only.
void put_q8(float value, uint row, uint n, uint i, bool inside) {
    const uint thread = gl_LocalInvocationID.x;
    const uint first = thread & ~31u;
    q8_shared[thread] = floatBitsToUint(value) & 0x7fffffffu;
    barrier();
    uint top = 0;
    for (uint j = 0; j < 32; ++j) top = max(top, q8_shared[first + j]);
    barrier();
    const float d = exact_mul(uintBitsToFloat(top), 1.0 / 127.0);
    const int code = q8_usable(top) ? int(roundEven(value * exact_reciprocal(d))) : 0;
    q8_shared[thread] = uint(code) & 0xFFu;
    barrier();
    if (inside && thread % 4 == 0) {
        uint word = 0;
        for (uint j = 0; j < 4; ++j) word |= q8_shared[thread + j] << (8 * j);
        y[row + i / 4] = word;
    }
    if (inside && thread == first) {
        uvec2 sum = uvec2(0); // of codes as two's complement
        for (uint j = 0; j < 16; ++j) {
            sum += uvec2(q8_shared[first + j], q8_shared[first + 16 + j]);
            sum -= (uvec2(q8_shared[first + j], q8_shared[first + 16 + j]) & 0x80u) << 1;
        }
        y[row + q8_block(n, i)] = q8_scale(top, d);
        y[row + q8_block(n, i) + 1] = (sum.x & 0xFFFFu) | (sum.y << 16);
    }
    barrier();
}
