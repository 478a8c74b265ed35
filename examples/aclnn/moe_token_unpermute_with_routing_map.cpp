// aclnnMoeTokenUnpermuteWithRoutingMap: padded, then without weights, then with an empty slot.
#include "aclnnop/aclnn_moe_token_unpermute_with_routing_map.h"
#include "kit.hpp"

int main()
{
    Device device;
    Tensor<int8_t> map({2, 2}, {1, 1, 1, 1});

    const int64_t padded_shape[] = {2, 2};
    aclIntArray *restore_padded = aclCreateIntArray(padded_shape, 2);
    Tensor<float> ones({2, 2}, {1, 1, 1, 1});
    Tensor<int32_t> token_ids({2}, {1, 1});
    Tensor<float> out({2, 2});
    Tensor<int32_t> out_index({2});
    Tensor<int32_t> token_id({2});
    Tensor<float> permuted_probs({2});
    RUN(MoeTokenUnpermuteWithRoutingMap, ones, token_ids, map, ones, true, restore_padded, out, out_index, token_id,
        permuted_probs);
    expect("padded tokens", out, {0, 0, 2, 2});
    expect("padded out index", out_index, {0, 1});
    expect("padded token id", token_id, {1, 1});
    expect("padded probs", permuted_probs, {1, 1});

    const int64_t shape[] = {2, 4};
    aclIntArray *restore = aclCreateIntArray(shape, 2);
    Tensor<float> powers({4, 4}, {1, 2, 3, 4, 10, 20, 30, 40, 100, 200, 300, 400, 1000, 2000, 3000, 4000});
    Tensor<int32_t> in_order({4}, {0, 1, 2, 3});
    Tensor<float> sums({2, 4});
    Tensor<int32_t> slots({4});
    Tensor<int32_t> tokens_of_slots({4});
    Tensor<float> no_probs(std::vector<int64_t>{0}, std::vector<float>{});
    RUN(MoeTokenUnpermuteWithRoutingMap, powers, in_order, nullptr, nullptr, false, restore, sums, slots,
        tokens_of_slots, no_probs);
    expect("sums", sums, {11, 22, 33, 44, 1100, 2200, 3300, 4400});

    Tensor<float> some({4, 4}, {2, 4, 6, 8, 4, 8, 12, 16, 8, 16, 24, 32, -1, -1, -1, -1});
    Tensor<int32_t> with_a_hole({4}, {0, -1, 1, 2});
    Tensor<float> probs({2, 2}, {0.5f, 0, 0.25f, 0.75f});
    Tensor<float> slot_probs({4});
    RUN(MoeTokenUnpermuteWithRoutingMap, some, with_a_hole, map, probs, false, restore, sums, slots, tokens_of_slots,
        slot_probs);
    expect("weighted sums", sums, {1, 2, 3, 4, 7, 14, 21, 28});
    expect("slot probs", slot_probs, {0.5f, 0, 0.25f, 0.75f});
    OK(aclDestroyIntArray(restore));
    OK(aclDestroyIntArray(restore_padded));
    return 0;
}
