#version 450
#extension GL_GOOGLE_include_directive : require
// y = x in 8 bits for dot products of integers (layout: lib/q8.glsl): in blocks of 32 code = round(x / d), d = max |x| /
// 127. The same bits on every driver. Eight threads have a block, four elements each.
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint k, n_rows;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { uint y[]; };
#include "lib/exact.glsl"
#include "lib/q8.glsl"

const uint LANES = 8; // threads of a block

shared uint maxima[LOCAL];
shared int sums[LOCAL];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint lane = thread % LANES;
    const uint n_blocks = n_rows * (k / 32);
    const uint block = group_index() * (LOCAL / LANES) + thread / LANES;
    const uint own = min(block, n_blocks - 1); // surplus threads repeat the last block and write nothing
    const uint at = x_off + 32 * own + 4 * lane;
    const vec4 value = vec4(x[at], x[at + 1], x[at + 2], x[at + 3]);

    const uvec4 bits = floatBitsToUint(value) & 0x7fffffffu;
    maxima[thread] = max(max(bits.x, bits.y), max(bits.z, bits.w));
    barrier();
    uint top = 0;
    for (uint i = 0; i < LANES; ++i) top = max(top, maxima[thread - lane + i]);
    const float d = exact_mul(uintBitsToFloat(top), 1.0 / 127.0);
    const vec4 scaled = q8_usable(top) ? value * exact_reciprocal(d) : vec4(0.0);
    const ivec4 code = ivec4(roundEven(scaled));
    sums[thread] = code.x + code.y + code.z + code.w;
    barrier();

    if (block >= n_blocks) return;
    const uint row = y_off + block / (k / 32) * q8_row_words(k);
    const uint i = block % (k / 32) * 32;
    const uvec4 bytes = uvec4(code) & 0xFFu;
    y[row + i / 4 + lane] = bytes.x | (bytes.y << 8) | (bytes.z << 16) | (bytes.w << 24);
    if (lane == 0) {
        ivec2 sum = ivec2(0);
        for (uint j = 0; j < 4; ++j) sum += ivec2(sums[thread + j], sums[thread + 4 + j]);
        y[row + q8_block(k, i)] = q8_scale(top, d);
        y[row + q8_block(k, i) + 1] = (uint(sum.x) & 0xFFFFu) | (uint(sum.y) << 16);
    }
}
