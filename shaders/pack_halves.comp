#version 450
#extension GL_GOOGLE_include_directive : require
// Convert x to the blocks of lib/f16_wire.glsl. The result y is the device's slot in host memory. If KEEPS is
// set, the device also stores a copy in its own memory.
#include "lib/types.glsl"
#include "lib/f16_wire.glsl"

layout(constant_id = 1) const uint KEEPS = 1;

layout(push_constant) uniform Push {
    uint x_off, y_off, kept_off;
    uint n;
};
layout(set = 0, binding = 0) readonly buffer X { uint x[]; }; // bits of floats
layout(set = 0, binding = 1) writeonly buffer Y { uint y[]; };
layout(set = 0, binding = 2) writeonly buffer Kept { uint kept[]; };

shared uint tops[LOCAL];

uint size_of(uint bits) {
    const uint size = bits & 0x7fffffffu;
    return size < 0x7f800000u ? size : 0u;
}

void put(uint at, uint word) {
    y[y_off + at] = word;
    if (KEEPS != 0) kept[kept_off + at] = word;
}

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint first = global_index() / 16 * 128 + thread % 16 * 2;
    uvec2 pairs[4];
    uint top = 0;
    [[unroll]] for (uint j = 0; j < 4; ++j) {
        const uint i = first + 32 * j;
        pairs[j] = uvec2(i < n ? x[x_off + i] : 0u, i + 1 < n ? x[x_off + i + 1] : 0u);
        top = max(top, max(size_of(pairs[j].x), size_of(pairs[j].y)));
    }
    tops[thread] = top;
    barrier();
    [[unroll]] for (uint j = 0; j < 16; ++j) top = max(top, tops[(thread & ~15u) + j]);
    const uint bias = f16_bias(top);
    if (thread % 16 == 0 && first < n) put(f16_bias_at(first), bias);
    [[unroll]] for (uint j = 0; j < 4; ++j) {
        const uint i = first + 32 * j;
        if (i < n) put(f16_pair_at(i), f16_bits(pairs[j].x, bias) | (f16_bits(pairs[j].y, bias) << 16));
    }
}
