"""The C interface as text: types, enum values and prototypes, from which headers, glue and wrappers are made.

Names, values and parameter order are CANN's, since programs are compiled against them.
"""

import re
from dataclasses import dataclass
from functools import cache

from moeroute.aclnn.signatures import SIGNATURES

ACL_TYPES = """\
typedef int aclError;
typedef void *aclrtStream;
typedef void *aclrtContext;
typedef void *aclrtEvent;

#define ACL_SUCCESS 0
#define ACL_ERROR_NONE 0
#define ACL_ERROR_INVALID_PARAM 100000
#define ACL_ERROR_UNINITIALIZE 100001
#define ACL_ERROR_REPEAT_INITIALIZE 100002
#define ACL_ERROR_REPEAT_FINALIZE 100037
#define ACL_ERROR_RT_PARAM_INVALID 107000
#define ACL_ERROR_RT_INVALID_DEVICEID 107001
#define ACL_ERROR_RT_CONTEXT_NULL 107002
#define ACL_ERROR_RT_STREAM_CONTEXT 107003
#define ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID 107006
#define ACL_ERROR_RT_EVENT_TIMESTAMP_REVERSAL 107007
#define ACL_ERROR_BAD_ALLOC 200000
#define ACL_ERROR_RT_MEMORY_ALLOCATION 207001
#define ACL_ERROR_INTERNAL_ERROR 500000
#define ACL_ERROR_RT_STREAM_SYNC_TIMEOUT 507046
#define ACL_ERROR_RT_EVENT_SYNC_TIMEOUT 507047

#define ACL_EVENT_SYNC 0x00000001u
#define ACL_EVENT_CAPTURE_STREAM_PROGRESS 0x00000002u
#define ACL_EVENT_TIME_LINE 0x00000008u
#define ACL_EVENT_EXTERNAL 0x00000020u
#define ACL_EVENT_IPC 0x00000040u

#define ACL_STREAM_FAST_LAUNCH 0x00000001u
#define ACL_STREAM_FAST_SYNC 0x00000002u
#define ACL_STREAM_PERSISTENT 0x00000004u
#define ACL_STREAM_HUGE 0x00000008u
#define ACL_STREAM_CPU_SCHEDULE 0x00000010u

typedef enum {
    ACL_DT_UNDEFINED = -1,
    ACL_FLOAT = 0,
    ACL_FLOAT16 = 1,
    ACL_INT8 = 2,
    ACL_INT32 = 3,
    ACL_UINT8 = 4,
    ACL_INT16 = 6,
    ACL_UINT16 = 7,
    ACL_UINT32 = 8,
    ACL_INT64 = 9,
    ACL_UINT64 = 10,
    ACL_DOUBLE = 11,
    ACL_BOOL = 12,
    ACL_COMPLEX64 = 16,
    ACL_COMPLEX128 = 17,
    ACL_BF16 = 27
} aclDataType;

typedef enum {
    ACL_FORMAT_UNDEFINED = -1,
    ACL_FORMAT_NCHW = 0,
    ACL_FORMAT_NHWC = 1,
    ACL_FORMAT_ND = 2,
    ACL_FORMAT_NC1HWC0 = 3,
    ACL_FORMAT_FRACTAL_Z = 4,
    ACL_FORMAT_FRACTAL_NZ = 29
} aclFormat;

typedef enum {
    ACL_MEM_MALLOC_HUGE_FIRST = 0,
    ACL_MEM_MALLOC_HUGE_ONLY = 1,
    ACL_MEM_MALLOC_NORMAL_ONLY = 2
} aclrtMemMallocPolicy;

typedef enum {
    ACL_MEMCPY_HOST_TO_HOST = 0,
    ACL_MEMCPY_HOST_TO_DEVICE = 1,
    ACL_MEMCPY_DEVICE_TO_HOST = 2,
    ACL_MEMCPY_DEVICE_TO_DEVICE = 3,
    ACL_MEMCPY_DEFAULT = 4
} aclrtMemcpyKind;

typedef enum {
    ACL_DDR_MEM = 0,
    ACL_HBM_MEM = 1,
    ACL_DDR_MEM_HUGE = 2,
    ACL_DDR_MEM_NORMAL = 3,
    ACL_HBM_MEM_HUGE = 4,
    ACL_HBM_MEM_NORMAL = 5,
    ACL_DDR_MEM_P2P_HUGE = 6,
    ACL_DDR_MEM_P2P_NORMAL = 7,
    ACL_HBM_MEM_P2P_HUGE = 8,
    ACL_HBM_MEM_P2P_NORMAL = 9,
    ACL_HBM_MEM_HUGE1G = 10,
    ACL_HBM_MEM_P2P_HUGE1G = 11
} aclrtMemAttr;

typedef enum {
    ACL_DEVICE = 0,
    ACL_HOST = 1
} aclrtRunMode;

typedef enum {
    ACL_EVENT_STATUS_COMPLETE = 0,
    ACL_EVENT_STATUS_NOT_READY = 1,
    ACL_EVENT_STATUS_RESERVED = 2
} aclrtEventStatus;

typedef enum {
    ACL_EVENT_RECORDED_STATUS_NOT_READY = 0,
    ACL_EVENT_RECORDED_STATUS_COMPLETE = 1
} aclrtEventRecordedStatus;

typedef enum {
    ACL_STREAM_STATUS_COMPLETE = 0,
    ACL_STREAM_STATUS_NOT_READY = 1,
    ACL_STREAM_STATUS_RESERVED = 0xFFFF
} aclrtStreamStatus;

typedef enum {
    ACL_OPT_DETERMINISTIC = 0,
    ACL_OPT_ENABLE_DEBUG_KERNEL = 1,
    ACL_OPT_STRONG_CONSISTENCY = 2
} aclSysParamOpt;
"""

