// The workgroup size, indices and constants. Include this file first. Other files of lib/ use names that the
// including shader declares. Loops over a thread's arrays are [[unroll]], because arrays with a variable
// index do not stay in registers.
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 0) const uint LOCAL = 64; // a power of two; every device allows 128

const float NEG_LARGE = -1.0e30; // not -inf, because -inf - (-inf) is NaN

// Grids with more than 65,535 workgroups use x and y. Surplus workgroups return immediately.
uint group_index() { return gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x; }

uint global_index() { return group_index() * LOCAL + gl_LocalInvocationID.x; }
