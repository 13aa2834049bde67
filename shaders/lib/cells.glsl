// Cells of the cache. The including file declares `uint cells[]` and includes lib/step.glsl.

// The first cell of a block of CELL_BLOCK positions, whose cells are consecutive. A slot of a longer sequence is a
// ring.
uint block_cell(uint slot, uint block) {
    return cells[cells_off + slot * blocks_per_slot + block % blocks_per_slot] * CELL_BLOCK;
}
