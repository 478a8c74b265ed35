"""CANN's two-phase MoE operators under their own names, on torch tensors and NumPy arrays.

    status, workspace_size, executor = aclnnMoeTokenPermuteGradGetWorkspaceSize(grad, indices, topk, False, out)
    status = aclnnMoeTokenPermuteGrad(workspace, workspace_size, executor, stream)

The first call checks everything and returns 0 or a status code of the documents; then
`aclGetRecentErrMsg()` says what was wanted and what came. The second call writes into the caller's
tensors, of any strides. Workspace and stream are not needed: None, 0 and None are valid everywhere.
Nothing is written unless the status is 0. docs/aclnn.md lists what was decided where documents and
code disagree.

>>> import torch
>>> grad, indices = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 1], dtype=torch.int32)
>>> out = torch.empty(1, 2)
>>> status, size, executor = aclnnMoeTokenPermuteGradGetWorkspaceSize(grad, indices, 2, False, out)
>>> aclnnMoeTokenPermuteGrad(None, size, executor)
0
>>> out
tensor([[4., 6.]])
>>> aclnnMoeTokenPermuteGradGetWorkspaceSize(grad, indices, 0, False, out)
(161002, 0, None)
>>> aclGetRecentErrMsg()
'aclnnMoeTokenPermuteGrad: numTopk must be in 1..512; got 0'
"""

