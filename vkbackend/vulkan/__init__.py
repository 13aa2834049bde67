"""The native runtime, which uses Vulkan directly."""
