#version 450
#extension GL_GOOGLE_include_directive : require
// Normalise each group: y = x / sqrt(mean of the group's squares + eps) * w. If HAS_Z is set, silu(z) * x
// replaces x. The shader group_squares computes the sums of squares. If several devices share a group, an
// exchange adds their sums.
#include "lib/types.glsl"

layout(constant_id = 1) const uint HAS_Z = 0;

layout(push_constant) uniform Push {
    uint z_off, x_off, squares_off, w_off, y_off;
    uint width, first, group, n_groups, n_rows;
    float eps;
};
layout(set = 0, binding = 0) readonly buffer Z { float z[]; };
layout(set = 0, binding = 1) readonly buffer X { float x[]; };
layout(set = 0, binding = 2) readonly buffer Squares { float squares[]; };
layout(set = 0, binding = 3) readonly buffer W { float w[]; };
layout(set = 0, binding = 4) writeonly buffer Y { float y[]; };
#include "lib/glu.glsl"

void main() {
    const uint i = global_index();
    if (i >= n_rows * width) return;
    const uint column = i % width;
    const uint g = (first + column) / group;
    float value = x[x_off + i];
    if (HAS_Z != 0) value = glu_value(SILU, z[z_off + i], value);
    const float mean = squares[squares_off + i / width * n_groups + g] / float(group);
    y[y_off + i] = value / sqrt(mean + eps) * w[w_off + column];
}
