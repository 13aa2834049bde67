#version 450
#extension GL_GOOGLE_include_directive : require
// y[p, i] = x[p, i] + b[ids[p], i] for each pair p of a row and an expert.
#include "lib/types.glsl"

layout(constant_id = 1) const uint RAGGED = 0; // 1: expert e's bias has starts[e + 1] - starts[e] values

layout(push_constant) uniform Push {
    uint x_off, b_off, ids_off, starts_off, y_off;
    uint n, n_pairs;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer B { float b[]; };
layout(set = 0, binding = 2) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = 3) readonly buffer Starts { uint starts[]; };
layout(set = 0, binding = 4) writeonly buffer Y { float y[]; };

void main() {
    const uint i = global_index();
    const uint pair = gl_WorkGroupID.z;
    const uint expert = ids[ids_off + pair];
    uint begin = expert * n, own = n;
    if (RAGGED != 0) {
        begin = starts[starts_off + expert];
        own = starts[starts_off + expert + 1] - begin;
    }
    if (i < own) y[y_off + pair * n + i] = x[x_off + pair * n + i] + b[b_off + begin + i];
}
