// Consecutive workgroups multiply the same rows of w by successive rows of x. So each row of w is read from
// memory once, unless rows of x displace it in the cache.
uint product_tiles_of_x(uint n_rows, uint tile) { return (n_rows + tile - 1) / tile; }

uint product_tile_of_w(uint n_rows, uint tile) { return group_index() / product_tiles_of_x(n_rows, tile); }

uint product_tile_of_x(uint n_rows, uint tile) { return group_index() % product_tiles_of_x(n_rows, tile); }
