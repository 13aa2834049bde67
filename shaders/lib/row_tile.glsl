// Tiles of up to ROWS consecutive rows from one run. The rows of a tile attend to the same blocks of cells,
// so the tile reads each block once. The splits of the keys depend only on these blocks, so all rows of a
// tile have the same splits. Therefore, a row's result has the same bits as in a tile of one row.

// A tile's queries are the heads of its first row, then the heads of its next row. With one row, compilers do
// not know that a query is below HEADS.
uint row_of(uint query) { return ROWS == 1 ? 0 : query / HEADS; }

uint head_of(uint query) { return ROWS == 1 ? query : query % HEADS; }

// Return whether `row` attends to the same blocks and chunk as the row before it.
bool continues(uint row) {
    const uvec2 own = step_place(row); // position, slot
    const uvec2 before = step_place(row - 1);
    const bool same_run = own == before + uvec2(1, 0);
    const bool same_end = own.x % CELL_BLOCK != 0;
    return same_run && same_end && begin_together(first_key_of(own.x + 1), first_key_of(own.x));
}

// Return the rows of the tile that begins with `row`, or 0 if no tile begins there.
uint rows_from(uint row) {
    const uint end = min(n_rows, step_n_decode());
    if (ROWS == 1 || row >= end) return 1;
    uint first = row;
    while (first > 0 && continues(first)) --first;
    if ((row - first) % ROWS != 0) return 0;
    uint n = 1;
    while (n < ROWS && row + n < end && continues(row + n)) ++n;
    return n;
}
