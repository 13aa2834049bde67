#version 450
#extension GL_GOOGLE_include_directive : require
// Sort the pairs (row, used expert) by expert, in one workgroup. The array order[] gets the pair numbers,
// ascending within an expert. Each entry of tiles[] is (expert, first index in order[], number of pairs),
// with at most `tile` pairs. Zeros follow the last tile. A pair with an invalid expert id is in no tile.
#include "lib/types.glsl"

const uint MAX_EXPERTS = 1024;

layout(push_constant) uniform Push {
    uint ids_off, order_off, tiles_off;
    uint n_pairs, n_experts, tile, n_tiles;
};
layout(set = 0, binding = 0) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = 1) writeonly buffer Order { uint order[]; };
layout(set = 0, binding = 2) writeonly buffer Tiles { uint tiles[]; };

shared uint chunk[LOCAL];
// place[e] first counts the pairs of expert e. Then it holds the index in order[] for the expert's next pair.
shared uint place[MAX_EXPERTS + 1];
shared uint tile_of[MAX_EXPERTS + 1];

uint load_chunk(uint base) {
    const uint i = base + gl_LocalInvocationID.x;
    barrier();
    chunk[gl_LocalInvocationID.x] = i < n_pairs ? ids[ids_off + i] : 0xffffffffu;
    barrier();
    return min(LOCAL, n_pairs - base);
}

void main() {
    const uint thread = gl_LocalInvocationID.x;
    for (uint e = thread; e < n_experts; e += LOCAL) place[e] = 0;
    for (uint base = 0; base < n_pairs; base += LOCAL) {
        const uint n = load_chunk(base);
        for (uint e = thread; e < n_experts; e += LOCAL) {
            uint found = 0;
            for (uint j = 0; j < n; ++j) found += uint(chunk[j] == e);
            place[e] += found;
        }
    }
    barrier();
    if (thread == 0) {
        uint begin = 0, first_tile = 0;
        for (uint e = 0; e < n_experts; ++e) {
            const uint n = place[e];
            place[e] = begin;
            tile_of[e] = first_tile;
            begin += n;
            first_tile += (n + tile - 1) / tile;
        }
        place[n_experts] = begin;
        tile_of[n_experts] = first_tile;
    }
    barrier();
    const uint used = tile_of[n_experts];
    for (uint i = 3 * used + thread; i < 3 * n_tiles; i += LOCAL) tiles[tiles_off + i] = 0;
    for (uint e = thread; e < n_experts; e += LOCAL) {
        uint at = tiles_off + 3 * tile_of[e];
        for (uint begin = place[e]; begin < place[e + 1]; begin += tile) {
            tiles[at] = e;
            tiles[at + 1] = begin;
            tiles[at + 2] = min(tile, place[e + 1] - begin);
            at += 3;
        }
    }
    for (uint base = 0; base < n_pairs; base += LOCAL) {
        const uint n = load_chunk(base);
        for (uint e = thread; e < n_experts; e += LOCAL) {
            uint at = place[e];
            for (uint j = 0; j < n; ++j) {
                if (chunk[j] == e) order[order_off + at++] = base + j;
            }
            place[e] = at;
        }
    }
}
