// Simulates the kernel driver of an Imagination BXS-4-64, so that Mesa's PowerVR driver compiles shaders without this
// GPU. tools/aarch64.sh compiles this file with the common code of Mesa's shims, which have none for this driver.

#include <errno.h>
#include <string.h>

#include "drm-shim/drm_shim.h"
#include "drm-uapi/pvr_drm.h"

bool drm_shim_driver_prefers_first_render_node = true;

// Sizes in dwords. The common store of this GPU has 21504, of which 8192 are for partitions and 1024 are reserved.
static const struct drm_pvr_dev_query_gpu_info gpu = {
    .gpu_id = 36ull << 48 | 53ull << 32 | 104ull << 16 | 796,
    .num_phantoms = 1,
};
static const struct drm_pvr_dev_query_runtime_info runtime = {
    .free_list_min_pages = 25,
    .free_list_max_pages = 0x80000,
    .common_store_alloc_region_size = 12288,
    .common_store_partition_space_size = 8192,
    .max_coeffs = 4096,
    .cdm_max_local_mem_size_regs = 4096,
};
static const struct drm_pvr_heap heaps[DRM_PVR_HEAP_COUNT] = {
    [DRM_PVR_HEAP_GENERAL] = {.base = 0x8000000000, .size = 0x2000000000, .page_size_log2 = 12},
    [DRM_PVR_HEAP_PDS_CODE_DATA] = {.base = 0xda00000000, .size = 0x100000000, .page_size_log2 = 12},
    [DRM_PVR_HEAP_USC_CODE] = {.base = 0xe000000000, .size = 0x100000000, .page_size_log2 = 12},
    [DRM_PVR_HEAP_VIS_TEST] = {.base = 0xf200000000, .size = 0x200000, .page_size_log2 = 12},
    [DRM_PVR_HEAP_TRANSFER_FRAG] = {.base = 0xe400000000, .size = 0x400000000, .page_size_log2 = 12},
};
static const struct drm_pvr_static_data_area areas[] = {
    {DRM_PVR_STATIC_DATA_AREA_FENCE, DRM_PVR_HEAP_GENERAL, 128, 0},
    {DRM_PVR_STATIC_DATA_AREA_YUV_CSC, DRM_PVR_HEAP_GENERAL, 1024, 128},
    {DRM_PVR_STATIC_DATA_AREA_VDM_SYNC, DRM_PVR_HEAP_PDS_CODE_DATA, 128, 0},
    {DRM_PVR_STATIC_DATA_AREA_EOT, DRM_PVR_HEAP_PDS_CODE_DATA, 128, 128},
    {DRM_PVR_STATIC_DATA_AREA_VDM_SYNC, DRM_PVR_HEAP_USC_CODE, 128, 0},
};

// answer: copy a structure to the driver, or only its size if the driver gives no pointer.
static int answer(struct drm_pvr_ioctl_dev_query_args *args, const void *data, uint32_t size) {
    if (args->pointer) memcpy((void *)(uintptr_t)args->pointer, data, size);
    args->size = size;
    return 0;
}

// answer_array: copy an array, or only its length if the driver gives no pointer for it.
static int answer_array(struct drm_pvr_ioctl_dev_query_args *args, const void *data, uint32_t count,
                        uint32_t stride) {
    struct drm_pvr_obj_array *array = (void *)(uintptr_t)args->pointer;
    args->size = sizeof(*array);
    if (!array) return 0;
    if (array->array && array->count <= count && array->stride == stride)
        memcpy((void *)(uintptr_t)array->array, data, array->count * stride);
    else
        array->count = count, array->stride = stride;
    return 0;
}

static int query(int fd, unsigned long request, void *arg) {
    static const struct drm_pvr_dev_query_quirks no_quirks;
    static const struct drm_pvr_dev_query_enhancements no_enhancements;
    struct drm_pvr_ioctl_dev_query_args *args = arg;
    switch (args->type) {
    case DRM_PVR_DEV_QUERY_GPU_INFO_GET: return answer(args, &gpu, sizeof(gpu));
    case DRM_PVR_DEV_QUERY_RUNTIME_INFO_GET: return answer(args, &runtime, sizeof(runtime));
    case DRM_PVR_DEV_QUERY_QUIRKS_GET: return answer(args, &no_quirks, sizeof(no_quirks));
    case DRM_PVR_DEV_QUERY_ENHANCEMENTS_GET: return answer(args, &no_enhancements, sizeof(no_enhancements));
    case DRM_PVR_DEV_QUERY_HEAP_INFO_GET: return answer_array(args, heaps, DRM_PVR_HEAP_COUNT, sizeof(heaps[0]));
    case DRM_PVR_DEV_QUERY_STATIC_DATA_AREAS_GET:
        return answer_array(args, areas, sizeof(areas) / sizeof(areas[0]), sizeof(areas[0]));
    }
    return -EINVAL;
}

static int create_bo(int fd, unsigned long request, void *arg) {
    struct drm_pvr_ioctl_create_bo_args *args = arg;
    struct shim_bo *bo = calloc(1, sizeof(*bo));
    if (!bo || drm_shim_bo_init(bo, args->size)) return -ENOMEM;
    args->handle = drm_shim_bo_get_handle(drm_shim_fd_lookup(fd), bo);
    drm_shim_bo_put(bo);
    return 0;
}

static int mmap_offset(int fd, unsigned long request, void *arg) {
    struct drm_pvr_ioctl_get_bo_mmap_offset_args *args = arg;
    struct shim_fd *file = drm_shim_fd_lookup(fd);
    struct shim_bo *bo = drm_shim_bo_lookup(file, args->handle);
    if (!bo) return -ENOENT;
    args->offset = drm_shim_bo_get_mmap_offset(file, bo);
    drm_shim_bo_put(bo);
    return 0;
}

static int nothing(int fd, unsigned long request, void *arg) { return 0; }

#define NUMBER(name) [_IOC_NR(DRM_IOCTL_PVR_##name) - DRM_COMMAND_BASE]
static ioctl_fn_t ioctls[] = {
    NUMBER(DEV_QUERY) = query,
    NUMBER(CREATE_BO) = create_bo,
    NUMBER(GET_BO_MMAP_OFFSET) = mmap_offset,
    NUMBER(CREATE_VM_CONTEXT) = nothing,
    NUMBER(DESTROY_VM_CONTEXT) = nothing,
    NUMBER(VM_MAP) = nothing,
    NUMBER(VM_UNMAP) = nothing,
    NUMBER(CREATE_CONTEXT) = nothing,
    NUMBER(DESTROY_CONTEXT) = nothing,
    NUMBER(CREATE_FREE_LIST) = nothing,
    NUMBER(DESTROY_FREE_LIST) = nothing,
    NUMBER(CREATE_HWRT_DATASET) = nothing,
    NUMBER(DESTROY_HWRT_DATASET) = nothing,
    NUMBER(SUBMIT_JOBS) = nothing,
};

void drm_shim_driver_init(void) {
    shim_device.bus_type = DRM_BUS_PLATFORM;
    shim_device.driver_name = "powervr";
    shim_device.driver_ioctls = ioctls;
    shim_device.driver_ioctl_count = sizeof(ioctls) / sizeof(ioctls[0]);
    shim_device.version_major = 1;
    drm_shim_override_file("OF_FULLNAME=/soc/gpu\nOF_COMPATIBLE_N=2\nOF_COMPATIBLE_0=ti,j721s2-gpu\n"
                           "OF_COMPATIBLE_1=img,img-rogue\n",
                           "/sys/dev/char/%d:%d/device/uevent", DRM_MAJOR, render_node_minor);
}
