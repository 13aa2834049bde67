#version 450
#extension GL_GOOGLE_include_directive : require
// Number the pairs (adapter, expert) of each row: ids[r, k] = adapters[r, term] * n_experts + experts[r, k], or
// NO_ADAPTER if row r has no such adapter.
#include "lib/types.glsl"

const uint NO_ADAPTER = 0xffffffffu;

layout(push_constant) uniform Push {
    uint adapters_off, experts_off, ids_off;
    uint n_rows, n_used, n_terms, term, n_experts;
};
layout(set = 0, binding = 0) readonly buffer Adapters { uint adapters[]; };
layout(set = 0, binding = 1) readonly buffer Experts { uint experts[]; };
layout(set = 0, binding = 2) writeonly buffer Ids { uint ids[]; };

void main() {
    const uint i = global_index();
    if (i >= n_rows * n_used) return;
    const uint adapter = adapters[adapters_off + i / n_used * n_terms + term];
    ids[ids_off + i] = adapter == NO_ADAPTER ? NO_ADAPTER : adapter * n_experts + experts[experts_off + i];
}
