#version 450
#extension GL_GOOGLE_include_directive : require
// Choose each row's n_used experts and compute their weights. All devices must choose the same experts, so
// sums have a fixed order, and functions come from lib/exact.glsl. An expert's rank is the number of experts
// with a larger key, or with an equal key and a lower number. All ranks differ.
#include "lib/types.glsl"
#include "lib/exact.glsl"

layout(constant_id = 1) const uint GATING = 0;
layout(constant_id = 2) const uint HAS_BIAS = 0; // 1: add a bias to the logits
layout(constant_id = 3) const uint HAS_SELECT = 0; // 1: a bias of the probabilities for the choice; 2: choices
layout(constant_id = 4) const uint HAS_GAIN = 0; // 1: multiply each weight by a factor
const uint SOFTMAX = 0, SIGMOID = 1, SOFTMAX_WEIGHT = 2, SPARSE_MIXER = 3, ROOT_SOFTPLUS = 4;
const uint MAX_EXPERTS = 1024, MAX_USED = 32, MAX_GROUPS = 64;
const uint LANES = 128; // number of partial sums; constant, so that the order is fixed
const float MIXED_BELOW = 0.02; // a sparse mixer excludes logits that are lower by a larger share
const float MIN_SUM = 6.103515625e-5; // weights with a smaller sum are not scaled to the sum 1

layout(push_constant) uniform Push {
    uint logits_off, h_off, bias_off, select_off, gain_off, ids_off, weights_off;
    uint n_embd, n_experts, n_used, n_rows, n_groups, n_groups_used, norm_w, per_id;
    float eps, scale, logit_scale, softcap;
};
layout(set = 0, binding = 0) readonly buffer Logits { float logits[]; };
layout(set = 0, binding = 1) readonly buffer H { float h[]; };
layout(set = 0, binding = 2) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = 3) readonly buffer Select { float select[]; };
layout(set = 0, binding = 4) readonly buffer Gain { float gain[]; };
layout(set = 0, binding = 5) writeonly buffer Ids { uint ids[]; };
layout(set = 0, binding = 6) writeonly buffer Weights { float weights[]; };

shared uint key[MAX_EXPERTS]; // decides the choice
shared float value[MAX_EXPERTS]; // logits, later probabilities
shared float lanes[LANES];
shared uint group_key[MAX_GROUPS];
shared uint chosen[MAX_USED];

const uint NAN_KEY = 1u; // Below all numbers' keys. Key 0 marks groups that are not chosen.

// Return an unsigned key with the order of x. Both zeros have the same key, and NaN has the smallest key.
uint order_key(float x) {
    const uint bits = floatBitsToUint(x);
    const uint mag = bits & 0x7fffffffu;
    if (mag > 0x7f800000u) return NAN_KEY;
    if (mag == 0u) return 0x80000000u;
    return bits == mag ? bits | 0x80000000u : ~bits;
}

float of_key(uint k) {
    return uintBitsToFloat(k == NAN_KEY ? 0x7fc00000u : k >= 0x80000000u ? k ^ 0x80000000u : ~k);
}

bool is_nan(float x) { return order_key(x) == NAN_KEY; }

float join_lanes() {
    const uint thread = gl_LocalInvocationID.x;
    barrier();
    for (uint s = LANES / 2; s > 0; s >>= 1) {
        for (uint v = thread; v < s; v += LOCAL) {
            precise const float joined = lanes[v] + lanes[v + s];
            lanes[v] = joined;
        }
        barrier();
    }
    const float total = lanes[0];
    barrier();
    return total;
}

float norm_of(uint row) {
    if (eps < 0.0) return logit_scale; // the router reads h without a norm
    for (uint v = gl_LocalInvocationID.x; v < LANES; v += LOCAL) {
        float sum = 0.0;
        for (uint i = v; i < n_embd; i += LANES) {
            const float x = h[h_off + row * n_embd + i];
            sum = exact_mad(x, x, sum);
        }
        lanes[v] = sum;
    }
    return exact_mul(exact_inverse_sqrt(exact_mad(join_lanes(), exact_reciprocal(float(n_embd)), eps)), logit_scale);
}

// Return c tanh(x / c) with c = softcap, or x if c is 0. The function is monotonic, so keys need no softcap.
float capped(float x) {
    if (softcap == 0.0 || is_nan(x)) return x;
    return exact_mul(softcap, exact_mad(2.0, exact_sigmoid(exact_mul(exact_mul(x, exact_reciprocal(softcap)), 2.0)), -1.0));
}

float exp_below(float x, float top) {
    precise const float below = x - top;
    return is_nan(below) ? below : exact_exp(below); // NaN stays NaN, as in exp
}

void softmax(float top) {
    for (uint v = gl_LocalInvocationID.x; v < LANES; v += LOCAL) {
        precise float sum = 0.0;
        for (uint e = v; e < n_experts; e += LANES) {
            value[e] = exp_below(value[e], top);
            sum = sum + value[e];
        }
        lanes[v] = sum;
    }
    const float total = join_lanes();
    const float factor = is_nan(total) ? total : exact_reciprocal(total);
    for (uint e = gl_LocalInvocationID.x; e < n_experts; e += LOCAL) value[e] = exact_mul(value[e], factor);
}

