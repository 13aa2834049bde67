"""If VKBACKEND_VALIDATION=1, validation messages are appended to `validation_messages`."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

from vkbackend import env, forks
from vkbackend.device_info import DeviceInfo
from vkbackend.errors import InvalidArgument, OutOfDeviceMemory, UnsupportedFeature, VkbackendError
from vkbackend.paths import quoted
from vkbackend.vulkan.capabilities import describe
from vkbackend.vulkan.vk import (
    API_1_1,
    API_1_3,
    NULL,
    C,
    check,
    enumerate_all,
    ffi,
    lib,
    new,
    string,
    strings,
)

VALIDATION_LAYER = "VK_LAYER_KHRONOS_validation"
validation_messages: list[str] = []
_TYPE_ORDER = ("discrete", "integrated", "virtual", "other", "cpu")


class Instance:
    forked = False

    def disown(self) -> None:
        self.forked = True
        forks.exit_before_drivers()

    def __init__(self) -> None:
        forks.own(self)
        version = ffi.new("uint32_t *")
        check(lib.vkEnumerateInstanceVersion(version), "vkEnumerateInstanceVersion")
        if version[0] < API_1_1:
            raise UnsupportedFeature("the Vulkan loader is older than 1.1; install a newer libvulkan1")
        extensions, layers, chain = [], [], None
        available = {
            string(p.extensionName)
            for p in enumerate_all(
                lib.vkEnumerateInstanceExtensionProperties,
                "VkExtensionProperties",
                NULL,
                name="vkEnumerateInstanceExtensionProperties",
            )
        }
        flags = 0
        if "VK_KHR_portability_enumeration" in available:
            extensions.append("VK_KHR_portability_enumeration")
            # VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR also lists devices such as MoltenVK's
            flags = 1
        if env.validation():
            layers, chain = [self._require_validation()], self._validation_features()
            extensions += ["VK_EXT_debug_utils"]
        app = new(
            "VkApplicationInfo", pApplicationName=ffi.new("char[]", b"vkbackend"), apiVersion=version[0]
        )
        info = new(
            "VkInstanceCreateInfo",
            chain,
            flags=flags,
            pApplicationInfo=app,
            enabledLayerCount=len(layers),
            ppEnabledLayerNames=strings(layers),
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=strings(extensions),
        )
        handle = ffi.new("VkInstance *")
        result = lib.vkCreateInstance(info, NULL, handle)
        if result == C.VK_ERROR_INCOMPATIBLE_DRIVER:
            raise UnsupportedFeature(no_device_message())
        check(result, "vkCreateInstance")
        self.handle = handle[0]
        self.version = min(version[0], API_1_3)
        if env.validation():
            self._listen()

    def _require_validation(self) -> str:
        present = enumerate_all(
            lib.vkEnumerateInstanceLayerProperties,
            "VkLayerProperties",
            name="vkEnumerateInstanceLayerProperties",
        )
        if VALIDATION_LAYER not in {string(p.layerName) for p in present}:
            raise UnsupportedFeature(
                f"VKBACKEND_VALIDATION=1 needs {VALIDATION_LAYER}, which is not installed; "
                "install it (Debian/Ubuntu: apt-get install vulkan-validationlayers) or unset the variable"
            )
        return VALIDATION_LAYER

    def _validation_features(self) -> Any:
        enables = ffi.new(
            "VkValidationFeatureEnableEXT[]", [C.VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT]
        )
        return new(
            "VkValidationFeaturesEXT", enabledValidationFeatureCount=1, pEnabledValidationFeatures=enables
        )

    def _listen(self) -> None:
        @ffi.callback(
            "VkBool32(VkDebugUtilsMessageSeverityFlagBitsEXT, VkDebugUtilsMessageTypeFlagsEXT,"
            " const VkDebugUtilsMessengerCallbackDataEXT *, void *)"
        )
        def on_message(_severity: int, _types: int, data: Any, _user: Any) -> int:
            text = string(data.pMessage)
            validation_messages.append(text)
            env.log(1, f"validation: {text}")
            return 0

        self._callback = on_message
        info = new(
            "VkDebugUtilsMessengerCreateInfoEXT",
            pfnUserCallback=on_message,
            messageSeverity=C.VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT
            | C.VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT,
            messageType=C.VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT
            | C.VK_DEBUG_UTILS_MESSAGE_TYPE_PERFORMANCE_BIT_EXT,
        )
        create = ffi.cast(
            "PFN_vkCreateDebugUtilsMessengerEXT",
            lib.vkGetInstanceProcAddr(self.handle, b"vkCreateDebugUtilsMessengerEXT"),
        )
        self._messenger = ffi.new("VkDebugUtilsMessengerEXT *")
        check(create(self.handle, info, NULL, self._messenger), "vkCreateDebugUtilsMessengerEXT")


def missing_driver_file() -> str | None:
    """Return a sentence that names the missing file of VK_DRIVER_FILES or VK_ICD_FILENAMES, or None."""
    # of these variables, the loader reads the first that is set
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        paths = [path for path in os.environ.get(name, "").split(os.pathsep) if path]
        if missing := [path for path in paths if not os.path.exists(path)]:
            return f"{name} names {quoted(missing[0])}, which does not exist; correct or unset the variable"
        if paths:
            break
    return None


def no_device_message() -> str:
    if missing := missing_driver_file():
        return f"no Vulkan device is present: {missing}"
    return (
        "no Vulkan device is present: the loader found no usable driver; install one for the GPU "
        "(Debian/Ubuntu, also for running without a GPU: apt-get install mesa-vulkan-drivers), "
        "or point VK_DRIVER_FILES at a driver's ICD json"
    )


_instance: Instance | None = None


def instance() -> Instance:
    """Return this process's instance. Raises UnsupportedFeature without a loader or driver. Raises
    ForkedProcess in a forked child, because drivers do not work there."""
    global _instance
    if _instance is not None and _instance.forked:
        raise forks.refusal("Vulkan")
    if _instance is None:
        try:
            _instance = Instance()
        except OutOfDeviceMemory as error:  # The loader's result for an unreadable manifest.
            raise UnsupportedFeature(no_device_message()) from error
    return _instance


def devices() -> list[DeviceInfo]:
    """Return the devices with Vulkan 1.1 and a compute queue. GPUs come before CPUs. Within a type, devices
    with F16 come first."""
    inst = instance()
    infos = []
    for physical in enumerate_all(
        lib.vkEnumeratePhysicalDevices, "VkPhysicalDevice", inst.handle, name="vkEnumeratePhysicalDevices"
    ):
        try:
            info = describe(inst.handle, physical, inst.version)
        except VkbackendError as error:  # other drivers' devices remain usable
            env.log(1, f"a device is left out: {error}")
            continue
        if info is not None:
            infos.append(info)
    infos.sort(key=lambda info: (_TYPE_ORDER.index(info.type), not info.features["float16"]))
    return [replace(info, index=i) for i, info in enumerate(infos)]


def position(info: DeviceInfo) -> int:
    """Return a device's index in the order of the loader and of other Vulkan programs."""
    handle = instance().handle
    handles = enumerate_all(
        lib.vkEnumeratePhysicalDevices, "VkPhysicalDevice", handle, name="vkEnumeratePhysicalDevices"
    )
    return handles.index(info.physical)


def select(spec: str | int, present: list[DeviceInfo]) -> DeviceInfo:
    """Select a device by index, `Vulkan<index>`, UUID or unambiguous name. Raises InvalidArgument."""
    text = str(spec).strip()
    digits = text.lower().removeprefix("vulkan")
    if by_index := [d for d in present if digits == str(d.index)]:
        return by_index[0]
    is_name = text and not digits.isdecimal()
    matches = [d for d in present if text.lower() == d.uuid] or [
        d for d in present if is_name and text.lower() in d.name.lower()
    ]
    if len(matches) == 1:
        return matches[0]
    listing = ", ".join(f"{d.index} ({d.name})" for d in present)
    why = f"matches {len(matches)} devices" if matches else "names no device"
    wish = "Give an index, a UUID or a unique name"
    if re.fullmatch(r"(cuda|rocm|hip|sycl|metal|musa|cann|gpu)\d*", text.lower()):
        wish += "; devices are Vulkan's, so there is Vulkan0, but no CUDA0"
    elif text.lower() in ("none", "cpu"):
        wish += ", or numpy to compute without Vulkan"
    raise InvalidArgument(f"device {text!r} {why}; there are: {listing}. {wish}")
