"""VkDevices that tests share, together with their layouts and pipelines.

A software driver compiles a pipeline in 10 to 130 ms. Without sharing, compilation would take more than half
of a model test's time. Each test has its own memory, queue, recordings and object counts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vkbackend import env, faults, forks
from vkbackend.recording import Dispatch
from vkbackend.vulkan import program
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.pipeline_layout import Layouts, PipelineLayout
from vkbackend.vulkan.program import Compiled, Programs
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new

MOST_PIPELINES = 200  # a VkDevice with more pipelines is destroyed, because compiled code needs memory


@dataclass
class Kept:
    key: str
    handles: dict[str, Any]
    layouts: dict[tuple[Any, ...], PipelineLayout] = field(default_factory=dict)
    pipelines: dict[tuple[Any, ...], Compiled] = field(default_factory=dict)


on = False  # if true, devices that are opened now are shared; conftest.py sets this for each test
_idle: list[Kept] = []
_dispatched: set[tuple[Any, ...]] = set()  # pipelines whose code is in Mesa's shader cache
_one_at_a_time = threading.Lock()
_create, _destroy = LogicalDevice._create, LogicalDevice.destroy
_make_layout, _close_layouts = Layouts._make, Layouts.close
_compile, _close_programs = Programs._compile, Programs.close
_pipelines = Programs.pipelines
forks.forget(_idle.clear)


def install() -> None:
    """Patch the classes. Objects that were opened while `on` was false are not shared."""
    vars_of: Any = LogicalDevice
    vars_of.kept = None
    vars_of._create, vars_of.destroy = create, destroy
    Layouts._make, Layouts.close = make_layout, close_layouts  # type: ignore[method-assign]
    Programs._compile, Programs.close = compile_kept, close_programs  # type: ignore[method-assign]
    Programs.pipelines = pipelines  # type: ignore[method-assign]


@contextmanager
def fresh() -> Iterator[None]:
    """Inside the `with` block, open new devices that no other test shares."""
    global on
    before, on = on, False
    try:
        yield
    finally:
        on = before


def struck(*calls: str) -> bool:
    return any(fault.call in calls for fault in faults.planned)


def create(device: Any) -> None:
    if not on or struck("vkCreateDevice") or env.validation():
        return _create(device)
    key = repr((device.info, device.features))
    fits = [kept for kept in _idle if kept.key == key]
    if not fits:
        before = set(vars(device))
        _create(device)
        device.kept = Kept(key, {name: vars(device)[name] for name in set(vars(device)) - before})
        return None
    device.kept = max(fits, key=lambda kept: len(kept.pipelines))
    _idle[:] = [kept for kept in _idle if kept is not device.kept]
    vars(device).update(device.kept.handles)
    device.made("VkDevice")
    return None


def destroy(device: Any) -> None:
    if (kept := device.kept) is None:
        return _destroy(device)
    if device.lost or len(kept.pipelines) > MOST_PIPELINES:
        _empty(kept)
        return _destroy(device)
    if device.command_pool is not None:
        lib.vkDestroyCommandPool(device.vk, device.command_pool, NULL)
        device.gone("VkCommandPool")
    device.gone("VkDevice")
    _idle.append(kept)
    return None


def make_layout(layouts: Any, *key: Any) -> PipelineLayout:
    if (kept := layouts._device.kept) is None:
        return _make_layout(layouts, *key)
    if key in kept.layouts:
        layouts._device.made("VkDescriptorSetLayout")
        layouts._device.made("VkPipelineLayout")
    else:
        kept.layouts[key] = _make_layout(layouts, *key)
    return kept.layouts[key]


def close_layouts(layouts: Any) -> None:
    if layouts._device.kept is None:
        return _close_layouts(layouts)
    layouts._device.gone("VkPipelineLayout", len(layouts._layouts))
    layouts._device.gone("VkDescriptorSetLayout", len(layouts._layouts))
    layouts._layouts = {}
    return None


def compile_kept(
    programs: Any, op: str, variant: str, consts: Any, layout: PipelineLayout, spirv: Any
) -> Compiled:
    kept = programs._device.kept
    if kept is None or struck("vkCreateShaderModule", "vkCreateComputePipelines"):
        return _compile(programs, op, variant, consts, layout, spirv)
    key = op, variant, consts, layout, spirv.result()
    if key not in kept.pipelines:
        compiled = _compile(programs, op, variant, consts, layout, spirv)
        if any(result for result, _ in compiled.calls):
            return compiled
        kept.pipelines[key] = compiled
    return kept.pipelines[key]._replace(cpu_s=0.0)


def pipelines(programs: Programs, dispatches: Sequence[Dispatch]) -> list[tuple[Any, PipelineLayout]]:
    compiled = _pipelines(programs, dispatches)
    device = programs._device
    if device.kept is not None and "llvmpipe" in device.info.name:
        keys = [(device.kept.key, d.op, d.variant, d.consts) for d in dispatches]
        new_ones = {key: pipeline for key, (pipeline, _) in zip(keys, compiled, strict=True)}
        with _one_at_a_time:  # a mesh builds the executables of its devices in threads
            if unused := [pipeline for key, pipeline in new_ones.items() if key not in _dispatched]:
                _dispatch_nothing(device, unused)
                _dispatched.update(new_ones)
    return compiled


def _dispatch_nothing(device: Any, pipelines: list[Any]) -> None:
    """Dispatch zero workgroups of each pipeline and wait. Objects and calls are not counted."""
    buffer = ffi.new("VkCommandBuffer *")
    allocate = new("VkCommandBufferAllocateInfo", commandPool=device.command_pool, commandBufferCount=1)
    lib.vkAllocateCommandBuffers(device.vk, allocate, buffer)
    lib.vkBeginCommandBuffer(buffer[0], new("VkCommandBufferBeginInfo"))
    for pipeline in pipelines:
        lib.vkCmdBindPipeline(buffer[0], C.VK_PIPELINE_BIND_POINT_COMPUTE, pipeline)
        lib.vkCmdDispatch(buffer[0], 0, 0, 0)
    lib.vkEndCommandBuffer(buffer[0])
    submit = new("VkSubmitInfo", commandBufferCount=1, pCommandBuffers=buffer)
    lib.vkQueueSubmit(device.vk_queue, 1, submit, NULL)
    lib.vkQueueWaitIdle(device.vk_queue)
    lib.vkFreeCommandBuffers(device.vk, device.command_pool, 1, buffer)


def close_programs(programs: Any) -> None:
    if (kept := programs._device.kept) is not None:
        programs._keep({key: handle for key, (_, handle) in programs._begun.items()})
        programs._begun = {}
        handles = {compiled.pipeline for compiled in kept.pipelines.values()}
        pipelines = {
            key: pipeline for key, pipeline in programs._pipelines.items() if pipeline not in handles
        }
        programs._device.gone("VkPipeline", len(programs._pipelines) - len(pipelines))
        programs._pipelines = pipelines
    _close_programs(programs)


def destroy_idle() -> None:
    for kept in _idle:
        _empty(kept)
        lib.vkDestroyDevice(kept.handles["vk"], NULL)
    _idle.clear()


def _empty(kept: Kept) -> None:
    vk = kept.handles["vk"]
    for compiled in kept.pipelines.values():
        program.lib.vkDestroyPipeline(vk, compiled.pipeline, NULL)
    for layout in kept.layouts.values():
        lib.vkDestroyPipelineLayout(vk, layout.pipeline_layout, NULL)
        lib.vkDestroyDescriptorSetLayout(vk, layout.set_layout, NULL)
    kept.pipelines, kept.layouts = {}, {}
