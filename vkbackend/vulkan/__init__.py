"""The native runtime, which calls Vulkan directly."""
