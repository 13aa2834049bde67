// Functions that read four elements of a K or V cache of any type. The functions k_block_quad and
// v_block_quad get the block's position in a pair of blocks.
#include "lib/cache_types.glsl"
#include "lib/iq4_values.glsl"

#define CACHE(i) k[i]
#define CACHE_OFF k_off
#define CACHE_TYPE K_TYPE
#define CACHE_QUAD k_quad
#define CACHE_BLOCK_QUAD k_block_quad
#include "lib/cache.glsl"
#undef CACHE
#undef CACHE_OFF
#undef CACHE_TYPE
#undef CACHE_QUAD
#undef CACHE_BLOCK_QUAD
#define CACHE(i) v[i]
#define CACHE_OFF v_off
#define CACHE_TYPE V_TYPE
#define CACHE_QUAD v_quad
#define CACHE_BLOCK_QUAD v_block_quad
#include "lib/cache.glsl"
