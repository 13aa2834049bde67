#version 450
#extension GL_GOOGLE_include_directive : require
// Compute y = max(x - m - c * s, 0), where m and s are the mean and standard deviation of a row of `width`
// values. This device holds n of these values. `moments` holds the row's sum and sum of squares.
#include "lib/types.glsl"

layout(push_constant) uniform Push {
    uint x_off, moments_off, y_off;
    uint n, width, n_rows;
    float c;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer Moments { float moments[]; };
layout(set = 0, binding = 2) writeonly buffer Y { float y[]; };

void main() {
    const uint i = global_index();
    if (i >= n * n_rows) return;
    const uint at = moments_off + 2 * (i / n);
    const float n_all = float(width), sum = moments[at];
    // Divide after the subtraction, because some devices divide inexactly, and the subtraction would amplify
    // the error.
    const float deviation = sqrt(max(n_all * moments[at + 1] - sum * sum, 0.0)) / n_all;
    y[y_off + i] = max(x[x_off + i] - (sum / n_all + c * deviation), 0.0);
}
