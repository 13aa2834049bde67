// Which tile of a product a workgroup makes. Workgroups that follow each other have the same rows of w and the next rows
// of x: so w comes from memory once for all rows of x, of which far fewer bytes have to stay in the cache.
uint product_tiles_of_x(uint n_rows, uint tile) { return (n_rows + tile - 1) / tile; }

uint product_tile_of_w(uint n_rows, uint tile) { return group_index() / product_tiles_of_x(n_rows, tile); }

uint product_tile_of_x(uint n_rows, uint tile) { return group_index() % product_tiles_of_x(n_rows, tile); }
