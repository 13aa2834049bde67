// A thread processes elements FIRST * lane + u * NEXT of a row for u < EACH, then continues EACH * LOCAL
// elements later. If the output is floats, neighbouring threads process neighbouring elements. With OUT_Q8 a
// thread processes four consecutive elements (lib/quantize.glsl).
#ifdef OUT_Q8
#define Q8_QUADS 2
#include "lib/quantize.glsl"
const uint EACH = 4, FIRST = 4, NEXT = 1;
#else
const uint EACH = BATCH, FIRST = 1, NEXT = LOCAL;
#endif