ACL_FUNCTIONS = """\
aclError aclInit(const char *configPath);
aclError aclFinalize(void);
const char *aclGetRecentErrMsg(void);
aclError aclrtSetDevice(int32_t deviceId);
aclError aclrtGetDevice(int32_t *deviceId);
aclError aclrtResetDevice(int32_t deviceId);
aclError aclrtGetDeviceCount(uint32_t *count);
aclError aclrtCreateContext(aclrtContext *context, int32_t deviceId);
aclError aclrtDestroyContext(aclrtContext context);
aclError aclrtSetCurrentContext(aclrtContext context);
aclError aclrtGetCurrentContext(aclrtContext *context);
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t value);
aclError aclrtCreateStream(aclrtStream *stream);
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag);
aclError aclrtDestroyStream(aclrtStream stream);
aclError aclrtSynchronizeStream(aclrtStream stream);
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout);
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status);
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);
aclError aclrtSynchronizeDevice(void);
aclError aclrtCreateEvent(aclrtEvent *event);
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag);
aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag);
aclError aclrtDestroyEvent(aclrtEvent event);
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtSynchronizeEvent(aclrtEvent event);
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout);
aclError aclrtQueryEvent(aclrtEvent event, aclrtEventStatus *status);
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status);
aclError aclrtEventElapsedTime(float *ms, aclrtEvent startEvent, aclrtEvent endEvent);
aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy);
aclError aclrtFree(void *devPtr);
aclError aclrtMallocHost(void **hostPtr, size_t size);
aclError aclrtFreeHost(void *hostPtr);
aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind);
aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream);
aclError aclrtMemset(void *devPtr, size_t maxCount, int32_t value, size_t count);
aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream);
aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total);
aclError aclrtGetRunMode(aclrtRunMode *runMode);
const char *aclrtGetSocName(void);
"""

