// KV cache rows as pairs of floats (head sizes are even). The including file declares `uint k[]` and `uint v[]`.

#ifdef K_TYPE_F16
vec2 k_pair(uint i) { return unpackHalf2x16(k[k_off + i]); }
#else
vec2 k_pair(uint i) { return uintBitsToFloat(uvec2(k[k_off + 2 * i], k[k_off + 2 * i + 1])); }
#endif

#ifdef V_TYPE_F16
vec2 v_pair(uint i) { return unpackHalf2x16(v[v_off + i]); }
#else
vec2 v_pair(uint i) { return uintBitsToFloat(uvec2(v[v_off + 2 * i], v[v_off + 2 * i + 1])); }
#endif
