#version 450
#extension GL_GOOGLE_include_directive : require
// Compute y = silu(causal depthwise convolution of each run's rows + bias). The state holds the D_CONV - 1
// rows before the run, and is updated to the run's last rows. The workgroup ID is (channels, tile of 16
// rows). Only a run's first tile accesses the state, one channel per invocation, so the state may change in
// place.
#include "lib/types.glsl"

layout(constant_id = 1) const uint D_CONV = 4;
layout(constant_id = 2) const uint SILU = 1; // 0: no silu
layout(constant_id = 3) const uint HAS_B = 0;
layout(constant_id = 4) const uint ROW_STATES = 0; // 1: write the state after each row, for runs of one tile

layout(push_constant) uniform Push {
    uint x_off, w_off, b_off, state_off, y_off;
    uint width, n_rows;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer W { float w[]; };
layout(set = 0, binding = 2) readonly buffer B { float b[]; };
layout(set = 0, binding = 3) buffer State { float state[]; };
layout(set = 0, binding = 4) writeonly buffer Y { float y[]; };

#define STEP_BINDING 5
#include "lib/step.glsl"
#include "lib/runs.glsl"

const uint TILE = 16;
const uint N_STATE = D_CONV - 1;

void main() {
    const uint channel = global_index();
    if (channel >= width) return;
    const Tile tile = find_tile(gl_WorkGroupID.z, TILE);
    if (tile.n == 0) return;
    const uvec4 run = tile.run;
    const uint from = state_off + (cell_from(tile.number) * width + channel) * N_STATE;
    const uint to = state_off + (cell_to(tile.number) * width + channel) * N_STATE;
    const uint at = run.y * width + channel;

    float taps[D_CONV];
    float window[D_CONV]; // the values of the last rows up to this row, oldest first
    [[unroll]] for (uint j = 0; j < D_CONV; ++j) taps[j] = w[w_off + channel * D_CONV + j];
    [[unroll]] for (uint j = 0; j < N_STATE; ++j) {
        if (tile.first > 0) {
            window[j + 1] = x[x_off + at + (tile.first + j - N_STATE) * width];
        } else {
            window[j + 1] = is_fresh(run) ? 0.0 : state[from + j];
        }
    }
    if (ROW_STATES == 0 && tile.first == 0) {
        [[unroll]] for (uint j = 0; j < N_STATE; ++j) {
            float value = 0.0;
            if (run.z + j >= N_STATE) {
                value = x[x_off + at + (run.z + j - N_STATE) * width];
            } else {
                // After a short run, the state still holds rows of the previous state. In a sequence's first
                // run these rows are zeros.
                [[unroll]] for (uint i = 1; i < D_CONV; ++i) value = i == run.z + j + 1 ? window[i] : value;
            }
            state[to + j] = value;
        }
    }
    const float bias = HAS_B != 0 ? b[b_off + channel] : 0.0;
    for (uint t = tile.first; t < tile.first + tile.n; ++t) {
        [[unroll]] for (uint j = 0; j < N_STATE; ++j) window[j] = window[j + 1];
        window[N_STATE] = x[x_off + at + t * width];
        float sum = bias;
        [[unroll]] for (uint j = 0; j < D_CONV; ++j) sum += taps[j] * window[j];
        if (ROW_STATES != 0) {
            const uint after = state_off + (cell_after(run.y + t) * width + channel) * N_STATE;
            [[unroll]] for (uint j = 0; j < N_STATE; ++j) state[after + j] = window[j + 1];
        }
        y[y_off + at + t * width] = SILU != 0 ? sum / (1.0 + exp(min(-sum, 87.0))) : sum;
    }
}