META_TYPES = """\
typedef int32_t aclnnStatus;
typedef struct aclTensor aclTensor;
typedef struct aclTensorList aclTensorList;
typedef struct aclScalar aclScalar;
typedef struct aclIntArray aclIntArray;
typedef struct aclFloatArray aclFloatArray;
typedef struct aclBoolArray aclBoolArray;
typedef struct aclOpExecutor aclOpExecutor;

#define ACLNN_SUCCESS 0
#define ACLNN_ERR_PARAM_NULLPTR 161001
#define ACLNN_ERR_PARAM_INVALID 161002
#define ACLNN_ERR_RUNTIME_ERROR 361001
#define ACLNN_ERR_INNER 561000
#define ACLNN_ERR_INNER_INFERSHAPE_ERROR 561001
#define ACLNN_ERR_INNER_TILING_ERROR 561002
#define ACLNN_ERR_INNER_FIND_KERNEL_ERROR 561003
#define ACLNN_ERR_INNER_CREATE_EXECUTOR 561101
#define ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR 561102
#define ACLNN_ERR_INNER_NULLPTR 561103
"""

META_FUNCTIONS = """\
aclTensor *aclCreateTensor(const int64_t *viewDims, uint64_t viewDimsNum, aclDataType dataType,
                           const int64_t *stride, int64_t offset, aclFormat format,
                           const int64_t *storageDims, uint64_t storageDimsNum, void *tensorData);
aclnnStatus aclDestroyTensor(const aclTensor *tensor);
aclnnStatus aclGetViewShape(const aclTensor *tensor, int64_t **viewDims, uint64_t *viewDimsNum);
aclnnStatus aclGetViewStrides(const aclTensor *tensor, int64_t **stridesValue, uint64_t *stridesNum);
aclnnStatus aclGetViewOffset(const aclTensor *tensor, int64_t *offset);
aclnnStatus aclGetStorageShape(const aclTensor *tensor, int64_t **storageDims, uint64_t *storageDimsNum);
aclnnStatus aclGetFormat(const aclTensor *tensor, aclFormat *format);
aclnnStatus aclGetDataType(const aclTensor *tensor, aclDataType *dataType);
aclnnStatus aclGetRawTensorAddr(const aclTensor *tensor, void **addr);
aclnnStatus aclSetRawTensorAddr(aclTensor *tensor, void *addr);
aclTensorList *aclCreateTensorList(const aclTensor *const *value, uint64_t size);
aclnnStatus aclDestroyTensorList(const aclTensorList *array);
aclnnStatus aclGetTensorListSize(const aclTensorList *tensorList, uint64_t *size);
aclScalar *aclCreateScalar(void *value, aclDataType dataType);
aclnnStatus aclDestroyScalar(const aclScalar *scalar);
aclIntArray *aclCreateIntArray(const int64_t *value, uint64_t size);
aclnnStatus aclDestroyIntArray(const aclIntArray *array);
aclnnStatus aclGetIntArraySize(const aclIntArray *array, uint64_t *size);
aclFloatArray *aclCreateFloatArray(const float *value, uint64_t size);
aclnnStatus aclDestroyFloatArray(const aclFloatArray *array);
aclnnStatus aclGetFloatArraySize(const aclFloatArray *array, uint64_t *size);
aclBoolArray *aclCreateBoolArray(const bool *value, uint64_t size);
aclnnStatus aclDestroyBoolArray(const aclBoolArray *array);
aclnnStatus aclGetBoolArraySize(const aclBoolArray *array, uint64_t *size);
aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor *executor);
aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor *executor);
aclnnStatus aclSetInputTensorAddr(aclOpExecutor *executor, size_t index, aclTensor *tensor, void *addr);
aclnnStatus aclSetOutputTensorAddr(aclOpExecutor *executor, size_t index, aclTensor *tensor, void *addr);
aclnnStatus aclSetTensorAddr(aclOpExecutor *executor, size_t index, aclTensor *tensor, void *addr);
aclnnStatus aclSetDynamicInputTensorAddr(aclOpExecutor *executor, size_t irIndex, size_t relativeIndex,
                                         aclTensorList *tensors, void *addr);
aclnnStatus aclSetDynamicOutputTensorAddr(aclOpExecutor *executor, size_t irIndex, size_t relativeIndex,
                                          aclTensorList *tensors, void *addr);
aclnnStatus aclSetDynamicTensorAddr(aclOpExecutor *executor, size_t irIndex, size_t relativeIndex,
                                    aclTensorList *tensors, void *addr);
"""