// Set each expert's key to its probability plus its selection bias. A group's score is the sum of its two
// best experts' values. Only the n_groups_used groups with the largest scores remain.
void select_by_probability() {
    const uint thread = gl_LocalInvocationID.x;
    barrier();
    for (uint e = thread; e < n_experts; e += LOCAL) {
        precise float sum = value[e];
        if (HAS_SELECT == 1) sum = sum + select[select_off + e];
        key[e] = order_key(sum);
    }
    barrier();
    if (n_groups == 1) return;
    const uint size = n_experts / n_groups;
    for (uint g = thread; g < n_groups; g += LOCAL) {
        uint best = 0, second = 0;
        for (uint e = g * size; e < (g + 1) * size; ++e) {
            second = max(second, min(best, key[e]));
            best = max(best, key[e]);
        }
        precise const float sum = of_key(best) + of_key(second);
        group_key[g] = order_key(sum);
    }
    barrier();
    for (uint e = thread; e < n_experts; e += LOCAL) {
        const uint own = group_key[e / size];
        uint place = 0;
        for (uint g = 0; g < n_groups; ++g) place += uint(group_key[g] > own || (group_key[g] == own && g < e / size));
        if (place >= n_groups_used) key[e] = 0u;
    }
    barrier();
}

// Return the softmax weight of the expert with rank u among the experts of rank u or more whose logits are
// close.
float mixed_sparsely(uint u) {
    const float own = value[chosen[u]];
    precise float sum = 0.0;
    for (uint e = 0; e < n_experts; ++e) {
        bool better = false;
        for (uint j = 0; j < u; ++j) better = better || chosen[j] == e;
        precise const float below = own - value[e];
        const bool far = below > exact_mul(max(max(value[e], -value[e]), own), MIXED_BELOW);
        if (!better && !far) sum = sum + exp_below(value[e], own);
    }
    return is_nan(sum) ? sum : exact_reciprocal(sum);
}

// Return the weight of the expert with rank u, normalised according to GATING.
float weight_of(uint u) {
    if (GATING == SPARSE_MIXER) return mixed_sparsely(u);
    const float own = value[chosen[u]];
    if (GATING != SOFTMAX_WEIGHT && norm_w == 0) return own;
    float top = own;
    for (uint j = 0; j < n_used; ++j) top = max(top, value[chosen[j]]);
    precise float sum = 0.0;
    for (uint j = 0; j < n_used; ++j) {
        const float other = value[chosen[j]];
        sum = sum + (GATING == SOFTMAX_WEIGHT ? exp_below(other, top) : other);
    }
    const float factor = is_nan(sum) ? sum : exact_reciprocal(max(sum, MIN_SUM));
    return exact_mul(GATING == SOFTMAX_WEIGHT ? exp_below(own, top) : own, factor);
}

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint row = group_index();
    if (row >= n_rows) return;
    const uint base = logits_off + row * n_experts;

    const float norm = norm_of(row);
    for (uint e = thread; e < n_experts; e += LOCAL) {
        const float raw = logits[base + e];
        const float logit = HAS_BIAS != 0 ? exact_mad(raw, norm, bias[bias_off + e]) : exact_mul(raw, norm);
        value[e] = capped(logit);
        key[e] = order_key(HAS_BIAS != 0 ? logit : raw); // the factor does not change the order
    }
    barrier();
    if (GATING == SOFTMAX) {
        uint largest = 0;
        for (uint e = 0; e < n_experts; ++e) largest = max(largest, key[e]);
        softmax(capped(HAS_BIAS != 0 ? of_key(largest) : exact_mul(of_key(largest), norm)));
    } else if (GATING == SIGMOID) {
        for (uint e = thread; e < n_experts; e += LOCAL) {
            if (!is_nan(value[e])) value[e] = exact_sigmoid(value[e]);
        }
    }
    if (GATING == ROOT_SOFTPLUS) {
        for (uint e = thread; e < n_experts; e += LOCAL) {
            if (!is_nan(value[e])) value[e] = exact_root_softplus(value[e]);
        }
    }
    if (HAS_SELECT == 1 || n_groups > 1) select_by_probability();
    if (HAS_SELECT == 2) {
        for (uint u = thread; u < n_used; u += LOCAL) {
            chosen[u] = min(uint(select[select_off + row * n_used + u]), n_experts - 1);
        }
    }

    // Ranking four experts at a time takes a quarter of the reads.
    for (uint first = HAS_SELECT == 2 ? n_experts : thread; first < n_experts; first += 4 * LOCAL) {
        const uvec4 at = first + LOCAL * uvec4(0, 1, 2, 3);
        const uvec4 safe = min(at, n_experts - 1);
        const uvec4 own = uvec4(key[safe.x], key[safe.y], key[safe.z], key[safe.w]);
        uvec4 place = uvec4(0);
        for (uint j = 0; j < n_experts; ++j) {
            const uvec4 other = uvec4(key[j]);
            place += uvec4(greaterThan(other, own)) + uvec4(equal(other, own)) * uvec4(lessThan(uvec4(j), at));
        }
        for (uint i = 0; i < 4; ++i) {
            if (at[i] < n_experts && place[i] < n_used) chosen[place[i]] = at[i];
        }
    }
    barrier();
    for (uint u = thread; u < n_used; u += LOCAL) {
        float weight = exact_mul(weight_of(u), scale);
        if (HAS_GAIN != 0) weight = exact_mul(weight, gain[gain_off + chosen[u]]);
        ids[ids_off + row * n_used + u] = chosen[u] / per_id;
        weights[weights_off + row * n_used + u] = weight;
    }
}
