// What the examples share: a device, tensors in its memory, a call of both phases, and comparisons that end the program.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <vector>

#include "acl/acl.h"
#include "aclnn/acl_meta.h"

#define OK(call)                                                                              \
    do {                                                                                      \
        int status_ = (call);                                                                 \
        if (status_ != 0) {                                                                   \
            std::fprintf(stderr, "%s: %d: %s\n", #call, status_, aclGetRecentErrMsg());       \
            std::exit(1);                                                                     \
        }                                                                                     \
    } while (0)

// RUN(MoeTokenPermute, tokens, ...): first phase, workspace, second phase.
#define RUN(name, ...)                                                                        \
    do {                                                                                      \
        uint64_t size_ = 0;                                                                   \
        aclOpExecutor *executor_ = nullptr;                                                   \
        OK(aclnn##name##GetWorkspaceSize(__VA_ARGS__, &size_, &executor_));                   \
        void *workspace_ = nullptr;                                                           \
        if (size_ > 0) OK(aclrtMalloc(&workspace_, size_, ACL_MEM_MALLOC_HUGE_FIRST));        \
        OK(aclnn##name(workspace_, size_, executor_, device.stream));                         \
        OK(aclrtSynchronizeStream(device.stream));                                            \
        if (workspace_ != nullptr) OK(aclrtFree(workspace_));                                 \
    } while (0)

struct Device {
    aclrtStream stream = nullptr;

    Device()
    {
        OK(aclInit(nullptr));
        OK(aclrtSetDevice(0));
        OK(aclrtCreateStream(&stream));
    }
    ~Device()
    {
        OK(aclrtDestroyStream(stream));
        OK(aclrtResetDevice(0));
        OK(aclFinalize());
    }
};

template <typename T>
constexpr aclDataType dtype_of()
{
    return std::is_same<T, float>::value     ? ACL_FLOAT
           : std::is_same<T, int32_t>::value ? ACL_INT32
           : std::is_same<T, int64_t>::value ? ACL_INT64
           : std::is_same<T, int8_t>::value  ? ACL_INT8
                                             : ACL_DT_UNDEFINED;
}

// A tensor in device memory. It converts to the aclTensor * that operators take.
template <typename T>
struct Tensor {
    std::vector<int64_t> shape;
    void *memory = nullptr;
    aclTensor *handle = nullptr;

    Tensor(std::vector<int64_t> shape_, const std::vector<T> &values, aclDataType dtype = dtype_of<T>()) : shape(shape_)
    {
        if (size() != values.size()) {
            std::fprintf(stderr, "%zu values for %zu elements\n", values.size(), size());
            std::exit(1);
        }
        create(dtype);
        if (size() > 0) OK(aclrtMemcpy(memory, bytes(), values.data(), bytes(), ACL_MEMCPY_HOST_TO_DEVICE));
    }
    // An output: filled with numbers that no example expects, so that what was not written shows.
    explicit Tensor(std::vector<int64_t> shape_, aclDataType dtype = dtype_of<T>()) : shape(shape_)
    {
        create(dtype);
        if (size() > 0) OK(aclrtMemset(memory, bytes(), 0x7F, bytes()));
    }
    Tensor(const Tensor &) = delete;
    ~Tensor()
    {
        OK(aclDestroyTensor(handle));
        if (memory != nullptr) OK(aclrtFree(memory));
    }

    operator aclTensor *() const { return handle; }
    size_t size() const
    {
        size_t count = 1;
        for (int64_t n : shape) count *= static_cast<size_t>(n);
        return count;
    }
    size_t bytes() const { return size() * sizeof(T); }
    std::vector<T> values() const
    {
        std::vector<T> found(size());
        if (size() > 0) OK(aclrtMemcpy(found.data(), bytes(), memory, bytes(), ACL_MEMCPY_DEVICE_TO_HOST));
        return found;
    }

private:
    void create(aclDataType dtype)
    {
        if (size() > 0) OK(aclrtMalloc(&memory, bytes(), ACL_MEM_MALLOC_HUGE_FIRST));
        std::vector<int64_t> strides(shape.size(), 1);
        for (size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shape[axis];
        handle = aclCreateTensor(shape.data(), shape.size(), dtype, strides.data(), 0, ACL_FORMAT_ND, shape.data(),
                                 shape.size(), memory);
        OK(handle == nullptr);
    }
};

// Each row's value, `width` times.
inline std::vector<float> rows(const std::vector<float> &values, size_t width)
{
    std::vector<float> found;
    for (float value : values) found.insert(found.end(), width, value);
    return found;
}

template <typename T>
void expect(const char *name, const std::vector<T> &found, const std::vector<T> &wanted, double tolerance = 0)
{
    bool same = found.size() == wanted.size();
    for (size_t i = 0; same && i < found.size(); i++)
        same = std::fabs(double(found[i]) - double(wanted[i])) <= tolerance;
    if (same) {
        std::printf("%s: as expected\n", name);
        return;
    }
    std::printf("%s: not as expected\n", name);
    for (size_t i = 0; i < found.size() && i < wanted.size() && i < 64; i++)
        std::printf("  [%zu] %.9g, expected %.9g\n", i, double(found[i]), double(wanted[i]));
    std::exit(1);
}

template <typename T>
void expect(const char *name, const Tensor<T> &found, const std::vector<T> &wanted, double tolerance = 0)
{
    expect(name, found.values(), wanted, tolerance);
}
