// Tiles of runs (rows of one sequence), and the recurrent state of a run. Include after lib/step.glsl.

struct Tile {
    uvec4 run; // slot, first_row, n_rows, first_pos; n_rows is 0 after the last tile
    uint number; // of the run
    uint first; // first row of the tile within the run
    uint n; // number of rows
};

// Return tile number `tile` of the step. Tiles have `size` rows of one run.
Tile find_tile(uint tile, uint size) {
    for (uint r = 0; r < step_n_runs(); ++r) {
        const uvec4 run = step_params.runs[r];
        const uint n_tiles = (run.z + size - 1) / size;
        if (tile < n_tiles) return Tile(run, r, tile * size, min(run.z - tile * size, size));
        tile -= n_tiles;
    }
    return Tile(uvec4(0), 0, 0, 0);
}

// Return the state cell that run `r` reads. A sequence's first run ignores the cell.
uint cell_from(uint r) { return step_params.states[r].x; }

uint cell_to(uint r) { return step_params.states[r].y; }

const uint FEW_ROWS = 8; // a step with few rows has at most 8 rows and runs

// In a step with few rows, return the cell for the state after row `row`. Rows of a draft write cells of
// their own, and the rows of other runs write the run's cell.
uint cell_after(uint row) { return step_params.states[FEW_ROWS + row].x; }

bool is_fresh(uvec4 run) { return run.w == 0; }