# Other names of headers, which programs include too.
ALIASES = {
    "acl/acl_base.h": "acl/acl.h",
    "acl/acl_rt.h": "acl/acl.h",
    "aclnn/aclnn_base.h": "aclnn/acl_meta.h",
    "aclnnop/aclnn_moe_gating_top_kbackward.h": "aclnnop/aclnn_moe_gating_top_k_backward.h",  # as CANN generates it
}

# What crosses into Python, by its C type. Handles and addresses are numbers there; what the library reads or
# writes through stays a pointer.
_ENUMS = ("aclDataType", "aclFormat", "aclrtMemMallocPolicy", "aclrtMemcpyKind", "aclSysParamOpt", "aclrtMemAttr")
_WRITTEN_ENUMS = ("aclDataType", "aclFormat", "aclrtRunMode", "aclrtEventStatus", "aclrtEventRecordedStatus")
_ADDRESSES = ("void **", "int64_t **", "aclrtStream *", "aclrtContext *", "aclrtEvent *", "aclOpExecutor **")
_PLAIN = ("bool", "float", "double", "int32_t", "uint32_t", "int64_t", "uint64_t", "size_t")
_POINTERS = ("float *", "int32_t *", "uint32_t *", "int64_t *", "uint64_t *", "size_t *")
_IN_PYTHON = {
    **{kind: "int32_t" for kind in _ENUMS},
    **{f"{kind} *": "int32_t *" for kind in (*_WRITTEN_ENUMS, "aclrtStreamStatus")},
    **{kind: "uintptr_t *" for kind in _ADDRESSES},
    "const aclTensor *const *": "const uintptr_t *",
    **{kind: kind for kind in (*_PLAIN, *_POINTERS, "const int64_t *", "const float *", "const bool *")},
}


@dataclass(frozen=True)
class Prototype:
    """One C function: ``aclError``, ``aclrtFree``, ``(("void *", "devPtr"),)``."""

    returns: str
    name: str
    parameters: tuple[tuple[str, str], ...]

    @property
    def returns_status(self) -> bool:
        return self.returns in ("aclError", "aclnnStatus")

    @property
    def failure(self) -> int:
        """What the function says where there is no Python to answer."""
        return 561000 if self.returns == "aclnnStatus" else 500000

    @property
    def in_c(self) -> str:
        parameters = ", ".join(f"{kind}{'' if kind[-1] == '*' else ' '}{name}" for kind, name in self.parameters)
        return f"{self.returns}{'' if self.returns[-1] == '*' else ' '}{self.name}({parameters or 'void'})"

    @property
    def in_python(self) -> str:
        """The function that Python answers: a status comes back plus one, so that 0 means nobody answered."""
        return f"{self._answer} moeroute_{self.name}({self._python_parameters})"

    @property
    def _answer(self) -> str:
        return "int" if self.returns_status else "uintptr_t"

    @property
    def _python_parameters(self) -> str:
        return ", ".join(f"{in_python(kind)} {name}" for kind, name in self.parameters) or "void"

    @property
    def wrapper(self) -> str:
        """The C function: it looks once for what Python answers, and calls it."""
        arguments = ", ".join(f"({in_python(kind)}){name}" for kind, name in self.parameters)
        if self.returns_status:
            result = f"answer ? (int)answer - 1 : {self.failure}"
        elif self.name == "aclGetRecentErrMsg":
            result = "answer ? (const char *)answer : moeroute_acl_failure()"
        else:
            result = f"({self.returns})answer"
        return f"""EXPORT {self.in_c}
{{
    typedef {self._answer} (*function)({self._python_parameters});
    static function known;
    function ask = __atomic_load_n(&known, __ATOMIC_ACQUIRE);
    uintptr_t answer;
    if (!ask)
        __atomic_store_n(&known, ask = (function)moeroute_acl_find("moeroute_{self.name}"), __ATOMIC_RELEASE);
    answer = ask ? (uintptr_t)ask({arguments}) : 0;
    return {result};
}}
"""


