#version 450
#extension GL_GOOGLE_include_directive : require
// Write the K largest elements of each chunk of a row, the largest first. Equal elements are ordered by
// index, and NaN counts as largest. The workgroup ID is (chunk, -, row). In each of K rounds, every thread
// finds its largest remaining element, and the workgroup writes the largest of these. The ids are indices in
// the row.
#include "lib/types.glsl"
#include "lib/order.glsl"

layout(constant_id = 1) const uint K = 64;
// If 1, write the values of `source` at the indices as ids. If 2, use only elements whose bit is set in the
// mask `source`, whose rows are padded to words.
layout(constant_id = 2) const uint KIND = 0;

const uint NONE = 0xffffffffu; // id of a missing element; its value is -inf

layout(push_constant) uniform Push {
    uint x_off, source_off, ids_off, values_off;
    uint n, n_rows, chunk, n_chunks;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer Source { uint source[]; };
layout(set = 0, binding = 2) writeonly buffer Ids { uint ids[]; };
layout(set = 0, binding = 3) writeonly buffer Values { float values[]; };

shared uint best_key[LOCAL];
shared uint best_at[LOCAL];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint row = gl_WorkGroupID.z;
    const uint base = x_off + row * n;
    const uint begin = gl_WorkGroupID.x * chunk;
    const uint end = min(begin + chunk, n);
    const uint out_at = (row * n_chunks + gl_WorkGroupID.x) * K;

    uint last_key = 0xffffffffu;
    uint last_at = 0;
    bool fresh = true;
    bool search = true;
    uint own_key = 0;
    uint own_at = 0;
    for (uint j = 0; j < K; ++j) {
        if (search) {
            own_key = 0;
            for (uint i = begin + thread; i < end; i += LOCAL) {
                if (KIND == 2 && (source[source_off + row * ((n + 31) / 32) + i / 32] >> (i % 32) & 1) == 0) continue;
                const uint key = order_key(x[base + i]);
                const bool after = fresh || key < last_key || (key == last_key && i > last_at);
                if (after && key > own_key) { // of equal elements, the first is used
                    own_key = key;
                    own_at = i;
                }
            }
            search = false;
        }
        best_key[thread] = own_key;
        best_at[thread] = own_at;
        barrier();
        for (uint s = LOCAL / 2; s > 0; s >>= 1) {
            if (thread < s) {
                const uint key = best_key[thread + s];
                const uint at = best_at[thread + s];
                const bool better = key > best_key[thread] || (key == best_key[thread] && at < best_at[thread]);
                if (better) {
                    best_key[thread] = key;
                    best_at[thread] = at;
                }
            }
            barrier();
        }
        const uint key = best_key[0];
        const uint at = best_at[0];
        barrier();
        if (thread == 0) {
            ids[ids_off + out_at + j] = key == 0 ? NONE : KIND == 1 ? source[source_off + row * n + at] : at;
            values[values_off + out_at + j] = key == 0 ? uintBitsToFloat(0xff800000u) : x[base + at];
        }
        if (key != 0 && own_key == key && own_at == at) {
            last_key = key;
            last_at = at;
            fresh = false;
            search = true;
        }
    }
}
