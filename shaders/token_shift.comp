#version 450
#extension GL_GOOGLE_include_directive : require
// Mix each row with the row before it: y[s] = x + mu[s] (before - x), for each vector mu[s] (RWKV-7, Peng et al.
// 2025, arXiv:2503.14456). The state holds the row before a run, and is updated to the run's last row. The
// workgroup ID is (channels, tile of 16 rows). Only a run's first tile accesses the state, one channel per
// invocation, so the state may change in place.
#include "lib/types.glsl"

layout(constant_id = 1) const uint MIXES = 6; // vectors mu
layout(constant_id = 2) const uint ROW_STATES = 0; // 1: write the state after each row, for runs of one tile

layout(push_constant) uniform Push {
    uint x_off, mu_off, state_off, y_off;
    uint width, n_rows;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer Mu { float mu[]; };
layout(set = 0, binding = 2) buffer State { float state[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };

#define STEP_BINDING 4
#include "lib/step.glsl"
#include "lib/runs.glsl"

const uint TILE = 16;

void main() {
    const uint channel = global_index();
    if (channel >= width) return;
    const Tile tile = find_tile(gl_WorkGroupID.z, TILE);
    if (tile.n == 0) return;
    const uint from = state_off + cell_from(tile.number) * width + channel;
    const uint to = state_off + cell_to(tile.number) * width + channel;
    const uint at = x_off + tile.run.y * width + channel;

    float before = 0.0;
    if (tile.first > 0) {
        before = x[at + (tile.first - 1) * width];
    } else if (!is_fresh(tile.run)) {
        before = state[from];
    }
    if (ROW_STATES == 0 && tile.first == 0) state[to] = x[at + (tile.run.z - 1) * width];
    float mixes[MIXES];
    [[unroll]] for (uint s = 0; s < MIXES; ++s) mixes[s] = mu[mu_off + s * width + channel];
    for (uint t = tile.first; t < tile.first + tile.n; ++t) {
        const float value = x[at + t * width];
        const uint row = tile.run.y + t;
        [[unroll]] for (uint s = 0; s < MIXES; ++s) {
            y[y_off + (s * n_rows + row) * width + channel] = value + mixes[s] * (before - value);
        }
        if (ROW_STATES != 0) state[state_off + cell_after(row) * width + channel] = value;
        before = value;
    }
}