def in_python(kind: str) -> str:
    """The type of an argument in the declarations that cffi reads."""
    return _IN_PYTHON.get(kind) or "uintptr_t"


def parse(text: str) -> tuple[Prototype, ...]:
    """The prototypes in a text of declarations."""
    found = []
    for declaration in filter(None, (" ".join(part.split()) for part in text.split(";"))):
        head = re.fullmatch(r"(.*?)(\w+)\((.*)\)", declaration)
        if head is None:
            raise ValueError(f"moeroute.aclnn: a prototype cannot be read: {declaration}")
        parameters = []
        for parameter in (part.strip() for part in head[3].split(",")):
            if parameter != "void":
                kind, name = re.fullmatch(r"(.*?)(\w+)", parameter).groups()  # type: ignore[union-attr]
                parameters.append((kind.strip(), name))
        found.append(Prototype(head[1].strip(), head[2], tuple(parameters)))
    return tuple(found)


def operator_text(operator: str) -> str:
    """Both phases of an operator in C."""
    parameters = [parameter.declaration for parameter in SIGNATURES[operator].parameters]
    parameters += ["uint64_t *workspaceSize", "aclOpExecutor **executor"]
    first = ",\n    ".join(parameters)
    return (
        f"aclnnStatus aclnn{operator}GetWorkspaceSize(\n    {first});\n\n"
        f"aclnnStatus aclnn{operator}(\n"
        "    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream);\n"
    )


@cache
def libraries() -> dict[str, tuple[Prototype, ...]]:
    """Which library exports what; the first is the one that holds Python."""
    return {
        "libascendcl.so": parse(ACL_FUNCTIONS),
        "libnnopbase.so": parse(META_FUNCTIONS),
        "libopapi.so": tuple(prototype for operator in SIGNATURES for prototype in parse(operator_text(operator))),
    }


def headers() -> dict[str, str]:
    """Every header by its path under include/."""
    operators: dict[str, list[str]] = {}
    for operator, signature in SIGNATURES.items():
        operators.setdefault(signature.header, []).append(operator)
    found = {
        "acl/acl.h": _header("acl/acl.h", (), f"{ACL_TYPES}\n{ACL_FUNCTIONS}", "the runtime, over host memory"),
        "aclnn/acl_meta.h": _header(
            "aclnn/acl_meta.h", ("acl/acl.h",), f"{META_TYPES}\n{META_FUNCTIONS}", "tensors, arrays and executors"
        ),
    }
    for file, names in operators.items():
        found[f"aclnnop/{file}"] = _header(
            f"aclnnop/{file}",
            ("aclnn/acl_meta.h", "acl/acl.h"),
            "\n".join(map(operator_text, names)),
            " and ".join(f"aclnn{name}" for name in names),
        )
    found["aclnnop/aclnn_ops_transformer.h"] = _header(
        "aclnnop/aclnn_ops_transformer.h", tuple(f"aclnnop/{file}" for file in operators), "", "every operator"
    )
    for alias, file in ALIASES.items():
        name = file.rpartition("/")[2]  # beside it
        found[alias] = f'/* Another name of {name}. */\n#include "{name}"\n'
    return found


def _header(path: str, includes: tuple[str, ...], text: str, about: str) -> str:
    guard = "MOEROUTE_" + re.sub(r"\W", "_", path).upper()
    system = "".join(f"#include <{name}.h>\n" for name in ("stdbool", "stddef", "stdint"))
    own = "".join(f'#include "{name}"\n' for name in includes)
    return (
        f"/* moeroute: {about}. Written by `moeroute aclnn build`. */\n"
        f"#ifndef {guard}\n#define {guard}\n\n{system}{own}\n"
        f'#ifdef __cplusplus\nextern "C" {{\n#endif\n\n{text}\n#ifdef __cplusplus\n}}\n#endif\n\n#endif\n'
    )
