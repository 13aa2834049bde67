// The workgroup size, indices and constants. Include this file first. Other files of lib/ use constants,
// buffers and push constants that the including shader declares. Loops over a thread's arrays are [[unroll]],
// because compilers store an array with a variable index in memory instead of registers.
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 0) const uint LOCAL = 64; // a power of two; every device allows 128

const float NEG_LARGE = -1.0e30; // replaces -inf in maxima, so that differences of maxima are not NaN

// A grid of more than 65,535 workgroups extends over x and y. Surplus workgroups return at once.
uint group_index() { return gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x; }

uint global_index() { return group_index() * LOCAL + gl_LocalInvocationID.x; }
