// Workgroup size, indices, constants; include this file first. Other files of lib/ use constants, buffers and
// push constants that the including shader declares. Loops over arrays of a thread are [[unroll]], because an
// array with an unknown index is stored in memory, not in registers.
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 0) const uint LOCAL = 64; // a power of two; every device allows 128

const float NEG_LARGE = -1.0e30; // stands for -inf in maxima; finite, so that differences are not NaN

// More than 65,535 workgroups are spread over x and y; surplus workgroups return.
uint group_index() { return gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x; }

uint global_index() { return group_index() * LOCAL + gl_LocalInvocationID.x; }
