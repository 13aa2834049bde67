// The cell of a position in the cache. The including file declares `uint cells[]` and includes lib/step.glsl.

// The first cell of a block of CELL_BLOCK positions, whose cells are consecutive. The slot of a sequence with more blocks
// is a ring.
uint block_cell(uint slot, uint block) {
    return cells[cells_off + slot * blocks_per_slot + block % blocks_per_slot] * CELL_BLOCK;
}
