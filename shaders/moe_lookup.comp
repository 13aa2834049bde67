#version 450
#extension GL_GOOGLE_include_directive : require
// Look up the pairs (row, used expert) in the table of a layer's expert cache, in one workgroup. A product
// with the cached experts reads hits[], and a product with all experts reads misses[]. Each pair has an id in
// one of them, and NONE in the other. The array counts[] gets the number of pairs of each expert, without
// rows that pad the step.
#include "lib/types.glsl"

layout(constant_id = 1) const uint COUNTED = 1; // 0: counts[] is not written

const uint NONE = 0xffffffffu;
const uint MAX_EXPERTS = 1024;

layout(push_constant) uniform Push {
    uint ids_off, table_off, misses_off, hits_off, counts_off;
    uint n_pairs, n_used, n_experts;
};
layout(set = 0, binding = 0) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = 1) readonly buffer Table { uint table[]; };
layout(set = 0, binding = 2) writeonly buffer Misses { uint misses[]; };
layout(set = 0, binding = 3) writeonly buffer Hits { uint hits[]; };
layout(set = 0, binding = 4) writeonly buffer Counts { uint counts[]; };

#define STEP_BINDING 5
#include "lib/step.glsl"

shared uint pairs_of[MAX_EXPERTS];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint counted = COUNTED == 0 ? 0 : step_n_rows() * n_used;
    if (COUNTED != 0) {
        for (uint e = thread; e < n_experts; e += LOCAL) pairs_of[e] = 0;
        barrier();
    }
    for (uint i = thread; i < n_pairs; i += LOCAL) {
        const uint expert = ids[ids_off + i];
        const uint slot = expert < n_experts ? table[table_off + expert] : NONE;
        hits[hits_off + i] = slot;
        misses[misses_off + i] = slot == NONE ? expert : NONE;
        if (i < counted && expert < n_experts) atomicAdd(pairs_of[expert], 1);
    }
    if (COUNTED != 0) {
        barrier();
        for (uint e = thread; e < n_experts; e += LOCAL) counts[counts_off + e] = pairs_of[e];
    }
}
