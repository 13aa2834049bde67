#version 450
#extension GL_GOOGLE_include_directive : require
// Convert rows of x to F16 (lib/half_rows.glsl), scaled so that no value overflows: y[r] = x[r] / s. The
// scale s is the power of two with max |x[r]| / s in 1..2. If the row has inf or NaN or is all zeros, s is 1.
#include "lib/types.glsl"
#include "lib/half.glsl"
#include "lib/half_rows.glsl"

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint k, n_rows;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { uint y[]; };

shared uint top; // bits of the largest magnitude

float at(uint row, uint i) { return i < k ? x[x_off + row * k + i] : 0.0; }

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint row = group_index();
    if (row >= n_rows) return;
    if (thread == 0) top = 0;
    barrier();
    uint own = 0;
    for (uint i = thread; i < k; i += LOCAL) own = max(own, floatBitsToUint(x[x_off + row * k + i]) & 0x7FFFFFFFu);
    atomicMax(top, own);
    barrier();

    const bool scaled = top != 0 && top < 0x7F800000u;
    // The clamp makes the scale's reciprocal a normal number.
    const uint exponent = scaled ? clamp(top >> 23, 1u, 253u) : 127u;
    const float scale = uintBitsToFloat((254u - exponent) << 23);
    const uint begin = y_off + row * half_row_words(k);
    for (uint word = thread; word < half_words(k); word += LOCAL) {
        const uint low = half_bits(at(row, 2 * word) * scale);
        y[begin + word] = low | (half_bits(at(row, 2 * word + 1) * scale) << 16);
    }
    if (thread < 4) y[begin + half_words(k) + thread] = thread == 0 ? exponent << 23 : 0u;
}
