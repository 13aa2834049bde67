// Where a position lives in the cache. The including file declares `uint cells[]` and includes lib/step.glsl.

// The cell of the first position of a block of CELL_BLOCK positions; the rest of the block follows it. If a sequence
// has more blocks than its slot, the slot is a ring.
uint block_cell(uint slot, uint block) {
    return cells[cells_off + slot * blocks_per_slot + block % blocks_per_slot] * CELL_BLOCK;
}
