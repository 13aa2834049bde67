// Maps positions to cells of the cache.

// Return the first cell of a block of CELL_BLOCK positions, which have consecutive cells. A sequence that is
// longer than its slot uses the slot as a ring.
uint block_cell(uint slot, uint block) {
    return cells[cells_off + slot * blocks_per_slot + block % blocks_per_slot] * CELL_BLOCK;
}
