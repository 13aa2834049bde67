"""The native runtime: devices driven through Vulkan."""
