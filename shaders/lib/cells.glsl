// The mapping from positions to cache cells.

// Return the first cell of a block of CELL_BLOCK positions. A block has consecutive cells. A slot is a ring
// buffer: a sequence that exceeds it overwrites its oldest cells.
uint block_cell(uint slot, uint block) {
    return cells[cells_off + slot * blocks_per_slot + block % blocks_per_slot] * CELL_BLOCK;
}
