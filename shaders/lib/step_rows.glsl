// The rows of a step. Include after lib/step.glsl. The buffer begins with the uniform block, so both bindings
// have the same offset.

layout(set = 0, binding = STEP_BINDING + 1, std430) restrict readonly buffer StepRows {
    uvec4 block[257]; // StepParams
    uvec4 rows[]; // position, slot, token, and in row i: row index of output i | type << 16
} step_rows;

// Like step_n_rows(), but needs no second descriptor. Use this in ops that read nothing else of the uniform
// block.
uint step_n_rows_from_buffer() { return step_rows.block[0].x; }

uvec2 step_place(uint row) { return step_rows.rows[row].xy; } // (position, slot)

uint step_position(uint row) { return step_rows.rows[row].x; }
