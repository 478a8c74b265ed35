// aclnnMoeGatingTopKBackward, all steps written out: this is what a program for a device looks like.
#include <cmath>
#include <cstdio>
#include <vector>

#include "acl/acl.h"
#include "aclnnop/aclnn_moe_gating_top_k_backward.h"

#define CHECK(call)                                                                            \
    do {                                                                                       \
        auto status = (call);                                                                  \
        if (status != ACL_SUCCESS) {                                                           \
            std::printf("%s failed with %d: %s\n", #call, status, aclGetRecentErrMsg());       \
            return 1;                                                                          \
        }                                                                                      \
    } while (0)

template <typename T>
int CreateTensor(const std::vector<T> &values, const std::vector<int64_t> &shape, aclDataType dtype, void **memory,
                 aclTensor **tensor)
{
    size_t bytes = values.size() * sizeof(T);
    CHECK(aclrtMalloc(memory, bytes, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK(aclrtMemcpy(*memory, bytes, values.data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE));
    const int64_t strides[] = {shape[1], 1};
    *tensor = aclCreateTensor(shape.data(), shape.size(), dtype, strides, 0, aclFormat::ACL_FORMAT_ND, shape.data(),
                              shape.size(), *memory);
    return *tensor == nullptr;
}

int main()
{
    // 1. Device and stream.
    aclrtStream stream = nullptr;
    CHECK(aclInit(nullptr));
    CHECK(aclrtSetDevice(0));
    CHECK(aclrtCreateStream(&stream));

    // 2. Two tokens, four experts, two chosen ones each.
    std::vector<float> scores = {0.5f, 0.75f, 0.25f, 0.5f, 0.25f, 0.25f, 0.5f, 0.75f};
    std::vector<float> grad = {1, 0, 0, 2};
    std::vector<int32_t> experts = {1, 2, 3, 0};
    std::vector<float> result(8, -1);
    void *scoresMemory, *gradMemory, *expertsMemory, *resultMemory, *workspace = nullptr;
    aclTensor *xNorm, *gradY, *expertIdx, *gradX;
    CHECK(CreateTensor(scores, {2, 4}, ACL_FLOAT, &scoresMemory, &xNorm));
    CHECK(CreateTensor(grad, {2, 2}, ACL_FLOAT, &gradMemory, &gradY));
    CHECK(CreateTensor(experts, {2, 2}, ACL_INT32, &expertsMemory, &expertIdx));
    CHECK(CreateTensor(result, {2, 4}, ACL_FLOAT, &resultMemory, &gradX));

    // 3. First phase: checks and the size of the workspace. Second phase: the work.
    uint64_t workspaceSize = 0;
    aclOpExecutor *executor = nullptr;
    CHECK(aclnnMoeGatingTopKBackwardGetWorkspaceSize(xNorm, gradY, expertIdx, 0, 1, 2.0, 1e-20, gradX, &workspaceSize,
                                                     &executor));
    if (workspaceSize > 0) {
        CHECK(aclrtMalloc(&workspace, workspaceSize, ACL_MEM_MALLOC_HUGE_FIRST));
    }
    CHECK(aclnnMoeGatingTopKBackward(workspace, workspaceSize, executor, stream));
    CHECK(aclrtSynchronizeStream(stream));

    // 4. The result.
    size_t bytes = result.size() * sizeof(float);
    CHECK(aclrtMemcpy(result.data(), bytes, resultMemory, bytes, ACL_MEMCPY_DEVICE_TO_HOST));
    // Token 0: weights 0.75 and 0.25, scaled gradients 2 and 0, their mean 1.5; (2 - 1.5) / 1 * 0.75 * 0.25 and so on.
    const std::vector<float> wanted = {0, 0.09375f, -0.28125f, 0, 0.5625f, 0, 0, -0.1875f};
    int wrong = 0;
    for (size_t i = 0; i < wanted.size(); i++) {
        std::printf("gradX[%zu] is: %f\n", i, result[i]);
        wrong += !(std::fabs(result[i] - wanted[i]) <= 1e-6f);
    }

    // 5. Everything back.
    for (aclTensor *tensor : {xNorm, gradY, expertIdx, gradX}) CHECK(aclDestroyTensor(tensor));
    for (void *memory : {scoresMemory, gradMemory, expertsMemory, resultMemory}) CHECK(aclrtFree(memory));
    if (workspace != nullptr) CHECK(aclrtFree(workspace));
    CHECK(aclrtDestroyStream(stream));
    CHECK(aclrtResetDevice(0));
    CHECK(aclFinalize());
    return wrong;
}
