#version 450
#extension GL_GOOGLE_include_directive : require
// Finish an all-reduce: h = residual + the devices' partial sums in slot order, and y = rms_norm(h) * w.
// Because the order is fixed, h has the same bits on all devices. The device's own partial sum is rounded
// like the sums in the slots: by this shader if WIRE is 1, by pack_halves if WIRE is 2.
#include "lib/types.glsl"
#include "lib/reduce.glsl"
#include "lib/bf16.glsl"
#include "lib/f16_wire.glsl"

layout(constant_id = 1) const uint HAS_RESIDUAL = 1; // 0: omit the residual
layout(constant_id = 2) const uint HAS_NORM = 1; // 0: write only h.
// The slots hold floats (0), pairs of bfloat16 (1) or blocks of f16_wire.glsl (2).
layout(constant_id = 3) const uint WIRE = 0;
layout(constant_id = 4) const uint BATCH = 1; // elements in flight

layout(push_constant) uniform Push {
    uint residual_off, own_off, slots_off, w_off, h_off, y_off;
    uint n, n_rows, n_slots, own_index, slot_stride, writers;
    float eps;
};
layout(set = 0, binding = 0) readonly buffer Residual { float residual[]; };
layout(set = 0, binding = 1) readonly buffer Own { uint own[]; }; // floats, or blocks (WIRE 2)
layout(set = 0, binding = 2) readonly buffer Slots { uint slots[]; };
layout(set = 0, binding = 3) readonly buffer W { float w[]; };
layout(set = 0, binding = 4) buffer H { float h[]; }; // a thread reads only elements that it wrote
layout(set = 0, binding = 5) writeonly buffer Y { uint y[]; }; // floats, or 8 bits (OUT_Q8)
#include "lib/row_elements.glsl"

float slot_value(uint s, uint i) {
    const uint base = slots_off + s * slot_stride;
    if (WIRE == 1) return bf16_value(slots[base + i / 2], i);
    if (WIRE == 2) return f16_value(slots[base + f16_pair_at(i)], i, slots[base + f16_bias_at(i)]);
    return uintBitsToFloat(slots[base + i]);
}

float own_value(uint i) {
    if (WIRE == 1) return uintBitsToFloat(bf16_bits(own[own_off + i]) << 16);
    if (WIRE == 2) return f16_value(own[own_off + f16_pair_at(i)], i, own[own_off + f16_bias_at(i)]);
    return uintBitsToFloat(own[own_off + i]);
}

void main() {
    const uint row = group_index();
    if (row >= n_rows) return;
    const uint lane = gl_LocalInvocationID.x;
    float squares = 0.0;
    for (uint first = FIRST * lane; first < n; first += EACH * LOCAL) {
        float base[EACH];
        float part[EACH];
        precise float sum[EACH];
        [[unroll]] for (uint u = 0; u < EACH; ++u) {
            const uint i = first + u * NEXT;
            if (HAS_RESIDUAL != 0 && i < n) base[u] = residual[residual_off + row * n + i];
            sum[u] = 0.0;
        }
        for (uint s = 0; s < n_slots; ++s) {
            if ((writers >> s & 1u) == 0u) continue;
            [[unroll]] for (uint u = 0; u < EACH; ++u) {
                const uint at = row * n + min(first + u * NEXT, n - 1);
                part[u] = s == own_index ? own_value(at) : slot_value(s, at);
            }
            [[unroll]] for (uint u = 0; u < EACH; ++u) sum[u] = sum[u] + part[u];
        }
        [[unroll]] for (uint u = 0; u < EACH; ++u) {
            if (first + u * NEXT < n) {
                const uint at = row * n + first + u * NEXT;
                if (HAS_RESIDUAL != 0) sum[u] = base[u] + sum[u];
                h[h_off + at] = sum[u];
                squares += sum[u] * sum[u];
            }
        }
    }
    if (HAS_NORM == 0) return;
    const float scale = 1.0 / sqrt(reduce_sum(squares) / float(n) + eps);
#ifdef OUT_Q8
    for (uint first = 4 * lane; first - 4 * lane < n; first += 4 * Q8_QUADS * LOCAL) {
        vec4 quad[Q8_QUADS];
        [[unroll]] for (uint q = 0; q < Q8_QUADS; ++q) {
            const uint i = min(first + 4 * q * LOCAL, n - 4);
            const uint at = h_off + row * n + i;
            quad[q] = vec4(h[at], h[at + 1], h[at + 2], h[at + 3]) * scale;
            quad[q] *= vec4(w[w_off + i], w[w_off + i + 1], w[w_off + i + 2], w[w_off + i + 3]);
        }
        put_q8(quad, y_off + row * q8_row_words(n), n, first, n);
    }
#else
    for (uint first = lane; first < n; first += EACH * LOCAL) {
        float value[EACH];
        [[unroll]] for (uint u = 0; u < EACH; ++u) {
            const uint i = min(first + u * LOCAL, n - 1);
            value[u] = h[h_off + row * n + i] * scale * w[w_off + i];
        }
        [[unroll]] for (uint u = 0; u < EACH; ++u) {
            const uint i = first + u * LOCAL;
            if (i < n) y[y_off + row * n + i] = floatBitsToUint(value[u]);
        }
    }
#endif
}
