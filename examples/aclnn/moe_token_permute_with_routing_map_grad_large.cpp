// aclnnMoeTokenPermuteWithRoutingMapGrad, padded, in the size of a large model: 4096 tokens of 7168 numbers,
// 256 experts that take 16 tokens each.
#include "aclnnop/aclnn_moe_token_permute_with_routing_map_grad.h"
#include "kit.hpp"

int main()
{
    const int64_t tokens = 4096, hidden = 7168, experts = 256, capacity = 16, total = experts * capacity;
    Device device;
    // Row i belongs to a token of its own (37 and 4096 have no common factor) but for the last one, token 0's again.
    std::vector<int32_t> token_of_row(total);
    for (int64_t i = 0; i < total; i++) token_of_row[i] = int32_t(i * 37 % tokens);
    token_of_row[total - 1] = 0;
    std::vector<int8_t> map(tokens * experts, 0);
    std::vector<float> grad(total * hidden);
    for (int64_t i = 0; i < total; i++) {
        map[token_of_row[i] * experts + i / capacity] = 1;
        for (int64_t h = 0; h < hidden; h++) grad[i * hidden + h] = float(i) + float(h % 8) * 0.125f;
    }

    Tensor<float> permuted_grad({total, hidden}, grad);
    Tensor<float> permuted_probs_grad({total}, std::vector<float>(total, 0.1f));
    Tensor<int32_t> sorted_indices({total}, token_of_row);
    Tensor<int8_t> routing_map({tokens, experts}, map);
    Tensor<float> tokens_grad({tokens, hidden});
    Tensor<float> probs_grad({tokens, experts});
    RUN(MoeTokenPermuteWithRoutingMapGrad, permuted_grad, permuted_probs_grad, sorted_indices, routing_map, experts,
        tokens, true, tokens_grad, probs_grad);

    // Only token 0 has two rows, the first and the last.
    std::vector<float> &wanted = grad, found = tokens_grad.values();
    for (int64_t h = 0; h < hidden; h++) wanted[h] += grad[(total - 1) * hidden + h];
    std::vector<float> missing(hidden, 0), wanted_probs(tokens * experts, 0);
    int64_t wrong = 0;
    std::vector<bool> seen(tokens, false);
    for (int64_t i = 0; i < total; i++) {
        wanted_probs[token_of_row[i] * experts + i / capacity] = 0.1f;
        if (i + 1 < total) wrong += std::memcmp(&found[token_of_row[i] * hidden], &wanted[i * hidden], hidden * 4) != 0;
        seen[token_of_row[i]] = true;
    }
    for (int64_t t = 0; t < tokens; t++)
        if (!seen[t]) wrong += std::memcmp(&found[t * hidden], missing.data(), hidden * 4) != 0;
    expect<int64_t>("wrong tokens grads", std::vector<int64_t>{wrong}, {0});
    expect("probs grad", probs_grad, wanted_probs);
    return 0;
}
