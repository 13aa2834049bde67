// StepParams holds the values that change between steps (vkbackend/step.py). Counts and runs are in a uniform
// block at binding STEP_BINDING, after the op's arguments. The file lib/step_rows.glsl declares the rows.

const uint CELL_BLOCK = 32; // positions per entry of the cell table

layout(set = 0, binding = STEP_BINDING, std140) uniform StepParams {
    uvec4 header; // n_rows, n_runs, n_outputs, n_decode
    uvec4 runs[128]; // slot, first_row, n_rows, first_pos
    uvec4 states[128]; // of each run: state cells to read and to write; end and beginning of the text
} step_params;

uint step_n_rows() { return step_params.header.x; }

uint step_n_runs() { return step_params.header.y; }

uint step_n_outputs() { return step_params.header.z; }

// Return the number of runs with one row. They come first. The op attn_decode processes them, and
// attn_prefill the longer runs.
uint step_n_decode() { return step_params.header.w; }