from moeroute.aclnn.chips import set_chip as set_chip
from moeroute.aclnn.core import Executor as Executor
from moeroute.aclnn.core import aclGetRecentErrMsg as aclGetRecentErrMsg
from moeroute.aclnn.core import set_ub_bytes as set_ub_bytes
from moeroute.aclnn.experts import aclnnMoeComputeExpertTokens as aclnnMoeComputeExpertTokens
from moeroute.aclnn.experts import (
    aclnnMoeComputeExpertTokensGetWorkspaceSize as aclnnMoeComputeExpertTokensGetWorkspaceSize,
)
from moeroute.aclnn.experts import aclnnMoeReRouting as aclnnMoeReRouting
from moeroute.aclnn.experts import aclnnMoeReRoutingGetWorkspaceSize as aclnnMoeReRoutingGetWorkspaceSize
from moeroute.aclnn.experts import aclnnMoeUpdateExpert as aclnnMoeUpdateExpert
from moeroute.aclnn.experts import aclnnMoeUpdateExpertGetWorkspaceSize as aclnnMoeUpdateExpertGetWorkspaceSize
from moeroute.aclnn.finalize_routing import aclnnMoeFinalizeRouting as aclnnMoeFinalizeRouting
from moeroute.aclnn.finalize_routing import (
    aclnnMoeFinalizeRoutingGetWorkspaceSize as aclnnMoeFinalizeRoutingGetWorkspaceSize,
)
from moeroute.aclnn.finalize_routing import aclnnMoeFinalizeRoutingV2 as aclnnMoeFinalizeRoutingV2
from moeroute.aclnn.finalize_routing import (
    aclnnMoeFinalizeRoutingV2GetWorkspaceSize as aclnnMoeFinalizeRoutingV2GetWorkspaceSize,
)
from moeroute.aclnn.finalize_routing import aclnnMoeFinalizeRoutingV2Grad as aclnnMoeFinalizeRoutingV2Grad
from moeroute.aclnn.finalize_routing import (
    aclnnMoeFinalizeRoutingV2GradGetWorkspaceSize as aclnnMoeFinalizeRoutingV2GradGetWorkspaceSize,
)
from moeroute.aclnn.finalize_routing import aclnnMoeFinalizeRoutingV3 as aclnnMoeFinalizeRoutingV3
from moeroute.aclnn.finalize_routing import (
    aclnnMoeFinalizeRoutingV3GetWorkspaceSize as aclnnMoeFinalizeRoutingV3GetWorkspaceSize,
)
from moeroute.aclnn.finalize_routing import aclnnMoeFinalizeRoutingV4 as aclnnMoeFinalizeRoutingV4
from moeroute.aclnn.finalize_routing import (
    aclnnMoeFinalizeRoutingV4GetWorkspaceSize as aclnnMoeFinalizeRoutingV4GetWorkspaceSize,
)
from moeroute.aclnn.gating import aclnnMoeFusedTopk as aclnnMoeFusedTopk
from moeroute.aclnn.gating import aclnnMoeFusedTopkGetWorkspaceSize as aclnnMoeFusedTopkGetWorkspaceSize
from moeroute.aclnn.gating import aclnnMoeGatingTopK as aclnnMoeGatingTopK
from moeroute.aclnn.gating import aclnnMoeGatingTopKBackward as aclnnMoeGatingTopKBackward
from moeroute.aclnn.gating import (
    aclnnMoeGatingTopKBackwardGetWorkspaceSize as aclnnMoeGatingTopKBackwardGetWorkspaceSize,
)
from moeroute.aclnn.gating import aclnnMoeGatingTopKGetWorkspaceSize as aclnnMoeGatingTopKGetWorkspaceSize
from moeroute.aclnn.gating import aclnnMoeGatingTopKSoftmax as aclnnMoeGatingTopKSoftmax
from moeroute.aclnn.gating import aclnnMoeGatingTopKSoftmaxGetWorkspaceSize as aclnnMoeGatingTopKSoftmaxGetWorkspaceSize
from moeroute.aclnn.gating import aclnnMoeGatingTopKSoftmaxV2 as aclnnMoeGatingTopKSoftmaxV2
from moeroute.aclnn.gating import (
    aclnnMoeGatingTopKSoftmaxV2GetWorkspaceSize as aclnnMoeGatingTopKSoftmaxV2GetWorkspaceSize,
)
from moeroute.aclnn.gating import aclnnMoeGatingTopKV2 as aclnnMoeGatingTopKV2
from moeroute.aclnn.gating import aclnnMoeGatingTopKV2GetWorkspaceSize as aclnnMoeGatingTopKV2GetWorkspaceSize
from moeroute.aclnn.init_routing import aclnnMoeInitRouting as aclnnMoeInitRouting
from moeroute.aclnn.init_routing import aclnnMoeInitRoutingGetWorkspaceSize as aclnnMoeInitRoutingGetWorkspaceSize
from moeroute.aclnn.init_routing import aclnnMoeInitRoutingV2 as aclnnMoeInitRoutingV2
from moeroute.aclnn.init_routing import aclnnMoeInitRoutingV2GetWorkspaceSize as aclnnMoeInitRoutingV2GetWorkspaceSize
from moeroute.aclnn.init_routing import aclnnMoeInitRoutingV2Grad as aclnnMoeInitRoutingV2Grad
from moeroute.aclnn.init_routing import (
    aclnnMoeInitRoutingV2GradGetWorkspaceSize as aclnnMoeInitRoutingV2GradGetWorkspaceSize,
)
from moeroute.aclnn.permute import aclnnMoeTokenPermute as aclnnMoeTokenPermute
from moeroute.aclnn.permute import aclnnMoeTokenPermuteGetWorkspaceSize as aclnnMoeTokenPermuteGetWorkspaceSize
from moeroute.aclnn.permute import aclnnMoeTokenPermuteGrad as aclnnMoeTokenPermuteGrad
from moeroute.aclnn.permute import aclnnMoeTokenPermuteGradGetWorkspaceSize as aclnnMoeTokenPermuteGradGetWorkspaceSize
from moeroute.aclnn.permute import aclnnMoeTokenPermuteWithEp as aclnnMoeTokenPermuteWithEp
from moeroute.aclnn.permute import (
    aclnnMoeTokenPermuteWithEpGetWorkspaceSize as aclnnMoeTokenPermuteWithEpGetWorkspaceSize,
)
from moeroute.aclnn.permute import aclnnMoeTokenPermuteWithEpGrad as aclnnMoeTokenPermuteWithEpGrad
from moeroute.aclnn.permute import (
    aclnnMoeTokenPermuteWithEpGradGetWorkspaceSize as aclnnMoeTokenPermuteWithEpGradGetWorkspaceSize,
)
from moeroute.aclnn.permute import aclnnMoeTokenPermuteWithRoutingMap as aclnnMoeTokenPermuteWithRoutingMap
from moeroute.aclnn.permute import (
    aclnnMoeTokenPermuteWithRoutingMapGetWorkspaceSize as aclnnMoeTokenPermuteWithRoutingMapGetWorkspaceSize,
)
from moeroute.aclnn.permute import aclnnMoeTokenPermuteWithRoutingMapGrad as aclnnMoeTokenPermuteWithRoutingMapGrad
from moeroute.aclnn.permute import (
    aclnnMoeTokenPermuteWithRoutingMapGradGetWorkspaceSize as aclnnMoeTokenPermuteWithRoutingMapGradGetWorkspaceSize,
)
from moeroute.aclnn.quantized_routing import aclnnMoeInitRoutingQuant as aclnnMoeInitRoutingQuant
from moeroute.aclnn.quantized_routing import (
    aclnnMoeInitRoutingQuantGetWorkspaceSize as aclnnMoeInitRoutingQuantGetWorkspaceSize,
)
from moeroute.aclnn.quantized_routing import aclnnMoeInitRoutingQuantV2 as aclnnMoeInitRoutingQuantV2
from moeroute.aclnn.quantized_routing import (
    aclnnMoeInitRoutingQuantV2GetWorkspaceSize as aclnnMoeInitRoutingQuantV2GetWorkspaceSize,
)
from moeroute.aclnn.quantized_routing import aclnnMoeInitRoutingV3 as aclnnMoeInitRoutingV3
from moeroute.aclnn.quantized_routing import (
    aclnnMoeInitRoutingV3GetWorkspaceSize as aclnnMoeInitRoutingV3GetWorkspaceSize,
)
from moeroute.aclnn.unpermute import aclnnMoeTokenUnpermute as aclnnMoeTokenUnpermute
from moeroute.aclnn.unpermute import aclnnMoeTokenUnpermuteGetWorkspaceSize as aclnnMoeTokenUnpermuteGetWorkspaceSize
from moeroute.aclnn.unpermute import aclnnMoeTokenUnpermuteGrad as aclnnMoeTokenUnpermuteGrad
from moeroute.aclnn.unpermute import (
    aclnnMoeTokenUnpermuteGradGetWorkspaceSize as aclnnMoeTokenUnpermuteGradGetWorkspaceSize,
)
from moeroute.aclnn.unpermute import aclnnMoeTokenUnpermuteWithEp as aclnnMoeTokenUnpermuteWithEp
from moeroute.aclnn.unpermute import (
    aclnnMoeTokenUnpermuteWithEpGetWorkspaceSize as aclnnMoeTokenUnpermuteWithEpGetWorkspaceSize,
)
from moeroute.aclnn.unpermute import aclnnMoeTokenUnpermuteWithEpGrad as aclnnMoeTokenUnpermuteWithEpGrad
from moeroute.aclnn.unpermute import (
    aclnnMoeTokenUnpermuteWithEpGradGetWorkspaceSize as aclnnMoeTokenUnpermuteWithEpGradGetWorkspaceSize,
)
from moeroute.aclnn.unpermute import aclnnMoeTokenUnpermuteWithRoutingMap as aclnnMoeTokenUnpermuteWithRoutingMap
from moeroute.aclnn.unpermute import (
    aclnnMoeTokenUnpermuteWithRoutingMapGetWorkspaceSize as aclnnMoeTokenUnpermuteWithRoutingMapGetWorkspaceSize,
)
from moeroute.aclnn.unpermute import (
    aclnnMoeTokenUnpermuteWithRoutingMapGrad as aclnnMoeTokenUnpermuteWithRoutingMapGrad,
)
from moeroute.aclnn.unpermute import (
    aclnnMoeTokenUnpermuteWithRoutingMapGradGetWorkspaceSize as aclnnMoeTokenUnpermuteWithRoutingMapGradGetWorkspaceSize,  # noqa: E501
)
