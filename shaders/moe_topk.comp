#version 450
#extension GL_GOOGLE_include_directive : require
// The n_used experts of the largest logits and their weights, one workgroup per row. An expert's place is the number
// of experts before it: compared as integers, so no two share a place, whatever the logits are, and all devices agree.
// Weights are the softmax over all experts of logits / rms(h), optionally normalised over the chosen ones.
#include "lib/types.glsl"
#include "lib/reduce.glsl"

const uint MAX_EXPERTS = 1024;
const uint MAX_USED = 32;
const float MIN_SUM = 6.103515625e-5; // below it the chosen weights are not scaled up to 1 any more

layout(push_constant) uniform Push {
    uint logits_off, h_off, ids_off, weights_off;
    uint n_embd, n_experts, n_used, n_rows;
    float eps, scale;
    uint norm_w;
};
layout(set = 0, binding = 0) readonly buffer Logits { float logits[]; };
layout(set = 0, binding = 1) readonly buffer H { float h[]; };
layout(set = 0, binding = 2) writeonly buffer Ids { uint ids[]; };
layout(set = 0, binding = 3) writeonly buffer Weights { float weights[]; };

shared uint key[MAX_EXPERTS];
shared uint chosen[MAX_USED];
shared float prob[MAX_USED];

// Bits whose unsigned order is that of the values: both zeros are equal, NaN comes last, as 0.
uint order_key(float value) {
    const uint bits = floatBitsToUint(value);
    const uint mag = bits & 0x7fffffffu;
    if (mag > 0x7f800000u) return 0u;
    if (mag == 0u) return 0x80000000u;
    return bits == mag ? bits | 0x80000000u : ~bits;
}

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint row = group_index();
    if (row >= n_rows) return;
    const uint base = logits_off + row * n_experts;

    for (uint e = thread; e < n_experts; e += LOCAL) key[e] = order_key(logits[base + e]);
    barrier();
    for (uint e = thread; e < n_experts; e += LOCAL) {
        const uint own = key[e];
        uint place = 0;
        for (uint j = 0; j < n_experts; ++j) place += uint(key[j] > own || (key[j] == own && j < e));
        if (place < n_used) {
            chosen[place] = e;
            ids[ids_off + row * n_used + place] = e;
        }
    }

    float squares = 0.0;
    for (uint i = thread; i < n_embd; i += LOCAL) {
        const float value = h[h_off + row * n_embd + i];
        squares += value * value;
    }
    const float norm = 1.0 / sqrt(reduce_sum(squares) / float(n_embd) + eps); // its barriers also cover `chosen`
    const float top = logits[base + chosen[0]];
    float total = 0.0;
    for (uint e = thread; e < n_experts; e += LOCAL) {
        const float value = logits[base + e];
        total += key[e] == 0u ? value : exp((value - top) * norm); // SwiftShader's exp(NaN) is 0
    }
    barrier(); // all have read the first sum
    total = reduce_sum(total);
    for (uint u = thread; u < n_used; u += LOCAL) prob[u] = exp((logits[base + chosen[u]] - top) * norm) / total;
    barrier();

    float factor = scale;
    if (norm_w != 0) {
        float sum = 0.0;
        for (uint u = 0; u < n_used; ++u) sum += prob[u];
        factor /= max(sum, MIN_SUM);
    }
    for (uint u = thread; u < n_used; u += LOCAL) weights[weights_off + row * n_used + u] = prob[u] * factor;
}
