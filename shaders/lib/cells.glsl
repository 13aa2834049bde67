// The mapping from positions to cache cells.

// Return the first cell of a block of CELL_BLOCK positions. A block has consecutive cells. If a sequence is
// longer than its slot, the slot is a ring buffer.
uint block_cell(uint slot, uint block) {
    return cells[cells_off + slot * blocks_per_slot + block % blocks_per_slot] * CELL_BLOCK;
}
