// The mapping from positions to cache cells.

// Return the first cell of a block of CELL_BLOCK positions. A block has consecutive cells. A slot is a ring
// buffer: a sequence that exceeds it overwrites its oldest cells.
uint block_cell(uint slot, uint block) {
    return cells[cells_off + slot * blocks_per_slot + block % blocks_per_slot] * CELL_BLOCK;
}

// Return a cell that covers `size` positions, of which `pos` is the last. The table's value for the
// position is `block`. A block has `per_block` of these cells (cells_per_block in ops/attention_tiles.py).
uint cell_in_block(uint block, uint pos, uint size, uint per_block) {
    return block * per_block + pos % CELL_BLOCK / size;
}
