// StepParams has the values that change between steps (vkbackend/step.py). This buffer is the op's last
// binding, STEP_BINDING.

const uint CELL_BLOCK = 32; // positions per entry of the cell table

layout(set = 0, binding = STEP_BINDING, std140) uniform StepParams {
    uvec4 header; // n_rows, n_runs, n_outputs, n_decode
    uvec4 runs[128]; // slot, first_row, n_rows, first_pos
    uvec4 rows[512]; // position, slot, token, type or state cells: read | written << 16
    uvec4 outputs[128]; // row index of output i at [i / 4][i % 4]
} step_params;

uint step_n_rows() { return step_params.header.x; }

uint step_n_runs() { return step_params.header.y; }

uint step_n_outputs() { return step_params.header.z; }

// Return the number of runs with one row. They come first. The op attn_decode processes them, and
// attn_prefill the longer runs.
uint step_n_decode() { return step_params.header.w; }

uint step_output(uint i) { return step_params.outputs[i >> 2][i & 3u]; }
