// Which tile of a product a workgroup makes. Workgroups that follow each other have the same rows of w and the next rows
// of x. So w comes from memory once for all rows of x. Meanwhile x stays in the cache: it has far fewer bytes than w.
uint product_tiles_of_x(uint n_rows, uint tile) { return (n_rows + tile - 1) / tile; }

uint product_tile_of_w(uint n_rows, uint tile) { return group_index() / product_tiles_of_x(n_rows, tile); }

uint product_tile_of_x(uint n_rows, uint tile) { return group_index() % product_tiles_of_x(n_rows, tile); }
