"""Compiles pipelines in parallel, because a GPU's compiler may take seconds for a large shader. A pipeline is
a shader variant with specialization constants."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from functools import cache
from typing import Any, NamedTuple

from vkbackend import env, forks, shaderlib
from vkbackend.codebooks import codebook_of
from vkbackend.ops.table import OPS
from vkbackend.recording import Dispatch
from vkbackend.transfers import Transfers
from vkbackend.vulkan import float_controls
from vkbackend.vulkan.codebooks import Codebooks
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.memory import Memory
from vkbackend.vulkan.pipeline_cache import PipelineCache
from vkbackend.vulkan.pipeline_layout import Layouts, PipelineLayout
from vkbackend.vulkan.pipeline_report import CAPTURE
from vkbackend.vulkan.vk import FULL_SUBGROUPS, NULL, C, ffi, lib, new

SAVE_AFTER_S = 1.0  # save the pipeline cache after this much compile time

Key = tuple[str, str, tuple[tuple[str, int], ...]]  # op, variant, specialization constants


class Compiled(NamedTuple):
    """A pipeline, which may be NULL, and (result, name) of each Vulkan call."""

    pipeline: Any
    calls: list[tuple[int, str]]
    cpu_s: float


@cache
def _threads(n: int) -> ThreadPoolExecutor:
    """Return the pool of compiling threads. The threads never end, because compilers leak memory when a
    thread ends."""
    return ThreadPoolExecutor(n, "vkbackend-compile")


forks.forget(_threads.cache_clear)


class Programs:
    def __init__(self, device: LogicalDevice, memory: Memory, transfers: Transfers) -> None:
        self._device = device
        self.layouts = layouts = Layouts(device)
        self.codebooks = Codebooks(device, memory, transfers, lambda: layouts.get(1, 0).set_layout)
        self._pipelines: dict[Key, Any] = {}
        self._begun: dict[Key, tuple[PipelineLayout, Future[Compiled]]] = {}  # not requested yet
        self._cache = PipelineCache(device)
        self._unsaved_s = 0.0  # compile time since the cache was saved

    def pipelines(self, dispatches: Sequence[Dispatch]) -> list[tuple[Any, PipelineLayout]]:
        used = self._used(dispatches)
        if missing := {key: layout for key, layout in used if key not in self._pipelines}:
            self._make(missing)
        return [(self._pipelines[key], layout) for key, layout in used]

    def begin(self, dispatches: Sequence[Dispatch]) -> None:
        """Queue pipelines for compilation in the background. Pipelines that `pipelines` needs meanwhile are
        compiled first."""
        self._begin({key: layout for key, layout in self._used(dispatches) if key not in self._pipelines})

    def are_ready(self, dispatches: Sequence[Dispatch]) -> bool:
        """Return whether all pipelines of the dispatches have been compiled, or have failed to compile."""
        keys = {key for key, _ in self._used(dispatches)} - self._pipelines.keys()
        return all(key in self._begun and self._begun[key][1].done() for key in keys)

    def stop(self) -> None:
        self._begun = {key: begun for key, begun in self._begun.items() if not begun[1].cancel()}

    def _used(self, dispatches: Sequence[Dispatch]) -> list[tuple[Key, PipelineLayout]]:
        used: list[tuple[Key, PipelineLayout]] = []
        for d in dispatches:
            layout = self.layouts.get(len(d.bound), d.n_step, codebook_of(d.op, d.variant))
            used.append(((d.op, d.variant, d.consts), layout))
        return used

    def _begin(self, wanted: dict[Key, PipelineLayout]) -> None:
        """Start to compile the `wanted` pipelines, before all queued pipelines."""
        waiting = {key: layout for key, (layout, future) in self._begun.items() if future.cancel()}
        begun = {key: of_key for key, of_key in self._begun.items() if key not in waiting}
        missing = {key: layout for key, layout in (wanted | waiting).items() if key not in begun}
        pool = _threads(env.compile_threads())
        # Queue the SPIR-V modules first, because otherwise all threads could wait for modules that no thread
        # compiles.
        modules = dict.fromkeys((op, variant) for op, variant, _ in missing)
        code = {module: pool.submit(shaderlib.spirv, *module) for module in modules}
        for key, layout in missing.items():
            begun[key] = layout, pool.submit(self._compile, *key, layout, code[key[:2]])
        self._begun = begun

    def _make(self, missing: dict[Key, PipelineLayout]) -> None:
        began = time.perf_counter()
        self._begin(missing)
        futures = {key: self._begun.pop(key)[1] for key in missing}
        try:
            for future in as_completed(futures.values()):
                if future.exception() or any(result for result, _ in future.result().calls):
                    break
                if self._device.compiled:
                    self._device.compiled()
        finally:
            cpu_s, error = self._keep(futures)
        if error:
            raise error
        took_s = time.perf_counter() - began
        env.log(
            1,
            f"{self._device.name}: {len(missing)} pipelines in {took_s:.2f} s on {env.compile_threads()} "
            f"threads, {cpu_s:.2f} s of CPU time",
        )
        self._unsaved_s += max(took_s, cpu_s)  # compiling may have begun before this call
        if self._unsaved_s > SAVE_AFTER_S:
            self._save()

    def _keep(self, futures: dict[Key, Future[Compiled]]) -> tuple[float, BaseException | None]:
        """Cancel pipelines that have not started, wait for the others and store the compiled ones. Returns
        the CPU seconds and the first error. `check` and `made` are not thread-safe, so only this thread calls
        them."""
        device, cpu_s, first = self._device, 0.0, None
        for future in futures.values():
            future.cancel()
        wait(futures.values())
        for key, future in futures.items():
            if future.cancelled():
                continue
            try:
                compiled = future.result()
                cpu_s += compiled.cpu_s
                for result, call in compiled.calls:
                    device.check(result, call)
            except Exception as error:
                first = first or error
                if not future.exception():
                    lib.vkDestroyPipeline(device.vk, compiled.pipeline, NULL)
                continue
            self._pipelines[key] = compiled.pipeline
            device.made("VkPipeline")
        return cpu_s, first

    def _compile(
        self,
        op: str,
        variant: str,
        consts: tuple[tuple[str, int], ...],
        layout: PipelineLayout,
        spirv: Future[bytes],
    ) -> Compiled:
        """Runs in a thread."""
        device, code = self._device, spirv.result()
        began = time.thread_time()
        if "matrix_units" in OPS[op].needs:  # shaders for matrix units compute with F16
            code = float_controls.declared(code, device.features)
        env.log(4, f"{device.name}: pipeline {op} {variant} {dict(consts)}")
        module_info = new(
            "VkShaderModuleCreateInfo",
            codeSize=len(code),
            pCode=ffi.cast("uint32_t *", ffi.from_buffer(code)),
        )
        module = ffi.new("VkShaderModule *")
        result = lib.vkCreateShaderModule(device.vk, module_info, NULL, module)
        calls = [(result, f"vkCreateShaderModule of {op}")]
        if result != C.VK_SUCCESS:
            return Compiled(NULL, calls, time.thread_time() - began)
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
        flags = CAPTURE if device.features["executable_info"] else 0
        info = new("VkComputePipelineCreateInfo", layout=layout.pipeline_layout, flags=flags)
        info.stage.sType = C.VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO
        info.stage.stage, info.stage.module = C.VK_SHADER_STAGE_COMPUTE_BIT, module[0]
        info.stage.pName, info.stage.pSpecializationInfo = name, special
        size = new(
            "VkPipelineShaderStageRequiredSubgroupSizeCreateInfo",
            requiredSubgroupSize=dict(consts).get("LANES", device.info.limits["subgroup_size"]),
        )
        if "full_subgroups" in OPS[op].needs:
            # Without this flag a subgroup may have fewer than gl_SubgroupSize invocations, and sums would be
            # incomplete.
            info.stage.flags = FULL_SUBGROUPS
            info.stage.pNext = size if device.features.get("subgroup_size_control") else NULL
        pipeline = ffi.new("VkPipeline *")
        result = lib.vkCreateComputePipelines(device.vk, self._cache.handle, 1, info, NULL, pipeline)
        lib.vkDestroyShaderModule(device.vk, module[0], NULL)
        calls.append((result, f"vkCreateComputePipelines of {op} {variant} {dict(consts)}"))
        return Compiled(pipeline[0], calls, time.thread_time() - began)

    def close(self) -> None:
        device = self._device
        self._keep({key: future for key, (_, future) in self._begun.items()})
        self._begun = {}
        if self._unsaved_s and not device.lost:
            self._save()
        self.codebooks.close()
        for pipeline in self._pipelines.values():
            lib.vkDestroyPipeline(device.vk, pipeline, NULL)
            device.gone("VkPipeline")
        self.layouts.close()
        self._cache.close()
        self._pipelines = {}

    def _save(self) -> None:
        self._cache.save()
        self._unsaved_s = 0.0
