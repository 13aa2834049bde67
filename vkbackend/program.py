"""Programs: compute pipelines of shader variants with their specialization constants, and the pipeline cache
on disk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkbackend import env, shaderlib
from vkbackend.codebooks import Codebooks, codebook_of
from vkbackend.errors import UnsupportedFeature
from vkbackend.opspec import OPS, PUSH_NBYTES
from vkbackend.recording import Dispatch
from vkbackend.vk import NULL, C, ffi, lib, new

if TYPE_CHECKING:
    from vkbackend.device import VulkanDevice

_FULL_SUBGROUPS = 0x2  # VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT, which the binding lacks
_MAGIC = b"vkbackend pipeline cache 1\n"


@dataclass(frozen=True, slots=True)
class Layout:
    """Descriptor set and pipeline layout for `n_storage` storage buffers and, behind them, maybe one uniform
    block; set 1, if there is a codebook, is that alone."""

    n_storage: int
    uniform: bool
    codebook: str | None
    set_layout: Any
    pipeline_layout: Any


class Programs:
    """The pipelines of one device, made on first use and kept."""

    def __init__(self, device: VulkanDevice) -> None:
        self._device = device
        self.codebooks = Codebooks(device)
        self._layouts: dict[tuple[int, bool, str | None], Layout] = {}
        self._pipelines: dict[tuple[str, str, tuple[tuple[str, int], ...]], Any] = {}
        self._path = cache_path(device)
        stored = read_cache(self._path, _identity(device))
        info = new(
            "VkPipelineCacheCreateInfo",
            initialDataSize=len(stored),
            pInitialData=ffi.from_buffer(stored) if stored else NULL,
        )
        cache = ffi.new("VkPipelineCache *")
        device.check(lib.vkCreatePipelineCache(device.vk, info, NULL, cache), "vkCreatePipelineCache")
        device.made("VkPipelineCache")
        self._cache = cache[0]

    def layout(self, n_storage: int, uniform: bool, codebook: str | None = None) -> Layout:
        key = n_storage, uniform, codebook
        if key not in self._layouts:
            self._layouts[key] = self._make_layout(*key)
        return self._layouts[key]

    def _make_layout(self, n_storage: int, uniform: bool, codebook: str | None) -> Layout:
        device, n = self._device, n_storage + uniform
        needed, most = n_storage + (codebook is not None), device.info.limits["max_storage_buffers"]
        if needed > most:
            raise UnsupportedFeature(
                f"{device.name} ({device.info.name}): a shader needs {needed} storage buffers, and may bind "
                f"{most} on this device; use another device"
            )
        bindings = ffi.new("VkDescriptorSetLayoutBinding[]", n)
        for i in range(n):
            bindings[i].binding, bindings[i].descriptorCount = i, 1
            bindings[i].stageFlags = C.VK_SHADER_STAGE_COMPUTE_BIT
            bindings[i].descriptorType = descriptor_type(i, n_storage)
        sets, pipes = ffi.new("VkDescriptorSetLayout *"), ffi.new("VkPipelineLayout *")
        info = new("VkDescriptorSetLayoutCreateInfo", bindingCount=n, pBindings=bindings)
        device.check(
            lib.vkCreateDescriptorSetLayout(device.vk, info, NULL, sets), "vkCreateDescriptorSetLayout"
        )
        device.made("VkDescriptorSetLayout")
        both = ffi.new("VkDescriptorSetLayout[2]", [sets[0], NULL])
        if codebook:
            both[1] = self.layout(1, False).set_layout
        push = new("VkPushConstantRange", stageFlags=C.VK_SHADER_STAGE_COMPUTE_BIT, size=PUSH_NBYTES)
        pipe_info = new(
            "VkPipelineLayoutCreateInfo",
            setLayoutCount=2 if codebook else 1,
            pSetLayouts=both,
            pushConstantRangeCount=1,
            pPushConstantRanges=push,
        )
        device.check(lib.vkCreatePipelineLayout(device.vk, pipe_info, NULL, pipes), "vkCreatePipelineLayout")
        device.made("VkPipelineLayout")
        return Layout(n_storage, uniform, codebook, sets[0], pipes[0])

    def pipeline(self, dispatch: Dispatch) -> tuple[Any, Layout]:
        """The pipeline that runs `dispatch`, compiled on first use."""
        codebook = codebook_of(dispatch.op, dispatch.variant)
        layout = self.layout(len(dispatch.bound), dispatch.step is not None, codebook)
        key = dispatch.op, dispatch.variant, dispatch.consts
        if key not in self._pipelines:
            self._pipelines[key] = self._compile(*key, layout)
        return self._pipelines[key], layout

    def _compile(self, op: str, variant: str, consts: tuple[tuple[str, int], ...], layout: Layout) -> Any:
        device = self._device
        env.log(4, f"{device.name}: pipeline {op} {variant} {dict(consts)}")
        code = shaderlib.spirv(op, variant)
        module_info = new(
            "VkShaderModuleCreateInfo",
            codeSize=len(code),
            pCode=ffi.cast("uint32_t *", ffi.from_buffer(code)),
        )
        module = ffi.new("VkShaderModule *")
        device.check(
            lib.vkCreateShaderModule(device.vk, module_info, NULL, module), f"vkCreateShaderModule of {op}"
        )
        entries = ffi.new("VkSpecializationMapEntry[]", len(consts))
        for i in range(len(consts)):
            entries[i].constantID, entries[i].offset, entries[i].size = i, 4 * i, 4
        data = ffi.new("uint32_t[]", [value & 0xFFFFFFFF for _, value in consts])
        special = new(
            "VkSpecializationInfo",
            mapEntryCount=len(consts),
            pMapEntries=entries,
            dataSize=4 * len(consts),
            pData=data,
        )
        name = ffi.new("char[]", b"main")
        info = new("VkComputePipelineCreateInfo", layout=layout.pipeline_layout)
        info.stage.sType = C.VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO
        info.stage.stage, info.stage.module = C.VK_SHADER_STAGE_COMPUTE_BIT, module[0]
        info.stage.pName, info.stage.pSpecializationInfo = name, special
        size = new(
            "VkPipelineShaderStageRequiredSubgroupSizeCreateInfo",
            requiredSubgroupSize=dict(consts).get("LANES", device.info.limits["subgroup_size"]),
        )
        if "full_subgroups" in OPS[op].needs:
            # Else a subgroup may lack some of the gl_SubgroupSize invocations, and sums over it their parts.
            info.stage.flags = _FULL_SUBGROUPS
            info.stage.pNext = size if device.features.get("subgroup_size_control") else NULL
        pipeline = ffi.new("VkPipeline *")
        result = lib.vkCreateComputePipelines(device.vk, self._cache, 1, info, NULL, pipeline)
        lib.vkDestroyShaderModule(device.vk, module[0], NULL)
        device.check(result, f"vkCreateComputePipelines of {op} {variant} {dict(consts)}")
        device.made("VkPipeline")
        return pipeline[0]

    def close(self) -> None:
        device = self._device
        if self._pipelines and not device.lost:
            self._save()
        self.codebooks.close()
        for pipeline in self._pipelines.values():
            lib.vkDestroyPipeline(device.vk, pipeline, NULL)
            device.gone("VkPipeline")
        for layout in self._layouts.values():
            lib.vkDestroyPipelineLayout(device.vk, layout.pipeline_layout, NULL)
            lib.vkDestroyDescriptorSetLayout(device.vk, layout.set_layout, NULL)
            device.gone("VkPipelineLayout")
            device.gone("VkDescriptorSetLayout")
        lib.vkDestroyPipelineCache(device.vk, self._cache, NULL)
        device.gone("VkPipelineCache")
        self._pipelines, self._layouts = {}, {}

    def _save(self) -> None:
        size = ffi.new("size_t *")
        if (
            lib.vkGetPipelineCacheData(self._device.vk, self._cache, size, NULL) != C.VK_SUCCESS
            or not size[0]
        ):
            return
        data = ffi.new("char[]", size[0])
        if lib.vkGetPipelineCacheData(self._device.vk, self._cache, size, data) == C.VK_SUCCESS:
            write_cache(self._path, _identity(self._device), bytes(ffi.buffer(data, size[0])))


def descriptor_type(binding: int, n_storage: int) -> int:
    storage, uniform = C.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, C.VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER
    return int(storage if binding < n_storage else uniform)


# ---- the cache file: checked before a driver sees it, because drivers trust what they are given ----


def _identity(device: VulkanDevice) -> bytes:
    info = device.info
    return hashlib.sha256(
        repr((info.vendor, info.uuid, info.driver_uuid, info.driver_version)).encode()
    ).digest()


def cache_path(device: VulkanDevice) -> Path:
    return env.cache_dir() / f"pipelines-{_identity(device).hex()[:16]}.bin"


def read_cache(path: Path, identity: bytes) -> bytes:
    """The driver's cache data from `path`, or b"" if the file is missing, damaged or another device's."""
    try:
        blob = path.read_bytes()
    except OSError:
        return b""
    head, body = blob[: len(_MAGIC) + 64], blob[len(_MAGIC) + 64 :]
    return body if head == _MAGIC + identity + hashlib.sha256(body).digest() else b""


def write_cache(path: Path, identity: bytes, body: bytes) -> None:
    """Replace the cache file at once, so that a reader never sees half of it; a read-only place is no
    error."""
    try:
        shaderlib.write_atomic(path, _MAGIC + identity + hashlib.sha256(body).digest() + body)
    except OSError as error:
        env.log(1, f"pipeline cache not written: {error}")
