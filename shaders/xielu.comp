#version 450
#extension GL_GOOGLE_include_directive : require
// Compute y = alpha_p x^2 + beta x for x > 0, and y = alpha_n (e^min(x, eps) - 1 - x) + beta x otherwise.
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, y_off;
    uint n;
    float alpha_p, alpha_n, beta, eps;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { float y[]; };

// Return e^x - 1 - x for x <= 0. A Taylor series near 0 avoids cancellation. At -0.5 the first omitted term
// is 3e-9 of the sum.
float exp_beyond_line(float x) {
    if (x < -0.5) return exp(x) - 1.0 - x;
    const float high = 1.0 / 720.0 + x * (1.0 / 5040.0 + x * (1.0 / 40320.0 + x / 362880.0));
    return x * x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0 + x * high))));
}

void main() {
    const uint i = global_index();
    if (i >= n) return;
    const float value = x[x_off + i];
    const float low = min(value, eps);
    const float bent = value > 0.0 ? alpha_p * value * value : alpha_n * (exp_beyond_line(low) + (low - value));
    y[y_off + i] = bent + beta * value;
}
