#version 450
#extension GL_GOOGLE_include_directive : require
// Sum the squares of x, or of silu(z) * x if HAS_Z is set, in each row and each group of `group` columns. The
// device holds columns first..first + width of the row. Another device adds the squares of the first `skip`
// of these columns.
#include "lib/types.glsl"
#include "lib/reduce.glsl"

layout(constant_id = 1) const uint HAS_Z = 0;
layout(constant_id = 2) const uint BATCH = 1; // elements in flight

layout(push_constant) uniform Push {
    uint z_off, x_off, squares_off;
    uint width, first, skip, group, n_groups, n_rows;
};
layout(set = 0, binding = 0) readonly buffer Z { float z[]; };
layout(set = 0, binding = 1) readonly buffer X { float x[]; };
layout(set = 0, binding = 2) writeonly buffer Squares { float squares[]; };
#include "lib/glu.glsl"

void main() {
    const uint index = group_index();
    if (index >= n_rows * n_groups) return;
    const uint row = index / n_groups;
    const uint g = index % n_groups;
    const uint begin = clamp(g * group, first + skip, first + width) - first;
    const uint end = clamp((g + 1) * group, first + skip, first + width) - first;
    float sum = 0.0;
    for (uint i0 = begin + gl_LocalInvocationID.x; i0 < end; i0 += BATCH * LOCAL) {
        float value[BATCH];
        [[unroll]] for (uint u = 0; u < BATCH; ++u) value[u] = x[x_off + row * width + min(i0 + u * LOCAL, end - 1)];
        [[unroll]] for (uint u = 0; u < BATCH; ++u) {
            const uint i = min(i0 + u * LOCAL, end - 1);
            if (HAS_Z != 0) value[u] = glu_value(SILU, z[z_off + row * width + i], value[u]);
            sum += i0 + u * LOCAL < end ? value[u] * value[u] : 0.0;
        }
    }
    sum = reduce_sum(sum);
    if (gl_LocalInvocationID.x == 0) squares[squares_off + index] = sum;
}
