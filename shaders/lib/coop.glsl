// Declare cooperative matrices of F16 with F32 sums, with the same names for both extensions. The shapes are
// MATRIX_A [M, K], MATRIX_B [K, N] and MATRIX_SUM [M, N]. MATRIX_A and MATRIX_B are loaded from QUADs of four
// F16 values.
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#ifdef API_NV
#extension GL_NV_cooperative_matrix : require
#define MATRIX_A fcoopmatNV<16, gl_ScopeSubgroup, M, K>
#define MATRIX_B fcoopmatNV<16, gl_ScopeSubgroup, K, N>
#define MATRIX_SUM fcoopmatNV<32, gl_ScopeSubgroup, M, N>
#define LOAD_ROWS(m, from, at, stride) coopMatLoadNV(m, from, at, stride, false)
#define LOAD_COLUMNS(m, from, at, stride) coopMatLoadNV(m, from, at, stride, true)
#define STORE_COLUMNS(m, to, at, stride) coopMatStoreNV(m, to, at, stride, true)
#define STORE_ROWS(m, to, at, stride) coopMatStoreNV(m, to, at, stride, false)
#define MULTIPLY_ADD(a, b, c) coopMatMulAddNV(a, b, c)
#define QUAD uvec2

QUAD quad_of(uvec2 words) { return words; }

QUAD quad_of(vec4 v) { return uvec2(packFloat2x16(f16vec2(v.xy)), packFloat2x16(f16vec2(v.zw))); }

uvec2 words_of(QUAD q) { return q; }

// Return a QUAD with element i of each of the four QUADs.
QUAD quad_across(QUAD q[4], uint i) {
    const uvec4 halves = uvec4(q[0][i / 2], q[1][i / 2], q[2][i / 2], q[3][i / 2]) >> (16 * (i % 2)) & 0xFFFFu;
    return halves.xz | halves.yw << 16;
}
#else
#extension GL_KHR_cooperative_matrix : require
#define MATRIX_A coopmat<float16_t, gl_ScopeSubgroup, M, K, gl_MatrixUseA>
#define MATRIX_B coopmat<float16_t, gl_ScopeSubgroup, K, N, gl_MatrixUseB>
#define MATRIX_SUM coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator>
#define LOAD_ROWS(m, from, at, stride) coopMatLoad(m, from, at, stride, gl_CooperativeMatrixLayoutRowMajor)
#define LOAD_COLUMNS(m, from, at, stride) coopMatLoad(m, from, at, stride, gl_CooperativeMatrixLayoutColumnMajor)
#define STORE_COLUMNS(m, to, at, stride) coopMatStore(m, to, at, stride, gl_CooperativeMatrixLayoutColumnMajor)
#define STORE_ROWS(m, to, at, stride) coopMatStore(m, to, at, stride, gl_CooperativeMatrixLayoutRowMajor)
#define MULTIPLY_ADD(a, b, c) coopMatMulAdd(a, b, c)
#define QUAD f16vec4

QUAD quad_of(uvec2 words) { return f16vec4(unpackFloat2x16(words.x), unpackFloat2x16(words.y)); }

QUAD quad_of(vec4 v) { return f16vec4(v); }

uvec2 words_of(QUAD q) { return uvec2(packFloat2x16(q.xy), packFloat2x16(q.zw)); }

QUAD quad_across(QUAD q[4], uint i) { return f16vec4(q[0][i], q[1][i], q[2][i], q[3][i]); }
#endif

// Multiply element by element. The driver decides which elements an invocation holds, but they are the same
// in all matrices of one type.
#define SCALE_BY(m, r) for (uint e_ = 0; e_ < m.length(); ++e_) m[e_] *= r[e_]
