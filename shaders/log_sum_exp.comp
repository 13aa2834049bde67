#version 450
#extension GL_GOOGLE_include_directive : require
// Write the maximum of each chunk of each row, and the chunk's sum of exp(x - maximum). The workgroup ID is
// (chunk, -, row).
#include "lib/types.glsl"
#include "lib/reduce.glsl"

layout(constant_id = 1) const uint BATCH = 1; // elements in flight

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint n, n_rows, chunk, n_chunks;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { float y[]; };

shared float peaks[LOCAL];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint row = gl_WorkGroupID.z;
    const uint base = x_off + row * n;
    const uint begin = gl_WorkGroupID.x * chunk;
    const uint end = min(begin + chunk, n);

    float value[BATCH];
    float peak = uintBitsToFloat(0xff800000u); // -inf
    for (uint first = begin + thread; first < end; first += BATCH * LOCAL) {
        [[unroll]] for (uint u = 0; u < BATCH; ++u) value[u] = x[base + min(first + u * LOCAL, end - 1)];
        [[unroll]] for (uint u = 0; u < BATCH; ++u) peak = value[u] > peak ? value[u] : peak;
    }
    peaks[thread] = peak;
    barrier();
    for (uint s = LOCAL / 2; s > 0; s >>= 1) {
        if (thread < s) peaks[thread] = max(peaks[thread], peaks[thread + s]);
        barrier();
    }
    peak = peaks[0];

    // A chunk of only -inf has the sum 0. NaN or +inf in a chunk makes the sum NaN.
    const float shift = peak == uintBitsToFloat(0xff800000u) ? 0.0 : peak;
    float sum = 0.0;
    for (uint first = begin + thread; first < end; first += BATCH * LOCAL) {
        [[unroll]] for (uint u = 0; u < BATCH; ++u) value[u] = x[base + min(first + u * LOCAL, end - 1)];
        [[unroll]] for (uint u = 0; u < BATCH; ++u) sum += first + u * LOCAL < end ? exp(value[u] - shift) : 0.0;
    }
    sum = reduce_sum(sum);
    if (thread == 0) {
        const uint at = y_off + 2 * (row * n_chunks + gl_WorkGroupID.x);
        y[at] = peak;
        y[at + 1] = sum;
    }
}
