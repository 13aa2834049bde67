"""The native runtime: a device behind the seam, driven through Vulkan itself."""
